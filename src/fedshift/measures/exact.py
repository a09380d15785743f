"""Measures of predictions, computed from every sample. All but the loss are shares: 0 to 1.

A class that no sample belongs to has no recall, and none that all belong to has an area under a curve: such classes are
left out of means. Where nothing is left, or a prediction is no number, the answer is None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedshift.measures.predictions import Flags, Floats, Integers, Predictions

BINS = 15  # of calibration


def auroc(predictions: Predictions) -> float | None:
    """Area under the ROC curve, each class against the rest, the mean over classes that have both.

    >>> auroc(Predictions(np.log([[0.9, 0.1], [0.3, 0.7], [0.4, 0.6]]), np.array([0, 1, 0])))
    1.0
    """
    return _mean(auroc_by_class(predictions))


def auroc_by_class(predictions: Predictions) -> Floats:
    """The same of every class; NaN where there is none.

    The share of pairs of one sample of the class and one of the others whose order is right, half of the ties: a
    difference of ranks.
    """
    found = _ranked(predictions)
    positives, samples = found.members.sum(0), len(found.members)
    ranks = samples + 1 - (found.since + 1 + found.until) / 2  # from the last one on; ties have the mean of theirs
    above = (ranks * found.gained).sum(0) - positives * (positives + 1) / 2
    return divided(above, positives * (samples - positives))


def auprc(predictions: Predictions) -> float | None:
    """Average precision, each class against the rest, the mean over classes that some samples belong to.

    >>> round(auprc(Predictions(np.log([[0.9, 0.1], [0.3, 0.7], [0.4, 0.6]]), np.array([0, 1, 1]))), 3)
    1.0
    """
    return _mean(auprc_by_class(predictions))


def auprc_by_class(predictions: Predictions) -> Floats:
    """The sum over thresholds of precision times gained recall; NaN for a class without samples."""
    found = _ranked(predictions)
    precision = found.members.cumsum(0) / found.until
    return divided((precision * found.gained).sum(0), found.members.sum(0))


def sensitivity_at(predictions: Predictions, specificity: float) -> float | None:
    """How many of a class are found where at most ``1 - specificity`` of the others are taken for it; mean over classes.

    >>> some = Predictions(np.log([[0.9, 0.1], [0.3, 0.7], [0.8, 0.2], [0.4, 0.6]]), np.array([0, 1, 0, 0]))
    >>> sensitivity_at(some, 0.9)
    1.0
    """
    scores, members = _against_rest(predictions)
    found = [_sensitivity(own, of, specificity) for own, of in zip(scores.T, members.T, strict=True)]
    return _mean(np.array(found))


def _sensitivity(scores: Floats, members: Flags, specificity: float) -> float:
    others = np.sort(scores[~members])[::-1]
    if not len(others) or not members.any():
        return float("nan")
    allowed = int(np.floor((1 - specificity) * len(others) + 1e-9))  # false alarms
    # a threshold above the first one that is too many lets at most ``allowed`` through
    return float((scores[members] > others[allowed]).mean()) if allowed < len(others) else 1.0


def loss(predictions: Predictions) -> float | None:
    """Mean negative log-likelihood in nats.

    >>> round(loss(Predictions(np.log([[0.5, 0.5]]), np.array([1]))), 4)
    0.6931
    """
    if predictions.broken or not len(predictions):
        return None
    own = predictions.log_probabilities[np.arange(len(predictions)), predictions.labels]
    mean = -float(own.astype(np.float64).mean())
    return mean if np.isfinite(mean) else None


def ece(predictions: Predictions) -> float | None:
    """Expected calibration error: how far, in each of 15 equal bins of confidence, that is from accuracy.

    >>> round(ece(Predictions(np.log([[0.8, 0.2], [0.2, 0.8]]), np.array([0, 0]))), 3)
    0.3
    """
    return _calibration(predictions, _equal_bins)


def adaptive_ece(predictions: Predictions) -> float | None:
    """The same with 15 bins that hold equally many samples."""
    return _calibration(predictions, lambda sure: np.argsort(np.argsort(sure, kind="stable")) * BINS // len(sure))


def reliability(predictions: Predictions) -> list[tuple[float, float, int]]:
    """What :func:`ece` sums up: mean confidence, accuracy and number of samples of each bin that has any.

    >>> bins = reliability(Predictions(np.log([[0.8, 0.2], [0.2, 0.8]]), np.array([0, 0])))
    >>> [(round(sure, 2), right, count) for sure, right, count in bins]
    [(0.8, 0.5, 2)]
    """
    if predictions.broken or not len(predictions):
        return []
    sure, right = _confidence(predictions)
    bins = _equal_bins(sure)
    counts, sums, hits = (np.bincount(bins, weights, BINS) for weights in (None, sure, right))
    return [(float(sums[k] / counts[k]), float(hits[k] / counts[k]), int(counts[k])) for k in np.flatnonzero(counts)]


def _equal_bins(sure: Floats) -> Integers:
    found: Integers = np.clip(np.ceil(sure * BINS).astype(int) - 1, 0, BINS - 1)
    return found


def _confidence(predictions: Predictions) -> tuple[Floats, Flags]:
    """How sure each prediction is, and whether it is right."""
    sure = np.exp(predictions.log_probabilities.max(1).astype(np.float64)).clip(0, 1)
    return sure, predictions.predicted == predictions.labels


def _calibration(predictions: Predictions, binned: Callable[[Floats], Integers]) -> float | None:
    if predictions.broken or not len(predictions):
        return None
    sure, right = _confidence(predictions)
    bins = binned(sure)
    gaps = np.bincount(bins, sure, BINS) - np.bincount(bins, right, BINS)
    return float(np.abs(gaps).sum() / len(predictions))


def _against_rest(predictions: Predictions) -> tuple[Floats, Flags]:
    """Scores [samples, classes] by which each class is ranked, and who belongs to it; none if one is no number."""
    some = _numbers(predictions)
    return some.log_probabilities, some.labels[:, None] == np.arange(some.classes)


def _numbers(predictions: Predictions) -> Predictions:
    return predictions.take(np.zeros(0, int)) if predictions.broken else predictions


class _Ranked(NamedTuple):
    """Samples by the score of each class, highest first [samples, classes]; a threshold is the last of equal scores."""

    members: Flags  # who belongs to the class
    since: Integers  # how many samples the threshold before has
    until: Integers  # how many this one has
    gained: Integers  # members between the two; 0 where there is no threshold


def _ranked(predictions: Predictions) -> _Ranked:
    some = _numbers(predictions)
    scores = np.take_along_axis(some.log_probabilities, some.falling, 0)
    members = some.labels[some.falling] == np.arange(some.classes)
    threshold = np.ones(scores.shape, bool)
    np.not_equal(scores[1:], scores[:-1], out=threshold[:-1])
    places, found = np.arange(1, len(scores) + 1)[:, None], members.cumsum(0)
    since, before = (_before(np.where(threshold, counts, 0)) for counts in (places, found))
    return _Ranked(members, since, places, np.where(threshold, found - before, 0))


def _before(counts: Integers) -> Integers:
    """The largest count above each; 0 in the first line."""
    found: Integers = np.concatenate([np.zeros_like(counts[:1]), np.maximum.accumulate(counts)[:-1]])
    return found


def divided(numbers: Floats | Integers, by: Integers) -> Floats:
    """The ratio; NaN where there is nothing to divide by."""
    ratio: Floats = np.divide(numbers, by, out=np.full(len(by), np.nan), where=by > 0)
    return ratio


def _mean(values: Floats) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None
