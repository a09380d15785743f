"""Predictions that are not numbers are counted, never right, and counted alike by all engines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fedshift.core.adapter import Adapter
from fedshift.core.arch import Output
from fedshift.core.tree import Tree
from fedshift.engines.base import Score
from fedshift.engines.parallel import Parallel
from fedshift.engines.sequential import Sequential
from fedshift.engines.vmapped import Vmapped
from fedshift.methods.fedavg import FedAvg
from tests.conftest import tiny_train
from tests.engines.test_streams import ARCHS, CLASSES, DOUBLE, SETTINGS, ragged, serving

KINDS = ("nan", "one nan", "inf", "all impossible", "some impossible", "sound")


def kind_of(x: Tensor) -> Tensor:
    """Which kind of prediction an image is given, by its pixels."""
    return (x * 255).round().sum((-3, -2, -1)).long() % len(KINDS)


@dataclass(frozen=True)
class Broken(Adapter):
    """Always says class 0, which is also what NaN is taken for; ``size`` makes it one that works in batches."""

    size: int = 0

    @property
    def batch(self) -> int | None:
        return self.size or None

    def predict(self, state: Tree, x: Tensor, draws: Mapping[str, Tensor]) -> tuple[Output, Tree]:
        row = [0.0] * (CLASSES - 1)
        given = [
            [math.nan] * CLASSES, [1.0, math.nan, *row[1:]], [math.inf, *row], [-math.inf] * CLASSES,
            [1.0, -math.inf, *row[1:]], [1.0, *row],
        ]  # fmt: skip
        table = torch.tensor(given, dtype=x.dtype)
        return self.predict_with(state, x)._replace(logits=table[kind_of(x)]), state


@pytest.mark.parametrize("size", [0, 16])
def test_engines_count_them_alike(size: int) -> None:
    arch, task = ARCHS["mlp"], ragged(SETTINGS)
    adapter = Broken(arch, FedAvg(arch=arch, train=tiny_train()).predict, size)
    deployed, parts = serving(arch, task), list(SETTINGS)
    parallel = Parallel(DOUBLE, workers=2)
    try:
        found = [
            engine.evaluate(adapter, deployed, task, parts, 3)
            for engine in (Sequential(DOUBLE), Vmapped(DOUBLE), parallel)
        ]
    finally:
        parallel.close()
    for client in task.clients:
        for part in parts:
            samples = task.samples(client, part)
            kinds = kind_of(samples.images[samples.index].double() / 255)
            right = samples.labels[samples.index] == 0
            one = found[0][client.name, part]
            assert (one.samples, one.broken) == (len(samples), int((kinds < 4).sum()))
            assert one.correct == int((right & (kinds >= 4)).sum())
            assert {scores[client.name, part].broken for scores in found} == {one.broken}
            assert {scores[client.name, part].correct for scores in found} == {one.correct}
            assert all(scores[client.name, part].loss == pytest.approx(one.loss) for scores in found)
            assert math.isinf(one.loss) or not one.broken
    assert sum(score.broken for score in found[0].values()) > 0


def test_a_sound_score_says_nothing_of_it() -> None:
    assert Score(3, 2, 1.0) == Score(3, 2, 1.0, {}, 0)
