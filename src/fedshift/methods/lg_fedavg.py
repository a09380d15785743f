"""LG-FedAvg: local representations, a global head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedshift.core.context import Context
from fedshift.core.method import Method
from fedshift.core.registry import method


@method(
    "lg-fedavg",
    paper="Think Locally, Act Globally: Federated Learning with Local and Global Representations",
    venue="arXiv",
    year=2020,
)
@dataclass(frozen=True)
class LGFedAvg(Method):
    """FedAvg of the head alone: everything below the last linear layer is private (FedPer's opposite)."""

    personal: ClassVar[bool] = True
    linear: ClassVar[bool] = True

    def private(self, ctx: Context) -> frozenset[str]:
        """Everything but the head."""
        return self.arch.encoder
