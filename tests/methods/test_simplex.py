"""The nearest point of the probability simplex, against a slow search and what must hold of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedshift.core import rng
from fedshift.methods.afl import projected

POINTS = {
    "inside": torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64),
    "a corner": torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64),
    "ties": torch.tensor([2.0, 2.0, -1.0, 2.0], dtype=torch.float64),
    "all equal": torch.full((7,), -3.0, dtype=torch.float64),
    "one number": torch.tensor([-5.0], dtype=torch.float64),
    "far away": torch.tensor([1e6, -1e6, 1e6 - 0.25], dtype=torch.float64),
    **{f"random {n}": rng.normal(n, torch.arange(n)).double() * 3**0.5 for n in (2, 5, 20, 101)},
    "nearly inside": 0.01 + rng.normal(4, torch.arange(100)).double() / 1000,
}


def searched(point: Tensor) -> Tensor:
    """Move all entries by the same number and cut off at zero; the number is found by halving an interval."""
    low, high = -float(point.max()) - 1, 2 - float(point.min())
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if float((point + middle).clamp(min=0).sum()) < 1 else (low, middle)
    return (point + high).clamp(min=0)


@pytest.mark.parametrize("name", POINTS)
def test_it_is_on_the_simplex_and_nearest(name: str) -> None:
    point = POINTS[name]
    found = projected(point)
    assert float(found.sum()) == pytest.approx(1, abs=1e-9)
    assert bool((found >= 0).all())
    assert torch.allclose(found, searched(point), rtol=0, atol=1e-9)
    # the way to the point makes no acute angle with the way to any corner
    corners = torch.eye(len(point), dtype=torch.float64)
    assert float(((corners - found) @ (point - found)).max()) < 1e-6


@pytest.mark.parametrize("name", POINTS)
def test_a_second_time_changes_nothing(name: str) -> None:
    once = projected(POINTS[name])
    assert torch.allclose(projected(once), once, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", POINTS)
def test_the_order_stays_and_a_common_shift_does_not_matter(name: str) -> None:
    point = POINTS[name]
    found = projected(point)
    order = rng.permutation(3, len(point))
    assert torch.allclose(projected(point[order]), found[order], rtol=0, atol=1e-9)
    assert torch.allclose(projected(point + 17.0), found, rtol=0, atol=1e-8)
    assert bool((found[point.argsort()].diff() >= 0).all())


def test_single_precision_keeps_its_type() -> None:
    found = projected(torch.tensor([0.5, 0.5, 3.0]))
    assert found.dtype == torch.float32
    assert found.tolist() == [0, 0, 1]
