"""How a party's predictions are told: as counts, in a tree. Nothing about a single image leaves the party."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fedshift.core.tree import Tree
from fedshift.engines.base import Score
from fedshift.errors import UserError
from fedshift.measures.counts import BINS, Counts
from fedshift.runs.measuring import Counted, predictions_of

TABLES = ("confusion", "members", "others", "sure")


def told(scores: Mapping[str, Score]) -> tuple[dict[str, Any], Tree]:
    """Facts and tree of a party's scores by stream; a stream without images is not told of."""
    some = {part: score for part, score in scores.items() if score.samples}
    facts = {
        part: {"samples": score.samples, "correct": score.correct, "loss": score.loss, "broken": score.broken}
        for part, score in some.items()
    }
    counts = {part: Counts.of(predictions_of(score)) for part, score in some.items()}
    tree = {
        part: {name: torch.from_numpy(getattr(own, name).astype(np.int32)) for name in TABLES}
        for part, own in counts.items()
    }
    return facts, tree


def heard(facts: Mapping[str, Any], tree: Tree, classes: int) -> dict[str, Counted]:
    """The scores by stream that a party told; a sentence if they cannot be true.

    >>> scores = {"val": Score(1, 1, 0.1, log_probabilities=torch.tensor([[0.9, 0.1]]).log(), labels=torch.tensor([0]))}
    >>> heard(*told(scores), classes=2)["val"].correct
    1
    """
    shapes = {"confusion": (classes, classes), "members": (classes, BINS), "others": (classes, BINS), "sure": (BINS, 2)}
    result: dict[str, Counted] = {}
    for part, numbers in facts.items():
        tables = tree.get(part, {})
        try:
            samples, correct, broken = (int(numbers[key]) for key in ("samples", "correct", "broken"))
            loss = float(numbers["loss"])
        except (LookupError, TypeError, ValueError):
            raise UserError(f"its counts of {part!r} are not numbers") from None
        if {name: tuple(leaf.shape) for name, leaf in tables.items()} != shapes:
            raise UserError(f"its counts of {part!r} have other tables than expected")
        if any(leaf.is_floating_point() or bool((leaf < 0).any()) for leaf in tables.values()):
            raise UserError(f"its counts of {part!r} are no counts")
        whole = int(tables["confusion"].sum())
        if whole != samples - broken or int(tables["confusion"].diagonal().sum()) != correct or broken < 0:
            raise UserError(f"its counts of {part!r} do not add up")
        arrays = {name: np.asarray(leaf.numpy(), dtype=np.int64) for name, leaf in tables.items()}
        result[part] = Counted(samples, correct, loss, broken=broken, counts=Counts(**arrays, loss_sum=loss))
    return result
