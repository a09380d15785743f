"""Who moves together: batches of one size can be stacked, and clients have queues of batches of several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def joint_steps(queues: Sequence[Sequence[int]]) -> Iterator[tuple[int, list[int]]]:
    """Who moves together, step by step: the batch's size and the clients, given the sizes of everybody's batches in order.

    Next is the size of the next batch of whoever has most left (the more common size, then the larger, on a tie). So a
    short batch that ends an epoch costs a step more, not company for the rest of the queue, and short ones at the ends of
    queues wait for each other.

    >>> list(joint_steps([[32, 32, 6, 32], [32, 32, 32, 32]]))
    [(32, [0, 1]), (32, [0, 1]), (32, [1]), (6, [0]), (32, [0, 1])]
    """
    taken = [0] * len(queues)
    while True:
        sharing: dict[int, list[int]] = {}
        for k, (sizes, done) in enumerate(zip(queues, taken, strict=True)):
            if done < len(sizes):
                sharing.setdefault(sizes[done], []).append(k)
        if not sharing:
            return
        left = {size: max(len(queues[k]) - taken[k] for k in members) for size, members in sharing.items()}
        size = max(sharing, key=lambda size: (left[size], len(sharing[size]), size))
        yield size, sharing[size]
        for k in sharing[size]:
            taken[k] += 1
