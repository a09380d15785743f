"""MOON: local features are drawn towards the received model's and away from the client's last ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedshift.core.context import ClientInfo, Context, Phase
from fedshift.core.method import Batch, Method
from fedshift.core.options import NonNegative, Positive
from fedshift.core.registry import method
from fedshift.core.tree import Tensors, Tree, pick


@method("moon", paper="Model-Contrastive Federated Learning", venue="CVPR", year=2021)
@dataclass(frozen=True)
class MOON(Method):
    """FedAvg with a contrast between three encoders of one batch.

    z are the features of the model in training, z_g those of the received one and z_p those of the one that the client
    ended its last round with. The local loss is the cross-entropy ``+ mu mean -log(e_g / (e_g + e_p))`` with
    ``e_g = exp(cos(z, z_g) / temperature)`` and ``e_p`` likewise. Only z has a gradient. A client that takes part for
    the first time has no z_p, and its term is constant (``-log 1``). ``mu = 0`` is FedAvg.

    The two frozen encoders normalise as the one in training does, with the batch's statistics, so that they differ by
    weights alone; their own running statistics stay untouched. The last encoder is private and never travels (the head
    does not matter for z and is not kept).

    Deviation: z is what the head reads. The authors train a 256-dimensional projection between encoder and head, which
    is left out: it would change the network for this method alone.
    """

    mu: NonNegative = 1.0
    temperature: Positive = 0.5

    linear: ClassVar[bool] = True

    def init_local(self, model: Tensors, info: ClientInfo, ctx: Context) -> Tree:
        """No last round yet: the encoder only holds the place. An unseen client trains nothing."""
        if info.unseen:
            return {}
        return {"previous": pick(model, self.arch.encoder), "past": {"trained": torch.tensor(False)}}

    def begin(self, down: Tree, local: Tree) -> Tree:
        """The model in training and both frozen encoders."""
        received = pick(down["model"], self.arch.encoder)
        return {**super().begin(down, local), **local, "received": received}

    def loss(self, state: Tree, tensors: Tensors, batch: Batch, phase: Phase) -> tuple[Tensor, Tensors]:
        """Cross-entropy and the contrast."""
        output = self.outputs(tensors, batch, phase)
        frozen = [self.arch.encode(state[slot], batch["x"], phase.batch_stats)[0] for slot in ("received", "previous")]
        alike = torch.stack([F.cosine_similarity(output.features, z, dim=1) for z in frozen], dim=1)
        contrast = -(alike / self.temperature).log_softmax(1)[:, 0].mean()
        contrast = torch.where(state["past"]["trained"], contrast, 0.0)
        return self.cross_entropy(output.logits, batch) + self.mu * contrast, output.buffers

    def finish(self, state: Tree, down: Tree, local: Tree) -> tuple[Tree, Tree]:
        """The model goes up, and its encoder is what the next round leaves behind."""
        up, _ = super().finish(state, down, {})
        trained = torch.ones_like(local["past"]["trained"])
        return up, {"previous": pick(state["model"], self.arch.encoder), "past": {"trained": trained}}
