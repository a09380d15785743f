"""What FDSE costs, as ratios taken in one run.

python benchmarks/fdse.py server    aggregation of AlexNet by consensus and similarity, 4 and 50 clients, on the CPU
python benchmarks/fdse.py gpu       a training step of AlexNet with erasers against the plain one, 4 clients together
python benchmarks/fdse.py cpu       the same on one core, one client
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from fedshift.core.arch import Arch
from fedshift.core.context import Context, ServerContext
from fedshift.core.method import Method, Train
from fedshift.core.tree import Tree, map_tree
from fedshift.data.task import Client, Task
from fedshift.engines.base import Compute
from fedshift.engines.schedule import Plan
from fedshift.engines.sequential import Sequential
from fedshift.engines.torch_flags import steady
from fedshift.engines.vmapped import Vmapped
from fedshift.methods.fedavg import FedAvg
from fedshift.methods.fedbn import FedBN
from fedshift.models.alexnet import AlexNet
from fedshift.systems.fdse.method import FDSE

CTX = Context(round=1, rounds=10, clients=4)
NO_PUBLIC = torch.zeros(0, dtype=torch.int64)


def network(side: int) -> Arch:
    shape = (3, side, side)
    return Arch.of(lambda: AlexNet(bias=False).make(shape, 10), shape, "alexnet", mean=(0.0,), std=(1.0,))


def method(kind: type[Method], side: int) -> Method:
    train = Train(lr=0.1, batch_size=50, local_epochs=1, weight_decay=1e-3, clip=10.0, weights="uniform")
    return kind(arch=kind.build(network(side), {}), train=train)


def task(clients: int, samples: int, side: int) -> Task:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (clients * samples, 3, side, side), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (clients * samples,), generator=generator)
    none = torch.zeros(0, dtype=torch.int64)
    parts = torch.arange(clients * samples).split(samples)
    owners = tuple(Client(f"client-{k}", part, none, none) for k, part in enumerate(parts))
    return Task(images, labels, torch.arange(len(labels)), tuple("0123456789"), owners)


def server(clients: int) -> float:
    """Seconds of one aggregation."""
    made = method(FDSE, 128)
    names = tuple(f"client-{k}" for k in range(clients))
    state = made.init_server({"alexnet": made.arch.init(0)}, names, NO_PUBLIC)
    ups: dict[str, Tree] = {}
    for k, name in enumerate(names):
        generator = torch.Generator().manual_seed(k)
        down = made.broadcast(state, name, CTX)
        ups[name] = map_tree(
            lambda leaf, g=generator: (
                leaf + 0.01 * torch.randn(leaf.shape, generator=g) if leaf.is_floating_point() else leaf
            ),
            down,
        )
    ctx = ServerContext(CTX.round, CTX.rounds, clients, samples=torch.full((clients,), 100.0), seed=0)
    started = time.perf_counter()
    made.aggregate(state, ups, ctx)
    return time.perf_counter() - started


def rounds(made: Method, data: Task, engine: Sequential | Vmapped, device: torch.device) -> Callable[[], float]:
    """A function that trains one round and gives its seconds for each step."""
    names = tuple(client.name for client in data.clients)
    initial = {k: v.to(device) for k, v in made.arch.init(0).items()}
    state = made.init_server({"alexnet": initial}, names, NO_PUBLIC)
    downs = {name: made.broadcast(state, name, CTX) for name in names}
    home = {name: initial[name] for name in made.private(CTX)}
    locals: dict[str, Tree] = {name: {"model": home} if home else {} for name in names}
    steps = -(-len(data.clients[0].train) // made.train.batch_size)

    def go() -> float:
        started = time.perf_counter()
        engine.train(made, downs, locals, data, Plan(made.phases(CTX), CTX, 0))
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - started) / steps

    return go


def compare(device: torch.device, sides: tuple[int, ...], clients: int, samples: int, tf32: tuple[bool, ...]) -> None:
    for side in sides:
        data = task(clients, samples, side)
        for rounded in tf32:
            times = {}
            for kind in (FedAvg, FedBN, FDSE):
                compute = Compute(device, tf32=rounded)
                engine = Vmapped(compute) if device.type == "cuda" else Sequential(compute)
                go = rounds(method(kind, side), data, engine, device)
                with steady(rounded):  # as `fedshift run` has it
                    for _ in range(3):
                        go()
                    times[kind.__name__] = statistics.median(go() for _ in range(5))
                engine.close()
            line = "  ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in times.items())
            ratio = times["FDSE"] / times["FedAvg"]
            print(f"{side} px, {clients} clients x 50, tf32 {rounded}: {line}  FDSE / plain {ratio:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("server", "gpu", "cpu"))
    what = parser.parse_args().what
    if what == "server":
        torch.set_num_threads(1)  # a second thread on a busy machine makes it many times slower
        for clients in (4, 50):
            print(f"{clients} clients: {server(clients):.2f} s", flush=True)
    elif what == "gpu":
        compare(torch.device("cuda"), (128,), 4, 500, (False, True))
    else:
        torch.set_num_threads(1)
        compare(torch.device("cpu"), (128,), 1, 100, (False,))


if __name__ == "__main__":
    main()
