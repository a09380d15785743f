"""Gaussian noise: seeded in simulation, so that a study can be repeated; from the operating system everywhere else."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from fedshift.core import rng

Noise: TypeAlias = Callable[[int, tuple[object, ...]], Tensor]
"""So many standard normal numbers (float64), of somebody in some round; where they are secret that is not looked at."""


def seeded(seed: int) -> Noise:
    """Noise that everybody who knows the seed can take off again: for simulation alone.

    >>> torch.equal(seeded(3)(4, ("round", 1)), seeded(3)(4, ("round", 1)))
    True
    """

    def draw(count: int, whose: tuple[object, ...]) -> Tensor:
        return rng.normal(rng.seed_of(seed, "privacy noise", *whose), torch.arange(count)).double()

    return draw


def secret(count: int, _whose: tuple[object, ...] = ()) -> Tensor:
    """Noise that nobody can draw again: every bit of it is the operating system's.

    The mean of four draws, scaled, hides which floating-point numbers a single one can be (Holohan and Braghin, 2021):
    from the gaps between them one could tell what lies under the noise.

    >>> z = secret(100_000)
    >>> abs(float(z.mean())) < 0.03 and abs(float(z.std()) - 1) < 0.03
    True
    """
    total = np.zeros(count)
    for _ in range(4):
        raw = np.frombuffer(os.urandom(16 * count), dtype=np.uint64).reshape(2, count)
        share = ((raw >> np.uint64(11)).astype(np.float64) + 1.0) * 2.0**-53
        total += np.sqrt(-2.0 * np.log(share[0])) * np.cos(2.0 * math.pi * share[1])
    return torch.from_numpy(total / 2.0)
