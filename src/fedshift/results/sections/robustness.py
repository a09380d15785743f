"""What shifts cost: every stream against the images a client trained for, by kind and by severity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedshift.results.result import Row
from fedshift.results.sections.views import Views, written
from fedshift.results.stats import comparable, paired_differences
from fedshift.store.found import read_config
from fedshift.store.metric import Metric

PLAIN = "original"  # the kind of a stream that shows a client's own images


def robustness(views: Views) -> dict[str, Any] | None:
    """Kind and severity of every column, severities in order, and what each row loses; None where nothing shifts."""
    kinds = _kinds(views)
    columns = [k for k, metric in enumerate(views.columns) if not metric.is_validation and metric.stream in kinds]
    shifted = [k for k in columns if kinds[views.columns[k].stream]["kind"] != PLAIN]
    if not shifted:
        return None
    return {
        "columns": columns,
        "kinds": {k: kinds[views.columns[k].stream]["kind"] for k in columns},
        "severities": _severities(views, kinds, columns),
        "lost": _lost(views, kinds, columns),
    }


def _kinds(views: Views) -> dict[str, dict[str, Any]]:
    """Settings of streams by name, as the runs say them."""
    found: dict[str, dict[str, Any]] = {}
    for folder in views.result.folders:
        for stream in read_config(folder).get("stream", []):
            if isinstance(stream, Mapping) and "name" in stream:
                found.setdefault(stream["name"], {"kind": stream.get("kind", ""), **stream})
    return found


def _severities(views: Views, kinds: Mapping[str, Mapping[str, Any]], columns: list[int]) -> list[dict[str, Any]]:
    """Columns of one kind and population that differ in severity, mildest first; only where there are several."""
    groups: dict[tuple[str, str], list[tuple[float, int]]] = {}
    for k in columns:
        metric = views.columns[k]
        settings = kinds[metric.stream]
        if isinstance(settings.get("severity"), int | float):
            groups.setdefault((settings["kind"], metric.population), []).append((settings["severity"], k))
    return [
        {
            "title": kind if population == "clients" else f"{kind} ({population})",
            "x": [level for level, _ in sorted(own)],
            "columns": [k for _, k in sorted(own)],
        }
        for (kind, population), own in groups.items()
        if len({level for level, _ in own}) > 1
    ]


def _lost(views: Views, kinds: Mapping[str, Mapping[str, Any]], columns: list[int]) -> list[list[list[Any] | None]]:
    """By row and column: [text, whether it is noise] of the headline on the shift less that on the client's own images."""
    rule, measure = views.rules[0], views.result.measure
    metrics = [views.columns[k]._replace(name=measure) for k in columns]
    return [_row_lost(row, metrics, kinds, rule) for row in views.rows]


def _row_lost(
    row: Row, metrics: list[Metric], kinds: Mapping[str, Mapping[str, Any]], rule: str
) -> list[list[Any] | None]:
    made: list[list[Any] | None] = [None] * len(metrics)
    for population in dict.fromkeys(metric.population for metric in metrics):
        own = [k for k, metric in enumerate(metrics) if metric.population == population]
        plain = next(
            (k for k in own if kinds[metrics[k].stream]["kind"] == PLAIN and row.number(metrics[k], rule)), None
        )
        if plain is None or row.bound:
            continue
        base = row.accuracies(metrics[plain], rule)
        shifted = [k for k in own if k != plain and comparable(base, row.accuracies(metrics[k], rule))]
        found = paired_differences(base, [row.accuracies(metrics[k], rule) for k in shifted], seed=0) if shifted else []
        for k, difference in zip(shifted, found, strict=True):
            measure = metrics[k].name
            low, high = written(-difference.high, measure), written(-difference.low, measure)
            text = f"{_signed(-difference.mean, measure)} ({low} to {high})"
            made[k] = [text, difference.noise]
    return made


def _signed(value: float, measure: str) -> str:
    return ("+" if value > 0 else "") + written(value, measure)
