"""Measures of predictions, computed from every sample. All but the loss are shares: 0 to 1.

A class that no sample belongs to has no recall, and none that all belong to has an area under a curve: such classes are
left out of means. Where nothing is left, or a prediction is no number, the answer is None.
"""

from __future__ import annotations

from collections.abc import Callable

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
    from scipy.stats import rankdata  # takes seconds to import, and few who import this file need it

    scores, members = _against_rest(predictions)
    positives, negatives = members.sum(0), (~members).sum(0)
    ranks = rankdata(scores, axis=0)
    above = (ranks * members).sum(0) - positives * (positives + 1) / 2
    return divided(above, positives * negatives)


def auprc(predictions: Predictions) -> float | None:
    """Average precision, each class against the rest, the mean over classes that some samples belong to.

    >>> round(auprc(Predictions(np.log([[0.9, 0.1], [0.3, 0.7], [0.4, 0.6]]), np.array([0, 1, 1]))), 3)
    1.0
    """
    return _mean(auprc_by_class(predictions))


def auprc_by_class(predictions: Predictions) -> Floats:
    """The sum over thresholds of precision times gained recall; NaN for a class without samples."""
    scores, members = _against_rest(predictions)
    if not len(scores):
        return np.full(predictions.classes, np.nan)
    order = np.argsort(-scores, axis=0, kind="stable")
    scores, members = np.take_along_axis(scores, order, 0), np.take_along_axis(members, order, 0)
    found = members.cumsum(0)
    # only where the next score differs is there a threshold; what was found since the last one is gained there
    threshold = np.concatenate([scores[1:] != scores[:-1], np.ones((1, scores.shape[1]), bool)])
    precision = found / np.arange(1, len(scores) + 1)[:, None]
    at = np.where(threshold, found, 0)
    before = np.concatenate([np.zeros((1, scores.shape[1]), int), np.maximum.accumulate(at)[:-1]])
    return divided((precision * (found - before) * threshold).sum(0), members.sum(0))


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
    if predictions.broken:
        predictions = predictions.take(np.zeros(0, int))
    members = predictions.labels[:, None] == np.arange(predictions.classes)
    return predictions.log_probabilities, members


def divided(numbers: Floats | Integers, by: Integers) -> Floats:
    """The ratio; NaN where there is nothing to divide by."""
    ratio: Floats = np.divide(numbers, by, out=np.full(len(by), np.nan), where=by > 0)
    return ratio


def _mean(values: Floats) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None
