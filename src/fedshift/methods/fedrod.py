"""FedRoD: a generic head trained as if classes were balanced, and a private one that adds what a client knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from fedshift.core.context import ClientInfo, Context, Phase
from fedshift.core.method import Batch, Method
from fedshift.core.registry import method
from fedshift.core.tree import Tensors, Tree, pick, zeros_like


@method(
    "fedrod",
    paper="On Bridging Generic and Personalized Federated Learning for Image Classification",
    venue="ICLR",
    year=2022,
)
@dataclass(frozen=True)
class FedRoD(Method):
    """FedAvg with balanced softmax, and beside it a private head that adds to the generic logits.

    With features ``h`` and generic logits ``g`` every step descends ``BalancedSoftmax(g, y; n_k) + CE(sg[g] + V_k
    sg[h], y)``: the first term trains extractor and generic head, which travel, the second only the client's ``V_k``,
    which does not (``sg`` stops gradients, ``n_k`` are the client's class counts). Prediction is ``g + V_k h``. ``V_k``
    is zero at birth, so a client starts, and an unseen client stays, at the generic prediction.

    This is the paper's linear variant, not the hyper-network. ``V_k`` was fitted while the extractor moved and is served on
    the aggregate as it is; there is no last step on the final extractor. Deployed, as FedTHE does: ``model`` predicts with
    the head ``W + V_k``, which is the same sum, and ``generic`` is the shared head ``W``. ``[train] clip`` bounds both
    gradients together, which is the only way in which the private head can be felt by the shared part. ``[train]
    balance`` has no say: the generic head is balanced already, and ``V_k`` is there to know the client's own classes.
    """

    personal: ClassVar[bool] = True
    linear: ClassVar[bool] = True
    provides: ClassVar[frozenset[str]] = frozenset({"model", "generic"})

    def private(self, ctx: Context) -> frozenset[str]:
        """The personal head, beside the model's own entries."""
        return frozenset(map(_own, self.arch.head))

    def init_local(self, model: Tensors, info: ClientInfo, ctx: Context) -> Tree:
        """Nothing to add yet; an unseen client keeps it that way."""
        return {"model": {_own(name): leaf for name, leaf in zeros_like(pick(model, self.arch.head)).items()}}

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Everything at once."""
        return (Phase(trainable=self.arch.trainable | self.private(ctx), balance="softmax"),)

    def loss(self, state: Tree, tensors: Tensors, batch: Batch, phase: Phase) -> tuple[Tensor, Tensors]:
        """Two terms that share a forward pass and no parameter."""
        output = self.outputs(tensors, batch, phase)
        generic = self.cross_entropy(output.logits, batch)  # balanced, as the phase says
        residual = {name: tensors[_own(name)] for name in self.arch.head}
        logits = output.logits.detach() + self.arch.classify(residual, output.features.detach())
        return generic + F.cross_entropy(logits, batch["y"]), output.buffers

    def deployed(self, down: Tree, local: Tree) -> Tree:
        """The received model under the head whose logits are FedRoD's, and the generic head."""
        generic = pick(down["model"], self.arch.head)
        personal = {name: leaf + local["model"][_own(name)] for name, leaf in generic.items()}
        return {"model": {**down["model"], **personal}, "generic": generic}


def _own(name: str) -> str:
    return f"personal.{name}"
