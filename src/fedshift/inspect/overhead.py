"""What methods take to reach an accuracy: rounds, compute, communication and memory of one client."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedshift.errors import UserError
from fedshift.results.collect import names_of
from fedshift.results.cost_table import MIB, short
from fedshift.results.plain import Sheet
from fedshift.store.costs import Costs, measured
from fedshift.store.features import PREFERRED
from fedshift.store.files import Damaged, attempt
from fedshift.store.folder import RunFolder
from fedshift.store.found import find_runs, read_config
from fedshift.store.lines import History
from fedshift.store.metric import Metric
from fedshift.store.summary import Summary, mean_and_std

WINDOW = 3  # evaluations in a moving average
HEADS = {
    "rounds": "R*",
    "flops": "compute\nGFLOPs",
    "flops-server": "server\nGFLOPs",
    "bytes-up": "up\nMiB",
    "bytes-down": "down\nMiB",
    "bytes": "both\nMiB",
    "memory-step": "memory\nMiB",
    "memory-peak": "GPU\nMiB",
}
WHERE_KNOWN = {"flops-server", "memory-peak"}  # columns that are left out where they would be empty


@dataclass(frozen=True)
class Spent:
    """What one run took, by one client that takes part in every round; None where the target is never reached."""

    rounds: int | None  # R*
    best: float | None  # the highest moving average
    flops: float | None = None
    bytes_up: float | None = None
    bytes_down: float | None = None
    memory_step: float | None = None
    memory_peak: float | None = None
    flops_server: float | None = None  # of the server, not of a client

    def as_dict(self) -> dict[str, float | None]:
        """Plain numbers; ``bytes`` is both directions.

        >>> Spent(2, 70.0, bytes_up=4.0, bytes_down=8.0).as_dict()["bytes"]
        12.0
        """
        both = None if self.bytes_up is None or self.bytes_down is None else self.bytes_up + self.bytes_down
        return {
            "rounds": self.rounds,
            "best": self.best,
            "flops": self.flops,
            "flops-server": self.flops_server,
            "bytes-up": self.bytes_up,
            "bytes-down": self.bytes_down,
            "bytes": both,
            "memory-step": self.memory_step,
            "memory-peak": self.memory_peak,
        }


@dataclass(frozen=True)
class Overhead:
    """What every method took to reach a target."""

    target: float
    stream: str  # whose accuracy it is: ``val`` or a test stream
    runs: tuple[tuple[str, int, Spent], ...]  # name, seed and what it took
    notes: tuple[str, ...] = ()  # what is left out

    @property
    def definition(self) -> tuple[str, ...]:
        """What the numbers mean, in sentences."""
        data = "validation data" if self.stream == "val" else f"test stream {self.stream!r}"
        return (
            f"R*: the first evaluated round whose accuracy on {data} (client mean; mean of the last {WINDOW} "
            f"evaluations, of fewer before there are {WINDOW}) is at least {self.target:g} %.",
            "Compute: R* times the FLOPs the cost ledger counts for a client's mean round (steps x batch x 3F for plain "
            "training, F: 2 per multiply-add of a forward pass; the first layer needs no gradient of its input), with all "
            "extra phases and, once, the work after the last round. Server: R* times what it trains and generates itself "
            "in a round; what it takes to average is not counted.",
            "Up, down, both: all floats a client sends and receives in rounds 1 to R*.",
            "Memory: the most that tensors alive at once take in any step of a client; GPU: the most that torch had "
            "allocated in a round, for all clients of one seed, where seeds were not trained together.",
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers: a row for each method (means over seeds) and for each run."""
        runs = [{"name": name, "seed": seed, **spent.as_dict()} for name, seed, spent in self.runs]
        head = {"target": self.target, "accuracy": self.stream, "definition": list(self.definition)}
        return {**head, "methods": self.rows(), "runs": runs, **({"notes": list(self.notes)} if self.notes else {})}

    def rows(self) -> list[dict[str, Any]]:
        """For each method: how many seeds reached the target, and means over seeds if all of them did."""
        rows: list[dict[str, Any]] = []
        for name in dict.fromkeys(name for name, _, _ in self.runs):
            own = [spent.as_dict() for other, _, spent in self.runs if other == name]
            reached = [spent for spent in own if spent["rounds"] is not None]
            means = {key: _mean([spent[key] for spent in own]) for key in HEADS}
            deviation = (
                mean_and_std([float(s["rounds"]) for s in own if s["rounds"] is not None])[1] if reached else None
            )
            best = _mean([spent["best"] for spent in own])
            whole = len(reached) == len(own)
            rows.append(
                {
                    "name": name,
                    "seeds": len(own),
                    "reached": len(reached),
                    "best": best,
                    **(means if whole else dict.fromkeys(HEADS)),
                    "rounds-std": deviation if whole else None,
                }
            )
        return rows

    def table(self) -> Sheet:
        """A row for each method, with the definitions beneath."""
        rows = self.rows()
        shown = [key for key in HEADS if key not in WHERE_KNOWN or any(row[key] for row in rows)]
        table = Sheet(
            title=f"What it takes one client to reach {self.target:g} %",
            title_justify="left",
            caption="\n".join([*self.definition, *self.notes]),
            caption_justify="left",
        )
        table.add_column("method", overflow="fold")
        for key in shown:
            table.add_column(HEADS[key], justify="right", no_wrap=True)
        for row in rows:
            table.add_row(row["name"], *_cells(row, shown))
        return table


def overhead(path: str | Path, target: float) -> Overhead:
    """What the finished runs in a folder took to reach ``target`` percent.

    Test accuracy counts where all of them logged it (``[evaluate] oracle``), the stream ``original`` first; else validation.
    """
    if not 0 < target <= 100:
        raise UserError(f"--target is an accuracy in percent, above 0 and at most 100, not {target:g}")
    damaged: list[Damaged] = []
    read = {folder: attempt(partial(_ledger, RunFolder(folder)), damaged) for folder in find_runs(Path(path))}
    ledgers = {folder: found for folder, found in read.items() if found is not None}
    if not ledgers:
        raise damaged[0]
    names = names_of(list(ledgers))
    stream = common_stream([history for _, history, _ in ledgers.values()])
    runs = [
        (names[folder], seed, spent(history, costs, target, stream))
        for folder, (seed, history, costs) in ledgers.items()
    ]
    for name in (names[folder] for folder, (_, history, _) in ledgers.items() if not _logged(history, stream)):
        raise UserError(
            f"{name} logged no accuracy while it trained: it has no validation images, or was never evaluated; run again "
            "with -c evaluate.oracle=true -c evaluate.every=1, which scores test streams during training"
        )
    return Overhead(target, stream, tuple(runs), tuple(f"left out: {one}" for one in damaged))


def _logged(history: History, stream: str) -> bool:
    """Whether any accuracy is known, be it one of predictions that are not numbers."""
    return any(summary.client_mean is not None for _, summary in _evaluations(history, stream))


def _ledger(folder: RunFolder) -> tuple[int, History, Costs]:
    """A run's seed, its lines of metrics and its costs; of a run that has no ledger, what its rounds tell."""
    seed = int(folder.ending()["seed"])
    read_config(folder.path)
    history, stored = folder.history(), folder.costs()
    return seed, history, measured(Costs(), history.rounds, None) if stored is None else stored


def spent(history: History, costs: Costs, target: float, stream: str = "val") -> Spent:
    """What one run took, from its lines of metrics and its cost ledger.

    >>> from fedshift.store.lines import Evaluation, RoundLine
    >>> from fedshift.store.summary import Summary
    >>> rounds = tuple(RoundLine(r, participants=2, bytes_up=8, bytes_down=16) for r in (1, 2))
    >>> scores = tuple(Evaluation(r, {Metric("global", "val"): Summary(a)}) for r, a in ((1, 50.0), (2, 80.0)))
    >>> took = spent(History(rounds, scores), Costs(flops_round=100.0), target=60)
    >>> took.rounds, took.flops, took.bytes_up, took.bytes_down
    (2, 200.0, 8.0, 16.0)
    """
    means = moving_average(accuracies(history, stream))
    best = max((mean for _, mean in means), default=None)
    first = next((number for number, mean in means if mean >= target), None)
    if first is None:
        return Spent(None, best)
    rounds = [line for line in history.rounds if line.round <= first]
    work = None if costs.flops_round is None else first * costs.flops_round + (costs.flops_end or 0)
    return Spent(
        rounds=first,
        best=best,
        flops=work,
        flops_server=None if costs.flops_server is None else first * costs.flops_server,
        bytes_up=math.fsum(line.bytes_up / max(line.participants, 1) for line in rounds),
        bytes_down=math.fsum(line.bytes_down / max(line.participants, 1) for line in rounds),
        memory_step=costs.memory_step,
        memory_peak=costs.memory_peak,
    )


def accuracies(history: History, stream: str) -> list[tuple[int, float]]:
    """Round and client mean of every evaluation of this stream; those without a number are left out.

    So are those with predictions that are not numbers: they reach nothing.
    """
    found = _evaluations(history, stream)
    return [(number, s.client_mean) for number, s in found if s.client_mean is not None and not s.broken]


def _evaluations(history: History, stream: str) -> list[tuple[int, Summary]]:
    return [
        (line.round, summary)
        for line in history.evaluations
        for metric, summary in line.scores.items()
        if metric.column == Metric("", stream)
    ]


def moving_average(values: Sequence[tuple[int, float]], window: int = WINDOW) -> list[tuple[int, float]]:
    """Each number replaced by the mean of the last few; the first ones have fewer.

    >>> moving_average([(10, 30.0), (20, 60.0), (30, 90.0), (40, 90.0)])
    [(10, 30.0), (20, 45.0), (30, 60.0), (40, 80.0)]
    """
    numbers = [number for _, number in values]
    means = [statistics.fmean(numbers[max(0, end - window) : end]) for end in range(1, len(numbers) + 1)]
    return [(moment, mean) for (moment, _), mean in zip(values, means, strict=True)]


def common_stream(runs: Sequence[History]) -> str:
    """The test stream that all runs were scored on during training, ``original`` before others; or else ``val``."""
    metrics = [[metric for line in history.evaluations for metric in line.scores] for history in runs]
    logged = [list(dict.fromkeys(m.stream for m in own if m.population == "clients")) for own in metrics]
    shared = [name for name in logged[0] if name != "val" and all(name in others for others in logged)]
    return PREFERRED if PREFERRED in shared else next(iter(shared), "val")


def to_json(found: Overhead) -> str:
    """The numbers as JSON."""
    return json.dumps(found.as_dict(), indent=1, allow_nan=False)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def _cells(row: Mapping[str, Any], shown: Sequence[str]) -> list[str]:
    """The first of them is always R*."""
    if row["reached"] < row["seeds"]:
        best = "" if row["best"] is None else f", best {row['best']:.1f}"
        some = f"{row['reached']} of {row['seeds']} seeds" if row["reached"] else "never"
        return [f"{some}{best}", *["-"] * (len(shown) - 1)]
    rounds = f"{row['rounds']:g}" + (f" ±{row['rounds-std']:.1f}" if row["rounds-std"] else "")
    units = {"flops": 1e9, "flops-server": 1e9}
    return [rounds, *("" if row[key] is None else short(row[key] / units.get(key, MIB)) for key in shown[1:])]
