"""FedAvg-FT: FedAvg, then every client fine-tunes the result on its own data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedshift.blocks.losses import balanced_softmax
from fedshift.core.context import Context, Phase
from fedshift.core.method import Batch, Method
from fedshift.core.options import NonNegativeInt
from fedshift.core.registry import method
from fedshift.core.tree import Tensors, Tree


@method("finetune", paper="(baseline; FedAvg-FT in FedTHE, ICLR 2023)", venue="", year=0)
@dataclass(frozen=True)
class FineTune(Method):
    """FedAvg with a local copy fine-tuned after the last aggregation.

    The fine-tuned copy is never aggregated; the received model is deployed beside it, in slot ``global``, and is all that
    an unseen client has. ``epochs`` defaults to ``[train] local-epochs`` (FedICON's protocol); FedTHE uses one. ``balanced``
    trains the federated rounds, and ``balanced-tuning`` the fine-tuning, with balanced softmax on the client's class counts
    instead of cross-entropy.
    """

    epochs: NonNegativeInt | None = None
    balanced: bool = False
    balanced_tuning: bool = False

    personal: ClassVar[bool] = True
    linear: ClassVar[bool] = True
    provides: ClassVar[frozenset[str]] = frozenset({"model", "global"})

    def last_phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Train the received model once more, for oneself."""
        return (Phase(name="finetune", epochs=self.epochs),)

    def loss(self, state: Tree, tensors: Tensors, batch: Batch, phase: Phase) -> tuple[Tensor, Tensors]:
        """Cross-entropy, or balanced softmax where it is asked for."""
        if not (self.balanced_tuning if phase.name == "finetune" else self.balanced):
            return super().loss(state, tensors, batch, phase)
        output = self.outputs(tensors, batch, phase)
        return balanced_softmax(output.logits, batch["y"], state["now"]["histogram"]), output.buffers

    def deployed(self, down: Tree, local: Tree) -> Tree:
        """The fine-tuned model and the received one."""
        return {**super().deployed(down, local), "global": down["model"]}
