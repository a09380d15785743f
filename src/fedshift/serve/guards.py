"""Alarms along a stream: it is not what the model knows, or its adapter is about to ruin it.

Every alarm is a CUSUM: a sum of log-likelihood ratios of "it has changed" against "it is as it was", which never falls
below zero and sets the alarm off at ``h``. Lorden's bound says how often that happens by chance: at most once in ``e^h``
samples on average, whatever the detector. So ``h`` follows from a stated rate, and the state of an alarm is one number.
A sum never grows beyond ``h`` either, and the alarm is over when it is back at zero.

The reference is what the artefact knows of its client's validation images (:class:`fedshift.runs.known.Known`).

================  ===============================================================================  ==============
alarm             the hypothesis "it has changed"                                                  speaks of
================  ===============================================================================  ==============
features          distances to class means, or places in feature space, have moved by a deviation  drift
confidence        so have the frozen model's confidences                                           drift
classes           one class takes half of the frozen model's answers                               drift
unknown           most images are unlike anything known                                            harm
contradiction     the adapter overrules the frozen model where that one is sure                    harm
one class         the adapter moves answers to one class, and is sure of them                      harm
disagreement      most answers differ from the frozen model's, and are surer                       harm
================  ===============================================================================  ==============
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from scipy.special import ndtri

from fedshift.runs.known import Known

Numbers: TypeAlias = np.ndarray

SHIFT = 1.0  # of a signal, in standard deviations
CERTAIN = 0.9  # a confidence that needs no comparison
HALF = 0.5  # of the stream, which one class takes
DRIFT = ("features", "confidence", "classes")
HARM = ("unknown", "contradiction", "one class", "disagreement")
ALARMS = (*DRIFT, *HARM)
# shares of samples: as it was, and when it has changed
UNKNOWN, CONTRADICTION, ONE_CLASS, DISAGREEMENT = (0.2, 0.8), (0.1, 0.4), (0.1, 0.5), (0.5, 0.8)


class Seen(NamedTuple):
    """What was seen of some samples, an entry for each."""

    signals: Numbers  # [n, few]: distances and places; none where nothing is known
    unknown: Numbers  # bool
    frozen: Numbers  # classes, according to the frozen model
    frozen_confidence: Numbers
    answer: Numbers  # classes, according to the adapter; the frozen model's where it did not run
    confidence: Numbers


@dataclass(frozen=True)
class Levels:
    """Where every alarm stands."""

    sums: Numbers  # float64 [detectors]
    on: Numbers  # bool [detectors]


@dataclass(frozen=True, eq=False)
class Guards:
    """The detectors of one client; ``classes`` is the number of its network's outputs.

    ``false_alarms`` is how many there are in a sample on average at most, all alarms about drift together.

    >>> guards = Guards(2, None, 1e-6)
    >>> same = Seen(np.zeros((40, 0)), *(np.zeros(40, dtype=kind) for kind in (bool, int, float, int, float)))
    >>> guards.names(guards.watched(guards.start(), same)[0])
    ()
    >>> guards.names(guards.watched(guards.start(), same._replace(unknown=np.ones(40, dtype=bool)))[0])
    ('unknown',)
    """

    classes: int
    known: Known | None
    false_alarms: float = 1e-6

    @cached_property
    def height(self) -> float:
        """Where a sum sets its alarm off."""
        return math.log(sum(name in DRIFT for name in self.alarms) / self.false_alarms)

    @cached_property
    def alarms(self) -> tuple[str, ...]:
        """The alarm that each detector belongs to."""
        several = {
            "features": 2 * self._signals,
            "confidence": 2,
            "classes": self.classes,
            "one class": self.classes,
        }
        return tuple(name for name in ALARMS for _ in range(several.get(name, 1)))

    @property
    def _signals(self) -> int:
        return 0 if self._reference is None else self._reference.shape[1] - 1

    @cached_property
    def harmful(self) -> Numbers:
        """Which detectors speak of harm."""
        return np.array([name in HARM for name in self.alarms])

    def start(self) -> Levels:
        """Nothing has been seen."""
        return Levels(np.zeros(len(self.alarms)), np.zeros(len(self.alarms), dtype=bool))

    def watched(self, levels: Levels, seen: Seen) -> tuple[Levels, tuple[str, ...]]:
        """Where alarms stand after some samples, and those that these have set off."""
        sums, on, height = levels.sums, levels.on, self.height
        begun = np.zeros_like(on)
        for step in self._ratios(seen):
            sums = np.minimum(np.maximum(sums + step, 0.0), height)
            if sums.max() < height and not on.any():  # as nearly always: nothing begins, and nothing ends
                continue
            risen = sums >= height
            begun |= risen & ~on
            on = (on | risen) & (sums > 0)
        return Levels(sums, on), self._named(begun)

    def names(self, levels: Levels, harm: bool = False) -> tuple[str, ...]:
        """The alarms that are on, or those of them that speak of harm."""
        return self._named(levels.on & self.harmful if harm else levels.on)

    def strain(self, levels: Levels) -> float:
        """How near the nearest alarm about harm is: 0 is calm, 1 sets it off."""
        return float(levels.sums[self.harmful].max()) / self.height

    def drift(self, levels: Levels) -> float:
        """How near the nearest alarm about drift is."""
        return float(levels.sums[~self.harmful].max()) / self.height

    def by_alarm(self, levels: Levels) -> dict[str, float]:
        """How near each alarm is."""
        height, sums = self.height, levels.sums
        nearest: dict[str, float] = dict.fromkeys(ALARMS, 0.0)
        for name, level in zip(self.alarms, sums.tolist(), strict=True):
            nearest[name] = max(nearest[name], level / height)
        return nearest

    def calmed(self, levels: Levels) -> Levels:
        """Without what is remembered of the adapter, which starts again; the stream is what it is."""
        own = np.array([name in HARM[1:] for name in self.alarms])
        return replace(levels, sums=np.where(own, 0.0, levels.sums), on=levels.on & ~own)

    def _named(self, flags: Numbers) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for name, flag in zip(self.alarms, flags, strict=True) if flag))

    def _ratios(self, seen: Seen) -> Numbers:
        """Log-likelihood ratios [samples, detectors]."""
        count, every = len(seen.answer), np.arange(self.classes)
        differs = seen.answer != seen.frozen
        surer = seen.confidence >= np.minimum(seen.frozen_confidence, CERTAIN)
        sure = seen.frozen_confidence >= self._sure
        columns = [
            self._moved(seen),
            np.where(seen.frozen[:, None] == every, self._mix[0], math.log(HALF)),
            _ratio(seen.unknown, UNKNOWN),
            np.where(sure, _ratio(differs, CONTRADICTION), 0.0),
            _ratio((seen.answer[:, None] == every) & (differs & surer)[:, None], ONE_CLASS),
            _ratio(differs & surer, DISAGREEMENT),
        ]
        return np.concatenate([column.reshape(count, -1) for column in columns], axis=1)

    def _moved(self, seen: Seen) -> Numbers:
        """Of both ways in which each signal may shift: values as normal scores among those of validation images.

        That reference is only as sure as it is large.
        """
        reference = self._reference
        if reference is None:
            return np.zeros((len(seen.answer), 2))
        values = np.concatenate([seen.signals, seen.frozen_confidence[:, None]], axis=1)[:, None]
        ranks = ((reference < values).sum(1) + (reference <= values).sum(1)) / 2
        scores = ndtri((ranks + 0.5) / (len(reference) + 1))
        slack = SHIFT / 2 + 2 / math.sqrt(len(reference))
        return SHIFT * (np.stack([scores, -scores], 2).reshape(len(scores), -1) - slack)

    @cached_property
    def _sure(self) -> float:
        return 0.9 if self.known is None else self.known.sure

    @cached_property
    def _reference(self) -> Numbers | None:
        """The signals of validation images, confidence last; None where nothing is known."""
        if self.known is None:
            return None
        columns = (self.known.distance[:, None], self.known.places, self.known.confidence[:, None])
        return torch.cat(columns, 1).double().numpy()

    @cached_property
    def _mix(self) -> Numbers:
        """For every class the ratio of an answer that is this class.

        A class may be as frequent as validation images allow (Wilson's bound, three standard errors); without any nothing
        is known of the mix.
        """
        if self.known is None:
            return np.full((1, self.classes), math.log(HALF))
        counts = self.known.answered.double().numpy()[: self.classes]
        total, errors = counts.sum(), 3.0
        spread = np.sqrt(counts * (total - counts) / total + errors**2 / 4)
        share = (counts + errors**2 / 2 + errors * spread) / (total + errors**2)
        ratios: Numbers = np.log(HALF * (share + 1.0) / share)[None]
        return ratios


def _ratio(flags: Numbers, shares: tuple[float, float]) -> Numbers:
    """The log-likelihood ratio of a flag whose share was the first and is the second."""
    before, after = shares
    return np.where(flags, math.log(after / before), math.log((1 - after) / (1 - before)))
