"""Whose time is whose in ``benchmarks/whole.py``."""

from __future__ import annotations

from itertools import count

import pytest
from benchmarks import whole


def test_every_second_is_of_the_work_that_was_said_last(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = count()
    monkeypatch.setattr(whole.time, "perf_counter", lambda: float(next(seconds)))  # a second from word to word
    clock = whole.Clock()
    clock.begin("fedicon seed 0 (3 rounds and 1 of its own)", 0, 4)
    for number in (1, 2):
        clock.round("fedicon seed 0", number, 0.0, 0.0)
    clock.doing("fedicon seed 0: models of round 2")
    clock.doing("fedicon seed 0: adapter tent")
    clock.doing("fedicon seed 0: counting costs")
    clock.begin("fedavg seed 0", 0, 2)  # so the other one has ended
    clock.round("fedavg seed 0", 1, 0.0, 0.0)
    clock.close()
    assert clock.seconds == {
        "training": 3.0 + 1.0 + 1.0,
        "models of a round, what adapters measure": 1.0,
        "adapter tent": 1.0,
        whole.LAST: 1.0,
    }
