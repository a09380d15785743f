"""FedMD: clients with any networks teach one another with logits on public images."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedshift.blocks.logit_exchange import LogitExchange, divergence
from fedshift.core.context import Phase
from fedshift.core.method import Batch
from fedshift.core.registry import method
from fedshift.core.tree import Tensors, Tree


@method("fedmd", paper="FedMD: Heterogenous Federated Learning via Model Distillation", venue="arXiv", year=2019)
@dataclass(frozen=True)
class FedMD(LogitExchange):
    """Mean logits F on a public unlabelled set D_p travel instead of weights; every model is private, and of any size.

    A round of client k with model w_k:

    1. *digest* (not in round 0): ``digest-epochs`` over D_p on ``KL(softmax F || softmax f(x; w_k))``;
    2. *revisit*: ``[train]``'s local steps of cross-entropy on its own labelled data;
    3. *communicate*: ``f(D_p; w_k)``, as a table of N_p x C numbers, goes up.

    The server takes ``F = mean_k f(D_p; w_k)`` over the round's clients, each with the same weight. An unseen client
    starts from a random network, digests for ``unseen-epochs`` and predicts.

    This is the skeleton of UPFL (Ye et al., 2023), which differs from FedMD's paper: D_p has no labels, so that nobody is
    trained on it beforehand; the divergence takes the place of an absolute difference of logits; all of D_p is spoken of in
    every round. Public batches have ``[train] batch-size`` images, and are augmented where ``[train] augment`` says so;
    what is sent up is always about the images as they are.
    """

    def loss(self, state: Tree, tensors: Tensors, batch: Batch, phase: Phase) -> tuple[Tensor, Tensors]:
        """The divergence from the ensemble on public images, cross-entropy on one's own."""
        if phase.name != "digest":
            return super().loss(state, tensors, batch, phase)
        (teacher,) = self.teachers(state, batch).values()
        output = self.outputs(tensors, batch, phase)
        return divergence(teacher, output.logits), output.buffers

    def opinions(self, state: Tree, x: Tensor) -> Tensors:
        """The model's logits."""
        return {"base": self.arch(state["model"], x).logits}
