"""What every engine is: where work is done, what comes back, how a stream was predicted."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from fedshift.core.adapter import Adapter
from fedshift.core.method import Method
from fedshift.core.tree import Tree
from fedshift.data.task import Task
from fedshift.engines.schedule import Plan

BINS = 20  # of a density


@dataclass(frozen=True)
class Compute:
    """Where and in which precision work is done."""

    device: torch.device = torch.device("cpu")  # noqa: RUF009 (immutable)
    dtype: torch.dtype = torch.float32
    tf32: bool = False  # on a GPU products of float32 may round to TF32, which kernels of our own need


@dataclass(frozen=True)
class Reply:
    """What came of one client's local work."""

    up: Tree
    local: Tree
    loss: float  # mean over the steps of all phases
    steps: int
    finite: bool


@dataclass(frozen=True)
class Density:
    """How numbers in [0, 1], one for each sample, are spread: their sum and the counts of twenty equal bins.

    >>> Density.of(torch.tensor([0.0, 0.5, 1.0])).mean
    0.5
    """

    total: float
    counts: tuple[int, ...]

    @staticmethod
    def of(values: Tensor) -> Density:
        """The density of a stream's values, without those that are not finite."""
        values = values[values.isfinite()]
        bins = (values.clamp(0, 1) * BINS).long().clamp(max=BINS - 1)
        return Density(float(values.double().sum()), tuple(bins.bincount(minlength=BINS).tolist()))

    @property
    def mean(self) -> float:
        """The mean value."""
        return self.total / max(sum(self.counts), 1)

    def __add__(self, other: Density) -> Density:
        return Density(self.total + other.total, tuple(map(operator.add, self.counts, other.counts)))


@dataclass(frozen=True)
class Score:
    """How one client's stream was predicted."""

    samples: int
    correct: int
    loss: float  # summed negative log-likelihood
    telemetry: Mapping[str, Density] = field(default_factory=dict)  # what the adapter tells about itself
    broken: int = 0  # predictions that are not numbers: never right, and their loss is infinite
    # of every sample, in the order of the stream; on the CPU
    log_probabilities: Tensor = field(default_factory=lambda: torch.zeros(0, 0), repr=False, compare=False)
    labels: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64), repr=False, compare=False)

    @property
    def classes(self) -> int:
        """How many classes the predictions know; 0 where there are none."""
        return int(self.log_probabilities.shape[1])

    @property
    def accuracy(self) -> float:
        """The share of right answers."""
        return self.correct / self.samples if self.samples else float("nan")


def sound(logits: Tensor) -> Tensor:
    """Which predictions (the last dimension) are numbers; a class may be impossible (-inf), but not all, and none certain.

    >>> inf, nan = float("inf"), float("nan")
    >>> sound(torch.tensor([[0.0, 1.0], [-inf, 1.0], [nan, 1.0], [inf, 1.0], [-inf, -inf]])).tolist()
    [True, True, False, False, False]
    """
    return logits.amax(-1).isfinite()


class Engine(Protocol):
    """How many clients' local work is executed; all engines give the same results."""

    def train(
        self, method: Method, downs: Mapping[str, Tree], locals: Mapping[str, Tree], task: Task, plan: Plan
    ) -> dict[str, Reply]:
        """The local work of every client in ``downs``."""

    def evaluate(
        self, adapter: Adapter, deployed: Mapping[str, Tree], task: Task, parts: Sequence[str], seed: int
    ) -> dict[tuple[str, str], Score]:
        """Scores by (client, part) for every deployed client and every stream or split named."""

    def close(self) -> None:
        """Let go of processes, graphs and files."""
