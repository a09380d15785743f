"""What deployed models made of some test images: ``features.safetensors`` of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fedshift.core import rng
from fedshift.store.files import parsed, replace_with
from fedshift.store.trees import read_tensors, write_tensors

PREFERRED = "original"  # the stream whose images are taken, where there is one of this name
TENSORS = ("features", "labels", "predictions", "client", "positions")


@dataclass(frozen=True)
class Wanted:
    """What decides which images are taken: features of other ones are made again."""

    at_most: int  # images of each client
    stream: str
    seed: int
    task_hash: str


@dataclass(frozen=True)
class Features:
    """Rows of images, client by client, each client's in the order of its stream."""

    features: Tensor  # float32 [n, d]: what the head of the client's deployed model sees
    labels: Tensor  # int64 [n]
    predictions: Tensor  # int64 [n]
    client: Tensor  # int64 [n]: into ``clients``
    positions: Tensor  # int64 [n]: in the client's stream
    clients: tuple[str, ...]
    unseen: tuple[str, ...]  # those of them that took part in no training
    classes: tuple[str, ...]
    round: int  # of the model, chosen by validation
    wanted: Wanted

    def save(self, path: Path) -> None:
        """As a safetensors file, all or nothing."""
        tensors = {name: getattr(self, name).contiguous() for name in TENSORS}
        facts = {"clients": self.clients, "unseen": self.unseen, "classes": self.classes, "round": self.round}
        described = {_kebab(key): value for key, value in {**facts, **asdict(self.wanted)}.items()}
        replace_with(path, lambda temporary: write_tensors(temporary, tensors, described))

    @staticmethod
    def load(path: Path) -> Features:
        """From a file; it says in a sentence what is wrong with it."""
        tensors, described = read_tensors(path)
        return parsed(path, lambda: _features(tensors, described))


def _features(tensors: Mapping[str, Tensor], described: Mapping[str, Any]) -> Features:
    facts = {key.replace("-", "_"): value for key, value in described.items()}
    clients, unseen, classes = (tuple(facts[key]) for key in ("clients", "unseen", "classes"))
    wanted = Wanted(**{key: facts[key] for key in Wanted.__dataclass_fields__})
    features, labels, answers, client, positions = (tensors[name] for name in TENSORS)
    rows = (features, labels, answers, client, positions)
    return Features(*rows, clients, unseen, classes, facts["round"], wanted)


def positions_of(count: int, at_most: int, seed: int, client: str) -> Tensor:
    """The first ``at_most`` of a permutation of a stream's positions, in their order; more contain fewer.

    >>> positions_of(3, 5, seed=0, client="a")
    tensor([0, 1, 2])
    """
    return rng.permutation(rng.seed_of(seed, "features", client), count)[:at_most].sort().values


def _kebab(name: str) -> str:
    return name.replace("_", "-")
