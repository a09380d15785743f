"""How fast the engines are, as ratios taken in one run.

    python benchmarks/speed.py gpu        on a machine with a GPU: vmapped against sequential and against one pooled model
    python benchmarks/speed.py cpu        sequential against a plain PyTorch loop, parallel against two bare processes
    python benchmarks/speed.py clients    10,000 clients: memory, and the cost of a round by participants

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
from fedshift.engines.vmapped import Vmapped
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
    owned = [(torch.arange(samples) + k * samples) % total for k in range(clients)]
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


def pooled_rate(clients: int, steps: int, compiled: bool) -> float:
    """One model on the pooled batch, its step captured in a graph: the ceiling."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    model = CNN(bias=False).make((3, 32, 32), 10).to(device)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01, weight_decay=5e-4)
    size = clients * BATCH
    images = torch.randint(0, 256, (4 * size, 3, 32, 32), dtype=torch.uint8, device=device)
    labels = torch.randint(0, 10, (4 * size,), device=device)
    orders = torch.randperm(4 * size, device=device).view(4, size)
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

    def go() -> None:
        for number in range(steps):
            index.copy_(orders[number % 4])
            graph.replay()
        torch.cuda.synchronize()

    return rate(go, steps * size)


def gpu(tf32: bool = False) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda")
    compute = Compute(device, tf32=tf32)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "TF32" if tf32 else "fp32")
    print(f"{'clients':>8} {'engine':<22} {'samples/s':>11} {'x sequential':>13} {'of pooled':>10}")
    for clients in (20, 100):
        samples, epochs = 1792, 5  # 56 full batches, as the pooled model has
        whole = make_task(clients, samples)
        method = make_method(epochs)
        few = make_task(clients, 160)
        base = rate(one_round(Sequential(compute), make_method(1), few, device), clients * 160, repeats=2)
        rows = {"sequential": base}
        work = clients * samples * epochs
        rows["vmapped, graph"] = rate(one_round(Vmapped(compute), method, whole, device), work)
        rows["vmapped, compile+graph"] = rate(
            one_round(Vmapped(compute, compile_step=True), method, whole, device), work
        )
        rows["pooled, graph"] = pooled_rate(clients, 100, compiled=False)
        rows["pooled, compile+graph"] = pooled_rate(clients, 100, compiled=True)
        for name, value in rows.items():
            print(
                f"{clients:>8} {name:<22} {value:>11,.0f} {value / base:>13.1f} {value / rows['pooled, graph']:>10.2f}"
            )


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
    clients, samples = 8, 512
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
    torch.set_num_threads(1)
    count = 10_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    task = make_task(count, 20, shared=50_000)
    print(f"{count:,} clients of 20 samples: task made in {time.perf_counter() - started:.2f} s")
    method = make_method(1)
    for share in (0.005, 0.01, 0.02, 0.04):
        session = Session(
            Setup(MethodSpec(name="fedavg"), {"cnn": method}, method.train),
            task,
            Sequential(),
            Compute(),
            0,
            100,
            share,
        )
        state = session.start()
        times, gaps = [], []
        for _ in range(3):
            began = time.perf_counter()
            state, report = session.step(state)
            times.append(time.perf_counter() - began)
            gaps.append(times[-1] - report.seconds)
        each = statistics.median(times) / report.participants
        print(
            f"{report.participants:>5} participants: {statistics.median(times):6.2f} s a round, {1e3 * each:.2f} ms each, "
            f"{1e3 * max(gaps):.1f} ms between rounds, {len(state.locals)} private states"
        )
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"peak memory grew by {(after - before) / 1024:.0f} MiB, {task.images.nbytes / 2**20:.0f} of them images")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["gpu", "gpu-tf32", "cpu", "clients"])
    parts = {"gpu": gpu, "gpu-tf32": lambda: gpu(tf32=True), "cpu": cpu, "clients": clients}
    parts[parser.parse_args().part]()
