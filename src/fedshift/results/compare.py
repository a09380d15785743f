"""Two sets of runs side by side: what differs in their settings, and by how much their scores differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedshift.errors import UserError
from fedshift.measures.measurement import MEASURES, listed_measure
from fedshift.results.by_task import task_of
from fedshift.results.collect import dotted
from fedshift.results.gather import Gathered, gather
from fedshift.results.plain import Sheet
from fedshift.results.result import Result, Row
from fedshift.results.sections.origin import facts_of
from fedshift.results.sections.views import digits_of, title_of, unit_of
from fedshift.results.stats import LEVEL, Difference, comparable, paired_difference
from fedshift.results.tables import capitalised
from fedshift.store.found import read_config
from fedshift.store.found import title_of as method_of
from fedshift.store.metric import RULES, Metric
from fedshift.store.summary import mean_and_std

MADE = ("fedshift", "torch", "python", "device", "engine", "precision")  # of ``done``
ABSENT = "-"


@dataclass(frozen=True)
class Setting:
    """A setting in which the two differ, and the methods it differs for; no methods: all."""

    key: str
    first: str
    second: str
    methods: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gap:
    """What one row of the second has more than its row of the first, on one stream."""

    method: str
    adapter: str
    stream: str
    first: float
    second: float
    seeds: tuple[int, ...]  # that both have
    difference: Difference | None  # None: they cannot be compared in pairs


@dataclass(frozen=True)
class Comparison:
    """All that differs."""

    names: tuple[str, str]
    measure: str
    rule: str
    settings: tuple[Setting, ...]
    gaps: tuple[Gap, ...]
    notes: tuple[str, ...]

    def to_json(self) -> str:
        """Everything, for programs."""
        return json.dumps(asdict(self), indent=1)

    def settings_table(self) -> Sheet | None:
        """What differs in the settings; None if nothing does."""
        if not self.settings:
            return None
        table = Sheet("setting", "first", "second", "of", title="Settings that differ", title_justify="left")
        for one in self.settings:
            table.add_row(one.key, one.first, one.second, ", ".join(one.methods) or "all")
        return table

    def table(self) -> Sheet:
        """A line for every pair of rows and stream."""
        digits = digits_of(self.measure)
        title = f"{capitalised(MEASURES[self.measure].title)} in {unit_of(self.measure)}: second less first"
        table = Sheet(title=title, title_justify="left")
        for head in ("method", "adapter", "stream"):
            table.add_column(head)
        for head in ("first", "second", "difference", f"{LEVEL} % between", "seeds"):
            table.add_column(head, justify="right", no_wrap=True)
        table.add_column("")
        for gap in self.gaps:
            found = gap.difference
            change = gap.second - gap.first if found is None else found.mean
            span = "" if found is None else f"{found.low:+.{digits}f} and {found.high:+.{digits}f}"
            word = "not in pairs" if found is None else "noise" if found.noise else self._better(change)
            cells = [f"{gap.first:.{digits}f}", f"{gap.second:.{digits}f}", f"{change:+.{digits}f}", span]
            table.add_row(gap.method, gap.adapter, gap.stream, *cells, str(len(gap.seeds)), word)
        return table

    def _better(self, change: float) -> str:
        return "better" if (change > 0) == MEASURES[self.measure].higher else "worse"


def compare(first: Path, second: Path, *, measure: str = "", rule: str = "best-val") -> Comparison:
    """Two folders of runs, or two versions of one: rows of the same method and adapter are compared in pairs.

    Pairs are clients under seeds that both have. Where each side has one method, they are compared whatever they are
    called.
    """
    if rule not in RULES:
        raise UserError(f"there is no selection rule {rule!r}; there are: {', '.join(RULES)}")
    sides = gather([first]), gather([second])
    chosen = measure or sides[0].result.measure
    listed_measure(chosen)
    pairs, alone = _matched(*(side.result for side in sides))
    gaps = [gap for one, other in pairs for gap in _gaps(one, other, rule, chosen)]
    if not gaps:
        raise UserError(f"{first} and {second} have nothing in common: no method, adapter and stream is in both")
    notes = [*(str(out) for side in sides for out in side.left_out), *alone, *_cautions(pairs)]
    names = str(first), str(second)
    return Comparison(names, chosen, rule, tuple(_settings(*sides)), tuple(gaps), tuple(notes))


def _matched(one: Result, other: Result) -> tuple[list[tuple[Row, Row]], list[str]]:
    """Rows that belong together, and sentences on those that have no partner."""
    single = len({row.method for row in one.rows}) == len({row.method for row in other.rows}) == 1
    pairs, left = [], [row for row in other.rows if not row.bound]
    alone = []
    for row in (row for row in one.rows if not row.bound):
        fitting = [r for r in left if (single or r.method == row.method) and r.adapter == row.adapter]
        exact = [r for r in fitting if r.point == row.point] or (fitting if len(fitting) == 1 else [])
        if exact:
            pairs.append((row, exact[0]))
            left.remove(exact[0])
        else:
            alone.append(f"only the first has {_name(row)}")
    return pairs, [*alone, *(f"only the second has {_name(row)}" for row in left)]


def _name(row: Row) -> str:
    point = "".join(f", {key} = {value}" for key, value in row.point)
    return f"{row.method}{point}" + ("" if row.adapter == "none" else f" with adapter {row.adapter}")


def _gaps(one: Row, other: Row, rule: str, measure: str) -> list[Gap]:
    columns = dict.fromkeys(metric.column for selection, metric in one.values if selection == rule)
    common = tuple(seed for seed in one.seeds if seed in other.seeds)
    name = one.method if one.method == other.method else f"{one.method} / {other.method}"
    made = []
    for metric in columns:
        asked = metric._replace(name=measure)
        levels = [_level(row, asked, rule, common) for row in (one, other)]
        if levels[0] is None or levels[1] is None:
            continue
        values = [_values(row, asked, rule, common) for row in (one, other)]
        found = paired_difference(values[1], values[0], seed=0) if comparable(*values) else None
        made.append(Gap(name, one.adapter, title_of(metric), levels[0], levels[1], common, found))
    return made


def _level(row: Row, metric: Metric, rule: str, seeds: Sequence[int]) -> float | None:
    """The client mean, over the common seeds or else over all."""
    scores = row.scores(metric, rule)
    wanted = [score for seed, score in zip(row.seeds, scores, strict=bool(scores)) if seed in seeds or not seeds]
    numbers = [score.summary_of(metric.name).client_mean for score in wanted]
    return mean_and_std([n for n in numbers if n is not None])[0] if numbers and None not in numbers else None


def _values(row: Row, metric: Metric, rule: str, seeds: Sequence[int]) -> list[dict[str, float]]:
    """By client, for each common seed in the same order."""
    found = dict(zip(row.seeds, row.accuracies(metric, rule), strict=True))
    return [found[seed] for seed in seeds]


def _cautions(pairs: Sequence[tuple[Row, Row]]) -> list[str]:
    notes = []
    if any(
        _tasks(one).get(seed) != task
        for one, other in pairs
        for seed, task in _tasks(other).items()
        if seed in one.seeds
    ):
        notes.append("the tasks differ: clients are paired by their names, but were tested on other images")
    if any(not set(one.seeds) & set(other.seeds) for one, other in pairs):
        notes.append("some rows have no seed in common: their difference has no interval")
    elif all(len(set(one.seeds) & set(other.seeds)) == 1 for one, other in pairs):
        notes.append("one common seed: intervals are over clients alone, and too narrow")
    return notes


def _tasks(row: Row) -> dict[int, str]:
    return dict(zip(row.seeds, task_of(row), strict=False))


def _settings(one: Gathered, other: Gathered) -> list[Setting]:
    """What differs between runs of the same method; or between the two methods, if each side has one."""
    sides = [_by_method(side.result.folders) for side in (one, other)]
    names = [name for name in sides[0] if name in sides[1]]
    pairs = {name: (sides[0][name], sides[1][name]) for name in names}
    if not pairs and len(sides[0]) == len(sides[1]) == 1:
        (first,), (second,) = sides
        pairs = {f"{first} / {second}": (sides[0][first], sides[1][second])}
    found: dict[tuple[str, str, str], list[str]] = {}
    for name, (a, b) in pairs.items():
        for key in dict.fromkeys([*a, *b]):
            values = _text(a.get(key)), _text(b.get(key))
            if values[0] != values[1]:
                found.setdefault((key, *values), []).append(name)
    return [
        Setting(*key, methods=() if len(methods) == len(pairs) else tuple(methods)) for key, methods in found.items()
    ]


def _by_method(folders: Sequence[Path]) -> dict[str, Mapping[str, Any]]:
    """Settings and circumstances of the first run of each method."""
    made: dict[str, Mapping[str, Any]] = {}
    for folder in folders:
        config, facts = read_config(folder), facts_of(folder)
        made.setdefault(method_of(config), {**dotted(config), **{key: facts[key] for key in MADE if key in facts}})
    return made


def _text(value: Any) -> str:
    if value is None:
        return ABSENT
    return value if isinstance(value, str) else json.dumps(value)
