"""Majority: the floor under every table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from fedshift.core.arch import BatchStats, Output
from fedshift.core.context import ClientInfo, Context, Phase, ServerContext
from fedshift.core.method import Method
from fedshift.core.registry import method
from fedshift.core.tree import Tensors, Tree


@method("majority", paper="(baseline)", venue="", year=0)
@dataclass(frozen=True)
class Majority(Method):
    """Every client answers with its own most frequent class, whatever the image; nothing is trained.

    A model that is no better has learnt nothing, though by accuracy alone it may look good. With a client's class counts
    n_y its answer is ``p(y) = (n_y + 1) / (n + C)``, so that the loss is about the lowest one can have without looking.
    Unseen clients are answered by the counts of all clients together, which are given away once, at the end.
    """

    personal: ClassVar[bool] = True
    provides: ClassVar[frozenset[str]] = frozenset({"counts"})  # no model that an adapter could improve

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Nothing."""
        return ()

    def private(self, ctx: Context) -> frozenset[str]:
        """The untrained network: nothing travels before the end."""
        return frozenset() if ctx.ending else self.arch.encoder | self.arch.head

    def init_local(self, model: Tensors, info: ClientInfo, ctx: Context) -> Tree:
        """One's own class counts; an unseen client has no labels."""
        padded = F.pad(info.histogram.to(torch.float32), (0, self.arch.classes - len(info.histogram)))
        counts = {} if info.unseen else {"counts": {"own": padded}}
        return {**super().init_local(model, info, ctx), **counts}

    def finish(self, state: Tree, down: Tree, local: Tree) -> tuple[Tree, Tree]:
        """Nothing goes up."""
        return {}, local

    def broadcast(self, server: Tree, client: str, ctx: Context) -> Tree:
        """Nothing before the end; then the network, and to unseen clients all counts."""
        counts = {"counts": server["counts"]} if ctx.stage == "unseen" and "counts" in server else {}
        return {**super().broadcast(server, client, ctx), **counts}

    def aggregate(self, server: Tree, ups: Mapping[str, Tree], ctx: ServerContext) -> tuple[Tree, Tensors]:
        """There is nothing to combine."""
        return server, {}

    def settle(self, state: Tree | None, down: Tree, local: Tree, ctx: Context) -> tuple[Tree, Tree]:
        """The counts are given to unseen clients."""
        return {"counts": local["counts"]}, local

    def take_gifts(self, server: Tree, gifts: Mapping[str, Tree]) -> Tree:
        """Their sum."""
        counts = [gift["counts"]["own"] for gift in gifts.values()]
        return {**server, "counts": {"all": torch.stack(counts).sum(0)}} if counts else server

    def deployed(self, down: Tree, local: Tree) -> Tree:
        """One's own counts, or else everybody's."""
        known = local.get("counts") or down.get("counts", {})
        own = next(iter(known.values()), torch.zeros(self.arch.classes))
        return {**super().deployed(down, local), "counts": {"own": own}}

    def predict(self, deployed: Tree, x: torch.Tensor, batch_stats: BatchStats = False) -> Output:
        """The same for every image."""
        output = self.arch(deployed["model"], x, batch_stats)
        counts = deployed["counts"]["own"].to(output.logits) + 1
        return output._replace(logits=(counts / counts.sum()).log().expand_as(output.logits))
