"""The direction on which clients agree most: the point of least norm among the mixtures of their unit updates.

It never points against a client: with d* the least-norm point, ``<d*, d_k> >= |d*|^2 >= 0`` for every client k.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FACES_UP_TO = 6  # clients for whom all 63 faces of the simplex are tried at once
STILL = 1e-8  # an update of less than this norm has no direction
RIDGE = 1e-10
TOLERANCE = 1e-10
COLUMNS = 1 << 16  # of the updates that are multiplied at once
Floats = NDArray[np.float64]


def min_norm_weights(gram: Tensor, present: Tensor | None = None) -> Tensor:
    """``argmin_u |sum_k u_k d_k|`` on the simplex, for many problems: Gram matrices [m, K, K] of vectors d_k give u [m, K].

    Clients that are not ``present`` [m, K] get weight zero; where nobody is, all get the same.

    >>> d = torch.eye(3, dtype=torch.float64)
    >>> min_norm_weights((d @ d.T)[None])
    tensor([[0.3333, 0.3333, 0.3333]], dtype=torch.float64)
    """
    problems = gram.detach().to("cpu", torch.float64).numpy()
    there = np.ones(problems.shape[:2], dtype=bool) if present is None else present.cpu().numpy().astype(bool)
    solve = _by_faces if problems.shape[1] <= FACES_UP_TO else _by_wolfe
    weights = solve(problems, there)
    weights[~there.any(1)] = 1 / problems.shape[1]
    return torch.from_numpy(weights)


def _by_faces(gram: Floats, there: NDArray[np.bool_]) -> Floats:
    """The least-norm point of every face's plane, of all problems at once; the best of those that lie in their face."""
    many, clients = gram.shape[:2]
    best, weights = np.full(many, np.inf), np.zeros((many, clients))
    for face in _faces(clients):
        inner = gram[:, face][:, :, face]
        own = _plane(inner)
        value = np.einsum("mi,mij,mj->m", own, inner, own)
        better = (own >= -1e-9).all(1) & there[:, face].all(1) & (value < best - 1e-15)
        best[better], weights[better] = value[better], 0.0
        weights[np.ix_(better, face)] = own[better].clip(min=0)
    weights /= weights.sum(1, keepdims=True).clip(min=1e-300)
    return weights


def _faces(clients: int) -> Iterator[list[int]]:
    for size in range(1, clients + 1):
        yield from (list(face) for face in combinations(range(clients), size))


def _plane(gram: Floats) -> Floats:
    """The least-norm point of the plane through some points [..., n, n]: weights that may be negative."""
    size = gram.shape[-1]
    ones = np.ones((*gram.shape[:-1], 1))
    raw = np.linalg.solve(gram + RIDGE * np.eye(size), ones)[..., 0]
    total = raw.sum(-1, keepdims=True)
    plane: Floats = (raw / np.where(np.abs(total) > 1e-300, total, 1.0)).astype(np.float64)
    return plane


def _by_wolfe(gram: Floats, there: NDArray[np.bool_]) -> Floats:
    weights = np.zeros(gram.shape[:2])
    for problem, own in enumerate(there):
        who = np.flatnonzero(own)
        if len(who):
            weights[problem, who] = _wolfe(gram[problem][np.ix_(who, who)])
    return weights


def _wolfe(gram: Floats) -> Floats:
    """Wolfe's algorithm: take in the point that is most against the current one, drop those that get in the way."""
    corral, weights = [int(np.argmin(np.diag(gram)))], np.ones(1)
    for _ in range(20 * len(gram) + 20):
        along = gram[:, corral] @ weights
        norm = float(along[corral] @ weights)
        worst = int(np.argmin(along))
        if worst in corral or along[worst] >= norm - TOLERANCE:
            break
        corral, weights = [*corral, worst], np.append(weights, 0.0)
        while (plane := _plane(gram[np.ix_(corral, corral)])).min() <= 0:
            leaving = plane <= 0
            step = np.min(weights[leaving] / np.maximum(weights[leaving] - plane[leaving], 1e-300))
            weights = (1 - step) * weights + step * plane
            stays = ~(leaving & (weights <= 1e-14))
            if stays.all():  # rounding left a sliver: the smallest one goes
                stays[int(np.argmin(np.where(leaving, weights, np.inf)))] = False
            corral, weights = [i for i, kept in zip(corral, stays, strict=True) if kept], weights[stays]
            weights = weights / weights.sum()
        weights = plane
    full = np.zeros(len(gram))
    full[corral] = weights
    return full


def gram_of(start: Tensor, ends: Sequence[Tensor]) -> Tensor:
    """Inner products of the updates ``ends[k] - start``, in double precision, without stacking all of them at once.

    >>> gram_of(torch.zeros(2), [torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.0])])
    tensor([[25.,  3.],
            [ 3.,  1.]], dtype=torch.float64)
    """
    flat, others = start.flatten(), [end.flatten() for end in ends]
    total = torch.zeros(len(ends), len(ends), dtype=torch.float64, device=start.device)
    for first in range(0, len(flat), COLUMNS):
        part = slice(first, first + COLUMNS)
        updates = torch.stack([other[part] for other in others]).double() - flat[part].double()
        total += updates @ updates.T
    return total


def agreed(grams: Tensor) -> Tensor:
    """How far the server goes along every client's update: [m, K, K] -> factors [m, K].

    The new point is ``start + sum_k factor_k (end_k - start)``: the least-norm mixture of unit updates, as long as the
    updates are on average. One client, or equal updates: the update itself.

    >>> round(float(agreed(gram_of(torch.zeros(2), [torch.tensor([3.0, 4.0])] * 2)[None]).sum()), 6)
    1.0
    """
    norms = grams.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    scale = 1 / (norms + STILL)
    unit = grams * scale[:, :, None] * scale[:, None, :]
    weights = min_norm_weights(unit, norms > STILL).to(norms.device)
    return norms.mean(1, keepdim=True) * weights * scale * (norms > STILL)  # who stands still pulls nobody
