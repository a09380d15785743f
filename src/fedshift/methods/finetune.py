"""FedAvg-FT: FedAvg, then every client fine-tunes the result on its own data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedshift.core.checks import not_negative
from fedshift.core.method import Method, Phase
from fedshift.core.registry import method


@method("finetune", paper="(baseline; FedAvg-FT in FedTHE, ICLR 2023)", venue="", year=0)
@dataclass(frozen=True)
class FineTune(Method):
    """FedAvg with a local copy fine-tuned after the last aggregation.

    The fine-tuned copy is never aggregated. ``epochs`` defaults to ``[train] local-epochs`` (FedICON's protocol); FedTHE
    uses one.
    """

    epochs: int | None = None

    personal: ClassVar[bool] = True
    linear: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse settings that cannot be meant."""
        not_negative("method 'finetune'", epochs=self.epochs)

    def final_phases(self) -> tuple[Phase, ...]:
        """Train the received model once more, for oneself."""
        return (Phase(name="finetune", epochs=self.epochs),)
