"""FedDyn: a regulariser that moves with every client, so that local optima and the global one agree in the limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedshift.core.checks import positive
from fedshift.core.method import Batch, Facts, Method, Now, Phase
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

    alpha: float = 0.01

    def __post_init__(self) -> None:
        """Refuse settings that cannot be meant."""
        positive(alpha=self.alpha)

    def birth(self, model: Tensors, facts: Facts, now: Now) -> Tree:
        """A client's linear term starts at zero."""
        return {"g": zeros_like(pick(model, self.arch.trainable))}

    def server_init(self, models: Mapping[str, Tensors], clients: tuple[str, ...]) -> Tree:
        """So does the server's memory."""
        server = super().server_init(models, clients)
        return {**server, "h": zeros_like(pick(server["model"], self.arch.trainable))}

    def client_init(self, down: Tree, mine: Tree) -> Tree:
        """The linear term, and what was received."""
        anchor = pick(down["model"], self.arch.trainable)
        return {**super().client_init(down, mine), "g": mine["g"], "anchor": anchor}

    def fix_grad(self, state: Tree, grads: Tensors, phase: Phase) -> Tensors:
        """Add ``alpha (w - w_t) - g_k``."""
        drift = subtract(state[phase.slot], state["anchor"])
        return {name: grad + self.alpha * drift[name] - state["g"][name] for name, grad in grads.items()}

    def client_final(self, state: Tree, down: Tree, mine: Tree) -> tuple[Tree, Tree]:
        """The model goes up; the linear term has learnt from where it went."""
        up, _ = super().client_final(state, down, {})
        drift = subtract(state["model"], state["anchor"])
        return up, {"g": {name: leaf - self.alpha * drift[name] for name, leaf in mine["g"].items()}}

    def aggregate(self, server: Tree, ups: Mapping[str, Tree], now: Tensors, draws: Batch) -> Tree:
        """The memory first, then the mean corrected by it."""
        uniform = now["samples"].new_ones(len(ups)).double() / len(ups)
        here, models = pick(server["model"], self.arch.trainable), [up["model"] for up in ups.values()]
        drift = weighted_mean([subtract(model, here) for model in models], uniform)
        part = self.alpha * len(ups) / float(now["clients"])
        memory = {name: leaf - part * drift[name] for name, leaf in server["h"].items()}
        moved = {name: leaf + drift[name] - memory[name] / self.alpha for name, leaf in here.items()}
        return {"model": {**server["model"], **weighted_mean(models, uniform), **moved}, "h": memory}
