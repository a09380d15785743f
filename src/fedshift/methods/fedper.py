"""FedPer: a shared body, a head of one's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedshift.core.method import Method, Now
from fedshift.core.registry import method
from fedshift.core.tree import Tree, pick


@method("fedper", paper="Federated Learning with Personalization Layers", venue="arXiv", year=2019)
@dataclass(frozen=True)
class FedPer(Method):
    """FedAvg without the head, which is private; head and body are trained together.

    Newcomers start from the mean of the heads that clients publish.
    """

    personal: ClassVar[bool] = True
    linear: ClassVar[bool] = True

    def private(self, now: Now) -> frozenset[str]:
        """The last linear layer."""
        return self.arch.head

    def publish(self, mine: Tree) -> Tree:
        """Its head, as it is served with; their mean is a newcomer's start."""
        return {"model": pick({**mine.get("model", {}), **mine.get("tuned", {})}, self.arch.head)}
