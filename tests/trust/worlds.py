"""A skewed federation, and adapters that do harm: what measures, alarms and advice must see through."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedshift import Experiment, Pool, Result, from_arrays, run
from fedshift.core.adapter import Adapter
from fedshift.core.arch import Output
from fedshift.core.registry import ADAPTERS, adapter
from fedshift.core.tree import Tree

SITES = ("north", "south", "east", "west")


def skewed_pool(clear: float = 40.0, seed: int = 0, each: int = 200) -> Pool:
    """Four sites, three classes, 70 % of the images are of the first."""
    random = np.random.default_rng(seed)
    sites = [site for site in SITES for _ in range(each)]
    labels = random.choice(3, p=[0.7, 0.2, 0.1], size=len(sites))
    shapes = random.normal(0, clear, (3, 3, 8, 8))
    means = 128 + shapes[labels]
    images = np.clip(means + random.normal(0, 60, means.shape), 0, 255).astype(np.uint8)
    return from_arrays(images, labels.tolist(), domains=sites)


def skewed(**changes: object) -> Experiment:
    settings: dict[str, object] = {
        "name": "skewed", "rounds": 6, "baselines": False, "model": {"name": "mlp", "hidden": [16]},
        "train": {"lr": 0.05, "batch-size": 16}, "evaluate": {"every": 1},
        "split": {"train": 0.4, "val": 0.3, "test": 0.3},
    }  # fmt: skip
    return Experiment.parse({**settings, **changes})


def go(experiment: Experiment, out: Path, **more: Any) -> Result:
    return run(experiment, out, **{"engine": "sequential", "data": skewed_pool(), **more})


@contextmanager
def harmful_adapters() -> Iterator[None]:
    """``benign`` calls everything the first class and is very sure; ``blind`` answers half of the samples at random."""

    @adapter("benign", paper="(test)")
    @dataclass(frozen=True)
    class Benign(Adapter):
        """One class."""

        def predict(self, state: Tree, x: Tensor, draws: Mapping[str, Tensor]) -> tuple[Output, Tree]:
            output, state = super().predict(state, x, draws)
            logits = output.logits * 0.01
            logits[:, 0] += 4
            return output._replace(logits=logits), state

    @adapter("blind", paper="(test)")
    @dataclass(frozen=True)
    class Blind(Adapter):
        """Worse, but of every class."""

        def predict(self, state: Tree, x: Tensor, draws: Mapping[str, Tensor]) -> tuple[Output, Tree]:
            output, state = super().predict(state, x, draws)
            turned = output.logits.roll(1, -1)
            odd = (x.flatten(1).sum(1) * 255).round().long() % 2 == 1
            return output._replace(logits=output.logits.where(~odd[:, None], turned)), state

    try:
        yield
    finally:
        for name in ("benign", "blind"):
            del ADAPTERS._entries[name]
