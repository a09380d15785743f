"""What accuracy costs: bytes, FLOPs, seconds, parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fedshift.results.cost_table import COLUMNS, counted, short
from fedshift.results.sections.views import Views


class Axis(NamedTuple):
    """One way to count a cost."""

    title: str
    of: Callable[[Mapping[str, float]], float | None]
    write: Callable[[float], str]


def _traffic(cost: Mapping[str, float]) -> float | None:
    return (cost["bytes-up"] + cost["bytes-down"]) / 1e3 if {"bytes-up", "bytes-down"} <= cost.keys() else None


def _of(key: str, by: float = 1) -> Callable[[Mapping[str, float]], float | None]:
    return lambda cost: cost[key] / by if key in cost else None


AXES = (
    Axis("kB up and down, of a client in a round", _traffic, short),
    Axis("kB up, of a client in a round", _of("bytes-up", 1e3), short),
    Axis("epsilon of all rounds", _of("epsilon"), short),
    Axis("GFLOPs of a client in a round", _of("flops-round", 1e9), short),
    Axis("seconds of a round here, all clients", _of("seconds-per-round"), short),
    Axis("parameters of the network", _of("parameters"), counted),
)


def trade_offs(views: Views) -> dict[str, Any] | None:
    """Values and texts of each axis by row, and the ledger with its definitions; None if no run knows its costs."""
    costs = [row.cost for row in views.rows]
    counted_by = {axis: [axis.of(cost) for cost in costs] for axis in AXES}
    axes = [
        {"title": axis.title, "values": values, "texts": ["" if v is None else axis.write(v) for v in values]}
        for axis, values in counted_by.items()
        if len({value for value in values if value is not None}) > 1
    ]
    columns = [column for column in COLUMNS if any(column.key in cost for cost in costs)]
    columns = [column for column in columns if column.always or any(cost.get(column.key) for cost in costs)]
    if not columns:
        return None
    first = {(row.method, row.point): k for k, row in reversed(list(enumerate(views.rows)))}
    return {
        "axes": axes,
        "heads": [column.head.replace("-\n", "").replace("\n", " ") for column in columns],
        "meanings": [column.meaning for column in columns if column.meaning],
        "ledger": [
            [k, [column.write(cost[column.key]) if column.key in cost else "" for column in columns]]
            for k in sorted(first.values())
            for cost in [views.rows[k].cost]
        ],
    }
