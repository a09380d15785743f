"""The optimisers are torch's, step by step; nothing is changed in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fedshift.core.optim import SGD, Adam, clip_by_norm
from fedshift.core.tree import Tensors
from fedshift.errors import UserError

Torch = Callable[[list[Tensor]], torch.optim.Optimizer]

RULES: dict[str, tuple[Any, Torch]] = {
    "sgd": (SGD(lr=0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "sgd momentum": (SGD(lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "sgd decay": (SGD(lr=0.1, weight_decay=0.3), lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.3)),
    "sgd both": (
        SGD(lr=0.1, momentum=0.5, weight_decay=0.3),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.5, weight_decay=0.3),
    ),
    "adam": (Adam(lr=0.05), lambda p: torch.optim.Adam(p, 0.05)),
    "adam decay": (
        Adam(lr=0.05, beta1=0.8, beta2=0.95, eps=1e-3, weight_decay=0.3),
        lambda p: torch.optim.Adam(p, 0.05, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.3),
    ),
}


def start() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    shapes = {"w": (3, 2), "b": (3,), "s": ()}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def slope(tensors: Tensors) -> Tensors:
    """A gradient that depends on where one is, in every entry differently."""
    return {name: leaf.sin() * 3 + leaf.cos() for name, leaf in tensors.items()}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_ten_steps_are_torchs(rule: str, scale: float) -> None:
    ours, make = RULES[rule]
    theirs = {name: leaf.clone().requires_grad_() for name, leaf in start().items()}
    optimiser = make(list(theirs.values()))
    for group in optimiser.param_groups:
        group["lr"] *= scale
    here = start()
    memory = ours.memory(here)
    for _ in range(10):
        for name, grad in slope({n: t.detach() for n, t in theirs.items()}).items():
            theirs[name].grad = grad
        optimiser.step()
        here, memory = ours.update(here, slope(here), memory, torch.tensor(scale, dtype=torch.float64))
        for name, leaf in here.items():
            assert torch.allclose(leaf, theirs[name], rtol=0, atol=1e-12), name
    assert not torch.allclose(here["w"], start()["w"], atol=0.1)


@pytest.mark.parametrize("rule", RULES)
def test_arguments_are_not_changed_and_memory_keeps_its_names(rule: str) -> None:
    ours = RULES[rule][0]
    here, grads = start(), slope(start())
    memory = {name: leaf + 0.5 for name, leaf in ours.memory(here).items()}
    before = [{n: t.clone() for n, t in tensors.items()} for tensors in (here, grads, memory)]
    moved, kept = ours.update(here, grads, memory, 1.0)
    for tensors, copies in zip((here, grads, memory), before, strict=True):
        assert all(torch.equal(tensors[name], copy) for name, copy in copies.items())
    assert moved.keys() == here.keys()
    assert kept.keys() == memory.keys()  # a stacked state must not change its structure from step to step
    assert {n: (t.shape, t.dtype) for n, t in kept.items()} == {n: (t.shape, t.dtype) for n, t in memory.items()}


def test_a_rate_of_zero_moves_nothing() -> None:
    for rule in (SGD(lr=0.0, momentum=0.9, weight_decay=1.0), Adam(lr=0.0)):
        moved, _ = rule.update(start(), slope(start()), rule.memory(start()), 1.0)
        assert all(torch.equal(moved[name], leaf) for name, leaf in start().items())


@pytest.mark.parametrize("rule", [SGD, Adam])
@pytest.mark.parametrize("value", [-0.1, float("nan")])
def test_rates_that_cannot_be_meant(rule: type[SGD] | type[Adam], value: float) -> None:
    with pytest.raises(UserError, match="lr must not be negative"):
        rule(lr=value)
    with pytest.raises(UserError, match="weight-decay must not be negative"):
        rule(weight_decay=value)


@pytest.mark.parametrize("limit", [1e-3, 1.0, 5.0, 1e3])
def test_clipping_is_torchs(limit: float) -> None:
    grads = slope(start())
    theirs = [torch.zeros_like(grad, requires_grad=True) for grad in grads.values()]
    for leaf, grad in zip(theirs, grads.values(), strict=True):
        leaf.grad = grad.clone()
    torch.nn.utils.clip_grad_norm_(theirs, limit)
    ours = clip_by_norm(grads, limit)
    for leaf, name in zip(theirs, grads, strict=True):
        assert leaf.grad is not None
        assert torch.allclose(ours[name], leaf.grad, rtol=0, atol=1e-12)
    assert all(torch.equal(grad, again) for grad, again in zip(grads.values(), slope(start()).values(), strict=True))


def test_clipping_leaves_small_and_zero_gradients_as_they_are() -> None:
    small = {"w": torch.tensor([0.3, -0.4])}
    assert torch.equal(clip_by_norm(small, 1.0)["w"], small["w"])
    assert clip_by_norm({"w": torch.zeros(2)}, 1.0)["w"].tolist() == [0.0, 0.0]
