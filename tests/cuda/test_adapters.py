"""Every adapter on a GPU answers as it does on a CPU.

Nothing is listed by hand: a new adapter joins by being registered.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import pytest
import torch

from fedshift import Adapter, Arch, Experiment
from fedshift.core.compatibility import missing_for_method, missing_for_pair
from fedshift.core.registry import ADAPTERS, METHODS
from fedshift.core.tree import Tree, map_tree
from fedshift.engines.base import Compute, Engine, Score
from fedshift.engines.sequential import Sequential
from fedshift.engines.torch_flags import steady
from fedshift.engines.vmapped import Vmapped
from fedshift.experiment.schema import MethodSpec
from fedshift.models.cnn import CNN
from fedshift.runs.session import Session
from fedshift.runs.setup import make_setup
from tests.conftest import ragged_task, tiny_train
from tests.cuda.fast import DOUBLE, GPU

LOSS_OFF_BY = 2e-2  # of the loss of all streams, in fast single precision
ANSWERS_OFF_BY = 0.02  # of all right answers
TASK = ragged_task((33, 7, 20, 40))
SHAPE = (3, 8, 8)
STREAMS = ("train", "test")
EXPERIMENT = Experiment.parse({"train": {"batch-size": 8, "local-epochs": 1, "lr": 0.05}})


def network() -> torch.nn.Module:
    return CNN(width=2, hidden=6, norm=True).make(SHAPE, 4)


def meet(method_name: str, adapter_name: str) -> bool:
    cls = METHODS[method_name].make
    arch = cls.build(Arch.of(network, SHAPE), {})
    if missing_for_method(method_name, cls.requires, arch):
        return False
    method = cls(arch=arch, train=tiny_train())
    adapter = ADAPTERS[adapter_name].make(arch=arch, predict_with=method.predict)
    return missing_for_pair(method_name, method.provides, adapter_name, adapter) is None


@cache
def partners() -> Mapping[str, str]:
    """A method for every adapter, and few methods: who has least choice chooses first."""
    choices = {adapter: [method for method in METHODS if meet(method, adapter)] for adapter in ADAPTERS}
    chosen: dict[str, str] = {}
    for adapter in sorted(choices, key=lambda name: len(choices[name])):
        known = [method for method in choices[adapter] if method in chosen.values()]
        chosen[adapter] = (known or choices[adapter])[0]
    return chosen


@cache
def deployed(method_name: str) -> dict[str, Tree]:
    """Clients' models after a round on a CPU."""
    setup = make_setup(EXPERIMENT, MethodSpec(name=method_name), TASK, network)
    federation = Session(setup, TASK, Sequential(DOUBLE), DOUBLE, seed=0, rounds=1)
    state, report = federation.step(federation.start())
    assert report.diverged == ()
    return federation.deploy(state).trained()


def adapter_of(adapter_name: str, method_name: str) -> Adapter:
    spec = MethodSpec(name=method_name, adapters=[adapter_name])  # type: ignore[list-item]
    setup = make_setup(EXPERIMENT, spec, TASK, network)
    return setup.adapter(spec.adapters[0], setup.method)


def scores(adapter: Adapter, method_name: str, engine: Engine, compute: Compute) -> dict[tuple[str, str], Score]:
    def moved(leaf: torch.Tensor) -> torch.Tensor:
        return leaf.to(compute.device, compute.dtype if leaf.is_floating_point() else leaf.dtype)

    models = {name: map_tree(moved, tree) for name, tree in deployed(method_name).items()}
    return engine.evaluate(adapter, models, TASK, STREAMS, seed=0)


@pytest.mark.parametrize("adapter_name", list(ADAPTERS))
def test_adapters_answer_as_on_a_cpu(adapter_name: str) -> None:
    method_name = partners()[adapter_name]
    adapter = adapter_of(adapter_name, method_name)
    exact, fast = Compute(GPU, torch.float64), Compute(GPU, tf32=True)
    expected = scores(adapter, method_name, Sequential(DOUBLE), DOUBLE)
    with steady():
        found = scores(adapter, method_name, Vmapped(exact), exact)
    assert set(found) == set(expected)
    for stream, score in expected.items():
        assert (found[stream].samples, found[stream].correct) == (score.samples, score.correct)
        assert found[stream].loss == pytest.approx(score.loss, rel=1e-6)
    with steady(tf32=True):
        rounded = scores(adapter, method_name, Vmapped(fast), fast)
    assert all(torch.tensor(score.loss).isfinite() for score in rounded.values())
    total = sum(score.samples for score in expected.values())
    moved = sum(abs(rounded[stream].correct - score.correct) for stream, score in expected.items())
    assert moved <= ANSWERS_OFF_BY * total
    losses = [sum(score.loss for score in every.values()) for every in (rounded, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=LOSS_OFF_BY)
