"""The cost ledger: what a method costs in parameters, bytes, FLOPs, seconds and memory.

What follows from the method and its networks alone is counted (:mod:`fedshift.bench.counting`); what really happened is
read from the rounds of a run. Both are in ``costs.json`` of the run and in one row of a table.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table

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
        return Costs(**{**known, "notes": tuple(known.get("notes", ()))})


def measured(costs: Costs, lines: Sequence[Mapping[str, Any]], published: float | None) -> Costs:
    """The ledger with what happened: bytes, seconds and memory of the rounds in ``metrics.jsonl``.

    >>> rounds = [{"participants": 2, "bytes-up": 8, "bytes-down": 16, "seconds": s} for s in (9.0, 1.0, 2.0, 3.0)]
    >>> costs = measured(Costs(), rounds, published=None)
    >>> costs.bytes_up, costs.bytes_down, costs.seconds_per_round
    (4.0, 8.0, 2.0)
    """
    rounds = [line for line in lines if "bytes-up" in line]
    if not rounds:
        return replace(costs, bytes_published=published)
    clients = sum(line["participants"] for line in rounds) or 1
    return replace(
        costs,
        bytes_up=sum(line["bytes-up"] for line in rounds) / clients,
        bytes_down=sum(line["bytes-down"] for line in rounds) / clients,
        bytes_published=published,
        seconds_per_round=statistics.median([line["seconds"] for line in rounds[1:] or rounds]),
        memory_peak=max((line["memory-peak"] for line in rounds if "memory-peak" in line), default=None),
        memory_grown=max((line["memory-grown"] for line in rounds if "memory-grown" in line), default=None),
    )


def published_by(scores: Mapping[str, Sequence[Mapping[str, Any]]]) -> float | None:
    """What a client gave once at the end, on average, from the scores of a run."""
    rows = [row for found in scores.values() for row in found if row["selection"] == "last" and "by-client" in row]
    known = (row for row in rows if row["metric"].endswith("/clients") and not row["metric"].startswith("after-local/"))
    return next((row["published-bytes"] / max(len(row["by-client"]), 1) for row in known), None)


def mean_costs(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over seeds of what is known of all of them.

    >>> mean_costs([{"a": 1.0, "b": 2.0}, {"a": 3.0}])
    {'a': 2.0}
    """
    first, *others = runs
    return {key: statistics.fmean(run[key] for run in runs) for key in first if all(key in run for run in others)}


# ---- memory --------------------------------------------------------------------------------------------------------------
def resident_peak() -> int | None:
    """The most bytes this process has had in memory so far, or None where the system does not say.

    >>> resident_peak() > 1_000_000
    True
    """
    status = Path("/proc/self/status")  # getrusage would count what the parent process had before this one began
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.is_file() else None
    if found:
        return int(found[1]) * 1024
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def memory_so_far(device: torch.device, before: int | None) -> dict[str, int]:
    """Peak memory: on CUDA what torch has allocated, on a CPU by how much the process outgrew its peak ``before``.

    Nothing if it did not: earlier work needed more, so that nobody knows what this work needed.

    >>> memory_so_far(torch.device("cpu"), before=1 << 60)
    {}
    """
    if device.type == "cuda":
        return {"memory-peak": torch.cuda.max_memory_allocated(device)}
    after = resident_peak()
    grown = after - before if after is not None and before is not None else 0
    return {"memory-grown": grown} if grown > 0 else {}


# ---- the table -----------------------------------------------------------------------------------------------------------
class Column(NamedTuple):
    """A column of the table: its cost, its head, how a number is written, and what it means."""

    key: str
    head: str
    write: Callable[[float], str]
    meaning: str = ""  # left out where the column before it says it
    always: bool = True  # otherwise only where there is something to show


def short(number: float) -> str:
    """Three digits that matter, three decimals at most.

    >>> short(0.01234), short(49.517), short(1234.5), short(98_765), short(0), short(0.0001)
    ('0.012', '49.5', '1,234', '98.77k', '0', '<0.001')
    """
    if number == 0 or number >= 100:
        return counted(number) if number >= 1e4 else f"{number:,.0f}"
    if number < 0.0005:
        return "<0.001"
    return f"{number:.{3 if number < 1 else 2 if number < 10 else 1}f}"


def counted(number: float) -> str:
    """Thousands and millions.

    >>> counted(12_974_154), counted(6_340), counted(12)
    ('12.97M', '6.34k', '12')
    """
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.4g}{unit}"
    return f"{number:.4g}"


def _mib(number: float) -> str:
    return short(number / MIB)


def _giga(number: float) -> str:
    return short(number / 1e9)


COLUMNS = (
    Column(
        "parameters", "para-\nmeters", counted, "Parameters, size: of the network a client trains, size with buffers."
    ),
    Column("bytes-network", "size\nMiB", _mib),
    Column(
        "bytes-up", "up\nMiB", _mib, "Up, down: all floats a client sends and receives in a round, mean over rounds."
    ),
    Column("bytes-down", "down\nMiB", _mib),
    Column("bytes-published", "once\nMiB", _mib, "Once: what a client gives away after the last round.", always=False),
    Column(
        "flops-step",
        "step\nGFLOPs",
        _giga,
        "GFLOPs: 2 per multiply-add of matrix products and convolutions, forward and backward, by one client: "
        "for a full batch in the dearest phase (step), for all its batches in all phases (round, mean over clients).",
    ),
    Column("flops-round", "round\nGFLOPs", _giga),
    Column(
        "flops-server",
        "server\nGFLOPs",
        _giga,
        "Server GFLOPs: of what it trains and generates itself in a round.",
        always=False,
    ),
    Column("seconds-per-round", "round\ns", short, "Round s: of all clients on this machine, median without round 1."),
    Column(
        "memory-step", "step\nMiB", _mib, "Step MiB: the most that tensors alive at once take in any step of a client."
    ),
    Column(
        "memory-peak",
        "peak\nMiB",
        _mib,
        "Peak MiB: the most that torch had allocated on the GPU in a round.",
        always=False,
    ),
)


def costs_table(rows: Sequence[tuple[Sequence[str], Mapping[str, float]]], heads: Sequence[str]) -> Table:
    """A row for every method: its name (and sweep values) under ``heads``, then its costs; definitions are beneath.

    >>> table = costs_table([(("fedavg",), {"parameters": 6340.0})], ("method",))
    >>> [list(column.cells)[0] for column in table.columns][:3]
    ['fedavg', '6.34k', '']
    """
    columns = [column for column in COLUMNS if column.always or any(costs.get(column.key) for _, costs in rows)]
    meanings = "\n".join(column.meaning for column in columns if column.meaning)
    table = Table(title="Costs", title_justify="left", caption=meanings, caption_justify="left")
    for head in heads:
        table.add_column(head, overflow="fold", min_width=10)
    for column in columns:
        table.add_column(column.head, justify="right", no_wrap=True)
    for names, costs in rows:
        cells = [column.write(costs[column.key]) if column.key in costs else "" for column in columns]
        table.add_row(*names, *cells)
    return table
