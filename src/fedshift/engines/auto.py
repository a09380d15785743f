"""Which engine to use when nobody says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from fedshift.core.adapter import Adapter
from fedshift.core.method import Method
from fedshift.core.schedule import Plan
from fedshift.core.tree import Tree
from fedshift.data.task import Task
from fedshift.engines.parallel import Parallel, usable_cores
from fedshift.engines.sequential import Sequential
from fedshift.engines.vmapped import Vmapped
from fedshift.engines.work import Compute, Reply, Score
from fedshift.errors import UserError


class Engine(Protocol):
    """How many clients' local work is executed; all engines give the same results."""

    def train(
        self, method: Method, downs: Mapping[str, Tree], mines: Mapping[str, Tree], task: Task, plan: Plan
    ) -> dict[str, Reply]:
        """The local work of every client in ``downs``."""

    def evaluate(
        self, adapter: Adapter, deployed: Mapping[str, Tree], task: Task, parts: Sequence[str], seed: int
    ) -> dict[tuple[str, str], Score]:
        """Scores by (client, part) for every deployed client and every stream or split named."""

    def close(self) -> None:
        """Let go of processes, graphs and files."""


ENGINES = ("auto", "sequential", "parallel", "vmapped")


def engine_for(name: str, compute: Compute, has_convolution: bool, clients: int) -> tuple[str, Engine]:
    """The engine of this name; ``auto`` picks by device and network.

    On a GPU vmapped is far ahead. On a CPU it pays for networks without convolutions only (1.8-4.8 times the loop,
    against 0.35-1.5 times with them), and several processes pay otherwise.

    >>> engine_for("auto", Compute(), has_convolution=False, clients=5)[0]
    'vmapped'
    """
    if name == "auto":
        if compute.device.type != "cpu" or not has_convolution:
            name = "vmapped"
        else:
            name = "parallel" if clients > 1 and usable_cores() > 1 else "sequential"
    makers = {"sequential": Sequential, "parallel": Parallel, "vmapped": Vmapped}
    if name not in makers:
        raise UserError(f"there is no engine {name!r}; there are: {', '.join(ENGINES)}")
    return name, makers[name](compute)


def device_for(name: str) -> torch.device:
    """``auto``, ``cpu`` or ``cuda`` as a device that is really there.

    >>> device_for("cpu")
    device(type='cpu')
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name not in ("cpu", "cuda"):
        raise UserError(f"there is no device {name!r}; there are: auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device cuda was asked for, but this torch sees no GPU; leave --device out to use the CPU")
    return torch.device(name)
