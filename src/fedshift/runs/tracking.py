"""Trackers are told what run folders say: whichever process writes them, what is tracked is what is on disk."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedshift.results.collect import dotted
from fedshift.runs.plan import Job
from fedshift.runs.progress import Reporter
from fedshift.track.base import Tracker


@dataclass
class Followed:
    """How far a run's file has been told."""

    job: Job
    name: str
    begun: bool = False
    told: int = 0  # bytes


class Tracking:
    """A reporter that passes everything on, and tells trackers what was written since the last time.

    A run that goes on after an interruption is told from its first round on. A tracker that fails is named and left
    alone from then on: no training ends because of it.
    """

    def __init__(self, reporter: Reporter, trackers: Sequence[Tracker], jobs: Sequence[Job]) -> None:
        self._say, self._trackers = reporter, list(trackers)
        self._runs = [Followed(job, _name(job)) for job in jobs]

    def doing(self, what: str) -> None:
        """Passed on."""
        self._say.doing(what)

    def plan(self, runs: Sequence[tuple[str, int, int]], engine: str, device: str) -> None:
        """Passed on."""
        self._say.plan(runs, engine, device)

    def begin(self, run: str, done: int, rounds: int) -> None:
        """Passed on."""
        self._say.begin(run, done, rounds)

    def skip(self, run: str, rounds: int) -> None:
        """Passed on."""
        self._say.skip(run, rounds)

    def moved(self, run: str, share: float, training: bool) -> None:
        """Passed on."""
        self._say.moved(run, share, training)

    def round(self, run: str, number: int, loss: float, best: float) -> None:
        """Passed on, then the folders are looked at."""
        self._say.round(run, number, loss, best)
        self.follow()

    def note(self, text: str) -> None:
        """Passed on."""
        self._say.note(text)

    def close(self) -> None:
        """Passed on; runs may still be scored."""
        self._say.close()

    def follow(self) -> None:
        """Tell what is new, of all runs that have begun."""
        for run in self._runs:
            path = run.job.folder.path / "metrics.jsonl"
            if not path.is_file() or path.stat().st_size <= run.told:
                continue
            if not run.begun:
                self._tell("begin", run.name, dotted(run.job.config))
                run.begun = True
            for line in _whole(path, run):
                self._tell("log", run.name, int(line.get("round", 0)), numbers_of(line))

    def finish(self) -> None:
        """Tell the scores of every run that has any, and close the trackers."""
        self.follow()
        for run in (run for run in self._runs if run.begun and run.job.folder.done):
            self._tell("end", run.name, _scores(run.job))
        self._tell("close")

    def _tell(self, word: str, *what: Any) -> None:
        for tracker in list(self._trackers):
            try:
                getattr(tracker, word)(*what)
            except Exception as error:  # theirs, of any kind: a full disk, a server that is gone
                self._trackers.remove(tracker)
                self._say.note(f"{type(tracker).__name__} is told nothing more: {type(error).__name__}: {error}")


def numbers_of(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """All numbers of a line of metrics, by dotted names with slashes; the round itself is the step.

    >>> numbers_of({"round": 3, "train/loss": 0.5, "diverged": [], "global/val/clients": {"client-mean": 70.0, "std": None}})
    {'train/loss': 0.5, 'global/val/clients/client-mean': 70.0}
    """
    found: dict[str, float] = {}
    for key, value in line.items():
        if isinstance(value, Mapping):
            found |= numbers_of(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and (prefix or key != "round"):
            found[f"{prefix}{key}"] = float(value)
    if not prefix and isinstance(line.get("adapter"), str):  # several adapters are validated in one round
        return {f"{line['adapter']}/{key}": value for key, value in found.items()}
    return found


def _whole(path: Path, run: Followed) -> list[dict[str, Any]]:
    """Lines that were not told yet; another half of a line will come."""
    with open(path, "rb") as file:
        file.seek(run.told)
        new = file.read()
    new = new[: new.rfind(b"\n") + 1]
    run.told += len(new)
    found = []
    for line in new.splitlines():
        with contextlib.suppress(ValueError):  # a damaged one is named by whoever goes on with the run
            found.append(json.loads(line))
    return [line for line in found if isinstance(line, dict) and isinstance(line.get("round", 0), int)]


def _scores(job: Job) -> dict[str, float]:
    """The client mean of every measure, by ``rule/adapter/stream``."""
    found: dict[str, float] = {}
    for label, rows in job.folder.scores([]).items():  # what is damaged is named elsewhere
        for row in rows:
            for measure in ("accuracy", *row.measures):
                value = row.summary_of(measure).client_mean
                if value is not None:
                    found[f"scores/{row.selection}/{label}/{row.metric}/{measure}"] = value
    return found


def _name(job: Job) -> str:
    """The run's folder below its experiment's: no other has it."""
    return str(job.folder.path.relative_to(job.folder.path.parents[1]))
