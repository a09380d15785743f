"""Who moves together when clients have batches of different sizes."""

from __future__ import annotations

import pytest

from fedshift.core.batching import batch_sizes
from fedshift.engines.vmapped.grouping import joint_steps


@pytest.mark.parametrize("queues", [[], [[]], [[3, 3, 1], [], [3, 2]], [[1], [2], [3]], [[5, 5], [5, 5]]])
def test_everybody_goes_through_its_own_batches_in_order(queues: list[list[int]]) -> None:
    served: list[list[int]] = [[] for _ in queues]
    for size, members in joint_steps(queues):
        assert members
        for k in members:
            served[k].append(size)
    assert served == queues


def test_a_short_batch_costs_one_step_and_not_company() -> None:
    samples = (94, 177, 718, 766)  # of small domains; batches of 32, twenty steps
    queues = [(batch_sizes(n, 32) * 20)[:20] for n in samples]
    short = sum(size != 32 for queue in queues for size in queue)
    steps = list(joint_steps(queues))
    assert len(steps) <= 20 + short
    assert sum(len(members) == len(queues) for _, members in steps) >= 10


def test_short_batches_at_the_ends_wait_for_each_other() -> None:
    queues = [[8] * full + [3] for full in range(6)]
    steps = list(joint_steps(queues))
    assert len(steps) == 6
    assert steps[-1] == (3, list(range(6)))
