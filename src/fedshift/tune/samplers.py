"""Who proposes settings: a function of seed, method, number and what came of the trials before. Nothing is stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from fedshift.core import rng
from fedshift.errors import UserError
from fedshift.tune.space import Choice, Space


class Sampler(Protocol):
    """Proposes settings for one method."""

    at_once: bool  # whether all proposals can be made before the first one was tried

    def ask(self, number: int) -> dict[str, Any]:
        """The settings of a trial; trials are asked for in their order."""

    def tell(self, number: int, score: float | None) -> None:
        """What came of it, higher is better; None: no number."""


class Random:
    """Every trial for itself, so that all of them can be run side by side; the same settings for every method.

    >>> from fedshift.tune.space import Range
    >>> Random({"train.lr": Range(0.01, 1.0, log=True)}, 0, "fedavg").ask(3)
    {'train.lr': 0.4359}
    """

    at_once = True

    def __init__(self, space: Space, seed: int, method: str) -> None:
        self._space, self._seed = space, seed

    def ask(self, number: int) -> dict[str, Any]:
        """Keyed by the trial and the key: another key in the space changes none of the others."""
        return {key: dimension.at(self._share(key, number)) for key, dimension in self._space.items()}

    def _share(self, key: str, number: int) -> float:
        return float(rng.uniform(rng.seed_of(self._seed, "tune", key), torch.tensor([number]))[0])

    def tell(self, number: int, score: float | None) -> None:
        """It does not matter."""


class Tpe:
    """Optuna's tree-structured Parzen estimator: later trials look where earlier ones were good (extra ``tune``)."""

    at_once = False

    def __init__(self, space: Space, seed: int, method: str) -> None:
        try:
            import optuna
        except ImportError:
            raise UserError('the sampler tpe needs Optuna: pip install "fedshift[tune]"') from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._space = space
        self._kinds = {key: _distribution(dimension) for key, dimension in space.items()}
        sampler = optuna.samplers.TPESampler(seed=rng.seed_of(seed, "tune", method) % 2**32)
        self._study = optuna.create_study(direction="maximize", sampler=sampler)
        self._asked: dict[int, Any] = {}

    def ask(self, number: int) -> dict[str, Any]:
        """Optuna's proposal, numbers with four digits."""
        self._asked[number] = trial = self._study.ask(self._kinds)
        return {key: _plain(dimension, trial.params[key]) for key, dimension in self._space.items()}

    def tell(self, number: int, score: float | None) -> None:
        """Optuna learns from it."""
        from optuna.trial import TrialState

        if score is None:
            self._study.tell(self._asked.pop(number), state=TrialState.FAIL)
        else:
            self._study.tell(self._asked.pop(number), score)


def _distribution(dimension: Any) -> Any:
    from optuna import distributions

    if isinstance(dimension, Choice):  # by position: values may be lists
        return distributions.CategoricalDistribution(range(len(dimension.values)))
    kind = distributions.IntDistribution if dimension.whole else distributions.FloatDistribution
    return kind(dimension.low, dimension.high, log=dimension.log)


def _plain(dimension: Any, value: Any) -> Any:
    if isinstance(dimension, Choice):
        return dimension.values[value]
    return value if dimension.whole else dimension.rounded(value)


SAMPLERS: Mapping[str, Callable[[Space, int, str], Sampler]] = {"random": Random, "tpe": Tpe}
