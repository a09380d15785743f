"""The main table: every rule, measure and way to sum clients up, with what is more than noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedshift.measures.measurement import MEASURES
from fedshift.results.cost_table import short as short_cost
from fedshift.results.sections.views import Views, digits_of, short
from fedshift.results.stats import comparable, paired_differences, single
from fedshift.store.metric import Part

BEST, SECOND, TIED = "best", "second", "tied"
Cell = list[Any]  # value, text, what is wrong with it, how it stands among the others


def scores(views: Views) -> dict[str, Any]:
    """Cells by ``rule/measure/part``, rows by streams; published numbers and costs beside them."""
    cells = {
        f"{rule}/{measure}/{part}": _matrix(views, rule, measure, part)
        for rule, measure in views.each()
        for part in PARTS
    }
    papers = [[row.paper(metric, views.rules[0]) for metric in views.columns] for row in views.rows]
    return {
        "parts": [{"key": part, "title": title} for part, title in PARTS.items()],
        "cells": cells,
        "papers": papers if any(number is not None for row in papers for number in row) else None,
        "costs": [_costs(row.cost) for row in views.rows],
    }


PARTS: Mapping[Part, str] = {
    "client_mean": "mean over clients", "pooled": "all samples pooled", "worst10": "worst 10 % of clients",
}  # fmt: skip


def _matrix(views: Views, rule: str, measure: str, part: Part) -> list[list[Cell | None]]:
    standing = [standings(views, k, rule, measure) if part == "client_mean" else {} for k in range(len(views.columns))]
    return [
        [
            _cell(
                row.number(metric._replace(name=measure), rule, part),
                digits_of(measure),
                views.trouble.get((rule, number, k), ""),
                standing[k].get(number, ""),
            )
            for k, metric in enumerate(views.columns)
        ]
        for number, row in enumerate(views.rows)
    ]


def _cell(number: tuple[float, float] | None, digits: int, trouble: str, standing: str) -> Cell | None:
    if number is None:
        return None
    mean, deviation = number
    text = f"{mean:.{digits}f}" + (f" ±{deviation:.{digits}f}" if deviation else "")
    cell: Cell = [short(mean), text, trouble, standing]
    while not cell[-1]:
        cell.pop()
    return cell


def standings(views: Views, column: int, rule: str, measure: str) -> dict[int, str]:
    """Which rows of a column are best and second best by more than noise, task by task.

    If the best cannot be told from others, all of these are tied, and nobody is second. One client under one seed tells
    nothing, so that nobody is marked. Rows that something is wrong with, bounds, and rows that were not tested on the
    same clients and seeds take no part.
    """
    metric = views.columns[column]._replace(name=measure)
    sign = 1 if MEASURES[measure].higher else -1
    level = {
        k: number[0]
        for k, row in enumerate(views.rows)
        if not row.bound and (rule, k, column) not in views.trouble and (number := row.number(metric, rule)) is not None
    }
    values = {k: views.rows[k].accuracies(metric, rule) for k in level}
    order = sorted((k for k in level if any(values[k])), key=lambda k: -sign * level[k])
    found: dict[int, str] = {}
    for task in dict.fromkeys(views.task):
        found |= _stand([k for k in order if views.task[k] == task], values)
    return found


def _stand(order: Sequence[int], values: Mapping[int, Sequence[Mapping[str, float]]]) -> dict[int, str]:
    order = [k for k in order if k == order[0] or comparable(values[order[0]], values[k])]
    if len(order) < 2 or single(values[order[0]]):
        return {}
    first, *others = order
    noise = [d.noise for d in paired_differences(values[first], [values[k] for k in others], seed=0)]
    if noise[0]:
        return {first: TIED, **{k: TIED for k, same in zip(others, noise, strict=True) if same}}
    found = {first: BEST}
    if len(others) > 1:
        (gap,) = paired_differences(values[others[0]], [values[others[1]]], seed=0)
        if not gap.noise:
            found[others[0]] = SECOND
    return found


def _costs(cost: Mapping[str, float]) -> dict[str, list[Any]]:
    """What a round costs, as [value, text], by the names of :data:`COSTS`; nothing that is not known."""
    return {key: [value, short_cost(value)] for key, of in COSTS.items() if (value := of(cost)) is not None}


def _scaled(key: str, by: float) -> Any:
    return lambda cost: cost[key] / by if key in cost else None


COSTS = {"up": _scaled("bytes-up", 1e3), "down": _scaled("bytes-down", 1e3), "seconds": _scaled("seconds-per-round", 1)}
