"""Where settings are looked for: ranges and lists of values, by dotted key, as ``[tune]`` has them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from fedshift.errors import UserError
from fedshift.experiment.schema import Experiment, MethodSpec

USUAL = "train.lr"  # what is searched where nobody says what
_SEARCHED = ("train", "model", "method")  # what decides how well is learnt, and nothing that decides what is measured
_KEYS = {"low", "high", "log"}


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, whole ones if both are; ``log``: small ones as often as large ones.

    >>> Range(0.001, 1.0, log=True).at(0.5), Range(1, 8).at(0.99), Range(-2, 2).at(0.1)
    (0.03162, 8, -2)
    """

    low: float
    high: float
    log: bool = False

    @property
    def whole(self) -> bool:
        """Whether it has whole numbers only."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def at(self, share: float) -> float | int:
        """The number at a share of the way, in [0, 1)."""
        end = self.high + 1 if self.whole else self.high
        value = self.low * (end / self.low) ** share if self.log else self.low + (end - self.low) * share
        return min(math.floor(value), int(self.high)) if self.whole else self.rounded(value)

    def rounded(self, value: float) -> float:
        """A number with four digits, never beyond the ends: a momentum of 0.99999 must not become 1.

        >>> Range(0.9, 0.99999).rounded(0.99998)
        0.99999
        """
        return min(max(float(f"{value:.4g}"), self.low), self.high)


@dataclass(frozen=True)
class Choice:
    """One of some values."""

    values: tuple[Any, ...]

    def at(self, share: float) -> Any:
        """The value at a share of the way, in [0, 1)."""
        return self.values[int(share * len(self.values))]


Space: TypeAlias = Mapping[str, Range | Choice]


def space_of(experiment: Experiment, over: Mapping[str, Any] | None = None) -> dict[str, Range | Choice]:
    """What ``[tune]`` says, and ``over`` on top of it; where both are empty, the learning rate around its own value.

    >>> space_of(Experiment(train={"lr": 0.1}))
    {'train.lr': Range(low=0.01, high=1.0, log=True)}
    >>> space_of(Experiment(), {"train.local-epochs": [1, 5]})
    {'train.local-epochs': Choice(values=(1, 5))}
    """
    table = {**experiment.tune, **(over or {})}
    if table:
        return {key: _dimension(key, value) for key, value in table.items()}
    from fedshift.core.method import Train

    rate = float(experiment.train.get("lr", Train().lr))
    return {USUAL: Range(rate / 10, rate * 10, log=True)}


def _dimension(key: str, value: Any) -> Range | Choice:
    parts = key.split(".")
    if parts[0] not in _SEARCHED or len(parts) < 2:
        raise UserError(
            f"[tune] {key}: only options of training, networks, methods and adapters are searched for (train.lr, "
            "model.width, method.fedprox.mu); what else is changed changes what is measured"
        )
    if isinstance(value, list):
        if len(value) < 2:
            raise UserError(f"[tune] {key}: a list needs two values or more, not {len(value)}")
        return Choice(tuple(value))
    if not isinstance(value, Mapping) or not {"low", "high"} <= set(value) <= _KEYS:
        raise UserError(
            f"[tune] {key} must be a list of values or {{ low = ..., high = ..., log = true }}, not {value!r}"
        )
    low, high, log = value["low"], value["high"], value.get("log", False)
    numbers = all(isinstance(n, int | float) and not isinstance(n, bool) and math.isfinite(n) for n in (low, high))
    if not numbers or not low < high or not isinstance(log, bool) or (log and low <= 0):
        positive = ", and above 0 for log" if log is True else ""
        raise UserError(f"[tune] {key}: low must be a number below high{positive}, not {low!r} and {high!r}")
    return Range(low, high, log)


def of_method(space: Space, spec: MethodSpec, others: Sequence[MethodSpec]) -> dict[str, Range | Choice]:
    """The part of the space that changes this method: not what belongs to another one by name.

    >>> space = {"train.lr": Choice((1, 2)), "method.fedprox.mu": Choice((0, 1))}
    >>> list(of_method(space, MethodSpec(name="fedavg"), [MethodSpec(name="fedprox")]))
    ['train.lr']
    """
    foreign = {name for other in others for name in (other.name, other.label)} - {spec.name, spec.label, ""}
    return {
        key: dimension
        for key, dimension in space.items()
        if not (key.startswith("method.") and key.split(".")[1] in foreign)
    }
