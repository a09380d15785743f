"""Results read back from run folders, whoever ran them and when."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from fedshift.engines.base import Score
from fedshift.results.result import Point, Result, Row
from fedshift.store.costs import Costs, mean_costs, measured, published_by
from fedshift.store.folder import NOTES, RunFolder, read_config, title_of
from fedshift.store.rows import mean_over, metric_parts, summarise

Run: TypeAlias = tuple[int, list[Any], dict[str, float]]  # seed, scores, cost


def collect(paths: Iterable[Path] | Mapping[Path, Sequence[str]]) -> Result:
    """Rows of all these run folders, grouped over seeds: runs whose settings differ in nothing else.

    A mapping says which adapters of each folder are wanted, and in which order; otherwise all there are, ``none`` first.
    """
    wanted = dict(paths) if isinstance(paths, Mapping) else {}
    folders = list(paths)
    configs = {path: read_config(path) for path in folders}
    points = points_of(configs)
    grouped: dict[tuple[str, str, Point, bool], list[Run]] = {}
    costs_notes: dict[str, None] = {}
    validated = False
    for path, config in configs.items():
        folder = RunFolder(path)
        lines = folder.lines()
        validated = validated or validated_by(lines)
        scores = folder.scores()
        costs = _costs(folder, lines, scores)
        costs_notes |= dict.fromkeys(f"{title_of(config)}: {note}" for note in costs.notes)
        families: dict[str, list[list[dict[str, Any]]]] = {}
        for adapter in wanted.get(path) or sorted(scores, key=lambda name: (name != "none", name)):
            rows = scores[adapter]
            oracle = _oracle(lines, rows) if adapter == "none" else []
            whole = [*rows, *_validation(lines, adapter, rows), *oracle]
            run = (config["seed"], whole, costs.numbers())
            grouped.setdefault((title_of(config), adapter, points[path], False), []).append(run)
            families.setdefault(rows[0].get("family", "") if rows else "", []).append(rows)
        for family, members in families.items():
            if family and len(members) > 1:
                run = (config["seed"], _bound(members), costs.numbers())
                key = (title_of(config), f"{family}, best per client (uses labels)", points[path], True)
                grouped.setdefault(key, []).append(run)
    notes = [*dict.fromkeys(note for path in folders for note in _notes(path)), *costs_notes]
    return Result(tuple(_row(*key, runs) for key, runs in grouped.items()), tuple(folders), tuple(notes), validated)


def _row(method: str, adapter: str, point: Point, bound: bool, runs: Sequence[Run]) -> Row:
    keys = list(dict.fromkeys((row["selection"], row["metric"]) for _, rows, _ in runs for row in rows))
    by_key = {key: [r for _, rows, _ in runs for r in rows if (r["selection"], r["metric"]) == key] for key in keys}
    complete = {key: found for key, found in by_key.items() if len(found) == len(runs)}
    cost = mean_costs([cost for _, _, cost in runs])
    return Row(method, adapter, point, tuple(seed for seed, _, _ in runs), complete, cost, bound)


def _bound(members: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Scores as if every client had known, on every stream, which adapter of a family suits it best."""
    keyed = [{(row["selection"], row["metric"]): row for row in rows} for rows in members]
    made: dict[tuple[str, str], dict[str, Any]] = {}
    for key, first in keyed[0].items():
        rows = [by_key[key] for by_key in keyed if key in by_key]
        if len(rows) < len(members):
            continue
        same = {"selection": key[0], "metric": key[1], "round": first["round"]}
        if "of" in first:
            columns = [made[key[0], name] for name in _parts_of(first) if (key[0], name) in made]
            if len(columns) == len(first["of"]):
                made[key] = {**same, **mean_over(columns), "of": first["of"]}
            continue
        chosen = {
            client: max((row["by-client"][client] for row in rows if client in row["by-client"]), key=_rank)
            for client in first["by-client"]
        }
        scores = {
            name: Score(n, right, math.nan if loss is None else loss) for name, (n, right, loss) in chosen.items()
        }
        made[key] = {**same, **_finite(summarise(scores).as_dict()), "by-client": chosen}
    return list(made.values())


def _parts_of(mean: Mapping[str, Any]) -> list[str]:
    """The metrics a mean over streams is of."""
    model, _, population = metric_parts(mean["metric"])
    return [f"{model}/{stream}/{population}" for stream in mean["of"]]


def _rank(counts: Sequence[Any]) -> tuple[float, float]:
    """By right answers, then by loss."""
    _, right, loss = counts
    return right, -math.inf if loss is None else -loss


def _finite(numbers: Mapping[str, float]) -> dict[str, float | None]:
    return {key: value if math.isfinite(value) else None for key, value in numbers.items()}


def _notes(path: Path) -> list[str]:
    try:
        return (path / NOTES).read_text().splitlines()
    except FileNotFoundError:
        return []


def points_of(configs: Mapping[Path, Mapping[str, Any]]) -> dict[Path, Point]:
    """What tells runs of one method apart: the sweep's values, and any other setting that differs between them."""
    swept = {path: dict(config.get("sweep-point") or {}) for path, config in configs.items()}
    flat = {path: _flat(config) for path, config in configs.items()}
    extra: dict[Path, dict[str, Any]] = {path: {} for path in configs}
    for title in dict.fromkeys(title_of(config) for config in configs.values()):
        members = [path for path, config in configs.items() if title_of(config) == title]
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


def _oracle(lines: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The best test score of any evaluated round, if test streams were scored during training."""
    means = {row["metric"]: _parts_of(row) for row in rows if "of" in row}
    best: dict[str, Mapping[str, Any]] = {}
    for line in (line for line in lines if "adapter" not in line):
        scored = {metric: value for metric, value in line.items() if isinstance(value, dict)}
        scored |= {
            metric: mean_over([scored[part] for part in parts])
            for metric, parts in means.items()
            if all(part in scored for part in parts)
        }
        for metric, numbers in scored.items():
            if "/val/" in metric:
                continue
            if numbers["avg"] is None:
                continue
            if metric not in best or numbers["avg"] > best[metric]["avg"]:
                best[metric] = {**numbers, "round": line["round"]}
    return [{"selection": "oracle", "metric": metric, **numbers} for metric, numbers in best.items()]


def _validation(
    lines: Sequence[Mapping[str, Any]], adapter: str, rows: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """What validation images said of the states that were scored, where nobody who trained has test images.

    Elsewhere that is one more column for a table of streams; there it is all that is known of those who trained. Of an
    adapter whose round was chosen after its own adaptation it is the accuracy after that.
    """
    tested = [row for row in rows if row["avg"] is not None]
    if any(metric_parts(row["metric"])[2] == "clients" for row in tested):
        return []
    adapted: dict[int, tuple[str, Any]] = {}
    plain: dict[int, tuple[str, Any]] = {}
    for line in lines:
        found = next(((key, value) for key, value in line.items() if "/val/" in key), None)
        if line.get("adapter") == adapter:
            adapted[line["round"]] = (plain[line["round"]][0], line["val"])
        elif found is not None:
            plain[line["round"]] = found
    known = adapted or plain
    made: dict[str, dict[str, Any]] = {}
    for row in (row for row in tested if row["round"] in known):
        metric, numbers = known[row["round"]]
        paper = {"paper": row["paper-validation"]} if "paper-validation" in row else {}
        if numbers["avg"] is not None:
            line = {"selection": row["selection"], "metric": metric, "round": row["round"], **numbers, **paper}
            made.setdefault(row["selection"], line)  # streams have it in common
    return list(made.values())


def validated_by(lines: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a run was ever scored on validation images; without any there is no number."""
    scored = (value for line in lines for key, value in line.items() if "/val/" in key)
    return any(value["avg"] is not None for value in scored)


def _costs(
    folder: RunFolder, lines: Sequence[Mapping[str, Any]], scores: Mapping[str, Sequence[Mapping[str, Any]]]
) -> Costs:
    """The ledger as it is stored; of a run that has none, what its rounds tell."""
    stored = folder.costs()
    return Costs.of(stored) if stored is not None else measured(Costs(), lines, published_by(scores))


def names_of(folders: Sequence[Path]) -> dict[Path, str]:
    """What runs are called: the method, and what else tells them apart; seeds share a name."""
    configs = {path: read_config(path) for path in folders}
    points = points_of(configs)
    return {
        path: ", ".join([title_of(config), *(f"{key} = {value}" for key, value in points[path])])
        for path, config in configs.items()
    }
