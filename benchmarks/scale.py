"""What a cluster and secret sums cost, measured in one run.

    python -m benchmarks.scale ray            engine ray with two workers against engine parallel with two, in turn
    python -m benchmarks.scale ray-gpu        a worker of engine ray that holds a GPU against engine vmapped here, in turn
    python -m benchmarks.scale ray-replies    a hundred models on their way back, by a worker's outbox and by fresh memory
    python -m benchmarks.scale secure         CPU of a party in a secure summation of 10 MB among 20

The network of ``ray`` and ``ray-gpu`` is the CNN of the FedTHE paper, the batch 32, the method FedAvg. ``ray-gpu`` has
clients, batches and settings of benchmarks/networks.py; exit code 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import closing
from typing import TypeVar

import numpy as np
import torch

from benchmarks import networks
from benchmarks.speed import make_method, make_task, one_round, rate
from fedshift.core.tree import unstack
from fedshift.engines.auto import compute_for
from fedshift.engines.base import Engine, Reply
from fedshift.engines.parallel import Parallel
from fedshift.engines.ray import Ray
from fedshift.engines.ray_worker import Outbox, SentReplies
from fedshift.engines.torch_flags import steady
from fedshift.engines.vmapped import Vmapped

T = TypeVar("T")


def ray(workers: int = 2, pairs: int = 9) -> None:
    torch.set_num_threads(1)
    clients, samples = 8, 128
    task, method, work = make_task(clients, samples), make_method(1), clients * samples
    device = torch.device("cpu")
    near, far = Parallel(workers=workers), Ray(workers=workers)
    try:
        found = in_turn([one_round(engine, method, task, device) for engine in (near, far)], work, pairs)
    finally:
        near.close()
        far.close()
    show(found, f"parallel, {workers} workers", f"ray, {workers} workers", "ray / parallel")


def ray_gpu(clients: int = 100, pairs: int = 9) -> None:
    """The worker is another process on the same GPU; it and this one never work at the same time."""
    if not torch.cuda.is_available():
        sys.exit(no_gpu("there is no GPU that torch can use here, and this measures a worker that holds one"))
    network, compute = networks.NETWORKS["cnn"], compute_for("cuda", "auto")
    work = clients * network.batches * networks.BATCH * networks.EPOCHS

    def rounds(engine: Engine) -> Callable[[], None]:
        go = networks.rounds_of(engine, network, clients, network.batches, networks.EPOCHS)

        def once() -> None:
            go()

        return once

    with steady(compute.tf32), closing(Vmapped(compute)) as near, closing(Ray(compute, workers=1)) as far:
        if not far.workers:
            sys.exit(no_gpu("torch sees a GPU here and Ray's cluster has none: is RAY_ADDRESS another machine's?"))
        found = in_turn([rounds(near), rounds(far)], work, pairs)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {clients} clients, {work:,} samples a round")
    show(found, "vmapped, in this process", "ray, a worker with a GPU", "ray / vmapped")


class Returning:
    """A worker that has trained already: all that is left is the way back."""

    def __init__(self, clients: int) -> None:
        torch.set_num_threads(1)
        model = networks.made(networks.NETWORKS["cnn"]).state_dict()
        self._stack = {name: leaf.expand(clients, *leaf.shape).clone() for name, leaf in model.items()}
        self._clients, self._outbox = clients, Outbox(pinned=False)

    def replies(self, fresh: bool) -> list[SentReplies]:
        singles = unstack({"model": self._stack}, self._clients)
        own = {f"client-{k}": Reply(single, {}, 0.0, 1, True) for k, single in enumerate(singles)}
        return SentReplies.of(own, Outbox(pinned=False) if fresh else self._outbox)


def ray_replies(clients: int = 100, pairs: int = 25) -> None:
    """In turn; the first ones, for which Ray's own store is fresh memory, do not count."""
    import ray as cores

    torch.set_num_threads(1)
    with closing(Ray(workers=1)):
        worker = cores.remote(Returning).remote(clients)

        def taken(fresh: bool) -> float:
            began = time.perf_counter()
            [sent] = cores.get(worker.replies.remote(fresh))
            sent.opened(torch.device("cpu"))
            return time.perf_counter() - began

        found = [(taken(True), taken(False)) for _ in range(pairs + 5)][5:]
    for name, seconds in zip(("fresh memory", "an outbox"), zip(*found, strict=True), strict=True):
        print(f"{clients} models of the cnn by {name:<12} {1000 * statistics.median(seconds):6.1f} ms")
    print(f"outbox / fresh memory, median of {pairs} pairs: {statistics.median(b / a for a, b in found):.2f}")


def no_gpu(sentence: str) -> int:
    print(sentence, file=sys.stderr)
    return 2


def in_turn(rounds: list[Callable[[], None]], work: int, pairs: int) -> list[tuple[float, float]]:
    """Samples per second of both, in turn and in the other order every second time: the machine is the same for both."""
    for one in rounds:
        rate(one, work, repeats=2)
    found = []
    for number in range(pairs):
        order = (0, 1) if number % 2 else (1, 0)
        rates = {which: rate(rounds[which], work, 2, 0) for which in order}
        found.append((rates[0], rates[1]))
    return found


def show(found: list[tuple[float, float]], near: str, far: str, quotient: str) -> None:
    for name, rates in zip((near, far), zip(*found, strict=True), strict=True):
        print(f"{name:<24} {statistics.median(rates):>11,.0f} samples/s")
    ratios = [theirs / ours for ours, theirs in found]
    between = f"{min(ratios):.2f} to {max(ratios):.2f}"
    print(f"{quotient}, median of {len(found)} pairs: {statistics.median(ratios):.2f} ({between})")


def secure(parties: int = 20, megabytes: int = 10, lost: int = 2) -> None:
    """Every message of every party, by the CPU seconds of its process."""
    from fedshift.privacy.secure_sum import Member, total_of  # a machine with a GPU need not have what it needs

    size = megabytes * 1_000_000 // 4
    spent = [0.0] * parties

    def by(party: int, work: Callable[[], T]) -> T:
        began = time.process_time()
        result = work()
        spent[party] += time.process_time() - began
        return result

    threshold = 2 * parties // 3 + 1
    vectors = [np.random.default_rng(k).integers(0, 2**32, size, dtype=np.uint32) for k in range(parties)]
    members = [by(k, lambda k=k: Member(k, threshold, b"benchmark")) for k in range(parties)]  # type: ignore[misc]
    keys = {k: by(k, members[k].advertise) for k in range(parties)}
    letters = {k: by(k, lambda k=k: members[k].share(keys)) for k in range(parties)}  # type: ignore[misc]
    received = {k: {sender: sent[k] for sender, sent in letters.items()} for k in range(parties)}
    there = range(parties - lost)  # the last ones are lost before they send
    masked = {k: by(k, lambda k=k: members[k].mask(keys, received[k], vectors[k])) for k in there}  # type: ignore[misc]
    opened = {k: by(k, lambda k=k: members[k].unmask(keys, received[k], masked)) for k in there}  # type: ignore[misc]
    began = time.process_time()
    total = total_of(keys, letters, masked, opened, threshold, b"benchmark")
    server = time.process_time() - began
    assert np.array_equal(total, np.sum([vectors[k] for k in there], axis=0, dtype=np.uint32))
    busy = [spent[k] for k in there]
    print(f"secure summation of {megabytes} MB among {parties} parties, {lost} of them lost")
    print(f"CPU of a party in a round: mean {statistics.mean(busy):.2f} s, most {max(busy):.2f} s")
    print(f"CPU of the server:         {server:.2f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts: dict[str, Callable[[], None]] = {
        "ray": ray,
        "ray-gpu": ray_gpu,
        "ray-replies": ray_replies,
        "secure": secure,
    }
    parser.add_argument("what", choices=parts)
    parts[parser.parse_args().what]()
