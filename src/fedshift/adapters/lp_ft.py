"""LP-FT at test time: MEMO on the head first, then on everything."""

from __future__ import annotations

from dataclasses import dataclass

from fedshift.adapters.memo import Memo
from fedshift.core.options import NonNegativeInt
from fedshift.core.registry import adapter


@adapter(
    "lp-ft",
    paper="Fine-Tuning can Distort Pretrained Features and Underperform Out-of-Distribution",
    venue="ICLR",
    year=2022,
)
@dataclass(frozen=True)
class LinearProbeThenTune(Memo):
    """MEMO with ``head-steps`` that move the head alone before ``steps`` that move all weights (FedTHE, Table 3, row 2).

    The published row has no code and no settings; three and three steps at MEMO's rate are our choice.
    """

    head_steps: NonNegativeInt = 3

    def stages(self) -> list[frozenset[str]]:
        """Head, then everything."""
        return [self.arch.head] * self.head_steps + super().stages()
