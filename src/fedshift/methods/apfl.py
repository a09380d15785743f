"""APFL: every client mixes a model of its own with the global one, and learns how much."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedshift.core.context import ClientInfo, Context, Phase
from fedshift.core.grad import gradient
from fedshift.core.method import Batch, Method
from fedshift.core.optim import clip_by_norm
from fedshift.core.options import UnitInterval
from fedshift.core.registry import method
from fedshift.core.tree import Tensors, Tree, pick


@method("apfl", paper="Adaptive Personalized Federated Learning", venue="arXiv", year=2020)
@dataclass(frozen=True)
class APFL(Method):
    """FedAvg, and beside it ``v_k`` that is trained as a part of the mixture ``u = alpha v_k + (1 - alpha) w``.

    On every batch, all from the values before it: ``w <- w - lr grad f(w)``, which alone travels; ``v <- v - lr alpha
    grad f(u)``; and on a round's first batch ``alpha <- clip(alpha - lr <v - w, grad f(u)>, 0, 1)`` (``adapt = false``
    keeps alpha). A client serves with the mixture of its ``v`` and the received ``w``; unseen clients get the global
    model. With ``adapt = false``, ``alpha = 0`` is FedAvg and ``alpha = 1`` Local.

    Momentum, weight decay, Adam and clipping apply to ``w`` and to ``v`` each for itself, never to alpha. BatchNorm: the
    running statistics of the mixture are kept with ``v`` and those of ``w`` travel, so with ``alpha = 0`` a client has
    FedAvg's weights and its own statistics.
    """

    alpha: UnitInterval = 0.5
    adapt: bool = True

    personal: ClassVar[bool] = True
    linear: ClassVar[bool] = True
    provides: ClassVar[frozenset[str]] = frozenset({"model", "global"})

    def init_local(self, model: Tensors, info: ClientInfo, ctx: Context) -> Tree:
        """The personal model starts where everybody starts; an unseen client has none."""
        if info.unseen:
            return {}
        return {"personal": model, "mix": {"alpha": model[self.arch.parameters[0]].new_tensor(self.alpha)}}

    def begin(self, down: Tree, local: Tree) -> Tree:
        """Both models, and an optimiser's memory for each: the engine makes that of ``w``, this is the one of ``v``."""
        memory = self.train.optim().memory(pick(local["personal"], self.arch.trainable))
        return {**super().begin(down, local), **local, "memory": memory}

    def client_step(self, state: Tree, batch: Batch, phase: Phase) -> Tree:
        """FedAvg's step for ``w``, then one for ``v`` and alpha at the mixture as it was before."""
        w, v, alpha = state["model"], state["personal"], state["mix"]["alpha"]
        slope, _, buffers = gradient(lambda t: self.loss(state, {**v, **t}, batch, phase), self.mixture(w, v, alpha))
        grads = {name: alpha * leaf for name, leaf in slope.items()}
        if self.train.clip is not None:
            grads = clip_by_norm(grads, self.train.clip)
        own = pick(v, self.arch.trainable)
        moved, memory = self.train.optim().update(own, grads, state["memory"], state["now"]["decay"])
        if self.adapt:
            along = torch.stack([((v[name] - w[name]) * leaf).sum() for name, leaf in slope.items()]).sum()
            stepped = (alpha - state["now"]["lr"] * along).clamp(0, 1)
            alpha = torch.where(state["log"]["steps"] == 0, stepped, alpha)
        after = super().client_step(state, batch, phase)
        return {**after, "personal": {**v, **moved, **buffers}, "mix": {"alpha": alpha}, "memory": memory}

    def mixture(self, w: Tensors, v: Tensors, alpha: Tensor) -> Tensors:
        """``alpha v + (1 - alpha) w`` for every parameter."""
        return {name: alpha * v[name] + (1 - alpha) * leaf for name, leaf in pick(w, self.arch.trainable).items()}

    def deployed(self, down: Tree, local: Tree) -> Tree:
        """The mixture with the received model, and the received model."""
        if not local:
            return {"model": down["model"], "global": down["model"]}
        mixture = self.mixture(down["model"], local["personal"], local["mix"]["alpha"])
        return {"model": {**local["personal"], **mixture}, "global": down["model"]}
