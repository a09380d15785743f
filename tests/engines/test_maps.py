"""Pooling and steps of SGD for stacked clients are torch's own, whatever computes them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, jvp, vmap

from fedshift.core.optim import SGD
from fedshift.core.tree import Tensors
from fedshift.engines.cuda import convolutions, maps
from fedshift.engines.cuda.convolutions import StackedConvolutions
from fedshift.engines.cuda.geometry import Geometry

WINDOWS = [
    ((2, 2), (2, 2), (0, 0)),
    ((3, 3), (2, 2), (1, 1)),
    ((3, 3), (2, 2), (0, 0)),
    ((3, 3), (1, 1), (1, 1)),
    ((2, 3), (1, 2), (1, 0)),
]


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


def test_steps_of_more_clients_than_a_grid_has_layers_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    rule, tensors = SGD(lr=0.5), {"w": torch.randn(4, 3, 2)}
    monkeypatch.setattr(convolutions, "MOST_STACKED", 3)
    monkeypatch.setattr(maps, "descended", None)
    with StackedConvolutions():
        found = vmap(lambda w: rule.update(w, w, {}, 1.0))(tensors)
    torch.testing.assert_close(found, vmap(lambda w: rule.update(w, w, {}, 1.0))(tensors))


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
