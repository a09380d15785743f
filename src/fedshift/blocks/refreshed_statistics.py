"""Normalisation layers that get to know new images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from fedshift.core.adapter import Adapter, Predict
from fedshift.core.batching import batch_sizes
from fedshift.core.options import NonNegativeInt, Whole, at_least
from fedshift.core.tree import Tree


@dataclass(frozen=True)
class Refreshing(Adapter):
    """An adapter that refreshes an unseen client's statistics before it predicts, if that proved right elsewhere.

    Whether it did, training clients find out on their validation images in the place of unseen ones, with refreshed
    statistics and without (``runs/calibrate.py``).
    """

    passes: NonNegativeInt = 5
    batch_size: Annotated[Whole, at_least(2, "one image has no statistics")] = 50

    @property
    def refreshes(self) -> bool:
        """Whether there is anything to refresh."""
        return self.arch.has_batch_norm and self.passes > 0

    @property
    def how(self) -> str:
        """In words; what was measured is filed under them, so that other settings do not take it for theirs."""
        return f"refreshed {self.passes} times by {self.batch_size}"


def with_refreshed_statistics(predict: Predict, state: Tree, x: Tensor, batch_size: int, passes: int) -> Tree:
    """A state whose normalisation layers have seen these images so often, in batches, with their own momentum."""
    for _ in range(passes):
        for images in x.split(batch_sizes(len(x), batch_size)):
            if len(images) > 1:  # one sample has no statistics
                buffers = predict(state, images, batch_stats=True).buffers
                state = {**state, "model": {**state["model"], **buffers}}
    return state
