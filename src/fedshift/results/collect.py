"""Results read back from run folders, whoever ran them and when."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from fedshift.measures.measurement import better
from fedshift.results.result import Point, Result, Row
from fedshift.results.trouble import alarms, broken_predictions, diverged_training, grown_loss, has_diverged
from fedshift.store.costs import Costs, mean_costs, measured, published_by
from fedshift.store.files import Damaged, attempt
from fedshift.store.folder import RunFolder
from fedshift.store.found import read_config, title_of
from fedshift.store.lines import History
from fedshift.store.metric import ACCURACY, Metric
from fedshift.store.plans import adapters_of
from fedshift.store.rows import ScoreRow
from fedshift.store.summary import ClientScore, Summary, mean_over, summarise

Key: TypeAlias = tuple[str, Metric]  # a selection rule and what was measured


class Run(NamedTuple):
    """What one seed adds to a row."""

    seed: int
    scores: list[ScoreRow]
    cost: dict[str, float]
    twins: list[ScoreRow]
    diverged: bool


def collect(paths: Iterable[Path] | Mapping[Path, Sequence[str]]) -> Result:
    """Rows of all these run folders, grouped over seeds: runs whose settings differ in nothing else.

    A mapping says which adapters of each folder are wanted, and in which order; otherwise all of them, as planned.
    What is damaged is left out and named in the notes; if nothing is left, it is said in an error.
    """
    wanted = dict(paths) if isinstance(paths, Mapping) else {}
    damaged: list[Damaged] = []
    read = {path: attempt(partial(_read, path), damaged) for path in paths}
    runs = {path: found for path, found in read.items() if found is not None}
    if damaged and not runs:
        raise damaged[0]
    configs = {path: config for path, (config, _, _) in runs.items()}
    points = points_of(configs)
    grouped: dict[tuple[str, str, Point, bool], list[Run]] = {}
    costs_notes: dict[str, None] = {}
    trouble: list[str] = []
    measures: dict[str, None] = {}
    validated = False
    for path, config in configs.items():
        folder, history = RunFolder(path), runs[path][1]
        scores, twins = folder.scores(damaged), folder.twins(damaged)
        measures[(config.get("evaluate") or {}).get("metric", ACCURACY)] = None
        validated = validated or history.validated
        name = _seeded(config, points[path])
        trouble += diverged_training(name, history.rounds, config.get("participation", 1.0))
        trouble += _engines(name, runs[path][2])
        trouble += grown_loss(name, history.rounds, history.evaluations)
        lost = has_diverged(history.rounds, history.evaluations)
        costs = _costs(folder, history, scores, damaged)
        costs_notes |= dict.fromkeys(f"{title_of(config)}: {note}" for note in costs.notes)
        families: dict[str, list[list[ScoreRow]]] = {}
        for label in wanted.get(path) or _as_planned(path, scores):
            if label not in scores:
                continue
            rows = scores[label]
            oracle = _oracle(history, rows, next(iter(measures))) if label == "none" else []
            whole = [*rows, *_validation(history, label, rows), *oracle]
            run = Run(config["seed"], whole, costs.numbers(), twins.get(label, []), lost)
            grouped.setdefault((title_of(config), label, points[path], False), []).append(run)
            families.setdefault(rows[0].family if rows else "", []).append(rows)
        for family, members in families.items():
            if family and len(members) > 1:
                label = f"{family}, best per client (uses labels)"
                run = Run(config["seed"], _bound(members, label), costs.numbers(), [], lost)
                grouped.setdefault((title_of(config), label, points[path], True), []).append(run)
    made = tuple(_row(*key, runs) for key, runs in grouped.items())
    trouble += [note for row in made for note in broken_predictions(row)]
    trouble += alarms(made, next(iter(measures), ACCURACY))
    said = [(attempt(RunFolder(path).notes, damaged) or "").splitlines() for path in runs]
    trouble = [*(f"left out: {one}" for one in damaged), *trouble]
    notes = [*trouble, *dict.fromkeys(note for lines in said for note in lines), *costs_notes]
    return Result(made, tuple(runs), tuple(notes), validated, tuple(trouble), next(iter(measures), ACCURACY))


def _as_planned(path: Path, scores: Iterable[str]) -> list[str]:
    """Adapters as they were asked for; others follow, ``none`` before them."""
    asked = {label: place for place, label in enumerate(adapters_of(path))}
    return sorted(scores, key=lambda label: (asked.get(label, len(asked)), label != "none", label))


def _read(path: Path) -> tuple[dict[str, Any], History, dict[str, Any]]:
    """What a run's results cannot do without."""
    folder = RunFolder(path)
    return read_config(path), folder.history(), folder.ending()


def _engines(name: str, ending: Mapping[str, Any]) -> list[str]:
    """Whether a run went on with another engine than it began with."""
    made = ending.get("made-by", [])
    return (
        [f"{name} was trained by {', then by '.join(made)}: its last digits are those of no single engine"]
        if made
        else []
    )


def _seeded(config: Mapping[str, Any], point: Point) -> str:
    """What one run is called."""
    return f"{', '.join([title_of(config), *(f'{key} = {value}' for key, value in point)])} seed {config['seed']}"


def _row(method: str, label: str, point: Point, bound: bool, runs: Sequence[Run]) -> Row:
    by_key: dict[Key, list[ScoreRow]] = {}
    for row in (row for run in runs for row in run.scores):
        by_key.setdefault(_key(row), []).append(row)
    complete = {key: found for key, found in by_key.items() if len(found) == len(runs)}
    twins: dict[Metric, list[ScoreRow]] = {}
    for row in (row for run in runs for row in run.twins):
        twins.setdefault(row.metric, []).append(row)
    twins = {metric: found for metric, found in twins.items() if len(found) == len(runs)}
    seeds, diverged = tuple(run.seed for run in runs), any(run.diverged for run in runs)
    return Row(method, label, point, seeds, complete, mean_costs([run.cost for run in runs]), twins, bound, diverged)


def _key(row: ScoreRow) -> Key:
    return row.selection, row.metric


def _bound(members: Sequence[Sequence[ScoreRow]], label: str) -> list[ScoreRow]:
    """Scores as if every client had known, on every stream, which adapter of a family suits it best."""
    keyed = [{_key(row): row for row in rows} for rows in members]
    made: dict[Key, ScoreRow] = {}
    for key, first in keyed[0].items():
        rows = [by_key[key] for by_key in keyed if key in by_key]
        if len(rows) < len(members):
            continue
        same = ScoreRow(first.metric, Summary(), first.selection, first.round, label, of_streams=first.of_streams)
        if first.of_streams:
            columns = [made[key[0], part] for part in _parts_of(first) if (key[0], part) in made]
            if len(columns) == len(first.of_streams):
                made[key] = replace(same, summary=mean_over([column.summary for column in columns]))
            continue
        chosen = {
            client: max((row.by_client[client] for row in rows if client in row.by_client), key=_rank)
            for client in first.by_client
        }
        made[key] = replace(same, summary=summarise(chosen), by_client=chosen)
    return list(made.values())


def _parts_of(mean: ScoreRow) -> list[Metric]:
    """The metrics a mean over streams is of."""
    return [mean.metric._replace(stream=stream) for stream in mean.of_streams]


def _rank(score: ClientScore) -> tuple[bool, float, float]:
    """By right answers, then by loss; after all others where predictions are not numbers."""
    return not score.broken, score.correct, -math.inf if score.loss is None else -score.loss


def points_of(configs: Mapping[Path, Mapping[str, Any]]) -> dict[Path, Point]:
    """What tells runs of one method apart: the sweep's values, and any other setting that differs between them."""
    swept = {path: dict(config.get("sweep-point") or {}) for path, config in configs.items()}
    flat = {path: dotted(config) for path, config in configs.items()}
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


def dotted(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys; what a seed decides is left out."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if not prefix and key in ("seed", "task-hash", "networks", "sweep-point", "code"):
            continue
        if isinstance(value, Mapping):
            flat |= dotted(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _oracle(history: History, rows: Sequence[ScoreRow], measure: str) -> list[ScoreRow]:
    """The best test score of any evaluated round, if test streams were scored during training."""
    means = {row.metric: row for row in rows if row.of_streams}
    best: dict[Metric, ScoreRow] = {}
    for line in history.evaluations:
        scored = dict(line.scores)
        for name in {ACCURACY, measure}:
            scored |= {
                metric._replace(name=name): mean_over([scored[part._replace(name=name)] for part in _parts_of(mean)])
                for metric, mean in means.items()
                if all(part._replace(name=name) in scored for part in _parts_of(mean))
            }
        for metric in (metric for metric in scored if metric.name == measure and not metric.is_validation):
            plain, value = scored[metric.plain], scored[metric].client_mean
            if value is None or plain.broken:
                continue
            known = best[metric.plain].summary_of(measure).client_mean if metric.plain in best else None
            if known is None or better(measure, value, known):
                best[metric.plain] = ScoreRow(
                    metric.plain, plain, "oracle", line.round, measures={measure: scored[metric]}
                )
    named = rows[0] if rows else None
    return [replace(row, label=named.label, adapter=named.adapter) if named else row for row in best.values()]


def _validation(history: History, label: str, rows: Sequence[ScoreRow]) -> list[ScoreRow]:
    """What validation images said of the states that were scored, where nobody who trained has test images.

    Elsewhere that is one more column for a table of streams; there it is all that is known of those who trained. Of an
    adapter whose round was chosen after its own adaptation it is the accuracy after that.
    """
    tested = [row for row in rows if row.summary.client_mean is not None]
    if any(row.metric.population == "clients" for row in tested):
        return []
    plain = {
        line.round: (metric, summary)
        for line in history.evaluations
        for metric, summary in line.scores.items()
        if metric.is_validation
    }
    adapted = {line.round: (plain[line.round][0], line.summary) for line in history.adapted if line.label == label}
    known = adapted or plain
    made: dict[str, ScoreRow] = {}
    for row in (row for row in tested if row.round in known):
        metric, summary = known[row.round]
        if summary.client_mean is not None:
            line = ScoreRow(metric, summary, row.selection, row.round, row.label, row.adapter, row.options)
            made.setdefault(row.selection, replace(line, paper=row.paper_validation))  # streams have it in common
    return list(made.values())


def _costs(
    folder: RunFolder, history: History, scores: Mapping[str, Sequence[ScoreRow]], damaged: list[Damaged]
) -> Costs:
    """The ledger as it is stored; of a run that has none, what its rounds tell."""
    stored = attempt(folder.costs, damaged)
    return stored if stored is not None else measured(Costs(), history.rounds, published_by(scores))


def names_of(folders: Sequence[Path]) -> dict[Path, str]:
    """What runs are called: the method, and what else tells them apart; seeds share a name."""
    configs = {path: read_config(path) for path in folders}
    points = points_of(configs)
    return {
        path: ", ".join([title_of(config), *(f"{key} = {value}" for key, value in points[path])])
        for path, config in configs.items()
    }
