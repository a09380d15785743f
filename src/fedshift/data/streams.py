"""Test streams: the same clients under different shifts, made once and stored, the same bytes for every method."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal

import torch
from torch import Tensor

from fedshift.core import rng
from fedshift.data import corruptions
from fedshift.data._stream import STREAMS, Scene, Setting, Shown, Stream, StreamKind, stream_kind
from fedshift.data.pool import Pool
from fedshift.errors import UserError

__all__ = [
    "STREAMS",
    "Corrupted",
    "LeftOut",
    "Mixture",
    "Natural",
    "Original",
    "OutOfClient",
    "Scene",
    "Setting",
    "Shown",
    "Stream",
    "StreamKind",
    "stream_kind",
    "twins_of",
]


def twins_of(streams: Mapping[str, StreamKind]) -> dict[str, StreamKind]:
    """The shifts that validation images can be put under, by the name of the stream each is a twin of.

    >>> twins = twins_of({"a": Original(), "b": Natural(source="x"), "c": Mixture(of=("a", "b")), "d": LeftOut()})
    >>> {name: kind.kind for name, kind in twins.items()}
    {'a': 'original', 'd': 'out-of-client'}
    """
    made: dict[str, StreamKind] = {}
    for name, kind in streams.items():
        twin = kind.twin()
        if twin is not None and all(part in made for part in kind.made_of):
            made[name] = twin
    return made


def _own_tests(scene: Scene) -> Shown:
    return Shown(scene.pool.images, scene.pool.labels, scene.content, scene.tests, own=False)


def _of(scene: Scene, name: str, kind: str) -> Shown:
    """What an earlier stream shows; without a name the clients' own test images."""
    if not name:
        return _own_tests(scene)
    if name not in scene.made:
        before = ", ".join(scene.made) or "none"
        raise UserError(
            f"stream {kind} is made of stream {name!r}, which must come before it; before it there are: {before}"
        )
    base = scene.made[name]
    images = scene.pool.images if base.images is None else base.images
    return Shown(images, base.labels, base.ids, base.index, own=base.images is not None, rows=base.rows)


@stream_kind("original")
@dataclass(frozen=True)
class Original(StreamKind):
    """The client's own test images, unchanged."""

    def shown(self, scene: Scene) -> Shown:
        """Nothing changes."""
        return _own_tests(scene)


@stream_kind("corrupted")
@dataclass(frozen=True)
class Corrupted(StreamKind):
    """One common corruption per image, drawn from ``names`` by the image's own id, at one severity.

    ``of`` names an earlier stream to corrupt instead of the clients' own test images. ``gradual`` lets the severity rise
    from 1 to ``severity`` along the stream. ``published`` repeats the slips of the published CIFAR-C and ImageNet-C files
    in glass blur and zoom blur (:mod:`fedshift.data.corruptions`).
    """

    severity: int = 5
    names: tuple[str, ...] = corruptions.NAMES
    of: str = ""
    gradual: bool = False
    published: bool = False

    def __post_init__(self) -> None:
        """Refuse severities and names that do not exist."""
        super().__post_init__()
        if not 1 <= self.severity <= 5:
            raise UserError(f"severity must be 1 to 5, not {self.severity}")
        for name in self.names:
            if name not in corruptions.NAMES:
                raise UserError(f"there is no corruption {name!r}; there are: {', '.join(corruptions.NAMES)}")

    @property
    def made_of(self) -> tuple[str, ...]:
        """The stream it corrupts, if it is not the clients' own images."""
        return (self.of,) if self.of else ()

    def shown(self, scene: Scene) -> Shown:
        """Corrupt every image once, whoever is shown it."""
        base = _of(scene, self.of, self.kind)
        if self.gradual:
            return base
        used = _union(base.index.values())
        images = corruptions.corrupt_mixed(
            base.images[used], self.severity, self._seed(scene), base.ids[used], self.names, self.published
        )
        place = torch.full((len(base.images),), -1, dtype=torch.int64)
        place[used] = torch.arange(len(used))
        index = {client: place[positions] for client, positions in base.index.items()}
        return Shown(images, base.labels[used], base.ids[used], index, own=True, rows=base.origin[used])

    def make(self, name: str, scene: Scene) -> Stream:
        """Where severity rises along the stream, images are corrupted in the order in which they arrive."""
        stream = super().make(name, scene)
        if not self.gradual:
            return stream
        images = scene.pool.images if stream.images is None else stream.images
        parts, index, start = [], {}, 0
        for client, positions in stream.index.items():
            severities = torch.arange(len(positions)) * self.severity // max(len(positions), 1) + 1
            own = images[positions].clone()
            for severity in severities.unique().tolist():
                here = severities == severity
                ids = stream.ids[positions[here]]
                own[here] = corruptions.corrupt_mixed(
                    own[here], severity, self._seed(scene), ids, self.names, self.published
                )
            rows = positions if stream.rows is None else stream.rows[positions]
            parts.append((own, stream.labels[positions], stream.ids[positions], rows))
            index[client] = torch.arange(start, start + len(positions))
            start += len(positions)
        shown, labels, ids, rows = (torch.cat([part[i] for part in parts]) for i in range(4))
        return replace(stream, images=shown, labels=labels, ids=ids, index=index, rows=rows)

    def _seed(self, scene: Scene) -> int:
        return rng.seed_of(scene.seed, "stream", self.kind)


@stream_kind("out-of-client")
@dataclass(frozen=True)
class OutOfClient(StreamKind):
    """As many test images as the client has, drawn without replacement from the other training clients' test images."""

    def shown(self, scene: Scene) -> Shown:
        """A draw of its own for every client; unseen clients draw from all training clients."""
        seen = {name: index for name, index in scene.tests.items() if name not in scene.unseen}
        index = {}
        for client, own in scene.tests.items():
            others = [positions for name, positions in seen.items() if name != client]
            if not others:
                raise UserError(f"stream {self.kind} needs at least two training clients")
            pool = torch.cat(others)
            pool = pool[
                ~torch.isin(scene.content[pool], scene.content[own])
            ]  # another client may hold the same picture
            keys = rng.bits(rng.seed_of(scene.seed, self.kind, client), scene.content[pool])
            index[client] = pool[keys.argsort(stable=True)[: len(own)]]
        return Shown(scene.pool.images, scene.pool.labels, scene.content, index, own=False)


@stream_kind("natural")
@dataclass(frozen=True)
class Natural(StreamKind):
    """Images of another source with the same classes, shared out in proportion to the clients' own labels.

    Client k gets ``floor(h_kc n_c / sum_j h_jc)`` images of class c (``h`` the histogram of its training images, ``n_c`` the
    source's), in the source's order and without overlap; what the rounding leaves over is dropped (appendix D of FedTHE's
    paper). ``match = "test"`` takes the histogram of its test images, as the authors' stand-alone benchmark does; an
    unseen client has no others. Images that somebody trains on are not among the ``n_c``.
    """

    match: Literal["train", "test"] = "train"
    source: str = ""
    columns: Mapping[str, str] = field(default_factory=dict)

    def twin(self) -> StreamKind | None:
        """None: all images of the other source are test images."""
        return None

    def fingerprint(self, load: Callable[[str, Mapping[str, str]], Pool]) -> str:
        """A digest of the other source's pixels and labels."""
        if not self.source:
            return ""
        other = load(self.source, self.columns)
        parts = (other.content().numpy().tobytes(), other.labels.numpy().tobytes(), "\x1f".join(other.classes).encode())
        return hashlib.blake2b(b"".join(parts)).hexdigest()[:32]

    def shown(self, scene: Scene) -> Shown:
        """Class by class, client after client."""
        if not self.source:
            raise UserError(f'stream {self.kind} needs a source, for instance source = "parquet:cifar10.1.parquet"')
        other = scene.load(self.source, self.columns)
        if other.classes != scene.pool.classes:
            raise UserError(
                f"stream {self.kind}: the classes of {self.source} ({', '.join(other.classes[:3])}, ...) are not those of "
                f"the task ({', '.join(scene.pool.classes[:3])}, ...)"
            )
        classes = len(other.classes)
        content = other.content()
        fresh = ~torch.isin(content, scene.content[scene.trained])  # a picture somebody trains on is no test
        like = {**scene.tests, **(scene.trains if self.match == "train" else {})}
        hists = torch.stack([torch.bincount(scene.pool.labels[like[c]], minlength=classes) for c in scene.tests])
        chosen: dict[str, list[Tensor]] = {client: [] for client in scene.tests}
        for c in range(classes):
            members = ((other.labels == c) & fresh).nonzero().flatten()
            total = int(hists[:, c].sum())
            counts = hists[:, c] * len(members) // total if total else torch.zeros(len(hists), dtype=torch.int64)
            for client, part in zip(
                chosen, members.split([*counts.tolist(), len(members) - int(counts.sum())]), strict=False
            ):
                chosen[client].append(part)
        index = {client: torch.cat(parts) for client, parts in chosen.items()}
        return Shown(other.images, other.labels, content, index, own=True)


@stream_kind("mixture")
@dataclass(frozen=True)
class Mixture(StreamKind):
    """Equal parts of earlier streams, shuffled together: as many of each as the smallest has (BRFL's fifth test set)."""

    of: tuple[str, ...] = ()

    @property
    def made_of(self) -> tuple[str, ...]:
        """Its parts."""
        return self.of

    def shown(self, scene: Scene) -> Shown:
        """Copies, because the parts live in different places."""
        if len(set(self.of)) < max(2, len(self.of)):
            raise UserError(
                f'stream {self.kind} needs at least two different earlier streams, for instance of = ["a", "b"]'
            )
        parts = [_of(scene, name, self.kind) for name in self.of]
        origins = [part.origin for part in parts]
        images, labels, ids, rows, index, start = [], [], [], [], {}, 0
        for client in scene.tests:
            size = min(len(part.index[client]) for part in parts)
            for name, part, origin in zip(self.of, parts, origins, strict=True):
                own = part.index[client]
                keys = rng.bits(rng.seed_of(scene.seed, self.kind, name), part.ids[own])
                taken = own[keys.argsort(stable=True)[:size]]
                images.append(part.images[taken])
                labels.append(part.labels[taken])
                rows.append(origin[taken])
                # the same picture may come in twice, clean and corrupted: two samples, two ids
                ids.append(part.ids[taken] ^ (rng.seed_of("part of a mixture", name) >> 1))
            index[client] = torch.arange(start, start + size * len(parts))
            start += size * len(parts)
        return Shown(torch.cat(images), torch.cat(labels), torch.cat(ids), index, own=True, rows=torch.cat(rows))


@stream_kind("left-out")
@dataclass(frozen=True)
class LeftOut(StreamKind):
    """Every client is shown the unseen clients' images: leave-one-domain-out as FedICON scores it."""

    def twin(self) -> StreamKind | None:
        """The other clients stand for those that nobody has seen."""
        common = {entry.name: getattr(self, entry.name) for entry in fields(StreamKind)}
        return OutOfClient(**common)

    def shown(self, scene: Scene) -> Shown:
        """One and the same set for everybody."""
        if not scene.unseen:
            raise UserError(f'stream {self.kind} needs unseen clients; name the domain with [split] unseen = ["..."]')
        everything = _union([index for name, index in scene.tests.items() if name in scene.unseen])
        index = dict.fromkeys(scene.tests, everything)
        return Shown(scene.pool.images, scene.pool.labels, scene.content, index, own=False)


def _union(parts: Iterable[Tensor]) -> Tensor:
    joined: Tensor = torch.cat(list(parts)).unique()
    return joined
