"""BN: refresh normalisation statistics on test data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from torch import Tensor

from fedshift.blocks.refreshed_statistics import with_refreshed_statistics
from fedshift.core.adapter import Adapter
from fedshift.core.arch import Output
from fedshift.core.options import Count, Rule, Whole
from fedshift.core.registry import adapter
from fedshift.core.tree import Tree


@adapter(
    "bn",
    paper="Improving Robustness Against Common Corruptions by Covariate Shift Adaptation",
    venue="NeurIPS",
    year=2020,
)
@dataclass(frozen=True)
class BatchNormRefresh(Adapter):
    """BatchNorm with statistics of the test data; no weight changes.

    ``mode = "batch"``: every batch is normalised with its own statistics. ``mode = "refresh"``: running statistics are
    refreshed batch by batch with the layers' own momentum, and each batch is predicted with the refreshed ones (FedBN's
    re-estimation at a new client when the stream is passed over first with ``passes``).
    """

    batch_size: Count = 32
    mode: Literal["batch", "refresh"] = "batch"
    # of the whole unlabelled set before the first prediction; 0 adapts online only
    passes: Annotated[Whole, Rule(lambda n: n >= 0, "batch-size must be positive and passes not negative")] = 0

    requires_arch: ClassVar[frozenset[str]] = frozenset({"batch-norm"})

    @property
    def batch(self) -> int | None:
        """Statistics are those of a batch."""
        return self.batch_size

    @property
    def fits(self) -> bool:
        """Without passes it looks at nothing first."""
        return self.passes > 0

    def fit(self, state: Tree, x: Tensor, draws: Mapping[str, Tensor]) -> Tree:
        """Refresh the statistics on the whole set first, if asked to."""
        return with_refreshed_statistics(self.predict_with, state, x, self.batch_size, self.passes)

    def predict(self, state: Tree, x: Tensor, draws: Mapping[str, Tensor]) -> tuple[Output, Tree]:
        """One sample alone has no batch statistics and is predicted with the running ones."""
        if len(x) == 1:
            return self.predict_with(state, x), state
        output = self.predict_with(state, x, batch_stats=True)
        if self.mode == "batch":
            return output, state
        refreshed = {**state, "model": {**state["model"], **output.buffers}}
        return self.predict_with(refreshed, x), refreshed
