"""What all sections share: which rows, streams, rules and measures there are, and how a number is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedshift.measures.measurement import MEASURES
from fedshift.results.by_task import tasks_of
from fedshift.results.result import Result, Row
from fedshift.results.tables import BROKEN, COLLAPSED, DIGITS, capitalised, short_name
from fedshift.store.metric import RULES, Metric

RULE_NAMES = {"best-val": "best on validation", "last": "last round", "oracle": "best on test (oracle)"}


@dataclass(frozen=True)
class Views:
    """The axes of a report; sections are lists in their order.

    A view is one rule and one measure. Rows are grouped by task: only rows that were tested on the same images are ever
    compared.
    """

    result: Result

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows."""
        return self.result.rows

    @cached_property
    def columns(self) -> list[Metric]:
        """The streams, of clients who trained and of unseen ones."""
        return self.result.metrics()

    @cached_property
    def rules(self) -> list[str]:
        """Selection rules that any row has a score by; the one people should read first comes first."""
        there = {rule for row in self.rows for rule, _ in row.values}
        known = [rule for rule in ("best-val", *RULES) if rule in there]
        return [rule for rule in dict.fromkeys(known) if rule != "best-val" or self.result.validated]

    @cached_property
    def measures(self) -> list[str]:
        """Measures that any row has, the headline first."""
        there = [name for name in MEASURES if any(self._has(row, name) for row in self.rows)]
        return sorted(there, key=lambda name: name != self.result.measure)

    def _has(self, row: Row, measure: str) -> bool:
        scores = (score for found in row.values.values() for score in found[:1])
        return any(score.summary_of(measure).client_mean is not None for score in scores)

    @cached_property
    def tasks(self) -> list[str]:
        """A hash of every task."""
        return tasks_of(self.rows)[0]

    @cached_property
    def task(self) -> list[int]:
        """Which of the tasks each row was tested on."""
        return tasks_of(self.rows)[1]

    @cached_property
    def trouble(self) -> dict[tuple[str, int, int], str]:
        """Marks of scores that nobody should trust, by rule, row and column."""
        return {
            (rule, number, column): BROKEN if row.broken(metric, rule) else COLLAPSED
            for rule in self.rules
            for number, row in enumerate(self.rows)
            for column, metric in enumerate(self.columns)
            if row.broken(metric, rule) or row.collapsed(metric, rule)
        }

    def each(self) -> Iterator[tuple[str, str]]:
        """Every view: a rule and a measure."""
        return ((rule, measure) for rule in self.rules for measure in self.measures)

    def as_dict(self) -> dict[str, Any]:
        """The axes, for the page."""
        sweep = list(dict.fromkeys(key for row in self.rows for key, _ in row.point))
        methods = list(dict.fromkeys(row.method for row in self.rows))
        return {
            "rules": [{"key": r, "title": RULE_NAMES[r], "text": self.result.choice(r)} for r in self.rules],
            "measures": [
                {
                    "key": name,
                    "title": capitalised(MEASURES[name].title),
                    "unit": unit_of(name),
                    "higher": MEASURES[name].higher,
                }
                for name in self.measures
            ],
            "columns": [{"title": title_of(metric), "validation": metric.is_validation} for metric in self.columns],
            "sweep": sweep,
            "methods": methods,
            "tasks": [task[:8] or "unknown" for task in self.tasks],
            "rows": [
                {
                    "method": row.method,
                    "adapter": row.adapter,
                    "name": name_of(row),
                    "point": [str(dict(row.point).get(key, "")) for key in sweep],
                    "seeds": list(row.seeds),
                    "bound": row.bound,
                    "task": self.task[number],
                    "hue": methods.index(row.method),
                    "mark": self._marks[row.method, row.adapter],
                }
                for number, row in enumerate(self.rows)
            ],
        }

    @cached_property
    def _marks(self) -> dict[tuple[str, str], int]:
        """Which adapter of its method a row is: tells rows of one colour apart."""
        own: dict[str, list[str]] = {}
        for row in self.rows:
            if row.adapter not in own.setdefault(row.method, []):
                own[row.method].append(row.adapter)
        return {(method, adapter): k for method, names in own.items() for k, adapter in enumerate(names)}


def name_of(row: Row) -> str:
    """What people call a row."""
    parts = [row.method, *(f"{key} = {value}" for key, value in row.point)]
    return ", ".join(parts) + ("" if row.adapter == "none" else f" + {row.adapter}")


def title_of(metric: Metric) -> str:
    """A stream on one line."""
    return short_name(metric).replace("\n", " ")


def unit_of(measure: str) -> str:
    """What a measure is counted in.

    >>> unit_of("accuracy"), unit_of("loss")
    ('%', 'nats')
    """
    return "nats" if measure == "loss" else "%"


def written(value: float, measure: str) -> str:
    """A number as tables write it, with no sign before a zero.

    >>> written(62.25, "accuracy"), written(0.98765, "loss"), written(-0.01, "accuracy")
    ('62.2', '0.988', '0.0')
    """
    return f"{value:z.{digits_of(measure)}f}"


def digits_of(measure: str) -> int:
    """How many digits behind the point."""
    return DIGITS.get(measure, 1)


def short(value: float | None) -> float | None:
    """A number for a picture: more digits than anybody sees.

    >>> short(62.123456789)
    62.12346
    """
    return None if value is None else round(value, 5)


def evenly(count: int, most: int) -> Sequence[int]:
    """At most so many places of a sequence, evenly, the first and the last among them.

    >>> list(evenly(3, 5)), list(evenly(5, 3))
    ([0, 1, 2], [0, 2, 4])
    """
    if count <= most:
        return range(count)
    return [round(k * (count - 1) / (most - 1)) for k in range(most)]
