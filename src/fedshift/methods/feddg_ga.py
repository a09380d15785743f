"""FedDG-GA: clients whom the global model serves worse than their own count more in the next average."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedshift.core.context import ClientInfo, Context, Phase, ServerContext
from fedshift.core.method import Batch, Method
from fedshift.core.options import UnitInterval
from fedshift.core.registry import method
from fedshift.core.tree import Tensors, Tree, weighted_mean
from fedshift.errors import UserError

if TYPE_CHECKING:
    from fedshift.data.task import Task


@method(
    "feddg-ga",
    paper="Federated Domain Generalization with Generalization Adjustment",
    venue="CVPR",
    year=2023,
)
@dataclass(frozen=True)
class FedDGGA(Method):
    """FedAvg whose weights a_k (first ``1/K``; [train] weights has no say) follow the clients' generalisation gaps.

    ``gap_k`` is the metric of the aggregated model minus that of client k's own model before the aggregation, both on
    k's validation images. In round t of T the server takes ``a_k <- a_k - (s_t / K) gap_k / max_j |gap_j|`` (plus for the
    loss), clips to [0, 1] and lets the a_k sum to one, with ``s_t = step_size (1 - t / T)``; then it averages the models by
    a_k, renormalised over those who took part. ``step_size = 0`` is FedAvg with uniform weights.

    The gap of an aggregation reaches the server with the next upload, where it is used before the next average: with full
    participation these are the authors' steps without their second exchange. A client that pauses compares the model it
    receives with its own of the last time. Who takes part for the first time or has no validation images has gap 0. The 1/3
    in the authors' code is 1/K, and its s_t lies two rounds behind ours.
    """

    step_size: UnitInterval = 0.2
    metric: Literal["accuracy", "loss"] = "accuracy"

    def prepare_task(self, task: Task) -> Task:
        """Without validation images there are no gaps."""
        if not any(len(client.val) for client in task.clients):
            raise UserError(
                "method 'feddg-ga' weighs clients by validation images, but no client has any: set [split] val"
            )
        return task

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Look at the received model, train it, look at what it has become."""
        look = Phase(kind="fold", data="val", batch_stats=False)
        return (replace(look, name="received"), Phase(), replace(look, name="own"))

    def init_local(self, model: Tensors, info: ClientInfo, ctx: Context) -> Tree:
        """A client has no model of its own yet; an unseen client is never asked for one."""
        if info.unseen:
            return {}
        metric = model[self.arch.parameters[0]].new_zeros(())
        return {"last": {"metric": metric, "known": torch.zeros_like(metric, dtype=torch.bool)}}

    def begin(self, down: Tree, local: Tree) -> Tree:
        """Nothing has been looked at."""
        zero = torch.zeros_like(local["last"]["metric"])
        return {**super().begin(down, local), "sum": {"received": zero, "own": zero}, "seen": {"images": zero}}

    def fold(self, state: Tree, batch: Batch, phase: Phase) -> Tree:
        """Add up the metric of the model as it is now."""
        logits = self.arch(state["model"], batch["x"]).logits
        if self.metric == "accuracy":
            value = (logits.argmax(1) == batch["y"]).to(logits.dtype).sum()
        else:
            value = F.cross_entropy(logits, batch["y"], reduction="sum")
        images = state["seen"]["images"] + (len(batch["y"]) if phase.name == "own" else 0)
        total = {**state["sum"], phase.name: state["sum"][phase.name] + value}
        return {**state, "sum": total, "seen": {"images": images}}

    def finish(self, state: Tree, down: Tree, local: Tree) -> tuple[Tree, Tree]:
        """Both sides of the gap go up; the new model's metric is kept for the next time."""
        up, _ = super().finish(state, down, {})
        images = state["seen"]["images"].clamp(min=1)
        received, own = (state["sum"][name] / images for name in ("received", "own"))
        before = torch.where(local["last"]["known"], local["last"]["metric"], received)
        known = torch.ones_like(local["last"]["known"])
        return {**up, "metric": {"after": received, "before": before}}, {"last": {"metric": own, "known": known}}

    def init_server(self, models: Mapping[str, Tensors], clients: tuple[str, ...], public: Tensor) -> Tree:
        """Everybody counts the same."""
        share = torch.full((), 1 / len(clients), dtype=torch.float64)
        return {**super().init_server(models, clients, public), "share": dict.fromkeys(clients, share)}

    def aggregate(self, server: Tree, ups: Mapping[str, Tree], ctx: ServerContext) -> tuple[Tree, Tensors]:
        """Move the weights by the gaps, then average by them."""
        gaps = torch.stack([up["metric"]["after"] - up["metric"]["before"] for up in ups.values()]).double()
        largest = gaps.abs().amax()
        step = self.step_size * (1 - ctx.round / ctx.rounds) / len(server["share"])
        moves = step * (-gaps if self.metric == "accuracy" else gaps) / torch.where(largest > 0, largest, 1)
        moved = {name: (server["share"][name] + by).clamp(0, 1) for name, by in zip(ups, moves, strict=True)}
        everyone = {**server["share"], **moved}
        total = torch.stack(list(everyone.values())).sum()
        share = {name: leaf / total for name, leaf in everyone.items()}
        present = torch.stack([share[name] for name in ups])
        weights = torch.where(present.sum() > 0, present, 1)  # only those who count for nothing came
        merged = weighted_mean([up["model"] for up in ups.values()], weights / weights.sum())
        return {**server, "model": {**server["model"], **merged}, "share": share}, {}
