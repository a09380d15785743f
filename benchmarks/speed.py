"""How fast the engines are on a CPU, as ratios taken in one run; benchmarks/networks.py has those of a GPU.

    python benchmarks/speed.py cpu        sequential against a plain PyTorch loop, parallel against two bare processes
    python benchmarks/speed.py clients    10,000 and 1,000,000 clients: memory, and seconds until a round of 100 starts

The network is the CNN of the FedTHE paper (156,640 parameters), the batch 32, the method FedAvg.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from fedshift.core.arch import Arch
from fedshift.core.context import Context
from fedshift.core.method import Train
from fedshift.data.task import Client, Task
from fedshift.engines.base import Compute
from fedshift.engines.parallel import Parallel
from fedshift.engines.schedule import Plan
from fedshift.engines.sequential import Sequential
from fedshift.experiment.schema import MethodSpec
from fedshift.methods.fedavg import FedAvg
from fedshift.models.cnn import CNN
from fedshift.runs.session import Session
from fedshift.runs.setup import Setup

BATCH = 32


def make_task(clients: int, samples: int, shared: int = 0) -> Task:
    """Random images; with ``shared`` all clients draw from that many."""
    total = shared or clients * samples
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (total, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (total,), generator=generator)
    none = torch.zeros(0, dtype=torch.int64)
    owned = (torch.arange(clients * samples) % total).split(samples)
    return Task(
        images,
        labels,
        torch.arange(total),
        tuple("0123456789"),
        tuple(Client(f"client-{k:05d}", index, none, none) for k, index in enumerate(owned)),
    )


def make_method(epochs: int) -> FedAvg:
    arch = Arch.of(lambda: CNN(bias=False).make((3, 32, 32), 10), (3, 32, 32), "cnn")
    return FedAvg(arch=arch, train=Train(lr=0.01, batch_size=BATCH, local_epochs=epochs, weight_decay=5e-4))


def one_round(engine: object, method: FedAvg, task: Task, device: torch.device) -> Callable[[], None]:
    ctx = Context(0, 1, len(task.clients))
    model = {name: leaf.to(device) for name, leaf in method.arch.init(0).items()}
    downs = {client.name: {"model": model} for client in task.clients}

    def go() -> None:
        engine.train(method, downs, {}, task, Plan(method.phases(ctx), ctx, seed=0))  # type: ignore[attr-defined]
        if device.type == "cuda":
            torch.cuda.synchronize()

    return go


def rate(go: Callable[[], None], samples: int, repeats: int = 3, warm_up: int = 1) -> float:
    """Median samples per second."""
    for _ in range(warm_up):
        go()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        go()
        times.append(time.perf_counter() - started)
    return samples / statistics.median(times)


def _plain_loop(clients: int, samples: int) -> Callable[[], None]:
    """What everybody writes: one module, one optimiser, a loop over clients and batches."""
    task = make_task(clients, samples)
    model = CNN(bias=False).make((3, 32, 32), 10)
    start = {name: leaf.clone() for name, leaf in model.state_dict().items()}

    def go() -> None:
        uploads = []
        for client in task.clients:
            model.load_state_dict(start)
            optimiser = torch.optim.SGD(model.parameters(), lr=0.01, weight_decay=5e-4)
            for index in client.train[torch.randperm(samples)].split(BATCH):
                optimiser.zero_grad()
                x = task.images[index].float() / 255
                F.cross_entropy(model((x - 0.5) / 0.5), task.labels[index]).backward()
                optimiser.step()
            uploads.append({name: leaf.clone() for name, leaf in model.state_dict().items()})

    return go


def _bare(clients: int, samples: int, ready: object, start: object, out: object) -> None:
    torch.set_num_threads(1)
    go = _plain_loop(clients, samples)
    go()
    ready.release()  # type: ignore[attr-defined]
    start.wait()  # type: ignore[attr-defined]
    started = time.perf_counter()
    for _ in range(3):
        go()
    out.put(3 * clients * samples / (time.perf_counter() - started))  # type: ignore[attr-defined]


def bare_processes(clients: int, samples: int, count: int) -> float:
    context = multiprocessing.get_context("spawn")
    ready, start, out = context.Semaphore(0), context.Event(), context.Queue()
    workers = [context.Process(target=_bare, args=(clients // count, samples, ready, start, out)) for _ in range(count)]
    for worker in workers:
        worker.start()
    for _ in workers:
        ready.acquire()
    start.set()
    total = sum(out.get() for _ in workers)
    for worker in workers:
        worker.join()
    return total


def cpu() -> None:
    torch.set_num_threads(1)
    clients, samples = 4, 128
    task, method, work = make_task(clients, samples), make_method(1), clients * samples
    device = torch.device("cpu")
    plain, ours = _plain_loop(clients, samples), one_round(Sequential(), method, task, device)
    rate(plain, work), rate(ours, work)
    pairs = [(rate(plain, work, 1, 0), rate(ours, work, 1, 0)) for _ in range(5)]  # in turn: the same machine
    loop = statistics.median(p for p, _ in pairs)
    ratio = statistics.median(o / p for p, o in pairs)
    cores = len(os.sched_getaffinity(0))
    engine = Parallel(workers=cores)
    parallel = rate(one_round(engine, method, task, device), work, repeats=5, warm_up=2)
    bare = bare_processes(clients, samples, cores)
    engine.close()
    print(f"plain PyTorch loop      {loop:>9,.0f} samples/s")
    print(f"sequential              {loop * ratio:>9,.0f} samples/s   {ratio:.2f} of the plain loop")
    print(f"{cores} bare processes        {bare:>9,.0f} samples/s")
    print(f"parallel, {cores} workers     {parallel:>9,.0f} samples/s   {parallel / bare:.2f} of the bare processes")


def clients() -> None:
    """Many registered clients of whom a hundred take part: what they cost before anybody trains."""
    torch.set_num_threads(1)
    print(
        f"{'clients':>10} {'task':>8} {'first round':>12} {'next rounds':>12} {'round of 100':>15} {'beyond images':>14}"
    )
    for count in (10_000, 1_000_000):
        before, began = _resident(), time.perf_counter()
        task = make_task(count, 20, shared=50_000)
        made = time.perf_counter() - began
        method, began = make_method(1), time.perf_counter()
        setup = Setup(MethodSpec(name="fedavg"), {"cnn": method}, method.train)
        session = Session(setup, task, Sequential(), Compute(), 0, 100, 100 / count)
        state = session.start()
        waits, took = [], 0.0
        for _ in range(4):
            begun = session.begun(state)
            errand = session.errand(state, begun)
            waits.append(time.perf_counter() - began)
            replies = session.engine.train(method, errand.downs, errand.locals, session.training, errand.plan)
            took = time.perf_counter() - began
            state, _ = session.ended(state, begun, replies)
            began = time.perf_counter()
        later, grown = statistics.median(waits[1:]), _resident() - before - task.images.nbytes
        print(
            f"{count:>10,} {made:>6.1f} s {waits[0]:>10.2f} s {later:>10.2f} s {took:>13.2f} s {grown / 2**20:>10.0f} MiB",
            flush=True,
        )
        assert len(begun.clients) == 100


def _resident() -> int:
    """Bytes of this process in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["cpu", "clients"])
    parts = {"cpu": cpu, "clients": clients}
    parts[parser.parse_args().part]()
