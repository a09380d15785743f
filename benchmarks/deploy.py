"""A federation on this machine: what a round costs over bare Flower FedAvg with the same model, and bytes on the wire.

python -m benchmarks.deploy bytes                 # seconds: every message of some methods, as Flower serialises it
python -m benchmarks.deploy overhead --rounds 4   # minutes: one SuperLink, three SuperNodes, TLS; both apps in turn on them
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import textwrap
from pathlib import Path

import torch
from flwr.common.serde import recorddict_to_proto

from fedshift.core.context import Context
from fedshift.core.method import Method
from fedshift.core.tree import Tree, float_bytes
from fedshift.data.task import Client
from fedshift.deploy.checks import rehearsed
from fedshift.deploy.packet import Packet
from fedshift.deploy.processes import CONNECTION, flwr
from fedshift.deploy.records import to_records
from fedshift.engines.base import Compute
from fedshift.engines.sequential import Sequential
from fedshift.experiment.schema import Experiment
from fedshift.runs.session import Session
from fedshift.runs.setup import make_setup, make_task


def wire(tree: Tree) -> int:
    """Bytes of a packet as Flower sends it."""
    facts = {"federation": "0" * 16, "client": "hospital", "round": 3, "rounds": 10, "clients": 3, "stage": "round"}
    return len(recorddict_to_proto(to_records(Packet("train", facts, tree))).SerializeToString())


def published_floats(method: Method, session: Session) -> dict[str, tuple[int, int]]:
    """Floats down and up in a round, from the papers' own counts (P: all of the network, BN statistics included)."""
    arch = method.arch
    tensors = session.initial[session.arch_of(session.task.clients[0])]
    floats = {name: leaf.numel() for name, leaf in tensors.items() if leaf.is_floating_point()}
    whole = sum(floats.values())
    norm = sum(floats[name] for name in floats if name in arch.norm)
    d, learnt = arch.feature_size, 10 * 32 + 32 + 2 * (32 * 32 + 32) + 32 + 1
    return {
        "fedavg": (whole, whole),
        "scaffold": (2 * whole, 2 * whole),
        "fedbn": (whole - norm, whole - norm),
        "fedthe": (whole + d, whole + d),
        "fedtta": (whole + learnt, whole + learnt),
    }


def count_bytes() -> None:
    head = f"{'method':10} {'way':5} {'floats':>9} {'tree kB':>9} {'wire kB':>9}"
    print(f"{head} {'wire / tree':>12} {'wire / published':>18}")
    for name in ("fedavg", "scaffold", "fedbn", "fedthe", "fdse", "fedtta"):
        experiment = Experiment.parse(
            {"baselines": False, "method": [{"name": name}], "model": {"name": "cnn", "norm": True}}
        )
        task = make_task(experiment, 0)
        setup = make_setup(experiment, experiment.method[0], task)
        session = Session(setup, task, Sequential(Compute()), Compute(), 0, 10)
        client: Client = task.clients[0]
        ctx = Context(0, 10, len(task.clients))
        down = setup.method.broadcast(session.start().server, client.name, ctx)
        network = session.arch_of(client)
        up = rehearsed(setup.method, setup, network, task, client, 0, ctx, down)
        published = published_floats(setup.method, session).get(name)
        for number, (way, tree) in enumerate((("down", down), ("up", up))):
            sent, plain = wire(tree), float_bytes(tree)
            book = f"{sent / (4 * published[number]):18.4f}" if published else f"{'':>18}"
            print(f"{name:10} {way:5} {plain // 4:9,} {plain / 1e3:9.1f} {sent / 1e3:9.1f} {sent / plain:12.4f} {book}")


# ---- overhead ------------------------------------------------------------------------------------------------------------
BARE_SERVER = """
import json, time
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from bare.net import net

app = ServerApp()

class Timed(FedAvg):
    def configure_train(self, *a, **k):
        self.began = time.perf_counter()
        return super().configure_train(*a, **k)
    def aggregate_train(self, *a, **k):
        result = super().aggregate_train(*a, **k)
        self.seconds.append(time.perf_counter() - self.began)
        return result

@app.main()
def main(grid: Grid, context: Context) -> None:
    strategy = Timed(fraction_evaluate=0.0, min_available_nodes=3, min_train_nodes=3)
    strategy.seconds = []
    strategy.start(grid=grid, initial_arrays=ArrayRecord(net().state_dict()), num_rounds=int(context.run_config["rounds"]))
    json.dump(strategy.seconds, open(context.run_config["out"], "w"))
"""
BARE_CLIENT = """
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from bare.net import net

app = ClientApp()

@app.train()
def train(message: Message, context: Context) -> Message:
    model = net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    data = torch.load(str(context.node_config["folder"]) + "/bare.pt")
    x, y = data["x"].float() / 255 * 2 - 1, data["y"]
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    for index in torch.randperm(len(x)).split(16):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(model(x[index]), y[index]).backward()
        optimiser.step()
    metrics = MetricRecord({"num-examples": len(x)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content, reply_to=message)
"""
BARE_NET = """
from torch import nn

def block(a, b):
    return [nn.Conv2d(a, b, 5, bias=False), nn.BatchNorm2d(b), nn.MaxPool2d(2), nn.ReLU()]

def net():
    return nn.Sequential(*block(3, 8), *block(8, 16), nn.Flatten(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))
"""


def write_bare(folder: Path) -> None:
    package = folder / "bare"
    package.mkdir(parents=True)
    for name, text in (("__init__", ""), ("server", BARE_SERVER), ("client", BARE_CLIENT), ("net", BARE_NET)):
        (package / f"{name}.py").write_text(textwrap.dedent(text).lstrip())
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "bare"\nversion = "1.0.0"\nlicense = "Apache-2.0"\ndependencies = ["flwr>=1.41"]\n'
        '[tool.flwr.app]\npublisher = "bench"\n[tool.flwr.app.components]\nserverapp = "bare.server:app"\n'
        'clientapp = "bare.client:app"\n[tool.flwr.app.config]\nrounds = 1\nout = ""\n'
    )


def overhead(rounds: int) -> None:
    from tests.deploy.real import PARTIES, Real

    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        real = Real.of(place / "federation", "fedavg", rounds=rounds, least=3)
        write_bare(place / "app")
        for name in PARTIES:
            task = real.party(name).party(real.folder / "data" / name).task
            train = task.clients[0].train
            torch.save({"x": task.images[train], "y": task.labels[train]}, real.party(name).folder / "bare.pt")
        try:
            real.serve()
            for name in PARTIES:
                real.take_part(name)
            real.run()
            settings = f'rounds={rounds} out="{place / "bare.json"}"'
            flwr(real.kit, ["run", str(place / "app"), CONNECTION, "--stream", "-c", settings], show=True)
        finally:
            real.end()
        ours = [line.seconds for line in real.trained("fedavg").history().rounds]
        bare = json.loads((place / "bare.json").read_text())
    print(f"seconds of a round, ours: {[round(s, 1) for s in ours]}")
    print(f"seconds of a round, bare Flower FedAvg: {[round(s, 1) for s in bare]}")
    print(f"ratio of medians without the first round: {statistics.median(ours[1:]) / statistics.median(bare[1:]):.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("bytes", "overhead"))
    parser.add_argument("--rounds", type=int, default=4)
    chosen = parser.parse_args()
    count_bytes() if chosen.what == "bytes" else overhead(chosen.rounds)
