"""Whether a difference is more than noise: the only place that says so."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fedshift.errors import UserError
from fedshift.store.summary import mean_and_std

Numbers: TypeAlias = npt.NDArray[Any]
Values: TypeAlias = Sequence[Mapping[str, float]]  # for each seed, by client
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


def paired_difference(a: Values, b: Values, *, seed: int, samples: int = 2000) -> Difference:
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
    (found,) = paired_differences(a, [b], seed=seed, samples=samples)
    return found


def paired_differences(a: Values, others: Sequence[Values], *, seed: int, samples: int = 2000) -> list[Difference]:
    """:func:`paired_difference` of ``a`` and each of several others, which share the draws: far quicker than one by one.

    >>> best, one = [{"a": 70.0, "b": 81.0}], [{"a": 60.0, "b": 70.0}]
    >>> [found.noise for found in paired_differences(best, [one, best], seed=0)]
    [False, True]
    """
    if not others:
        return []
    gaps = np.stack([_gaps(a, other) for other in others])  # [others, seeds, clients]
    _, seeds, clients = gaps.shape
    of_seeds, of_clients = _draws(seed, seeds, clients, samples)
    low, high = _percentiles(_means(gaps, of_seeds, of_clients))
    (mean,) = _means(gaps, np.ones((1, seeds)), np.ones((1, clients)))
    several = int((~np.isnan(gaps[0])).sum()) > 1
    return [
        Difference(float(m), float(lo), float(hi), noise=not several or bool(lo <= 0 <= hi))
        for m, lo, hi in zip(mean, low, high, strict=True)
    ]


def single(values: Values) -> bool:
    """Whether this is one client under one seed, of which nobody knows how it would be with another.

    >>> single([{"a": 1.0}]), single([{"a": 1.0, "b": 2.0}]), single([{"a": 1.0}, {"a": 2.0}])
    (True, False, False)
    """
    return sum(map(len, values)) == 1


def comparable(a: Values, b: Values) -> bool:
    """Whether both have the same clients under as many seeds, so that they can be compared in pairs.

    >>> comparable([{"a": 1.0}], [{"a": 2.0}]), comparable([{"a": 1.0}], [{"b": 2.0}]), comparable([], [])
    (True, False, False)
    """
    same = len(a) == len(b) and all(one.keys() == other.keys() for one, other in zip(a, b, strict=True))
    return same and bool(a) and all(a)


@lru_cache(maxsize=4)
def _draws(seed: int, seeds: int, clients: int, samples: int) -> tuple[Numbers, Numbers]:
    """How often each seed and each client is drawn: [samples, seeds] and [samples, clients]."""
    draws = np.random.default_rng(seed)
    of_seeds = draws.multinomial(seeds, np.full(seeds, 1 / seeds), size=samples)
    return of_seeds, draws.multinomial(clients, np.full(clients, 1 / clients), size=samples)


def _percentiles(means: Numbers) -> Numbers:
    """Both ends of the interval [2, others]."""
    ends = [(100 - LEVEL) / 2, (100 + LEVEL) / 2]
    sure = not np.isnan(means).any()
    found: Numbers = np.percentile(means, ends, axis=0) if sure else np.nanpercentile(means, ends, axis=0)
    return found


def _gaps(a: Values, b: Values) -> Numbers:
    """Differences [seeds, clients]; NaN where a seed does not have a client."""
    if len(a) != len(b) or any(one.keys() != other.keys() for one, other in zip(a, b, strict=True)):
        raise UserError("only results of the same seeds and clients can be compared in pairs")
    if not all(a) or not a:
        raise UserError("there are no clients to compare")
    names = list(dict.fromkeys(name for own in a for name in own))
    return np.array([[x[n] - y[n] if n in x else np.nan for n in names] for x, y in zip(a, b, strict=True)])


def _means(gaps: Numbers, of_seeds: Numbers, of_clients: Numbers) -> Numbers:
    """Means [draws, others] over clients, then over seeds, with so many of each [draws, ...]; NaN where nobody was drawn.

    Who is missing under which seed is the same for all others.
    """
    others, seeds, clients = gaps.shape
    present = ~np.isnan(gaps[0])
    weight = of_clients @ present.T.astype(float)  # [draws, seeds]: a seed need not have every client
    sums = (of_clients @ np.nan_to_num(gaps).reshape(-1, clients).T).reshape(-1, others, seeds)
    seen = np.where(weight > 0, of_seeds, 0)
    by_seed = np.divide(sums, weight[:, None], out=np.zeros_like(sums), where=weight[:, None] > 0)
    whole = np.broadcast_to(seen.sum(1)[:, None], sums.shape[:2])
    total = (of_seeds[:, None] * by_seed).sum(2)
    means: Numbers = np.divide(total, whole, out=np.full(whole.shape, np.nan), where=whole > 0)
    return means
