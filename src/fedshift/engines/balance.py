"""``[train] balance``: a client whose classes are unequally many trains as if they were not.

Four ways, all by the client's own counts of training labels. ``none`` leaves everything as it is. ``weights`` multiplies
the cross-entropy of a sample by the weight of its class, and ``softmax`` raises every logit by the log of its class's
count: both are added to a batch here, where :meth:`Method.cross_entropy` finds them. ``sampler`` changes which samples
come in which step, and no loss.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedshift.core import rng
from fedshift.core.context import Balance, Context, Phase
from fedshift.core.method import Batch, Method, Train
from fedshift.core.tree import Tree


def balance_of(train: Train, phase: Phase) -> Balance:
    """How a phase is balanced: in its own way, or in that of ``[train]``; what has no labels is not.

    >>> balance_of(Train(balance="weights"), Phase()), balance_of(Train(balance="weights"), Phase(balance="softmax"))
    ('weights', 'softmax')
    >>> balance_of(Train(balance="weights"), Phase(kind="fold"))
    'none'
    """
    if not _teaches(phase):
        return "none"
    return train.balance if phase.balance is None else phase.balance


def with_balance(method: Method, state: Tree, batch: Batch, phase: Phase) -> Batch:
    """The batch of a step, with what its cross-entropy needs to be balanced."""
    how = balance_of(method.train, phase)
    if how not in ("softmax", "weights"):
        return batch
    counts = state["now"]["histogram"]
    counts = F.pad(
        counts, (0, method.arch.classes - counts.shape[-1])
    )  # a network may know more classes than there are
    added = {"log-prior": log_prior(counts)} if how == "softmax" else {"class-weights": class_weights(counts)}
    return {**batch, **added}


def log_prior(counts: Tensor) -> Tensor:
    """Balanced softmax: what every logit is raised by in training, the log of its class's count plus one.

    A model trained with it and used without it has seen, in effect, balanced data. The one keeps classes that a client
    does not have finite. Equal counts change nothing.

    >>> log_prior(torch.tensor([0.0, 9.0])).exp().round()
    tensor([ 1., 10.])
    """
    return (counts + 1).log()


def class_weights(counts: Tensor) -> Tensor:
    """In proportion to ``1 / counts``, such that the mean over the client's samples is one.

    A class that the client does not have is weighed as if it had one sample; no sample asks for that.

    >>> class_weights(torch.tensor([3.0, 1.0, 0.0]))
    tensor([0.6667, 2.0000, 2.0000])
    """
    there = (counts > 0).sum().clamp(min=1)
    return counts.sum() / (there * counts.clamp(min=1))


def balanced_order(labels: Tensor, draws: int, seed: int) -> Tensor:
    """Positions of so many samples, of every class that is there equally often (one more of some, if it must be).

    Classes take turns: all come once, in any order, before one comes again. So do the samples of a class.

    >>> labels = torch.tensor([0, 0, 0, 0, 0, 0, 0, 2, 3])
    >>> labels[balanced_order(labels, 12, seed=0)].bincount()
    tensor([4, 0, 4, 4])
    """
    _, own, counts = labels.unique(return_inverse=True, return_counts=True)
    turns = -(-draws // len(counts))  # of every class
    passes = -(-turns // counts)  # of a class through its samples
    often = passes[own]
    position = torch.arange(len(labels)).repeat_interleave(often)
    number = torch.arange(len(position)) - (often.cumsum(0) - often)[position]  # of the pass
    keys = rng.bits(rng.seed_of(seed, "samples"), torch.arange(len(position)))
    ranked = np.lexsort((keys.numpy(), number.numpy(), own[position].numpy()))  # class by class, pass by pass
    queue = position[torch.from_numpy(ranked)]
    begins = (passes * counts).cumsum(0) - passes * counts
    classes = rng.permutations(rng.seed_of(seed, "classes"), turns, len(counts)).flatten()[:draws]
    return queue[begins[classes] + torch.arange(draws) // len(counts)]


def own_ways(method: Method, rounds: int) -> dict[str, Balance]:
    """The phases that a method balances in a way of its own, by name: ``[train] balance`` has no say in them.

    >>> from fedshift.core.registry import METHODS
    >>> from torch import nn
    >>> from fedshift.core.arch import Arch
    >>> arch = Arch.of(lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), (1, 2, 2))
    >>> own_ways(METHODS["fedthe"].make(arch=arch), rounds=1)
    {'generic': 'softmax', 'personal': 'none'}
    """
    there = [Context(number, rounds, 1) for number in range(rounds + method.extra_rounds)]
    phases = [phase for ctx in there for phase in method.phases(ctx)]
    phases += method.last_phases(Context(rounds, rounds, 1, "final"))
    return {phase.name: phase.balance for phase in phases if phase.balance is not None and _teaches(phase)}


def untouched(method: Method, rounds: int) -> str | None:
    """One sentence on the phases of a run in which ``[train] balance`` has no say, or None."""
    ways = own_ways(method, rounds)
    if method.train.balance == "none" or not ways:
        return None
    named = " and ".join(f"{name!r} (always {way!r})" for name, way in ways.items())
    return f"[train] balance has no say in its phase{'s' * (len(ways) > 1)} {named}"


def _teaches(phase: Phase) -> bool:
    return phase.kind == "train" and phase.labelled
