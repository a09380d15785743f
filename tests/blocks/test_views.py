"""Training augmentation: against a plain reference, independent of the batch, and the same under vmap."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.func import vmap

from fedshift.blocks import views
from fedshift.engines import augment


@pytest.mark.parametrize(("channels", "height", "width"), [(3, 32, 32), (1, 16, 16), (3, 24, 8), (1, 5, 5)])
@pytest.mark.parametrize("flip", [True, False])
def test_shifted_is_a_crop_of_the_padded_image(channels: int, height: int, width: int, flip: bool) -> None:
    x, numbers = torch.rand(40, channels, height, width), torch.rand(40, augment.SHIFT_NUMBERS)
    result = augment.shifted(x, numbers, flip)
    pads = (height // 8, width // 8)
    for image, (down, right, mirror), view in zip(x, numbers.tolist(), result, strict=True):
        padded = F.pad(image, (pads[1], pads[1], pads[0], pads[0]))
        top, left = (int(number * (2 * pad + 1)) for number, pad in zip((down, right), pads, strict=True))
        expected = padded[:, top : top + height, left : left + width]
        assert torch.equal(view, expected.flip(2) if flip and mirror < 0.5 else expected)


def test_every_shift_occurs() -> None:
    x = torch.zeros(1, 1, 16, 16)
    x[0, 0, 8, 8] = 1
    numbers = torch.rand(2000, augment.SHIFT_NUMBERS)
    places = {
        divmod(int(view.flatten().argmax()), 16) for view in augment.shifted(x.expand(2000, -1, -1, -1), numbers, False)
    }
    assert places == {(row, column) for row in range(6, 11) for column in range(6, 11)}


def test_without_moves_images_are_mirrored_or_themselves() -> None:
    x, numbers = torch.rand(40, 3, 16, 16), torch.rand(40, augment.SHIFT_NUMBERS)
    mirrored = numbers[:, 2] < 0.5
    assert mirrored.any()
    assert not mirrored.all()
    expected = torch.where(mirrored[:, None, None, None], x.flip(3), x)
    assert torch.equal(augment.shifted(x, numbers, move=False), expected)


@pytest.mark.parametrize("function", [augment.shifted, views.contrastive_views])
def test_a_view_is_its_own_affair(function) -> None:  # type: ignore[no-untyped-def]
    count = augment.SHIFT_NUMBERS if function is augment.shifted else views.NUMBERS
    x, numbers = torch.rand(6, 3, 16, 16, dtype=torch.float64), torch.rand(6, count, dtype=torch.float64)
    whole = function(x, numbers)
    parts = torch.cat([function(x[:1], numbers[:1]), function(x[1:], numbers[1:])])
    stacked = vmap(function)(x.unflatten(0, (2, 3)), numbers.unflatten(0, (2, 3))).flatten(0, 1)
    assert torch.allclose(whole, parts, atol=1e-12)
    assert torch.allclose(whole, stacked, atol=1e-12)
    assert whole.min() >= 0
    assert whole.max() <= 1


def test_contrastive_views_at_their_limits() -> None:
    """All of the image, no colours changed: the image, or its mirror image."""
    x = torch.rand(3, 3, 12, 12, dtype=torch.float64)
    whole = torch.tensor([1.0, 0.5, 0.5, 0.5, 0.9, 0.5, 0.5, 0.5, 0.5, 0.9, 0.9], dtype=torch.float64).expand(3, -1)
    assert torch.allclose(views.contrastive_views(x, whole), x, atol=1e-3)
    mirrored = whole.clone()
    mirrored[:, 4] = 0.1
    assert torch.allclose(views.contrastive_views(x, mirrored), x.flip(3), atol=1e-3)
    assert torch.allclose(views.contrastive_views(x, mirrored, flip=False), x, atol=1e-3)
    gray = whole.clone()
    gray[:, 9] = 0.1
    assert views.contrastive_views(x, gray).std(1).max() < 1e-6
    changed = whole.clone()
    changed[:, 5:11] = 0.1
    assert views.contrastive_views(x, changed).sub(x).abs().max() > 0.1
    assert torch.allclose(views.contrastive_views(x, changed, colour=0.0), x, atol=1e-3)


@pytest.mark.parametrize("smallest", [0.2, 0.6, 0.9, 1.0])
def test_a_part_has_the_area_it_was_drawn_with_and_sides_that_are_not_too_long(smallest: float) -> None:
    """On ramps the slope of a view tells how much of each side it shows."""
    side, count = 32, 400
    ramp = (torch.arange(side, dtype=torch.float64) + 0.5) / side
    x = torch.stack([ramp.expand(side, side), ramp[:, None].expand(side, side)]).expand(count, -1, -1, -1)
    numbers = torch.rand(count, views.NUMBERS, dtype=torch.float64)
    view = views.contrastive_views(x, numbers, flip=False, smallest=smallest, colour=0.0)
    inside = slice(side // 4, -side // 4)  # at the rim there is nothing to interpolate with
    width = view[:, 0, inside, inside].diff(dim=2).mean((1, 2)) * side
    height = view[:, 1, inside, inside].diff(dim=1).mean((1, 2)) * side
    assert torch.allclose(width * height, smallest + (1 - smallest) * numbers[:, 0], atol=1e-6)
    assert ((width / height).log().abs() <= math.log(4 / 3) + 1e-6).all()
    assert max(width.max(), height.max()) <= 1 + 1e-9
