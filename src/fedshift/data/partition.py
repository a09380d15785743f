"""Partitions: who owns which image of a pool.

A partition is a frozen set of options with one pure method, ``assign(pool, seed)``. Its answer is an ordered mapping
from client name to sorted indices into the pool. No image has two owners, no client is empty, and the same seed gives
the same owners. Every loop that waits for a lucky draw ends, with a sentence that says how far it got.
"""

from __future__ import annotations

import inspect
import math
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


def _whole(option: str, value: object, least: int) -> None:
    """Refuse an option that is not a whole number of at least ``least`` (True is an int to Python, not to a user)."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{option} must be a whole number of at least {least}, not {value!r}")


def _alpha(value: object) -> None:
    """Refuse a Dirichlet concentration that is no positive number (NaN fails every comparison, so it is refused)."""
    right = isinstance(value, numbers.Real) and not isinstance(value, bool) and 0 < float(value) <= _ALPHA_LIMIT
    if not right:
        raise UserError(f"alpha must be a positive number of at most {_ALPHA_LIMIT:.0e}, not {value!r}")


# --- pieces every partition is made of -----------------------------------------------------------------------------


def _numbered(stem: str, parts: Sequence[Tensor], width: int = 1) -> dict[str, Tensor]:
    """Name the parts stem-0, stem-1, ... padded with zeros, because names are sorted as text in many places."""
    width = max(width, len(str(len(parts) - 1)))
    return {f"{stem}-{i:0{width}d}": part.sort().values for i, part in enumerate(parts)}


def _numbered_within(owners: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor]:
    """Plain names when everybody is alone, otherwise all are numbered with one width.

    Numbering only the crowded ones could give one name to two clients: "a" cut in two makes an "a-0" that may exist.
    """
    if all(len(parts) == 1 for parts in owners.values()):
        return {name: parts[0].sort().values for name, parts in owners.items()}
    width = max(len(str(len(parts) - 1)) for parts in owners.values())
    named: dict[str, Tensor] = {}
    for name, parts in owners.items():
        named |= _numbered(name, parts, width)
    return named


def _members(
    kind: str, what: str, key: str, codes: Tensor | None, names: Sequence[str], total: int
) -> dict[str, Tensor]:
    """Name -> indices of its images, in code order, for the names that have any."""
    if codes is None:
        raise UserError(
            f"the partition {kind} needs the {what} of every image, which this data source does not have: "
            f'say which column holds it with columns = {{ {key} = "..." }}'
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


def _enough(clients: int, images: int) -> None:
    """Refuse more clients than images: somebody would own nothing."""
    if clients > images:
        raise UserError(f"{clients} clients cannot share {images} images: ask for at most {images} clients")


def _shares(n: int, clients: int, seed: int) -> list[Tensor]:
    """Positions 0..n-1 shuffled and cut into shares whose sizes differ by at most one."""
    _enough(clients, n)
    return list(rng.permutation(seed, n).tensor_split(clients))


def _by_class(labels: Tensor, seed: int) -> tuple[Tensor, np.ndarray]:
    """Positions class after class, shuffled inside each class, and the size of every class that occurs."""
    order = rng.permutation(seed, len(labels))
    order = order[labels[order].argsort(stable=True)]
    return order, np.unique(labels.numpy(), return_counts=True)[1]


def _deal(order: Tensor, dealt: np.ndarray) -> list[Tensor]:
    """Deal the class-ordered positions: client k gets the next ``dealt[c, k]`` of class c. Each keeps class order."""
    classes, clients = dealt.shape
    owner = torch.from_numpy(np.repeat(np.tile(np.arange(clients), classes), dealt.ravel()))
    return list(torch.split(order[owner.argsort(stable=True)], dealt.sum(axis=0).tolist()))


def _generator(*parts: object) -> np.random.Generator:
    """Numpy's generator for Dirichlet draws, which the counter-based randomness does not offer."""
    return np.random.Generator(np.random.PCG64(seed_of(*parts)))


# --- partitions that look at labels only ---------------------------------------------------------------------------


@dataclass(frozen=True)
class LabelPartition(Partition):
    """A partition that needs nothing but labels, so that it can also be applied inside a domain."""

    clients: int

    def __post_init__(self) -> None:
        """Refuse a number of clients that is none."""
        _whole("clients", self.clients, 1)

    @abstractmethod
    def cut(self, labels: Tensor, seed: int) -> list[Tensor]:
        """Positions 0..len(labels)-1 of each client."""

    def assign(self, pool: Pool, seed: int) -> dict[str, Tensor]:
        """Cut the whole pool."""
        return _numbered("client", self.cut(pool.labels, seed))


@register("iid")
@dataclass(frozen=True)
class Iid(LabelPartition):
    """Every client gets an equal random share of the pool.

    >>> pool = Pool(torch.zeros(7, 1, 1, 1, dtype=torch.uint8), torch.zeros(7, dtype=torch.int64), ("a",))
    >>> {client: len(rows) for client, rows in Iid(clients=3).assign(pool, seed=0).items()}
    {'client-0': 3, 'client-1': 2, 'client-2': 2}
    """

    def cut(self, labels: Tensor, seed: int) -> list[Tensor]:
        """Equal shares of a permutation; sizes differ by at most one."""
        return _shares(len(labels), self.clients, seed_of(seed, "iid"))


@register("dirichlet")
@dataclass(frozen=True)
class Dirichlet(LabelPartition):
    """Every class is dealt to the clients in proportions drawn from Dirichlet(alpha), until all have min-size images.

    All images are dealt. ``min_size = 0`` takes the first draw and leaves out the clients that got nothing (the
    distribution-shift setting of FedTTA, whose alpha is too small for everybody to get something).

    >>> labels = torch.arange(200) % 4
    >>> pool = Pool(torch.zeros(200, 1, 1, 1, dtype=torch.uint8), labels, ("a", "b", "c", "d"))
    >>> rows = Dirichlet(clients=5, alpha=0.5).assign(pool, seed=0)
    >>> sum(len(r) for r in rows.values()), min(len(r) for r in rows.values()) >= 10
    (200, True)
    """

    alpha: float
    min_size: int = 10
    retries: int = 100

    def __post_init__(self) -> None:
        """Refuse options that cannot be meant."""
        super().__post_init__()
        _alpha(self.alpha)
        _whole("min-size", self.min_size, 0)
        _whole("retries", self.retries, 1)

    def cut(self, labels: Tensor, seed: int) -> list[Tensor]:
        """Draw all proportions anew until the smallest client is large enough, at most ``retries`` times."""
        _enough(self.clients, len(labels))
        if self.clients * self.min_size > len(labels):
            raise UserError(
                f"{self.clients} clients with min-size {self.min_size} need {self.clients * self.min_size} images, "
                f"but there are {len(labels)}: lower clients or min-size"
            )
        order, sizes = _by_class(labels, seed_of(seed, "dirichlet", "order"))
        best = 0
        for attempt in range(self.retries):
            draw = _generator(seed, "dirichlet", attempt)
            shares = draw.dirichlet(np.full(self.clients, float(self.alpha)), size=len(sizes))
            # Rounded, not floored: with many classes flooring would feed the last client the crumbs of all the others.
            ends = np.rint(shares.cumsum(axis=1) * sizes[:, None]).astype(np.int64)
            ends[:, -1] = sizes
            dealt = np.diff(ends, axis=1, prepend=0)
            smallest = int(dealt.sum(axis=0).min())
            if smallest >= self.min_size:
                return [part for part in _deal(order, dealt) if len(part)]
            best = max(best, smallest)
        raise UserError(
            f"in {self.retries} draws of Dirichlet({self.alpha}) for {self.clients} clients the smallest client got at "
            f"most {best} images, but min-size is {self.min_size}: raise alpha or retries, or lower clients or min-size"
        )


@register("dirichlet-new")
@dataclass(frozen=True)
class DirichletNew(Partition):
    """The file's training images go to clients by Dirichlet(alpha), its test images to new clients by Dirichlet(new-alpha).

    The distribution shift of FedTTA: clients are called client-0 ..., new ones new-0 ...; make those unseen with
    ``[split] unseen = ["new-*"]``. New clients that got nothing are left out.

    >>> splits = torch.tensor([0] * 40 + [2] * 40)
    >>> pool = Pool(torch.zeros(80, 1, 1, 1, dtype=torch.uint8), torch.arange(80) % 2, ("a", "b"), splits=splits)
    >>> list(DirichletNew(clients=2, alpha=100, new_clients=2, new_alpha=100).assign(pool, seed=0))
    ['client-0', 'client-1', 'new-0', 'new-1']
    """

    clients: int
    alpha: float
    new_clients: int
    new_alpha: float
    min_size: int = 10
    retries: int = 100

    def __post_init__(self) -> None:
        """Both draws check their own options."""
        self._draws()

    def _draws(self) -> tuple[tuple[str, int, Dirichlet], ...]:
        seen = Dirichlet(self.clients, self.alpha, self.min_size, self.retries)
        return (("client", 0, seen), ("new", 2, Dirichlet(self.new_clients, self.new_alpha, min_size=0)))

    def assign(self, pool: Pool, seed: int) -> dict[str, Tensor]:
        """Two partitions of two parts of the pool."""
        if pool.splits is None:
            raise UserError(
                f"the partition {self.name} needs the file's own train and test split: say which column holds it with "
                'columns = { split = "..." }'
            )
        owned: dict[str, Tensor] = {}
        for stem, code, draw in self._draws():
            rows = (pool.splits == code).nonzero().flatten()
            parts = draw.cut(pool.labels[rows], seed_of(seed, self.name, stem))
            owned |= _numbered(stem, [rows[part] for part in parts])
        return owned


@register("brfl")
@dataclass(frozen=True)
class Brfl(LabelPartition):
    """BRFL's Dirichlet: groups of ten clients draw from their own chunk of the pool, then all are cut to equal sizes.

    The shuffled pool is cut into one chunk per group. Inside a chunk every class is dealt by Dirichlet(alpha) to the
    clients that do not yet hold a full share, again until the smallest holds half a share. All lists are joined and cut
    anew into equal pieces, so a client may straddle two draws; up to ``clients - 1`` images are left over. With
    alpha = 0.1 and ten classes one draw in twenty is accepted (0.01: one in 150), hence the many retries.

    >>> labels = torch.arange(203) % 4
    >>> pool = Pool(torch.zeros(203, 1, 1, 1, dtype=torch.uint8), labels, ("a", "b", "c", "d"))
    >>> {len(rows) for rows in Brfl(clients=20, alpha=1.0).assign(pool, seed=0).values()}
    {10}
    """

    alpha: float
    group: int = 10
    retries: int = 10_000

    def __post_init__(self) -> None:
        """Refuse options that cannot be meant."""
        super().__post_init__()
        _alpha(self.alpha)
        _whole("group", self.group, 1)
        _whole("retries", self.retries, 1)

    def cut(self, labels: Tensor, seed: int) -> list[Tensor]:
        """Deal chunk by chunk, join, and cut into equal pieces."""
        _enough(self.clients, len(labels))
        pool = rng.permutation(seed_of(seed, "brfl", "pool"), len(labels))
        bins: list[Tensor] = []
        for first in range(0, self.clients, self.group):
            last = min(first + self.group, self.clients)
            chunk = pool[first * len(pool) // self.clients : last * len(pool) // self.clients]
            parts = self._deal_chunk(labels[chunk], last - first, seed_of(seed, "brfl", first))
            bins += [chunk[part] for part in parts]
        size = len(labels) // self.clients
        return list(torch.cat(bins)[: size * self.clients].reshape(self.clients, size))

    def _deal_chunk(self, labels: Tensor, clients: int, seed: int) -> list[Tensor]:
        """One group's draw."""
        order, sizes = _by_class(labels, seed_of(seed, "order"))
        full = len(labels) / clients
        best = 0
        for attempt in range(self.retries):
            draw = _generator(seed, attempt)
            dealt = np.zeros((len(sizes), clients), dtype=np.int64)
            for row, n in zip(dealt, sizes.tolist(), strict=True):
                # The paper's code draws for everybody, zeroes the full clients and renormalises. A Dirichlet vector
                # restricted to some entries and renormalised is again Dirichlet, so drawing for the open ones alone
                # is the same law, and it cannot divide by zero when alpha is small and the open entries underflow.
                open_ = np.flatnonzero(dealt.sum(axis=0) < full)
                shares = draw.dirichlet(np.full(len(open_), float(self.alpha)))
                ends = np.floor(shares.cumsum() * n).clip(max=n)
                ends[-1] = n
                row[open_] = np.diff(ends, prepend=0)
            smallest = int(dealt.sum(axis=0).min())
            if smallest >= 0.5 * full:
                return _deal(order, dealt)
            best = max(best, smallest)
        raise UserError(
            f"in {self.retries} draws of Dirichlet({self.alpha}) for a group of {clients} clients the smallest client "
            f"got at most {best} images, but half of an equal share is {0.5 * full:g}: raise alpha or retries, "
            f"or lower group"
        )


@register("pathological")
@dataclass(frozen=True)
class Pathological(LabelPartition):
    """Every client gets a few shards, each of a single class, so it sees at most classes-per-client classes.

    Classes are cut into ``clients * classes_per_client`` shards in proportion to their sizes, so shards are about
    equally large and none holds two classes. With ``distinct`` a client's shards are of different classes whenever
    possible. All images are dealt.

    >>> labels = torch.arange(120) % 4
    >>> pool = Pool(torch.zeros(120, 1, 1, 1, dtype=torch.uint8), labels, ("a", "b", "c", "d"))
    >>> rows = Pathological(clients=10).assign(pool, seed=0)
    >>> {(len(r), len(labels[r].unique())) for r in rows.values()}
    {(12, 2)}
    """

    classes_per_client: int = 2
    distinct: bool = True

    def __post_init__(self) -> None:
        """Refuse options that cannot be meant."""
        super().__post_init__()
        _whole("classes-per-client", self.classes_per_client, 1)
        if not isinstance(self.distinct, bool):
            raise UserError(f"distinct must be true or false, not {self.distinct!r}")

    def cut(self, labels: Tensor, seed: int) -> list[Tensor]:
        """Cut classes into shards, deal shards to clients."""
        wanted = self.clients * self.classes_per_client
        _enough(self.clients, len(labels))
        if wanted > len(labels):
            raise UserError(
                f"{self.clients} clients with {self.classes_per_client} shards each need {wanted} images, "
                f"but there are {len(labels)}: lower clients or classes-per-client"
            )
        order, sizes = _by_class(labels, seed_of(seed, "pathological", "order"))
        if wanted < len(sizes):
            raise UserError(
                f"{self.clients} clients with {self.classes_per_client} classes each cannot hold all {len(sizes)} "
                f"classes: ask for at least {math.ceil(len(sizes) / self.classes_per_client)} clients"
            )
        shards = self._shards(sizes, wanted)
        deal = self._deal_distinct if self.distinct else self._deal_any
        hands = deal(shards, seed_of(seed, "pathological", "deal"))
        dealt = np.zeros((len(sizes), self.clients), dtype=np.int64)
        for c, (n, s) in enumerate(zip(sizes.tolist(), shards.tolist(), strict=True)):
            dealt[c] = np.diff(hands[:, c].cumsum() * n // s, prepend=0)  # s shards of n images, sizes within one
        return _deal(order, dealt)

    def _shards(self, sizes: np.ndarray, wanted: int) -> np.ndarray:
        """Shards per class, by Webster's rule from one each: the next shard goes where shards are largest.

        The rule never gives a class more shards than images. When hands must be distinct, a class with a shard for
        every client gets no more as long as another can take it.
        """
        shards = np.ones(len(sizes), dtype=np.int64)
        room = np.minimum(sizes, self.clients) if self.distinct else sizes
        for _ in range(wanted - len(sizes)):
            open_ = shards < room
            worth = sizes / (2 * shards + 1)
            shards[np.where(open_, worth, -1.0).argmax() if open_.any() else worth.argmax()] += 1
        return shards

    def _deal_any(self, shards: np.ndarray, seed: int) -> np.ndarray:
        """Shards per client and class, ``[clients, classes]``, dealt like cards."""
        cards = np.repeat(np.arange(len(shards)), shards)[rng.permutation(seed, int(shards.sum())).numpy()]
        hands = np.zeros((self.clients, len(shards)), dtype=np.int64)
        np.add.at(hands, (np.repeat(np.arange(self.clients), self.classes_per_client), cards), 1)
        return hands

    def _deal_distinct(self, shards: np.ndarray, seed: int) -> np.ndarray:
        """The same with different classes in every hand, and the fewest repeats where that is impossible.

        Clients choose classes at random, a class weighted by its shards left. A class with as many shards left as there
        are clients waiting must be chosen, or a later hand would need it twice; there are never more of those than a
        hand can hold. So repeats come only from classes with more shards than clients.
        """
        luck = rng.uniform(seed, torch.arange(self.clients), (len(shards),)).double().clamp(min=2.0**-25).log().numpy()
        hands = np.zeros((self.clients, len(shards)), dtype=np.int64)
        left = shards.copy()
        for turn, client in enumerate(rng.permutation(seed_of(seed, "turns"), self.clients).tolist()):
            waiting = self.clients - turn
            key = np.where(left > 0, luck[client] / np.maximum(left, 1), -np.inf)  # Efraimidis-Spirakis weighted draw
            key[left >= waiting] = np.inf
            chosen = (-key).argsort(kind="stable")[: self.classes_per_client]
            chosen = chosen[left[chosen] > 0]
            hands[client, chosen] += 1
            left[chosen] -= 1
            for _ in range(self.classes_per_client - len(chosen)):
                most = left.argmax()
                hands[client, most] += 1
                left[most] -= 1
        return hands


# --- partitions that follow a column of the source -----------------------------------------------------------------


@register("by-domain")
@dataclass(frozen=True)
class ByDomain(Partition):
    """Every client owns images of one domain: a whole domain, or a share of it.

    ``clients`` in all are spread as evenly as possible (the first domains get one more); without it every domain has
    ``clients_per_domain``. Inside a domain images are shared ``iid``, or by ``dirichlet`` with ``alpha``, ``min_size``
    and ``retries``. A domain's shares do not depend on which other domains exist.

    >>> pool = Pool(torch.zeros(6, 1, 1, 1, dtype=torch.uint8), torch.zeros(6, dtype=torch.int64), ("a",),
    ...             domains=torch.tensor([1, 0, 0, 0, 1, 1]), domain_names=("photo", "sketch"))
    >>> {client: rows.tolist() for client, rows in ByDomain().assign(pool, seed=0).items()}
    {'photo': [1, 2, 3], 'sketch': [0, 4, 5]}
    >>> list(ByDomain(clients=3).assign(pool, seed=0))
    ['photo-0', 'photo-1', 'sketch-0']
    """

    clients_per_domain: int = 1
    clients: int | None = None
    inside: str = "iid"
    alpha: float | None = None
    min_size: int = 10
    retries: int = 100

    def __post_init__(self) -> None:
        """Refuse options that cannot be meant, the ones for inside a domain included."""
        _whole("clients-per-domain", self.clients_per_domain, 1)
        if self.clients is not None:
            _whole("clients", self.clients, 1)
            if self.clients_per_domain != 1:
                raise UserError("by-domain takes either clients or clients-per-domain, not both")
        if self.inside not in _INSIDE:
            raise UserError(f"inside must be one of {', '.join(_INSIDE)}, not {self.inside!r}")
        _whole("min-size", self.min_size, 0)
        _whole("retries", self.retries, 1)
        self._cutter(1)

    def _cutter(self, clients: int) -> LabelPartition:
        return _INSIDE[self.inside](self, clients)

    def assign(self, pool: Pool, seed: int) -> dict[str, Tensor]:
        """Cut every domain on its own."""
        domains = _members(self.name, "domain", "client", pool.domains, pool.domain_names, len(pool))
        owners: dict[str, list[Tensor]] = {}
        for (domain, rows), clients in zip(domains.items(), self._counts(len(domains)), strict=True):
            try:
                parts = self._cutter(clients).cut(pool.labels[rows], seed_of(seed, "by-domain", domain))
            except UserError as error:
                raise UserError(f"in domain {domain}, {error}") from None
            owners[domain] = [rows[part] for part in parts]
        return _numbered_within(owners)

    def _counts(self, domains: int) -> list[int]:
        """Clients of each domain."""
        if self.clients is None:
            return [self.clients_per_domain] * domains
        if self.clients < domains:
            raise UserError(
                f"{self.clients} clients cannot cover {domains} domains: ask for at least {domains} clients, "
                f"or take domains out of the data"
            )
        each, more = divmod(self.clients, domains)
        return [each + (i < more) for i in range(domains)]


def _iid_inside(options: ByDomain, clients: int) -> LabelPartition:
    if options.alpha is not None:
        raise UserError('alpha has no meaning inside an iid domain: remove it or say inside = "dirichlet"')
    return Iid(clients)


def _dirichlet_inside(options: ByDomain, clients: int) -> LabelPartition:
    if options.alpha is None:
        raise UserError('by-domain with inside = "dirichlet" needs an alpha')
    return Dirichlet(clients, options.alpha, options.min_size, options.retries)


_INSIDE: dict[str, Callable[[ByDomain, int], LabelPartition]] = {"iid": _iid_inside, "dirichlet": _dirichlet_inside}


@register("by-user")
@dataclass(frozen=True)
class ByUser(Partition):
    """Every user (writer, hospital, camera) of the source is a client; users below min-samples are left out.

    Sources without user ids fall back to their domains.

    >>> pool = Pool(torch.zeros(4, 1, 1, 1, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64), ("a",),
    ...             users=torch.tensor([1, 0, 1, 1]), user_names=("ann", "bob"))
    >>> {client: rows.tolist() for client, rows in ByUser(min_samples=2).assign(pool, seed=0).items()}
    {'bob': [0, 2, 3]}
    """

    min_samples: int = 1

    def __post_init__(self) -> None:
        """Refuse options that cannot be meant."""
        _whole("min-samples", self.min_samples, 1)

    def assign(self, pool: Pool, seed: int) -> dict[str, Tensor]:
        """Nothing is drawn: the source says who owns what, whatever the seed."""
        codes, names = (pool.domains, pool.domain_names) if pool.users is None else (pool.users, pool.user_names)
        users = _members(self.name, "user", "client", codes, names, len(pool))
        kept = {user: rows for user, rows in users.items() if len(rows) >= self.min_samples}
        if not kept:
            most = max(len(rows) for rows in users.values())
            raise UserError(
                f"no user has as many images as min-samples {self.min_samples}: the largest of {len(users)} has {most}"
            )
        return kept


@register("superclass")
@dataclass(frozen=True)
class Superclass(Partition):
    """Every client owns an equal random share of one superclass, so it sees only that superclass' fine classes.

    >>> pool = Pool(torch.zeros(8, 1, 1, 1, dtype=torch.uint8), torch.arange(8) % 4, ("cat", "dog", "oak", "fir"),
    ...             supers=torch.arange(8) % 4 // 2, super_names=("pets", "trees"))
    >>> {client: len(rows) for client, rows in Superclass(clients_per_superclass=2).assign(pool, seed=0).items()}
    {'pets-0': 2, 'pets-1': 2, 'trees-0': 2, 'trees-1': 2}
    """

    clients_per_superclass: int = 5

    def __post_init__(self) -> None:
        """Refuse options that cannot be meant."""
        _whole("clients-per-superclass", self.clients_per_superclass, 1)

    def assign(self, pool: Pool, seed: int) -> dict[str, Tensor]:
        """Cut every superclass on its own; sizes inside one differ by at most one."""
        supers = _members(self.name, "superclass", "super", pool.supers, pool.super_names, len(pool))
        owners: dict[str, list[Tensor]] = {}
        for name, rows in supers.items():
            try:
                parts = _shares(len(rows), self.clients_per_superclass, seed_of(seed, "superclass", name))
            except UserError as error:
                raise UserError(f"in superclass {name}, {error}") from None
            owners[name] = [rows[part] for part in parts]
        return _numbered_within(owners)
