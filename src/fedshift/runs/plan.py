"""One training of an experiment: a method of one variant under one seed, and where it lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from fedshift.data.task import Task
from fedshift.engines.base import Compute, Engine
from fedshift.experiment.schema import Experiment
from fedshift.runs.progress import Reporter
from fedshift.runs.session import Federation
from fedshift.runs.setup import Setup
from fedshift.store.folder import RunFolder


@dataclass(frozen=True)
class Job:
    """One training: a method of one variant of the experiment under one seed."""

    experiment: Experiment
    point: Mapping[str, Any]  # of the sweep
    setup: Setup
    task: Task
    seed: int
    folder: RunFolder
    config: Mapping[str, Any]

    @property
    def rounds(self) -> int:
        """The experiment's rounds and those a method adds to them."""
        return self.experiment.rounds + (self.setup.method.extra_rounds if self.experiment.rounds else 0)

    @property
    def chosen_from(self) -> int:
        """The first round whose state validation may choose: before a method's own rounds its models are half-trained."""
        return int(self.config.get("chosen-from", 0))

    @property
    def title(self) -> str:
        """What people call it."""
        return f"{self.setup.spec.title} seed {self.seed}"

    @property
    def model(self) -> str:
        """Whose model is scored: everybody's, or each client's own."""
        return "personal" if self.setup.method.personal else "global"

    def federation(self, engine: Engine, compute: Compute, say: Reporter) -> Federation:
        """The federation that trains it."""
        variant, note = (
            self.experiment,
            cache(lambda text: say.note(f"{self.title}: {text}")),
        )  # each thing is said once
        return Federation(
            self.setup, self.task, engine, compute, self.seed, variant.rounds, variant.participation, note
        )
