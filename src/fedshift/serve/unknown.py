"""Images unlike anything a model was trained on: two scores, and a threshold with a stated rate of false alarms."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from torch import Tensor

from fedshift.runs.known import Known


class Strangeness(NamedTuple):
    """How strange some images are, an entry for each."""

    energy: np.ndarray  # of the logits: high where no class has evidence
    distance: np.ndarray  # from the nearest class mean, in standard deviations
    rarity: np.ndarray  # the share of known images that are at least as strange, at most
    unknown: np.ndarray  # bool
    signals: np.ndarray  # [n, few]: the distance, and places along the directions in which features vary most


@dataclass(frozen=True, eq=False)
class Familiarity:
    """Scores of images, compared with those of validation images.

    An image is as strange as the larger of its two scores, each in standard deviations of the validation images' own. Its
    ``rarity`` is ``(1 + how many validation images are as strange) / (n + 1)``, and it is unknown if that is at most
    ``rate``. For an image like those of validation this happens with a probability of at most ``rate``, whatever the
    scores' distribution: they need only be exchangeable. With few validation images the rate is what they can tell.
    """

    known: Known
    asked: float = 0.01

    @property
    def rate(self) -> float:
        """The rate of false alarms: what was asked for, or the least that so few images can state."""
        return max(self.asked, 1 / (len(self.known.energy) + 1))

    def of(self, energy: np.ndarray, features: Tensor) -> Strangeness:
        """Of the frozen model's energies and features of some images; on the CPU."""
        distance = self.known.distances(features).numpy()
        signals = np.concatenate([distance[:, None], self.known.placed(features).numpy()], axis=1)
        rarity = self._rarity(energy, distance)
        return Strangeness(energy, distance, rarity, rarity <= self.rate, signals)

    def _rarity(self, energy: np.ndarray, distance: np.ndarray) -> np.ndarray:
        reference = self._reference
        above = len(reference) - np.searchsorted(reference, self._combined(energy, distance), side="left")
        return (1 + above) / (len(reference) + 1)

    @cached_property
    def _scales(self) -> tuple[tuple[float, float], tuple[float, float]]:
        def scale(scores: Tensor) -> tuple[float, float]:
            return float(scores.double().mean()), max(float(scores.double().std()), 1e-6)

        return scale(self.known.energy), scale(self.known.distance)

    @cached_property
    def _reference(self) -> np.ndarray:
        return np.sort(self._combined(self.known.energy.numpy(), self.known.distance.numpy()))

    def _combined(self, energy: np.ndarray, distance: np.ndarray) -> np.ndarray:
        (low, wide), (near, far) = self._scales
        both = np.maximum((energy.astype(np.float64) - low) / wide, (distance.astype(np.float64) - near) / far)
        return np.where(np.isfinite(both), both, np.inf)


def nothing_known(count: int) -> Strangeness:
    """Where there is nothing to compare with."""
    empty = np.full(count, np.nan)
    return Strangeness(empty, empty, empty, np.zeros(count, dtype=bool), np.zeros((count, 0)))


def on_cpu(leaf: Tensor) -> Tensor:
    """A tensor for numpy."""
    return leaf.detach().cpu()
