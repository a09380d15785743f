"""SCAFFOLD: control variates that cancel the drift of local steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedshift.blocks.control_variates import change_of, check_optimiser, corrected, moved
from fedshift.core.context import ClientInfo, Context, Phase, ServerContext
from fedshift.core.method import Method
from fedshift.core.options import NonNegative
from fedshift.core.registry import method
from fedshift.core.tree import Tensors, Tree, pick, subtract, weighted_mean, zeros_like


@method("scaffold", paper="SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", venue="ICML", year=2020)
@dataclass(frozen=True)
class Scaffold(Method):
    """FedAvg with drift correction (option II of the paper).

    Client, S steps of ``y <- y - lr (g - c_k + c)``; then ``c_k+ = c_k - c + (w_t - y) / (S lr)``. Server,
    ``w <- w + server_lr mean_k (y_k - w)`` and ``c <- c + (1/K) sum_k (c_k+ - c_k)``. The correction is applied before
    clipping, momentum and weight decay; ``S`` is the client's true number of steps and ``lr`` the rate of that round.
    BatchNorm statistics are plainly averaged.

    Deviation: the paper has plain SGD. With momentum m, S steps along one gradient go
    ``(S - m (1 - m^S) / (1 - m)) / (1 - m)`` times as far as ``lr``, so that is what the drift is divided by (S at m = 0);
    dividing by S alone overestimates the control variate tenfold at m = 0.9 and diverges. Adam has no such rule.
    """

    server_lr: NonNegative = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_optimiser("method 'scaffold'", self.train.optimiser)

    def init_local(self, model: Tensors, info: ClientInfo, ctx: Context) -> Tree:
        """A client's control variate starts at zero."""
        return {"ci": zeros_like(pick(model, self.arch.trainable))}

    def init_server(self, models: Mapping[str, Tensors], clients: tuple[str, ...], public: Tensor) -> Tree:
        """So does the server's."""
        server = super().init_server(models, clients, public)
        return {**server, "c": zeros_like(pick(server["model"], self.arch.trainable))}

    def broadcast(self, server: Tree, client: str, ctx: Context) -> Tree:
        """The model and the server's control variate."""
        return {**super().broadcast(server, client, ctx), "c": server["c"]}

    def begin(self, down: Tree, local: Tree) -> Tree:
        """Both control variates are at hand in every step."""
        return {**super().begin(down, local), "ci": local["ci"]}

    def transform_grads(self, state: Tree, grads: Tensors, phase: Phase) -> Tensors:
        """``g - c_k + c``."""
        return super().transform_grads(state, corrected(grads, state["ci"], state["c"]), phase)

    def finish(self, state: Tree, down: Tree, local: Tree) -> tuple[Tree, Tree]:
        """The new control variate; its change travels with the model."""
        up, _ = super().finish(state, down, {})
        change = change_of(down["model"], state["model"], down["c"], state["now"], self.train.momentum)
        return {**up, "dc": change}, {"ci": {name: local["ci"][name] + delta for name, delta in change.items()}}

    def aggregate(self, server: Tree, ups: Mapping[str, Tree], ctx: ServerContext) -> tuple[Tree, Tensors]:
        """Uniform means, as in the paper; statistics are averaged, parameters take the server's step."""
        uniform = torch.full((len(ups),), 1 / len(ups), dtype=torch.float64)
        mean = weighted_mean([up["model"] for up in ups.values()], uniform)
        step = subtract(mean, pick(server["model"], self.arch.trainable))
        after = {name: server["model"][name] + self.server_lr * delta for name, delta in step.items()}
        common = moved(server["c"], [up["dc"] for up in ups.values()], ctx.clients)
        return {"model": {**server["model"], **mean, **after}, "c": common}, {}
