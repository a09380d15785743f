"""FedSR: a stochastic representation that is short and says little beyond the class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from fedshift.blocks import gaussians
from fedshift.blocks.stochastic_encoder import StochasticMethod
from fedshift.core.context import ClientInfo, Context, Phase
from fedshift.core.method import Batch
from fedshift.core.options import NonNegative
from fedshift.core.registry import method
from fedshift.core.tree import Tensors, Tree, drop

MEAN, DEVIATION, SCALE = NAMES = ("reference.mean", "reference.deviation", "reference.scale")


@method(
    "fedsr",
    paper="FedSR: A Simple and Effective Domain Generalization Method for Federated Learning",
    venue="NeurIPS",
    year=2022,
)
@dataclass(frozen=True)
class FedSR(StochasticMethod):
    """FedAvg with a stochastic encoder and two regularisers of its representation.

    For images x with ``z = m(x) + s(x) noise`` the local loss is

        ``CE(head(z), y) + l2r mean |z| + cmi mean sum_dims KL( N(C m, (C s)^2) | N(r_m[y], softplus(r_s[y])^2) )``

    where ``|z|`` is the norm, not its square. The reference Gaussians ``r_m`` (start: 0) and ``r_s`` (1) of every class and
    the scale ``C`` (1) are trained with the network and never leave the client. The network has one more layer than the
    backbone, which makes as many means and as many deviations as there were features.

    ``l2r = cmi = 0`` is FedAvg with a stochastic encoder. ``C`` scales the deviation by its absolute value, or a client
    whose C turns negative would have no Gaussian.
    """

    l2r: NonNegative = 0.01
    cmi: NonNegative = 5e-4

    linear: ClassVar[bool] = True

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """The network and the client's references, together."""
        return (Phase(trainable=self.arch.trainable | set(NAMES)),)

    def private(self, ctx: Context) -> frozenset[str]:
        """The references."""
        return frozenset(NAMES)

    def init_local(self, model: Tensors, info: ClientInfo, ctx: Context) -> Tree:
        """References that have seen nothing; an unseen client needs none."""
        if info.unseen:
            return {}
        like, shape = model[self.arch.parameters[0]], (self.arch.classes, self.arch.feature_size)
        return {"model": {MEAN: like.new_zeros(shape), DEVIATION: like.new_ones(shape), SCALE: like.new_ones(())}}

    def loss(self, state: Tree, tensors: Tensors, batch: Batch, phase: Phase) -> tuple[Tensor, Tensors]:
        """Cross-entropy of a sample, its norm, and how far its distribution is from its class's."""
        output = self.outputs(tensors, batch, phase)
        value = self.cross_entropy(output.logits, batch)
        if self.l2r:
            value = value + self.l2r * output.features.norm(dim=1).mean()
        if self.cmi:
            mean, deviation, scale = output.aux["mean"], output.aux["deviation"], tensors[SCALE]
            reference = {"mean": tensors[MEAN], "deviation": F.softplus(tensors[DEVIATION])}
            own = gaussians.of_classes(reference, batch["y"])
            value = value + self.cmi * gaussians.divergence(scale * mean, scale.abs() * deviation, *own).mean()
        return value, output.buffers

    def deployed(self, down: Tree, local: Tree) -> Tree:
        """The global model, without the references."""
        return {"model": drop(super().deployed(down, local)["model"], NAMES)}
