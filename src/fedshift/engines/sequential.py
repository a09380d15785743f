"""The reference engine: a loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedshift.core.adapter import Adapter
from fedshift.core.method import Method
from fedshift.core.tree import Tree
from fedshift.data.task import Task
from fedshift.engines.base import Compute, Reply, Score
from fedshift.engines.reference import Placement, evaluate, work
from fedshift.engines.schedule import Plan


@dataclass(frozen=True)
class Sequential:
    """One client after the other, on one device."""

    compute: Compute = field(default_factory=Compute)
    placement: Placement | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Images are moved to the device once."""
        if self.placement is None:
            object.__setattr__(self, "placement", Placement(self.compute.device))

    def _placed(self, task: Task) -> Task:
        assert self.placement is not None
        return self.placement(task)

    def train(
        self, method: Method, downs: Mapping[str, Tree], locals: Mapping[str, Tree], task: Task, plan: Plan
    ) -> dict[str, Reply]:
        """The local work of every client in ``downs``."""
        task = self._placed(task)
        return {
            name: work(method, down, locals.get(name, {}), task.client(name), task, plan, self.compute)
            for name, down in downs.items()
        }

    def evaluate(
        self, adapter: Adapter, deployed: Mapping[str, Tree], task: Task, parts: Sequence[str], seed: int
    ) -> dict[tuple[str, str], Score]:
        """Scores by (client, part) for every deployed client and every stream or split named."""
        task = self._placed(task)
        scores: dict[tuple[str, str], Score] = {}
        for name, tree in deployed.items():
            scores |= evaluate(adapter, tree, task, task.client(name), parts, seed, self.compute)
        return scores

    def close(self) -> None:
        """Nothing is held."""
