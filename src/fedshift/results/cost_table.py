"""The cost ledger as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from fedshift.results.plain import Sheet

MIB = 1 << 20


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
        "epsilon", "epsi-\nlon", short, "Epsilon: what all rounds have told about a client ([privacy]).", always=False
    ),
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


def costs_table(rows: Sequence[tuple[Sequence[str], Mapping[str, float]]], heads: Sequence[str]) -> Sheet:
    """A row for every method: its name (and sweep values) under ``heads``, then its costs; definitions are beneath.

    >>> table = costs_table([(("fedavg",), {"parameters": 6340.0})], ("method",))
    >>> [str(next(column.cells)) for column in table.columns][:3]
    ['fedavg', '6.34k', '']
    """
    columns = [column for column in COLUMNS if column.always or any(costs.get(column.key) for _, costs in rows)]
    meanings = "\n".join(column.meaning for column in columns if column.meaning)
    table = Sheet(title="Costs", title_justify="left", caption=meanings, caption_justify="left")
    for head in heads:
        table.add_column(head, overflow="fold", min_width=10)
    for column in columns:
        table.add_column(column.head, justify="right", no_wrap=True)
    for names, costs in rows:
        cells = [column.write(costs[column.key]) if column.key in costs else "" for column in columns]
        table.add_row(*names, *cells)
    return table
