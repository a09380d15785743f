"""Test streams: the same test data under different shifts, made once and stored, the same bytes for every method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from fedshift.core import rng
from fedshift.data import corruptions
from fedshift.data.pool import Pool
from fedshift.errors import UserError


@dataclass(frozen=True)
class Setting:
    """How a stream is shown to an adapter; printed with every result, because it changes what a number means."""

    order: Literal["shuffled", "stored", "by-class"] = "shuffled"
    reset: Literal["stream"] = "stream"  # an adapter's state is reset at the start of every stream
    passes: int = 1


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


@dataclass(frozen=True)
class StreamKind:
    """A shift. Subclasses say how its images come from the clients' test images."""

    order: Literal["shuffled", "stored", "by-class"] = "shuffled"

    kind: ClassVar[str] = ""

    def images(self, images: Tensor, ids: Tensor, seed: int) -> Tensor | None:
        """The shifted versions of these images, or None if they stay what they are."""
        raise UserError(f"stream kind {type(self).__name__} does not say what its images are")

    def make(self, name: str, pool: Pool, content: Tensor, tests: Mapping[str, Tensor], seed: int) -> Stream:
        """The stream of all clients; ``tests`` are their test indices into the pool."""
        used = torch.cat(list(tests.values())).unique() if tests else torch.zeros(0, dtype=torch.int64)
        shifted = self.images(pool.images[used], content[used], rng.seed_of(seed, "stream", self.kind))
        place = torch.full((len(pool),), -1, dtype=torch.int64)
        place[used] = torch.arange(len(used))
        index = {client: self._arrival(positions, pool, content, seed) for client, positions in tests.items()}
        if shifted is None:
            return Stream(name, self.kind, Setting(self.order), None, pool.labels, content, index)
        own = {client: place[positions] for client, positions in index.items()}
        return Stream(name, self.kind, Setting(self.order), shifted, pool.labels[used], content[used], own)

    def _arrival(self, positions: Tensor, pool: Pool, content: Tensor, seed: int) -> Tensor:
        """The order of arrival: a function of each client's own samples, so other clients cannot change it."""
        if self.order == "stored":
            return positions
        keys = rng.bits(rng.seed_of(seed, "order"), content[positions])
        shuffled = positions[keys.argsort(stable=True)]
        if self.order == "by-class":
            return shuffled[pool.labels[shuffled].argsort(stable=True)]
        return shuffled


S = TypeVar("S", bound=type[StreamKind])
STREAMS: dict[str, type[StreamKind]] = {}


def stream_kind(name: str) -> Callable[[S], S]:
    """Register a stream kind."""

    def add(cls: S) -> S:
        cls.kind = name
        STREAMS[name] = cls
        return cls

    return add


@stream_kind("original")
@dataclass(frozen=True)
class Original(StreamKind):
    """The client's own test images, unchanged."""

    def images(self, images: Tensor, ids: Tensor, seed: int) -> Tensor | None:
        """Nothing changes."""
        return None


@stream_kind("corrupted")
@dataclass(frozen=True)
class Corrupted(StreamKind):
    """One common corruption per image, drawn from ``names`` by the image's own id, at one severity."""

    severity: int = 5
    names: tuple[str, ...] = corruptions.NAMES

    def __post_init__(self) -> None:
        """Refuse severities and names that do not exist."""
        if not 1 <= self.severity <= 5:
            raise UserError(f"severity must be 1 to 5, not {self.severity}")
        for name in self.names:
            if name not in corruptions.NAMES:
                raise UserError(f"there is no corruption {name!r}; there are: {', '.join(corruptions.NAMES)}")

    def images(self, images: Tensor, ids: Tensor, seed: int) -> Tensor | None:
        """Corrupt every image once."""
        return corruptions.corrupt_mixed(images, self.severity, seed, ids, self.names)
