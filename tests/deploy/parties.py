"""Federations in one process: a task cut into parties, each with nothing but its own images."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedshift.data.streams import Setting, Stream
from fedshift.data.task import Client, Task
from fedshift.deploy.federation import Federation, FederationSpec, chosen, with_public
from fedshift.deploy.flower import GridExchange
from fedshift.deploy.log import Log
from fedshift.deploy.memory import Memory
from fedshift.deploy.node import client_app
from fedshift.deploy.packet import Handle
from fedshift.deploy.party import Party
from fedshift.deploy.server import carry_out
from fedshift.engines.base import Compute
from fedshift.engines.sequential import Sequential
from fedshift.experiment.schema import Experiment
from fedshift.runs.session import Session
from fedshift.store.folder import RunFolder
from fedshift.store.state import State
from tests.conftest import ragged_task
from tests.deploy.loopback import Loopback, Node, Tamper

TRAIN = {"lr": 0.05, "batch-size": 8, "local-epochs": 1, "momentum": 0.9}


def whole_task(sizes: tuple[int, ...] = (17, 7, 12)) -> Task:
    task = ragged_task(sizes)
    tests = {client.name: client.test for client in task.clients}
    stream = Stream("original", "original", Setting(), None, task.labels, task.ids, tests)
    return replace(task, streams={"original": stream})


def own_part(task: Task, client: Client) -> Task:
    """What one party has: its own images in their order, and no others."""
    parts = (client.train, client.val, client.test)
    rows, sizes = torch.cat(parts), [len(part) for part in parts]
    own = Client(client.name, *torch.arange(len(rows)).split(sizes))
    stream = replace(task.streams["original"], labels=task.labels[rows], ids=task.ids[rows], index={own.name: own.test})
    return replace(
        task,
        images=task.images[rows],
        labels=task.labels[rows],
        ids=task.ids[rows],
        clients=(own,),
        streams={"original": stream},
        public=None,
        hash=client.name,
    )


@dataclass
class InProcess:
    """A federation whose parties are objects."""

    federation: Federation
    task: Task
    folder: Path
    tamper: Tamper | None = None
    shares: bool = True

    @staticmethod
    def of(folder: Path, method: str, rounds: int = 2, **more: Any) -> InProcess:
        terms = {key: more.pop(key) for key in ("least", "attempts", "norm_factor") if key in more}
        task = more.pop("task", None) or whole_task()
        model = {"name": "cnn", "width": 2, "hidden": 6, "norm": more.pop("norm", False)}
        options = {"name": method, **more.pop("options", {})}
        table = {
            "rounds": rounds,
            "model": model,
            "train": TRAIN,
            "method": [options],
            "evaluate": {"every": more.pop("every", 0)},
            **more,
        }
        spec = FederationSpec(
            name=folder.name,
            address="nowhere:1",
            method=method,
            seed=3,
            classes=list(task.classes),
            shape=list(task.shape),
            insecure=True,
            deadline=5,
            wait=0,
            party=[{"name": client.name} for client in task.clients],
            **terms,
        )
        assert task.public is not None
        public = {"images": task.images[task.public], "ids": task.ids[task.public]}
        return InProcess(Federation(spec, chosen(Experiment.parse(table), method, 3), public), task, folder)

    def party(self, client: Client) -> Party:
        task = with_public(own_part(self.task, client), self.federation.public)
        kept = self.folder / client.name / self.federation.id
        experiment = self.federation.experiment
        setup = self.federation.setup(task)
        return Party(self.federation.id, experiment, setup, task, 3, Memory(kept), kept, Compute(), shares=self.shares)

    def grid(self, absent: Iterable[str] = ()) -> Loopback:
        nodes = {}
        for number, client in enumerate(self.task.clients):
            party = self.party(client)
            app = client_app(lambda _, party=party: party)
            nodes[100 - number] = Node(client.name, app, online=client.name not in absent)
        return Loopback(nodes, self.tamper)

    def run(self, resume: bool = False, grid: Loopback | None = None) -> tuple[RunFolder, list[str]]:
        """The run folder, and what was noted."""
        log = Log(self.folder / "log.txt")
        exchange = GridExchange(grid or self.grid(), self.federation, log.note)
        with log:
            exchange.gather(0, 5)
            folder = carry_out(self.federation, exchange, self.folder / "runs", resume, log)
        return folder, (self.folder / "log.txt").read_text().splitlines()

    def locals(self, state: State) -> dict[str, Any]:
        """The local states that the server's handles mean, read from the parties' disks."""
        found = {}
        for client in self.task.clients:
            base = Handle.of(state.locals.get(client.name, {})).base
            if base is not None:
                found[client.name] = Memory(self.folder / client.name / self.federation.id).recall(base)
        return found

    def simulated(self) -> tuple[Session, State]:
        """The same with the sequential engine, and its last state."""
        compute = Compute()
        setup = self.federation.setup(self.task)
        experiment = self.federation.experiment
        session = Session(setup, self.task, Sequential(compute), compute, 3, experiment.rounds)
        state = session.start()
        for _ in range(experiment.rounds + setup.method.extra_rounds):
            state, _ = session.step(state)
        return session, state
