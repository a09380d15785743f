"""What is taken for what, and how well every class is recognised."""

from __future__ import annotations

import math
from typing import Any

from fedshift.measures.confusion import Confusion
from fedshift.results.sections.views import Views
from fedshift.store.rows import ScoreRow

MOST_SQUARE = 30  # classes, up to which the whole matrix is drawn
MOST_NAMED = 30  # classes whose recall is listed, those with the lowest first if there are more
MOST_PAIRS = 12  # of classes that are mixed up


def classes(views: Views) -> dict[str, Any] | None:
    """By rule, column and row: shares of a true class in percent, and the commonest mistakes; None if nothing is known."""
    names = _names(views)
    if not names:
        return None
    found = {
        rule: [[_of(row.scores(metric, rule), names) for row in views.rows] for metric in views.columns]
        for rule in views.rules
    }
    if not any(cell for columns in found.values() for rows in columns for cell in rows):
        return None
    return {"names": names, "square": len(names) <= MOST_SQUARE, "found": found}


def _names(views: Views) -> list[str]:
    """Those of the first task: a report of several tasks has classes of one."""
    scores = (score for row in views.rows for found in row.values.values() for score in found)
    return next((list(score.classes) for score in scores if score.classes), [])


def _of(scores: list[ScoreRow], names: list[str]) -> dict[str, Any] | None:
    """Of all seeds' samples together."""
    whole = [score.whole for score in scores if score.whole is not None and list(score.classes) == names]
    if not whole or len(whole) != len(scores):
        return None
    count = Confusion.summed(own.confusion for own in whole)
    if not count.samples:
        return None
    recall, precision = count.recall(), count.precision()
    listed = [k for k in range(count.classes) if not math.isnan(recall[k])]
    if len(listed) > MOST_NAMED:
        listed = sorted(listed, key=lambda k: recall[k])[:MOST_NAMED]
    mistakes = sorted((cell for cell in count.cells if cell[0] != cell[1] and cell[1] >= 0), key=lambda cell: -cell[2])
    made: dict[str, Any] = {
        "recall": [[k, _percent(recall[k]), _percent(precision[k]), int(count.support[k])] for k in listed],
        "mistakes": [
            [label, taken, number, _percent(number / count.support[label])]
            for label, taken, number in mistakes[:MOST_PAIRS]
        ],
    }
    if count.classes <= MOST_SQUARE:
        share = count.matrix / count.support.clip(1)[:, None]
        made["shares"] = [[_percent(value) for value in row] for row in share]
        made["counts"] = count.matrix.tolist()
    return made


def _percent(share: float) -> float | None:
    return None if math.isnan(share) else round(100 * float(share), 1)
