"""FedBN: normalisation layers stay at home."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedshift.core.context import Context
from fedshift.core.method import Method
from fedshift.core.registry import method
from fedshift.core.tree import Tree


@method(
    "fedbn",
    paper="FedBN: Federated Learning on Non-IID Features via Local Batch Normalization",
    venue="ICLR",
    year=2021,
)
@dataclass(frozen=True)
class FedBN(Method):
    """FedAvg without the normalisation layers, which are private: scale, shift and running statistics.

    They are found by module type, never by name. Unseen clients start from the mean of what the clients give away.
    """

    personal: ClassVar[bool] = True
    requires: ClassVar[frozenset[str]] = frozenset({"norm"})
    linear: ClassVar[bool] = True

    def private(self, ctx: Context) -> frozenset[str]:
        """Every entry of every normalisation layer."""
        return self.arch.norm

    def settle(self, state: Tree | None, down: Tree, local: Tree, ctx: Context) -> tuple[Tree, Tree]:
        """They are given away: their mean is an unseen client's start."""
        return local, local
