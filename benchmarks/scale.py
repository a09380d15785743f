"""What a cluster and secret sums cost, measured in one run.

    python -m benchmarks.scale ray        engine ray with two workers against engine parallel with two, in turn
    python -m benchmarks.scale secure     CPU of a party in a secure summation of 10 MB among 20

The network of ``ray`` is the CNN of the FedTHE paper, the batch 32, the method FedAvg.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

from benchmarks.speed import make_method, make_task, one_round, rate
from fedshift.engines.parallel import Parallel
from fedshift.engines.ray import Ray
from fedshift.privacy.secure_sum import Member, total_of

T = TypeVar("T")


def ray(workers: int = 2, pairs: int = 9) -> None:
    torch.set_num_threads(1)
    clients, samples = 8, 128
    task, method, work = make_task(clients, samples), make_method(1), clients * samples
    device = torch.device("cpu")
    near, far = Parallel(workers=workers), Ray(workers=workers)
    try:
        rounds = [one_round(engine, method, task, device) for engine in (near, far)]
        for one in rounds:
            rate(one, work, repeats=2)
        # in turn, and in the other order every second time: the machine is the same for both
        found = []
        for number in range(pairs):
            order = (0, 1) if number % 2 else (1, 0)
            one = {which: rate(rounds[which], work, 2, 0) for which in order}
            found.append((one[0], one[1]))
    finally:
        near.close()
        far.close()
    ratio = statistics.median(theirs / ours for ours, theirs in found)
    print(f"parallel, {workers} workers   {statistics.median(ours for ours, _ in found):>9,.0f} samples/s")
    print(f"ray, {workers} workers        {statistics.median(theirs for _, theirs in found):>9,.0f} samples/s")
    print(f"ray / parallel, median of {pairs} pairs: {ratio:.2f}")


def secure(parties: int = 20, megabytes: int = 10, lost: int = 2) -> None:
    """Every message of every party, by the CPU seconds of its process."""
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
    parser.add_argument("what", choices=("ray", "secure"))
    {"ray": ray, "secure": secure}[parser.parse_args().what]()
