"""Random numbers for corruptions, and what a corruption is: a function of images, of these, and of its constants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from fedshift.core import rng


@dataclass(frozen=True)
class Draws:
    """The random numbers of one corruption for the images at hand, each stream under its own name.

    >>> import torch
    >>> draws = Draws(0, "fog", torch.tensor([4, 9]))
    >>> one = Draws(0, "fog", torch.tensor([9]))
    >>> torch.equal(draws.uniform("clouds", (3,))[1:], one.uniform("clouds", (3,)))
    True
    """

    seed: int
    name: str
    ids: Tensor

    def _seed(self, purpose: str) -> int:
        return rng.seed_of(self.seed, "corruption", self.name, purpose)

    def bits24(self, purpose: str, shape: Sequence[int]) -> Tensor:
        """Whole numbers of 24 bits."""
        return rng.integers(self._seed(purpose), self.ids, 2**24, shape)

    def uniform(self, purpose: str, shape: Sequence[int] = ()) -> Tensor:
        """Numbers in [0, 1)."""
        return rng.uniform(self._seed(purpose), self.ids, shape)

    def symmetric(self, purpose: str, shape: Sequence[int] = ()) -> Tensor:
        """Numbers in [-1, 1)."""
        return self.uniform(purpose, shape) * 2.0 - 1.0

    def normal(self, purpose: str, shape: Sequence[int]) -> Tensor:
        """Numbers from N(0, 1)."""
        return rng.normal(self._seed(purpose), self.ids, shape)

    def integers(self, purpose: str, high: int, shape: Sequence[int] = ()) -> Tensor:
        """Whole numbers from 0 to below ``high``."""
        return rng.integers(self._seed(purpose), self.ids, high, shape)


# A corruption takes float images on the 0..255 scale, its draws and its constants; the caller rounds and clips.
Corruption = Callable[[Tensor, Draws, tuple[float, ...]], Tensor]
