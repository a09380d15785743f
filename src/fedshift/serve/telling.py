"""Answers as people and their programs read them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedshift.measures.predictions import NOTHING
from fedshift.runs.answers import Answers
from fedshift.serve.service import Answered

UNKNOWN = "unknown"


class Codes(NamedTuple):
    """Classes by number, an entry for each image; nothing where an answer is no number."""

    served: list[int]
    adapted: list[int]
    frozen: list[int]

    @staticmethod
    def of(piece: Answered) -> Codes:
        """The likeliest of each."""
        return Codes(*(codes_of(logits.numpy()) for logits in (piece.logits, piece.adapted, piece.frozen)))


def told(
    piece: Answered, likeliest: Codes, names: Sequence[str], batch: int, classes: Sequence[str], known: bool
) -> list[dict[str, Any]]:
    """A piece's answers; with scores of strangeness where anything is ``known`` to compare with."""
    answers = Answers.of(piece.logits, classes)
    codes, chances = answers.codes.tolist(), answers.probabilities.tolist()
    strange = [column.tolist() for column in piece.strangeness]
    telemetry = {name: values.tolist() for name, values in piece.telemetry.items()}
    shown = {**dict(enumerate(classes)), NOTHING: UNKNOWN}
    found = []
    for i, code in enumerate(codes):
        unknown = strange[3][i] or likeliest.served[i] == NOTHING
        one = {
            "id": names[i],
            "label": UNKNOWN if unknown else classes[code],
            "class": shown[likeliest.served[i]],
            "confidence": chances[i][code],
            "probabilities": dict(zip(classes, chances[i], strict=True)),
            "unknown": unknown,
            "did": piece.did,
            "frozen": shown[likeliest.frozen[i]],
            "batch": batch,
            "telemetry": {name: values[i] for name, values in telemetry.items()},
        }
        if known:
            one |= {"energy": strange[0][i], "distance": strange[1][i], "rarity": strange[2][i]}
        found.append(one)
    return found


def codes_of(logits: np.ndarray) -> list[int]:
    """The likeliest classes; nothing where logits are no numbers, of which any could be the largest.

    >>> codes_of(np.array([[0.0, 1.0], [math.nan, 1.0]]))
    [1, -1]
    """
    codes: list[int] = np.where(np.isfinite(logits.max(1)), logits.argmax(1), NOTHING).tolist()
    return codes


def total(values: Iterable[float]) -> float:
    """The sum of those that are numbers."""
    return math.fsum(value for value in values if math.isfinite(value))
