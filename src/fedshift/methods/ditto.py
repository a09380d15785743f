"""Ditto: a global model by FedAvg, and a personal one held near it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedshift.core.context import ClientInfo, Context, Phase
from fedshift.core.method import Batch, Method
from fedshift.core.options import NonNegative
from fedshift.core.registry import method
from fedshift.core.tree import Tensors, Tree, pick, squared_distance


@method("ditto", paper="Ditto: Fair and Robust Federated Learning Through Personalization", venue="ICML", year=2021)
@dataclass(frozen=True)
class Ditto(Method):
    """FedAvg, and beside it ``v_k <- v_k - lr (grad f(v_k) + lam (v_k - w_t))`` that never leaves the client.

    ``w_t`` is the received model. ``lam = 0`` is Local; a large one keeps the personal model at the received one.
    The received model is deployed too, in slot ``global``, and is all that an unseen client has.
    """

    lam: NonNegative = 1.0

    personal: ClassVar[bool] = True
    linear: ClassVar[bool] = True
    provides: ClassVar[frozenset[str]] = frozenset({"model", "global"})

    def init_local(self, model: Tensors, info: ClientInfo, ctx: Context) -> Tree:
        """The personal model starts where everybody starts; an unseen client has none."""
        return {"personal": model} if not info.unseen else {}

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """The global model, then the personal one on the same batches."""
        return (Phase(), Phase(slot="personal"))

    def begin(self, down: Tree, local: Tree) -> Tree:
        """Both models, and what was received."""
        return {**super().begin(down, local), **local, "anchor": pick(down["model"], self.arch.trainable)}

    def loss(self, state: Tree, tensors: Tensors, batch: Batch, phase: Phase) -> tuple[Tensor, Tensors]:
        """The personal model pays for its distance to the received one."""
        value, buffers = super().loss(state, tensors, batch, phase)
        if phase.slot == "model":
            return value, buffers
        return value + 0.5 * self.lam * squared_distance(tensors, state["anchor"]), buffers

    def deployed(self, down: Tree, local: Tree) -> Tree:
        """The personal model and the received one."""
        return {"model": local.get("personal", down["model"]), "global": down["model"]}
