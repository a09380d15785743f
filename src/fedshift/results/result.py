"""Results: rows over seeds, as tables and plain numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from rich.table import Table

from fedshift.errors import UserError
from fedshift.results.cost_table import costs_table
from fedshift.store.rows import mean_and_std

Point: TypeAlias = tuple[tuple[str, Any], ...]  # of a sweep
MOST_COLUMNS = 4  # of streams in the table of selection rules
RULES = ("last", "best-val", "oracle")
RULE_TEXT = {
    "last": "the state after the last round",
    "best-val": "the round with the best pooled validation accuracy",
    "oracle": "the best test accuracy of any evaluated round (a bound, not a choice)",
}


@dataclass(frozen=True)
class Row:
    """One method with one adapter: numbers per selection rule and metric, one for each seed."""

    method: str
    adapter: str
    point: Point
    seeds: tuple[int, ...] = ()
    values: Mapping[tuple[str, str], list[Mapping[str, Any]]] = field(default_factory=dict)
    cost: Mapping[str, float] = field(default_factory=dict)
    bound: bool = False  # chosen by test labels: nothing that could be deployed

    def number(self, metric: str, rule: str = "best-val", part: str = "avg") -> tuple[float, float] | None:
        """Mean and deviation over seeds of one part (avg, all, std, worst, loss) of a metric, or None."""
        found = self.values.get((rule, metric))
        if not found or any(value[part] is None for value in found):
            return None
        return mean_and_std([float(value[part]) for value in found])

    def paper(self, metric: str, rule: str = "best-val") -> float | None:
        """The published number for a metric, or None; it does not depend on seeds."""
        found = self.values.get((rule, metric))
        number = found[0].get("paper") if found else None
        return None if number is None else float(number)

    def telemetry(self, rule: str = "best-val") -> dict[str, dict[str, list[Mapping[str, Any]]]]:
        """Mean and counts by metric (without its model) and by what the adapter calls them, one for each seed."""
        found: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
        for (selection, metric), seeds in self.values.items():
            if selection == rule and all("telemetry" in seed for seed in seeds):
                names = {name: [seed["telemetry"][name] for seed in seeds] for name in seeds[0]["telemetry"]}
                found[metric.partition("/")[2]] = names
        return found

    def by_client(self, metric: str, rule: str = "best-val") -> dict[str, float]:
        """Accuracy in percent of every client that was tested, its mean over the seeds that tested it."""
        seeds = [value.get("by-client", {}) for value in self.values.get((rule, metric), [])]
        tested = {
            name: [100 * own[name][1] / own[name][0] for own in seeds if name in own and own[name][0]]
            for name in dict.fromkeys(name for own in seeds for name in own)
        }
        return {name: mean_and_std(numbers)[0] for name, numbers in tested.items() if numbers}


@dataclass(frozen=True)
class Result:
    """What an experiment gave."""

    rows: tuple[Row, ...]
    folders: tuple[Path, ...]
    notes: tuple[str, ...] = ()
    validated: bool = True  # whether any run had validation images to choose a round by

    def metrics(self) -> list[str]:
        """Test set and population of every score, without the model's part unless it is ``after-local``."""
        scored = [(metric, numbers) for row in self.rows for (_, metric), numbers in row.values.items()]
        # nobody may have images of a stream: clients that train only, where strangers are tested
        names = [metric for metric, numbers in scored if any(number["avg"] is not None for number in numbers)]
        plain = [metric.partition("/")[2] for metric in names if not metric.startswith("after-local/")]
        after = [metric for metric in names if metric.startswith("after-local/")]
        return list(dict.fromkeys([*plain, *after]))

    def accuracy(self, method: str, adapter: str = "none", stream: str = "original", rule: str = "best-val") -> float:
        """Mean over seeds of AVG on one stream: the number to compare methods by.

        Raises a UserError if there is none.
        """
        for row in self.rows:
            if (row.method, row.adapter) == (method, adapter):
                for model in ("personal", "global"):
                    found = row.number(f"{model}/{stream}/clients", rule)
                    if found is not None:
                        return found[0]
        raise UserError(f"there is no result of method {method!r} with adapter {adapter!r} on stream {stream!r}")

    def as_dicts(self) -> list[dict[str, Any]]:
        """Plain rows: one for every method, adapter, rule, metric and seed."""
        return [
            {
                "method": row.method,
                "adapter": row.adapter,
                **dict(row.point),
                "selection": rule,
                "metric": metric,
                "seed": seed,
                **{key: value for key, value in numbers.items() if key != "by-client"},
                **row.cost,
                **({"bound": True} if row.bound else {}),
            }
            for row in self.rows
            for (rule, metric), found in row.values.items()
            for seed, numbers in zip(row.seeds, found, strict=True)
        ]

    def table(self, rule: str = "best-val") -> Table:
        """Accuracy by method and adapter; AVG is over clients, ALL pools samples, worst is the worst tenth."""
        if rule not in RULES:
            raise UserError(f"there is no selection rule {rule!r}; there are: {', '.join(RULES)}")
        metrics = self.metrics()
        whole = ("avg", "all", "worst") if len(metrics) <= 2 else ("avg",)
        columns = [(metric, part) for metric in metrics for part in (("avg",) if _is_validation(metric) else whole)]
        sweep = list(dict.fromkeys(key for row in self.rows for key, _ in row.point))
        seeds = max((len(row.seeds) for row in self.rows), default=0)
        table = Table(
            title=f"Accuracy in % at {self.choice(rule)}, {seeds} seed{'s' if seeds != 1 else ''}", title_justify="left"
        )
        for column in ("method", "adapter", *sweep):
            table.add_column(column, no_wrap=True)
        papers = {metric: [paper_of(row, metric, rule) for row in self.rows] for metric in metrics}
        for metric, part in columns:
            beside = " (paper)" if part == "avg" and any(number is not None for number in papers[metric]) else ""
            title = part if part == "worst" else part.upper()
            table.add_column(f"{short_name(metric)}\n{title}{beside}", justify="right", overflow="fold")
        table.add_column("kB up\nclient", justify="right")
        table.add_column("kB down\nclient", justify="right")
        table.add_column("s\nround", justify="right")
        best = {(metric, part): self._best(metric, part, rule) for metric, part in columns}
        for number, row in enumerate(self.rows):
            cells = [
                _cell(
                    number_of(row, metric, rule, part),
                    None if row.bound else best[metric, part],
                    papers[metric][number] if part == "avg" else None,
                )
                for metric, part in columns
            ]
            point = [_text(dict(row.point).get(key, "")) for key in sweep]
            table.add_row(row.method, row.adapter, *point, *cells, *_cost_cells(row.cost))
        return table

    def choice(self, rule: str) -> str:
        """Whose accuracy a rule gives, in words; without validation images it is the last round's.

        >>> Result((), (), validated=False).choice("best-val")
        'the state after the last round'
        """
        return RULE_TEXT["last" if rule == "best-val" and not self.validated else rule]

    def rules_table(self) -> Table:
        """AVG under the three selection rules side by side; the oracle only where streams were scored during training.

        Of many streams the mean is shown, or else the first few: a terminal is not wider.
        """
        every = self.metrics()
        means = [metric for metric in every if metric.startswith("mean/")]
        metrics = every if len(every) <= MOST_COLUMNS else means or every[:MOST_COLUMNS]
        known = {rule for row in self.rows for rule, _ in row.values} - ({"best-val"} if not self.validated else set())
        table = Table(title="The same AVG under the selection rules", title_justify="left")
        sweep = list(dict.fromkeys(key for row in self.rows for key, _ in row.point))
        for column in ("method", "adapter", *sweep):
            table.add_column(column, no_wrap=True)
        for metric in metrics:
            for rule in (rule for rule in RULES if rule in known):
                table.add_column(f"{short_name(metric)}\n{rule}", justify="right")
        for row in self.rows:
            cells = [
                _cell(number_of(row, metric, rule, "avg"), None)
                for metric in metrics
                for rule in RULES
                if rule in known
            ]
            table.add_row(row.method, row.adapter, *(_text(dict(row.point).get(key, "")) for key in sweep), *cells)
        return table

    def telemetry_table(self, rule: str = "best-val") -> Table | None:
        """What adapters tell about themselves, as means over samples, clients and seeds; None if none tells anything."""
        told = [(row, metric, told) for row in self.rows for metric, told in row.telemetry(rule).items()]
        if not told:
            return None
        metrics = list(dict.fromkeys(metric for _, metric, _ in told))
        sweep = list(dict.fromkeys(key for row in self.rows for key, _ in row.point))
        table = Table(title=f"What adapters tell, means at {self.choice(rule)}", title_justify="left")
        for column in ("method", "adapter", *sweep, "name"):
            table.add_column(column, no_wrap=True)
        for metric in metrics:
            table.add_column(short_name(metric), justify="right")
        for row in self.rows:
            found = row.telemetry(rule)
            for name in dict.fromkeys(name for by_name in found.values() for name in by_name):
                seeds = [[seed["mean"] for seed in found.get(metric, {}).get(name, [])] for metric in metrics]
                cells = [_spread(values, 3) if values and None not in values else "-" for values in seeds]
                table.add_row(
                    row.method, row.adapter, *(_text(dict(row.point).get(key, "")) for key in sweep), name, *cells
                )
        return table

    def costs_table(self) -> Table:
        """What every method costs, with the definitions beneath; a method's adapters share its row."""
        sweep = list(dict.fromkeys(key for row in self.rows for key, _ in row.point))
        first = {(row.method, row.point): row for row in reversed(self.rows)}
        rows = [row for row in self.rows if first[row.method, row.point] is row]
        named = [((row.method, *(_text(dict(row.point).get(key, "")) for key in sweep)), row.cost) for row in rows]
        return costs_table(named, ("method", *sweep))

    def _best(self, metric: str, part: str, rule: str) -> float | None:
        plain = [row for row in self.rows if not row.bound]
        found = [number[0] for row in plain if (number := number_of(row, metric, rule, part)) is not None]
        return max(found) if len(found) > 1 else None


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def number_of(row: Row, metric: str, rule: str, part: str) -> tuple[float, float] | None:
    """Mean and deviation over seeds of a metric that is named without its model, or None."""
    return next((found for name in _full(metric) if (found := row.number(name, rule, part)) is not None), None)


def paper_of(row: Row, metric: str, rule: str) -> float | None:
    """The published number for a metric that is named without its model, or None."""
    return next((found for name in _full(metric) if (found := row.paper(name, rule)) is not None), None)


def clients_of(row: Row, metric: str, rule: str) -> dict[str, float]:
    """Accuracy in percent by client of a metric that is named without its model; empty if there is none."""
    return next((found for name in _full(metric) if (found := row.by_client(name, rule))), {})


def _full(metric: str) -> list[str]:
    """A metric with its model; a row has scores of one of them."""
    return [metric] if metric.startswith("after-local/") else [f"{model}/{metric}" for model in ("global", "personal")]


def _cell(number: tuple[float, float] | None, best: float | None, paper: float | None = None) -> str:
    beside = "" if paper is None else f" [dim]({paper:.2f})[/]"
    if number is None:
        return f"-{beside}"
    mean, deviation = number
    text = f"{mean:.1f}" + (f" ±{deviation:.1f}" if deviation else "")
    return (f"[bold]{text}[/]" if best is not None and mean >= best - 0.05 else text) + beside


def _spread(values: Sequence[float], digits: int) -> str:
    mean, deviation = mean_and_std(values)
    return f"{mean:.{digits}f}" + (f" ±{deviation:.{digits}f}" if deviation else "")


def _cost_cells(cost: Mapping[str, float]) -> tuple[str, str, str]:
    """Bytes per round and client, seconds per round; empty before the first round."""
    up, down = (f"{cost[key] / 1000:.0f}" if key in cost else "" for key in ("bytes-up", "bytes-down"))
    return up, down, f"{cost['seconds-per-round']:.2f}" if "seconds-per-round" in cost else ""


def short_name(metric: str) -> str:
    """A metric as a column's head."""
    if metric.startswith("after-local/"):
        return f"{short_name(metric.removeprefix('after-local/'))}\nafter local"
    if _is_validation(metric):
        return "validation"
    stream, _, population = metric.partition("/")
    return stream if population == "clients" else f"{stream} ({population})"


def _is_validation(metric: str) -> bool:
    return metric.startswith("val/")


def to_json(result: Result) -> str:
    """The rows as JSON."""
    return json.dumps(result.as_dicts(), indent=1)
