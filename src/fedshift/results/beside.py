"""Ours beside the paper's: every number with its spread, who is first, and whether that is more than noise.

The same comparison is printed after a run, kept as JSON and shown on the pages of ``docs/results``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from fedshift.results.result import Point, Result, Row
from fedshift.results.stats import comparable, paired_differences, standard_error
from fedshift.store.metric import Metric
from fedshift.store.summary import mean_and_std

MEAN = Metric("", "mean")
SEED = 0  # of the resampling


@dataclass(frozen=True)
class Number:
    """A client mean over seeds: its deviation over them, its standard error over clients, and the published one."""

    mean: float
    std: float
    error: float | None = None
    paper: float | None = None
    seeds: tuple[float, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Rounded, and without what nobody knows."""
        told = {"mean": self.mean, "std": self.std if len(self.seeds) > 1 else None, "error": self.error}
        plain = {key: round(value, 2) for key, value in {**told, "paper": self.paper}.items() if value is not None}
        return {**plain, "seeds": [round(value, 2) for value in self.seeds]}


@dataclass(frozen=True)
class Comparison:
    """A table beside a paper's."""

    columns: tuple[str, ...]
    rows: Mapping[str, Mapping[str, Number]]  # by what a row is called, then by column
    headline: Mapping[str, Number]  # what rows are ranked by: as the paper scores each of them
    differences: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of the first row from the others

    @property
    def first(self) -> str:
        """The row with the highest headline; empty if there is none."""
        return max(self.headline, key=lambda title: self.headline[title].mean, default="")

    @property
    def first_in_paper(self) -> str:
        """The row whose published headline is the highest."""
        papers = {title: number.paper for title, number in self.headline.items() if number.paper is not None}
        return max(papers, key=lambda title: papers[title], default="")

    @property
    def tied(self) -> tuple[str, ...]:
        """Rows that cannot be told from the first one."""
        return tuple(title for title, found in self.differences.items() if found["noise"])

    def sentences(self, always: bool = False) -> list[str]:
        """Who is first, here and in the paper, and whether the difference is more than noise.

        Nothing where no paper has a number, unless it is ``always`` said who is first here.
        """
        if not self.first or not (self.first_in_paper or always):
            return []
        said = [f"First here: {self.first} with {self.headline[self.first].mean:.1f}."]
        if self.first_in_paper:
            theirs = self.headline[self.first_in_paper]
            here = "" if self.first == self.first_in_paper else f", here {theirs.mean:.1f}"
            said = [
                f"{said[0][:-1]}; the paper's first of these rows: {self.first_in_paper} with {theirs.paper:.1f}{here}."
            ]
        if self.differences:
            apart = len(self.differences) - len(self.tied)
            told = f"It is above {apart} of {len(self.differences)} other rows by more than noise"
            told += f"; not told apart from it: {', '.join(self.tied)}." if self.tied else "."
            one = len(self.headline[self.first].seeds) == 1
            said.append(told + (" Of one seed, noise is how clients differ; seeds may differ more." if one else ""))
        return said

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, small enough to be kept."""
        return {
            "columns": list(self.columns),
            "rows": {
                title: {column: number.to_json() for column, number in cells.items()}
                for title, cells in self.rows.items()
            },
            "headline": {title: number.to_json() for title, number in self.headline.items()},
            "differences": {title: dict(found) for title, found in self.differences.items()},
        }

    @staticmethod
    def of_json(stored: Mapping[str, Any]) -> Comparison:
        """From what :meth:`to_json` gave.

        >>> table = Comparison(("original",), {"a": {"original": Number(70.0, 0.0)}}, {"a": Number(70.0, 0.0)})
        >>> Comparison.of_json(table.to_json()) == table
        True
        """

        def number(plain: Mapping[str, Any]) -> Number:
            seeds = tuple(plain.get("seeds", ()))
            return Number(plain["mean"], plain.get("std", 0.0), plain.get("error"), plain.get("paper"), seeds)

        rows = {title: {c: number(own) for c, own in cells.items()} for title, cells in stored["rows"].items()}
        headline = {title: number(own) for title, own in stored["headline"].items()}
        return Comparison(tuple(stored["columns"]), rows, headline, dict(stored.get("differences", {})))


def compared(result: Result, rule: str = "best-val") -> Comparison:
    """The rows of a result beside the published numbers; what its preset puts ``aside`` is shown and not ranked.

    Rows of one method at several points of a sweep are one row with a column for each. The headline is the mean over
    streams where the paper has one, else the column that the paper's number of the row stands beside, or, for a row
    without one, most rows of its kind; over several points it is their mean.
    """
    rows = [row for row in result.rows if not row.bound]
    titles = titles_of(rows)
    points = list(dict.fromkeys(row.point for row in rows))
    metrics = result.metrics()
    means = any(row.paper(MEAN, rule) is not None for row in rows)
    usual = {} if means else _usual(rows, metrics, rule)
    cells: dict[str, dict[str, Number]] = {}
    heads: dict[str, dict[Point, tuple[Number, list[dict[str, float]]]]] = {}
    for row in rows:
        title = titles[row.method, row.adapter]
        for metric in metrics:
            if (number := _number(row, metric, rule)) is not None:
                cells.setdefault(title, {})[_column(metric, row.point)] = number
        ranked_by = MEAN if means else _own(row, metrics, rule) or usual.get(_kind(row))
        if ranked_by is not None and (number := _number(row, ranked_by, rule)) is not None:
            heads.setdefault(title, {})[row.point] = (number, _by_client(row, ranked_by, rule))
    columns = tuple(
        column
        for point in points
        for metric in metrics
        if any((column := _column(metric, point)) in own for own in cells.values())
    )
    whole = {title: own for title, own in heads.items() if len(own) == len(points)}
    headline = {title: _over_points([number for number, _ in own.values()]) for title, own in whole.items()}
    aside = {
        titles[row.method, row.adapter]
        for row in rows
        if any(own.aside for found in row.values.values() for own in found)
    }
    ranked = {title: number for title, number in headline.items() if title not in aside}
    values = {title: _joined(own) for title, own in whole.items() if title in ranked}
    seeds = {titles[row.method, row.adapter]: row.seeds for row in rows}  # only what one seed gave both can be compared
    return Comparison(columns, cells, ranked, _differences(ranked, values, seeds))


def titles_of(rows: Iterable[Row]) -> dict[tuple[str, str], str]:
    """What rows are called: by their adapter, or by their method where nothing adapts; never two alike.

    >>> rows = [Row("two heads", "FedTHE", ()), Row("FedICON", "none", ()), Row("FedICON", "FedICON", ())]
    >>> list(titles_of(rows).values())
    ['FedTHE', 'FedICON, not adapted', 'FedICON']
    """
    pairs = list(dict.fromkeys((row.method, row.adapter) for row in rows))
    adapters = Counter(adapter for _, adapter in pairs)
    made: dict[tuple[str, str], str] = {}
    for method, adapter in pairs:
        if adapter == "none":
            made[method, adapter] = f"{method}, not adapted" if adapters[method] else method
        else:
            made[method, adapter] = adapter if adapters[adapter] == 1 else f"{method}, {adapter}"
    return made


def _number(row: Row, metric: Metric, rule: str) -> Number | None:
    found = row.scores(metric, rule)
    seeds = tuple(score.summary.client_mean for score in found if score.summary.client_mean is not None)
    if not seeds or len(seeds) < len(found):
        return None
    clients = _mean_by_client(_by_client(row, metric, rule))
    return Number(*mean_and_std(seeds), standard_error(list(clients.values())), row.paper(metric, rule), seeds)


def _by_client(row: Row, metric: Metric, rule: str) -> list[dict[str, float]]:
    """Every client's number, for each seed; of a mean over streams the mean of its numbers on them."""
    scores = row.scores(metric, rule)
    streams = scores[0].of_streams if scores else ()
    if not streams:
        return row.accuracies(metric, rule)
    parts = [row.accuracies(metric._replace(stream=stream), rule) for stream in streams]
    return [
        {client: fmean(own[client] for own in seed) for client in seed[0] if all(client in own for own in seed)}
        for seed in zip(*parts, strict=True)
    ]


def _mean_by_client(seeds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for own in seeds for name in own)
    return {name: fmean(own[name] for own in seeds if name in own) for name in names}


def _own(row: Row, metrics: Sequence[Metric], rule: str) -> Metric | None:
    """Where the paper's number of a row stands."""
    return next((metric for metric in metrics if row.paper(metric, rule) is not None), None)


def _kind(row: Row) -> bool:
    """Whether clients have models of their own."""
    return any(metric.model == "personal" for _, metric in row.values)


def _usual(rows: Sequence[Row], metrics: Sequence[Metric], rule: str) -> dict[bool, Metric]:
    """The column that most published numbers of rows of a kind stand in; where a kind has none, that of all rows."""
    found = [(_kind(row), own) for row in rows if (own := _own(row, metrics, rule)) is not None]
    usual = {kind: Counter(own for one, own in found if kind == one).most_common(1) for kind in (False, True)}
    every = Counter(own for _, own in found).most_common(1) or [(metric, 1) for metric in metrics[:1]]
    return {kind: (own or every)[0][0] for kind, own in usual.items() if own or every}


def _column(metric: Metric, point: Point) -> str:
    """A column's name: the stream, whose clients if not those that trained, and the sweep's values."""
    after = "after local " if metric.model == "after-local" else ""
    whose = " (unseen)" if metric.population == "unseen" else ""
    where = f", {' '.join(str(value) for _, value in point)}" if point else ""
    return f"{after}{metric.stream}{whose}{where}"


def _over_points(numbers: Sequence[Number]) -> Number:
    papers = [number.paper for number in numbers if number.paper is not None]
    seeds = tuple(fmean(values) for values in zip(*(number.seeds for number in numbers), strict=False))
    errors = [number.error for number in numbers if number.error is not None]
    error = fmean(e**2 for e in errors) ** 0.5 / len(numbers) ** 0.5 if len(errors) == len(numbers) else None
    return Number(*mean_and_std(seeds), error, fmean(papers) if len(papers) == len(numbers) else None, seeds)


def _joined(own: Mapping[Point, tuple[Number, list[dict[str, float]]]]) -> list[dict[str, float]]:
    """The clients of all points, for each seed; a client is another one at another point."""
    seeds = min(len(values) for _, values in own.values())
    return [
        {f"{point} {client}": value for point, (_, values) in own.items() for client, value in values[seed].items()}
        for seed in range(seeds)
    ]


def _differences(
    headline: Mapping[str, Number], values: Mapping[str, list[dict[str, float]]], seeds: Mapping[str, tuple[int, ...]]
) -> dict[str, dict[str, Any]]:
    """Of the first row from every other that can be compared with it in pairs."""
    if not headline:
        return {}
    first = max(headline, key=lambda title: headline[title].mean)
    alike = [title for title in headline if title != first and seeds[title] == seeds[first]]
    others = [title for title in alike if comparable(values[first], values[title])]
    found = paired_differences(values[first], [values[title] for title in others], seed=SEED)
    return {
        title: {"mean": round(d.mean, 2), "low": round(d.low, 2), "high": round(d.high, 2), "noise": d.noise}
        for title, d in zip(others, found, strict=True)
    }
