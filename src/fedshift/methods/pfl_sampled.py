"""PFL-Sampled: FedPer, and an unseen client is served with the model of one training client, whichever it draws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedshift.core import rng
from fedshift.core.context import ClientInfo, Context
from fedshift.core.options import Count
from fedshift.core.registry import method
from fedshift.core.tree import Tensors, Tree, pick, stack, unstack, weighted_mean
from fedshift.methods.fedper import FedPer


@method("pfl-sampled", paper="(baseline; PFL-Sampled in FedTTA, 2023)", venue="", year=0)
@dataclass(frozen=True)
class PFLSampled(FedPer):
    """FedPer's training; at the end every client that has taken part publishes its whole model for unseen clients.

    The body is everybody's and at the server already, so what is published, and counted in bytes, is the private part. An
    unseen client receives all of them and draws one from its own seed. Training clients are served as in FedPer.

    ``private-layers`` is how many of the last layers with weights are private: 1 is FedPer's head. FedTTA's code shares the
    first two layers, which leaves 2 private in its convolutional network and 1 in its MLP.
    """

    private_layers: Count = 1

    linear: ClassVar[bool] = False  # unseen clients get single clients' heads, and no mean of them

    def private(self, ctx: Context) -> frozenset[str]:
        """The last layers; the head is the last of all."""
        arch = self.arch
        layers = list(dict.fromkeys(_layer(name) for name in (*arch.parameters, *arch.head)))
        layers.sort(key=lambda layer: layer == _layer(next(iter(arch.head))))  # stable: the others keep their order
        own = set(layers[-self.private_layers :])
        return frozenset(name for name in (*arch.parameters, *arch.buffers) if _layer(name) in own)

    def init_local(self, model: Tensors, info: ClientInfo, ctx: Context) -> Tree:
        """An unseen client draws a ticket."""
        return {"ticket": {"seed": torch.tensor(info.seed)}} if info.unseen else super().init_local(model, info, ctx)

    def settle(self, state: Tree | None, down: Tree, local: Tree, ctx: Context) -> tuple[Tree, Tree]:
        """The private part is given away."""
        return {"model": local["model"]} if "model" in local else {}, local

    def take_gifts(self, server: Tree, gifts: Mapping[str, Tree]) -> Tree:
        """All of them, side by side."""
        return {**server, "members": stack(list(gifts.values()))["model"]} if gifts else server

    def broadcast(self, server: Tree, client: str, ctx: Context) -> Tree:
        """With all private parts for an unseen client."""
        down = super().broadcast(server, client, ctx)
        return {**down, "members": server["members"]} if ctx.stage == "unseen" and "members" in server else down

    def chosen(self, count: int) -> int:
        """How many of the published models an unseen client uses."""
        return 1

    def drawn(self, down: Tree, local: Tree) -> list[Tensors]:
        """The private parts that an unseen client's ticket names, in client order; none for a training client."""
        if "members" not in down or "ticket" not in local:
            return []
        count = len(next(iter(down["members"].values())))
        order = rng.permutation(int(local["ticket"]["seed"]), count)[: self.chosen(count)]
        members = unstack({"model": down["members"]}, count)
        return [members[k]["model"] for k in order.sort().values.tolist()]

    def deployed(self, down: Tree, local: Tree) -> Tree:
        """The body under what was drawn (the mean of it, where that is more than one)."""
        own = self.drawn(down, local)
        if not own:
            return super().deployed(down, local)
        mean = weighted_mean(own, torch.full((len(own),), 1 / len(own), dtype=torch.float64))
        return {"model": {**down["model"], **pick(mean, own[0])}}


def _layer(entry: str) -> str:
    return entry.rpartition(".")[0]
