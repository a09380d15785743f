"""The weight of home: Newton's method on whole blocks gives what a loop over samples gives."""

from __future__ import annotations

import pytest
import torch

from fedshift.systems.ours.home_weight import follow, home_probability


def looped(evidence: list[float], weight: float, rate: float, least: float) -> list[float]:
    path = [weight]
    for r in evidence:
        w = weight * r / (weight * r + 1 - weight)
        weight = min(max((1 - rate) * weight + rate * w, least), 1 - least)
        path.append(weight)
    return path


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["home", "away", "both"])
def test_it_is_the_loop(rate: float, kind: str) -> None:
    random = torch.Generator().manual_seed(3)
    exponent = torch.randn(300, generator=random, dtype=torch.float64) * 2 + {"home": 2, "away": -2, "both": 0}[kind]
    evidence = exponent.exp().clamp(max=10)
    before, after = follow(evidence, torch.tensor(0.5), rate, 0.02)
    expected = torch.tensor(looped(evidence.tolist(), 0.5, rate, 0.02), dtype=torch.float64)
    assert torch.allclose(torch.cat([before, after[None]]), expected, atol=1e-12)


def test_chunks_of_any_size_agree() -> None:
    evidence = torch.rand(200, generator=torch.Generator().manual_seed(0)) * 4
    whole, end = follow(evidence, torch.tensor(0.5), 0.1, 0.02)
    for size in (1, 7, 64, 199):
        parts, weight = [], torch.tensor(0.5)
        for part in evidence.split(size):
            before, weight = follow(part, weight, 0.1, 0.02)
            parts.append(before)
        assert torch.allclose(torch.cat(parts), whole, atol=1e-13)
        assert torch.allclose(weight, end, atol=1e-13)


def test_no_samples_leave_it_where_it_is() -> None:
    before, after = follow(torch.zeros(0), torch.tensor(0.3), 0.1, 0.02)
    assert len(before) == 0
    assert float(after) == pytest.approx(0.3)


def test_certain_weights_stay() -> None:
    evidence = torch.tensor([0.1, 5.0])
    assert home_probability(evidence, torch.zeros(2)).tolist() == [0, 0]
    assert home_probability(evidence, torch.ones(2)).tolist() == pytest.approx([1, 1])
