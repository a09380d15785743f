"""Whether predictions are as sure as they are right: bins of confidence, from kept predictions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedshift.errors import UserError
from fedshift.measures.exact import reliability
from fedshift.measures.predictions import Predictions
from fedshift.results.collect import names_of
from fedshift.results.result import Row
from fedshift.results.sections.views import Views
from fedshift.store.metric import Metric
from fedshift.store.predictions import predictions_file, read_predictions

MOST_BYTES = 300_000_000  # of files that are read: a page should not take minutes
BEST = "best-val"  # predictions are kept at the round that validation chose


def calibration(views: Views) -> dict[str, Any] | None:
    """Bins by column and row, [confidence, accuracy, samples] in percent, of all seeds together; None without any."""
    files = _files(views)
    if not files or sum(path.stat().st_size for own in files.values() for path in own) > MOST_BYTES:
        return None
    found: list[list[list[list[float]] | None]] = [[None] * len(views.rows) for _ in views.columns]
    for number, paths in files.items():
        pooled: dict[Metric, list[Predictions]] = {}
        for path in paths:
            for part in _parts(path):
                pooled.setdefault(part.metric.column, []).append(part.predictions)
        for column, metric in enumerate(views.columns):
            if metric in pooled:
                found[column][number] = _bins(pooled[metric])
    if not any(bins for rows in found for bins in rows):
        return None
    return {"bins": found, "rule": BEST if BEST in views.rules else views.rules[0]}


def _bins(parts: list[Predictions]) -> list[list[float]] | None:
    whole = Predictions(
        np.concatenate([part.log_probabilities for part in parts]), np.concatenate([part.labels for part in parts])
    )
    bins = reliability(whole)
    return [[round(100 * sure, 2), round(100 * right, 2), count] for sure, right, count in bins] or None


def _parts(path: Path) -> list[Any]:
    try:
        return read_predictions(path.parent.parent, path.stem)
    except UserError:  # damaged: the scores are still fine
        return []


def _files(views: Views) -> dict[int, list[Path]]:
    """Files of kept predictions by row, where all its seeds have one."""
    named: Mapping[Path, str] = names_of(views.result.folders)
    made: dict[int, list[Path]] = {}
    for number, row in enumerate(views.rows):
        own = [predictions_file(path, row.adapter) for path, name in named.items() if name == _name(row)]
        if own and not row.bound and all(path.is_file() for path in own):
            made[number] = own
    return made


def _name(row: Row) -> str:
    return ", ".join([row.method, *(f"{key} = {value}" for key, value in row.point)])
