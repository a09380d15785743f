"""A convolution as a product of patches: the same numbers, derivatives of derivatives included."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, jvp, vmap

from fedshift.engines import convolutions
from fedshift.engines.convolutions import PatchProducts, by_patches

Convolution = Callable[[Tensor, Tensor, Tensor], Tensor]
SHAPES = [
    ((3, 3), (1, 1), (1, 1)),
    ((5, 5), (1, 1), (2, 2)),
    ((3, 3), (2, 2), (1, 1)),
    ((1, 1), (2, 2), (0, 0)),
    ((7, 7), (2, 2), (3, 3)),
    ((3, 5), (2, 1), (1, 2)),
]


def meta_gradients(convolution: Convolution, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Of a loss after a step on another, of stacked clients: every derivative there is."""

    def inner(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        answers: Tensor = convolution(x, weight, bias)
        return answers.sin().square().sum()

    def outer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        slopes: tuple[Tensor, Tensor, Tensor] = grad(inner, (0, 1, 2))(x, weight, bias)
        return inner(x - 0.1 * slopes[0], weight - 0.1 * slopes[1], bias) + slopes[2].square().sum()

    found: tuple[Tensor, ...] = vmap(grad(outer, (0, 1, 2)))(*tensors)
    return found


@pytest.mark.parametrize(("size", "stride", "padding"), SHAPES)
def test_meta_gradients_are_those_of_a_convolution(
    size: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 3, 2, 9, 11), (4, 5, 2, *size), (4, 5)]
    tensors = [torch.randn(shape, dtype=torch.double, generator=generator) for shape in shapes]
    expected = meta_gradients(lambda x, w, b: F.conv2d(x, w, b, stride, padding), *tensors)
    found = meta_gradients(lambda x, w, b: by_patches(x, w, b, stride, padding), *tensors)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_one_image_shared_by_all_clients() -> None:
    x, weight = torch.randn(2, 3, 6, 6), torch.randn(4, 5, 3, 3, 3)
    found = vmap(lambda w: by_patches(x, w, None, (1, 1), (1, 1)))(weight)
    torch.testing.assert_close(found, vmap(lambda w: F.conv2d(x, w, padding=1))(weight), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("channels", "side", "settings", "chosen"),
    [
        (3, 32, {"padding": 2}, True),  # a small patch
        (64, 4, {"padding": 2}, True),  # few places
        (64, 32, {"padding": 2}, False),
        (3, 32, {"padding": "same"}, False),
        (3, 32, {"dilation": 2}, False),
    ],
)
def test_what_is_written_out(
    monkeypatch: pytest.MonkeyPatch, channels: int, side: int, settings: dict[str, int | str], chosen: bool
) -> None:
    asked: list[bool] = []

    def spy(*arguments: object) -> Tensor:
        asked.append(True)
        return by_patches(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(convolutions, "by_patches", spy)
    x, layer = torch.randn(2, channels, side, side), torch.nn.Conv2d(channels, 8, 5, **settings)  # type: ignore[arg-type]
    with PatchProducts():
        found = layer(x)
    assert bool(asked) == chosen
    torch.testing.assert_close(found, layer(x), rtol=1e-4, atol=1e-4)


def test_patches_that_would_fill_the_memory_are_not_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    x, layer = torch.randn(2, 3, 8, 8), torch.nn.Conv2d(3, 4, 3)
    monkeypatch.setattr(convolutions, "MOST_BYTES", 3 * 2 * 36 * 27 * 4)
    monkeypatch.setattr(convolutions, "by_patches", lambda *_: "written out")
    with PatchProducts(3):
        assert layer(x) == "written out"
    with PatchProducts(4):
        assert layer(x).shape == (2, 4, 6, 6)


def test_forward_derivatives_and_short_settings() -> None:
    """What torch's own convolution can do, a method of the user's may ask for."""
    x, way, weight = (torch.randn(shape, dtype=torch.double) for shape in ((2, 3, 8, 8), (2, 3, 8, 8), (4, 3, 3, 3)))

    def loss(x: Tensor) -> Tensor:
        return F.conv2d(x, weight, padding=(1,), stride=[2]).sin().square().sum()

    expected = jvp(grad(loss), (x,), (way,))
    with PatchProducts():
        found = jvp(grad(loss), (x,), (way,))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_grouped_and_single_images_go_on_as_they_are() -> None:
    grouped, single = torch.nn.Conv2d(4, 4, 3, groups=2), torch.nn.Conv2d(3, 4, 3)
    x, image = torch.randn(2, 4, 5, 5), torch.randn(3, 5, 5)
    with PatchProducts():
        assert torch.equal(grouped(x), F.conv2d(x, grouped.weight, grouped.bias, groups=2))
        assert single(image).shape == (4, 3, 3)
