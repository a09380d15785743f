"""Real numbers as 32-bit words whose sum over all parties never overflows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words: TypeAlias = NDArray[np.uint32]
"""Whole numbers modulo 2**32."""


@dataclass(frozen=True)
class FixedPoint:
    """Numbers between ``-bound`` and ``bound``, of at most so many parties; what lies outside is put on the edge.

    >>> code = FixedPoint(bound=1.0, parties=2)
    >>> code.decode(code.encode(torch.tensor([0.5, -0.25])) + code.encode(torch.tensor([0.25, -0.25])))
    tensor([ 0.7500, -0.5000], dtype=torch.float64)
    """

    bound: float
    parties: int

    @property
    def step(self) -> float:
        """The distance between two numbers that can be told apart."""
        return self.bound / self.room(self.parties)

    @staticmethod
    def room(parties: int) -> int:
        """How many steps a party has upwards, and downwards."""
        return (2**31 - 1) // parties

    def encode(self, vector: Tensor) -> Words:
        """Words modulo 2**32."""
        inside = vector.detach().cpu().double().clamp(-self.bound, self.bound)
        return (inside / self.step).round().to(torch.int64).numpy().astype(np.uint32)

    def decode(self, total: Words) -> Tensor:
        """What a sum of words says."""
        return torch.from_numpy(total.view(np.int32).astype(np.float64)) * self.step


@dataclass(frozen=True)
class Wide:
    """Numbers of very different size: as many coarse steps as fit, in one word, and what is left of each, in another.

    Steps are powers of two, so that whole numbers stay what they are, however many parties there are: what all of them round
    alike would add up.

    >>> code = Wide(bound=1e10, parties=2)
    >>> words = code.encode(torch.tensor([123456.75, 1e9])) + code.encode(torch.tensor([0.125, 1.0]))
    >>> code.decode(words).round(decimals=3).tolist()
    [123456.875, 1000000001.0]
    """

    bound: float
    parties: int

    def encode(self, vector: Tensor) -> Words:
        """Twice as many words as numbers."""
        coarse = self._coarse.encode(vector)
        left = vector.detach().cpu().double() - self._coarse.decode(coarse)
        return np.concatenate([coarse, self._fine.encode(left)])

    def decode(self, total: Words) -> Tensor:
        """What a sum of words says."""
        coarse, fine = np.split(total, 2)
        return self._coarse.decode(coarse) + self._fine.decode(fine)

    @property
    def _coarse(self) -> FixedPoint:
        return self._even(self.bound)

    @property
    def _fine(self) -> FixedPoint:
        return self._even(self._coarse.step / 2)

    def _even(self, bound: float) -> FixedPoint:
        """At least as far as ``bound``, in steps of a power of two."""
        step = 2.0 ** math.ceil(math.log2(FixedPoint(bound, self.parties).step))
        return FixedPoint(step * FixedPoint.room(self.parties), self.parties)
