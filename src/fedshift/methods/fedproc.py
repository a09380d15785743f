"""FedProc: features are drawn towards the global mean feature of their class before the head is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedshift.core.context import Context, Phase, ServerContext
from fedshift.core.method import Batch, Method
from fedshift.core.options import Count, UnitInterval
from fedshift.core.registry import method
from fedshift.core.tree import Tensors, Tree, pick


@method(
    "fedproc",
    paper="FedProc: Prototypical Contrastive Federated Learning on Non-IID data",
    venue="Future Generation Computer Systems",
    year=2023,
)
@dataclass(frozen=True)
class FedProc(Method):
    """FedAvg with a contrast between a feature and the classes' prototypes ``c``.

    The local loss is ``a CE + (1 - a) mean -log( exp(z.c[y]) / sum_j exp(z.c[j]) )`` with normalised features z and
    prototypes and no temperature. In round t, from 0, ``a = min(t / full, 1)`` as in the authors' code, which has 100
    rounds (``full``), or ``a`` is always ``alpha``; 1 is FedAvg. After its training a client sends the mean feature of each
    of its classes and their counts; the server's prototypes are the means by count.

    In round 0 there are none yet, and the loss is cross-entropy alone. Classes without a prototype are left out of the sum,
    and their own images have no contrast; a class that nobody of a round has keeps the prototype it had. Features for
    prototypes are those of inference.
    """

    alpha: UnitInterval | None = None  # default: rises as t / full
    full: Count = 100  # the round from which on there is cross-entropy alone

    revision: ClassVar[int] = 1

    # ---- what a client does ------------------------------------------------------------------------------------------
    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Train, then look at one's classes."""
        return (Phase(), Phase(name="prototypes", kind="fold", inputs="features", batch_stats=False))

    def begin(self, down: Tree, local: Tree) -> Tree:
        """Beside what was received, room for one's own prototypes."""
        empty = torch.zeros_like(down["prototypes"]["global"])
        return {**super().begin(down, local), "own": {"sum": empty, "count": empty[:, 0].clone()}}

    def fold(self, state: Tree, batch: Batch, phase: Phase) -> Tree:
        """Sums of features and counts, class by class."""
        belongs = _belongs(batch["y"], self.arch.classes).to(batch["x"].dtype)
        sums, own = belongs.T @ batch["x"], state["own"]
        return {**state, "own": {"sum": own["sum"] + sums, "count": own["count"] + belongs.sum(0)}}

    def loss(self, state: Tree, tensors: Tensors, batch: Batch, phase: Phase) -> tuple[Tensor, Tensors]:
        """Cross-entropy and contrast, in a proportion that changes over the rounds."""
        output = self.outputs(tensors, batch, phase)
        contrast = prototype_losses(output.features, batch["y"], state["prototypes"]["global"]).mean()
        now = state["now"]
        share = (now["round"] / self.full).clamp(max=1) if self.alpha is None else self.alpha
        share = share + (1 - share) * (now["round"] == 0)  # nobody has a prototype yet
        return share * self.cross_entropy(output.logits, batch) + (1 - share) * contrast, output.buffers

    def finish(self, state: Tree, down: Tree, local: Tree) -> tuple[Tree, Tree]:
        """The model, the mean feature of each class and how many images it is of."""
        own = state["own"]
        means = own["sum"] / own["count"].clamp(min=1)[:, None]
        return {"model": pick(state["model"], down["model"]), "own": {"mean": means, "count": own["count"]}}, local

    # ---- the server --------------------------------------------------------------------------------------------------
    def init_server(self, models: Mapping[str, Tensors], clients: tuple[str, ...], public: Tensor) -> Tree:
        """No class has a prototype yet."""
        server = super().init_server(models, clients, public)
        like = server["model"][self.arch.parameters[0]]
        return {**server, "prototypes": {"global": like.new_zeros(self.arch.classes, self.arch.feature_size)}}

    def broadcast(self, server: Tree, client: str, ctx: Context) -> Tree:
        """The prototypes go down with the model; who is only going to predict needs none."""
        down = super().broadcast(server, client, ctx)
        return down if ctx.stage == "unseen" else {**down, "prototypes": server["prototypes"]}

    def aggregate(self, server: Tree, ups: Mapping[str, Tree], ctx: ServerContext) -> tuple[Tree, Tensors]:
        """FedAvg, and the means of prototypes by count."""
        counts = torch.stack([up["own"]["count"] for up in ups.values()])
        means = torch.stack([up["own"]["mean"] for up in ups.values()])
        total = counts.sum(0)[:, None]
        fresh = (counts[..., None] * means).sum(0) / total.clamp(min=1)
        prototypes = torch.where(total > 0, fresh, server["prototypes"]["global"])
        merged, metrics = super().aggregate(server, ups, ctx)
        return {**merged, "prototypes": {"global": prototypes}}, metrics


def prototype_losses(features: Tensor, labels: Tensor, prototypes: Tensor) -> Tensor:
    """``-log softmax_j(z.c[j])[y]`` for every sample over the classes with a prototype; zero without one of its own.

    >>> prototype_losses(torch.ones(1, 2), torch.tensor([1]), torch.tensor([[3.0, 3.0], [3.0, 3.0], [0.0, 0.0]])).exp()
    tensor([2.])
    """
    known = prototypes.abs().amax(1) > 0
    cosines = F.normalize(features, dim=1) @ F.normalize(prototypes, dim=1).T
    counted = known | _belongs(labels, len(prototypes))  # without one's own class the loss would be infinite
    losses = F.cross_entropy(cosines.masked_fill(~counted, -torch.inf), labels, reduction="none")
    return torch.where(known[labels], losses, 0)


def _belongs(labels: Tensor, classes: int) -> Tensor:
    """Which sample is of which class: ``[samples, classes]``."""
    return labels[:, None] == torch.arange(classes, device=labels.device)
