"""False alarms and delays of the guards beside river's detectors."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from tests.serve.test_guards import CLASSES, alarmed_after, known_from, population, seen

from fedshift.serve.guards import Guards

TURNS: dict[str, dict[str, Any]] = {
    "noise-like (6 sd)": {"away": 6.0},
    "another domain (1 sd)": {"away": 1.0},
    "one class": {"only": 3},
}
BEFORE = 300  # ordinary images before a stream turns


def compare(repeats: int) -> None:
    """Ordinary images and three turns of the stream: how often and how soon alarms go off."""
    from river.drift import ADWIN, PageHinkley

    ways: dict[str, Callable[[Any, Any], int | None]] = {
        "ours": _ours,
        "ADWIN": lambda known, output: _river(ADWIN, known, output),
        "Page-Hinkley": lambda known, output: _river(PageHinkley, known, output),
    }
    print(f"{'':14}{'false in 10,000':>16}" + "".join(f"{turn:>24}" for turn in TURNS))
    for name, way in ways.items():
        false = 0
        delays: dict[str, list[int | None]] = {turn: [] for turn in TURNS}
        for seed in range(repeats):
            known = known_from(300, 3 * seed)
            false += way(known, population(10_000, 1000 + seed)[0]) is not None
            for turn, how in TURNS.items():
                before, after = population(BEFORE, 2000 + seed)[0], population(300, 3000 + seed, **how)[0]
                joined = before._replace(
                    logits=torch.cat([before.logits, after.logits]),
                    features=torch.cat([before.features, after.features]),
                )
                found = way(known, joined)
                delays[turn].append(None if found is None else found - BEFORE)
        words = [_delay(delays[turn]) for turn in TURNS]
        print(f"{name:14}{f'{false} of {repeats}':>16}" + "".join(f"{word:>24}" for word in words), flush=True)


def _ours(known: Any, output: Any) -> int | None:
    found = alarmed_after(Guards(CLASSES, known, 1e-6), seen(known, output))
    return min(found.values(), default=None)


def _river(make: Any, known: Any, output: Any) -> int | None:
    what = seen(known, output)
    columns = [*what.signals.T, what.frozen_confidence]
    detectors = [make() for _ in columns]
    for number in range(len(what.answer)):
        for detector, column in zip(detectors, columns, strict=True):
            detector.update(float(column[number]))
            if detector.drift_detected:
                return number + 1
    return None


def _delay(found: list[int | None]) -> str:
    good = [number for number in found if number is not None and number > 0]
    early = sum(number is not None and number <= 0 for number in found)
    return f"{statistics.median(good) if good else '-'} (missed {found.count(None)}, early {early})"
