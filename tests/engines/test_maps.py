"""Pooling and steps of SGD for stacked clients are torch's own, whatever computes them."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, jvp, vmap

from fedshift.core.optim import SGD
from fedshift.core.tree import Tensors
from fedshift.engines.cuda import convolutions, maps, trilinear
from fedshift.engines.cuda.convolutions import StackedConvolutions
from fedshift.engines.cuda.geometry import Geometry

WINDOWS = [
    ((2, 2), (2, 2), (0, 0)),
    ((3, 3), (2, 2), (1, 1)),
    ((3, 3), (2, 2), (0, 0)),
    ((3, 3), (1, 1), (1, 1)),
    ((2, 3), (1, 2), (1, 0)),
]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
HAS_GPU = torch.cuda.is_available() and trilinear.works(torch.device("cuda"))
needs_kernels = pytest.mark.skipif(not (INTERPRETED or HAS_GPU), reason="needs a GPU, or Triton and TRITON_INTERPRET=1")


@pytest.mark.parametrize("window", WINDOWS)
def test_pooling_and_its_derivatives(window: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w, along = (torch.randn(3, 2, 2, 9, 11, dtype=torch.double, generator=generator) for _ in range(3))
    calls: list[Geometry] = []
    real = maps.max_pool
    monkeypatch.setattr(maps, "max_pool", lambda x, window: (calls.append(window), real(x, window))[1])

    def inner(x: Tensor, w: Tensor) -> Tensor:
        return F.max_pool2d(x * w.sin(), *window).cos().sum()

    def outer(x: Tensor, w: Tensor) -> Tensor:
        return F.max_pool2d(grad(inner)(x, w) * x, *window).sin().sum()

    def found() -> tuple:
        stacked = vmap(grad(outer, (0, 1)))
        return stacked(x, w), jvp(lambda x: vmap(grad(inner))(x, w), (x,), (along,))

    expected = found()
    assert not calls
    with StackedConvolutions():
        torch.testing.assert_close(found(), expected, rtol=1e-12, atol=1e-12)
    assert calls


@pytest.mark.parametrize("settings", [{"ceil_mode": True}, {"return_indices": True}, {"dilation": 2}])
def test_pooling_that_is_not_ours(settings: dict) -> None:
    x = torch.randn(2, 3, 1, 9, 9)
    expected = vmap(lambda x: F.max_pool2d(x, 2, **settings))(x)
    with StackedConvolutions():
        torch.testing.assert_close(vmap(lambda x: F.max_pool2d(x, 2, **settings))(x), expected)
        F.max_pool2d(x[0], 2)  # nobody is stacked


def _given(window: tuple, dtype: torch.dtype) -> tuple[Tensor, Geometry]:
    """Images with equals, infinities and NaN."""
    x = torch.randint(-3, 4, (3, 2, 9, 11), generator=torch.Generator().manual_seed(1)).to(dtype)
    x[0, 0, 3, 4], x[1, 1, 2, 2], x[2, 0] = torch.nan, torch.inf, -torch.inf
    return x, Geometry((9, 11), *window)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("window", WINDOWS)
def test_pooling_kernels(window: tuple, dtype: torch.dtype) -> None:
    from fedshift.engines.cuda import map_kernels

    x, geometry = _given(window, dtype)
    there = torch.device("cuda" if HAS_GPU else "cpu")
    y, flat = F.max_pool2d(x, geometry.size, geometry.stride, geometry.padding, return_indices=True)
    highest, which = map_kernels.highest(x.to(there), geometry)
    torch.testing.assert_close(highest.cpu(), y, equal_nan=True)
    assert torch.equal(which.cpu(), maps._named(flat, geometry))
    g = torch.randn(y.shape, dtype=dtype)
    pixels = torch.zeros(3, 2, 99, dtype=dtype).scatter_add(2, flat.flatten(2), g.flatten(2)).view_as(x)
    torch.testing.assert_close(map_kernels.scattered(g.to(there), which, geometry).cpu(), pixels)
    other = torch.randn_like(pixels)
    chosen = other.flatten(2).gather(2, flat.flatten(2)).view_as(g)
    assert torch.equal(map_kernels.gathered(other.to(there), which, geometry).cpu(), chosen)


@needs_kernels
@pytest.mark.parametrize("heavy", [False, True])
def test_a_step_of_descent_in_one_pass(heavy: bool) -> None:
    from fedshift.engines.cuda import map_kernels

    there = torch.device("cuda" if HAS_GPU else "cpu")
    leaf, gradient, velocity = (torch.randn(3, 50, 41) for _ in range(3))
    rate = torch.tensor([0.1, 0.2, 0.3])
    step = gradient + 5e-4 * leaf + (0.9 * velocity if heavy else 0)
    given = (leaf.to(there), gradient.to(there), velocity.to(there) if heavy else None, rate.to(there), 0.9, 5e-4)
    moved, kept = map_kernels.descended(*given)
    torch.testing.assert_close(moved.cpu(), leaf - rate[:, None, None] * step)
    assert (kept is not None) == heavy
    if kept is not None:
        torch.testing.assert_close(kept.cpu(), step)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_stacked_steps_are_those_of_every_client(momentum: float, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = SGD(lr=0.5, momentum=momentum, weight_decay=0.1)
    tensors, grads = ({"w": torch.randn(4, 3, 2), "b": torch.randn(4, 2)} for _ in range(2))
    memory = {name: torch.randn_like(leaf) for name, leaf in rule.memory(tensors).items()}
    scale = torch.tensor([1.0, 0.5, 0.25, 0.0])
    stacked = vmap(rule.update)
    expected = stacked(tensors, grads, memory, scale)
    passes: list[int] = []
    real = maps.descended
    monkeypatch.setattr(maps, "descended", lambda *given: (passes.append(1), real(*given))[1])
    with StackedConvolutions():
        torch.testing.assert_close(stacked(tensors, grads, memory, scale), expected)
        assert len(passes) == 2

        def through(tensors: Tensors, grads: Tensors, memory: Tensors, scale: Tensor) -> Tensor:
            return rule.update(tensors, grads, memory, scale)[0]["w"].square().sum()

        found = vmap(grad(through))(tensors, grads, memory, scale)  # a step that is differentiated is torch's
        alone = rule.update({"w": tensors["w"][0]}, {"w": grads["w"][0]}, {k: v[0] for k, v in memory.items()}, 1.0)
    assert len(passes) == 2
    torch.testing.assert_close(found, vmap(grad(through))(tensors, grads, memory, scale))
    torch.testing.assert_close(alone[0]["w"], expected[0]["w"][0])


def test_how_many_are_stacked_and_differentiated() -> None:
    found: list[tuple[int, int]] = []

    def look(x: Tensor) -> Tensor:
        found.append(convolutions.transforms())
        return x.sum()

    vmap(vmap(grad(grad(look))))(torch.ones(2, 3))
    assert found == [(6, 2)]


def test_convolutions_outside_of_transforms_stay_torchs() -> None:
    used: set[str] = set()
    x, weight = torch.randn(4, 2, 3, 8, 8), torch.randn(4, 8, 3, 5, 5)
    with StackedConvolutions(None, used):
        F.conv2d(x[0], weight[0])
        assert not used
        vmap(F.conv2d)(x, weight)
    assert used == {"patches"}
