"""What the server looks at before it uses a reply: that it is from whom it says, of the shape it must have, and sane.

What a reply must look like is not learnt from replies, of which one may be forged: the server does one step of the client's
work itself, on a blank image. ``fedshift deploy check`` shows a party the same list before anything trains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median_low

import torch
from torch import Tensor

from fedshift.core.context import Context, Phase
from fedshift.core.method import Method
from fedshift.core.tree import Tree, all_finite, drop
from fedshift.data.task import Client, Task
from fedshift.deploy.packet import Packet
from fedshift.engines.base import Compute
from fedshift.engines.reference import first_local, settle, work
from fedshift.engines.schedule import Plan
from fedshift.errors import UserError
from fedshift.runs.setup import Setup


@dataclass(frozen=True)
class Entry:
    """One tensor of a reply."""

    slot: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """What it costs on the wire."""
        return self.dtype.itemsize * int(torch.Size(self.shape).numel())

    def __str__(self) -> str:
        return f"{self.slot}/{self.name}"


def entries(tree: Tree) -> dict[tuple[str, str], Entry]:
    """All tensors of a tree, by slot and name."""
    return {
        (slot, name): Entry(slot, name, tuple(leaf.shape), leaf.dtype)
        for slot, leaves in tree.items()
        for name, leaf in leaves.items()
    }


def rehearsed(
    method: Method, setup: Setup, network: str, task: Task, client: Client, seed: int, ctx: Context, down: Tree
) -> Tree:
    """What a client would send in this stage: one step of each phase, on few of the client's images.

    Only its slots, names, shapes and types mean something.
    """
    compute = Compute(dtype=_dtype(down))
    few = replace(client, train=client.train[: 2 * setup.train.batch_size], val=client.val[:2], test=client.test[:2])
    short = tuple(_short(phase) for phase in (method.last_phases(ctx) if ctx.ending else method.phases(ctx)))
    initial = setup.initial(seed, compute)[network]
    local = first_local(method, initial, task, few, seed, ctx)
    # what a client that took part from the start would have from earlier stages
    earlier = drop(initial, (*down.get("model", {}), *local.get("model", {}))) if local or down.get("model") else {}
    local = {**local, "model": {**earlier, **local.get("model", {})}} if earlier else local
    does = settle if ctx.ending else work
    return does(method, down, local, few, task, Plan(short, ctx, seed), compute).up


def _short(phase: Phase) -> Phase:
    return phase if phase.kind == "fold" else replace(phase, epochs=None, steps=1)


def _dtype(tree: Tree) -> torch.dtype:
    floats = (leaf.dtype for leaves in tree.values() for leaf in leaves.values() if leaf.is_floating_point())
    return next(floats, torch.float32)


# ---- one reply -----------------------------------------------------------------------------------------------------------
def check_sender(reply: Packet, asked: Packet) -> None:
    """A reply must come from whom it was asked of, and answer what was asked."""
    for key in ("federation", "client", "round"):
        if reply.facts.get(key) != asked.facts.get(key):
            raise UserError(f"it says {key} {reply.facts.get(key)!r}, but {asked.facts.get(key)!r} was asked")
    if reply.kind != asked.kind:
        raise UserError(f"it answers {reply.kind!r}, but {asked.kind!r} was asked")


def check_shape(tree: Tree, expected: Tree) -> None:
    """A reply must have the tensors that it must have, and no others."""
    found, wanted = entries(tree), entries(expected)
    for key, entry in wanted.items():
        if key not in found:
            raise UserError(f"it lacks {entry}")
        if found[key] != entry:
            got = found[key]
            raise UserError(f"its {entry} is {got.dtype} {list(got.shape)}, not {entry.dtype} {list(entry.shape)}")
    if extra := [entry for key, entry in found.items() if key not in wanted]:
        raise UserError(f"it has {extra[0]}, which was not asked for")
    if not all_finite(tree):
        raise UserError("it has numbers that are not finite")


# ---- all replies of a round ----------------------------------------------------------------------------------------------
def absurd(replies: Mapping[str, Tree], downs: Mapping[str, Tree], factor: float) -> dict[str, str]:
    """Whose tensors are so large that they cannot be honest, and why.

    The norm of a slot is compared with what went down under that name and with the lower median of all replies: it may be
    ``factor`` times as large as the larger of them (and one).

    >>> fine, huge = {"model": {"w": torch.ones(4)}}, {"model": {"w": torch.full((4,), 1e6)}}
    >>> list(absurd({"a": fine, "b": huge, "c": fine}, dict.fromkeys("abc", fine), 100.0))
    ['b']
    """
    norms = {name: {slot: _norm(leaves) for slot, leaves in tree.items()} for name, tree in replies.items()}
    found: dict[str, str] = {}
    for name, own in norms.items():
        for slot, norm in own.items():
            usual = median_low([other[slot] for other in norms.values() if slot in other])
            most = factor * max(1.0, usual, _norm(downs[name].get(slot, {})))
            if norm > most:
                found[name] = f"the norm of its {slot} is {norm:.3g}, more than {most:.3g}"
    return found


def _norm(leaves: Mapping[str, Tensor]) -> float:
    squares = [float(leaf.double().square().sum()) for leaf in leaves.values() if leaf.is_floating_point()]
    return math.sqrt(sum(squares))
