"""Centralised: what could be had if data were allowed to move."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from fedshift.core.context import Context, Phase
from fedshift.core.method import Method
from fedshift.core.registry import method

if TYPE_CHECKING:
    from fedshift.data.task import Task


@method("centralised", paper="(upper bound)", venue="", year=0)
@dataclass(frozen=True)
class Centralised(Method):
    """One model on all clients' training data: the usual upper bound.

    A round is ``local-epochs`` passes over the pooled data, or ``local-steps`` times the number of clients, so that it
    takes as many steps as all federated clients together. Evaluated on the same clients as everybody else.
    """

    def prepare_task(self, task: Task) -> Task:
        """One client that owns everything."""
        first = task.clients[0]
        parts = {
            part: torch.cat([getattr(client, part) for client in task.clients]).sort().values
            for part in ("train", "val", "test")
        }
        return replace(task, clients=(replace(first, name="everybody", **parts),), unseen=(), streams={})

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """The clients' steps added up."""
        if self.train.local_steps is None:
            return (Phase(),)
        return (Phase(steps=self.train.local_steps * ctx.clients),)
