"""Weighing two heads: the history without a loop, slopes without autograd, Adam on one number instead of two."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from fedshift.blocks.head_mixing import agreement_slope, covariance, moving_average, search_weight

RATES = (0.0, 1e-3, 0.1, 0.3, 0.9, 1.0)
BETAS = (0.9, 0.999)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# ---- moving_average -----------------------------------------------------------------------------------------------------
def average_by_loop(values: np.ndarray, start: np.ndarray, rate: float) -> np.ndarray:
    """The definition."""
    result, mean = [], start
    for value in values:
        mean = rate * value + (1 - rate) * mean
        result.append(mean)
    return np.stack(result)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 4096, 4097, 10_000])
def test_the_moving_average_is_the_loop(count: int, rate: float) -> None:
    values, start = normal(count, 3, seed=count), normal(3, seed=1)
    expected = average_by_loop(values.numpy(), start.numpy(), rate)
    found = moving_average(values, start, rate)
    assert found.shape == (count, 3)
    assert np.abs(found.numpy() - expected).max() < 1e-12
    single = moving_average(values.float(), start.float(), rate)
    assert single.dtype == torch.float32
    assert np.abs(single.numpy() - expected).max() < 1e-4


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("count", [1, 64, 65, 500])
def test_the_moving_average_has_the_closed_form_when_the_first_value_is_its_own_history(
    count: int, rate: float
) -> None:
    """``H_n = (1 - a)^(n-1) h_1 + a sum_{i=2..n} (1 - a)^(n-i) h_i``."""
    h = normal(count, 2)
    found = moving_average(h, h[0], rate)
    for n in {1, 2, min(count, 64), count} & set(range(1, count + 1)):
        closed = (1 - rate) ** (n - 1) * h[0]
        for i in range(2, n + 1):
            closed = closed + rate * (1 - rate) ** (n - i) * h[i - 1]
        assert float((found[n - 1] - closed).abs().max()) < 1e-12


@pytest.mark.parametrize("rate", RATES)
def test_the_moving_average_goes_on_where_it_stopped(rate: float) -> None:
    values, start = normal(200, 4), normal(4, seed=1)
    whole = moving_average(values, start, rate)
    for cut in (1, 63, 64, 65, 199):
        first = moving_average(values[:cut], start, rate)
        rest = moving_average(values[cut:], first[-1], rate)
        assert float((torch.cat([first, rest]) - whole).abs().max()) < 1e-12


def test_the_moving_average_at_its_ends() -> None:
    values, start = normal(300, 2), normal(2, seed=1)
    assert torch.equal(moving_average(values, start, 1.0), values)  # no memory at all
    assert torch.equal(moving_average(values, start, 0.0), start.expand(300, 2))  # nothing but memory


# ---- slopes -------------------------------------------------------------------------------------------------------------
def entropy_of(logits: Tensor) -> Tensor:
    p = logits.exp() / logits.exp().sum(-1, keepdim=True)
    return -(p * p.log()).sum(-1)


def agreement_of(a: Tensor, b: Tensor) -> Tensor:
    p, q = (x.exp() / x.exp().sum(-1, keepdim=True) for x in (a, b))
    return (p * q).sum(-1) / ((p * p).sum(-1).sqrt() * (q * q).sum(-1).sqrt())


def by_differences(function: Callable[[Tensor], Tensor], at: Tensor, step: float = 1e-5) -> Tensor:
    return (function(at + step) - function(at - step)) / (2 * step)


def by_autograd(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    live = at.clone().requires_grad_()
    (grad,) = torch.autograd.grad(function(live).sum(), live)
    return grad


def entropy_slope(logits: Tensor, direction: Tensor) -> Tensor:
    """As the adapter ``the`` has it."""
    return -covariance(logits, direction)


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("weight", [0.02, 0.5, 0.9])
def test_the_slope_of_the_entropy(scale: float, weight: float) -> None:
    generic, personal = scale * normal(50, 7), scale * normal(50, 7, seed=1)
    way, e = generic - personal, torch.full((50,), weight, dtype=torch.float64)

    def mixed(at: Tensor) -> Tensor:
        return entropy_of(personal + at[:, None] * way)

    found = entropy_slope(personal + e[:, None] * way, way)
    assert float((found - by_autograd(mixed, e)).abs().max()) < 1e-10
    assert float((found - by_differences(mixed, e)).abs().max()) < 1e-6 * max(1, scale**2)
    assert float(found.abs().max()) > 1e-3
    p = (personal + e[:, None] * way).softmax(1)  # minus the covariance of the logits with the way
    y = personal + e[:, None] * way
    expected = -(p * y * way).sum(1) + (p * y).sum(1) * (p * way).sum(1)
    assert float((found - expected).abs().max()) < 1e-10


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("weight", [0.02, 0.5, 0.9])
def test_the_slope_of_the_agreement(scale: float, weight: float) -> None:
    personal, generic = ([scale * normal(50, 7, seed=seed) for seed in seeds] for seeds in ((0, 1), (2, 3)))
    ways = (generic[0] - personal[0], generic[1] - personal[1])
    e = torch.full((50,), weight, dtype=torch.float64)

    def mixed(at: Tensor) -> tuple[Tensor, Tensor]:
        return personal[0] + at[:, None] * ways[0], personal[1] + at[:, None] * ways[1]

    def agreement(at: Tensor) -> Tensor:
        return agreement_of(*mixed(at))

    found = agreement_slope(mixed(e), ways)
    assert float((found - by_autograd(agreement, e)).abs().max()) < 1e-10
    assert float((found - by_differences(agreement, e)).abs().max()) < 1e-6 * max(1, scale**2)
    assert float(found.abs().max()) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0.0, 1e2, 1e4, 1e8])
def test_slopes_of_huge_and_of_no_logits_are_numbers(size: float, dtype: torch.dtype) -> None:
    a, b = size * normal(40, 5, dtype=dtype), size * normal(40, 5, seed=1, dtype=dtype)
    assert bool(entropy_slope(a, b - a).isfinite().all())
    assert bool(agreement_slope((a, b), (b - a, a - b)).isfinite().all())
    if not size:
        assert float(entropy_slope(a, b).abs().max()) == 0


# ---- search_weight ------------------------------------------------------------------------------------------------------
def two_logits(loss: Callable[[Tensor], Tensor], count: int, lr: float, steps: int) -> tuple[Tensor, Tensor]:
    """The search as the paper has it: torch's Adam on two logits for every sample, and where they end."""
    a = torch.ones(count, 2, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.Adam([a], lr=lr)
    for _ in range(steps):
        optimiser.zero_grad()
        loss(a.softmax(1)[:, 0]).sum().backward()
        optimiser.step()
    return a.detach().softmax(1)[:, 0], a.detach()


def one_number(loss: Callable[[Tensor], Tensor], count: int, lr: float, steps: int) -> Tensor:
    """The same on half of the difference of the two."""
    delta = torch.zeros(count, dtype=torch.float64)
    optimiser = torch.optim.Adam([delta], lr=lr)
    for _ in range(steps):
        e = torch.sigmoid(2 * delta)
        live = e.clone().requires_grad_()
        (slope,) = torch.autograd.grad(loss(live).sum(), live)
        delta.grad = slope * e * (1 - e)
        optimiser.step()
    return torch.sigmoid(2 * delta)


@pytest.mark.parametrize(("lr", "steps"), [(0.1, 20), (0.01, 20), (0.1, 10), (0.5, 7), (0.1, 0), (0.0, 20)])
def test_one_number_does_what_two_logits_do(lr: float, steps: int) -> None:
    generic, personal = 3 * normal(200, 6), 3 * normal(200, 6, seed=1)
    way, pull = generic - personal, normal(200, seed=2)

    def loss(e: Tensor) -> Tensor:
        return entropy_of(personal + e[:, None] * way) + pull * e

    expected, logits = two_logits(loss, 200, lr, steps)
    found = search_weight(
        lambda e: entropy_slope(personal + e[:, None] * way, way) + pull, torch.zeros_like(pull), lr, steps
    )
    start = (entropy_slope(personal + 0.5 * way, way) + pull).abs() / 4
    sound = start > 1e-5
    assert int(sound.sum()) > 190
    assert float((found - expected)[sound].abs().max()) < 1e-9
    assert float((one_number(loss, 200, lr, steps) - expected)[sound].abs().max()) < 1e-9
    assert float((logits.sum(1) - 2).abs().max()) < 1e-12  # the two move apart and never together


def steepest(lr: float, steps: int) -> float:
    """How far delta can get: the sum over steps of Adam's largest possible step (Cauchy and Schwarz)."""
    total = 0.0
    for t in range(1, steps + 1):
        ratio = sum((0.1 * BETAS[0] ** i) ** 2 / (0.001 * BETAS[1] ** i) for i in range(t))
        total += math.sqrt(ratio) * math.sqrt(1 - BETAS[1] ** t) / (1 - BETAS[0] ** t)
    return lr * total


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def worst(sign: float) -> Callable[[Tensor], Tensor]:
    """The gradients that get furthest: each larger than the one before by the ratio of Adam's two memories."""
    step = 0

    def slope(e: Tensor) -> Tensor:
        nonlocal step
        step += 1
        return sign * 1e3 * (BETAS[1] / BETAS[0]) ** step / (e * (1 - e))

    return slope


@pytest.mark.parametrize(("lr", "low", "high"), [(0.1, 0.0143, 0.9857), (0.01, 0.396, 0.604)])
def test_the_bounds_of_the_weight_are_sharp(lr: float, low: float, high: float) -> None:
    reach = steepest(lr, 20)
    assert reach / lr == pytest.approx(21.2, abs=0.05)
    assert sigmoid(-2 * reach) == pytest.approx(low, rel=0.02)
    assert sigmoid(2 * reach) == pytest.approx(high, rel=0.02)
    one = torch.zeros(1, dtype=torch.float64)
    assert float(search_weight(worst(1.0), one, lr, 20)) == pytest.approx(sigmoid(-2 * reach), rel=1e-6)
    assert float(search_weight(worst(-1.0), one, lr, 20)) == pytest.approx(sigmoid(2 * reach), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lr", [0.1, 0.01])
def test_no_gradients_leave_the_bounds(lr: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    low, high = sigmoid(-2 * steepest(lr, 20)), sigmoid(2 * steepest(lr, 20))

    def slope(e: Tensor) -> Tensor:  # of any size from 1e-12 to 1e12 and of any sign, anew in every step
        sizes = 10.0 ** (24 * torch.rand(len(e), generator=generator, dtype=torch.float64) - 12)
        return (sizes * torch.randn(len(e), generator=generator, dtype=torch.float64)).to(e.dtype)

    e = search_weight(slope, torch.zeros(5000, dtype=dtype), lr, 20)
    assert bool(e.isfinite().all())
    assert low - 1e-6 <= float(e.min()) < float(e.max()) <= high + 1e-6


def test_a_constant_pull_moves_by_the_rate_in_every_step() -> None:
    """Adam's first property, so where 20 steps lead is known: ``sigmoid(2 * 20 * lr)``."""
    for sign in (-1.0, 1.0):
        constant = search_weight(lambda e, s=sign: s / (e * (1 - e)), torch.zeros(3, dtype=torch.float64), 0.1, 20)
        assert constant.tolist() == pytest.approx([sigmoid(-sign * 4)] * 3, abs=1e-6)
    still = search_weight(torch.zeros_like, torch.zeros(3), 0.1, 20)
    assert torch.equal(still, torch.full((3,), 0.5))
