"""What a tracker is told: a run begins, numbers of a round, a run has ended. Where it keeps them is its own matter."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from fedshift.errors import UserError


class Tracker(Protocol):
    """Keeps numbers of runs; four methods, and yours may be a list."""

    def begin(self, run: str, settings: Mapping[str, Any]) -> None:
        """A run, by a name that no other has, and its settings as dotted keys."""

    def log(self, run: str, step: int, numbers: Mapping[str, float]) -> None:
        """What a round gave; the same round may come again with other names."""

    def end(self, run: str, numbers: Mapping[str, float]) -> None:
        """A run is scored: every score, by selection rule, adapter, stream and measure."""

    def close(self) -> None:
        """Nothing more will come."""


def tracker_of(text: str) -> Tracker:
    """From the command line: ``tensorboard``, ``mlflow:URI``, ``wandb:PROJECT``; what follows the colon may be left out.

    >>> tracker_of("paper")
    Traceback (most recent call last):
    fedshift.errors.UserError: there is no tracker 'paper'; there are: tensorboard[:FOLDER], mlflow[:URI], wandb[:PROJECT]
    """
    from fedshift.track.mlflow import MLflow
    from fedshift.track.tensorboard import TensorBoard
    from fedshift.track.wandb import WandB

    known: dict[str, tuple[str, Callable[..., Tracker]]] = {
        "tensorboard": ("FOLDER", TensorBoard),
        "mlflow": ("URI", MLflow),
        "wandb": ("PROJECT", WandB),
    }
    name, _, where = text.partition(":")
    if name not in known:
        ways = ", ".join(f"{key}[:{what}]" for key, (what, _) in known.items())
        raise UserError(f"there is no tracker {name!r}; there are: {ways}")
    make = known[name][1]
    return make(where) if where else make()


def needs(package: str, extra: str) -> UserError:
    """The sentence for a package that is not there."""
    return UserError(f'the tracker needs {package}: pip install "fedshift[{extra}]"')


def allowed(name: str) -> str:
    """A name with nothing in it that a tracker's store refuses.

    >>> allowed("val/accuracy"), allowed("client <1>")
    ('val/accuracy', 'client _1_')
    """
    return re.sub(r"[^\w\-./ ]", "_", name)
