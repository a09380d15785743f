"""How sure a measure is: intervals that resample whole groups (patients), because images of one are not independent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedshift.measures.predictions import Integers, Predictions

LEVEL = 95  # percent of resamples that an interval holds


class Interval(NamedTuple):
    """A measure, where it lies in most resamples, and how many samples and groups it is of."""

    value: float | None
    low: float | None
    high: float | None
    samples: int
    groups: int


def interval(
    measure: Callable[[Predictions], float | None],
    predictions: Predictions,
    groups: Integers,
    seed: int = 0,
    draws: int = 1000,
) -> Interval:
    """A measure with the middle 95 % of its values on groups drawn anew, as many as there are.

    Of fewer than two groups nobody knows it.

    >>> some = Predictions(np.log([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.7, 0.3]]), np.array([0, 1, 1, 0]))
    >>> right = lambda p: float((p.predicted == p.labels).mean())
    >>> interval(right, some, np.array([0, 0, 1, 2]), draws=200)
    Interval(value=0.75, low=0.0, high=1.0, samples=4, groups=3)
    """
    value = measure(predictions) if len(predictions) else None
    order = np.argsort(groups, kind="stable")
    _, starts = np.unique(groups[order], return_index=True)
    members = np.split(order, starts[1:]) if len(order) else []
    if value is None or len(members) < 2:
        return Interval(value, None, None, len(predictions), len(members))
    random = np.random.default_rng(seed)
    found = []
    for _ in range(draws):
        drawn = np.concatenate([members[k] for k in random.integers(len(members), size=len(members))])
        again = measure(predictions.take(drawn))
        if again is not None:
            found.append(again)
    if not found:
        return Interval(value, None, None, len(predictions), len(members))
    low, high = np.percentile(found, [(100 - LEVEL) / 2, (100 + LEVEL) / 2])
    return Interval(value, float(low), float(high), len(predictions), len(members))


def by_subgroup(
    measure: Callable[[Predictions], float | None],
    predictions: Predictions,
    values: Sequence[str],
    groups: Integers,
    seed: int = 0,
    draws: int = 1000,
) -> Mapping[str, Interval]:
    """The same for all samples that share a value of a column (scanner, sex, age), in the order of their names.

    >>> some = Predictions(np.log([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]]), np.array([0, 1, 1]))
    >>> right = lambda p: float((p.predicted == p.labels).mean())
    >>> {name: found.value for name, found in by_subgroup(right, some, ["f", "m", "m"], np.arange(3), draws=9).items()}
    {'f': 1.0, 'm': 0.5}
    """
    column = np.array(values, dtype=object)
    return {
        str(name): interval(measure, predictions.take(column == name), groups[column == name], seed, draws)
        for name in sorted(set(values))
    }
