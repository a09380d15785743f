"""Adaptation on a learnt loss, followed step by step: Fig. 2 of FedTTA's paper, for a whole run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedshift.core.registry import ADAPTERS
from fedshift.data.task import Client
from fedshift.engines.base import Compute
from fedshift.engines.reference import pixels
from fedshift.experiment.schema import AdapterSpec
from fedshift.runs.evaluate import adapters_of
from fedshift.runs.open import state_of
from fedshift.runs.plan import Job
from fedshift.runs.session import Session
from fedshift.store.rows import ScoreRow
from fedshift.systems.fedtta.adapter import LearnedAdaptation, curve


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


def learned(scores: Mapping[str, Sequence[ScoreRow]]) -> AdapterSpec | None:
    """The run's plainest adapter that steps on a learnt loss, or None.

    >>> from fedshift.store.metric import Metric
    >>> from fedshift.store.summary import Summary
    >>> row = ScoreRow(Metric("global", "original"), Summary(), adapter="fedtta")
    >>> learned({"one": [row], "none": [replace(row, adapter="none")]}).title
    'one'
    """
    specs = [s for s in adapters_of(scores).values() if issubclass(ADAPTERS[s.name].make, LearnedAdaptation)]
    return min(specs, key=lambda spec: len(spec.options()), default=None)


def follow(
    job: Job, session: Session, clients: Sequence[Client], stream: str, select: str, steps: int, compute: Compute
) -> Curve | None:
    """So many steps of these clients with the run's own adapter, from the state that it is scored with.

    None if the run was scored with no such adapter.
    """
    spec = learned(job.folder.scores())
    if spec is None:
        return None
    state = state_of(job.folder, select, compute.device, spec.title)
    deployment = session.deploy(state)
    trees = {**deployment.trained(), **session.unseen(deployment)}
    adapters = job.setup.adapters(spec, session.context(state.round))
    curves = []
    for arch, members in session.by_arch(clients).items():
        adapter = adapters[arch]
        assert isinstance(adapter, LearnedAdaptation)
        for client in members:
            samples = job.task.samples(client, stream)
            x = pixels(samples.images, samples.index, compute.dtype).to(compute.device)
            labels = samples.labels[samples.index].to(compute.device)
            patient = replace(adapter, steps=steps)
            curves.append(curve(patient, patient.init(trees[client.name]), x, labels))
    means = tuple({key: statistics.fmean(p[key] for p in at) for key in at[0]} for at in zip(*curves, strict=True))
    return Curve(spec.title, state.round, len(clients), means)
