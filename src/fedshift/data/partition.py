"""Partitions: who owns which image of a pool.

A partition is a frozen set of options with one pure method, ``assign(pool, seed)``. Its answer is an ordered mapping
from client name to sorted indices into the pool. No image has two owners, no client is empty, and the same seed gives
the same owners. Every loop that waits for a lucky draw ends, with a sentence that says how far it got.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from fedshift.core.rng import seed_of
from fedshift.data._label_partitions import Brfl, Dirichlet, DirichletNew, Iid, LabelPartition, Pathological
from fedshift.data._partition import PARTITIONS, Partition, members, numbered_within, register, shares, whole
from fedshift.data.pool import Pool
from fedshift.errors import UserError

__all__ = [
    "PARTITIONS",
    "Brfl",
    "ByDomain",
    "ByUser",
    "Dirichlet",
    "DirichletNew",
    "Iid",
    "LabelPartition",
    "Partition",
    "Pathological",
    "Superclass",
    "register",
]


@register("by-domain")
@dataclass(frozen=True)
class ByDomain(Partition):
    """Every client owns images of one domain: a whole domain, or a share of it.

    ``clients`` in all are spread as evenly as possible (the first domains get one more); without it every domain has
    ``clients_per_domain``. Inside a domain images are shared ``iid``, or by ``dirichlet`` with ``alpha``, ``min_size``
    and ``retries``. A domain's shares do not depend on which other domains exist.

    >>> import torch
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
        whole("clients-per-domain", self.clients_per_domain, 1)
        if self.clients is not None:
            whole("clients", self.clients, 1)
            if self.clients_per_domain != 1:
                raise UserError("by-domain takes either clients or clients-per-domain, not both")
        if self.inside not in _INSIDE:
            raise UserError(f"inside must be one of {', '.join(_INSIDE)}, not {self.inside!r}")
        whole("min-size", self.min_size, 0)
        whole("retries", self.retries, 1)
        self._cutter(1)

    def _cutter(self, clients: int) -> LabelPartition:
        return _INSIDE[self.inside](self, clients)

    def assign(self, pool: Pool, seed: int) -> dict[str, Tensor]:
        """Cut every domain on its own."""
        domains = members(self.name, "domain", "client", pool.domains, pool.domain_names, len(pool))
        owners: dict[str, list[Tensor]] = {}
        for (domain, rows), clients in zip(domains.items(), self._counts(len(domains)), strict=True):
            try:
                parts = self._cutter(clients).cut(pool.labels[rows], seed_of(seed, "by-domain", domain))
            except UserError as error:
                raise UserError(f"in domain {domain}, {error}") from None
            owners[domain] = [rows[part] for part in parts]
        return numbered_within(owners)

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

    >>> import torch
    >>> pool = Pool(torch.zeros(4, 1, 1, 1, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64), ("a",),
    ...             users=torch.tensor([1, 0, 1, 1]), user_names=("ann", "bob"))
    >>> {client: rows.tolist() for client, rows in ByUser(min_samples=2).assign(pool, seed=0).items()}
    {'bob': [0, 2, 3]}
    """

    min_samples: int = 1

    def __post_init__(self) -> None:
        """Refuse options that cannot be meant."""
        whole("min-samples", self.min_samples, 1)

    def assign(self, pool: Pool, seed: int) -> dict[str, Tensor]:
        """Nothing is drawn: the source says who owns what, whatever the seed."""
        codes, names = (pool.domains, pool.domain_names) if pool.users is None else (pool.users, pool.user_names)
        users = members(self.name, "user", "client", codes, names, len(pool))
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

    >>> import torch
    >>> pool = Pool(torch.zeros(8, 1, 1, 1, dtype=torch.uint8), torch.arange(8) % 4, ("cat", "dog", "oak", "fir"),
    ...             supers=torch.arange(8) % 4 // 2, super_names=("pets", "trees"))
    >>> {client: len(rows) for client, rows in Superclass(clients_per_superclass=2).assign(pool, seed=0).items()}
    {'pets-0': 2, 'pets-1': 2, 'trees-0': 2, 'trees-1': 2}
    """

    clients_per_superclass: int = 5

    def __post_init__(self) -> None:
        """Refuse options that cannot be meant."""
        whole("clients-per-superclass", self.clients_per_superclass, 1)

    def assign(self, pool: Pool, seed: int) -> dict[str, Tensor]:
        """Cut every superclass on its own; sizes inside one differ by at most one."""
        supers = members(self.name, "superclass", "super", pool.supers, pool.super_names, len(pool))
        owners: dict[str, list[Tensor]] = {}
        for name, rows in supers.items():
            try:
                parts = shares(len(rows), self.clients_per_superclass, seed_of(seed, "superclass", name))
            except UserError as error:
                raise UserError(f"in superclass {name}, {error}") from None
            owners[name] = [rows[part] for part in parts]
        return numbered_within(owners)
