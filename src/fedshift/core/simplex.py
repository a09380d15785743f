"""Weights that are not negative and sum to one, and the nearest ones to a point that has left them."""

from __future__ import annotations

import torch
from torch import Tensor


def projected(point: Tensor) -> Tensor:
    """The point of the probability simplex that is nearest to ``point`` [n], found by sorting.

    With ``u`` the entries in falling order and ``r`` the largest j for which ``u_j + (1 - sum_{i<=j} u_i) / j > 0``, every
    entry is moved by ``(1 - sum_{i<=r} u_i) / r`` and cut off at zero.

    >>> projected(torch.tensor([1.25, 0.25, -4.0])).tolist()
    [1.0, 0.0, 0.0]
    """
    falling = point.sort(descending=True).values
    count = torch.arange(1, len(point) + 1, dtype=point.dtype, device=point.device)
    moves = (1 - falling.cumsum(0)) / count
    last = (falling + moves > 0).sum() - 1
    return (point + moves[last]).clamp(min=0)
