"""Several federations of one method on the same images as one: their clients side by side in one stack.

Five clients leave most of a GPU idle; three seeds of them cost little more than one. Every client keeps the batches, the
draws and the messages of its own federation, so that nothing but the last bits of the arithmetic differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fedshift.core.method import Method
from fedshift.core.tree import Tree
from fedshift.data.task import Task
from fedshift.engines.base import Engine, Reply
from fedshift.engines.schedule import Plan


@dataclass(frozen=True)
class Errand:
    """The local work of one federation's round."""

    downs: Mapping[str, Tree]
    locals: Mapping[str, Tree]
    plan: Plan


@dataclass(frozen=True)
class JointPlan(Plan):
    """A plan whose clients belong to runs of different seeds: ``"2/berlin"`` is client berlin of the third run."""

    seeds: tuple[int, ...] = ()

    def seed_for(self, client: str, *purpose: object) -> int:
        """The seed this client has in its own run."""
        number, _, name = client.partition("/")
        return Plan(self.phases, self.ctx, self.seeds[int(number)]).seed_for(name, *purpose)


class Together:
    """Trains the clients of several tasks that share their images in one call of an engine."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        clients = tuple(
            replace(client, name=f"{number}/{client.name}")
            for number, task in enumerate(tasks)
            for client in task.clients
        )
        self._task = replace(tasks[0], clients=clients, unseen=(), streams={}, hash="")

    def train(self, engine: Engine, method: Method, errands: Sequence[Errand]) -> list[dict[str, Reply]]:
        """Every federation's replies."""
        downs = {f"{i}/{name}": down for i, errand in enumerate(errands) for name, down in errand.downs.items()}
        locals = {f"{i}/{name}": local for i, errand in enumerate(errands) for name, local in errand.locals.items()}
        first = errands[0].plan
        plan = JointPlan(first.phases, first.ctx, first.seed, tuple(errand.plan.seed for errand in errands))
        replies = engine.train(method, downs, locals, self._task, plan)
        return [{name: replies[f"{i}/{name}"] for name in errand.downs} for i, errand in enumerate(errands)]


def share_images(tasks: Sequence[Task]) -> bool:
    """Whether tasks differ only in who owns which of the same images.

    >>> from fedshift.experiment.schema import Experiment
    >>> from fedshift.runs.setup import make_task
    >>> share_images([make_task(Experiment(), seed) for seed in (0, 1)])
    True
    """
    first = tasks[0]
    return all(
        task.public is None
        and task.classes == first.classes
        and torch.equal(task.labels, first.labels)
        and torch.equal(task.ids, first.ids)
        and (task.images is first.images or torch.equal(task.images, first.images))
        for task in tasks
    )
