"""A real federation on this machine: Flower's own server and nodes as processes, with TLS and keys."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedshift.deploy.federation import FEDERATION, Federation, chosen
from fedshift.deploy.kit import PartyKit, ServerKit
from fedshift.deploy.packet import Handle
from fedshift.deploy.processes import free_port, healthy, port_of
from fedshift.deploy.scaffold import demo_experiment, init
from fedshift.engines.base import Compute
from fedshift.engines.sequential import Sequential
from fedshift.runs.session import Session
from fedshift.runs.setup import make_setup, make_task
from fedshift.store.folder import RunFolder
from fedshift.store.state import State

PARTIES = ("china", "paper", "pen")
CPU = torch.device("cpu")


@dataclass
class Real:
    """Everything that was started is ended with it."""

    folder: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @staticmethod
    def of(folder: Path, method: str, **changes: Any) -> Real:
        experiment = demo_experiment().model_copy(update={"rounds": changes.pop("rounds", 2)})
        methods = [type(experiment.method[0])(name=name) for name in changes.pop("methods", [method])]
        experiment = experiment.model_copy(update={"method": methods})
        address = f"127.0.0.1:{free_port()}"
        terms = {"deadline": 240.0, "wait": 240.0, **changes}
        init(folder, experiment, PARTIES, address, method=method, demo=True, **terms)
        return Real(folder)

    @property
    def kit(self) -> ServerKit:
        return ServerKit(self.folder / "server")

    def party(self, name: str) -> PartyKit:
        return PartyKit(self.folder / "parties" / name)

    def start(self, name: str, *command: str) -> None:
        log = open(self.folder / f"{name}.log", "ab")  # noqa: SIM115 (the process has it)
        words = [sys.executable, "-m", "fedshift.cli", "deploy", *command]
        self.processes[name] = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)

    def serve(self) -> None:
        log, said = self.folder / "server.log", b"listens on port"
        before = log.read_bytes().count(said) if log.is_file() else 0
        self.start("server", "server", str(self.kit.folder), "--host", "127.0.0.1")
        self.until(lambda: log.read_bytes().count(said) > before, "server")
        assert healthy(self.kit, port_of(self.kit))

    def take_part(self, name: str) -> None:
        data = self.folder / "data" / name
        self.start(name, "client", str(self.party(name).folder), "--data", str(data))

    def kill(self, name: str) -> None:
        """Without a word, with all its children."""
        process = self.processes.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def end(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)

    def until(self, holds: Any, of: str, patience: float = 240) -> None:
        ends = time.monotonic() + patience
        while not holds():
            assert time.monotonic() < ends, (self.folder / f"{of}.log").read_text()[-3000:]
            time.sleep(0.5)

    def run(self, *more: str) -> None:
        self.begin(*more)
        self.finish()

    def begin(self, *more: str) -> None:
        self.start("run", "run", str(self.kit.folder), *more)

    def finish(self, code: int = 0) -> str:
        said = self.processes.pop("run").wait(400)
        told = (self.folder / "run.log").read_text()
        assert said == code, told[-3000:]
        return told

    def log(self) -> str:
        return self.kit.log.read_text() if self.kit.log.is_file() else ""

    def switch(self, method: str) -> None:
        """The same machines agree on another method: a federation of its own, with other states."""
        for kit in (self.kit.folder, *(self.party(name).folder for name in PARTIES)):
            text = (kit / FEDERATION).read_text().splitlines()
            lines = [f'method = "{method}"' if line.startswith("method = ") else line for line in text]
            (kit / FEDERATION).write_text("\n".join(lines) + "\n")

    def trained(self, method: str) -> RunFolder:
        (done,) = self.kit.runs.glob(f"*/{method}/*/done")
        return RunFolder(done.parent)

    def locals(self, state: State) -> dict[str, Any]:
        found = {}
        for name in PARTIES:
            base = Handle.of(state.locals.get(name, {})).base
            if base is not None:
                found[name] = self.party(name).party(self.folder / "data" / name).memory.recall(base)
        return found

    def simulated(self, method: str) -> State:
        """The sequential engine on the same pictures."""
        federation = Federation.load(self.kit.folder)
        data = federation.experiment.data.model_copy(
            update={"source": f"folder:{self.folder / 'data'}", "classes": list(federation.spec.classes)}
        )
        experiment = chosen(federation.experiment.model_copy(update={"data": data}), method, federation.spec.seed)
        task = make_task(experiment, federation.spec.seed)
        assert tuple(client.name for client in task.clients) == PARTIES
        setup = make_setup(experiment, experiment.method[0], task)
        session = Session(setup, task, Sequential(Compute()), Compute(), federation.spec.seed, experiment.rounds)
        state = session.start()
        for _ in range(experiment.rounds + setup.method.extra_rounds):
            state, _ = session.step(state)
        return state
