"""What an actor of Ray's cluster is, and how things travel to it: as arrays, which a node's processes map together."""

from __future__ import annotations

import os
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from fedshift.core.tree import Tree, map_tree, unstack
from fedshift.data.task import Task
from fedshift.engines import shipping
from fedshift.engines.base import Compute, Engine, Reply, Score
from fedshift.engines.dealing import joined
from fedshift.engines.pulse import heard
from fedshift.engines.schedule import Plan
from fedshift.engines.sequential import Sequential
from fedshift.engines.torch_flags import steady
from fedshift.engines.vmapped import Vmapped

Arrays: TypeAlias = dict[str, dict[str, NDArray[Any]]]
KEPT = 8  # methods and adapters that are remembered
TASKS = 2  # beside them: Centralised trains on one and tests on another


class Shipped(NamedTuple):
    """Something in Ray's object store, under a key that is nobody else's."""

    key: str
    ref: Any

    @staticmethod
    def of(ref: Any) -> Shipped:
        """With a new key."""
        return Shipped(uuid.uuid4().hex, ref)


class Known:
    """What was sent, here and at an actor, as long as it is in use: every validation comes with adapters of its own, and
    images are large.

    >>> known = Known()
    >>> [known.task(key, lambda: object()) is known.task(key, lambda: object()) for key in "abc"]
    [True, True, True]
    """

    def __init__(self) -> None:
        self._things: dict[Hashable, Any] = {}
        self._tasks: dict[Hashable, Any] = {}

    def thing(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """A method or an adapter."""
        return _used(self._things, key, make, KEPT)

    def task(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """A task, or what stands for it."""
        return _used(self._tasks, key, make, TASKS)


def _used(known: dict[Hashable, Any], key: Hashable, make: Callable[[], Any], most: int) -> Any:
    """What is known or made now; of the others those that were used last are kept."""
    if key not in known:
        while len(known) >= most:  # before: what comes may need the room
            del known[next(iter(known))]
        known[key] = make()
    known[key] = known.pop(key)
    return known[key]


class Boxed(NamedTuple):
    """A task as it travels: images as arrays that can be mapped, all the rest as it is pickled."""

    images: NDArray[Any]
    shifted: Mapping[str, NDArray[Any]]  # by stream
    rest: bytes


def boxed(task: Task) -> Boxed:
    """A task, ready to travel."""
    shifted = {name: stream.images.cpu().numpy() for name, stream in task.streams.items() if stream.images is not None}
    bare = {name: replace(stream, images=None) for name, stream in task.streams.items()}
    rest = replace(task, images=torch.zeros(0), streams=bare)
    return Boxed(task.images.cpu().numpy(), shifted, shipping.dumps(rest))


def unboxed(box: Boxed) -> Task:
    """The task again; its images are where the box is."""
    rest: Task = shipping.loads(box.rest)
    streams = {
        name: replace(stream, images=_mapped(box.shifted[name])) if name in box.shifted else stream
        for name, stream in rest.streams.items()
    }
    return replace(rest, images=_mapped(box.images), streams=streams)


def _mapped(array: NDArray[Any]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nobody may write there: nobody does
        return torch.from_numpy(array)


def arrays_of(tree: Tree) -> Arrays:
    """A tree as it travels.

    >>> tree_of(arrays_of({"model": {"n": torch.tensor(3)}}))
    {'model': {'n': tensor(3)}}
    """
    return {slot: {name: leaf.detach().cpu().numpy() for name, leaf in own.items()} for slot, own in tree.items()}


def tree_of(arrays: Mapping[str, Mapping[str, NDArray[Any]]], device: torch.device | None = None) -> Tree:
    """The tree again, with memory of its own; a GPU's is filled from where the arrays are."""

    def own(leaf: NDArray[Any]) -> torch.Tensor:
        here = device is None or device.type == "cpu"
        return torch.from_numpy(np.array(leaf)) if here else _mapped(leaf).to(device)

    return {slot: {name: own(leaf) for name, leaf in leaves.items()} for slot, leaves in arrays.items()}


@dataclass(frozen=True)
class SentReplies:
    """Replies of clients whose trees are alike, as they travel: a leaf of all of them is one array, which moves at once."""

    clients: tuple[str, ...]
    up: Arrays
    local: Arrays
    rest: tuple[tuple[float, int, bool], ...]  # loss, steps, whether it is finite

    @staticmethod
    def of(replies: Mapping[str, Reply]) -> list[SentReplies]:
        """Ready to travel.

        >>> reply = Reply({"model": {"n": torch.tensor(3)}}, {}, 0.0, 1, True)
        >>> [sent] = SentReplies.of({"a": reply, "b": reply})
        >>> sent.opened(torch.device("cpu"))["b"].up
        {'model': {'n': tensor(3)}}
        """
        alike: dict[object, dict[str, Reply]] = {}
        for name, reply in replies.items():
            alike.setdefault((_form(reply.up), _form(reply.local)), {})[name] = reply
        return [
            SentReplies(
                tuple(group),
                arrays_of(_together([reply.up for reply in group.values()])),
                arrays_of(_together([reply.local for reply in group.values()])),
                tuple((reply.loss, reply.steps, reply.finite) for reply in group.values()),
            )
            for group in alike.values()
        ]

    def opened(self, device: torch.device) -> dict[str, Reply]:
        """The replies again; what clients keep has memory of its own, because it stays when the rest is gone."""
        ups, kept = (unstack(tree_of(arrays, device), len(self.clients)) for arrays in (self.up, self.local))
        own = [map_tree(torch.clone, local) for local in kept]
        return {
            n: Reply(up, local, *rest) for n, up, local, rest in zip(self.clients, ups, own, self.rest, strict=True)
        }


def _together(trees: Sequence[Tree]) -> Tree:
    """Stacked and away from a GPU leaf by leaf, so that no more than one is there twice."""
    return map_tree(lambda *leaves: torch.stack(leaves).cpu(), *trees)


def _form(tree: Tree) -> tuple[object, ...]:
    """What must agree to travel together: types and empty slots too, which ``shapes`` does not tell."""
    return tuple((slot, tuple((n, x.shape, x.dtype) for n, x in leaves.items())) for slot, leaves in tree.items())


def _follow_parent() -> None:
    """End when the node's own process has ended: a worker whose cluster was killed would wait for ever."""
    parent = os.getppid()

    def follow() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


class Worker:
    """An actor: one torch thread, and the engine that suits what it holds."""

    def __init__(self, compute: Compute) -> None:
        _follow_parent()
        self._settings = ExitStack()  # held: with it they would end
        self._settings.enter_context(steady(compute.tf32))
        self._compute = compute
        self._engine: Engine = Vmapped(compute) if compute.device.type == "cuda" else Sequential(compute)
        self._known = Known()

    def ready(self) -> bool:
        """That it is there."""
        return True

    def train(
        self,
        how: str,
        method: bytes,
        where: str,
        box: Boxed,
        common: Arrays,
        own: Mapping[str, Arrays],
        kept: Mapping[str, Arrays],
        plan: Plan,
    ) -> tuple[list[SentReplies], int]:
        """The work of some clients, and how many samples it was."""
        downs, locals = self._whole(own, common), {name: self._tree(tree) for name, tree in kept.items()}
        made = self._known.thing(how, lambda: shipping.loads(method))
        beats = list[int]()
        with heard(beats.append):
            replies = self._engine.train(made, downs, locals, self._known.task(where, lambda: unboxed(box)), plan)
        return SentReplies.of(replies), sum(beats)

    def evaluate(
        self,
        how: str,
        adapter: bytes,
        where: str,
        box: Boxed,
        common: Arrays,
        own: Mapping[str, Arrays],
        parts: Sequence[str],
        seed: int,
    ) -> tuple[dict[tuple[str, str], Score], int]:
        """The scores of some clients, and how many samples were looked at."""
        made = self._known.thing(how, lambda: shipping.loads(adapter))
        deployed, beats = self._whole(own, common), list[int]()
        with heard(beats.append):
            scores = self._engine.evaluate(made, deployed, self._known.task(where, lambda: unboxed(box)), parts, seed)
        return scores, sum(beats)

    def _whole(self, own: Mapping[str, Arrays], common: Arrays) -> dict[str, Tree]:
        shared = self._tree(common)  # once, so that engines see that it is one and the same
        return {name: joined(self._tree(tree), shared) for name, tree in own.items()}

    def _tree(self, arrays: Arrays) -> Tree:
        return tree_of(arrays, self._compute.device)
