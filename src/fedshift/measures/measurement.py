"""All measures of some predictions, as they are kept: a few numbers and a confusion count.

Shares are in percent, as accuracies are everywhere; the loss is in nats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fedshift.errors import UserError
from fedshift.measures import exact
from fedshift.measures.confusion import Confusion
from fedshift.measures.counts import Counts
from fedshift.measures.predictions import Predictions


class Measure(NamedTuple):
    """One way to say in a number how good predictions are."""

    title: str  # in a table
    higher: bool  # whether more is better
    of: Callable[[Predictions], float | None]  # in percent, or nats


def _counted(name: str) -> Callable[[Predictions], float | None]:
    return lambda predictions: _percent(getattr(Confusion.of(predictions), name))


def _scored(function: Callable[[Predictions], float | None]) -> Callable[[Predictions], float | None]:
    return lambda predictions: _percent(function(predictions))


def _percent(share: float | None) -> float | None:
    return None if share is None or math.isnan(share) else 100 * share


COUNTED = ("accuracy", "balanced-accuracy", "macro-f1", "top-share")  # follow from the confusion count
SCORED: Mapping[str, Callable[[Predictions], float | None]] = {
    "auroc": _scored(exact.auroc),
    "auprc": _scored(exact.auprc),
    "loss": exact.loss,
    "ece": _scored(exact.ece),
    "adaptive-ece": _scored(exact.adaptive_ece),
}
MEASURES: Mapping[str, Measure] = {
    "accuracy": Measure("accuracy", True, _counted("accuracy")),
    "balanced-accuracy": Measure("balanced accuracy", True, _counted("balanced_accuracy")),
    "macro-f1": Measure("macro F1", True, _counted("macro_f1")),
    "auroc": Measure("AUROC", True, SCORED["auroc"]),
    "auprc": Measure("AUPRC", True, SCORED["auprc"]),
    "loss": Measure("loss", False, SCORED["loss"]),
    "ece": Measure("ECE", False, SCORED["ece"]),
    "adaptive-ece": Measure("adaptive ECE", False, SCORED["adaptive-ece"]),
    "top-share": Measure("top class", False, _counted("top_share")),
}
SENSITIVITY = "sensitivity@"


def listed_measure(name: str) -> Measure:
    """A measure that every score has, by its name.

    >>> listed_measure("auroc").title
    'AUROC'
    """
    if name not in MEASURES:
        raise UserError(f"there is no measure {name!r}; there are: {', '.join(MEASURES)}")
    return MEASURES[name]


def measure_of(name: str) -> Measure:
    """A measure by its name; ``sensitivity@0.9`` is how many are found at that specificity.

    >>> measure_of("auroc").title, measure_of("sensitivity@0.9").title
    ('AUROC', 'sensitivity at 0.9')
    """
    if name in MEASURES:
        return MEASURES[name]
    text = name.removeprefix(SENSITIVITY)
    try:
        specificity = float(text) if name.startswith(SENSITIVITY) else math.nan
    except ValueError:
        specificity = math.nan
    if not 0 <= specificity <= 1:
        known = ", ".join([*MEASURES, f"{SENSITIVITY}SPECIFICITY"])
        raise UserError(f"there is no measure {name!r}; there are: {known}")
    return Measure(f"sensitivity at {text}", True, lambda some: _percent(exact.sensitivity_at(some, specificity)))


def better(name: str, one: float, other: float) -> bool:
    """Whether ``one`` is the better value of this measure.

    >>> better("accuracy", 70.0, 60.0), better("loss", 0.7, 0.6)
    (True, False)
    """
    return one > other if MEASURES[name].higher else one < other


@dataclass(frozen=True)
class Measurement:
    """What is kept of predictions: everything :data:`MEASURES` asks for.

    >>> import numpy as np
    >>> some = Measurement.of(Predictions(np.log([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]]), np.array([0, 1, 1])))
    >>> some.value("balanced-accuracy"), some.value("auroc")
    (75.0, 100.0)
    >>> Measurement.of_json(some.to_json(), 2) == some
    True
    """

    confusion: Confusion
    numbers: tuple[float | None, ...]  # in the order of :data:`SCORED`

    @staticmethod
    def of(predictions: Predictions) -> Measurement:
        """Measure them."""
        numbers = (function(predictions) for function in SCORED.values())
        return Measurement(
            Confusion.of(predictions), tuple(None if number is None else round(number, 6) for number in numbers)
        )

    @staticmethod
    def of_counts(counts: Counts) -> Measurement:
        """Of what parties gave in place of predictions: areas and calibration to within their bins, see :class:`Counts`.

        >>> import numpy as np
        >>> some = Predictions(np.log([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]]), np.array([0, 1, 1]))
        >>> counted, exact = Measurement.of_counts(Counts.of(some)), Measurement.of(some)
        >>> counted.confusion == exact.confusion, counted.value("auroc"), counted.value("adaptive-ece")
        (True, 100.0, None)
        """
        known: Mapping[str, float | None] = {
            "auroc": _percent(counts.auroc().value),
            "auprc": _percent(counts.auprc().value),
            "loss": counts.loss(),
            "ece": _percent(counts.ece().value),
        }
        numbers = (known.get(name) for name in SCORED)
        rounded = tuple(None if number is None or math.isnan(number) else round(number, 6) for number in numbers)
        return Measurement(Confusion.of_counts(counts.confusion), rounded)

    def value(self, name: str) -> float | None:
        """One of the measures; None where it does not exist."""
        if name in COUNTED:
            return _percent(getattr(self.confusion, name.replace("-", "_")))
        return self.numbers[list(SCORED).index(name)]

    def to_json(self) -> dict[str, Any]:
        """As files hold it."""
        return {**dict(zip(SCORED, self.numbers, strict=True)), "confusion": self.confusion.to_json()}

    @staticmethod
    def of_json(stored: Mapping[str, Any], classes: int) -> Measurement:
        """From a file."""
        numbers: Sequence[float | None] = [stored.get(name) for name in SCORED]
        known = [number for number in numbers if number is not None]
        if not all(isinstance(number, int | float) and math.isfinite(number) for number in known):
            raise TypeError("what should be numbers is not")
        return Measurement(Confusion.of_json(stored["confusion"], classes), tuple(numbers))
