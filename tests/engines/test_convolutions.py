"""Other ways to convolve: the same numbers, derivatives of derivatives included."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, jvp, vmap

from fedshift.core.arch import Arch
from fedshift.engines.base import Compute
from fedshift.engines.cuda import convolutions, trilinear
from fedshift.engines.cuda.convolutions import StackedConvolutions, by_patches, fastest, implicit_pays
from fedshift.engines.cuda.geometry import Geometry, Role
from fedshift.engines.torch_flags import steady
from fedshift.engines.vmapped.engine import COMPILE_PAYS, compiling_pays
from fedshift.methods.fedavg import FedAvg

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

    monkeypatch.setattr(convolutions, "WAYS", {**convolutions.WAYS, "patches": spy})
    x, layer = torch.randn(2, channels, side, side), torch.nn.Conv2d(channels, 8, 5, **settings)  # type: ignore[arg-type]
    with StackedConvolutions():
        found = layer(x)
    assert bool(asked) == chosen
    torch.testing.assert_close(found, layer(x), rtol=1e-4, atol=1e-4)


def test_patches_that_would_fill_the_memory_are_not_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions, "MOST_NUMBERS", 3 * 2 * 36 * 27)
    assert fastest(3, (2, 3, 8, 8), (4, 3, 3, 3), (1, 1), (0, 0), ours=False) == "patches"
    assert fastest(4, (2, 3, 8, 8), (4, 3, 3, 3), (1, 1), (0, 0), ours=False) == "groups"


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
        ((64, 3, 7, 7), (2, 2), True),  # pictures have no way back
        ((32, 16, 3, 3), (2, 2), False),  # nor picture nor whole steps of channels
        ((64, 3, 11, 11), (4, 4), False),
        ((64, 32, 1, 1), (1, 1), False),
        ((64, 48, 3, 3), (1, 1), False),
        ((20, 32, 3, 3), (1, 1), False),
    ],
)
def test_what_kernels_of_our_own_are_for(
    kernels: tuple[int, int, int, int], stride: tuple[int, int], chosen: bool
) -> None:
    assert implicit_pays(kernels, stride) == chosen
    images, padding = (8, kernels[1], 32, 32), (0, 0)
    assert (fastest(5, images, kernels, stride, padding, ours=True) == "implicit") == chosen
    assert fastest(1, images, kernels, stride, padding, ours=True) != "implicit"  # one client is cuDNN's
    assert fastest(5, images, kernels, stride, padding, ours=False) != "implicit"


def test_few_places_and_huge_batches_are_not_for_kernels_of_our_own() -> None:
    kernels, same = (32, 32, 5, 5), ((1, 1), (2, 2))
    assert fastest(5, (8, 32, 4, 4), kernels, *same, ours=True) == "patches"
    assert fastest(5, (1024, 32, 224, 224), kernels, *same, ours=True) == "groups"  # more numbers than they can count


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU that would run kernels of our own."""
    monkeypatch.setattr(trilinear, "works", lambda _: True)
    return torch.device("cuda")


def test_kernels_of_our_own_need_leave_to_round(pretended: torch.device) -> None:
    """TF32 has ten bits: for ``precision = "fast"`` only."""
    with steady(fast=True):
        assert trilinear.has_kernels(pretended, torch.float32)
        assert not trilinear.has_kernels(pretended, torch.float64)
        assert not trilinear.has_kernels(torch.device("cpu"), torch.float32)
    with steady(fast=False):
        assert not trilinear.has_kernels(pretended, torch.float32)


@pytest.mark.parametrize(
    ("fast", "kernels", "compiled"), [(True, 32, False), (True, 20, True), (True, 0, True), (False, 32, True)]
)
def test_long_runs_are_compiled_but_for_convolutions_that_a_compiler_would_slow_down(
    pretended: torch.device, fast: bool, kernels: int, compiled: bool
) -> None:
    first = [nn.Conv2d(1, kernels, 3)] if kernels else []
    numbers = kernels * 36 or 64
    arch = Arch.of(lambda: nn.Sequential(*first, nn.Flatten(), nn.Linear(numbers, 2)), (1, 8, 8))
    method, compute = FedAvg(arch), Compute(pretended)
    with steady(fast):
        assert compiling_pays(method, 10 * COMPILE_PAYS, compute) == compiled
        assert not compiling_pays(method, 0.1 * COMPILE_PAYS, compute)


# Triton's interpreter (3.6) needs NumPy below 2.4
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
HAS_GPU = torch.cuda.is_available() and trilinear.works(torch.device("cuda"))


@pytest.mark.skipif(not (INTERPRETED or HAS_GPU), reason="needs a GPU, or Triton and TRITON_INTERPRET=1")
@pytest.mark.parametrize("image", [(8, 8), (9, 11), (16, 32)])  # whole tiles of rows, others, sums in parts
@pytest.mark.parametrize(("channels", "out"), [(3, 32), (32, 5), (64, 96)])
@pytest.mark.parametrize(("size", "stride", "padding"), [*SHAPES, ((2, 2), (1, 1), (2, 2))])
def test_kernels_of_our_own(
    image: tuple[int, int],
    channels: int,
    out: int,
    size: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
) -> None:
    """Each of images, kernels and answers from the other two, as exact as TF32 is."""
    from fedshift.engines.cuda.kernels import MAKERS

    geometry = Geometry(image, size, stride, padding)
    generator = torch.Generator().manual_seed(0)
    shapes = {
        Role.IMAGES: (2, 4, channels, *image),
        Role.KERNELS: (2, out, channels, *size),
        Role.ANSWERS: (2, 4, out, *geometry.places),
    }
    given = {role: torch.randn(shape, dtype=torch.double, generator=generator) for role, shape in shapes.items()}
    rounded = {role: tensor.to("cuda" if HAS_GPU else "cpu", torch.float32) for role, tensor in given.items()}
    for role, make in MAKERS.items():
        expected, found = trilinear.BY_GROUPS[role](given, geometry), make(rounded, geometry).cpu().double()
        assert float((found - expected).norm() / expected.norm()) < (1e-3 if HAS_GPU else 1e-5)


@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU and Triton")
def test_meta_gradients_by_kernels_of_our_own_in_a_captured_graph() -> None:
    shapes = [(4, 8, 32, 16, 16), (4, 64, 32, 5, 5), (4, 64)]
    tensors = [0.05 * torch.randn(shape, device="cuda") for shape in shapes]

    def work() -> tuple[Tensor, ...]:
        return meta_gradients(lambda x, w, b: trilinear.convolution(x, w, b, (1, 1), (2, 2)), *tensors)

    exact = [tensor.double() for tensor in tensors]
    expected = meta_gradients(lambda x, w, b: F.conv2d(x, w, b, 1, 2), *exact)
    with steady(fast=True):
        for _ in range(3):
            work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = work()
        graph.replay()
    for one, other in zip(found, expected, strict=True):
        assert float((one.double() - other).norm() / other.norm()) < 1e-2


def test_grouped_and_single_images_go_on_as_they_are() -> None:
    grouped, single = torch.nn.Conv2d(4, 4, 3, groups=2), torch.nn.Conv2d(3, 4, 3)
    x, image = torch.randn(2, 4, 5, 5), torch.randn(3, 5, 5)
    with StackedConvolutions():
        assert torch.equal(grouped(x), F.conv2d(x, grouped.weight, grouped.bias, groups=2))
        assert single(image).shape == (4, 3, 3)
