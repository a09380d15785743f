"""AFL: the server trains for the worst mixture of the clients, and finds it on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedshift.core.context import Context, Phase, ServerContext
from fedshift.core.method import Batch, Method
from fedshift.core.options import NonNegative
from fedshift.core.registry import method
from fedshift.core.tree import Tensors, Tree, weighted_mean


@method("afl", paper="Agnostic Federated Learning", venue="ICML", year=2019)
@dataclass(frozen=True)
class AFL(Method):
    """``min_w max_lambda sum_k lambda_k L_k(w)`` over the simplex, by descent in w and ascent in lambda.

    A client sends ``L_k(w)``, the loss of the received model on all its training images in inference mode, and its model
    ``w_k`` after local steps. With ``g_k = (w - w_k) / gamma_w`` the server takes ``w <- w - gamma_w sum_k lambda_k g_k``,
    which is ``sum_k lambda_k w_k`` whatever ``gamma_w`` (``[train] lr``) is, and then
    ``lambda <- projection of lambda + gamma_lambda L`` onto the simplex, ``gamma_lambda`` times the round's ``[train]
    lr-decay`` as every other rate. It starts uniform, so ``gamma-lambda = 0`` is
    FedAvg with uniform weights. Deployed is the mean of w over the rounds (``average = false``: the last one). BatchNorm
    statistics are averaged as parameters are, by lambda and over rounds.

    Deviations: local steps in place of one gradient, as in FedTTA's comparison, whose ``gamma-lambda`` is 0.3 for CIFAR,
    0.5 for FEMNIST and 0.001 for MNIST. Who is not there in a round keeps its lambda but for the projection, and those who
    are there are averaged by theirs, renormalised (uniformly if all of these are zero). With ``[train] balance`` local steps
    are balanced, but ``L_k(w)`` stays the loss of the images as they are.
    """

    gamma_lambda: NonNegative = 0.3
    average: bool = True

    revision: ClassVar[int] = 1

    # ---- the client ----------------------------------------------------------------------------------------------------
    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Look at the received model, then train it."""
        return (Phase(name="risk", kind="fold", batch_stats=False), Phase())

    def begin(self, down: Tree, local: Tree) -> Tree:
        """Nothing has been looked at."""
        return {
            **super().begin(down, local),
            "risk": {"loss": down["model"][self.arch.parameters[0]].new_zeros(())},
        }

    def fold(self, state: Tree, batch: Batch, phase: Phase) -> Tree:
        """The mean loss, batch by batch."""
        loss = F.cross_entropy(self.arch(state["model"], batch["x"]).logits, batch["y"], reduction="sum")
        return {**state, "risk": {"loss": state["risk"]["loss"] + loss / state["now"]["samples"]}}

    def finish(self, state: Tree, down: Tree, local: Tree) -> tuple[Tree, Tree]:
        """The model and one number."""
        up, kept = super().finish(state, down, local)
        return {**up, "risk": state["risk"]}, kept

    # ---- the server ----------------------------------------------------------------------------------------------------
    def init_server(self, models: Mapping[str, Tensors], clients: tuple[str, ...], public: Tensor) -> Tree:
        """Uniform lambda, and a mean over no rounds."""
        server = super().init_server(models, clients, public)
        share = torch.full((), 1 / len(clients), dtype=torch.float64)
        seen = {"average": server["model"], "averaged": {"rounds": torch.zeros((), dtype=torch.int64)}}
        return {**server, "share": dict.fromkeys(clients, share), **(seen if self.average else {})}

    def broadcast(self, server: Tree, client: str, ctx: Context) -> Tree:
        """The current model to train, the mean to serve with."""
        if self.average and (ctx.ending):
            return {"model": server["average"]}
        return super().broadcast(server, client, ctx)

    def aggregate(self, server: Tree, ups: Mapping[str, Tree], ctx: ServerContext) -> tuple[Tree, Tensors]:
        """Descent by the old lambda, ascent by the losses of the old model, and the mean goes on."""
        share = torch.stack(list(server["share"].values()))
        present = torch.stack([server["share"][name] for name in ups])
        weights = torch.where(present.sum() > 0, present, 1)
        merged = weighted_mean([up["model"] for up in ups.values()], weights / weights.sum())
        model = {**server["model"], **merged}
        nothing = torch.zeros_like(share[0])
        risks = torch.stack(
            [ups[name]["risk"]["loss"].to(share) if name in ups else nothing for name in server["share"]]
        )
        moved = projected(share + self.gamma_lambda * ctx.decay(self.train) * risks)
        after = {**server, "model": model, "share": dict(zip(server["share"], moved.unbind(), strict=True))}
        if not self.average:
            return after, {}
        rounds = server["averaged"]["rounds"] + 1
        mean, part = dict(model), 1 / rounds.double()
        for name, leaf in model.items():
            if leaf.is_floating_point():
                mean[name] = torch.lerp(server["average"][name], leaf, part.to(leaf))  # exact where part is one
        return {**after, "average": mean, "averaged": {"rounds": rounds}}, {}


def projected(point: Tensor) -> Tensor:
    """The point of the probability simplex that is nearest to ``point`` [n], found by sorting.

    With ``u`` the entries in falling order and ``r`` the largest j for which ``u_j + (1 - sum_{i<=j} u_i) / j > 0``, every
    entry is moved by ``(1 - sum_{i<=r} u_i) / r`` and cut off at zero.

    >>> projected(torch.tensor([1.25, 0.25, -4.0])).tolist()
    [1.0, 0.0, 0.0]
    """
    falling = point.sort(descending=True).values
    count = torch.arange(1, len(point) + 1, dtype=point.dtype, device=point.device)
    moves = (1 - falling.cumsum(0)) / count
    last = (falling + moves > 0).sum() - 1
    return (point + moves[last]).clamp(min=0)
