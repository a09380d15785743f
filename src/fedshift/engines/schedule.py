"""The batch plan: which samples a client sees in which step, and the random tensors that come with them.

Everything here is a pure function of (run seed, round, client, purpose), so that every engine, a resumed run and a
client on another machine do exactly the same work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedshift.core import rng
from fedshift.core.arch import Arch
from fedshift.core.batching import batch_sizes
from fedshift.core.context import Context, Phase, RandomSpec
from fedshift.core.method import Train
from fedshift.engines.balance import balanced_order


@dataclass(frozen=True)
class Plan:
    """What the engine is asked to do with every client it is given."""

    phases: tuple[Phase, ...]
    ctx: Context
    seed: int

    def seed_for(self, client: str, *purpose: object) -> int:
        """The seed of one purpose at one client in this round."""
        moment: object = "final" if self.ctx.ending else self.ctx.round
        return rng.seed_of(self.seed, moment, client, *purpose)


def batches(
    n: int, phase: Phase, train: Train, seed: int, no_singles: bool, labels: Tensor | None = None
) -> tuple[Tensor, list[int]]:
    """Positions 0..n-1 in the order in which they are used, and how many belong to each step.

    A short last batch is kept by default; ``drop`` leaves it out unless it is the only one; ``wrap`` fills it from the
    start of the epoch. With ``no_singles`` a last batch of one sample joins the one before it, because one sample has
    no batch statistics. With ``labels`` (of the n) every class comes equally often, in as many batches of the same sizes.

    >>> batches(70, Phase(epochs=1), Train(batch_size=32), seed=0, no_singles=False)[1]
    [32, 32, 6]
    >>> batches(65, Phase(epochs=1), Train(batch_size=32), seed=0, no_singles=True)[1]
    [32, 33]
    """
    if n == 0:
        return torch.zeros(0, dtype=torch.int64), []
    if phase.kind == "fold":  # a fold looks at every sample once, in order
        return torch.arange(n), _sizes(n, replace(train, last_batch="keep"), no_singles=False)
    sizes = _sizes(n, train, no_singles)
    steps = phase.steps
    if steps is None and phase.epochs is None:
        steps = train.local_steps
    if steps is None:
        epochs = train.local_epochs if phase.epochs is None else phase.epochs
        steps = epochs * len(sizes)
    else:
        epochs = -(-steps // len(sizes))
    if labels is not None:
        sizes = (sizes * epochs)[:steps]
        return balanced_order(labels, sum(sizes), seed), sizes
    orders = rng.permutations(seed, epochs, n)
    used = sum(sizes)  # of each epoch: fewer than n if the last batch is dropped, more if it is filled up
    orders = orders[:, :used] if used <= n else torch.cat([orders, orders[:, : used - n]], dim=1)
    sizes = (sizes * epochs)[:steps]
    return orders.flatten()[: sum(sizes)], sizes


def work_of(n: int, phase: Phase, train: Train) -> int:
    """About how many samples a client with n of them works on in a phase.

    >>> work_of(70, Phase(epochs=2), Train()), work_of(70, Phase(steps=3), Train(batch_size=32))
    (140, 96)
    """
    if phase.kind == "fold" or n == 0:
        return n
    steps = train.local_steps if phase.steps is None and phase.epochs is None else phase.steps
    if steps is not None:
        return steps * min(n, train.batch_size)
    return n * (train.local_epochs if phase.epochs is None else phase.epochs)


def _sizes(n: int, train: Train, no_singles: bool) -> list[int]:
    """The batch sizes of one epoch."""
    full, rest = divmod(n, train.batch_size)
    if train.last_batch == "keep" or full == 0:
        return batch_sizes(n, train.batch_size, no_singles)
    return [train.batch_size] * (full + (rest > 0 and train.last_batch == "wrap"))


def fitting(phase: Phase, arch: Arch, size: int) -> Phase:
    """The phase for a batch of this size: one sample alone is normalised with the running statistics."""
    return replace(phase, batch_stats=False) if size == 1 and arch.has_batch_norm and phase.batch_stats else phase


def draw(
    wanted: Mapping[str, RandomSpec],
    seeds: Mapping[str, int | Tensor],
    ids: Tensor,
    dtype: torch.dtype,
    step: int | Tensor = 0,
) -> dict[str, Tensor]:
    """The random tensors of one step: ``[len(ids), *shape]`` per name, a function of (seed, step, id) alone."""
    result: dict[str, Tensor] = {}
    for name, wish in wanted.items():
        keys = ids + step * (1 << 24)
        if wish.kind == "integers":
            result[name] = rng.integers(seeds[name], keys, wish.high, wish.shape)
        else:
            result[name] = getattr(rng, wish.kind)(seeds[name], keys, wish.shape).to(dtype)
    return result


def seeds_for(wanted: Sequence[str], plan: Plan, client: str, phase: Phase) -> dict[str, int]:
    """One seed per draw of a phase."""
    return {name: plan.seed_for(client, phase.name, "draw", name) for name in wanted}
