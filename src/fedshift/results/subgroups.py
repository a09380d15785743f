"""Measures by subgroup (scanner, sex, age), with intervals that resample groups (patients), from kept predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedshift.errors import UserError
from fedshift.measures.intervals import Interval, by_subgroup
from fedshift.measures.measurement import measure_of
from fedshift.measures.predictions import Predictions
from fedshift.results.collect import names_of
from fedshift.results.plain import Sheet
from fedshift.results.tables import short_name
from fedshift.store.folder import RunFolder
from fedshift.store.metric import Metric
from fedshift.store.predictions import ClientPredictions, read_predictions


@dataclass(frozen=True)
class Subgroup:
    """One measure of the samples that share a value of a column, for one row and stream."""

    method: str
    adapter: str
    metric: Metric
    value: str
    found: Interval


def subgroups(folders: Sequence[Path], column: str, measure: str, draws: int = 1000) -> list[Subgroup]:
    """Of every run that keeps predictions; seeds that share a name are taken together, a patient is one in all of them."""
    function = measure_of(measure).of
    named = names_of(folders)
    pooled: dict[tuple[str, str, Metric], list[ClientPredictions]] = {}
    for folder in folders:
        for label in RunFolder(folder).scores():
            for part in read_predictions(folder, label):
                pooled.setdefault((named[folder], label, part.metric.column), []).append(part)
    made = []
    for (method, adapter, metric), parts in pooled.items():
        values = [value for part in parts for value in _column(part, column)]
        groups = np.concatenate([part.groups for part in parts])
        whole = Predictions(
            np.concatenate([part.predictions.log_probabilities for part in parts]),
            np.concatenate([part.predictions.labels for part in parts]),
        )
        made += [
            Subgroup(method, adapter, metric, value, found)
            for value, found in by_subgroup(function, whole, values, groups, draws=draws).items()
        ]
    return made


def _column(part: ClientPredictions, column: str) -> Sequence[str]:
    if column in part.attributes:
        return part.attributes[column]
    if column == "client":
        return [part.client] * len(part.ids)
    known = ", ".join(["client", *part.attributes])
    raise UserError(f"there is no column {column!r} beside the predictions; there are: {known}")


def subgroups_table(found: Sequence[Subgroup], column: str, measure: str) -> Sheet:
    """A line for each row, stream and value."""
    title = f"{measure_of(measure).title} by {column}, with 95 % intervals over groups"
    table = Sheet(title=title[:1].upper() + title[1:], title_justify="left")
    for head in ("method", "adapter", "stream", column, measure, "95 % interval", "images", "groups"):
        table.add_column(head, justify="left" if head in ("method", "adapter", "stream", column) else "right")
    for one in found:
        value, low, high, samples, groups = one.found
        span = "-" if low is None or high is None else f"{low:.1f} .. {high:.1f}"
        number = "-" if value is None else f"{value:.1f}"
        stream = short_name(one.metric).replace("\n", " ")
        cells = (one.method, one.adapter, stream, one.value or "(missing)", number, span, str(samples), str(groups))
        table.add_row(*cells)
    return table
