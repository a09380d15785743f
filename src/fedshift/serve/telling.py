"""Answers as people and their programs read them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from fedshift.measures.predictions import NOTHING
from fedshift.runs.answers import Answers
from fedshift.serve.service import Answered

UNKNOWN = "unknown"


def told(
    piece: Answered, names: Sequence[str], batch: int, classes: Sequence[str], known: bool
) -> list[dict[str, Any]]:
    """A piece's answers; with scores of strangeness where anything is ``known`` to compare with."""
    chances = Answers.of(piece.logits, classes).probabilities.tolist()
    strange = [column.tolist() for column in piece.strangeness]
    telemetry = {name: values.tolist() for name, values in piece.telemetry.items()}
    found = []
    for i, (code, frozen) in enumerate(zip(piece.codes.served, piece.codes.frozen, strict=True)):
        nothing = code == NOTHING
        unknown = strange[3][i] or nothing
        one = {
            "id": names[i],
            "label": UNKNOWN if unknown else classes[code],
            "class": UNKNOWN if nothing else classes[code],
            "confidence": math.nan if nothing else chances[i][code],
            "probabilities": dict(zip(classes, chances[i], strict=True)),
            "unknown": unknown,
            "did": piece.did,
            "frozen": UNKNOWN if frozen == NOTHING else classes[frozen],
            "batch": batch,
            "telemetry": {name: values[i] for name, values in telemetry.items()},
        }
        if known:
            one |= {"energy": strange[0][i], "distance": strange[1][i], "rarity": strange[2][i]}
        found.append(one)
    return found


def total(values: Iterable[float]) -> float:
    """The sum of those that are numbers."""
    return math.fsum(value for value in values if math.isfinite(value))
