"""What a plan will take, asked before it is carried out: a file of somebody else may ask for years."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from fedshift.core.arch import Arch
from fedshift.data._room import free_memory, gibibytes
from fedshift.engines.cores import usable_cores
from fedshift.errors import UserError
from fedshift.runs.plan import Job

LONGEST = 7 * 24 * 3600.0  # seconds of work that nobody is asked about
_FLOPS = {"cpu": 5e9, "cuda": 2e12}  # a second, of small networks: of one core, of a GPU. The order of size is meant
_STEP = 2e-4  # seconds that any step takes, however small
_COPIES = 6  # of a network while one client trains it: it, gradients, momenta, messages


@dataclass(frozen=True)
class Estimate:
    """How long, and how much at once; the order of size only."""

    seconds: float
    memory: int


def estimate(jobs: Iterable[Job], device: torch.device) -> Estimate:
    """What the unfinished runs of a plan will take.

    >>> estimate([], torch.device("cpu"))
    Estimate(seconds=0.0, memory=0)
    """
    flops: dict[str, int] = {}
    seconds, memory = 0.0, 0
    speed = _FLOPS[device.type] * (usable_cores() if device.type == "cpu" else 1)
    for job in jobs:
        if job.folder.done:
            continue
        train, clients = job.setup.train, len(job.task.clients)
        epoch = [math.ceil(len(client.train) / train.batch_size) for client in job.task.clients]
        steps = [train.local_steps if train.local_steps is not None else train.local_epochs * n for n in epoch]
        taken = job.rounds * sum(steps) * job.experiment.participation
        for (name, method), digest in zip(job.setup.methods.items(), job.config["networks"].values(), strict=True):
            if str(digest) not in flops:
                flops[str(digest)] = _forward(method.arch)
            cost = flops[str(digest)]
            batch = min(train.batch_size, max(len(client.train) for client in job.task.clients))
            seconds += taken / len(job.setup.methods) * max(_STEP, 3 * cost * batch / speed)
            size = 4 * sum(math.prod(leaf.shape) for leaf in method.arch.init(0).values())
            kept = size * (_COPIES + (clients if job.setup.methods[name].personal else 0))
            memory = max(memory, kept + 8 * max(steps, default=0) * batch)
    return Estimate(seconds, memory)


def _forward(arch: Arch) -> int:
    """FLOPs of one image's way through a network."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        arch(arch.init(0), torch.zeros(1, *arch.input_shape))
    return int(counter.get_total_flops())


def check_size(jobs: Iterable[Job], device: torch.device) -> None:
    """Refuse a plan that takes longer than a week, or more memory than there is, until somebody says that it is meant."""
    found, free = estimate(jobs, device), free_memory()
    if found.seconds > LONGEST:
        raise UserError(f"this takes about {_time(found.seconds)} on this machine; add --yes if it is meant")
    if free is not None and found.memory > free:
        raise UserError(
            f"this needs about {gibibytes(found.memory)} of memory, and {gibibytes(free)} are free; add --yes to try it"
        )


def _time(seconds: float) -> str:
    """
    >>> _time(3e6), _time(4e12)
    ('35 days', '126,752 years')
    """
    days = seconds / 86400
    return f"{days:,.0f} days" if days < 730 else f"{days / 365.25:,.0f} years"
