"""The frozen model's answer beside the adapter's, without a second pass of the network where there was one already."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from fedshift.core.adapter import Adapter, Predict
from fedshift.core.arch import BatchStats, Output
from fedshift.core.tree import Tree


class Overheard:
    """A method's prediction that remembers what the frozen model said about some images.

    Many adapters ask the deployed network first and work on its answer. Such a pass is known by its arguments: the images
    themselves, the deployed tensors themselves, no batch statistics.
    """

    def __init__(self, predict: Predict, frozen: Tree, x: Tensor) -> None:
        self._predict, self._frozen, self._x = predict, frozen, x
        self._found: Output | None = None

    def __call__(self, deployed: Tree, x: Tensor, batch_stats: BatchStats = False) -> Output:
        """The method's own prediction."""
        output = self._predict(deployed, x, batch_stats)
        if self._found is None and x is self._x and batch_stats is False and _same(deployed, self._frozen):
            self._found = output
        return output

    @property
    def answer(self) -> Output:
        """What the frozen model says."""
        return self._predict(self._frozen, self._x) if self._found is None else self._found


def overhearing(adapter: Adapter, overheard: Overheard) -> Adapter:
    """The adapter, which asks the network through ``overheard``."""
    changes: dict[str, Any] = {"predict_with": overheard}
    return replace(adapter, **changes)


def _same(tree: Tree, frozen: Tree) -> bool:
    """Whether a tree holds these very tensors; it may hold others beside."""
    return all(
        slot in tree and all(tree[slot].get(name) is leaf for name, leaf in leaves.items())
        for slot, leaves in frozen.items()
    )
