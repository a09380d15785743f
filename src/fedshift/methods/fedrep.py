"""FedRep: a shared representation, a private head, trained in turn."""

from __future__ import annotations

from dataclasses import dataclass

from fedshift.core.context import Context, Phase
from fedshift.core.options import NonNegativeInt
from fedshift.core.registry import method
from fedshift.methods.fedper import FedPer


@method(
    "fedrep", paper="Exploiting Shared Representations for Personalized Federated Learning", venue="ICML", year=2021
)
@dataclass(frozen=True)
class FedRep(FedPer):
    """Each round the head is trained on the frozen representation, then the representation under the frozen head.

    While the head is trained the representation stands still entirely: BatchNorm keeps its running statistics. A client
    is deployed with the received representation and its head after one more head step on it.
    ``head-epochs`` and ``body-epochs`` default to ``[train] local-epochs``.
    """

    head_epochs: NonNegativeInt | None = None
    body_epochs: NonNegativeInt | None = None

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Head, then body."""
        body = Phase(name="body", trainable=self.arch.trainable - self.arch.head, epochs=self.body_epochs)
        return (*self.last_phases(ctx), body)

    def last_phases(self, ctx: Context) -> tuple[Phase, ...]:
        """The head on the last received representation."""
        return (Phase(name="head", trainable=self.arch.head, epochs=self.head_epochs, batch_stats=False),)
