"""Partitions that look at labels only: equal shares, Dirichlet draws, shards."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedshift.core import rng
from fedshift.core.rng import seed_of
from fedshift.data._partition import (
    Partition,
    by_class,
    deal,
    enough,
    generator,
    numbered,
    positive_alpha,
    register,
    shares,
    whole,
)
from fedshift.data.pool import Pool
from fedshift.errors import UserError


@dataclass(frozen=True)
class LabelPartition(Partition):
    """A partition that needs nothing but labels, so that it can also be applied inside a domain."""

    clients: int

    def __post_init__(self) -> None:
        """Refuse a number of clients that is none."""
        whole("clients", self.clients, 1)

    @abstractmethod
    def cut(self, labels: Tensor, seed: int) -> list[Tensor]:
        """Positions 0..len(labels)-1 of each client."""

    def assign(self, pool: Pool, seed: int) -> dict[str, Tensor]:
        """Cut the whole pool."""
        return numbered("client", self.cut(pool.labels, seed))


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
        return shares(len(labels), self.clients, seed_of(seed, "iid"))


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
        positive_alpha(self.alpha)
        whole("min-size", self.min_size, 0)
        whole("retries", self.retries, 1)

    def cut(self, labels: Tensor, seed: int) -> list[Tensor]:
        """Draw all proportions anew until the smallest client is large enough, at most ``retries`` times."""
        enough(self.clients, len(labels))
        if self.clients * self.min_size > len(labels):
            raise UserError(
                f"{self.clients} clients with min-size {self.min_size} need {self.clients * self.min_size} images, "
                f"but there are {len(labels)}: lower clients or min-size"
            )
        order, sizes = by_class(labels, seed_of(seed, "dirichlet", "order"))
        best = 0
        for attempt in range(self.retries):
            draw = generator(seed, "dirichlet", attempt)
            shares = draw.dirichlet(np.full(self.clients, float(self.alpha)), size=len(sizes))
            # Rounded, not floored: with many classes flooring would feed the last client the crumbs of all the others.
            ends = np.rint(shares.cumsum(axis=1) * sizes[:, None]).astype(np.int64)
            ends[:, -1] = sizes
            dealt = np.diff(ends, axis=1, prepend=0)
            smallest = int(dealt.sum(axis=0).min())
            if smallest >= self.min_size:
                return [part for part in deal(order, dealt) if len(part)]
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
            if not len(rows):
                part = "training" if code == 0 else "test"
                raise UserError(f"the partition {self.name} found no {part} images in the file's own split")
            parts = draw.cut(pool.labels[rows], seed_of(seed, self.name, stem))
            owned |= numbered(stem, [rows[part] for part in parts])
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
        positive_alpha(self.alpha)
        whole("group", self.group, 1)
        whole("retries", self.retries, 1)

    def cut(self, labels: Tensor, seed: int) -> list[Tensor]:
        """Deal chunk by chunk, join, and cut into equal pieces."""
        enough(self.clients, len(labels))
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
        order, sizes = by_class(labels, seed_of(seed, "order"))
        full = len(labels) / clients
        best = 0
        for attempt in range(self.retries):
            draw = generator(seed, attempt)
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
                return deal(order, dealt)
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
        whole("classes-per-client", self.classes_per_client, 1)
        if not isinstance(self.distinct, bool):
            raise UserError(f"distinct must be true or false, not {self.distinct!r}")

    def cut(self, labels: Tensor, seed: int) -> list[Tensor]:
        """Cut classes into shards, deal shards to clients."""
        wanted = self.clients * self.classes_per_client
        enough(self.clients, len(labels))
        if wanted > len(labels):
            raise UserError(
                f"{self.clients} clients with {self.classes_per_client} shards each need {wanted} images, "
                f"but there are {len(labels)}: lower clients or classes-per-client"
            )
        order, sizes = by_class(labels, seed_of(seed, "pathological", "order"))
        if wanted < len(sizes):
            raise UserError(
                f"{self.clients} clients with {self.classes_per_client} classes each cannot hold all {len(sizes)} "
                f"classes: ask for at least {math.ceil(len(sizes) / self.classes_per_client)} clients"
            )
        shards = self._shards(sizes, wanted)
        give = self._deal_distinct if self.distinct else self._deal_any
        hands = give(shards, seed_of(seed, "pathological", "deal"))
        dealt = np.zeros((len(sizes), self.clients), dtype=np.int64)
        for c, (n, s) in enumerate(zip(sizes.tolist(), shards.tolist(), strict=True)):
            dealt[c] = np.diff(hands[:, c].cumsum() * n // s, prepend=0)  # s shards of n images, sizes within one
        return deal(order, dealt)

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
