"""How every client is served, and who is served worst."""

from __future__ import annotations

from typing import Any

from fedshift.measures.measurement import MEASURES
from fedshift.results.sections.views import Views, evenly, short, written

FEW = 8  # clients, up to which a radar is readable
MOST_NUMBERS = 250_000  # in the page; beyond, only the first view, and then only some clients, are kept
MOST_CLIENTS = 400  # of a row that are drawn then
WORST = 3  # clients that are named


def clients(views: Views) -> dict[str, Any] | None:
    """Values by ``rule/measure``, then by column and row: in the order of the column's clients; the worst ones by name."""
    names = [_names(views, column) for column in range(len(views.columns))]
    if not any(names):
        return None
    count = sum(map(len, names)) * len(views.rows)
    every = list(views.each())
    kept = every if count * len(every) <= MOST_NUMBERS else every[:1]
    drawn = names
    if count > MOST_NUMBERS:
        drawn = [[own[k] for k in evenly(len(own), MOST_CLIENTS)] for own in names]
    return {
        "names": drawn,
        "all": [len(own) for own in names],
        "few": FEW,
        "values": {f"{rule}/{measure}": _values(views, drawn, rule, measure) for rule, measure in kept},
        "worst": {f"{rule}/{measure}": _worst(views, rule, measure) for rule, measure in kept},
    }


def _names(views: Views, column: int) -> list[str]:
    metric = views.columns[column]
    scored = (score for row in views.rows for rule in views.rules for score in row.scores(metric, rule))
    return list(dict.fromkeys(name for score in scored for name, own in score.by_client.items() if own.samples))


def _values(views: Views, names: list[list[str]], rule: str, measure: str) -> list[list[list[float | None] | None]]:
    made = []
    for metric, own in zip(views.columns, names, strict=True):
        found = [row.by_client(metric._replace(name=measure), rule) for row in views.rows]
        made.append([[short(values.get(name)) for name in own] if values else None for values in found])
    return made


def _worst(views: Views, rule: str, measure: str) -> list[list[list[list[Any]]]]:
    """By column and row: [name, value, text] of the clients that are served worst, the worst first."""
    sign = 1 if MEASURES[measure].higher else -1
    made = []
    for metric in views.columns:
        rows = []
        for row in views.rows:
            found = row.by_client(metric._replace(name=measure), rule)
            last = sorted(found.items(), key=lambda item: sign * item[1])[:WORST]
            rows.append([[name, short(value), written(value, measure)] for name, value in last])
        made.append(rows)
    return made
