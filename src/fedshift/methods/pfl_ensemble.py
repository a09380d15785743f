"""PFL-Ensemble: FedPer, and an unseen client is served with the mean of all training clients' logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import vmap

from fedshift.core.arch import BatchStats, Output
from fedshift.core.options import Share
from fedshift.core.registry import method
from fedshift.core.tree import Tensors, Tree
from fedshift.methods.pfl_sampled import PFLSampled


@method("pfl-ensemble", paper="(baseline; PFL-Ensemble in FedTTA, 2023)", venue="", year=0)
@dataclass(frozen=True)
class PFLEnsemble(PFLSampled):
    """PFL-Sampled with many models: ``fraction`` of those published, drawn by each unseen client, whose logits are averaged.

    FedTTA's code has an option for this that takes a random half; the paper says all, which is the default.

    With one private layer, which is linear, the mean of the logits on the one body is the logits of the mean head, so that
    is what is deployed, and every adapter can go on from it. With more, slot ``members`` has the private parts side by side
    (none at a training client), the body is gone through once, and features are the mean of the members'; adapters then
    move the body alone.
    """

    fraction: Share = 1.0

    provides: ClassVar[frozenset[str]] = frozenset({"model", "members"})

    def chosen(self, count: int) -> int:
        """A share of them, and at least one."""
        return max(1, round(self.fraction * count))

    def deployed(self, down: Tree, local: Tree) -> Tree:
        """The mean head, or the members."""
        tree = super().deployed(down, local)
        own = self.drawn(down, local) if self.private_layers > 1 else []
        return {**tree, "members": {n: torch.stack([part[n] for part in own]) for n in own[0]} if own else {}}

    def predict(self, deployed: Tree, x: Tensor, batch_stats: BatchStats = False) -> Output:
        """One model, or the mean of many on one body."""
        output = super().predict(deployed, x, batch_stats)
        if not deployed["members"]:
            return output

        def answer(own: Tensors) -> tuple[Tensor, Tensor]:
            whole = self.arch({**deployed["model"], **own}, x, batch_stats)
            return whole.logits, whole.features

        logits, features = vmap(answer, randomness="different")(deployed["members"])
        return output._replace(logits=logits.mean(0), features=features.mean(0))
