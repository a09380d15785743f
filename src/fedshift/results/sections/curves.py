"""Learning curves: means over seeds and their deviation, round by round."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedshift.measures.measurement import MEASURES
from fedshift.results.collect import names_of
from fedshift.results.sections.views import Views, evenly, short, title_of, unit_of
from fedshift.results.tables import capitalised
from fedshift.store.folder import RunFolder
from fedshift.store.found import read_config
from fedshift.store.found import title_of as method_of
from fedshift.store.lines import History
from fedshift.store.metric import ACCURACY
from fedshift.store.summary import mean_and_std

MOST_POINTS = 150  # of a curve; nobody sees more
Points = dict[int, float]  # a number by round


def curves(views: Views) -> list[dict[str, Any]]:
    """One picture for each number that was followed during training; a line for each method, with its band over seeds."""
    folders = views.result.folders
    names = names_of(folders)
    followed = {path: lines_of(RunFolder(path).history()) for path in folders}
    titles = list(dict.fromkeys(key for lines in followed.values() for key in lines))
    made = []
    for key in sorted(titles, key=lambda key: _order(key, titles)):
        series = [
            {"name": name, "hue": _hue(views, runs), **_band([followed[path][key] for path in runs])}
            for name in dict.fromkeys(names.values())
            if (runs := [path for path in folders if names[path] == name and followed[path].get(key)])
        ]
        series = [line for line in series if line["x"]]
        if any(len(line["x"]) > 1 for line in series):
            made.append({"title": key[0], "unit": key[1], "series": series})
    return sorted(
        made, key=lambda curve: statistics.median(len(line["x"]) for line in curve["series"]) < 2
    )  # dots last


def lines_of(history: History) -> dict[tuple[str, str], Points]:
    """Everything a run followed, by title and unit."""
    found: dict[tuple[str, str], Points] = {}
    for line in history.evaluations:
        for metric, summary in line.scores.items():
            if summary.client_mean is not None:
                title = f"{capitalised(MEASURES[metric.name].title)} on {title_of(metric)}"
                found.setdefault((title, unit_of(metric.name)), {})[line.round] = summary.client_mean
            if metric.name == ACCURACY and metric.is_validation and summary.loss is not None:
                found.setdefault((f"Loss on {title_of(metric)}", "nats"), {})[line.round] = summary.loss
    for adapted in history.adapted:
        if adapted.summary.client_mean is not None:
            title = f"Accuracy on validation after {adapted.label}"
            found.setdefault((title, "%"), {})[adapted.round] = adapted.summary.client_mean
    for round_ in history.rounds:
        if round_.loss is not None:
            found.setdefault(("Training loss", "nats"), {})[round_.round] = round_.loss
        for name, value in round_.server.items():
            if value is not None:
                found.setdefault((f"Server: {name}", ""), {})[round_.round] = value
    return found


def _order(key: tuple[str, str], titles: Sequence[tuple[str, str]]) -> tuple[bool, bool, int]:
    """Validation, then training, then the rest as it comes."""
    return "validation" not in key[0], key[0] != "Training loss", titles.index(key)


def _hue(views: Views, runs: Sequence[Path]) -> int:
    methods = list(dict.fromkeys(row.method for row in views.rows))
    title = method_of(read_config(runs[0]))
    return methods.index(title) if title in methods else 0


def _band(seeds: Sequence[Mapping[int, float]]) -> dict[str, Any]:
    """Mean and mean less and plus the deviation over seeds, at rounds that all of them have."""
    rounds = sorted(set.intersection(*(set(points) for points in seeds)))
    chosen = [rounds[k] for k in evenly(len(rounds), MOST_POINTS)]
    spread = [mean_and_std([points[x] for points in seeds]) for x in chosen]
    band: dict[str, Any] = {"x": chosen, "y": [short(mean) for mean, _ in spread], "seeds": len(seeds)}
    if len(seeds) > 1:
        band["low"] = [short(mean - deviation) for mean, deviation in spread]
        band["high"] = [short(mean + deviation) for mean, deviation in spread]
    return band
