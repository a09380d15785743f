"""Measures where only counts may travel: a confusion count and 1,000 fixed bins, each answer with its error bound.

Counts of several parties add up, so that a server (or a secure sum) learns nothing about a sample. What follows from a
confusion count is exact. Areas under curves are exact but for the order of samples whose scores share a bin: the bound is
half of what the best and the worst of these orders differ by. Calibration knows confidences to half a bin's width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedshift.measures.exact import BINS as COARSE
from fedshift.measures.predictions import Floats, Integers, Predictions

BINS = 1000


class Bounded(NamedTuple):
    """A number, and how far the exact one can be from it."""

    value: float
    error: float


@dataclass(frozen=True, eq=False)
class Counts:
    """What one party gives of its predictions.

    >>> some = Predictions(np.log([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]]), np.array([0, 1, 1]))
    >>> both = Counts.of(some) + Counts.of(some)
    >>> both.samples, both.auroc()
    (6, Bounded(value=1.0, error=0.0))
    """

    confusion: Integers  # [classes, classes]
    members: Integers  # [classes, bins]: scores of a class's own samples
    others: Integers  # [classes, bins]: of all other samples
    sure: Integers  # [bins, 2]: confidences, all and those of right answers
    loss_sum: float  # nats

    @staticmethod
    def of(predictions: Predictions) -> Counts:
        """Count them; a prediction that is no number is left out."""
        some = predictions.take(predictions.sound)
        classes, probabilities = predictions.classes, some.probabilities
        binned = _bin(probabilities)  # [samples, classes]
        own = some.labels[:, None] == np.arange(classes)
        flat = binned + np.arange(classes) * BINS
        members, others = (
            np.bincount(flat[which], minlength=classes * BINS).reshape(classes, BINS) for which in (own, ~own)
        )
        confusion = np.bincount(some.labels * classes + some.predicted, minlength=classes**2)
        top = _bin(probabilities.max(1, initial=0.0))
        right = top[some.predicted == some.labels]
        sure = np.stack([np.bincount(top, minlength=BINS), np.bincount(right, minlength=BINS)], 1)
        loss = -some.log_probabilities[np.arange(len(some)), some.labels].astype(np.float64).sum()
        return Counts(confusion.reshape(classes, classes), members, others, sure, float(loss))

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.confusion + other.confusion,
            self.members + other.members,
            self.others + other.others,
            self.sure + other.sure,
            self.loss_sum + other.loss_sum,
        )

    @property
    def samples(self) -> int:
        """How many were counted."""
        return int(self.confusion.sum())

    def auroc(self) -> Bounded:
        """Area under the ROC curve, the mean over classes that have both; ties within a bin count half."""
        p, n = self.members.sum(1), self.others.sum(1)
        both = (p > 0) & (n > 0)
        if not both.any():  # one class alone has nothing to be told from
            return Bounded(float("nan"), float("nan"))
        below = np.cumsum(self.others, 1) - self.others
        pairs = (p * n)[both]
        sure = ((self.members * below).sum(1)[both]) / pairs
        tied = ((self.members * self.others).sum(1)[both]) / pairs
        return Bounded(float((sure + tied / 2).mean()), float(tied.mean() / 2))

    def auprc(self) -> Bounded:
        """Average precision: the middle between the best and the worst order of samples that share a bin."""
        some = self.members.sum(1) > 0
        pairs = zip(self.members[some], self.others[some], strict=True)
        ends = np.array([[_average_precision(m, o, best) for best in (True, False)] for m, o in pairs])
        high, low = ends.mean(0)
        return Bounded(float((high + low) / 2), float((high - low) / 2))

    def ece(self) -> Bounded:
        """Calibration in 15 bins, from the middles of 1,000; those across an edge of the 15 may belong to either side."""
        middles = (np.arange(BINS) + 0.5) / BINS
        coarse = np.minimum((middles * COARSE).astype(int), COARSE - 1)
        gaps = np.bincount(coarse, self.sure[:, 0] * middles, COARSE) - np.bincount(coarse, self.sure[:, 1], COARSE)
        edges = np.arange(1, COARSE) / COARSE * BINS
        across = self.sure[np.unique(edges[edges % 1 != 0].astype(int)), 0].sum()
        whole = max(self.samples, 1)
        return Bounded(float(np.abs(gaps).sum() / whole), float(0.5 / BINS + 2 * across / whole))

    def loss(self) -> float:
        """Mean negative log-likelihood: exact, since a sum may travel."""
        return self.loss_sum / max(self.samples, 1)


def _bin(values: Floats) -> Integers:
    binned: Integers = np.clip((values * BINS).astype(np.int64), 0, BINS - 1)
    return binned


def _average_precision(members: Integers, others: Integers, best: bool) -> float:
    """Of one class; within a bin its own samples come first (``best``) or last."""
    hits, misses = members[::-1], others[::-1]  # the highest scores first
    steps = np.stack([hits, misses] if best else [misses, hits], 1).ravel()
    is_hit = np.tile([best, not best], len(hits))
    found = np.cumsum(np.where(is_hit, steps, 0))
    wrong = np.cumsum(np.where(is_hit, 0, steps))
    total, result = int(members.sum()), 0.0
    for k in np.flatnonzero(is_hit & (steps > 0)):
        ranks = np.arange(found[k] - steps[k] + 1, found[k] + 1)
        result += float((ranks / (ranks + wrong[k])).sum())
    return result / total
