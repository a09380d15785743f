"""Any method meets any adapter: a pair either runs end to end or one sentence says what is missing.

Nothing is listed by hand. A new method or adapter joins by being registered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import pytest
import torch
from torch import nn

import fedshift
from fedshift import Adapter, Arch, Experiment, Method, UserError
from fedshift.catalogue import pairs
from fedshift.core.compatibility import missing_for_method, missing_for_pair, properties
from fedshift.core.registry import ADAPTERS, METHODS
from fedshift.core.tree import Tree
from fedshift.engines.base import Compute
from fedshift.engines.sequential import Sequential
from fedshift.experiment.schema import MethodSpec
from fedshift.runs.session import Session
from fedshift.runs.setup import make_setup
from tests.conftest import ragged_task, some_with, tiny_train

TASK = replace(ragged_task((9, 4, 1), unseen=1), public=torch.arange(6))
DOUBLE = Compute(dtype=torch.float64)


def network(norm: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 4), norm(), nn.ReLU(), nn.Linear(4, 4))


NETWORKS = {
    "batch norm": network(lambda: nn.BatchNorm1d(4)),
    "group norm": network(lambda: nn.GroupNorm(2, 4)),
    "no norm": network(nn.Identity),
}
HAS = {"batch norm": {"norm", "batch-norm"}, "group norm": {"norm"}, "no norm": set()}


@cache
def built(cls: type[Method], net: str) -> Arch:
    return cls.build(Arch.of(NETWORKS[net], (3, 8, 8)), {})


def declared(method_name: str, adapter_name: str, net: str) -> str | None:
    """Why the pair cannot run on the network, from declarations alone."""
    cls = METHODS[method_name].make
    arch = built(cls, net)
    reason = missing_for_method(method_name, cls.requires, arch)
    if reason is not None:
        return reason
    method = cls(arch=arch, train=tiny_train())
    adapter = ADAPTERS[adapter_name].make(arch=arch, predict_with=method.predict)
    return missing_for_pair(method_name, method.provides, adapter_name, adapter)


@cache
def federated(method_name: str, net: str) -> tuple[Session, dict[str, Tree], dict[str, Tree]]:
    """One round, and what its clients and an unseen one serve with."""
    setup = make_setup(Experiment(), MethodSpec(name=method_name), TASK, NETWORKS[net])
    federation = Session(setup, TASK, Sequential(DOUBLE), DOUBLE, seed=0, rounds=1)
    state, report = federation.step(federation.start())
    assert report.diverged == ()
    return federation, federation.deploy(state).trained(), federation.unseen(federation.deploy(state))


def test_networks_have_what_their_names_say() -> None:
    for name, make in NETWORKS.items():
        assert properties(Arch.of(make, (3, 8, 8))) == HAS[name]


@pytest.mark.parametrize(("method_name", "net"), some_with(METHODS, NETWORKS))
def test_a_pair_runs_or_says_what_is_missing(method_name: str, net: str) -> None:
    for adapter_name in ADAPTERS:
        check_pair(method_name, adapter_name, net)


def check_pair(method_name: str, adapter_name: str, net: str) -> None:
    reason = declared(method_name, adapter_name, net)
    spec = MethodSpec(name=method_name, adapters=[adapter_name])  # type: ignore[list-item]
    if reason is not None:
        assert "\n" not in reason
        assert repr(method_name) in reason or repr(adapter_name) in reason
        assert "needs" in reason
        with pytest.raises(UserError) as said:
            make_setup(Experiment(), spec, TASK, NETWORKS[net])
        assert str(said.value) == reason
        return
    setup = make_setup(Experiment(), spec, TASK, NETWORKS[net])
    federation, deployed, unseen = federated(method_name, net)
    adapter = setup.adapter(spec.adapters[0], setup.method)
    assert set(deployed) == {client.name for client in TASK.clients}
    assert set(unseen) <= {client.name for client in TASK.unseen}
    scores = federation.evaluate({next(iter(setup.methods)): adapter}, {**deployed, **unseen}, ["test"])
    assert {name for name, _ in scores} == set(deployed) | set(unseen)
    for (name, _), score in scores.items():
        assert score.samples == len(TASK.client(name).test)
        assert 0 <= score.correct <= score.samples
        assert torch.tensor(score.loss).isfinite()


@pytest.mark.parametrize(("method_name", "net"), some_with(METHODS, NETWORKS))
def test_a_method_provides_what_it_declares(method_name: str, net: str) -> None:
    """Every declared slot is there, and prediction needs no other: an adapter is promised nothing else."""
    cls = METHODS[method_name].make
    reason = missing_for_method(method_name, cls.requires, cls.build(Arch.of(NETWORKS[net], (3, 8, 8)), {}))
    if reason is not None:
        assert cls.requires - HAS[net], reason
        return
    federation, deployed, unseen = federated(method_name, net)
    method = federation.setup.method
    for tree in (*deployed.values(), *unseen.values()):
        assert method.provides <= set(tree)
        promised = {slot: tree[slot] for slot in method.provides}
        whole = promised if "model" in promised else {**promised, "model": tree["model"]}  # the floor looks at no image
        assert set(whole["model"]) == {*method.arch.parameters, *method.arch.buffers}
        assert method.predict(whole, torch.rand(3, 3, 8, 8).double()).logits.shape == (3, 4)


def test_needs_of_methods_and_adapters_are_words_that_have_a_meaning() -> None:
    known = {"norm", "batch-norm", "erasers", "stochastic"}
    slots = {slot for entry in METHODS.values() for slot in entry.make.provides}
    for name, entry in METHODS.items():
        assert entry.make.requires <= known, name
        assert "model" in entry.make.provides or name == "majority", name
    for name, other in ADAPTERS.items():
        assert other.make.requires_arch <= known, name
        assert other.make.requires <= slots, f"no method provides what adapter {name} needs"


def test_the_printed_grid_is_the_declared_one() -> None:
    rows = {row["name"]: row for row in pairs()}
    assert set(rows) == set(METHODS)
    for method_name, row in rows.items():
        assert set(row) == {"name", *ADAPTERS}
        for adapter_name in ADAPTERS:
            assert (row[adapter_name] == "yes") == (declared(method_name, adapter_name, "batch norm") is None)


@pytest.fixture
def plugins() -> Iterator[None]:
    """A method that provides a descriptor, and an adapter that requires one; gone afterwards."""

    @fedshift.method("described", paper="a test")
    @dataclass(frozen=True)
    class Described(Method):
        """Deploys the mean of nothing."""

        provides: ClassVar[frozenset[str]] = frozenset({"model", "descriptor"})

        def deployed(self, down: Tree, local: Tree) -> Tree:
            return {**super().deployed(down, local), "descriptor": {"h": torch.zeros(4, dtype=torch.float64)}}

    @fedshift.adapter("shifted", paper="a test")
    @dataclass(frozen=True)
    class Shifted(Adapter):
        """Adds the descriptor to the logits."""

        requires: ClassVar[frozenset[str]] = frozenset({"model", "descriptor"})

        def predict(self, state, x, draws):  # type: ignore[no-untyped-def]
            output = self.predict_with(state, x)
            return output._replace(logits=output.logits + state["descriptor"]["h"]), state

    yield
    METHODS._entries.pop("described")
    ADAPTERS._entries.pop("shifted")


@pytest.mark.usefixtures("plugins")
def test_new_plugins_join_the_grid_by_their_declarations() -> None:
    for method_name in METHODS:
        reason = declared(method_name, "shifted", "batch norm")
        if method_name == "described":
            assert reason is None
        else:
            lacks = "descriptor" if "model" in METHODS[method_name].make.provides else "descriptor, model"
            start = f"adapter 'shifted' needs {lacks}, which method {method_name!r} does not deploy"
            assert reason == f"{start}, but described would"
    for adapter_name in ADAPTERS:
        check_pair("described", adapter_name, "batch norm")
        check_pair("described", adapter_name, "no norm")
    test_the_printed_grid_is_the_declared_one()
