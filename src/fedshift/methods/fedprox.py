"""FedProx: local training that may not wander far from the received model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedshift.core.context import Phase
from fedshift.core.method import Batch, Method
from fedshift.core.options import NonNegative
from fedshift.core.registry import method
from fedshift.core.tree import Tensors, Tree, pick, squared_distance


@method("fedprox", paper="Federated Optimization in Heterogeneous Networks", venue="MLSys", year=2020)
@dataclass(frozen=True)
class FedProx(Method):
    """FedAvg with a proximal term.

    Local loss ``+ (mu / 2) |w - w_t|^2`` over parameters (not over BatchNorm statistics), ``w_t`` the received model.
    ``mu = 0`` is FedAvg.
    """

    mu: NonNegative = 0.01

    linear: ClassVar[bool] = True

    def begin(self, down: Tree, local: Tree) -> Tree:
        """Remember what was received."""
        return {**super().begin(down, local), "anchor": pick(down["model"], self.arch.trainable)}

    def loss(self, state: Tree, tensors: Tensors, batch: Batch, phase: Phase) -> tuple[Tensor, Tensors]:
        """Add the proximal term."""
        value, buffers = super().loss(state, tensors, batch, phase)
        return value + 0.5 * self.mu * squared_distance(tensors, state["anchor"]), buffers
