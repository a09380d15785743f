"""Clipping: nobody's update is longer than agreed. It happens at the client, which alone sees its update."""

from __future__ import annotations

from torch import Tensor


def clipped(vector: Tensor, most: float | None) -> Tensor:
    """A vector that is shortened to the L2 norm ``most`` if it is longer; None: as it is.

    The norm is taken in double precision: what is promised about it must hold for a million small numbers too.

    >>> import torch
    >>> clipped(torch.tensor([3.0, 4.0]), 1.0), clipped(torch.tensor([0.3, 0.4]), 1.0)
    (tensor([0.6000, 0.8000]), tensor([0.3000, 0.4000]))
    """
    if most is None or not len(vector):
        return vector
    double = vector.double()
    norm = float(double.norm())
    return vector if norm <= most else (double * (most / norm)).to(vector.dtype)


def sound(vector: Tensor) -> bool:
    """Whether a client may send this at all. Behind a mask nobody else could tell.

    >>> import torch
    >>> sound(torch.tensor([1.0, float("nan")]))
    False
    """
    return bool(vector.isfinite().all())
