"""What a stream is: a client's images in the order in which they arrive, and the contract of those who choose them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from fedshift.core import rng
from fedshift.data.pool import Pool
from fedshift.errors import UserError

Order = Literal["shuffled", "stored", "by-class"]
Reset = Literal["stream", "never", "chunk"]


@dataclass(frozen=True)
class Setting:
    """How a stream is shown to an adapter; printed with every result, because it changes what a number means."""

    order: Order = "shuffled"
    reset: Reset = "stream"
    passes: int = 1
    chunk: int = 0


@dataclass(frozen=True)
class Stream:
    """One named test stream of every client: indices into its own images, or into the task's where it has none."""

    name: str
    kind: str
    setting: Setting
    images: Tensor | None  # uint8; None: the task's own images
    labels: Tensor
    ids: Tensor  # of every image: what an adapter's draws are keyed by
    index: Mapping[str, Tensor]  # client -> positions in the order in which they arrive
    rows: Tensor | None = None  # which of the task's images each of its own is made of, -1: none; None: not known


@dataclass(frozen=True)
class Scene:
    """What a stream can be made from."""

    pool: Pool
    content: Tensor  # ids of the pool's images
    tests: Mapping[str, Tensor]  # client -> its test images
    trains: Mapping[str, Tensor]  # client -> what it trains on, if it trains
    unseen: frozenset[str]  # clients of ``tests`` that do not train
    trained: Tensor  # images that somebody trains on or chooses by
    made: Mapping[str, Stream]  # streams before this one
    load: Callable[[str, Mapping[str, str]], Pool]  # another source in the same image size
    seed: int


@dataclass(frozen=True)
class Shown:
    """Images to show: a set, and every client's positions in it."""

    images: Tensor
    labels: Tensor
    ids: Tensor
    index: Mapping[str, Tensor]
    own: bool  # whether the images differ from the task's and must be stored
    rows: Tensor | None = None  # of own images: which of the task's each is made of, -1: none

    @property
    def origin(self) -> Tensor:
        """Which of the task's images each one is made of, -1 where none is known."""
        if self.rows is not None:
            return self.rows
        return torch.full((len(self.images),), -1) if self.own else torch.arange(len(self.images))


@dataclass(frozen=True)
class StreamKind:
    """A shift. Subclasses say which images a client is shown; order and amount are everybody's options."""

    order: Order = "shuffled"
    reset: Reset = (
        "stream"  # adapter state: anew for every stream, carried on from the stream before, or anew for every chunk
    )
    passes: int = 1  # the stream is shown so often; the last pass is scored
    chunk: int = 0  # samples that arrive together; 0: as many as the adapter likes
    fraction: float = 1.0  # of each client's samples that is kept
    without: tuple[str, ...] = ()  # classes that are left out, by name

    kind: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Refuse settings that cannot be meant."""
        if self.passes < 1 or self.chunk < 0:
            raise UserError(f"stream {self.kind}: passes must be at least 1 and chunk not negative")
        if self.reset == "chunk" and not self.chunk:
            raise UserError(
                f'stream {self.kind}: reset = "chunk" needs chunk, the number of samples that arrive together'
            )
        if not 0 < self.fraction <= 1:
            raise UserError(f"stream {self.kind}: fraction must lie in (0, 1], not {self.fraction}")

    def fingerprint(self, load: Callable[[str, Mapping[str, str]], Pool]) -> str:
        """What else decides this stream's bytes: the content of another source, if it uses one."""
        return ""

    @property
    def made_of(self) -> tuple[str, ...]:
        """The earlier streams it is made of."""
        return ()

    def twin(self) -> StreamKind | None:
        """The same shift for validation images; None if it is made of images that nobody may choose by."""
        return self

    def shown(self, scene: Scene) -> Shown:
        """Which images every client is shown."""
        raise UserError(f"stream kind {type(self).__name__} does not say what it shows")

    def make(self, name: str, scene: Scene) -> Stream:
        """The stream of all clients."""
        shown = self.shown(scene)
        dropped = self._dropped(scene.pool.classes)
        kept = {client: rows[~torch.isin(shown.labels[rows], dropped)] for client, rows in shown.index.items()}
        index = {client: self._arrival(positions, shown, scene.seed) for client, positions in kept.items()}
        setting = Setting(self.order, self.reset, self.passes, self.chunk)
        images = shown.images if shown.own else None
        rows = shown.origin if shown.own else None
        return Stream(name, self.kind, setting, images, shown.labels, shown.ids, index, rows)

    def _dropped(self, classes: tuple[str, ...]) -> Tensor:
        for name in self.without:
            if name not in classes:
                raise UserError(
                    f"stream {self.kind}: there is no class {name!r} to leave out; there are: {', '.join(classes)}"
                )
        return torch.tensor([classes.index(name) for name in self.without], dtype=torch.int64)

    def _arrival(self, positions: Tensor, shown: Shown, seed: int) -> Tensor:
        """The order of arrival: a function of each client's own samples, so other clients cannot change it."""
        if self.order == "stored" and self.fraction == 1:
            return positions
        keys = rng.bits(rng.seed_of(seed, "order"), shown.ids[positions])
        shuffled = positions[keys.argsort(stable=True)]
        kept = shuffled[: max(1, round(self.fraction * len(shuffled)))] if self.fraction < 1 else shuffled
        if self.order == "stored":
            return positions[torch.isin(positions, kept)]
        return kept[shown.labels[kept].argsort(stable=True)] if self.order == "by-class" else kept


S = TypeVar("S", bound=type[StreamKind])
STREAMS: dict[str, type[StreamKind]] = {}


def stream_kind(name: str) -> Callable[[S], S]:
    """Register a stream kind."""

    def add(cls: S) -> S:
        cls.kind = name
        STREAMS[name] = cls
        return cls

    return add
