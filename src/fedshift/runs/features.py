"""What deployed models make of some test images, saved with a run (``[evaluate] features``), and t-SNE of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedshift.core.adapter import Adapter
from fedshift.core.tree import Tree
from fedshift.data.streams import Setting
from fedshift.data.task import Samples, Task
from fedshift.engines.base import Compute
from fedshift.engines.reference import predictions
from fedshift.runs.plan import Job
from fedshift.runs.progress import Reporter
from fedshift.runs.session import Session
from fedshift.store.features import PREFERRED, Features, Wanted, positions_of
from fedshift.store.files import Damaged, attempt
from fedshift.store.folder import FEATURES

STORED = Setting("stored")


def stream_of(task: Task) -> str:
    """Where the images come from: the stream ``original``, or else the first one; test images if there is none."""
    return PREFERRED if PREFERRED in task.streams else next(iter(task.streams), "test")


def wanted_by(job: Job) -> Wanted:
    """What an experiment asks for."""
    return Wanted(job.experiment.evaluate.features, stream_of(job.task), job.seed, job.task.hash)


def lacking(job: Job, damaged: list[Damaged]) -> bool:
    """Whether a run should have features and has none, or those of other images, or damaged ones."""
    if not job.experiment.evaluate.features:
        return False
    found = attempt(lambda: Features.load(job.folder.path / FEATURES), damaged)
    return found is None or found.wanted != wanted_by(job)


def save_features(job: Job, session: Session, trees: Mapping[str, Tree], round_: int, say: Reporter) -> None:
    """Save the features of every client that has a deployed model, all or nothing."""
    wanted = wanted_by(job)
    clients = [job.task.client(name) for name in trees]
    plain = {c.name: job.setup.plain[arch] for arch, members in session.by_arch(clients).items() for c in members}
    chosen: dict[str, Tensor] = {}
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for client in clients:
        samples = job.task.samples(client, wanted.stream)
        chosen[client.name] = positions_of(len(samples), wanted.at_most, job.seed, client.name)
        few = replace(samples, index=samples.index[chosen[client.name]])
        if len(few):
            parts.append(outputs(plain[client.name], trees[client.name], few, session.compute))
    widths = sorted({features.shape[1] for features, _, _ in parts})
    if len(widths) != 1:
        why = f"networks give {' and '.join(map(str, widths))} features" if widths else "there are no test images"
        say.note(f"{job.title}: no features are saved, because {why}")
        return
    owners = torch.tensor([number for number, own in enumerate(chosen.values()) for _ in own])
    features, logits, labels = (torch.cat(part) for part in zip(*parts, strict=True))
    answers = logits.argmax(1)
    unseen = tuple(client.name for client in job.task.unseen if client.name in chosen)
    positions = torch.cat(list(chosen.values()))
    names, classes = tuple(chosen), job.task.classes
    made = Features(features, labels, answers, owners, positions, names, unseen, classes, round_, wanted)
    made.save(job.folder.path / FEATURES)


def outputs(
    adapter: Adapter, deployed: Tree, samples: Samples, compute: Compute, setting: Setting = STORED, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Features, logits and labels of all these images (at least one), as an adapter leaves them in the last pass.

    Features are of the layer that all methods have on one network: a stochastic encoder's means come one layer later, and
    what is measured there could not be set beside what is measured of others (``body``).
    """
    state: Tree | None = None
    for number in range(setting.passes):
        shown = list(predictions(adapter, deployed, samples, setting, seed, compute, state, fit=number == 0))
        state = shown[-1][2]
    features = torch.cat([out.aux.get("body", out.features).flatten(1) for out, _, _ in shown]).float().cpu()
    logits = torch.cat([output.logits for output, _, _ in shown]).cpu()
    return features, logits, torch.cat([labels for _, labels, _ in shown]).cpu()
