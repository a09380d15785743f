"""What to deploy: a pure view of results that never looks at a test label.

Every method with every adapter is compared on validation twins of the streams (:mod:`fedshift.runs.twins`): per client
the mean over the twins, then a paired bootstrap over clients and seeds. An adapter is recommended only if it gains more
than noise and collapses nowhere; the cheaper of two that cannot be told apart is the one without it. Of methods that
cannot be told apart the better one is named, and the others are said to be as good.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedshift.errors import UserError
from fedshift.measures.measurement import MEASURES, listed_measure
from fedshift.results.plain import Sheet
from fedshift.results.stats import Difference, Values, comparable, paired_difference
from fedshift.results.tables import capitalised, short_name
from fedshift.results.trouble import BALANCED, FLOOR

if TYPE_CHECKING:
    from fedshift.results.result import Result, Row
    from fedshift.store.metric import Metric


@dataclass(frozen=True)
class Candidate:
    """A method with an adapter, and what speaks for and against it."""

    method: str
    adapter: str
    point: tuple[tuple[str, Any], ...]
    level: float  # the measure on validation twins: mean over clients, streams and seeds
    gain: Difference | None  # over the same method without adapter; None for that itself
    behind: Difference | None  # what the recommended pair is better by; None for that itself
    against: tuple[str, ...]  # why it is not recommended, whatever its level
    worst: tuple[str, float]  # the client it serves worst
    cost: Mapping[str, float]

    @property
    def title(self) -> str:
        """What people call it."""
        point = "".join(f", {key} = {value}" for key, value in self.point)
        return f"{self.method}{point} with " + ("no adapter" if self.adapter == "none" else f"adapter {self.adapter}")


@dataclass(frozen=True)
class Advice:
    """What to deploy, why, and what was compared."""

    measure: str
    chosen: Candidate | None  # None: nothing that can be recommended
    candidates: tuple[Candidate, ...]  # the best first
    reasons: tuple[str, ...]
    by_stream: Mapping[str, str]  # the best pair on each stream's twin alone
    streams: tuple[str, ...]  # whose twins were compared

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            "measure": self.measure,
            "recommended": None if self.chosen is None else _plain(self.chosen),
            "reasons": list(self.reasons),
            "by-stream": dict(self.by_stream),
            "streams": list(self.streams),
            "candidates": [_plain(candidate) for candidate in self.candidates],
        }

    def to_json(self) -> str:
        """Everything, for programs."""
        return json.dumps(self.to_dict(), indent=1)

    def lines(self) -> list[str]:
        """What a person is told."""
        head = "Nothing here can be recommended." if self.chosen is None else f"Deploy {self.chosen.title}."
        return [head, *self.reasons]

    def table(self) -> Sheet:
        """All that was compared, the best first."""
        title = f"{capitalised(MEASURES[self.measure].title)} on validation images under the streams' shifts"
        table = Sheet(title=title, title_justify="left")
        for column in ("method", "adapter", "level", "adapter gains", "behind", "worst client", "against it"):
            table.add_column(column, justify="left" if column in ("method", "adapter", "against it") else "right")
        for candidate in self.candidates:
            point = "".join(f", {key} = {value}" for key, value in candidate.point)
            cells = [
                candidate.method + point,
                candidate.adapter,
                f"{candidate.level:.2f}",
                _difference(candidate.gain),
                _difference(candidate.behind),
                f"{candidate.worst[0]} {candidate.worst[1]:.1f}",
                "; ".join(candidate.against),
            ]
            table.add_row(*cells, style="bold" if candidate is self.chosen else None)
        return table


def advise(result: Result, measure: str) -> Advice:
    """Advice on the rows of a result; raises a UserError if none was scored on validation images."""
    listed_measure(measure)
    rows = [row for row in result.rows if row.twins and not row.bound]
    if not rows:
        raise UserError(
            "there is nothing to advise by: no run was scored on validation images (repeat its fedshift run with a "
            "validation share; finished rounds are not run again)"
        )
    metrics = list(dict.fromkeys(metric.column for row in rows for metric in row.twins))
    rows = [row for row in rows if _per_client(row, metrics, measure)]
    seeds = max(len(row.seeds) for row in rows)
    rows = [row for row in rows if len(row.seeds) == seeds]
    values = {id(row): _per_client(row, metrics, measure) for row in rows}
    balanced = {id(row): _per_client(row, metrics, BALANCED) for row in rows}
    plain = {_model(row): row for row in rows if row.adapter == "none"}
    floor = next((row for row in rows if row.method == FLOOR), None)
    against = {id(row): _against(row, plain.get(_model(row)), floor, metrics, balanced) for row in rows}
    sign = 1 if MEASURES[measure].higher else -1
    ranked = sorted(rows, key=lambda row: -sign * _level(values[id(row)]))
    chosen = _choice([row for row in ranked if not against[id(row)]], plain, values, against, sign)
    candidates = [
        Candidate(
            method=row.method,
            adapter=row.adapter,
            point=row.point,
            level=_level(values[id(row)]),
            gain=_between(row, plain.get(_model(row)), values, sign),
            behind=None if chosen is None else _between(chosen, row, values, sign),
            against=tuple(against[id(row)]),
            worst=_worst(values[id(row)], sign),
            cost=row.cost,
        )
        for row in ranked
    ]
    named = dict(zip(map(id, ranked), candidates, strict=True))
    best = None if chosen is None else named[id(chosen)]
    by_stream = {}
    for metric in metrics:
        own = {id(row): _per_client(row, [metric], measure) for row in ranked if not against[id(row)]}
        if own:
            first = max(own, key=lambda key: sign * _level(own[key]))
            by_stream[short_name(metric).replace("\n", " ")] = named[first].title
    reasons = _reasons(best, candidates, result, metrics, by_stream, measure)
    streams = tuple(short_name(metric).replace("\n", " ") for metric in metrics)
    return Advice(measure, best, tuple(candidates), tuple(reasons), by_stream, streams)


def _choice(
    sound: Sequence[Row],
    plain: Mapping[Any, Row],
    values: Mapping[int, Values],
    against: Mapping[int, Sequence[str]],
    sign: int,
) -> Row | None:
    """The best that nothing speaks against; its own method without adapter if the adapter's gain is noise."""
    if not sound:
        return None
    first = sound[0]
    base = plain.get(_model(first))
    gain = _between(first, base, values, sign)
    if base is not None and gain is not None and gain.noise and not against[id(base)]:
        return base
    return first


def _against(
    row: Row, base: Row | None, floor: Row | None, metrics: Sequence[Metric], balanced: Mapping[int, Values]
) -> list[str]:
    """Why a pair is not to be deployed, however good its level is."""
    found = []
    if row.method == FLOOR:
        found.append("it is the floor")
    if row.diverged:
        found.append("training diverged")
    unserved = [short_name(metric).replace("\n", " ") for metric in metrics if not _twins(row, metric)]
    if unserved:
        found.append(f"nothing for {_named(unserved)}")
    scores = [score for metric in metrics for score in _twins(row, metric)]
    if any(own.confusion.collapsed for score in scores for own in score.measured.values()):
        found.append("predicts one class")
    if any(score.summary.broken for score in scores):
        found.append("predictions that are not numbers")
    if base is not None and base is not row and comparable(balanced[id(row)], balanced[id(base)]):
        change = paired_difference(balanced[id(row)], balanced[id(base)], seed=0)
        if change.mean < 0 and not change.noise:
            found.append(f"adaptation lowers balanced accuracy by {-change.mean:.1f}")
    if floor is not None and row.method != FLOOR and comparable(balanced[id(row)], balanced[id(floor)]):
        above = paired_difference(balanced[id(row)], balanced[id(floor)], seed=0)
        if above.noise or above.mean < 0:
            found.append("no better than the majority class")
    return found


def _reasons(
    best: Candidate | None,
    candidates: Sequence[Candidate],
    result: Result,
    metrics: Sequence[Metric],
    by_stream: Mapping[str, str],
    measure: str,
) -> list[str]:
    """Sentences: why this one, who is as good, who is served worst, what it costs, what was not looked at."""
    streams = ", ".join(short_name(metric).replace("\n", " ") for metric in metrics)
    said = [f"Compared by {MEASURES[measure].title} on validation images under the shifts of: {streams}."]
    if best is None:
        said.append("Something speaks against every pair: see the table.")
        return said
    own = [c for c in candidates if (c.method, c.point) == (best.method, best.point) and c is not best]
    adapted = [c for c in own if c.adapter != "none"]
    bare = next((c for c in own if c.adapter == "none"), None)
    if best.gain is not None and best.gain.noise and bare is not None:
        said.append(
            f"What its adapter gains is noise ({_interval(best.gain)}), but without it: {'; '.join(bare.against)}."
        )
    elif best.gain is not None:
        said.append(f"Its adapter gains {_interval(best.gain)} over none.")
    elif adapted:
        noise = [c for c in adapted if not c.against]
        if noise:
            gains = _named([f"{c.adapter} {_interval(c.gain)}" for c in noise])
            said.append(f"No adapter: what one gains is noise ({gains}).")
    refused = [c for c in candidates if c.against and c.adapter != "none"]
    if refused:
        said.append("Refused: " + _named([f"{c.title} ({'; '.join(c.against)})" for c in refused]) + ".")
    rivals = [c for c in candidates if c is not best and not c.against and c.behind is not None]
    alike = [c for c in rivals if c.behind is not None and c.behind.noise and c not in own]
    if alike:
        said.append(
            f"Cannot tell it from {_named([c.title for c in alike])}: the difference is noise"
            + (" (one seed; more seeds would tell more)." if all(len(row.seeds) == 1 for row in result.rows) else ".")
        )
    said.append(f"Worst served: client {best.worst[0]!r} with {best.worst[1]:.1f}.")
    cost = _cost(best.cost)
    if cost:
        said.append(f"Cost: {cost}.")
    others = {name: title for name, title in by_stream.items() if title != best.title}
    if others and len(by_stream) > 1:
        said.append("If only one shift is expected: " + "; ".join(f"{s}: {t}" for s, t in others.items()) + ".")
    lost = _without_twin(result, metrics)
    if lost:
        said.append(f"No validation images stand for {_named(lost)}; nothing was chosen by it.")
    return said


def _without_twin(result: Result, metrics: Sequence[Metric]) -> list[str]:
    known = {metric.column for metric in metrics}
    tested = [metric for metric in result.metrics() if not metric.is_validation and not metric.model]
    return [short_name(m) for m in tested if m not in known and m.stream != "mean"]


def _twins(row: Row, metric: Metric) -> Sequence[Any]:
    return next((row.twins[full] for full in metric.full() if full in row.twins), [])


def _per_client(row: Row, metrics: Sequence[Metric], measure: str) -> Values:
    """For each seed, by client and population, the mean over those of these twins that there are; empty without any."""
    seeds: list[dict[str, list[float]]] = [{} for _ in row.seeds]
    for scores in (found for metric in metrics if (found := _twins(row, metric))):
        for own, score in zip(seeds, scores, strict=True):
            for client, value in score.values(measure).items():
                name = client if score.metric.population == "clients" else f"{client} (as unseen)"
                own.setdefault(name, []).append(value)
    made = [{name: math.fsum(found) / len(found) for name, found in own.items()} for own in seeds]
    return made if all(made) else []


def _between(row: Row, other: Row | None, values: Mapping[int, Values], sign: int) -> Difference | None:
    """What ``row`` is better by."""
    if other is None or other is row or not comparable(values[id(row)], values[id(other)]):
        return None
    first, second = (values[id(row)], values[id(other)]) if sign > 0 else (values[id(other)], values[id(row)])
    return paired_difference(first, second, seed=0)


def _model(row: Row) -> Any:
    return row.method, row.point


def _level(values: Values) -> float:
    return math.fsum(math.fsum(own.values()) / len(own) for own in values) / len(values)


def _worst(values: Values, sign: int) -> tuple[str, float]:
    """The client with the lowest mean over seeds, and that."""
    names = list(dict.fromkeys(name for own in values for name in own))
    means = {name: math.fsum(found := [own[name] for own in values if name in own]) / len(found) for name in names}
    name = min(means, key=lambda name: sign * means[name])
    return name, means[name]


def _difference(found: Difference | None) -> str:
    if found is None:
        return ""
    return f"{found.mean:+.2f}" + (" (noise)" if found.noise else "")


def _interval(found: Difference | None) -> str:
    if found is None:
        return "nothing"
    return f"{found.mean:+.2f} points (95 % between {found.low:+.2f} and {found.high:+.2f})"


def _cost(cost: Mapping[str, float]) -> str:
    parts = []
    if "bytes-up" in cost:
        parts.append(
            f"{cost['bytes-up'] / 1000:.0f} kB up and {cost['bytes-down'] / 1000:.0f} kB down a round and client"
        )
    if "seconds-per-round" in cost:
        parts.append(f"{cost['seconds-per-round']:.2f} s a round here")
    return ", ".join(parts)


def _named(items: Sequence[str], most: int = 4) -> str:
    shown = [*items[:most], f"{len(items) - most} more"] if len(items) > most else list(items)
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def _plain(candidate: Candidate) -> dict[str, Any]:
    return {
        "method": candidate.method,
        "adapter": candidate.adapter,
        "point": dict(candidate.point),
        "level": candidate.level,
        "gain": _numbers(candidate.gain),
        "behind": _numbers(candidate.behind),
        "against": list(candidate.against),
        "worst-client": candidate.worst[0],
        "worst-level": candidate.worst[1],
        "cost": dict(candidate.cost),
    }


def _numbers(found: Difference | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {"mean": found.mean, "low": found.low, "high": found.high, "noise": found.noise}
