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
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedshift.core import rng
from fedshift.data import _task_cache
from fedshift.data._task_cache import Stored
from fedshift.data.concept import Rotation
from fedshift.data.partition import Partition
from fedshift.data.pool import Column, Pool
from fedshift.data.split import LeftOut, Split, choose_unseen, purge, split, split_by_file
from fedshift.data.streams import Scene, Setting, Stream, StreamKind
from fedshift.errors import UserError

PARTS = ("train", "val", "test")
FORMAT = 2  # raise when the same settings would give other bytes
BEYOND = "beyond train-fraction or train-limit"
HIDDEN = "test image, which tune does not show"
NOBODY = "given to no client by the partition"


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


@dataclass(frozen=True)
class Splitting:
    """How each client's data are divided, and who is unseen."""

    train: float = 0.6
    val: float = 0.2
    test: float = 0.2
    from_file: bool = False  # use the file's own train/test split; ``val`` is then a share of its training part
    train_fraction: float = 1.0  # keep this share of every client's training data (small-data studies)
    train_limit: int = 0  # keep at most so many of every client's training images; 0: all
    unseen: float | str | tuple[str, ...] = 0.0  # a share of the clients, a name or pattern, or several
    public: float = 0.0  # share of the images set apart, unlabelled, for everybody
    tune: bool = False  # show validation images in place of test images, to choose settings without looking at a test
    stratify: bool = False  # class by class; files of one's own have it, presets split as published
    missing_group: Literal["error", "own"] = (
        "error"  # of an image whose group is not known: refuse it, or let it be alone
    )

    def __post_init__(self) -> None:
        """Refuse fractions that cannot be meant."""
        for name in ("train", "val", "test", "public", "train_fraction"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise UserError(f"[split] {name.replace('_', '-')} must lie in 0..1, not {value}")
        if not self.from_file and abs(self.train + self.val + self.test - 1) > 1e-6:
            raise UserError(f"[split] train + val + test must be 1, not {self.train + self.val + self.test:g}")
        if self.train_limit < 0:
            raise UserError(f"[split] train-limit must not be negative, not {self.train_limit}")
        if self.tune and self.val == 0:
            raise UserError("[split] tune shows validation images, but val is 0")
        if self.train_fraction == 0 or (not self.from_file and self.train == 0):
            raise UserError("[split] train and train-fraction must be positive")
        if not self.from_file and self.test == 0 and not self.unseen:
            raise UserError("[split] test = 0 leaves nothing to test on; name unseen clients or give test a share")


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
    folder = None if cache is None else cache / "tasks" / key
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
    groups = _groups(pool, content, splitting)
    public = _public(groups, splitting.public, seed)
    owned = {
        name: indices[~torch.isin(groups[indices], groups[public])] if len(public) else indices
        for name, indices in partition.assign(pool, rng.seed_of(seed, "partition")).items()
    }
    unseen = choose_unseen(list(owned), splitting.unseen, rng.seed_of(seed, "unseen")) if splitting.unseen else ()
    drawn = {
        name: _split_client(pool, owned[name], groups, splitting, rng.seed_of(seed, "split", name))
        for name in owned
        if name not in unseen
    }
    kept = {name: _limited(parts, splitting, rng.seed_of(seed, "split", name)) for name, parts in drawn.items()}
    seen, left_out = purge(kept, groups, content, [owned[name] for name in unseen])
    left_out += tuple(
        LeftOut(name, BEYOND, drawn[name][0][~torch.isin(drawn[name][0], kept[name][0])])
        for name in drawn
        if len(drawn[name][0]) > len(kept[name][0])
    )
    nothing = torch.zeros(0, dtype=torch.int64)
    if splitting.tune:
        hidden = {**{name: test for name, (_, _, test) in seen.items()}, **{name: owned[name] for name in unseen}}
        left_out += tuple(LeftOut(name, HIDDEN, rows) for name, rows in hidden.items() if len(rows))
        seen = {name: (train, val, val) for name, (train, val, _) in seen.items()}
    clients = tuple(Client(name, *parts) for name, parts in seen.items())
    # an unseen client's images are all test images
    unseen_clients = () if splitting.tune else tuple(Client(name, nothing, nothing, owned[name]) for name in unseen)
    tested = splitting.from_file or splitting.test > 0
    for client in (*clients, *unseen_clients):
        if client.name in seen and len(client.train) == 0:
            raise UserError(_without("training", client.name, owned[client.name], groups, left_out))
        if len(client.test) == 0 and (tested or client.name not in seen):
            raise UserError(_without("test", client.name, owned[client.name], groups, left_out))
    angles = rotation.angles([client.name for client in clients], [client.name for client in unseen_clients])
    task = _task(pool, content, groups, clients, unseen_clients, rotation, angles)
    pool = replace(pool, images=task.images)
    tests = {client.name: client.test for client in (*clients, *unseen_clients)}
    trained = torch.cat([part for c in clients for part in (c.train, *(() if splitting.tune else (c.val,)))])
    made: dict[str, Stream] = {}
    for name, kind in streams.items():
        scene = Scene(pool, content, tests, frozenset(c.name for c in unseen_clients), trained, dict(made), load, seed)
        made[name] = kind.make(name, scene)
    used = torch.cat([public, *owned.values()])
    nobodys = torch.ones(len(pool), dtype=torch.bool).index_fill_(0, used, False).nonzero().flatten()
    left_out += (LeftOut("", NOBODY, nobodys),) if len(nobodys) else ()
    counts = {"images": len(pool), "clients": len(clients), "unseen": len(unseen_clients)}
    return replace(
        task,
        streams=made,
        public=public if len(public) else None,
        left_out=left_out,
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


def _groups(pool: Pool, content: Tensor, splitting: Splitting) -> Tensor:
    """Which images stay together; one sentence if that is not known of one."""
    if pool.groups is not None and splitting.missing_group == "error" and bool((pool.groups < 0).any()):
        lost = (pool.groups < 0).nonzero().flatten()
        first = int(lost[0])
        name = pool.names[first] if pool.names else f"image {first}"
        column = pool.provenance.get("group", "group")
        more = f", and of {len(lost) - 1:,} more" if len(lost) > 1 else ""
        raise UserError(
            f'the group (column "{column}") of {name} is missing{more}: fill it in, or let such an image stand for itself '
            'with [split] missing-group = "own"'
        )
    return pool.together(content)


def _without(part: str, name: str, owned: Tensor, groups: Tensor, left_out: Sequence[LeftOut]) -> str:
    """Why a client cannot take part."""
    count = len(groups[owned].unique())
    why = [f"its {len(owned)} images are {count} group{'s' if count != 1 else ''}"] if count < len(owned) else []
    why += [f"{len(left.rows)} left out: {left.reason}" for left in left_out if left.client == name]
    told = f" ({'; '.join(why)})" if why else ""
    return f"client {name!r} has no {part} images left{told}; use fewer or larger clients"


def _turned(pool: Pool, clients: Sequence[Client], rotation: Rotation, angles: Mapping[str, float]) -> Pool:
    """Every client's images under its own angle."""
    if not rotation:
        return pool
    owned = {client.name: torch.cat([client.train, client.val, client.test]) for client in clients}
    return rotation.apply(pool, owned, angles)


def _public(groups: Tensor, fraction: float, seed: int) -> Tensor:
    """Images for everybody; whole groups, so that no client holds a duplicate of one."""
    if not fraction:
        return torch.zeros(0, dtype=torch.int64)
    order = rng.permutation(rng.seed_of(seed, "public"), len(groups))
    chosen = groups[order[: max(1, round(fraction * len(groups)))]].unique()
    return torch.isin(groups, chosen).nonzero().flatten()


def _split_client(pool: Pool, indices: Tensor, groups: Tensor, splitting: Splitting, seed: int) -> Split:
    labels = pool.labels if splitting.stratify else None
    if splitting.from_file:
        if pool.splits is None:
            raise UserError(
                '[split] from-file needs a split column in the data; map it with columns = { split = "..." }'
            )
        return split_by_file(indices, groups, pool.splits, splitting.val, seed, labels)
    return split(indices, groups, (splitting.train, splitting.val, splitting.test), seed, labels)


def _limited(parts: Split, splitting: Splitting, seed: int) -> Split:
    """Only so much of the training images as is wanted."""
    train, val, test = parts
    keep = max(1, round(splitting.train_fraction * len(train)))
    keep = min(keep, splitting.train_limit or keep)
    if keep < len(train):
        train = train[rng.permutation(rng.seed_of(seed, "fraction"), len(train))[:keep]].sort().values
    return train, val, test


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
