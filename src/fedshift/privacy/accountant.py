"""What has been told about a client so far, as (epsilon, delta): Opacus' accountants, on the schedule of a run.

A schedule does not look at data. So what a run will have told after any round is known before it starts, and a budget is a
number of rounds.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from fedshift.errors import UserError

Mechanism: TypeAlias = Literal["rdp", "prv"]
History: TypeAlias = tuple[tuple[float, float, int], ...]  # noise, rate, rounds


@dataclass(frozen=True)
class Accountant:
    """A Gaussian mechanism on the sum over clients, of whom each takes part with probability ``rate`` in a round.

    The unit is a client with all of its images, who is there or not.

    >>> accountant = Accountant(noise=1.0, rate=0.1, delta=1e-5)
    >>> accountant.epsilon(10) < accountant.epsilon(20) < 10
    True
    """

    noise: float  # the standard deviation of the noise on the sum, in units of the clipping norm
    rate: float
    delta: float
    mechanism: Mechanism = "rdp"

    def epsilon(self, rounds: int, of_all: int = 0) -> float:
        """After so many rounds, and so many further messages that all clients sent (what they gave away at the end)."""
        steps = [(self.rate, rounds), (1.0, of_all)]
        history = tuple((self.noise, rate, count) for rate, count in steps if count)
        return _epsilon(self.mechanism, history, self.delta) if history else 0.0

    def affordable(self, budget: float, most: int, of_all: int = 0) -> int:
        """How many rounds, at most ``most``, a budget of epsilon is enough for.

        >>> Accountant(noise=2.0, rate=1.0, delta=1e-5).affordable(budget=5.0, most=100)
        4
        """
        enough, too_many = 0, most + 1
        while too_many - enough > 1:
            middle = (enough + too_many) // 2
            if self.epsilon(middle, of_all) <= budget:
                enough = middle
            else:
                too_many = middle
        return enough


@lru_cache(maxsize=4096)
def _epsilon(mechanism: Mechanism, history: History, delta: float) -> float:
    try:
        with warnings.catch_warnings():  # that prv could be smaller, or that prv takes the logarithm of a rate of one
            warnings.simplefilter("ignore")
            found = _COUNTS[mechanism](history, delta)
    except ImportError:
        raise UserError('[privacy] noise is counted by Opacus: pip install "fedshift[privacy]"') from None
    except (ArithmeticError, MemoryError, ValueError):  # of numbers like 1e-300
        found = math.nan
    if not math.isfinite(found):
        raise UserError(f"[privacy] noise = {history[0][0]:g} cannot be counted by accountant {mechanism!r}")
    return found


def _renyi(history: History, delta: float) -> float:
    """Opacus' ``RDPAccountant``; what one round tells, which takes a while, is worked out once."""
    from opacus.accountants import RDPAccountant
    from opacus.accountants.analysis.rdp import get_privacy_spent

    told = sum(_of_one(noise, rate) * steps for noise, rate, steps in history)
    return float(get_privacy_spent(orders=RDPAccountant.DEFAULT_ALPHAS, rdp=told, delta=delta)[0])


@lru_cache(maxsize=256)
def _of_one(noise: float, rate: float) -> Any:
    from opacus.accountants import RDPAccountant
    from opacus.accountants.analysis.rdp import compute_rdp

    return compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=RDPAccountant.DEFAULT_ALPHAS)


def _random_variables(history: History, delta: float) -> float:
    """Opacus' ``PRVAccountant``."""
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = list(history)
    return float(accountant.get_epsilon(delta=delta))


_COUNTS: Mapping[Mechanism, Callable[[History, float], float]] = {"rdp": _renyi, "prv": _random_variables}
