"""FedGen: the server's generator of features hands knowledge from all heads to every client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedshift.blocks.generator import GeneratorMethod, Objective, log_likelihoods, stacked_heads
from fedshift.core.context import Phase, RandomSpec, ServerContext
from fedshift.core.method import Batch
from fedshift.core.options import NonNegative, UnitInterval
from fedshift.core.registry import method
from fedshift.core.tree import Tensors, Tree


@method(
    "fedgen",
    paper="Data-Free Knowledge Distillation for Heterogeneous Federated Learning",
    venue="ICML",
    year=2021,
)
@dataclass(frozen=True)
class FedGen(GeneratorMethod):
    """FedAvg with a generator ``G(y, e)`` of features that is trained on the clients' heads and regularises them.

    Client, from the second round on, with ``f = decay^round`` and uniform labels y':

        ``CE(head(z), y) + f kd KL( softmax head(G(y, e)) | softmax head(z) ) + f reg CE(head(G(y', e')), y')``

    where the first distribution of the KL is not differentiated. Server, ``generator-steps`` with Adam, whose rate falls by
    ``decay`` in every round too:
    ``mean sum_k p_k(y) CE(head_k(G(y, e)), y) + diversity exp(-mean_ij |G_i - G_j| |e_i - e_j|^2)`` over uniform labels,
    with ``p_k(y)`` client k's share of all images of class y; counts of labels go up with the model. Differences, those
    of the noise squared as in the authors' code, are means over dimensions. ``kd = reg = 0`` is FedAvg.

    The weights are those of the FedCiR paper for PACS; the authors' own are 10 and 10. Noise is normal, as the paper says
    (uniform in their code), and y' is of all classes of the task. A class that no client of a round has does not count in
    the generator's loss.
    """

    kd: NonNegative = 1.0
    reg: NonNegative = 0.5
    decay: UnitInterval = 0.98
    diversity: NonNegative = 1.0
    generator_decay: NonNegative = 1e-2

    revision: ClassVar[int] = 1

    def draws(self, phase: Phase) -> dict[str, RandomSpec]:
        """Noise for features of a batch's own labels too."""
        return {**super().draws(phase), "taught noise": RandomSpec("normal", (self.noise_size,))}

    def loss(self, state: Tree, tensors: Tensors, batch: Batch, phase: Phase) -> tuple[Tensor, Tensors]:
        """Cross-entropy, agreement with what the head says of generated features, and their cross-entropy."""
        output = self.outputs(tensors, batch, phase)
        value = self.cross_entropy(output.logits, batch)
        factor = self.started(state) * self.decay ** state["now"]["round"]
        if self.kd:
            taught = self.imagined(state, batch["y"], batch["taught noise"])
            target = self.arch.classify(tensors, taught).softmax(-1).detach()
            apart = F.kl_div(output.logits.log_softmax(-1), target, reduction="batchmean")
            value = value + factor * self.kd * apart
        if self.reg:
            value = value + factor * self.reg * self.imagined_loss(state, tensors, batch)
        return value, output.buffers

    def finish(self, state: Tree, down: Tree, local: Tree) -> tuple[Tree, Tree]:
        """The model and the counts of labels."""
        up, kept = super().finish(state, down, local)
        return {**up, "counts": {"labels": state["now"]["histogram"]}}, kept

    def generator_scale(self, ctx: ServerContext) -> float:
        """The generator's rate falls as the clients' regularisers do."""
        return float(self.decay**ctx.round)

    def generator_loss(self, ups: Mapping[str, Tree]) -> Objective:
        """Every head's cross-entropy where it has seen the class, and features that differ where the noise does."""
        heads = stacked_heads([up["model"] for up in ups.values()], self.arch.head)
        counts = torch.stack([up["counts"]["labels"] for up in ups.values()])
        shares = counts / counts.sum(0).clamp(min=1)

        def loss(features: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
            likelihoods = log_likelihoods(heads, features, labels)
            value = -(shares[:, labels] * likelihoods).sum(0).mean()
            return value + self.diversity * alikeness(features, noise)

        return loss


def alikeness(features: Tensor, noise: Tensor) -> Tensor:
    """``exp(-mean_ij |G_i - G_j| |e_i - e_j|^2)``: one for features that are all the same, less the more they differ.

    >>> alikeness(torch.ones(3, 2), torch.rand(3, 4))
    tensor(1.)
    """
    apart, between = (rows[:, None] - rows for rows in (features, noise))
    return (-(apart.abs().mean(-1) * between.square().mean(-1)).mean()).exp()
