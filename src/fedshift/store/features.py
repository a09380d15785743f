"""What deployed models made of some test images: ``features.safetensors`` of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedshift.core import rng
from fedshift.errors import UserError

PREFERRED = "original"  # the stream whose images are taken, where there is one of this name
HEADER = "fedshift"
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

    def as_bytes(self) -> bytes:
        """As a safetensors file; its metadata are JSON in one entry, because several have no fixed order."""
        tensors = {name: getattr(self, name).contiguous() for name in TENSORS}
        facts = {"clients": self.clients, "unseen": self.unseen, "classes": self.classes, "round": self.round}
        described = {_kebab(key): value for key, value in {**facts, **asdict(self.wanted)}.items()}
        return save(tensors, {HEADER: json.dumps(described)})

    @staticmethod
    def load(path: Path) -> Features:
        """From a file; a UserError says what is wrong with it."""
        try:
            with safe_open(path, framework="pt") as file:
                facts = header_of(file.metadata())
                features, labels, answers, client, positions = (file.get_tensor(name) for name in TENSORS)
            clients, unseen, classes = (tuple(facts[key]) for key in ("clients", "unseen", "classes"))
            wanted = Wanted(**{key: facts[key] for key in Wanted.__dataclass_fields__})
            tensors = (features, labels, answers, client, positions)
            return Features(*tensors, clients, unseen, classes, facts["round"], wanted)
        except (OSError, SafetensorError, LookupError, TypeError, ValueError) as error:
            raise UserError(f"{path} holds no features or is damaged ({error})") from None


def positions_of(count: int, at_most: int, seed: int, client: str) -> Tensor:
    """The first ``at_most`` of a permutation of a stream's positions, in their order; more contain fewer.

    >>> positions_of(3, 5, seed=0, client="a")
    tensor([0, 1, 2])
    """
    return rng.permutation(rng.seed_of(seed, "features", client), count)[:at_most].sort().values


def header_of(metadata: Mapping[str, str] | None) -> dict[str, Any]:
    """What the file says about itself, by the names of fields."""
    found: dict[str, Any] = json.loads((metadata or {})[HEADER])
    return {key.replace("-", "_"): value for key, value in found.items()}


def _kebab(name: str) -> str:
    return name.replace("_", "-")
