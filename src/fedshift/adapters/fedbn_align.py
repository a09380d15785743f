"""FedBN at a new domain: take its statistics, keep everything else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor

from fedshift.blocks.refreshed_statistics import with_refreshed_statistics
from fedshift.core.adapter import Adapter
from fedshift.core.options import NonNegativeInt, Whole, at_least
from fedshift.core.registry import adapter
from fedshift.core.tree import Tree


@adapter(
    "fedbn-align",
    paper="FedBN: Federated Learning on Non-IID Features via Local Batch Normalization",
    venue="ICLR",
    year=2021,
)
@dataclass(frozen=True)
class StatisticsAlignment(Adapter):
    """``passes`` over the unlabelled images in training mode refresh the running statistics, then predict them.

    As FDSE's paper adapts FedBN to an unseen domain: one pass (five in its code). No weight changes. Unlike ``bn``, which
    goes on refreshing while it predicts, all images are predicted with the same statistics.
    """

    passes: NonNegativeInt = 1
    batch_size: Annotated[Whole, at_least(2, "one image has no statistics")] = 50

    requires_arch: ClassVar[frozenset[str]] = frozenset({"batch-norm"})

    def fit(self, state: Tree, x: Tensor, draws: Mapping[str, Tensor]) -> Tree:
        """Refresh the statistics on the whole set."""
        return with_refreshed_statistics(self.predict_with, state, x, self.batch_size, self.passes)
