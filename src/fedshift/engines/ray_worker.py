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

import fedshift
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


class Outbox:
    """Memory by which replies leave a worker, the same in every round: fresh memory costs a page fault for every few
    kilobytes, which can take many times as long as the copying. A GPU's is pinned, so that it is filled at full speed.

    What was laid out is another's as soon as the box is cleared. Ray has stored an answer before it asks for the next one.

    >>> outbox = Outbox(pinned=False)
    >>> outbox.stacked([torch.tensor([1, 2]), torch.tensor([3, 4])]).tolist()
    [[1, 2], [3, 4]]
    """

    ALIGNED = 64  # bytes

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._taken = 0

    def clear(self) -> None:
        """Begin again with all of the memory."""
        self._taken = 0

    def stacked(self, leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        """The leaves of all clients as one, away from a GPU."""
        leaves = [leaf.detach() for leaf in leaves]
        first = leaves[0]
        room = self._room(len(leaves) * first.numel() * first.element_size())
        whole = room.view(first.dtype).view(len(leaves), *first.shape)
        return whole.copy_(torch.stack(leaves)) if first.is_cuda else torch.stack(leaves, out=whole)

    def _room(self, size: int) -> torch.Tensor:
        if self._taken + size > len(self._memory):  # what was laid out keeps the old memory as long as it needs it
            length = max(size, 2 * len(self._memory))
            self._memory, self._taken = torch.empty(length, dtype=torch.uint8, pin_memory=self._pinned), 0
        room = self._memory[self._taken : self._taken + size]
        self._taken += -(-size // self.ALIGNED) * self.ALIGNED
        return room


@dataclass(frozen=True)
class SentReplies:
    """Replies of clients whose trees are alike, as they travel: a leaf of all of them is one array, which moves at once."""

    clients: tuple[str, ...]
    up: Arrays
    local: Arrays
    rest: tuple[tuple[float, int, bool], ...]  # loss, steps, whether it is finite

    @staticmethod
    def of(replies: Mapping[str, Reply], outbox: Outbox) -> list[SentReplies]:
        """Ready to travel, in an outbox that is theirs alone from now on.

        >>> reply = Reply({"model": {"n": torch.tensor(3)}}, {}, 0.0, 1, True)
        >>> [sent] = SentReplies.of({"a": reply, "b": reply}, Outbox(pinned=False))
        >>> sent.opened(torch.device("cpu"))["b"].up
        {'model': {'n': tensor(3)}}
        """
        outbox.clear()
        alike: dict[object, dict[str, Reply]] = {}
        for name, reply in replies.items():
            alike.setdefault((_form(reply.up), _form(reply.local)), {})[name] = reply
        return [
            SentReplies(
                tuple(group),
                _together([reply.up for reply in group.values()], outbox),
                _together([reply.local for reply in group.values()], outbox),
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


def _together(trees: Sequence[Tree], outbox: Outbox) -> Arrays:
    """Stacked and away from a GPU leaf by leaf, so that no more than one is there twice."""
    return arrays_of(map_tree(lambda *leaves: outbox.stacked(leaves), *trees))


def _form(tree: Tree) -> tuple[object, ...]:
    """What must agree to travel together: types and empty slots too, which ``shapes`` does not tell."""
    return tuple((slot, tuple((n, x.shape, x.dtype) for n, x in leaves.items())) for slot, leaves in tree.items())


class Answer(NamedTuple):
    """What a worker says when a piece of work is done."""

    found: Any
    samples: int
    warned: tuple[str, ...]  # its own screen is nobody's


def _answered(work: Callable[[], Any]) -> Answer:
    """A piece of work, with how many samples it was and the warnings on the way."""
    beats = list[int]()
    with heard(beats.append), warnings.catch_warnings(record=True) as caught:
        found = work()
    return Answer(found, sum(beats), tuple(dict.fromkeys(str(one.message) for one in caught)))


def versions() -> str:
    """What must be the same on every node, or numbers are not.

    >>> versions().split(", ")[0].startswith("fedshift ")
    True
    """
    return f"fedshift {fedshift.__version__}, torch {torch.__version__.partition('+')[0]}"


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
        self._outbox = Outbox(pinned=compute.device.type == "cuda")

    def ready(self) -> str:
        """That it is there, and what it is made of."""
        return versions()

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
    ) -> Answer:
        """The work of some clients: their replies, ready to travel."""

        def work() -> list[SentReplies]:
            downs, locals = self._whole(own, common), {name: self._tree(tree) for name, tree in kept.items()}
            made = self._known.thing(how, lambda: shipping.loads(method))
            task = self._known.task(where, lambda: unboxed(box))
            return SentReplies.of(self._engine.train(made, downs, locals, task, plan), self._outbox)

        return _answered(work)

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
    ) -> Answer:
        """The scores of some clients, by client and part."""

        def work() -> dict[tuple[str, str], Score]:
            made = self._known.thing(how, lambda: shipping.loads(adapter))
            task = self._known.task(where, lambda: unboxed(box))
            return self._engine.evaluate(made, self._whole(own, common), task, parts, seed)

        return _answered(work)

    def _whole(self, own: Mapping[str, Arrays], common: Arrays) -> dict[str, Tree]:
        shared = self._tree(common)  # once, so that engines see that it is one and the same
        return {name: joined(self._tree(tree), shared) for name, tree in own.items()}

    def _tree(self, arrays: Arrays) -> Tree:
        return tree_of(arrays, self._compute.device)
