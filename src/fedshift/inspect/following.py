"""Adaptation on a learnt loss, followed step by step: Fig. 2 of FedTTA's paper, for a whole run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedshift.adapters.fedtta import LearnedAdaptation, curve
from fedshift.bench.experiment import AdapterSpec
from fedshift.bench.federation import Federation
from fedshift.bench.job import Job
from fedshift.core.registry import ADAPTERS
from fedshift.engines.work import Compute, pixels
from fedshift.inspect.rebuild import state_of


@dataclass(frozen=True)
class Curve:
    """Learnt loss, entropy and accuracy before adaptation and after every step, means over clients."""

    adapter: str  # whose settings were followed
    round: int  # of the models it started from
    clients: int
    points: tuple[Mapping[str, float], ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers; None where they are not finite."""
        points = [
            {key: value if math.isfinite(value) else None for key, value in point.items()} for point in self.points
        ]
        return {"adapter": self.adapter, "round": self.round, "clients": self.clients, "points": points}


def learned(scores: Mapping[str, Sequence[Mapping[str, Any]]]) -> AdapterSpec | None:
    """The run's plainest adapter that steps on a learnt loss, or None.

    >>> found = learned({"one": [{"adapter": "fedtta", "options": {}}], "none": [{"adapter": "none", "options": {}}]})
    >>> found.title
    'one'
    """
    specs = [
        AdapterSpec(name=rows[0]["adapter"], label=title, **rows[0]["options"])
        for title, rows in scores.items()
        if rows and issubclass(ADAPTERS[rows[0]["adapter"]].make, LearnedAdaptation)
    ]
    return min(specs, key=lambda spec: len(spec.options()), default=None)


def follow(
    job: Job, federation: Federation, select: str, steps: int, stream: str, most: int, compute: Compute
) -> Curve | None:
    """So many steps with the run's own adapter, from the state that it is scored with; None if it has no such adapter.

    At all new clients (at all clients, where there are none), not more than ``most`` of them, spread evenly.
    """
    spec = learned(job.folder.scores())
    if spec is None:
        return None
    state = state_of(job.folder, select, compute.device, spec.title)
    settled = federation.settled(state)
    trees = {**federation.deployed(state, settled), **federation.newcomers(state, settled)}
    adapters = job.setup.adapters(spec, federation.now(state))
    everyone = [client for client in (*job.task.unseen, *job.task.clients) if len(job.task.samples(client, stream))]
    clients = [client for client in everyone if client in job.task.unseen] or everyone
    chosen = clients if len(clients) <= most else [clients[k * len(clients) // most] for k in range(most)]
    curves = []
    for arch, members in federation.by_arch(chosen).items():
        adapter = adapters[arch]
        assert isinstance(adapter, LearnedAdaptation)
        for client in members:
            samples = job.task.samples(client, stream)
            x = pixels(samples.images, samples.index, compute.dtype).to(compute.device)
            labels = samples.labels[samples.index].to(compute.device)
            patient = replace(adapter, steps=steps)
            curves.append(curve(patient, patient.init(trees[client.name]), x, labels))
    means = tuple({key: statistics.fmean(p[key] for p in at) for key in at[0]} for at in zip(*curves, strict=True))
    return Curve(spec.title, state.round, len(chosen), means)
