"""Runs in processes of their own are the runs they would have been here, and one that fails takes nobody with it."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from fedshift import Experiment, UserError, run
from fedshift.core.adapter import Adapter
from fedshift.core.context import Phase, ServerContext
from fedshift.core.method import Batch, Method
from fedshift.core.registry import ADAPTERS, METHODS, Entry
from fedshift.core.tree import Tensors, Tree
from fedshift.results.collect import collect
from fedshift.results.result import Result
from fedshift.runs import workers
from fedshift.runs.progress import Silent
from fedshift.runs.workers import Seat
from fedshift.store.found import find_runs

CLOCK = ("seconds-per-round", "memory-grown", "memory-peak")

pytestmark = pytest.mark.system


@dataclass(frozen=True)
class Sleeper(Adapter):
    """Another process knows nothing of it."""


@dataclass(frozen=True)
class Halved(Method):
    """Half the loss."""

    def loss(self, state: Tree, tensors: Tensors, batch: Batch, phase: Phase) -> tuple[Tensor, Tensors]:
        """Half of it."""
        value, buffers = super().loss(state, tensors, batch, phase)
        return value / 2, buffers


@dataclass(frozen=True)
class GivesUp(Method):
    """It says why it cannot go on."""

    def aggregate(self, server: Tree, ups: Mapping[str, Tree], ctx: ServerContext) -> Tree:
        """Not this time."""
        raise UserError("there is nothing to average today")


@dataclass(frozen=True)
class Breaks(Method):
    """It has a mistake."""

    def aggregate(self, server: Tree, ups: Mapping[str, Tree], ctx: ServerContext) -> Tree:
        """A mistake."""
        raise RuntimeError("something broke")


@dataclass(frozen=True)
class Dies(Method):
    """Its process is killed, as one that takes too much memory is."""

    def aggregate(self, server: Tree, ups: Mapping[str, Tree], ctx: ServerContext) -> tuple[Tree, Tensors]:
        """The end."""
        os.kill(os.getpid(), signal.SIGKILL)
        return super().aggregate(server, ups, ctx)


@pytest.fixture(autouse=True)
def known_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered in this process and for these tests alone."""
    for name, make in {"halved": Halved, "gives-up": GivesUp, "breaks": Breaks, "dies": Dies}.items():
        monkeypatch.setitem(METHODS._entries, name, Entry(name, make, "a test", "", 0))
    monkeypatch.setitem(ADAPTERS._entries, "sleeper", Entry("sleeper", Sleeper, "a test", "", 0))


def small(*methods: dict[str, Any] | str, **more: Any) -> Experiment:
    settings = {"rounds": 2, "baselines": False, "data": {"size": 8}, "model": {"name": "mlp", "hidden": [4]}}
    named = [{"name": entry} if isinstance(entry, str) else entry for entry in methods]
    return Experiment.parse({"name": "small", **settings, "method": named, **more})


def numbers(result: Result) -> list[dict[str, Any]]:
    rows = [{key: value for key, value in row.items() if key not in CLOCK} for row in result.as_dicts()]
    return sorted(rows, key=lambda row: (row["method"], row["adapter"], row["selection"], row["metric"], row["seed"]))


class Listening(Silent):
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.rounds: list[tuple[str, int]] = []
        self.notes: list[str] = []

    def round(self, run: str, number: int, loss: float, best: float) -> None:
        """Remembered."""
        self.rounds.append((run, number))

    def note(self, text: str) -> None:
        """Remembered."""
        self.notes.append(text)


def started(monkeypatch: pytest.MonkeyPatch) -> list[Seat]:
    """The processes that are started from now on."""
    seats: list[Seat] = []
    make = Seat.__init__

    def watched(self: Seat, *order: Any) -> None:
        make(self, *order)
        seats.append(self)

    monkeypatch.setattr(Seat, "__init__", watched)
    return seats


def test_side_by_side_is_one_after_the_other(tmp_path: Path) -> None:
    experiment = small({"name": "halved", "adapters": ["none", "sleeper"]}, "fedprox", seeds=[0, 1])
    alone = run(experiment, tmp_path / "alone", engine="sequential")
    heard = Listening()
    joint = run(experiment, tmp_path / "joint", engine="sequential", processes=2, reporter=heard)
    assert numbers(joint) == numbers(alone)
    for found in (joint, collect(find_runs(tmp_path / "joint"))):
        assert [(row.method, row.seeds) for row in found.rows] == [(row.method, row.seeds) for row in alone.rows]
    expected = {
        (f"{name} seed {seed}", number) for name in ("halved", "fedprox") for seed in (0, 1) for number in (1, 2)
    }
    assert set(heard.rounds) == expected
    again = Listening()
    run(experiment, tmp_path / "joint", engine="sequential", processes=2, reporter=again)
    assert again.rounds == []


def test_a_process_goes_on_with_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seats = started(monkeypatch)
    run(small("fedavg", "fedprox", "ditto", seeds=[0, 1]), tmp_path, engine="sequential", processes=2)
    assert len(seats) == 2
    assert len(list(tmp_path.rglob("done"))) == 6


@pytest.mark.parametrize("processes", [2, 3])
def test_what_fails_is_said_when_the_others_are_finished(tmp_path: Path, processes: int) -> None:
    experiment = small("gives-up", "breaks", "fedavg")
    with pytest.raises(UserError) as said:
        run(experiment, tmp_path, engine="sequential", processes=processes)
    sentence = str(said.value)
    assert "there is nothing to average today" in sentence
    assert "breaks seed 0: RuntimeError: something broke" in sentence
    assert "\n" not in sentence
    assert [path.parent.parent.name for path in tmp_path.rglob("done")] == ["fedavg"]


def test_another_process_goes_on_where_one_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seats = started(monkeypatch)
    experiment = small("dies", {"name": "dies", "label": "again"}, "fedavg", "fedprox")
    with pytest.raises(UserError) as said:
        run(experiment, tmp_path, engine="sequential", processes=2)
    assert {sentence.partition(" was ended")[0] for sentence in str(said.value).split("; ")} == {
        "dies seed 0: its process",
        "again seed 0: its process",
    }
    assert sorted(path.parent.parent.name for path in tmp_path.rglob("done")) == ["fedavg", "fedprox"]
    assert 3 <= len(seats) <= 4


def test_processes_that_cannot_begin_are_not_started_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seats = started(monkeypatch)
    failing = tmp_path / "failing.py"
    failing.write_text("raise SystemExit('there is no such library')")
    monkeypatch.setattr(workers, "PROCESS", failing)
    with pytest.raises(UserError, match="fedavg seed 0: there is no such library; fedprox seed 0: there is no such"):
        run(small("fedavg", "fedprox"), tmp_path, engine="sequential", processes=2)
    assert len(seats) == 2


def test_an_interrupted_caller_leaves_nobody_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seats = started(monkeypatch)

    class Impatient(Silent):
        """Stops everything after the first round."""

        def round(self, run: str, number: int, loss: float, best: float) -> None:
            """Enough."""
            raise KeyboardInterrupt

    experiment = small("fedavg", "fedprox", rounds=2000, **{"checkpoint-every": 1, "evaluate": {"every": 0}})
    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path, engine="sequential", processes=2, reporter=Impatient())
    assert len(seats) == 2
    assert all(seat.process.poll() is not None for seat in seats)
    with pytest.raises(UserError, match="add --resume"):
        run(experiment, tmp_path, engine="sequential", processes=2)


def test_what_cannot_travel_and_no_processes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not 0"):
        run(small("fedavg"), tmp_path, processes=0)
    with open(tmp_path / "held", "w") as held:
        reader = lambda: (held, None)[1]  # noqa: E731
        with pytest.raises(UserError, match="run it without --jobs"):
            run(small("fedavg"), tmp_path, engine="sequential", processes=2, network=_holding(reader))


def _holding(reader: Any) -> Any:
    from torch import nn

    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Flatten(), nn.Linear(192, 4), nn.Linear(4, 10))
            self.reader = reader

        def forward(self, x: Tensor) -> Tensor:
            answer: Tensor = self.layers(x)
            return answer

    return Holding
