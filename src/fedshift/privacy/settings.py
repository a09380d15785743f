"""``[privacy]``: what uploads go through, and for whom it is nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from fedshift.core.options import Checked, Count, NonNegative, Positive, Share
from fedshift.errors import UserError
from fedshift.privacy.accountant import Accountant, Mechanism
from fedshift.privacy.compression import COMPRESSORS, Compressor, Kind

FEWEST = 3  # parties of a sum that may be known: of two each could take itself off


@dataclass(frozen=True)
class Privacy(Checked):
    """What every upload goes through, in this order: clipping, compression, noise, secure summation.

    >>> Privacy(clip=1.0, noise=1.0).sums, Privacy(compress="int8").sums
    (True, False)
    """

    clip: Positive | None = None  # the longest update, as an L2 norm over all that a client sends
    noise: NonNegative = 0.0  # its standard deviation on the sum, in units of clip
    delta: Positive = 1e-5
    epsilon: Positive | None = None  # the budget: training stops before it is exceeded
    accountant: Mechanism = "rdp"
    sampling: Literal["all", "poisson"] = "all"  # poisson: everybody takes part with probability participation
    secure: bool = False  # the server sees sums only
    least: Count | None = None  # parties that must survive a secure summation; default: two thirds of who begins, and 3
    compress: Kind = "none"
    keep: Share = 0.05  # of the entries, by top-k

    def __post_init__(self) -> None:
        """What several options must satisfy together."""
        super().__post_init__()
        if self.noise and self.clip is None:
            raise UserError("noise is measured in units of clip: set clip too")
        if self.delta >= 1:
            raise UserError(f"delta must be below 1, not {self.delta}")
        if self.epsilon is not None and not self.noise:
            raise UserError("epsilon is a budget for noise: set noise too, or leave epsilon out")
        if self.secure and self.clip is None:
            raise UserError("secure summation adds whole numbers, whose range is clip: set clip too")
        if self.secure and self.compress != "none":
            raise UserError("masked uploads look like noise, which nothing compresses: secure or compress, not both")
        if self.secure and self.sampling == "poisson":
            raise UserError(
                'a server that sums securely knows whom it asks, so sampling hides nobody: sampling = "all"'
            )

    @property
    def sums(self) -> bool:
        """Whether only the sum over clients means something to the server."""
        return self.secure or self.noise > 0

    @property
    def compressor(self) -> Compressor:
        """How an update becomes a message."""
        return COMPRESSORS[self.compress](self.keep)

    def accounted(self, participation: float) -> Accountant:
        """Who counts what is told."""
        rate = participation if self.sampling == "poisson" else 1.0
        return Accountant(self.noise, rate, self.delta, self.accountant)

    def threshold(self, parties: int) -> int:
        """So many parties must survive a secure summation among so many; never half of them or fewer.

        >>> Privacy().threshold(20), Privacy(least=11).threshold(20), Privacy(least=11).threshold(100)
        (14, 11, 51)
        """
        usual = max(FEWEST, math.ceil(2 * parties / 3))
        return usual if self.least is None else max(self.least, parties // 2 + 1)
