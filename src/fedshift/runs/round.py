"""One round as a session sees it: before anything was trained, and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from fedshift.core import rng
from fedshift.core.context import Context, Phase
from fedshift.core.method import Method
from fedshift.core.tree import Tree
from fedshift.data.task import Client, Task
from fedshift.engines.schedule import work_of


@dataclass(frozen=True)
class RoundReport:
    """What one round was like."""

    participants: int
    loss: float  # mean over clients, by size
    bytes_down: int
    bytes_up: int
    seconds: float
    diverged: tuple[str, ...]  # clients whose loss or update was not finite
    memory: Mapping[str, int] = field(default_factory=dict)  # see fedshift.runs.memory.memory_so_far
    server: Mapping[str, float] = field(default_factory=dict)  # the server's numbers about its own work
    losses: Mapping[str, float] = field(default_factory=dict)  # by client, those that diverged among them


@dataclass(frozen=True)
class Begun:
    """A round after everything was sent and before anything was trained."""

    ctx: Context
    clients: Sequence[Client]
    downs: Mapping[str, Tree]
    started: float


def drawn(seed: int, clients: int, count: int) -> list[int]:
    """The first ``count`` of a permutation of more ``clients``, ascending; all the others are not put in order for that.

    >>> drawn(7, 1000, 5) == sorted(rng.permutation(7, 1000)[:5].tolist())
    True
    """
    keys = rng.bits(seed, torch.arange(1), (clients,))[0].numpy()  # a permutation sorts by them, and no two are equal
    first: list[int] = np.argpartition(keys, count)[:count].tolist()
    return sorted(first)


def phases_of(method: Method, ctx: Context) -> tuple[Phase, ...]:
    """What clients go through at this moment: a round's phases, or the last ones."""
    return method.last_phases(ctx) if ctx.ending else method.phases(ctx)


def work_in(task: Task, clients: Sequence[Client], method: Method, ctx: Context) -> int:
    """About how many samples these clients work on."""
    phases = phases_of(method, ctx)
    return sum(work_of(len(task.samples(client, p.data)), p, method.train) for client in clients for p in phases)
