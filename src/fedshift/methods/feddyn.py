"""FedDyn: a regulariser that moves with every client, so that local optima and the global one agree in the limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedshift.core.context import ClientInfo, Context, Phase, ServerContext
from fedshift.core.method import Method
from fedshift.core.options import Positive
from fedshift.core.registry import method
from fedshift.core.tree import Tensors, Tree, pick, subtract, weighted_mean, zeros_like


@method("feddyn", paper="Federated Learning Based on Dynamic Regularization", venue="ICLR", year=2021)
@dataclass(frozen=True)
class FedDyn(Method):
    """FedAvg with a linear and a proximal term at the client, and a memory of all drifts at the server.

    Client, from the received ``w_t``: minimise ``f(w) - <g_k, w> + (alpha / 2) |w - w_t|^2``, then
    ``g_k <- g_k - alpha (w_k - w_t)``, which is the gradient of ``f`` at ``w_k`` if that is the minimum. Server, with N
    clients in the whole task: ``h <- h - (alpha / N) sum_k (w_k - w_t)`` and ``w <- mean_k w_k - h / alpha``, both over
    this round's participants and uniform whatever ``[train] weights`` says. Hence ``h = (1 / N) sum_k g_k`` after every
    round. Both terms are over parameters; BatchNorm statistics are plainly averaged.

    The terms are added to the gradient, before clipping, momentum and weight decay; the reported loss is ``f`` alone.
    As ``alpha`` falls to zero the clients' work becomes FedAvg's, but not the server's: ``-h / alpha`` stays the sum of
    all past drifts, so the first full round goes twice as far as FedAvg's. Without ``[train] clip`` it may diverge.
    Left out: the authors' script divides ``alpha`` by a client's relative amount of data.
    """

    alpha: Positive = 0.01

    def init_local(self, model: Tensors, info: ClientInfo, ctx: Context) -> Tree:
        """A client's linear term starts at zero."""
        return {"g": zeros_like(pick(model, self.arch.trainable))}

    def init_server(self, models: Mapping[str, Tensors], clients: tuple[str, ...], public: Tensor) -> Tree:
        """So does the server's memory."""
        server = super().init_server(models, clients, public)
        return {**server, "h": zeros_like(pick(server["model"], self.arch.trainable))}

    def begin(self, down: Tree, local: Tree) -> Tree:
        """The linear term, and what was received."""
        anchor = pick(down["model"], self.arch.trainable)
        return {**super().begin(down, local), "g": local["g"], "anchor": anchor}

    def transform_grads(self, state: Tree, grads: Tensors, phase: Phase) -> Tensors:
        """Add ``alpha (w - w_t) - g_k``."""
        drift = subtract(state[phase.slot], state["anchor"])
        moved = {name: grad + self.alpha * drift[name] - state["g"][name] for name, grad in grads.items()}
        return super().transform_grads(state, moved, phase)

    def finish(self, state: Tree, down: Tree, local: Tree) -> tuple[Tree, Tree]:
        """The model goes up; the linear term has learnt from where it went."""
        up, _ = super().finish(state, down, {})
        drift = subtract(state["model"], state["anchor"])
        return up, {"g": {name: leaf - self.alpha * drift[name] for name, leaf in local["g"].items()}}

    def aggregate(self, server: Tree, ups: Mapping[str, Tree], ctx: ServerContext) -> tuple[Tree, Tensors]:
        """The memory first, then the mean corrected by it."""
        uniform = torch.full((len(ups),), 1 / len(ups), dtype=torch.float64)
        here, models = pick(server["model"], self.arch.trainable), [up["model"] for up in ups.values()]
        drift = weighted_mean([subtract(model, here) for model in models], uniform)
        part = self.alpha * len(ups) / ctx.clients
        memory = {name: leaf - part * drift[name] for name, leaf in server["h"].items()}
        moved = {name: leaf + drift[name] - memory[name] / self.alpha for name, leaf in here.items()}
        return {"model": {**server["model"], **weighted_mean(models, uniform), **moved}, "h": memory}, {}
