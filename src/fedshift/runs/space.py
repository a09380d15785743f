"""What runs will take of a disk, estimated before anything is trained: better refused now than full after hours."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fedshift.core import rng
from fedshift.core.context import Context
from fedshift.core.tree import Tree
from fedshift.engines.reference import info_of
from fedshift.errors import HostError
from fedshift.runs.plan import Job
from fedshift.runs.write_artefacts import wanted

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

LINE = 400  # bytes of metrics.jsonl
UNITS = ("bytes", "kB", "MB", "GB", "TB")


@dataclass(frozen=True)
class Space:
    """Bytes that a run takes."""

    largest: int  # file: its state
    whole: int


def needed(job: Job) -> Space:
    """What a run will take: states, what unseen clients need, artefacts, lines; scores are small beside them.

    A checkpoint is replaced by a new one that is written beside it, so there is a moment with both.
    """
    server, local = _state(job)
    state = server + local
    choosers = 1 + len(job.setup.spec.validated(job.experiment.evaluate))
    lines = LINE * job.rounds * (1 + len(job.task.streams) * job.experiment.evaluate.oracle)
    return Space(state, (2 + choosers) * state + choosers * server + _artefacts(job) + lines)


def check_space(jobs: Sequence[Job], out: Path) -> None:
    """Refuse runs for which there is no room, in one sentence with the numbers."""
    untrained = [job for job in jobs if not job.folder.done]
    spaces = [needed(job) for job in untrained]
    if not spaces:
        return
    wanted = sum(space.whole for space in spaces) - sum(_there(job.folder.path) for job in untrained)
    free = shutil.disk_usage(next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())).free
    if wanted > free:
        raise HostError(
            f"these runs need about {in_words(wanted)}, and {out} has {in_words(free)} left: make room, or choose another "
            "folder with --out"
        )
    largest, most = max(space.largest for space in spaces), _most_of_a_file()
    if most is not None and largest > most:
        raise HostError(
            f"the largest file of these runs needs about {in_words(largest)}, and no file may have more than "
            f"{in_words(most)} here: raise ulimit -f"
        )


def in_words(count: float) -> str:
    """Bytes as people say them.

    >>> in_words(12), in_words(3_400_000), in_words(25e9)
    ('12 bytes', '3.4 MB', '25 GB')
    """
    power = 0
    while count >= 1000 and power < len(UNITS) - 1:
        count, power = count / 1000, power + 1
    return f"{count:.{1 if power and count < 10 else 0}f} {UNITS[power]}"


def _state(job: Job) -> tuple[int, int]:
    """Bytes of the server's state and of all clients' local states before the first round."""
    method, training = job.setup.method, job.setup.method.prepare_task(job.task)
    initial = {name: own.arch.init(rng.seed_of(job.seed, "init")) for name, own in job.setup.methods.items()}
    public = torch.zeros(0, dtype=torch.int64) if training.public is None else training.ids[training.public]
    server = method.init_server(initial, tuple(client.name for client in training.clients), public)
    ctx = Context(0, job.experiment.rounds, len(training.clients))
    local = 0
    for number, (name, own) in enumerate(job.setup.methods.items()):
        members = training.clients[number :: len(job.setup.methods)]
        if members:
            first = own.init_local(initial[name], info_of(training, members[0], job.seed, unseen=False), ctx)
            local += len(members) * _bytes(first)
    return _bytes(server), local


def _artefacts(job: Job) -> int:
    if not wanted(job):
        return 0
    models = [sum(leaf.nbytes for leaf in method.arch.init(0).values()) for method in job.setup.methods.values()]
    clients = len(job.task.clients) + len(job.task.unseen) if job.setup.method.personal else 1
    return clients * max(models)


def _bytes(tree: Tree) -> int:
    return sum(leaf.nbytes for leaves in tree.values() for leaf in leaves.values())


def _there(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0


def _most_of_a_file() -> int | None:
    if resource is None:
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if limit == resource.RLIM_INFINITY else limit
