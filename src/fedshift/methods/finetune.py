"""FedAvg-FT: FedAvg, then every client fine-tunes the result on its own data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedshift.core.context import Context, Phase
from fedshift.core.method import Method
from fedshift.core.options import NonNegativeInt
from fedshift.core.registry import method
from fedshift.core.tree import Tree


@method("finetune", paper="(baseline; FedAvg-FT in FedTHE, ICLR 2023)", venue="", year=0)
@dataclass(frozen=True)
class FineTune(Method):
    """FedAvg with a local copy fine-tuned after the last aggregation.

    The fine-tuned copy is never aggregated; the received model is deployed beside it, in slot ``global``, and is all that
    an unseen client has. ``epochs`` defaults to ``[train] local-epochs`` (FedICON's protocol); FedTHE uses one. ``balanced``
    trains the federated rounds, and ``balanced-tuning`` the fine-tuning, with balanced softmax on the client's class counts,
    whatever ``[train] balance`` says.
    """

    epochs: NonNegativeInt | None = None
    balanced: bool = False
    balanced_tuning: bool = False

    personal: ClassVar[bool] = True
    linear: ClassVar[bool] = True
    provides: ClassVar[frozenset[str]] = frozenset({"model", "global"})

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """FedAvg's, balanced where it is asked for."""
        return (Phase(balance="softmax" if self.balanced else None),)

    def last_phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Train the received model once more, for oneself."""
        return (Phase(name="finetune", epochs=self.epochs, balance="softmax" if self.balanced_tuning else None),)

    def deployed(self, down: Tree, local: Tree) -> Tree:
        """The fine-tuned model and the received one."""
        return {**super().deployed(down, local), "global": down["model"]}
