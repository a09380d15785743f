"""What every partition is made of: the base class, the registry, checked options, and ways to cut and name."""

from __future__ import annotations

import inspect
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedshift.core import rng
from fedshift.core.rng import seed_of
from fedshift.data.pool import Pool
from fedshift.errors import UserError

_ALPHA_LIMIT = 1e9  # shares are as good as equal there; far beyond it numpy's sampler overflows and gives zeros


@dataclass(frozen=True)
class Partition(ABC):
    """Options of one way to give images to clients."""

    name: ClassVar[str] = ""

    @abstractmethod
    def assign(self, pool: Pool, seed: int) -> dict[str, Tensor]:
        """Client name -> sorted int64 indices into the pool, in client order, disjoint and never empty."""

    @classmethod
    def describe(cls) -> str:
        """One line about this partition: the first of its docstring.

        >>> PARTITIONS["iid"].describe()
        'Every client gets an equal random share of the pool.'
        """
        return (inspect.getdoc(cls) or "").partition("\n")[0]


PARTITIONS: dict[str, type[Partition]] = {}

P = TypeVar("P", bound=Partition)


def register(name: str) -> Callable[[type[P]], type[P]]:
    """Class decorator: make a partition known as ``name`` (kebab-case) in ``PARTITIONS``.

    >>> sorted(PARTITIONS)
    ['brfl', 'by-domain', 'by-user', 'dirichlet', 'dirichlet-new', 'iid', 'pathological', 'superclass']
    """

    def add(cls: type[P]) -> type[P]:
        if name in PARTITIONS:
            raise ValueError(f"two partitions are called {name}: {PARTITIONS[name].__name__} and {cls.__name__}")
        cls.name = name
        PARTITIONS[name] = cls
        return cls

    return add


# --- options -----------------------------------------------------------------------------------------------------


def whole(option: str, value: object, least: int) -> None:
    """Refuse an option that is not a whole number of at least ``least`` (True is an int to Python, not to a user)."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{option} must be a whole number of at least {least}, not {value!r}")


def positive_alpha(value: object) -> None:
    """Refuse a Dirichlet concentration that is no positive number (NaN fails every comparison, so it is refused)."""
    right = isinstance(value, numbers.Real) and not isinstance(value, bool) and 0 < float(value) <= _ALPHA_LIMIT
    if not right:
        raise UserError(f"alpha must be a positive number of at most {_ALPHA_LIMIT:.0e}, not {value!r}")


# --- pieces every partition is made of -----------------------------------------------------------------------------


def numbered(stem: str, parts: Sequence[Tensor], width: int = 1) -> dict[str, Tensor]:
    """Name the parts stem-0, stem-1, ... padded with zeros, because names are sorted as text in many places."""
    width = max(width, len(str(len(parts) - 1)))
    return {f"{stem}-{i:0{width}d}": part.sort().values for i, part in enumerate(parts)}


def numbered_within(owners: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor]:
    """Plain names when everybody is alone, otherwise all are numbered with one width.

    Numbering only the crowded ones could give one name to two clients: "a" cut in two makes an "a-0" that may exist.
    """
    if all(len(parts) == 1 for parts in owners.values()):
        return {name: parts[0].sort().values for name, parts in owners.items()}
    width = max(len(str(len(parts) - 1)) for parts in owners.values())
    named: dict[str, Tensor] = {}
    for name, parts in owners.items():
        named |= numbered(name, parts, width)
    return named


def members(
    kind: str, what: str, key: str, codes: Tensor | None, names: Sequence[str], total: int
) -> dict[str, Tensor]:
    """Name -> indices of its images, in code order, for the names that have any."""
    if codes is None:
        raise UserError(
            f"the partition {kind} needs the {what} of every image, which this data source does not have: "
            f'say which column holds it with columns = {{ {key} = "..." }} in [data], '
            f"or -c 'data.columns={{ {key} = \"...\" }}'"
        )
    if codes.shape != (total,):
        raise UserError(f"{total} images need as many {what} codes, not {list(codes.shape)}")
    if int(codes.min()) < 0 or int(codes.max()) >= len(names):
        raise UserError(
            f"{what} codes must lie in 0..{len(names) - 1} because there are {len(names)} {what} names, "
            f"found {int(codes.min())}..{int(codes.max())}"
        )
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise UserError(f"the {what} name {twice!r} occurs twice: give every {what} a name of its own")
    order = codes.argsort(stable=True)
    counts = codes.to(torch.int64).bincount(minlength=len(names)).tolist()
    return {name: rows for name, rows in zip(names, torch.split(order, counts), strict=True) if len(rows)}


def enough(clients: int, images: int) -> None:
    """Refuse more clients than images: somebody would own nothing."""
    if clients > images:
        raise UserError(f"{clients} clients cannot share {images} images: ask for at most {images} clients")


def shares(n: int, clients: int, seed: int) -> list[Tensor]:
    """Positions 0..n-1 shuffled and cut into shares whose sizes differ by at most one."""
    enough(clients, n)
    return list(rng.permutation(seed, n).tensor_split(clients))


def by_class(labels: Tensor, seed: int) -> tuple[Tensor, np.ndarray]:
    """Positions class after class, shuffled inside each class, and the size of every class that occurs."""
    order = rng.permutation(seed, len(labels))
    order = order[labels[order].argsort(stable=True)]
    return order, np.unique(labels.numpy(), return_counts=True)[1]


def deal(order: Tensor, dealt: np.ndarray) -> list[Tensor]:
    """Deal the class-ordered positions: client k gets the next ``dealt[c, k]`` of class c. Each keeps class order."""
    classes, clients = dealt.shape
    owner = torch.from_numpy(np.repeat(np.tile(np.arange(clients), classes), dealt.ravel()))
    return list(torch.split(order[owner.argsort(stable=True)], dealt.sum(axis=0).tolist()))


def generator(*parts: object) -> np.random.Generator:
    """Numpy's generator for Dirichlet draws, which the counter-based randomness does not offer."""
    return np.random.Generator(np.random.PCG64(seed_of(*parts)))
