"""Registered clients who do not take part cost next to nothing; ``benchmarks/speed.py clients`` has a million of them."""

from __future__ import annotations

import torch

from fedshift.data.task import Client, Task
from fedshift.engines.base import Compute
from fedshift.engines.sequential import Sequential
from fedshift.experiment.schema import MethodSpec
from fedshift.methods.fedavg import FedAvg
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


def test_networks_are_dealt_in_turn() -> None:
    session = made(3)
    found = [session.arch_of(client) for client in session.task.clients[:4]]
    assert found == ["net-0", "net-1", "net-2", "net-0"]
