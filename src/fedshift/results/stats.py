"""Whether a difference is more than noise: the only place that says so."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fedshift.errors import UserError
from fedshift.store.summary import mean_and_std

Numbers: TypeAlias = npt.NDArray[Any]
LEVEL = 95  # percent of resampled differences that the interval holds


@dataclass(frozen=True)
class Difference:
    """A mean difference, and where it lies in most resamples of clients and seeds."""

    mean: float
    low: float
    high: float
    noise: bool  # whether it could as well be none


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean, over clients (or seeds); of fewer than two nobody knows it.

    >>> standard_error([60.0, 80.0]), standard_error([60.0])
    (10.0, None)
    """
    return mean_and_std(values)[1] / math.sqrt(len(values)) if len(values) > 1 else None


def paired_difference(
    a: Sequence[Mapping[str, float]], b: Sequence[Mapping[str, float]], *, seed: int, samples: int = 2000
) -> Difference:
    """The client mean of ``a`` less that of ``b``, with a paired bootstrap over clients and seeds.

    Both have, for each seed in the same order, a number for each client (:meth:`fedshift.results.result.Row.accuracies`).
    Clients and seeds are drawn anew independently of each other, because a client is of the same kind under every seed. It
    is noise if the middle 95 % of the differences have zero among them, or if there is but one client and one seed. A
    single seed says nothing about how seeds differ, so that its interval is too narrow.

    >>> better, worse = [{"a": 70.0, "b": 81.0}, {"a": 71.0, "b": 80.0}], [{"a": 60.0, "b": 70.0}, {"a": 60.0, "b": 71.0}]
    >>> paired_difference(better, worse, seed=0)
    Difference(mean=10.25, low=9.0, high=11.0, noise=False)
    >>> paired_difference(better, better[::-1], seed=0).noise
    True
    """
    gaps = _gaps(a, b)
    seeds, clients = gaps.shape
    draws = np.random.default_rng(seed)
    # how often each is drawn
    of_seeds = draws.multinomial(seeds, np.full(seeds, 1 / seeds), size=samples)
    of_clients = draws.multinomial(clients, np.full(clients, 1 / clients), size=samples)
    means = _means(gaps, of_seeds, of_clients)
    low, high = np.nanpercentile(means, [(100 - LEVEL) / 2, (100 + LEVEL) / 2])
    (mean,) = _means(gaps, np.ones((1, seeds)), np.ones((1, clients)))
    several = int((~np.isnan(gaps)).sum()) > 1
    return Difference(float(mean), float(low), float(high), noise=not several or bool(low <= 0 <= high))


def _gaps(a: Sequence[Mapping[str, float]], b: Sequence[Mapping[str, float]]) -> Numbers:
    """Differences [seeds, clients]; NaN where a seed does not have a client."""
    if len(a) != len(b) or any(one.keys() != other.keys() for one, other in zip(a, b, strict=True)):
        raise UserError("only results of the same seeds and clients can be compared in pairs")
    if not all(a) or not a:
        raise UserError("there are no clients to compare")
    names = list(dict.fromkeys(name for own in a for name in own))
    return np.array([[x[n] - y[n] if n in x else np.nan for n in names] for x, y in zip(a, b, strict=True)])


def _means(gaps: Numbers, of_seeds: Numbers, of_clients: Numbers) -> Numbers:
    """Means over clients, then over seeds, with so many of each [draws, ...]; NaN where nobody was drawn."""
    present = ~np.isnan(gaps)
    weight = of_clients @ present.T.astype(float)  # [draws, seeds]: a seed need not have every client
    sums = of_clients @ np.nan_to_num(gaps).T
    whole = np.where(weight > 0, of_seeds, 0).sum(1)
    by_seed = np.divide(sums, weight, out=np.zeros_like(sums), where=weight > 0)
    means: Numbers = np.divide((of_seeds * by_seed).sum(1), whole, out=np.full(len(whole), np.nan), where=whole > 0)
    return means
