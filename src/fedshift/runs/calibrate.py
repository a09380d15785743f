"""How far the models of a round can be believed, measured by the training clients on their validation images.

What a client sends are sums over its images (``blocks/calibration.py``): ten small messages, which a server adds up.
Adapters that ask for it (``calibrated``) find the result in the slot ``calibration``, also at unseen clients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedshift.blocks import calibration as measured
from fedshift.blocks.calibration import Calibration, Kind, calibrated_log, confusion_of, entry_name, looks_refreshed
from fedshift.blocks.class_prior import estimate_errors
from fedshift.blocks.mean_views import looks
from fedshift.blocks.refreshed_statistics import Refreshing
from fedshift.core.tree import Tensors, Tree
from fedshift.data.task import Client, Task
from fedshift.experiment.schema import AdapterSpec
from fedshift.runs.deployment import Deployment
from fedshift.runs.session import Session
from fedshift.store.metric import VALIDATION


class Answers(NamedTuple):
    """A client's predictions of its validation images."""

    logits: Tensor
    labels: Tensor


class Measured(NamedTuple):
    """What came of it, and the bytes that every client sent for it."""

    calibration: Calibration
    bytes_each: int


def calibrated(session: Session, deployment: Deployment, specs: Sequence[AdapterSpec]) -> Deployment:
    """A deployment with what these adapters want to know; itself if they want nothing."""
    method = session.setup.method
    made = [(spec, session.setup.adapter(spec, method)) for spec in specs]
    wanted = {looks(adapter): _looking(spec) for spec, adapter in made if adapter.calibrated}
    beside = {looks_refreshed(a): _refreshing(spec, a) for spec, a in made if isinstance(a, Refreshing) and a.refreshes}
    found: Tensors = {}
    size = 0
    for kind, trees in _models(session, deployment) if wanted else ():
        for word, spec in (wanted | beside if kind == "common" else wanted).items():
            scores = session.evaluate(session.setup.adapters(spec), trees, [VALIDATION])
            sound = [score for score in scores.values() if score.samples and not score.broken]
            answers = [Answers(score.log_probabilities.clamp(min=-100.0), score.labels) for score in sound]
            calibration, each = measure(answers, method.arch.classes)
            found |= {entry_name(kind, word, name): leaf for name, leaf in calibration.tensors().items()}
            size += len(answers) * each
    device = session.compute.device
    return deployment.with_calibration({n: leaf.to(device) for n, leaf in found.items()}, size) if found else deployment


def measure(clients: Sequence[Answers], classes: int) -> Measured:
    """What all clients together find; every ``sum`` here is over messages."""
    plain = Calibration.none(classes)
    if not clients:
        return Measured(plain, 0)
    fit = measured.first_guess(classes)
    for _ in range(measured.STEPS):
        sums = sum_of([measured.newton_sums(*client, fit) for client in clients])
        fit = measured.newton_step(sums, fit)
    labels = sum_of([torch.bincount(client.labels, minlength=classes).double() for client in clients])
    confusion = sum_of([confusion_of(calibrated_log(client.logits, fit), client.labels) for client in clients])
    fitted = Calibration(fit, labels, confusion, plain.skill)
    skill = sum_of([estimate_errors(calibrated_log(c.logits, fit), c.labels, fitted) for c in clients])
    numbers = measured.STEPS * (classes + 1) * (classes + 2) + classes + classes**2 + len(skill)
    return Measured(replace(fitted, skill=skill), 4 * numbers)


def sum_of(messages: Sequence[Tensor]) -> Tensor:
    """All that a server looks at."""
    return torch.stack(list(messages)).sum(0)


def _looking(spec: AdapterSpec) -> AdapterSpec:
    """Predict as this adapter looks at images, and adapt nothing."""
    options = {name: value for name, value in spec.options().items() if name in ("views", "flip")}
    return AdapterSpec(name="none", **options)


def _refreshing(spec: AdapterSpec, adapter: Refreshing) -> AdapterSpec:
    """The same with refreshed statistics."""
    how: dict[str, Any] = {"passes": adapter.passes, "batch-size": adapter.batch_size}
    return AdapterSpec(**{**_looking(spec).model_dump(by_alias=True), "name": "fedbn-align", **how})


def _models(session: Session, deployment: Deployment) -> Iterator[tuple[Kind, Mapping[str, Tree]]]:
    """Whose answers: an unseen client's, for whom training clients stand; and their own, where they differ."""
    trained = deployment.trained()
    if not session.setup.method.personal:
        yield "common", trained
        return
    if stand_ins := session.unseen(deployment, as_unseen(session.task, validation=True)):
        yield "common", stand_ins
    yield "own", trained


def as_unseen(task: Task, validation: bool = False) -> Task:
    """Training clients in the place of unseen ones: with their test images, or those of validation."""
    nothing = torch.zeros(0, dtype=torch.int64)
    unseen = tuple(
        Client(client.name, nothing, nothing, client.val if validation else client.test) for client in task.clients
    )
    return replace(task, clients=(), unseen=unseen)
