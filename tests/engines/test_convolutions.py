"""Other ways to convolve: the same numbers, derivatives of derivatives included."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, jvp, vmap

from fedshift.core.arch import Arch
from fedshift.engines.auto import compute_for
from fedshift.engines.base import Compute
from fedshift.engines.cuda import convolutions, trilinear
from fedshift.engines.cuda.convolutions import StackedConvolutions, fastest, implicit_pays
from fedshift.engines.cuda.ways import by_folding, by_patches
from fedshift.engines.vmapped.engine import COMPILE_PAYS, compiling_pays
from fedshift.methods.fedavg import FedAvg

Convolution = Callable[[Tensor, Tensor, Tensor], Tensor]
Way = Callable[[Tensor, Tensor, Tensor | None, tuple[int, int], tuple[int, int]], Tensor]
WAYS = pytest.mark.parametrize("way", [by_patches, by_folding, trilinear.convolution])
SHAPES = [
    ((3, 3), (1, 1), (1, 1)),
    ((5, 5), (1, 1), (2, 2)),
    ((3, 3), (2, 2), (1, 1)),
    ((1, 1), (2, 2), (0, 0)),
    ((7, 7), (2, 2), (3, 3)),
    ((3, 5), (2, 1), (1, 2)),
    ((6, 5), (4, 3), (2, 1)),
]


def meta_gradients(convolution: Convolution, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Of a loss after a step on another, of stacked clients: every derivative there is."""

    def inner(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        outputs: Tensor = convolution(x, weight, bias)
        return outputs.sin().square().sum()

    def outer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        gradients: tuple[Tensor, Tensor, Tensor] = grad(inner, (0, 1, 2))(x, weight, bias)
        return inner(x - 0.1 * gradients[0], weight - 0.1 * gradients[1], bias) + gradients[2].square().sum()

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
        (64, 4, {"padding": 2}, True),  # few positions
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

    def gradients(convolution: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        stacked = vmap(vmap(grad(lambda w, x: convolution(x, w).sin().sum())))
        found: tuple[Tensor, Tensor] = jvp(lambda w: stacked(w, x), (weight,), (along,))
        return found

    expected = gradients(lambda x, w: F.conv2d(x, w, None, 1, 1))
    for one, other in zip(gradients(lambda x, w: way(x, w, None, (1, 1), (1, 1))), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("kernels", "stride", "chosen"),
    [
        ((64, 32, 5, 5), (1, 1), True),
        ((64, 32, 5, 5), (2, 2), True),
        ((64, 32, 5, 5), (3, 3), False),  # zeros between outputs on the way back
        ((64, 3, 7, 7), (2, 2), True),  # pictures have no way back
        ((16, 16, 3, 3), (1, 1), True),
        ((32, 24, 3, 3), (1, 1), False),  # nor picture nor whole steps of channels
        ((64, 3, 11, 11), (4, 4), False),
        ((64, 32, 1, 1), (1, 1), False),
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
    assert fastest((1 << 16) - 1, (32, 32, 64, 64), kernels, *same, ours=True) == "implicit"
    assert fastest(1 << 16, (32, 32, 64, 64), kernels, *same, ours=True) == "groups"  # more layers than grids have


@pytest.mark.parametrize("stack", [100, 65_535])
@pytest.mark.parametrize(("side", "size", "padding"), [(64, 3, 1), (8, 5, 0), (6, 5, 0), (224, 7, 3), (32, 5, 4)])
def test_whatever_kernels_of_our_own_take_they_can_count(side: int, size: int, padding: int, stack: int) -> None:
    """A client's numbers in 32 bits, on the way there and back; only clients are counted in 64."""
    channels, kernels = 64, (64, 64, size, size)

    def taken(count: int) -> bool:
        images = (count, channels, side, side)
        return fastest(stack, images, kernels, (1, 1), (padding, padding), ours=True) == "implicit"

    most = max(count for bit in range(30) if taken(count := (1 << bit) - 1))
    for frame in (side + 2 * padding, side + size - 1):
        assert most * frame * frame * channels < 1 << 31


def test_large_strides_become_channels_where_kernels_of_our_own_like_them() -> None:
    images, alexnet = (8, 3, 64, 64), ((64, 3, 11, 11), (4, 4), (2, 2))
    assert fastest(5, images, *alexnet, ours=True) == "folded"
    assert fastest(5, images, *alexnet, ours=False) == "groups"
    assert fastest(1, images, *alexnet, ours=True) == "groups"
    assert fastest(5, images, (64, 3, 4, 4), (4, 4), (0, 0), ours=True) != "folded"  # they do not overlap
    assert fastest(5, images, (60, 3, 11, 11), (4, 4), (2, 2), ours=True) == "groups"


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU that would run kernels of our own."""
    monkeypatch.setattr(trilinear, "works", lambda _: True)
    return torch.device("cuda")


def test_kernels_of_our_own_need_leave_to_round(pretended: torch.device) -> None:
    """TF32 has ten bits."""
    assert trilinear.has_kernels(Compute(pretended, tf32=True))
    assert not trilinear.has_kernels(Compute(pretended, torch.float64, tf32=True))
    assert not trilinear.has_kernels(Compute(tf32=True))
    assert not trilinear.has_kernels(Compute(pretended))


@pytest.mark.parametrize(("name", "tf32"), [("auto", True), ("tf32", True), ("float32", False), ("float64", False)])
def test_a_gpu_rounds_to_tf32_unless_asked_otherwise(monkeypatch: pytest.MonkeyPatch, name: str, tf32: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    dtype = torch.float64 if name == "float64" else torch.float32
    assert compute_for("cuda", name) == Compute(torch.device("cuda"), dtype, tf32)
    assert compute_for("cpu", name) == Compute(dtype=dtype)


@pytest.mark.parametrize(
    ("fast", "kernels", "compiled"), [(True, 32, False), (True, 20, True), (True, 0, True), (False, 32, True)]
)
def test_long_runs_are_compiled_but_for_convolutions_that_a_compiler_would_slow_down(
    pretended: torch.device, fast: bool, kernels: int, compiled: bool
) -> None:
    first = [nn.Conv2d(1, kernels, 3)] if kernels else []
    numbers = kernels * 36 or 64
    arch = Arch.of(lambda: nn.Sequential(*first, nn.Flatten(), nn.Linear(numbers, 2)), (1, 8, 8))
    method, compute = FedAvg(arch), Compute(pretended, tf32=fast)
    assert compiling_pays(method, 10 * COMPILE_PAYS, compute) == compiled
    assert not compiling_pays(method, 0.1 * COMPILE_PAYS, compute)


def test_long_runs_of_transformers_are_compiled_whatever_convolutions_they_begin_with(pretended: torch.device) -> None:
    layers = [nn.Conv2d(1, 32, 3), nn.Flatten(), nn.Linear(32 * 36, 8), *[nn.Linear(8, 8) for _ in range(8)]]
    method = FedAvg(Arch.of(lambda: nn.Sequential(*layers, nn.Linear(8, 2)), (1, 8, 8)))
    assert compiling_pays(method, 10 * COMPILE_PAYS, Compute(pretended, tf32=True))
    assert not compiling_pays(method, 0.1 * COMPILE_PAYS, Compute(pretended, tf32=True))


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], list[tuple[int, object]]]]:
    """A GPU whose trial of kernels comes to what it is told; gives the list of threads and levels it ran in."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)

    def coming_to(reason: str) -> list[tuple[int, object]]:
        ran: list[tuple[int, object]] = []

        def tried(_: torch.device) -> str:
            ran.append((threading.get_ident(), torch._C._functorch.maybe_current_level()))
            return reason

        monkeypatch.setattr(trilinear, "_tried", tried)
        trilinear.works.cache_clear()
        return ran

    yield coming_to
    trilinear.works.cache_clear()  # what was pretended is no other test's


def asked_inside_a_transform() -> list[bool]:
    found: list[bool] = []

    def asking(x: Tensor) -> Tensor:
        assert torch._C._functorch.maybe_current_level() is not None
        found.append(trilinear.has_kernels(Compute(torch.device("cuda"), tf32=True)))
        return x

    vmap(asking)(torch.zeros(2, 3))
    return found


def test_kernels_are_tried_outside_of_any_transform(trial: Callable[[str], list[tuple[int, object]]]) -> None:
    ran = trial("")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert asked_inside_a_transform() == [True]
    ((thread, level),) = ran
    assert thread != threading.get_ident()
    assert level is None


def test_why_there_are_no_kernels_is_said_once(trial: Callable[[str], list[tuple[int, object]]]) -> None:
    ran = trial("Triton cannot run here: no compiler")
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        assert [asked_inside_a_transform() for _ in range(2)] == [[False], [False]]
    assert len(ran) == 1
    assert [str(one.message) for one in given] == [
        "our own convolution kernels are off (Triton cannot run here: no compiler); cuDNN's take their place"
    ]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5, 5), (7, 1)])
def test_normalisation_that_cudnn_refuses_is_the_formula(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], training: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, dtype=torch.double, generator=generator, requires_grad=True)
    weight, bias, mean, var = (torch.rand(shape[1], dtype=torch.double, generator=generator) + 0.5 for _ in range(4))
    real, statistics = F.batch_norm, [(mean.clone(), var.clone()) for _ in range(2)]

    def refusing(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("Expected input->is_contiguous(input->suggest_memory_format()) to be true, but got false.")

    expected = real(x, *statistics[0], weight, bias, training)
    monkeypatch.setattr(F, "batch_norm", refusing)
    found = convolutions._normalised(x, *statistics[1], weight, bias, training)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(statistics[1], statistics[0])
    gradients = [torch.autograd.grad(output.sin().sum(), x)[0] for output in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_normalisation_that_is_really_wrong_is_said() -> None:
    with pytest.raises(RuntimeError, match="running_mean"):
        convolutions._normalised(torch.randn(6, 3), torch.zeros(2), torch.ones(3), training=True)


def test_ways_are_noted() -> None:
    used: set[str] = set()
    few, many = torch.nn.Conv2d(3, 8, 5), torch.nn.Conv2d(64, 8, 5)
    with StackedConvolutions(2, used):
        few(torch.randn(2, 3, 9, 9))
        assert used == {"patches"}
        many(torch.randn(2, 64, 9, 9))
    assert used == {"patches", "groups"}


def test_grouped_and_single_images_go_on_as_they_are() -> None:
    grouped, single = torch.nn.Conv2d(4, 4, 3, groups=2), torch.nn.Conv2d(3, 4, 3)
    x, image = torch.randn(2, 4, 5, 5), torch.randn(3, 5, 5)
    with StackedConvolutions():
        assert torch.equal(grouped(x), F.conv2d(x, grouped.weight, grouped.bias, groups=2))
        assert single(image).shape == (4, 3, 3)
