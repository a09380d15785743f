"""FedPer: a shared body, a head of one's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedshift.core.context import Context
from fedshift.core.method import Method
from fedshift.core.registry import method
from fedshift.core.tree import Tree, pick


@method("fedper", paper="Federated Learning with Personalization Layers", venue="arXiv", year=2019)
@dataclass(frozen=True)
class FedPer(Method):
    """FedAvg without the head, which is private; head and body are trained together.

    Unseen clients start from the mean of the heads that clients give away.
    """

    personal: ClassVar[bool] = True
    linear: ClassVar[bool] = True

    def private(self, ctx: Context) -> frozenset[str]:
        """The last linear layer."""
        return self.arch.head

    def settle(self, state: Tree | None, down: Tree, local: Tree, ctx: Context) -> tuple[Tree, Tree]:
        """The head is given away as it is served with; their mean is an unseen client's start."""
        _, kept = super().settle(state, down, local, ctx)
        return {"model": pick({**kept.get("model", {}), **kept.get("tuned", {})}, self.arch.head)}, kept
