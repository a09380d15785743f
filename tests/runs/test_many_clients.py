"""Registered clients who do not take part cost next to nothing; ``benchmarks/speed.py clients`` has a million of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedshift.core import rng
from fedshift.core.method import Method
from fedshift.data.task import Client, Task
from fedshift.engines.base import Compute
from fedshift.engines.sequential import Sequential
from fedshift.experiment.schema import MethodSpec
from fedshift.methods.centralised import Centralised
from fedshift.methods.fedavg import FedAvg
from fedshift.runs.round import drawn
from fedshift.runs.session import Session
from fedshift.runs.setup import Setup
from tests.conftest import tiny_arch, tiny_train

COUNT = 5_000


def made(networks: int) -> Session:
    images = torch.randint(0, 256, (100, 3, 8, 8), dtype=torch.uint8)
    none = torch.zeros(0, dtype=torch.int64)
    owned = enumerate((torch.arange(COUNT * 4) % 100).split(4))
    clients = tuple(Client(f"client-{k}", own, none, none) for k, own in owned)
    task = Task(images, torch.arange(100) % 4, torch.arange(100), tuple("abcd"), clients)
    methods = {f"net-{k}": FedAvg(arch=tiny_arch("mlp"), train=tiny_train()) for k in range(networks)}
    setup = Setup(MethodSpec(name="fedavg"), methods, tiny_train())
    return Session(setup, task, Sequential(), Compute(), 0, 2, participation=10 / COUNT)


def test_a_round_looks_at_those_who_take_part() -> None:
    session = made(1)
    state, report = session.step(session.start())
    assert report.participants == 10
    assert not state.locals  # FedAvg keeps nothing at clients
    assert "_places" not in vars(session)  # nobody was asked which of one network he has
    assert session._others == frozenset()  # nor looked up among all who train


def test_who_takes_part_is_who_always_did() -> None:
    session = made(1)
    first = [1238, 1476, 1619, 1662, 1758, 1939, 1995, 2892, 3049, 4008]
    eighth = [1141, 1157, 1611, 1688, 3179, 3273, 3514, 3551, 3924, 4979]
    for number, expected in ((0, first), (7, eighth)):
        assert [client.name for client in session.participants(number)] == [f"client-{k}" for k in expected]


@pytest.mark.parametrize(("clients", "count"), [(2, 1), (17, 1), (17, 16), (1000, 10), (1000, 500), (100_003, 100)])
def test_who_is_drawn_begins_the_permutation(clients: int, count: int) -> None:
    for seed in (0, 5, 2**62):
        assert drawn(seed, clients, count) == rng.permutation(seed, clients)[:count].sort().values.tolist()


@pytest.mark.parametrize(("kind", "others"), [(FedAvg, "c"), (Centralised, "abc")])
def test_who_does_not_train_is_known(kind: type[Method], others: str) -> None:
    task, method = made(1).task, kind(arch=tiny_arch("mlp"), train=tiny_train())
    a, b, c = (replace(client, name=name) for name, client in zip("abc", task.clients[:3], strict=True))
    setup = Setup(MethodSpec(name="any"), {"mlp": method}, tiny_train())
    session = Session(setup, replace(task, clients=(a, b), unseen=(c,)), Sequential(), Compute(), 0, 2)
    assert session._others == frozenset(others)


def test_networks_are_dealt_in_turn() -> None:
    session = made(3)
    found = [session.arch_of(client) for client in session.task.clients[:4]]
    assert found == ["net-0", "net-1", "net-2", "net-0"]
