"""A party's own data as the federation's experiment wants them: its images, cut into parts as in a simulation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fedshift.core.registry import with_options
from fedshift.data.partition import Partition
from fedshift.data.pool import Pool
from fedshift.data.sources import load
from fedshift.data.task import Splitting, Task, build, task_hash
from fedshift.deploy.federation import Federation, with_public
from fedshift.errors import UserError
from fedshift.experiment.files import source_of
from fedshift.runs.setup import streams_of
from fedshift.store.cache import cache_folder


@dataclass(frozen=True)
class Whole(Partition):
    """All images belong to one client: this party."""

    owner: str = ""

    def assign(self, pool: Pool, seed: int) -> dict[str, Tensor]:
        """Everything."""
        return {self.owner: torch.arange(len(pool))}


def own_task(federation: Federation, name: str, data: Path) -> Task:
    """The task of one party, from its own folder or Parquet file; a sentence if it does not fit the experiment."""
    if name not in federation.names:
        raise UserError(f"the federation has no party {name!r}; it has: {', '.join(federation.names)}")
    spec, experiment = federation.spec, federation.experiment
    columns = {role: column for role, column in experiment.data.columns.items() if role != "client"}
    channels, height, width = spec.shape
    if height != width:
        raise UserError(f"a federation needs square images, not {width}x{height}; set [data] size")
    pool = load(source_of(data), columns or None, height, channels, cache_folder(), window=experiment.data.window)
    settings = {key: value for key, value in experiment.split.items() if key not in ("unseen", "public", "tune")}
    splitting = with_options(Splitting, "[split]", settings)
    seed = spec.seed if experiment.data.seed is None else experiment.data.seed
    streams = streams_of(experiment)
    task = build(relabelled(pool, tuple(spec.classes), data), Whole(name), splitting, streams, seed, cache_folder())
    public = with_public(task, federation.public)
    return public if public is task else replace(public, hash=task_hash(public))


def relabelled(pool: Pool, classes: tuple[str, ...], data: Path) -> Pool:
    """The pool with the federation's class numbers; it need not have all classes, but no others."""
    if strange := [name for name in pool.classes if name not in classes]:
        raise UserError(
            f"{data} has images of {strange[0]!r}, which is no class of the federation: {', '.join(classes)}"
        )
    number = torch.tensor([classes.index(name) for name in pool.classes])
    return replace(pool, labels=number[pool.labels], classes=classes)
