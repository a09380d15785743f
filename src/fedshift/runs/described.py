"""Unseen clients whose models are made of the images they are tested on: another model for every stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from fedshift.core.tree import Tree
from fedshift.data.task import Client, Samples, Task
from fedshift.runs.deployment import Deployment, unseen_phases
from fedshift.runs.served import Make
from fedshift.runs.session import Session


def remade_by_stream(session: Session, deployment: Deployment, task: Task) -> dict[str, Make]:
    """How to make the models of a task's unseen clients for each stream that shows others than their test images.

    Empty for methods that look at no image of theirs before they serve. Made when asked for: there may be many.
    """
    methods = deployment.setup.methods.values()
    looks = any(phase.data == "test" for method in methods for phase in unseen_phases(method, deployment.ctx))
    others = [name for name in task.streams if looks and not _is_test_set(task, name)]
    return {name: partial(_made, session, deployment, task, name) for name in others}


def _made(session: Session, deployment: Deployment, task: Task, stream: str) -> Mapping[str, Tree]:
    return session.unseen(deployment, as_shown(task, stream))


def as_shown(task: Task, stream: str) -> Task:
    """The unseen clients and the public images alone, with what a stream shows in the place of test images."""
    nothing = torch.zeros(0, dtype=torch.int64)
    public = Samples(task.images, task.labels, task.ids, nothing if task.public is None else task.public)
    pieces = [public, *(task.samples(client, stream) for client in task.unseen)]
    images, labels, ids = (
        torch.cat([getattr(piece, kind)[piece.index] for piece in pieces]) for kind in ("images", "labels", "ids")
    )
    common, *own = torch.arange(len(images)).split([len(piece) for piece in pieces])
    unseen = tuple(Client(c.name, nothing, nothing, index) for c, index in zip(task.unseen, own, strict=True))
    shown = replace(task, images=images, labels=labels, ids=ids, clients=(), unseen=unseen, streams={})
    return replace(shown, public=None if task.public is None else common)


def _is_test_set(task: Task, stream: str) -> bool:
    """Whether it shows every unseen client its test images, in whatever order."""
    own = task.streams[stream]
    return own.images is None and all(
        torch.equal(own.index[client.name].sort().values, client.test.sort().values) for client in task.unseen
    )
