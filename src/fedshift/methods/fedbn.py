"""FedBN: normalisation layers stay at home."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedshift.core.method import Method, Now
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

    They are found by module type, never by name. Newcomers start from the mean of what the clients publish.
    """

    personal: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"norm"})
    linear: ClassVar[bool] = True

    def private(self, now: Now) -> frozenset[str]:
        """Every entry of every normalisation layer."""
        return self.arch.norm

    def publish(self, mine: Tree) -> Tree:
        """Their mean is a newcomer's start."""
        return mine
