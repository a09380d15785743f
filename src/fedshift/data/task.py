"""A task: the data side of an experiment. Clients, unseen clients, their splits, named test streams.

Immutable and content-hashed: two runs with the same task hash saw the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedshift.core import rng
from fedshift.data.concept import Rotation
from fedshift.data.partition import Partition
from fedshift.data.pool import Pool
from fedshift.data.split import choose_unseen, purge, split, split_by_file
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

    def __len__(self) -> int:
        return len(self.index)


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
            return Samples(images, stream.labels, stream.ids, stream.index[client.name])
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
        found = _load(folder, pool, content, rotation)
        if found is not None:
            return found
    task = _make(pool, content, partition, splitting, streams, seed, rotation, another)
    described = {**task.provenance, "settings": settings, "source": dict(pool.provenance)}
    task = replace(task, provenance=described, hash=task_hash(task))
    if folder is not None:
        _save(folder, task)
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
    groups = pool.together(content)
    public = _public(groups, splitting.public, seed)
    owned = {
        name: indices[~torch.isin(groups[indices], groups[public])] if len(public) else indices
        for name, indices in partition.assign(pool, rng.seed_of(seed, "partition")).items()
    }
    unseen = choose_unseen(list(owned), splitting.unseen, rng.seed_of(seed, "unseen")) if splitting.unseen else ()
    seen: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    for name in owned:
        if name not in unseen:
            seen[name] = _split_client(pool, owned[name], groups, splitting, rng.seed_of(seed, "split", name))
    seen, removed = purge(seen, groups, [owned[name] for name in unseen])
    nothing = torch.zeros(0, dtype=torch.int64)
    if splitting.tune:
        seen = {name: (train, val, val) for name, (train, val, _) in seen.items()}
    clients = tuple(Client(name, *parts) for name, parts in seen.items())
    # an unseen client's images are all test images
    unseen_clients = () if splitting.tune else tuple(Client(name, nothing, nothing, owned[name]) for name in unseen)
    tested = splitting.from_file or splitting.test > 0
    for client in (*clients, *unseen_clients):
        if client.name in seen and len(client.train) == 0:
            raise UserError(f"client {client.name!r} has no training images left; use fewer or larger clients")
        if len(client.test) == 0 and (tested or client.name not in seen):
            raise UserError(f"client {client.name!r} has no test images left; use fewer or larger clients")
    angles = rotation.angles([client.name for client in clients], [client.name for client in unseen_clients])
    pool = _turned(pool, (*clients, *unseen_clients), rotation, angles)
    tests = {client.name: client.test for client in (*clients, *unseen_clients)}
    trained = torch.cat([part for c in clients for part in (c.train, *(() if splitting.tune else (c.val,)))])
    made: dict[str, Stream] = {}
    for name, kind in streams.items():
        scene = Scene(pool, content, tests, frozenset(c.name for c in unseen_clients), trained, dict(made), load, seed)
        made[name] = kind.make(name, scene)
    counts = {
        "images": len(pool),
        "clients": len(clients),
        "unseen": len(unseen_clients),
        "duplicates-removed": removed,
    }
    return Task(
        images=pool.images,
        labels=pool.labels,
        ids=content,
        classes=pool.classes,
        clients=clients,
        unseen=unseen_clients,
        streams=made,
        public=public if len(public) else None,
        provenance={"counts": counts, **({"angles": angles} if rotation else {})},
    )


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


def _split_client(
    pool: Pool, indices: Tensor, groups: Tensor, splitting: Splitting, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    if splitting.from_file:
        if pool.splits is None:
            raise UserError(
                '[split] from-file needs a split column in the data; map it with columns = { split = "..." }'
            )
        train, val, test = split_by_file(indices, groups, pool.splits, splitting.val, seed)
    else:
        train, val, test = split(indices, groups, (splitting.train, splitting.val, splitting.test), seed)
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


# ---- the cache: index arrays and shifted images; the source's own images are cached by the source -----------------------
def _save(folder: Path, task: Task) -> None:
    """Write the task's folder under a temporary name and rename it: it is there whole or not at all."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
    except OSError as error:
        raise UserError(f"the cache {folder.parent} cannot be written ({error.strerror}); set FEDSHIFT_CACHE") from None
    try:
        everyone = (*task.clients, *task.unseen)
        arrays = _flat("clients", [getattr(client, part) for client in everyone for part in PARTS])
        if task.public is not None:
            arrays["public"] = task.public.numpy()
        for s, stream in enumerate(task.streams.values()):
            arrays |= _flat(f"stream-{s}", list(stream.index.values()))
            if stream.images is not None:
                np.save(temporary / f"stream-{s}.npy", stream.images.numpy())
                arrays |= {f"stream-{s}/labels": stream.labels.numpy(), f"stream-{s}/ids": stream.ids.numpy()}
        np.savez(temporary / "arrays.npz", **arrays)  # type: ignore[arg-type]
        facts = {
            "hash": task.hash,
            "clients": [client.name for client in task.clients],
            "unseen": [client.name for client in task.unseen],
            "streams": [
                {
                    "name": stream.name,
                    "kind": stream.kind,
                    "setting": asdict(stream.setting),
                    "clients": list(stream.index),
                    "shifted": stream.images is not None,
                }
                for stream in task.streams.values()
            ],
            "provenance": task.provenance,
        }
        (temporary / "task.json").write_text(json.dumps(facts, default=str))
        with contextlib.suppress(OSError):  # another process has just made the same task
            os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _load(folder: Path, pool: Pool, content: Tensor, rotation: Rotation) -> Task | None:
    """The cached task, or None if it is not there or damaged (then it is made again)."""
    try:
        facts = json.loads((folder / "task.json").read_text())
        with np.load(folder / "arrays.npz", allow_pickle=False) as file:
            arrays = {key: torch.from_numpy(file[key]) for key in file.files}
        streams = {
            fact["name"]: _load_stream(folder, s, fact, arrays, pool, content)
            for s, fact in enumerate(facts["streams"])
        }
        names: Sequence[str] = [*facts["clients"], *facts["unseen"]]
        parts = _unflat("clients", arrays)
        clients = [Client(name, *parts[3 * i : 3 * i + 3]) for i, name in enumerate(names)]
    except (OSError, EOFError, ValueError, LookupError, TypeError, RuntimeError, zipfile.BadZipFile):
        shutil.rmtree(folder, ignore_errors=True)
        return None
    count = len(facts["clients"])
    pool = _turned(pool, clients, rotation, rotation.angles(names[:count], names[count:]))
    task = Task(
        images=pool.images,
        labels=pool.labels,
        ids=content,
        classes=pool.classes,
        clients=tuple(clients[:count]),
        unseen=tuple(clients[count:]),
        streams=streams,
        public=arrays.get("public"),
        provenance=facts["provenance"],
        hash=facts["hash"],
    )
    if task_hash(task) == task.hash:
        return task
    shutil.rmtree(folder, ignore_errors=True)
    return None


def _load_stream(
    folder: Path, s: int, fact: Mapping[str, Any], arrays: Mapping[str, Tensor], pool: Pool, content: Tensor
) -> Stream:
    shifted = fact["shifted"]
    return Stream(
        name=fact["name"],
        kind=fact["kind"],
        setting=Setting(**fact["setting"]),
        images=torch.from_numpy(np.load(folder / f"stream-{s}.npy", mmap_mode="c")) if shifted else None,
        labels=arrays[f"stream-{s}/labels"] if shifted else pool.labels,
        ids=arrays[f"stream-{s}/ids"] if shifted else content,
        index=dict(zip(fact["clients"], _unflat(f"stream-{s}", arrays), strict=True)),
    )


def _flat(name: str, parts: Sequence[Tensor]) -> dict[str, np.ndarray[Any, Any]]:
    """Ten thousand clients' index arrays as two arrays."""
    lengths = np.array([len(part) for part in parts], dtype=np.int64)
    joined = torch.cat(list(parts)).numpy() if parts else np.zeros(0, dtype=np.int64)
    return {f"{name}/joined": joined, f"{name}/lengths": lengths}


def _unflat(name: str, arrays: Mapping[str, Tensor]) -> list[Tensor]:
    return list(arrays[f"{name}/joined"].split(arrays[f"{name}/lengths"].tolist()))
