"""The cost ledger: what a method costs in parameters, bytes, FLOPs, seconds and memory.

What follows from the method and its networks alone is counted (:mod:`fedshift.runs.flops`); what really happened is
read from the rounds of a run. Both are in ``costs.json`` of the run and in one row of a table.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from fedshift.store.lines import RoundLine
from fedshift.store.rows import ScoreRow
from fedshift.store.summary import number

MIB = 1 << 20


@dataclass(frozen=True)
class Costs:
    """What a method costs; None where it is not known, and ``notes`` say why.

    Everything but ``flops_server`` is of one client (the mean over clients where they differ), bytes are bytes and FLOPs
    are FLOPs.

    >>> Costs(parameters=10, notes=("why",)).numbers()
    {'parameters': 10}
    """

    parameters: float | None = None  # of the network a client trains
    bytes_network: float | None = None  # its parameters and buffers
    bytes_up: float | None = None  # of a round, per client that took part
    bytes_down: float | None = None
    bytes_published: float | None = None  # given once, after the last round
    epsilon: float | None = None  # what all rounds together have told about a client, where noise is counted
    flops_step: float | None = None  # of a full batch in the dearest phase of a round
    flops_round: float | None = None  # of all steps of all phases
    flops_end: float | None = None  # of the phases after the last round
    flops_server: float | None = None  # of what the server does with a round's messages
    seconds_per_round: float | None = None  # of all clients together
    memory_step: float | None = None  # tensors alive at once in a step
    memory_peak: float | None = None  # on CUDA: the most that torch had allocated in a round, for all clients
    memory_grown: float | None = None  # on a CPU: how far the process outgrew its earlier peak while training
    steps: Mapping[str, float] = field(default_factory=dict)  # FLOPs of a full batch, by phase
    notes: tuple[str, ...] = ()

    def numbers(self) -> dict[str, float]:
        """What is known, by the names that JSON has."""
        plain = {key: value for key, value in self.as_dict().items() if isinstance(value, int | float)}
        return dict(plain)

    def as_dict(self) -> dict[str, Any]:
        """As ``costs.json`` holds it."""
        return {key.replace("_", "-"): value for key, value in asdict(self).items()}

    @staticmethod
    def of(stored: Mapping[str, Any]) -> Costs:
        """From ``costs.json``, also one of another version.

        >>> costs = Costs.of({"bytes-up": 4.0, "notes": ["why"], "unheard-of": 1})
        >>> costs.bytes_up, costs.notes
        (4.0, ('why',))
        """
        known = {entry.name: stored[key] for entry in fields(Costs) if (key := entry.name.replace("_", "-")) in stored}
        numbers = {key: number(value) for key, value in known.items() if key not in ("steps", "notes")}
        steps = {phase: number(value) or 0.0 for phase, value in known.get("steps", {}).items()}
        return Costs(**numbers, steps=steps, notes=tuple(map(str, known.get("notes", ()))))


def measured(costs: Costs, rounds: Sequence[RoundLine], published: float | None) -> Costs:
    """The ledger with what happened: bytes, seconds and memory of the rounds in ``metrics.jsonl``.

    >>> rounds = [RoundLine(r, participants=2, bytes_up=8, bytes_down=16, seconds=s) for r, s in enumerate((9.0, 1.0, 3.0))]
    >>> costs = measured(Costs(), rounds, published=None)
    >>> costs.bytes_up, costs.bytes_down, costs.seconds_per_round
    (4.0, 8.0, 2.0)
    """
    if not rounds:
        return replace(costs, bytes_published=published)
    clients = sum(line.participants for line in rounds) or 1
    return replace(
        costs,
        bytes_up=sum(line.bytes_up for line in rounds) / clients,
        bytes_down=sum(line.bytes_down for line in rounds) / clients,
        bytes_published=published,
        epsilon=max((told for line in rounds if (told := line.server.get("epsilon")) is not None), default=None),
        seconds_per_round=statistics.median([line.seconds for line in rounds[1:] or rounds]),
        memory_peak=max((line.memory_peak for line in rounds if line.memory_peak is not None), default=None),
        memory_grown=max((line.memory_grown for line in rounds if line.memory_grown is not None), default=None),
    )


def published_by(scores: Mapping[str, Sequence[ScoreRow]]) -> float | None:
    """What a client gave once at the end, on average, from the scores of a run."""
    rows = [row for found in scores.values() for row in found if row.selection == "last" and row.by_client]
    own = (row for row in rows if row.metric.population == "clients" and row.metric.model != "after-local")
    return next((row.given_bytes / len(row.by_client) for row in own if row.given_bytes is not None), None)


def mean_costs(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over seeds of what is known of all of them.

    >>> mean_costs([{"a": 1.0, "b": 2.0}, {"a": 3.0}])
    {'a': 2.0}
    """
    first, *others = runs
    return {key: statistics.fmean(run[key] for run in runs) for key in first if all(key in run for run in others)}
