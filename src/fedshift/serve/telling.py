"""Answers as people and their programs read them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from fedshift.measures.predictions import NOTHING
from fedshift.runs.answers import Answers
from fedshift.serve.service import Answered

UNKNOWN = "unknown"


def told(
    piece: Answered, names: Sequence[str], batch: int, classes: Sequence[str], known: bool
) -> list[dict[str, Any]]:
    """A piece's answers; with scores of strangeness where anything is ``known`` to compare with."""
    answers = Answers.of(piece.logits, classes)
    codes, chances = answers.codes.tolist(), answers.probabilities.tolist()
    served, frozen = codes_of(piece.logits), codes_of(piece.frozen)
    strange = [column.tolist() for column in piece.strangeness]
    telemetry = {name: values.tolist() for name, values in piece.telemetry.items()}
    shown = {**dict(enumerate(classes)), NOTHING: UNKNOWN}
    found = []
    for i, code in enumerate(codes):
        unknown = strange[3][i] or served[i] == NOTHING
        one = {
            "id": names[i],
            "label": UNKNOWN if unknown else classes[code],
            "class": shown[served[i]],
            "confidence": chances[i][code],
            "probabilities": dict(zip(classes, chances[i], strict=True)),
            "unknown": unknown,
            "did": piece.did,
            "frozen": shown[frozen[i]],
            "batch": batch,
            "telemetry": {name: values[i] for name, values in telemetry.items()},
        }
        if known:
            one |= {"energy": strange[0][i], "distance": strange[1][i], "rarity": strange[2][i]}
        found.append(one)
    return found


def codes_of(logits: Tensor) -> list[int]:
    """The likeliest classes; nothing where logits are no numbers, of which any could be the largest.

    >>> import torch
    >>> codes_of(torch.tensor([[0.0, 1.0], [math.nan, 1.0]]))
    [1, -1]
    """
    top, codes = logits.max(1)
    found: list[int] = codes.where(top.isfinite(), NOTHING).tolist()
    return found


def total(values: Iterable[float]) -> float:
    """The sum of those that are numbers."""
    return math.fsum(value for value in values if math.isfinite(value))
