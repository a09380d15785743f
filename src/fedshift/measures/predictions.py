"""Predictions of some samples, and what they were."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.floating[Any]]
Integers: TypeAlias = npt.NDArray[np.integer[Any]]
Flags: TypeAlias = npt.NDArray[np.bool_]
NOTHING = -1  # what a prediction that is no number predicts


@dataclass(frozen=True, eq=False)
class Predictions:
    """Log-probabilities [samples, classes] and the right answers [samples].

    >>> some = Predictions(np.log([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]]), np.array([0, 1, 1]))
    >>> some.predicted.tolist(), some.broken
    ([0, 1, 0], 0)
    """

    log_probabilities: Floats
    labels: Integers

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def classes(self) -> int:
        """How many there are, predicted or not."""
        return int(self.log_probabilities.shape[1])

    @cached_property
    def sound(self) -> Flags:
        """Which of them are numbers."""
        found: Flags = np.isfinite(self.log_probabilities.max(1, initial=-np.inf))
        return found

    @property
    def broken(self) -> int:
        """How many are not."""
        return int((~self.sound).sum())

    @cached_property
    def predicted(self) -> Integers:
        """The likeliest class of each sample; ``NOTHING`` where the prediction is no number."""
        return np.where(self.sound, self.log_probabilities.argmax(1), NOTHING)

    @cached_property
    def probabilities(self) -> Floats:
        """Of every class, in double precision."""
        found: Floats = np.exp(self.log_probabilities.astype(np.float64))
        return found

    @cached_property
    def falling(self) -> Integers:
        """Of every class [samples, classes], the samples from the likeliest to the least likely; ties in any order."""
        likeliest: Integers = np.ascontiguousarray(np.argsort(np.ascontiguousarray(-self.log_probabilities.T)).T)
        return likeliest

    def take(self, index: Integers | Flags) -> Predictions:
        """Only these samples."""
        return Predictions(self.log_probabilities[index], self.labels[index])
