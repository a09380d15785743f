"""Guards on numbers whose distribution is known: how often they are wrong, and how soon they are right."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedshift.core.arch import Output
from fedshift.runs.known import Known, energy_of
from fedshift.serve.guards import DRIFT, Guards, Seen
from fedshift.serve.unknown import Familiarity

CLASSES = 10
RATE = 1e-6


def population(
    count: int, seed: int, away: float = 0.0, only: int | None = None, new: bool = False
) -> tuple[Output, torch.Tensor]:
    """Features around ten class means, or around that of a new class; logits that mostly know the ten."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, CLASSES, count) if only is None else np.full(count, only)
    means = np.random.default_rng(99).normal(0, 2, (CLASSES, 16))
    centres = np.random.default_rng(98).normal(0, 2, (1, 16)) if new else means[labels]
    features = centres + draw.normal(0, 1, (count, 16)) + away
    logits = features @ means.T / 4 - (means**2).sum(1) / 8
    return Output(torch.tensor(logits), torch.tensor(features), {}, {}), torch.tensor(labels)


def known_from(count: int, seed: int = 0) -> Known:
    known = Known.of(*population(count, seed), *population(count, seed + 1))
    assert known is not None
    return known


def seen(known: Known, output: Output, answer: np.ndarray | None = None, confidence: float | None = None) -> Seen:
    strange = Familiarity(known).of(energy_of(output.logits).numpy(), output.features)
    chances = output.logits.softmax(1)
    sure, frozen = chances.amax(1).numpy(), chances.argmax(1).numpy()
    own = frozen if answer is None else answer
    return Seen(
        strange.signals, strange.unknown, frozen, sure, own, sure if confidence is None else np.full(len(own), confidence)
    )  # fmt: skip


def alarmed_after(guards: Guards, what: Seen) -> dict[str, int]:
    """The image at which each alarm goes off."""
    levels, found = guards.start(), {}
    for number in range(len(what.answer)):
        levels, begun = guards.watched(levels, Seen(*(column[number : number + 1] for column in what)))
        found |= {name: number + 1 for name in begun if name not in found}
    return found


def alarmed_in(guards: Guards, what: Seen) -> list[str]:
    """All alarms along a stream that is looked at in pieces."""
    levels, found = guards.start(), []
    for number in range(0, len(what.answer), 100):
        levels, begun = guards.watched(levels, Seen(*(column[number : number + 100] for column in what)))
        found += begun
    return found


@pytest.mark.parametrize("validation", [30, 200, 1000])
def test_ten_thousand_ordinary_images_set_off_no_alarm(validation: int) -> None:
    for seed in range(2):
        known = known_from(validation, seed)
        guards = Guards(CLASSES, known, RATE)
        assert alarmed_in(guards, seen(known, population(10_000, 1000 + seed)[0])) == []


def test_false_alarms_are_as_rare_as_stated_where_the_statement_is_short_enough_to_see() -> None:
    """At one in 300 images there may be 100 in 30,000."""
    known = known_from(1000)
    guards = Guards(CLASSES, known, 1 / 300)
    found = alarmed_in(guards, seen(known, population(30_000, 5)[0]))
    assert len([name for name in found if name in DRIFT]) <= 30_000 / 300


def test_alarms_go_off_within_a_few_images() -> None:
    known = known_from(500)
    guards = Guards(CLASSES, known, RATE)
    far = alarmed_after(guards, seen(known, population(200, 7, away=6.0)[0]))
    assert far["features"] <= 20
    assert far["unknown"] <= 20
    assert alarmed_after(guards, seen(known, population(200, 8, only=3)[0]))["classes"] <= 30
    ordinary, _ = population(200, 9)
    collapsed = seen(known, ordinary, np.zeros(200, dtype=np.int64), confidence=0.999)
    found = alarmed_after(guards, collapsed)
    assert found["one class"] <= 30
    assert found["contradiction"] <= 60
    assert found["disagreement"] <= 60
    mild = alarmed_after(guards, seen(known, population(300, 10, away=1.0)[0]))
    assert mild["features"] <= 120
    assert "unknown" not in mild


def test_an_alarm_is_over_when_the_stream_is_ordinary_again() -> None:
    known = known_from(500)
    guards = Guards(CLASSES, known, RATE)
    levels, begun = guards.watched(guards.start(), seen(known, population(500, 7, away=6.0)[0]))
    assert {"features", "unknown"} <= set(begun)
    levels, _ = guards.watched(levels, seen(known, population(200, 11)[0]))
    assert guards.names(levels) == ()


@pytest.mark.parametrize("validation", [40, 500])
def test_unknown_is_said_of_ordinary_images_no_more_often_than_stated(validation: int) -> None:
    shares = []
    for seed in range(80):
        familiarity = Familiarity(known_from(validation, 10 * seed), 0.05)
        output, _ = population(2000, 500 + seed)
        shares.append(familiarity.of(energy_of(output.logits).numpy(), output.features).unknown.mean())
    assert np.mean(shares) <= familiarity.rate * 1.25
    for strange, _ in (
        population(100, 3, away=8.0),
        population(100, 4, new=True),
    ):  # unlike anything; a class nobody had
        assert familiarity.of(energy_of(strange.logits).numpy(), strange.features).unknown.mean() > 0.95


def test_few_validation_images_state_a_higher_rate() -> None:
    assert Familiarity(known_from(19), 0.01).rate == 1 / 20
    assert Familiarity(known_from(500), 0.01).rate == 0.01
