"""Proxy A-distance: how well a linear classifier tells from the features of an image whose image it is.

Two sets of features, balanced by sub-sampling, are labelled 0 and 1; a linear SVM (C = 1, standardised features) is trained
on one half and makes errors on the other half at a rate e. PAD = 2 (1 - 2 e) lies in [-2, 2]: about 0 if the sets cannot
be told apart, 2 if a plane separates them.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedshift.core import rng


class Halves(NamedTuple):
    """Rows of features: those an SVM is trained on, and those it is tested on."""

    train: Tensor
    test: Tensor


@dataclass(frozen=True)
class Distances:
    """PAD between clients; None where somebody has fewer than two images."""

    clients: tuple[str, ...]
    pairs: tuple[tuple[float | None, ...], ...]  # symmetric, zero on its diagonal
    union: Mapping[str, float | None]  # every client against all clients' images together
    mean: float | None  # over pairs of clients that trained
    mean_union: float | None  # over clients that trained

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers."""
        rows = {name: list(row) for name, row in zip(self.clients, self.pairs, strict=True)}
        return {"pairs": rows, "union": dict(self.union), "mean": self.mean, "mean-union": self.mean_union}


def halved(features: Tensor, seed: int = 0) -> Halves:
    """Rows in two halves, at random; sets of one size are divided alike, so that a set is not far from itself.

    >>> [len(half) for half in halved(torch.zeros(5, 2))]
    [2, 3]
    """
    order = rng.permutation(rng.seed_of(seed, "pad", "halves"), len(features))
    middle = len(features) // 2
    return Halves(features[order[:middle]], features[order[middle:]])


def proxy_distance(one: Halves, other: Halves, seed: int = 0) -> float | None:
    """PAD of two sets, the same in either order; None if a half of either is empty.

    >>> left, right = halved(torch.zeros(8, 1)), halved(torch.ones(8, 1))
    >>> proxy_distance(left, right), proxy_distance(left, left)
    (2.0, 0.0)
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import LinearSVC

    first, second = sorted(
        (one, other), key=lambda halves: halves.train.numpy().tobytes()
    )  # any order, but always the same
    (x, y), (seen, truth) = (_labelled(*pair, seed) for pair in zip(first, second, strict=True))
    if not len(y) or not len(truth):
        return None
    scaler = StandardScaler().fit(x)
    svm = LinearSVC(C=1.0, dual="auto", random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        svm.fit(scaler.transform(x), y)
    wrong = float((svm.predict(scaler.transform(seen)) != truth).mean())
    return 2 * (1 - 2 * wrong)


def distances(features: Mapping[str, Tensor], trained: Collection[str], seed: int = 0) -> Distances:
    """PAD between all clients, and of each against the union of those that ``trained``.

    The halves of the union are the unions of halves: no image is in one half as a client's and in the other as everybody's.

    >>> found = distances({"a": torch.zeros(8, 1), "b": torch.ones(8, 1)}, trained=["a", "b"])
    >>> found.pairs, found.mean
    (((0.0, 2.0), (2.0, 0.0)), 2.0)
    """
    halves = {name: halved(rows, seed) for name, rows in features.items()}
    names = tuple(halves)
    every = Halves(
        *(torch.cat(part) for part in zip(*(halves[name] for name in names if name in trained), strict=True))
    )
    known: dict[frozenset[str], float | None] = {
        frozenset({a, b}): proxy_distance(halves[a], halves[b], seed)
        for number, a in enumerate(names)
        for b in names[number + 1 :]
    }
    pairs = tuple(tuple(0.0 if a == b else known[frozenset({a, b})] for b in names) for a in names)
    union = {name: proxy_distance(own, every, seed) for name, own in halves.items()}
    return Distances(
        names,
        pairs,
        union,
        _mean(value for pair, value in known.items() if pair <= set(trained)),
        _mean(value for name, value in union.items() if name in trained),
    )


def _labelled(one: Tensor, other: Tensor, seed: int) -> tuple[Any, Any]:
    """As many rows of one as of the other, and whose they are."""
    count = min(len(one), len(other))
    few = [_few(rows, count, seed) for rows in (one, other)]
    return torch.cat(few).double().numpy(), torch.arange(2).repeat_interleave(count).numpy()


def _few(rows: Tensor, count: int, seed: int) -> Tensor:
    if len(rows) == count:
        return rows
    return rows[rng.permutation(rng.seed_of(seed, "pad", "few"), len(rows))[:count]]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
