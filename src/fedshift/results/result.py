"""Results: rows over seeds, as plain numbers; :mod:`fedshift.results.tables` makes tables of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.table import Table

from fedshift.errors import UserError
from fedshift.measures.measurement import MEASURES
from fedshift.results import tables
from fedshift.results.by_task import tasks_of
from fedshift.store.metric import ACCURACY, Metric, Part
from fedshift.store.rows import ScoreRow, Told
from fedshift.store.summary import known, mean_and_std

if TYPE_CHECKING:
    import pandas

    from fedshift.results.advice import Advice
    from fedshift.results.plain import Sheet

Point: TypeAlias = tuple[tuple[str, Any], ...]  # of a sweep
RULE_TEXT = {
    "last": "the state after the last round",
    "best-val": "the round with the best pooled validation {measure}",
    "oracle": "the best test {measure} of any evaluated round (a bound, not a choice)",
}


@dataclass(frozen=True)
class Row:
    """One method with one adapter: scores per selection rule and metric, one for each seed.

    A metric may be given as its text; without a model it is that of the model the method deploys.
    """

    method: str
    adapter: str  # its label
    point: Point
    seeds: tuple[int, ...] = ()
    values: Mapping[tuple[str, Metric], list[ScoreRow]] = field(default_factory=dict)
    cost: Mapping[str, float] = field(default_factory=dict)
    twins: Mapping[Metric, list[ScoreRow]] = field(default_factory=dict)  # on validation images, at the chosen round
    bound: bool = False  # chosen by test labels: nothing that could be deployed
    diverged: bool = False  # training did, under some seed

    def scores(self, metric: Metric | str, rule: str = "best-val") -> list[ScoreRow]:
        """The scores of a metric, one for each seed; empty if there are none."""
        keys = [(rule, full) for full in Metric.parse(metric).plain.full()]
        return next((self.values[key] for key in keys if key in self.values), [])

    def number(
        self, metric: Metric | str, rule: str = "best-val", part: Part = "client_mean"
    ) -> tuple[float, float] | None:
        """Mean and deviation over seeds of one part of a metric, or None."""
        measure = Metric.parse(metric).name
        numbers = known([getattr(score.summary_of(measure), part) for score in self.scores(metric, rule)])
        return mean_and_std(numbers) if numbers else None

    def broken(self, metric: Metric | str, rule: str = "best-val") -> int:
        """How many predictions of all seeds are not numbers; a score with any is never the best."""
        return sum(score.summary.broken for score in self.scores(metric, rule))

    def paper(self, metric: Metric | str, rule: str = "best-val") -> float | None:
        """The published number for a metric, or None; it does not depend on seeds."""
        found = self.scores(metric, rule) if Metric.parse(metric).name == ACCURACY else []
        return None if not found or found[0].paper is None else float(found[0].paper)

    def collapsed(self, metric: Metric | str, rule: str = "best-val") -> list[str]:
        """Clients to whom (nearly) everything is one class, in any seed."""
        scores = self.scores(metric, rule)
        return list(
            dict.fromkeys(n for score in scores for n, own in score.measured.items() if own.confusion.collapsed)
        )

    def telemetry(self, rule: str = "best-val") -> dict[Metric, dict[str, list[Told]]]:
        """What the adapter told, by metric (without its model) and by what it calls that, one for each seed."""
        return {
            metric.column: {name: [seed.telemetry[name] for seed in seeds] for name in seeds[0].telemetry}
            for (selection, metric), seeds in self.values.items()
            if selection == rule and all(seed.telemetry for seed in seeds)
        }

    def accuracies(self, metric: Metric | str, rule: str = "best-val") -> list[dict[str, float]]:
        """Accuracy (or the metric's own measure) by client that was tested, one mapping for each seed."""
        measure = Metric.parse(metric).name
        return [score.values(measure) for score in self.scores(metric, rule)]

    def by_client(self, metric: Metric | str, rule: str = "best-val") -> dict[str, float]:
        """Accuracy (or another measure) of every client that was tested, its mean over the seeds that tested it."""
        seeds = self.accuracies(metric, rule)
        names = dict.fromkeys(name for score in self.scores(metric, rule) for name in score.by_client)
        tested = {name: [own[name] for own in seeds if name in own] for name in names}
        return {name: mean_and_std(numbers)[0] for name, numbers in tested.items() if numbers}


@dataclass(frozen=True, repr=False)
class Result:
    """What an experiment gave. In a notebook it shows itself as a table."""

    rows: tuple[Row, ...]
    folders: tuple[Path, ...]
    notes: tuple[str, ...] = ()
    validated: bool = True  # whether any run had validation images to choose a round by
    trouble: tuple[str, ...] = ()  # those of the notes that say what is wrong with numbers
    measure: str = ACCURACY  # the headline

    def __repr__(self) -> str:
        streams = list(dict.fromkeys(metric.stream for metric in self.metrics()))
        seeds = sorted({seed for row in self.rows for seed in row.seeds})
        return f"<Result: {len(self.rows)} rows, streams {', '.join(streams)}, seeds {', '.join(map(str, seeds))}>"

    def _repr_html_(self) -> str:
        from fedshift.results.html import result_html

        return result_html(self)

    def metrics(self) -> list[Metric]:
        """The columns of a table: stream and population of every score, those after local training last."""
        scored = [(metric, scores) for row in self.rows for (_, metric), scores in row.values.items()]
        # nobody may have images of a stream: clients that train only, where unseen ones are tested
        found = [m.column for m, scores in scored if any(score.summary.client_mean is not None for score in scores)]
        return sorted(dict.fromkeys(found), key=lambda metric: metric.model == "after-local")

    def accuracy(self, method: str, adapter: str = "none", stream: str = "original", rule: str = "best-val") -> float:
        """Mean over seeds of the client mean on one stream: the number to compare methods by.

        Raises a UserError if there is none.
        """
        for row in self.rows:
            if (row.method, row.adapter) == (method, adapter):
                found = row.number(Metric("", stream), rule)
                if found is not None:
                    return found[0]
        raise UserError(f"there is no result of method {method!r} with adapter {adapter!r} on stream {stream!r}")

    def as_dicts(self) -> list[dict[str, Any]]:
        """Plain rows, one for every method, adapter (by its label), rule, metric and seed; no column hides another.

        A swept key that is called like a column (``model``, ``stream``) is there as ``sweep.model``.
        """
        plain = [
            (row, _columns(row, rule, metric, seed, score))
            for row in self.rows
            for (rule, metric), found in row.values.items()
            for seed, score in zip(row.seeds, found, strict=True)
        ]
        taken = {key for _, columns in plain for key in columns}
        return [
            _joined(
                {key: columns[key] for key in FIRST},
                {f"sweep.{key}" if key in taken else key: value for key, value in row.point},
                {key: value for key, value in columns.items() if key not in FIRST},
            )
            for row, columns in plain
        ]

    def choice(self, rule: str) -> str:
        """Whose accuracy a rule gives, in words; without validation images it is the last round's.

        >>> Result((), (), validated=False).choice("best-val")
        'the state after the last round'
        """
        text = RULE_TEXT["last" if rule == "best-val" and not self.validated else rule]
        return text.format(measure=MEASURES[self.measure].title)

    def table(self, rule: str = "best-val", measure: str = "") -> Sheet:
        """The headline measure (or another one) by method and adapter: client mean, pooled, worst 10 % of clients."""
        return tables.headline_table(self, rule, measure or self.measure)

    def clients(self, rule: str = "best-val", measure: str = "") -> Sheet:
        """Every client's number, a column each, where they are few; :meth:`to_pandas` has them however many there are."""
        return tables.clients_table(self, rule, measure or self.measure)

    def to_pandas(self) -> pandas.DataFrame:
        """All numbers, tidy: a row for each method, adapter, stream, population, client, seed and measure.

        ``part`` is "client" for one client's number; "client-mean", "pooled", "std" and "worst-10" are of all of them, and
        their ``client`` is missing. ``selection`` is the rule that chose the round.
        """
        from fedshift.results.tidy import to_pandas

        return to_pandas(self)

    def measures_table(self, rule: str = "best-val") -> Table | None:
        """All measures side by side, as client means; None if runs are of a version that had accuracy alone."""
        return tables.measures_table(self, rule)

    def classes_table(self, rule: str = "best-val") -> Table | None:
        """Recall and precision of every class; None where there are too many, or nothing is known."""
        return tables.classes_table(self, rule)

    def by_task(self) -> dict[str, Result]:
        """A result for each task, by what tells it from the others: rows of two are not to be compared.

        One task alone has no name.
        """
        hashes, numbers = tasks_of(self.rows)
        parts = [tuple(row for row, of in zip(self.rows, numbers, strict=True) if of == n) for n in range(len(hashes))]
        if len(parts) < 2:
            return {"": self}
        names = _task_names(hashes, parts)
        return {name: replace(self, rows=_shorter(part)) for name, part in zip(names, parts, strict=True)}

    def advice(self, measure: str = "") -> Advice:
        """What to deploy, by validation images alone; see :mod:`fedshift.results.advice`. It is for rows of one task."""
        from fedshift.results.advice import advise

        several = self.by_task()
        if len(several) > 1:
            raise UserError(
                f"advice is for one task, and these rows are of {len(several)} ({', '.join(several)}): by_task() has them "
                "one by one"
            )
        return advise(self, measure or self.measure)

    def rules_table(self) -> Table:
        """The client mean under the three selection rules side by side."""
        return tables.rules_table(self)

    def telemetry_table(self, rule: str = "best-val") -> Table | None:
        """What adapters tell about themselves, as means over samples, clients and seeds; None if none tells anything."""
        return tables.telemetry_table(self, rule)

    def costs_table(self) -> Table:
        """What every method costs, with the definitions beneath; a method's adapters share its row."""
        return tables.method_costs_table(self)


def _task_names(hashes: Sequence[str], parts: Sequence[Sequence[Row]]) -> list[str]:
    """By the sweep's key that tells each task from the others, if there is one; else by hash."""
    for key in dict.fromkeys(key for part in parts for row in part for key, _ in row.point):
        values = [{str(dict(row.point).get(key)) for row in part} for part in parts]
        if all(len(own) == 1 for own in values) and len(set.union(*values)) == len(parts):
            return [f"{key} = {own.pop()}" for own in values]
    return [f"task {name[:8] or 'unknown'}" for name in hashes]


def _shorter(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Rows without the keys that do not tell runs of a method apart any more."""
    values: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        for key, value in row.point:
            values.setdefault((row.method, key), set()).add(str(value))
    return tuple(
        replace(row, point=tuple((k, value) for k, value in row.point if len(values[row.method, k]) > 1))
        for row in rows
    )


FIRST = ("method", "adapter", "adapter-name")  # columns before those of a sweep
SAID = {"selection", "metric", "adapter", "label", "seed", "by-client", "whole", "measured", "classes"}  # or too long


def _columns(row: Row, rule: str, metric: Metric, seed: int, score: ScoreRow) -> dict[str, Any]:
    named = {"method": row.method, "adapter": row.adapter, "adapter-name": score.adapter or None}
    measured = {"model": metric.model, "stream": metric.stream, "population": metric.population, "metric": str(metric)}
    numbers = {key: value for key, value in replace(score, unknown={}).to_json().items() if key not in SAID}
    bound = {"bound": True} if row.bound else {}
    classes = {"by-class": found} if (found := score.by_class()) else {}
    return _joined(named, {"selection": rule}, measured, {"seed": seed}, numbers, classes, row.cost, bound)


def _joined(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """One mapping of several; a key that two of them have would lose a value."""
    whole = {key: value for part in parts for key, value in part.items()}
    assert len(whole) == sum(map(len, parts)), "two columns share a name"
    return whole


def to_json(result: Result) -> str:
    """The rows as JSON."""
    return json.dumps(result.as_dicts(), indent=1)
