"""Stacked clients against one pooled model, network by network. Needs a GPU.

    python benchmarks/networks.py                      all networks, 20 and 100 clients, and the plain loop beside them
    python benchmarks/networks.py resnet18 -n 100      one of them
    python benchmarks/networks.py cnn --profile        where the time of a step goes

Settings are those of ``fedshift run``: precision ``auto``, which is TF32, and the engine that ``auto`` picks. Pooled is one
network on everybody's batches at once, its step captured in a graph, with torch.compile or without, whichever is faster;
it is the same network with the same optimiser, but it learns nothing about clients.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fedshift.core.arch import Arch
from fedshift.core.context import Context
from fedshift.core.method import Train
from fedshift.data.task import Client, Task
from fedshift.engines.auto import compute_for, engine_for
from fedshift.engines.base import Engine
from fedshift.engines.schedule import Plan
from fedshift.engines.sequential import Sequential
from fedshift.engines.torch_flags import steady
from fedshift.engines.vmapped import Vmapped
from fedshift.methods.fedavg import FedAvg
from fedshift.models.alexnet import AlexNet
from fedshift.models.cct import CCT4
from fedshift.models.cnn import CNN
from fedshift.models.lenet import LeNet
from fedshift.models.resnet import ResNet18, ResNet20GN
from fedshift.models.vit import ViT

BATCH, CLASSES, IMAGES = 32, 10, 4096
LR, DECAY = 0.01, 5e-4


class Network(NamedTuple):
    """A network, the side of its images, and how many batches clients have."""

    model: Any
    side: int
    batches: int


NETWORKS = {
    "cnn": Network(CNN(bias=False), 32, 28),
    "lenet": Network(LeNet(), 32, 20),
    "resnet20-gn": Network(ResNet20GN(), 32, 4),
    "resnet18": Network(ResNet18(), 64, 4),
    "alexnet": Network(AlexNet(), 128, 4),
    "cct4": Network(CCT4(), 32, 6),
    "vit": Network(ViT(), 32, 4),
}
EPOCHS = 5


def made(network: Network) -> nn.Module:
    module: nn.Module = network.model.make((3, network.side, network.side), CLASSES)
    return module


def task_of(network: Network, clients: int, batches: int) -> Task:
    """Random images, of which clients have some in common; batches are all full, as the pooled model's are."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (IMAGES, 3, network.side, network.side), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, CLASSES, (IMAGES,), generator=generator)
    none = torch.zeros(0, dtype=torch.int64)
    owned = enumerate((torch.arange(clients * batches * BATCH) % IMAGES).split(batches * BATCH))
    owners = tuple(Client(f"client-{k:03d}", own, none, none) for k, own in owned)
    return Task(images, labels, torch.arange(len(images)), tuple("0123456789"), owners)


def rounds_of(engine: Engine, network: Network, clients: int, batches: int, epochs: int) -> Callable[[], int]:
    """A round of FedAvg's local work; gives the number of samples."""
    shape = (3, network.side, network.side)
    arch = Arch.of(lambda: network.model.make(shape, CLASSES), shape, "network")
    method = FedAvg(arch=arch, train=Train(lr=LR, batch_size=BATCH, local_epochs=epochs, weight_decay=DECAY))
    task, ctx = task_of(network, clients, batches), Context(0, 1, clients)
    model = {name: leaf.to("cuda") for name, leaf in arch.init(0).items()}
    downs = {client.name: {"model": model} for client in task.clients}

    def go() -> int:
        engine.train(method, downs, {}, task, Plan(method.phases(ctx), ctx, seed=0))
        torch.cuda.synchronize()
        return clients * batches * BATCH * epochs

    return go


def pooled(network: Network, clients: int, compiled: bool, steps: int = 20) -> Callable[[], int]:
    """One model on everybody's batches at once."""
    torch.manual_seed(0)
    model, size = made(network).cuda(), clients * BATCH
    optimiser = torch.optim.SGD(model.parameters(), lr=LR, weight_decay=DECAY)
    images = torch.randint(0, 256, (4 * size, 3, network.side, network.side), dtype=torch.uint8, device="cuda")
    labels = torch.randint(0, CLASSES, (4 * size,), device="cuda")
    orders = torch.randperm(4 * size, device="cuda").view(4, size)
    index = orders[0].clone()

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model((x - 0.5) / 0.5), y)

    loss_fn = torch.compile(loss_of) if compiled else loss_of

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        loss_fn(images[index].float() / 255, labels[index]).backward()
        optimiser.step()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    optimiser.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        step()

    def go() -> int:
        for number in range(steps):
            index.copy_(orders[number % 4])
            graph.replay()
        torch.cuda.synchronize()
        return steps * size

    return go


def rate(go: Callable[[], int], repeats: int = 3) -> float:
    """Median samples per second, after one call that warms up."""
    go()
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        samples = go()
        found.append(samples / (time.perf_counter() - began))
    return statistics.median(found)


def freed() -> None:
    gc.collect()
    torch._dynamo.reset()
    torch.cuda.empty_cache()


def vmapped_rate(network: Network, clients: int, rows: int, compiled: bool = False) -> tuple[float, str]:
    """Samples per second of the engine that ``fedshift run`` takes, and how it convolved; with ``rows`` a profile."""
    compute = compute_for("cuda", "auto")
    engine = Vmapped(compute, compile_step=True) if compiled else engine_for("auto", compute, True, clients)[1]
    go = rounds_of(engine, network, clients, network.batches, EPOCHS)
    found = rate(go, repeats=2)
    if rows:
        show(go, network.batches * EPOCHS, rows)
    ways = "+".join(sorted(engine.convolutions))  # type: ignore[attr-defined]
    engine.close()
    return found, ways


def show(go: Callable[[], int], steps: int, rows: int) -> None:
    """The kernels that take longest, in microseconds of a step."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        go()
    events = [event for event in found.key_averages() if event.self_device_time_total > 0]
    events.sort(key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in events)
    print(f"  kernels {total / steps:.0f} us a step, {sum(event.count for event in events) / steps:.0f} of them")
    for event in events[:rows]:
        each = event.self_device_time_total / steps
        print(f"  {each:8.0f} us {event.count / steps:6.1f} x  {event.key[:100]}", flush=True)


def loop_rate(network: Network, clients: int) -> float:
    """Samples per second of a plain eager loop over clients."""
    engine = Sequential(compute_for("cuda", "auto"))
    return rate(rounds_of(engine, network, min(clients, 10), 2, 1), repeats=2)


def main() -> None:
    """Print the table, a row at a time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", metavar="network", help=", ".join(NETWORKS))
    parser.add_argument("-n", "--clients", type=int, action="append")
    parser.add_argument("--profile", type=int, nargs="?", const=12, default=0, metavar="ROWS")
    parser.add_argument("--no-loop", action="store_true", help="nor the plain loop")
    parser.add_argument("--no-compile", action="store_true", help="the pooled model without torch.compile")
    parser.add_argument("--long", action="store_true", help="ours with torch.compile, as very long runs may have it")
    parser.add_argument("--prepare", action="store_true", help="compile pooled models into torch's cache, time nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names, sizes = options.networks or list(NETWORKS), options.clients or [20, 100]
    with steady(tf32=True):
        if options.prepare:
            for name in names:
                for clients in sizes:
                    if options.long:
                        vmapped_rate(NETWORKS[name], clients, 0, compiled=True)
                    else:
                        pooled(NETWORKS[name], clients, compiled=True, steps=1)()
                    freed()
            return
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; thousands of samples per second")
        print(
            f"{'network':<12}{'clients':>8}{'loop':>8}{'graph':>8}{'compiled':>9}{'ours':>8}{'of pooled':>10}{'x loop':>8}"
        )
        for name in names:
            for clients in sizes:
                network = NETWORKS[name]
                loop = float("nan") if options.no_loop else loop_rate(network, clients)
                ours, ways = vmapped_rate(network, clients, options.profile, options.long)
                freed()
                graph = rate(pooled(network, clients, compiled=False))
                freed()
                compiled = 0.0 if options.no_compile else rate(pooled(network, clients, compiled=True))
                freed()
                cells = f"{loop / 1e3:>8.1f}{graph / 1e3:>8.1f}{compiled / 1e3:>9.1f}{ours / 1e3:>8.1f}"
                shares = f"{ours / max(graph, compiled):>10.2f}{ours / loop:>8.1f}"
                print(f"{name:<12}{clients:>8}{cells}{shares}  {ways}", flush=True)


if __name__ == "__main__":
    main()
