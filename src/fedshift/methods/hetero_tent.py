"""Tent on FedMD: the ensemble is of models that have lowered their entropy on the public images."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedshift.blocks.logit_exchange import AdaptedExchange
from fedshift.blocks.losses import entropy
from fedshift.core.options import NonNegative
from fedshift.core.registry import method
from fedshift.core.tree import Tensors, Tree
from fedshift.methods.fedmd import FedMD


@method(
    "hetero-tent",
    paper="UPFL: Unsupervised Personalized Federated Learning towards New Clients (its heterogeneous TENT)",
    venue="arXiv",
    year=2023,
)
@dataclass(frozen=True)
class HeteroTent(AdaptedExchange, FedMD):
    """FedMD whose clients send the logits of ``w_k - adapt-lr grad H(f(D_p; w_k))``: one Tent step on all weights.

    H is the mean entropy of the predictions on all of D_p, in bits as in the authors' code. The step is made for the
    message only: the client goes on with w_k. Digest, revisit, the server and unseen clients are FedMD's; an unseen
    client takes its own step, on its own images, with the adapter ``tent`` (``params = "all"``, ``batch-size = 0``,
    ``predict-when = "after"``). Normalisation layers use their running statistics in the step.

    The paper says no more than "directly integrating TENT into the FedMD framework". [R] The step's rate is ``[train] lr``
    unless ``adapt-lr`` says otherwise, with ``[train]``'s weight decay, clip and learning-rate decay.
    """

    adapt_lr: NonNegative | None = None  # default: [train] lr
    bits: bool = True

    ensembles: ClassVar[tuple[str, ...]] = ("personal",)

    def step_settings(self) -> tuple[float, float, float | None]:
        """As local training, if no other rate is given."""
        rate = self.train.lr if self.adapt_lr is None else self.adapt_lr
        return rate, self.train.weight_decay, self.train.clip

    def unlabelled(self, state: Tree, tensors: Tensors, x: Tensor) -> Tensor:
        """A batch's share of the mean entropy."""
        unit = math.log(2) if self.bits else 1.0
        return entropy(self.arch(tensors, x).logits).sum() / (unit * len(state["public"]["ids"]))

    def opinions(self, state: Tree, x: Tensor) -> Tensors:
        """The adapted model's logits."""
        return {"personal": self.arch(self.adapted(state), x).logits}
