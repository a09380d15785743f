"""AugMix views: every operation is Pillow's to the bit, and a view depends on its image and its numbers alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torch import Tensor

from fedshift.blocks import augmix
from fedshift.blocks.augmix import CHAINS, DEPTH, NUMBERS, OPERATIONS, layers, operate, views, weights
from fedshift.core import rng
from fedshift.errors import UserError

SHAPES = [(3, 32, 32), (1, 28, 28), (1, 8, 8), (3, 33, 20), (3, 20, 33)]
LEVELS = [*(k / 10 for k in range(101)), *np.random.default_rng(0).uniform(0.1, 10.0, 59).tolist()]
LARGEST = 1.0 - 2.0**-24  # the largest number rng.uniform draws


def pictures(count: int, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Bytes of several kinds: noise, few levels, smooth with a black frame, one colour, and dark with a light spot."""
    draw = np.random.default_rng(seed)
    channels, height, width = shape
    made = []
    for i in range(count):
        if i % 5 == 0:
            image = draw.integers(0, 256, shape)
        elif i % 5 == 1:
            image = draw.choice(draw.integers(0, 256, 3), shape)
        elif i % 5 == 2:
            ramp = np.linspace(0, draw.uniform(1, 6), height)[:, None] + np.linspace(0, draw.uniform(1, 6), width)
            image = np.stack([draw.integers(30, 120) + 60 * np.sin(ramp + c) for c in range(channels)]).clip(0)
            image[:, :1] = image[:, :, -1:] = 0
        elif i % 5 == 3:
            image = np.broadcast_to(draw.integers(0, 256, (channels, 1, 1)), shape)
        else:
            image = draw.integers(20, 60, shape)
            image[:, height // 2, width // 2] = 250
        made.append(torch.from_numpy(np.ascontiguousarray(image.astype(np.uint8))))
    return torch.stack(made)


def to_pillow(image: Tensor) -> Image.Image:
    array = image.numpy()
    return Image.fromarray(array[0] if len(array) == 1 else np.ascontiguousarray(array.transpose(1, 2, 0)))


def from_pillow(image: Image.Image) -> Tensor:
    array = np.array(image)
    return torch.from_numpy(array[None] if array.ndim == 2 else np.ascontiguousarray(array.transpose(2, 0, 1)))


def by_pillow(image: Image.Image, name: str, level: float, sign: int) -> Image.Image:
    """AugMix's operation of that name as its authors write it, but for the draw of the sign."""
    width, height = image.size

    def affine(*matrix: float) -> Image.Image:
        return image.transform((width, height), Image.Transform.AFFINE, matrix, resample=Image.Resampling.NEAREST)

    match name:
        case "rotate":
            return image.rotate(sign * int(level * 30 / 10), resample=Image.Resampling.NEAREST)
        case "shear-x":
            return affine(1, sign * (level * 0.3 / 10), 0, 0, 1, 0)
        case "shear-y":
            return affine(1, 0, 0, sign * (level * 0.3 / 10), 1, 0)
        case "translate-x":
            return affine(1, 0, sign * int(level * (width / 3) / 10), 0, 1, 0)
        case "translate-y":
            return affine(1, 0, 0, 0, 1, sign * int(level * (height / 3) / 10))
        case "autocontrast":
            return ImageOps.autocontrast(image)
        case "equalize":
            return ImageOps.equalize(image)
        case "solarize":
            return ImageOps.solarize(image, 256 - int(level * 256 / 10))
        case "posterize":
            bits = 4 - int(level * 4 / 10)
            return ImageOps.posterize(image, bits) if bits else image.point([0] * 256 * len(image.getbands()))
    raise AssertionError(name)


def slow_layers(image: Tensor, numbers: list[float], severity: float, flip: bool) -> Tensor:
    """One view's layers, one image and one operation at a time."""
    _, height, width = image.shape
    rows, columns = max(1, height // 8), max(1, width // 8)
    padded = np.pad(image.numpy(), ((0, 0), (rows, rows), (columns, columns)))
    top, left = int(numbers[0] * (2 * rows + 1)), int(numbers[1] * (2 * columns + 1))
    cropped = padded[:, top : top + height, left : left + width]
    start = torch.from_numpy((cropped[:, :, ::-1] if flip and numbers[2] >= 0.5 else cropped).copy())
    result = [start]
    for chain in range(CHAINS):
        picture = to_pillow(start)
        for step in range(int(numbers[7 + chain] * 3) + 1):
            at = 10 + (chain * DEPTH + step) * 3
            name = OPERATIONS[int(numbers[at] * 9)]
            level = numbers[at + 1] * (severity - 0.1) + 0.1
            picture = by_pillow(picture, name, level, 1 if numbers[at + 2] < 0.5 else -1)
        result.append(from_pillow(picture))
    return torch.stack(result)


def slow_view(image: Tensor, numbers: list[float], severity: float, flip: bool) -> Tensor:
    """One view in float64."""
    start, *chains = slow_layers(image, numbers, severity, flip).double() / 255.0
    shares = -np.log(numbers[3:6])
    mixture = sum(float(share) * chain for share, chain in zip(shares / shares.sum(), chains, strict=True))
    return numbers[6] * start + (1.0 - numbers[6]) * mixture


def uniform(count: int, seed: int = 0, views: int | None = None) -> Tensor:
    return rng.uniform(seed, torch.arange(count), (NUMBERS,) if views is None else (views, NUMBERS))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_are_pillows(name: str, shape: tuple[int, ...]) -> None:
    images = pictures(len(LEVELS) * 2, shape)
    levels = [level for level in LEVELS for _ in range(2)]
    signs = [1, -1] * len(LEVELS)
    for shift in range(2):  # every level meets two kinds of picture
        images = images.roll(shift, 0)
        operation = torch.full((len(images),), OPERATIONS.index(name))
        result = operate(images, operation, torch.tensor(levels, dtype=torch.float64), torch.tensor(signs))
        assert result.dtype == torch.uint8
        for image, level, sign, got in zip(images, levels, signs, result, strict=True):
            expected = from_pillow(by_pillow(to_pillow(image), name, level, sign))
            assert torch.equal(got, expected), (level, sign)


@pytest.mark.parametrize("shape", [(1, 32, 32), (1, 28, 28), (1, 20, 33), (1, 224, 224)], ids=str)
def test_every_angle_and_many_shears_sample_pillows_pixels(shape: tuple[int, ...]) -> None:
    image = pictures(1, shape)
    angles = [(0, (d + 0.5) / 3, s) for d in range(30) for s in (1, -1)] + [(0, 10.0, 1), (0, 10.0, -1)]
    shears = [(k, float(level), 1) for k in (1, 2) for level in np.random.default_rng(1).uniform(-10, 10, 150)]
    operation, level, sign = (torch.tensor(t) for t in zip(*angles, *shears, strict=True))
    result = operate(image.expand(len(level), -1, -1, -1), operation, level, sign)
    for k, got in enumerate(result):
        name = OPERATIONS[int(operation[k])]
        assert torch.equal(got, from_pillow(by_pillow(to_pillow(image[0]), name, float(level[k]), int(sign[k]))))


def test_mixed_operations_keep_their_places() -> None:
    images = pictures(90, (3, 16, 16))
    operation = rng.integers(0, torch.arange(90), len(OPERATIONS))
    level, sign = torch.linspace(0.1, 9.9, 90, dtype=torch.float64), torch.where(torch.arange(90) % 2 == 0, 1.0, -1.0)
    together = operate(images, operation, level, sign)
    for i in range(90):
        one = slice(i, i + 1)
        assert torch.equal(together[one], operate(images[one], operation[one], level[one], sign[one]))


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 5, 9), (2, 33, 20)], ids=str)
@pytest.mark.parametrize("flip", [True, False])
def test_crop_and_flip_against_plain_slices(shape: tuple[int, ...], flip: bool) -> None:
    images, draws = pictures(60, shape), uniform(60)
    result = layers(images, draws, flip=flip)[0]
    _, height, width = shape
    rows, columns = max(1, height // 8), max(1, width // 8)
    seen = set()
    for image, numbers, got in zip(images, draws.tolist(), result, strict=True):
        top, left = int(numbers[0] * (2 * rows + 1)), int(numbers[1] * (2 * columns + 1))
        mirrored = flip and numbers[2] >= 0.5
        padded = np.pad(image.numpy(), ((0, 0), (rows, rows), (columns, columns)))
        expected = padded[:, top : top + height, left : left + width]
        assert np.array_equal(got.numpy(), expected[:, :, ::-1] if mirrored else expected)
        seen.add(mirrored)
    assert seen == ({True, False} if flip else {False})


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (3, 20, 33)], ids=str)
@pytest.mark.parametrize(("severity", "flip"), [(1.0, True), (3.0, False), (10.0, True)])
def test_views_against_a_slow_reference(shape: tuple[int, ...], severity: float, flip: bool) -> None:
    n, count = 10, 12
    images, draws = pictures(n, shape, seed=3), uniform(n, 5, count)
    bytes_ = layers(images.repeat_interleave(count, 0), draws.flatten(0, 1), severity, flip)
    result = views(images.double() / 255.0, draws, severity, flip)
    single = views(images.float() / 255.0, draws, severity, flip)
    for i in range(n):
        for j in range(count):
            numbers = draws[i, j].tolist()
            assert torch.equal(bytes_[:, i * count + j], slow_layers(images[i], numbers, severity, flip))
            expected = slow_view(images[i], numbers, severity, flip)
            torch.testing.assert_close(result[i, j], expected, rtol=0.0, atol=1e-6)
            torch.testing.assert_close(single[i, j].double(), expected, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_view_does_not_depend_on_the_batch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x, draws = pictures(12, (3, 16, 16)).to(dtype) / 255.0, uniform(12, 1, 9)
    whole = views(x, draws, 5.0)
    order = torch.tensor([7, 2, 2, 11, 0])
    assert torch.equal(views(x[order], draws[order], 5.0), whole[order])
    assert torch.equal(views(x, draws.flip(1), 5.0), whole.flip(1))
    assert torch.equal(views(x[4:5], draws[4:5, 3:4], 5.0), whole[4:5, 3:4])
    for values in (1, 7 * 3 * 16 * 16, 50 * 3 * 16 * 16):
        monkeypatch.setattr("fedshift.blocks.augmix._BLOCK_VALUES", values)
        assert torch.equal(views(x, draws, 5.0), whole)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 12, 9)], ids=str)
def test_shape_dtype_and_range(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.cat((pictures(10, shape), torch.full((2, *shape), 255, dtype=torch.uint8))).to(dtype) / 255.0
    result = views(x, uniform(12, 2, 20), 10.0)
    assert result.shape == (12, 20, *shape)
    assert result.dtype == dtype
    assert 0.0 <= float(result.min()) <= float(result.max()) <= 1.0
    assert views(x, uniform(12, 2, 0)).shape == (12, 0, *shape)
    assert views(x[:0], uniform(0, 2, 4)).shape == (0, 4, *shape)


def test_values_are_rounded_to_bytes_first() -> None:
    images, draws = pictures(5, (3, 8, 8)), uniform(5, 0, 4)
    x = images.double() / 255.0
    noise = torch.rand(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) - 0.5
    assert torch.equal(views((x + noise * 0.9 / 255.0), draws), views(x, draws))
    strided = x.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(views(strided, draws), views(x, draws))


@pytest.mark.parametrize("number", [0.0, LARGEST, 1.0 - 2.0**-53])
def test_extreme_numbers(number: float) -> None:
    draws = torch.full((2, 1, NUMBERS), number, dtype=torch.float64)
    result = views(pictures(2, (1, 16, 16)).double() / 255.0, draws, 10.0)
    assert bool(result.isfinite().all())
    torch.testing.assert_close(weights(draws[:, 0]).sum(0), torch.ones(2))


def test_operations_and_depths_are_equally_frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def spy(images: Tensor, operation: Tensor, level: Tensor, sign: Tensor) -> Tensor:
        calls.append((operation, level, sign))
        return images

    monkeypatch.setattr(augmix, "operate", spy)
    m = 6000
    layers(torch.zeros(m, 1, 8, 8, dtype=torch.uint8), uniform(m, 4), 7.0)
    assert len(calls) == DEPTH
    for step, (operation, level, sign) in enumerate(calls):
        chains = m * CHAINS * (DEPTH - step) / DEPTH
        assert abs(len(operation) - chains) < 4 * (m * CHAINS) ** 0.5 / 2
        for count in operation.bincount(minlength=len(OPERATIONS)).tolist():
            assert abs(count - len(operation) / 9) < 4 * (len(operation) / 9) ** 0.5
        assert 0.1 <= float(level.min()) < 0.12
        assert 6.98 < float(level.max()) < 7.0
        assert abs(float(level.mean()) - 3.55) < 0.1
        assert abs(float(sign.mean())) < 0.05
        assert sign.abs().eq(1).all()


def test_weights_have_the_moments_of_their_distribution() -> None:
    share, *rest = weights(uniform(40_000, 6)).double()
    assert abs(float(share.mean()) - 1 / 2) < 0.01
    assert abs(float(share.var()) - 1 / 12) < 0.005
    for weight in rest:
        proportion = weight / (1.0 - share)
        assert abs(float(proportion.mean()) - 1 / 3) < 0.01
        assert abs(float(proportion.square().mean()) - 1 / 6) < 0.01


@pytest.mark.parametrize("severity", [0.0, 10.5, float("nan")])
def test_severities_out_of_range_are_refused(severity: float) -> None:
    with pytest.raises(UserError, match=r"severity of AugMix must be in 0\.1\.\.10"):
        views(torch.zeros(1, 1, 8, 8), uniform(1, 0, 2), severity)


def test_a_wrong_number_of_draws_is_refused() -> None:
    for draws in (uniform(2), uniform(3, 0, 4), uniform(2, 0, 4)[..., :-1]):
        with pytest.raises(UserError, match="views of 2 images need"):
            views(torch.zeros(2, 1, 8, 8), draws)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("severity", [1.0, 10.0])
def test_cuda_equals_cpu(shape: tuple[int, ...], severity: float) -> None:
    images, draws = pictures(40, shape), uniform(40, 7, 32)
    repeated, numbers = images.repeat_interleave(32, 0), draws.flatten(0, 1)
    on_gpu = layers(repeated.cuda(), numbers.cuda(), severity)
    assert torch.equal(on_gpu.cpu(), layers(repeated, numbers, severity))
    x = images.float() / 255.0
    result = views(x.cuda(), draws.cuda(), severity)
    torch.testing.assert_close(result.cpu(), views(x, draws, severity), rtol=0.0, atol=1e-6)
    order = torch.tensor([3, 30, 3, 17])
    assert torch.equal(views(x[order].cuda(), draws[order].cuda(), severity), result[order.cuda()])
