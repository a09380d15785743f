"""A task: the data side of an experiment. Clients, unseen clients, their splits, named test streams.

Immutable and content-hashed: two runs with the same task hash saw the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedshift.data import _task_cache
from fedshift.data._division import Splitting as Splitting
from fedshift.data._division import divide
from fedshift.data._task_cache import Stored
from fedshift.data.cache import TASKS
from fedshift.data.concept import Rotation
from fedshift.data.partition import Partition
from fedshift.data.pool import Column, Pool
from fedshift.data.split import LeftOut
from fedshift.data.streams import Scene, Setting, Stream, StreamKind
from fedshift.errors import UserError

PARTS = ("train", "val", "test")
FORMAT = 2  # raise when the same settings would give other bytes


@dataclass(frozen=True, eq=False)
class Client:
    """One owner of data: indices into the task's images."""

    name: str
    train: Tensor
    val: Tensor
    test: Tensor


@dataclass(frozen=True)
class Samples:
    """Images with their labels and ids; ``index`` selects from the (shared, uncopied) images."""

    images: Tensor
    labels: Tensor
    ids: Tensor
    index: Tensor
    rows: Tensor | None = None  # which of the task's images each image is made of, -1: none; None: they are the task's

    def __len__(self) -> int:
        return len(self.index)

    @property
    def origin(self) -> Tensor:
        """The task's image behind every sample, in their order; -1 for an image of another source."""
        return self.index if self.rows is None else self.rows[self.index]


@dataclass(frozen=True, eq=False)
class Task:
    """Everything that is data. ``clients`` train; ``unseen`` only appear at test time, without labels."""

    images: Tensor  # uint8 [N, channels, height, width]
    labels: Tensor
    ids: Tensor
    classes: tuple[str, ...]
    clients: tuple[Client, ...]
    unseen: tuple[Client, ...] = ()
    streams: Mapping[str, Stream] = field(default_factory=dict)
    public: Tensor | None = None  # unlabelled images every client may see
    provenance: Mapping[str, Any] = field(default_factory=dict)
    hash: str = ""
    # what people ask about images; no method sees it, and it is no part of the hash
    group_numbers: Tensor | None = None  # equal for images that stay together; None: every image stands for itself
    group_ids: Column | None = None  # what the source calls each image's group, "" where it is not known
    attributes: Mapping[str, Column] = field(default_factory=dict)  # further columns: a text for each of the images
    names: tuple[str, ...] = ()  # of the images: a path, or a file and a row
    left_out: tuple[LeftOut, ...] = ()  # images that are in no part, and why

    @cached_property
    def groups(self) -> Tensor:
        """The group of each of the task's images, as numbers from 0; an image that is alone has its own."""
        return torch.arange(len(self.labels)) if self.group_numbers is None else self.group_numbers

    def attribute(self, name: str, samples: Samples) -> tuple[str, ...]:
        """The text of a column for every sample, in their order; "" where there is none.

        >>> pool = Pool(torch.zeros(2, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 0]), ("a",))
        >>> scans = Samples(pool.images, pool.labels, pool.labels, torch.tensor([1, 0]))
        >>> task = Task(pool.images, pool.labels, pool.labels, ("a",), (), attributes={"sex": Column.of(["f", "m"])})
        >>> task.attribute("sex", scans)
        ('m', 'f')
        """
        if name not in self.attributes:
            there = ", ".join(self.attributes) or "none"
            raise UserError(f'the task carries no attribute "{name}", but {there}; name it in [data] attributes')
        return self.attributes[name].at(samples.origin.cpu())

    def groups_of(self, samples: Samples) -> Tensor:
        """The group number of every sample, in their order; images of another source have numbers of their own."""
        origin = samples.origin.cpu()
        return torch.where(origin < 0, len(self.groups) + torch.arange(len(origin)), self.groups[origin.clamp(min=0)])

    def client(self, name: str) -> Client:
        """A client, seen or unseen, by its name."""
        found = self._by_name.get(name)
        if found is None:
            raise UserError(f"the task has no client {name!r}")
        return found

    @cached_property
    def _by_name(self) -> dict[str, Client]:
        return {client.name: client for client in (*self.clients, *self.unseen)}

    def samples(self, client: Client, part: str) -> Samples:
        """A client's ``train``, ``val``, ``public`` data or one of its streams by name."""
        if part in self.streams:
            stream = self.streams[part]
            images = self.images if stream.images is None else stream.images
            return Samples(images, stream.labels, stream.ids, stream.index[client.name], stream.rows)
        index = self.public if part == "public" else getattr(client, part)
        if index is None:
            raise UserError("this method needs a public set of unlabelled images; add [split] public = 0.1")
        return Samples(self.images, self.labels, self.ids, index)

    def setting(self, part: str) -> Setting:
        """How a stream is shown; splits are shown as they are stored."""
        return self.streams[part].setting if part in self.streams else Setting("stored")

    def histogram(self, client: Client) -> Tensor:
        """How many training samples of each class a client has."""
        return torch.bincount(self.labels[client.train], minlength=len(self.classes)).cpu()

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        return (int(self.images.shape[1]), int(self.images.shape[2]), int(self.images.shape[3]))


def build(
    pool: Pool,
    partition: Partition,
    splitting: Splitting | None = None,
    streams: Mapping[str, StreamKind] | None = None,
    seed: int = 0,
    cache: Path | None = None,
    rotation: Rotation | None = None,
    load: Callable[[str, Mapping[str, str]], Pool] | None = None,
) -> Task:
    """Make a task: who owns what, who is unseen, what is trained and tested on, under which shifts.

    With ``cache`` the result is kept in that folder and found there the next time. ``load`` gets other sources for
    streams of natural shift.

    >>> from fedshift.data.partition import Iid
    >>> x = torch.arange(160, dtype=torch.uint8).reshape(40, 1, 2, 2)
    >>> pool = Pool(x, torch.arange(40) % 2, ("even", "odd"))
    >>> task = build(pool, Iid(clients=4))
    >>> [len(client.train) for client in task.clients]
    [6, 6, 6, 6]
    """
    splitting, rotation, another = splitting or Splitting(), rotation or Rotation(), load or _no_other_source
    streams = dict(streams or {})
    for reserved in {*PARTS, "public"} & set(streams):
        raise UserError(f"a stream cannot be called {reserved!r}")
    content = pool.content()
    settings = {
        "format": FORMAT,
        "pool": _digest(content, pool.labels, *_columns(pool)),
        "names": [pool.classes, pool.domain_names, pool.user_names, pool.super_names],
        "partition": [type(partition).__name__, asdict(partition)],
        "split": asdict(splitting),
        "shape": list(pool.images.shape),
        "streams": [[name, kind.kind, asdict(kind)] for name, kind in streams.items()],
        "others": {name: kind.fingerprint(another) for name, kind in streams.items()},
        "rotation": asdict(rotation) if rotation else {},
        "seed": seed,
    }
    key = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:20]
    folder = None if cache is None else cache / TASKS / key
    if folder is not None:
        found = _recalled(folder, pool, content, rotation)
        if found is not None:
            return found
    task = _make(pool, content, partition, splitting, streams, seed, rotation, another)
    described = {**task.provenance, "settings": settings, "source": dict(pool.provenance)}
    task = replace(task, provenance=described, hash=task_hash(task))
    if folder is not None:
        _task_cache.save(folder, _stored(task))
    return task


def _no_other_source(source: str, _columns: Mapping[str, str]) -> Pool:
    raise UserError(f"a stream wants the source {source!r}, but this task was built without a way to load one")


def _columns(pool: Pool) -> list[Tensor]:
    columns = (pool.domains, pool.users, pool.supers, pool.groups, pool.splits)
    return [column if column is not None else torch.zeros(0, dtype=torch.int64) for column in columns]


def _make(
    pool: Pool,
    content: Tensor,
    partition: Partition,
    splitting: Splitting,
    streams: Mapping[str, StreamKind],
    seed: int,
    rotation: Rotation,
    load: Callable[[str, Mapping[str, str]], Pool],
) -> Task:
    divided = divide(pool, content, partition, splitting, seed)
    clients = tuple(Client(name, *parts) for name, parts in divided.seen.items())
    nothing = torch.zeros(0, dtype=torch.int64)
    # an unseen client's images are all test images
    unseen_clients = tuple(Client(name, nothing, nothing, rows) for name, rows in divided.unseen.items())
    angles = rotation.angles([client.name for client in clients], [client.name for client in unseen_clients])
    task = _task(pool, content, divided.groups, clients, unseen_clients, rotation, angles)
    pool = replace(pool, images=task.images)
    tests = {client.name: client.test for client in (*clients, *unseen_clients)}
    trains = {client.name: client.train for client in clients}
    trained = torch.cat([part for c in clients for part in (c.train, *(() if splitting.tune else (c.val,)))])
    made: dict[str, Stream] = {}
    for name, kind in streams.items():
        unseen = frozenset(client.name for client in unseen_clients)
        scene = Scene(pool, content, tests, trains, unseen, trained, dict(made), load, seed)
        made[name] = kind.make(name, scene)
    counts = {"images": len(pool), "clients": len(clients), "unseen": len(unseen_clients)}
    return replace(
        task,
        streams=made,
        public=divided.public if len(divided.public) else None,
        left_out=divided.left_out,
        provenance={"counts": counts, **({"angles": angles} if rotation else {})},
    )


def _task(
    pool: Pool,
    content: Tensor,
    groups: Tensor,
    clients: tuple[Client, ...],
    unseen: tuple[Client, ...],
    rotation: Rotation,
    angles: Mapping[str, float],
) -> Task:
    """What a task has from its pool."""
    numbers = groups.unique(return_inverse=True)[1]
    return Task(
        images=_turned(pool, (*clients, *unseen), rotation, angles).images,
        labels=pool.labels,
        ids=content,
        classes=pool.classes,
        clients=clients,
        unseen=unseen,
        group_numbers=numbers,
        group_ids=None if pool.groups is None else _ids(pool.groups, pool.group_names),
        attributes=pool.attributes,
        names=pool.names,
    )


def _ids(codes: Tensor, names: tuple[str, ...]) -> Column:
    """Groups by name; a pool that was made by hand may have none."""
    return Column(codes + 1, ("", *(names or map(str, range(int(codes.max()) + 1)))))


def _turned(pool: Pool, clients: Sequence[Client], rotation: Rotation, angles: Mapping[str, float]) -> Pool:
    """Every client's images under its own angle."""
    if not rotation:
        return pool
    owned = {client.name: torch.cat([client.train, client.val, client.test]) for client in clients}
    return rotation.apply(pool, owned, angles)


def _digest(*tensors: Tensor) -> str:
    state = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        state.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        state.update(np.ascontiguousarray(tensor.numpy()).data)
    return state.hexdigest()


def task_hash(task: Task) -> str:
    """A digest of every byte a method can see."""
    parts: list[object] = [FORMAT, task.classes, len(task.clients), _digest(task.images, task.labels, task.ids)]
    for client in (*task.clients, *task.unseen):
        parts += [client.name, _digest(client.train, client.val, client.test)]
    for name, stream in task.streams.items():
        images = stream.images if stream.images is not None else torch.zeros(0)
        parts += [name, asdict(stream.setting), _digest(images, stream.labels, stream.ids)]
        parts += [[client, _digest(index)] for client, index in stream.index.items()]
    parts.append(_digest(task.public) if task.public is not None else "")
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


# ---- the cache ----------------------------------------------------------------------------------------------------------
def _stored(task: Task) -> Stored:
    clients, unseen = ({c.name: (c.train, c.val, c.test) for c in some} for some in (task.clients, task.unseen))
    return Stored(task.hash, clients, unseen, task.streams, task.public, task.left_out, task.provenance)


def _recalled(folder: Path, pool: Pool, content: Tensor, rotation: Rotation) -> Task | None:
    """The cached task, or None if it is not there or damaged (then it is made again)."""
    stored = _task_cache.load(folder, pool, content)
    if stored is None:
        return None
    clients, unseen = (
        tuple(Client(name, *parts) for name, parts in some.items()) for some in (stored.clients, stored.unseen)
    )
    angles = rotation.angles(list(stored.clients), list(stored.unseen))
    task = _task(pool, content, pool.together(content), clients, unseen, rotation, angles)
    task = replace(
        task,
        streams=stored.streams,
        public=stored.public,
        left_out=tuple(stored.left_out),
        # the same images may come from elsewhere, with other hints
        provenance={**stored.provenance, "source": dict(pool.provenance)},
        hash=stored.hash,
    )
    if task_hash(task) == task.hash:
        return task
    _task_cache.forget(folder)
    return None
