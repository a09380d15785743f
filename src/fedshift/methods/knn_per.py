"""kNN-Per: the global model, and a memory of one's own training samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from fedshift.core.arch import BatchStats, Output
from fedshift.core.context import ClientInfo, Context, Phase
from fedshift.core.method import Batch, Method
from fedshift.core.options import Count, Positive
from fedshift.core.registry import method
from fedshift.core.tree import Tensors, Tree
from fedshift.errors import UserError

if TYPE_CHECKING:
    from fedshift.data.task import Task

GRID = 101  # weights of the memory that validation chooses from: 0, 0.01, ..., 1


@method("knn-per", paper="Personalized Federated Learning through Local Memorization", venue="ICML", year=2022)
@dataclass(frozen=True)
class KNNPer(Method):
    """FedAvg; at the end every client remembers the features and labels of its training images.

    A test sample's ``neighbours`` nearest memories (squared distance D in the final global extractor's d features) vote with
    weight ``exp(-D / (d bandwidth))``, and the prediction is ``(1 - lam) softmax(model) + lam vote``. Each client chooses
    lam from 0, 0.01, ..., 1 by its validation accuracy; the smallest of equals. FedTHE's code chose it on test data.
    Unseen clients have no memory and lam = 0.
    """

    neighbours: Count = 10
    bandwidth: Positive = 1.0

    personal: ClassVar[bool] = True
    linear: ClassVar[bool] = True
    provides: ClassVar[frozenset[str]] = frozenset({"model", "memory"})

    def prepare_task(self, task: Task) -> Task:
        """Without validation images there is nothing to choose by."""
        if not any(len(client.val) for client in task.clients):
            raise UserError(
                "method 'knn-per' chooses its weight on validation images, but no client has any: set [split] val"
            )
        return task

    def last_phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Remember the training images, then try every weight on the validation images."""
        remember = Phase(name="remember", kind="fold", inputs="features", batch_stats=False)
        choose = Phase(name="choose", kind="fold", inputs="features", batch_stats=False, data="val")
        return (remember, choose)

    def init_local(self, model: Tensors, info: ClientInfo, ctx: Context) -> Tree:
        """Room for every training image, at the end only."""
        if not ctx.ending:
            return {}
        room = info.samples if not info.unseen else 0
        like = next(iter(model.values()))
        tries = {"filled": torch.zeros((), dtype=torch.int64), "hits": torch.zeros(GRID, dtype=torch.int64)}
        return {"memory": self._memory(like, room), "tries": tries}

    def begin(self, down: Tree, local: Tree) -> Tree:
        """The memory is filled in the final phases."""
        return {**super().begin(down, local), **local}

    def fold(self, state: Tree, batch: Batch, phase: Phase) -> Tree:
        """Write down a batch, or count each weight's right answers on it."""
        memory, tries = state["memory"], state["tries"]
        if phase.name == "remember":
            places = tries["filled"] + torch.arange(len(batch["y"]), device=batch["y"].device)
            written = {
                "features": memory["features"].index_copy(0, places, batch["x"]),
                "labels": memory["labels"].index_copy(0, places, batch["y"]),
            }
            filled = {"filled": tries["filled"] + len(batch["y"])}
            return {**state, "memory": {**memory, **written}, "tries": {**tries, **filled}}
        p, vote = self._opinions(state["model"], memory, batch["x"])
        weights = torch.linspace(0, 1, GRID, dtype=p.dtype, device=p.device)[:, None, None]
        hits = ((1 - weights) * p + weights * vote).argmax(-1) == batch["y"]
        return {**state, "tries": {**tries, "hits": tries["hits"] + hits.sum(1)}}

    def settle(self, state: Tree | None, down: Tree, local: Tree, ctx: Context) -> tuple[Tree, Tree]:
        """The memory and the best weight, the smallest of equals, stay."""
        if state is None:
            return {}, local
        hits = state["tries"]["hits"] * GRID - torch.arange(GRID, device=state["tries"]["hits"].device)
        lam = hits.argmax(-1).to(state["memory"]["lam"].dtype) / (GRID - 1)
        return {}, {"memory": {**state["memory"], "lam": lam}}

    @property
    def gives(self) -> bool:
        """Nothing: a memory is of one's own images."""
        return False

    def deployed(self, down: Tree, local: Tree) -> Tree:
        """The global model and the memory."""
        like = next(iter(down["model"].values()))
        return {"model": down["model"], "memory": local.get("memory", self._memory(like, 0))}

    def predict(self, deployed: Tree, x: Tensor, batch_stats: BatchStats = False) -> Output:
        """Log-probabilities of the mixture."""
        output = super().predict(deployed, x, batch_stats)
        memory = deployed["memory"]
        if not len(memory["labels"]):
            return output
        p, vote = self._opinions(deployed["model"], memory, output.features)
        mixed = (1 - memory["lam"]) * p + memory["lam"] * vote
        return output._replace(logits=mixed.clamp(min=torch.finfo(mixed.dtype).tiny).log())

    def _opinions(self, model: Tensors, memory: Tensors, features: Tensor) -> tuple[Tensor, Tensor]:
        """The model's probabilities and the neighbours' vote."""
        p = self.arch.classify(model, features).softmax(-1)
        stored = memory["features"]
        distance = features.square().sum(1, keepdim=True) + stored.square().sum(1) - 2 * features @ stored.T
        near = distance.topk(min(self.neighbours, len(stored)), largest=False)
        weights = (-near.values / (features.shape[1] * self.bandwidth)).softmax(-1)
        classes = memory["labels"][near.indices][..., None] == torch.arange(p.shape[1], device=p.device)
        return p, (weights[..., None] * classes).sum(1)

    def _memory(self, like: Tensor, room: int) -> Tensors:
        return {
            "features": like.new_zeros(room, self.arch.feature_size),
            "labels": torch.zeros(room, dtype=torch.int64, device=like.device),
            "lam": like.new_zeros(()),
        }
