"""What a checkpoint knows beside the state: how far a run is, what it has reached, and on which engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Reached(NamedTuple):
    """What a state reached on validation images; of two that reached the same the one with the lower loss is better.

    >>> Reached(80.0, 0.5).beats(Reached(80.0, 0.6)), Reached(70.0, 0.1).beats(Reached(80.0, 0.6))
    (True, False)
    """

    value: float = -math.inf  # of the measure that rounds are chosen by; more is better
    loss: float = math.inf

    def beats(self, other: Reached) -> bool:
        """Whether it is better; what is no better is not."""
        return (self.value, -self.loss) > (other.value, -other.loss)

    def to_json(self) -> list[float | None] | None:
        """For JSON, which knows no infinity."""
        return None if self == Reached() else [self.value, self.loss if math.isfinite(self.loss) else None]

    @staticmethod
    def of(stored: Any) -> Reached:
        """From a checkpoint; older versions kept the accuracy alone."""
        if stored is None:
            return Reached()
        value, loss = stored if isinstance(stored, list) else (stored, None)
        return Reached(float(value), math.inf if loss is None else float(loss))


class MadeBy(NamedTuple):
    """What computes the rounds of a run: numbers in float32 differ between engines.

    >>> print(MadeBy("vmapped", "cpu", "float32"))
    vmapped on cpu in float32
    """

    engine: str
    device: str
    precision: str

    def __str__(self) -> str:
        return f"{self.engine} on {self.device} in {self.precision}"


@dataclass(frozen=True)
class Progress:
    """What a checkpoint knows beside the state.

    >>> progress = Progress(3, Reached(80.0, 0.5), 2, made_by=(MadeBy("vmapped", "cpu", "float32"),))
    >>> Progress.of(progress.to_json()) == progress
    True
    """

    lines: int = 0  # of metrics.jsonl
    best: Reached = field(default_factory=Reached)
    best_round: int = -1
    adapted: Mapping[str, Reached] = field(default_factory=dict)  # by adapter: after its own adaptation
    adapted_rounds: Mapping[str, int] = field(default_factory=dict)
    made_by: tuple[MadeBy, ...] = ()  # one after the other; older versions did not say

    def to_json(self) -> dict[str, Any]:
        """As a checkpoint holds it."""
        return {
            "lines": self.lines,
            "best": self.best.to_json(),
            "best_round": self.best_round,
            "adapted": {name: reached.to_json() for name, reached in self.adapted.items()},
            "adapted-rounds": dict(self.adapted_rounds),
            "made-by": [list(made) for made in self.made_by],
        }

    @staticmethod
    def of(stored: Mapping[str, Any]) -> Progress:
        """From a checkpoint."""
        return Progress(
            lines=int(stored["lines"]),
            best=Reached.of(stored["best"]),
            best_round=int(stored["best_round"]),
            adapted={name: Reached.of(reached) for name, reached in stored.get("adapted", {}).items()},
            adapted_rounds={name: int(number) for name, number in stored.get("adapted-rounds", {}).items()},
            made_by=tuple(MadeBy(*made) for made in stored.get("made-by", ())),
        )
