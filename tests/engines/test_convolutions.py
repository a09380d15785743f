"""Other ways to convolve: the same numbers, derivatives of derivatives included."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, jvp, vmap

from fedshift.engines import convolutions, trilinear
from fedshift.engines.convolutions import StackedConvolutions, by_patches, implicit_pays
from fedshift.engines.steady import steady
from fedshift.engines.vmapped import COMPILE_PAYS, compiling_pays
from fedshift.engines.work import Compute

Convolution = Callable[[Tensor, Tensor, Tensor], Tensor]
Way = Callable[[Tensor, Tensor, Tensor | None, tuple[int, int], tuple[int, int]], Tensor]
WAYS = pytest.mark.parametrize("way", [by_patches, trilinear.convolution])
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


@WAYS
@pytest.mark.parametrize(("size", "stride", "padding"), SHAPES)
def test_meta_gradients_are_those_of_a_convolution(
    size: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int], way: Way
) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 3, 2, 9, 11), (4, 5, 2, *size), (4, 5)]
    tensors = [torch.randn(shape, dtype=torch.double, generator=generator) for shape in shapes]
    expected = meta_gradients(lambda x, w, b: F.conv2d(x, w, b, stride, padding), *tensors)
    found = meta_gradients(lambda x, w, b: way(x, w, b, stride, padding), *tensors)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@WAYS
def test_one_image_shared_by_all_clients(way: Way) -> None:
    x, weight = torch.randn(2, 3, 6, 6), torch.randn(4, 5, 3, 3, 3)
    found = vmap(lambda w: way(x, w, None, (1, 1), (1, 1)))(weight)
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
    with StackedConvolutions():
        found = layer(x)
    assert bool(asked) == chosen
    torch.testing.assert_close(found, layer(x), rtol=1e-4, atol=1e-4)


def test_patches_that_would_fill_the_memory_are_not_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    x, layer = torch.randn(2, 3, 8, 8), torch.nn.Conv2d(3, 4, 3)
    monkeypatch.setattr(convolutions, "MOST_BYTES", 3 * 2 * 36 * 27 * 4)
    monkeypatch.setattr(convolutions, "by_patches", lambda *_: "written out")
    with StackedConvolutions(3):
        assert layer(x) == "written out"
    with StackedConvolutions(4):
        assert layer(x).shape == (2, 4, 6, 6)


def test_forward_derivatives_and_short_settings() -> None:
    """What torch's own convolution can do, a method of the user's may ask for."""
    x, way, weight = (torch.randn(shape, dtype=torch.double) for shape in ((2, 3, 8, 8), (2, 3, 8, 8), (4, 3, 3, 3)))

    def loss(x: Tensor) -> Tensor:
        return F.conv2d(x, weight, padding=(1,), stride=[2]).sin().square().sum()

    expected = jvp(grad(loss), (x,), (way,))
    with StackedConvolutions():
        found = jvp(grad(loss), (x,), (way,))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@WAYS
def test_clients_of_clients_and_forward_derivatives_of_gradients(way: Way) -> None:
    x, weight = torch.randn(2, 3, 2, 3, 6, 6, dtype=torch.double), torch.randn(2, 3, 5, 3, 3, 3, dtype=torch.double)
    along = torch.randn_like(weight)

    def slopes(convolution: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        stacked = vmap(vmap(grad(lambda w, x: convolution(x, w).sin().sum())))
        found: tuple[Tensor, Tensor] = jvp(lambda w: stacked(w, x), (weight,), (along,))
        return found

    expected = slopes(lambda x, w: F.conv2d(x, w, None, 1, 1))
    for one, other in zip(slopes(lambda x, w: way(x, w, None, (1, 1), (1, 1))), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("kernels", "stride", "chosen"),
    [
        ((64, 32, 5, 5), (1, 1), True),
        ((64, 32, 5, 5), (2, 2), False),  # zeros between answers on the way back
        ((64, 3, 7, 7), (2, 2), True),  # a first layer has no way back
        ((64, 3, 11, 11), (4, 4), False),
        ((64, 32, 1, 1), (1, 1), False),
        ((64, 48, 3, 3), (1, 1), False),
        ((20, 32, 3, 3), (1, 1), False),
    ],
)
def test_what_kernels_of_our_own_are_for(kernels: tuple[int, ...], stride: tuple[int, int], chosen: bool) -> None:
    assert implicit_pays(kernels, stride) == chosen


def test_kernels_of_our_own_need_a_gpu_and_leave_to_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """TF32 has ten bits: for ``precision = "fast"`` only."""
    monkeypatch.setattr(trilinear, "has_kernels", lambda: True)
    gpu = torch.device("cuda")
    with steady(fast=True):
        assert convolutions.has_implicit(gpu, torch.float32)
        assert not convolutions.has_implicit(gpu, torch.float64)
        assert not convolutions.has_implicit(torch.device("cpu"), torch.float32)
    with steady(fast=False):
        assert not convolutions.has_implicit(gpu, torch.float32)


@pytest.mark.parametrize(
    ("fast", "convolutions", "compiled"), [(True, True, False), (True, False, True), (False, True, True)]
)
def test_long_runs_are_compiled_but_for_convolutions_that_a_compiler_would_slow_down(
    monkeypatch: pytest.MonkeyPatch, fast: bool, convolutions: bool, compiled: bool
) -> None:
    monkeypatch.setattr(trilinear, "has_kernels", lambda: True)
    method, compute = SimpleNamespace(arch=SimpleNamespace(has_convolution=convolutions)), Compute(torch.device("cuda"))
    with steady(fast):
        assert compiling_pays(method, 10 * COMPILE_PAYS, compute) == compiled  # type: ignore[arg-type]
        assert not compiling_pays(method, 0.1 * COMPILE_PAYS, compute)  # type: ignore[arg-type]


def test_the_way_taken_with_kernels_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions, "has_implicit", lambda *_: True)
    monkeypatch.setattr(trilinear, "convolution", lambda *_: "implicit")
    monkeypatch.setattr(convolutions, "by_patches", lambda *_: "patches")
    with StackedConvolutions():
        assert torch.nn.Conv2d(3, 32, 5)(torch.randn(2, 3, 12, 12)) == "implicit"
        assert torch.nn.Conv2d(32, 32, 5)(torch.randn(2, 32, 12, 12)) == "implicit"
        assert torch.nn.Conv2d(32, 32, 5)(torch.randn(2, 32, 8, 8)) == "patches"  # few places
        assert torch.nn.Conv2d(3, 20, 5)(torch.randn(2, 3, 12, 12)) == "patches"
        assert torch.nn.Conv2d(48, 32, 5)(torch.randn(2, 48, 12, 12)).shape == (2, 32, 8, 8)


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_kernels_of_our_own_in_tritons_interpreter() -> None:
    """Without a GPU, number for number; another process, because Triton reads the environment once."""
    script = Path(__file__).parent / "interpreted.py"
    done = subprocess.run([sys.executable, script], env=os.environ | {"TRITON_INTERPRET": "1"}, check=False)
    assert done.returncode == 0


@pytest.mark.skipif(not trilinear.has_kernels(), reason="needs a GPU and Triton")
@pytest.mark.parametrize("channels", [3, 32, 64])
@pytest.mark.parametrize(("size", "stride", "padding"), SHAPES)
def test_kernels_of_our_own_on_a_gpu(
    channels: int, size: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]
) -> None:
    """Answers and both gradients, as exact as TF32 is."""
    shapes = [(4, 6, channels, 15, 17), (4, 40, channels, *size)]
    x, weight = (torch.randn(shape, device="cuda", dtype=torch.double) for shape in shapes)

    def passes(convolution: Callable[[Tensor, Tensor], Tensor], x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        def there_and_back(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
            answers, back = torch.func.vjp(convolution, x, w)
            return answers, *back(answers)

        found: tuple[Tensor, ...] = vmap(there_and_back)(x, w)
        return found

    expected = passes(lambda x, w: F.conv2d(x, w, None, stride, padding), x, weight)
    found = passes(lambda x, w: trilinear.convolution(x, w, None, stride, padding), x.float(), weight.float())
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.float32
        assert float((one.double() - other).norm() / other.norm()) < 1e-3


def test_grouped_and_single_images_go_on_as_they_are() -> None:
    grouped, single = torch.nn.Conv2d(4, 4, 3, groups=2), torch.nn.Conv2d(3, 4, 3)
    x, image = torch.randn(2, 4, 5, 5), torch.randn(3, 5, 5)
    with StackedConvolutions():
        assert torch.equal(grouped(x), F.conv2d(x, grouped.weight, grouped.bias, groups=2))
        assert single(image).shape == (4, 3, 3)
