"""Results read back from run folders: rows over seeds, as tables and plain numbers."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from fedshift.bench.folder import RunFolder
from fedshift.bench.metrics import mean_and_std
from fedshift.errors import UserError

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
    point: tuple[tuple[str, Any], ...]
    seeds: tuple[int, ...] = ()
    values: Mapping[tuple[str, str], list[Mapping[str, Any]]] = field(default_factory=dict)
    cost: Mapping[str, float] = field(default_factory=dict)

    def number(self, metric: str, rule: str = "best-val", part: str = "avg") -> tuple[float, float] | None:
        """Mean and deviation over seeds of one part (avg, all, std, worst, loss) of a metric, or None."""
        found = self.values.get((rule, metric))
        if not found or any(value[part] is None for value in found):
            return None
        return mean_and_std([float(value[part]) for value in found])


@dataclass(frozen=True)
class Result:
    """What an experiment gave."""

    rows: tuple[Row, ...]
    folders: tuple[Path, ...]

    def metrics(self) -> list[str]:
        """Test set and population of every score, without the model's part unless it is ``after-local``."""
        names = [metric for row in self.rows for _, metric in row.values]
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
        parts = ("avg", "all", "worst") if len(metrics) <= 2 else ("avg",)
        sweep = list(dict.fromkeys(key for row in self.rows for key, _ in row.point))
        seeds = max((len(row.seeds) for row in self.rows), default=0)
        table = Table(
            title=f"Accuracy in % at {RULE_TEXT[rule]}, {seeds} seed{'s' if seeds != 1 else ''}", title_justify="left"
        )
        for column in ("method", "adapter", *sweep):
            table.add_column(column, no_wrap=True)
        for metric in metrics:
            for part in parts:
                table.add_column(
                    f"{short_name(metric)}\n{part.upper() if part != 'worst' else 'worst'}", justify="right"
                )
        table.add_column("kB up\nclient", justify="right")
        table.add_column("kB down\nclient", justify="right")
        table.add_column("s\nround", justify="right")
        best = {(m, p): self._best(m, p, rule) for m in metrics for p in parts}
        for row in self.rows:
            cells = [
                _cell(number_of(row, metric, rule, part), best[metric, part]) for metric in metrics for part in parts
            ]
            point = [_text(dict(row.point).get(key, "")) for key in sweep]
            table.add_row(row.method, row.adapter, *point, *cells, *_cost_cells(row.cost))
        return table

    def rules_table(self) -> Table:
        """AVG under the three selection rules side by side."""
        metrics = self.metrics()
        table = Table(title="The same AVG under the three selection rules", title_justify="left")
        sweep = list(dict.fromkeys(key for row in self.rows for key, _ in row.point))
        for column in ("method", "adapter", *sweep):
            table.add_column(column, no_wrap=True)
        for metric in metrics:
            for rule in RULES:
                table.add_column(f"{short_name(metric)}\n{rule}", justify="right")
        for row in self.rows:
            cells = [_cell(number_of(row, metric, rule, "avg"), None) for metric in metrics for rule in RULES]
            table.add_row(row.method, row.adapter, *(_text(dict(row.point).get(key, "")) for key in sweep), *cells)
        return table

    def _best(self, metric: str, part: str, rule: str) -> float | None:
        found = [number[0] for row in self.rows if (number := number_of(row, metric, rule, part)) is not None]
        return max(found) if len(found) > 1 else None


def collect(paths: Iterable[Path] | Mapping[Path, Sequence[str]]) -> Result:
    """Rows of all these run folders, grouped over seeds: runs whose settings differ in nothing else.

    A mapping says which adapters of each folder are wanted, and in which order; otherwise all there are, ``none`` first.
    """
    wanted = dict(paths) if isinstance(paths, Mapping) else {}
    folders = list(paths)
    configs = {path: _config(path) for path in folders}
    points = _points(configs)
    grouped: dict[tuple[str, str, tuple[tuple[str, Any], ...]], list[tuple[int, list[Any], dict[str, float]]]] = {}
    for path, config in configs.items():
        folder = RunFolder(path)
        lines = folder.lines()
        scores = folder.scores()
        for adapter in wanted.get(path) or sorted(scores, key=lambda name: (name != "none", name)):
            rows = scores[adapter]
            whole = [*rows, *(_oracle(lines) if adapter == "none" else [])]
            run = (config["seed"], whole, _cost(lines))
            grouped.setdefault((_title(config), adapter, points[path]), []).append(run)
    return Result(tuple(_row(*key, runs) for key, runs in grouped.items()), tuple(folders))


def _row(
    method: str,
    adapter: str,
    point: tuple[tuple[str, Any], ...],
    runs: Sequence[tuple[int, list[Any], dict[str, float]]],
) -> Row:
    keys = list(dict.fromkeys((row["selection"], row["metric"]) for _, rows, _ in runs for row in rows))
    by_key = {key: [r for _, rows, _ in runs for r in rows if (r["selection"], r["metric"]) == key] for key in keys}
    complete = {key: found for key, found in by_key.items() if len(found) == len(runs)}
    cost = {name: mean_and_std([c[name] for _, _, c in runs])[0] for name in runs[0][2]}
    return Row(method, adapter, point, tuple(seed for seed, _, _ in runs), complete, cost)


def _title(config: Mapping[str, Any]) -> str:
    title: str = config["method"].get("label") or config["method"]["name"]
    return title


def _points(configs: Mapping[Path, Mapping[str, Any]]) -> dict[Path, tuple[tuple[str, Any], ...]]:
    """What tells runs of one method apart: the sweep's values, and any other setting that differs between them."""
    swept = {path: dict(config.get("sweep-point") or {}) for path, config in configs.items()}
    flat = {path: _flat(config) for path, config in configs.items()}
    extra: dict[Path, dict[str, Any]] = {path: {} for path in configs}
    for title in dict.fromkeys(_title(config) for config in configs.values()):
        members = [path for path, config in configs.items() if _title(config) == title]
        known = {key for path in members for key in swept[path]}
        for key in dict.fromkeys(key for path in members for key in flat[path]):
            values = [flat[path].get(key) for path in members]
            if key not in known and any(value != values[0] for value in values):
                for path in members:
                    extra[path][key] = flat[path].get(key)
    # a swept key explains what differs in the table it sets; whatever else differs is shown too
    shown = {
        path: {**swept[path], **{k: v for k, v in extra[path].items() if _table(k) not in map(_table, swept[path])}}
        for path in configs
    }
    return {path: tuple((key, _plain(value)) for key, value in point.items()) for path, point in shown.items()}


def _table(key: str) -> str:
    return key.partition(".")[0]


def _plain(value: Any) -> Any:
    """A value that can be a key."""
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        return tuple(value)
    return json.dumps(value) if isinstance(value, list | dict) else value


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys; what a seed decides is left out."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if not prefix and key in ("seed", "task-hash", "networks", "sweep-point", "code"):
            continue
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def find_runs(path: Path) -> list[Path]:
    """The finished runs in a folder: a run itself, or any folder above some."""
    if not path.exists():
        raise UserError(f"there is no folder {path}")
    found = sorted(done.parent for done in path.rglob("done"))
    if not found:
        unfinished = next(path.rglob("metrics.jsonl"), None)
        hint = "; there is an unfinished one, go on with fedshift run ... --resume" if unfinished else ""
        raise UserError(f"{path} holds no finished run{hint}")
    return sorted(found, key=lambda run: (run / "config.toml").stat().st_mtime)


def _config(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((path / "config.toml").read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path} is not a run folder ({error})") from None


def _oracle(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The best test score of any evaluated round, if test streams were scored during training."""
    best: dict[str, Mapping[str, Any]] = {}
    for line in lines:
        for metric, numbers in line.items():
            if not isinstance(numbers, dict) or "/val/" in metric:
                continue
            if numbers["avg"] is None:
                continue
            if metric not in best or numbers["avg"] > best[metric]["avg"]:
                best[metric] = {**numbers, "round": line["round"]}
    return [{"selection": "oracle", "metric": metric, **numbers} for metric, numbers in best.items()]


def _cost(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means per round and client, from what really travelled."""
    rounds = [line for line in lines if "bytes-up" in line]
    clients = sum(line["participants"] for line in rounds) or 1
    return {
        "bytes-up": sum(line["bytes-up"] for line in rounds) / clients,
        "bytes-down": sum(line["bytes-down"] for line in rounds) / clients,
        "seconds-per-round": sum(line["seconds"] for line in rounds) / (len(rounds) or 1),
    }


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def number_of(row: Row, metric: str, rule: str, part: str) -> tuple[float, float] | None:
    """Mean and deviation over seeds of a metric that is named without its model, or None."""
    if metric.startswith("after-local/"):
        return row.number(metric, rule, part)
    for model in ("global", "personal"):
        found = row.number(f"{model}/{metric}", rule, part)
        if found is not None:
            return found
    return None


def _cell(number: tuple[float, float] | None, best: float | None) -> str:
    if number is None:
        return "-"
    mean, deviation = number
    text = f"{mean:.1f}" + (f" ±{deviation:.1f}" if deviation else "")
    return f"[bold]{text}[/]" if best is not None and mean >= best - 0.05 else text


def _cost_cells(cost: Mapping[str, float]) -> tuple[str, str, str]:
    """Bytes per round and client, seconds per round."""
    return f"{cost['bytes-up'] / 1000:.0f}", f"{cost['bytes-down'] / 1000:.0f}", f"{cost['seconds-per-round']:.2f}"


def short_name(metric: str) -> str:
    """A metric as a column's head."""
    if metric.startswith("after-local/"):
        return f"{short_name(metric.removeprefix('after-local/'))}\nafter local"
    stream, _, population = metric.partition("/")
    return stream if population == "clients" else f"{stream} ({population})"


def to_json(result: Result) -> str:
    """The rows as JSON."""
    return json.dumps(result.as_dicts(), indent=1)
