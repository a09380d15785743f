"""A pool: every image of a data source held once as uint8, with what is known about each."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from fedshift.errors import UserError


@dataclass(frozen=True, eq=False)
class Column:
    """One more column of a source: a text for every image, "" where there is none. Every text is held once.

    >>> sex = Column.of(["f", "m", "", "f"])
    >>> sex[0], len(sex), sex.at(torch.tensor([3, 2])), sex.values
    ('f', 4, ('f', ''), ('', 'f', 'm'))
    """

    codes: Tensor  # int64 [N]
    values: tuple[str, ...]

    @classmethod
    def of(cls, texts: Sequence[str]) -> Column:
        """The column of these texts."""
        values, codes = np.unique(np.array(texts, dtype=object), return_inverse=True)
        return cls(torch.from_numpy(codes.reshape(-1).astype(np.int64)), tuple(values.tolist()))

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, position: int) -> str:
        return self.values[int(self.codes[position])]

    def at(self, positions: Tensor) -> tuple[str, ...]:
        """The texts of some images; a negative position stands for an image without one."""
        known = positions >= 0
        codes = self.codes[positions.clamp(min=0)].tolist()
        return tuple(self.values[code] if here else "" for code, here in zip(codes, known.tolist(), strict=True))


@dataclass(frozen=True)
class Pool:
    """Images and labels of a source, before anybody is a client.

    ``domains``, ``users``, ``supers``, ``groups`` and ``splits`` are integer codes per image into the matching tuple of
    names, or None when the source does not have that column. ``groups`` names images that must stay on one side of a
    split (all images of a patient, several crops of one photograph), -1 where it is not known; exact duplicates are found
    from the pixels and need no column. ``names`` says where every image comes from, ``attributes`` are columns that
    nobody trains on: results can be told apart by them.
    """

    images: Tensor  # uint8 [N, channels, height, width]
    labels: Tensor  # int64 [N]
    classes: tuple[str, ...]
    domains: Tensor | None = None
    domain_names: tuple[str, ...] = ()
    users: Tensor | None = None
    user_names: tuple[str, ...] = ()
    supers: Tensor | None = None
    super_names: tuple[str, ...] = ()
    groups: Tensor | None = None
    group_names: tuple[str, ...] = ()
    splits: Tensor | None = None  # 0 train, 1 val, 2 test: the file's own split
    names: tuple[str, ...] = ()  # a path or a row; empty: only numbers are known
    attributes: Mapping[str, Column] = field(default_factory=dict)
    provenance: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse pools that cannot be right."""
        if self.images.dtype != torch.uint8 or self.images.ndim != 4:
            raise UserError(
                f"images must be uint8 [N, channels, height, width], not {self.images.dtype} {list(self.images.shape)}"
            )
        if self.labels.shape != (len(self.images),):
            raise UserError(f"{len(self.images)} images need as many labels, not {list(self.labels.shape)}")
        if len(self.images) == 0:
            raise UserError("the data source holds no images")
        if int(self.labels.min()) < 0 or int(self.labels.max()) >= len(self.classes):
            raise UserError(
                f"labels must lie in 0..{len(self.classes) - 1}, found "
                f"{int(self.labels.min())}..{int(self.labels.max())}"
            )

    def __len__(self) -> int:
        return len(self.images)

    def take(self, index: Tensor) -> Pool:
        """Only these images.

        >>> x = torch.zeros(3, 1, 2, 2, dtype=torch.uint8)
        >>> len(Pool(x, torch.zeros(3, dtype=torch.int64), ("a",)).take(torch.tensor([0, 2])))
        2
        """
        columns = ("images", "labels", "domains", "users", "supers", "groups", "splits")
        chosen = {name: column[index] for name in columns if (column := getattr(self, name)) is not None}
        names = tuple(self.names[i] for i in index.tolist()) if self.names else ()
        attributes = {name: Column(column.codes[index], column.values) for name, column in self.attributes.items()}
        provenance = {**self.provenance, "taken": len(index)}
        return replace(self, **chosen, names=names, attributes=attributes, provenance=provenance)

    def carrying(self, attributes: Sequence[str]) -> Pool:
        """With these of its further columns and no others; nothing named: all it has.

        >>> x, y = torch.zeros(1, 1, 2, 2, dtype=torch.uint8), torch.tensor([0])
        >>> pool = Pool(x, y, ("a",), attributes={"sex": Column.of(["f"]), "age": Column.of(["7"])})
        >>> list(pool.carrying(["age"]).attributes), list(pool.carrying([]).attributes)
        (['age'], ['sex', 'age'])
        """
        for name in attributes:
            if name not in self.attributes:
                there = ", ".join(self.attributes) or "none"
                raise UserError(f'the data have no column "{name}" (attributes); the pool carries: {there}')
        return replace(self, attributes={name: self.attributes[name] for name in attributes}) if attributes else self

    def only(self, domains: Sequence[str] = (), classes: Sequence[str] = ()) -> Pool:
        """Only images of these domains and classes; classes get new numbers in the order given. Nothing named: all.

        >>> x = torch.zeros(3, 1, 2, 2, dtype=torch.uint8)
        >>> Pool(x, torch.tensor([0, 1, 2]), ("cat", "dog", "owl")).only(classes=["owl", "cat"]).labels.tolist()
        [1, 0]
        """
        keep = torch.ones(len(self), dtype=torch.bool)
        if domains:
            keep &= torch.isin(
                _codes(self.domains, self.domain_names, "domain"), _wanted(domains, self.domain_names, "domain")
            )
        if not classes:
            return self.take(keep.nonzero().flatten()) if domains else self
        wanted = _wanted(classes, self.classes, "class")
        chosen = self.take((keep & torch.isin(self.labels, wanted)).nonzero().flatten())
        number = torch.zeros(len(self.classes), dtype=torch.int64)
        number[wanted] = torch.arange(len(wanted))
        return replace(chosen, labels=number[chosen.labels], classes=tuple(classes))

    def content(self) -> Tensor:
        """A 63-bit fingerprint of every image's pixels: the sample's id, whatever else is in the pool.

        >>> x = torch.zeros(3, 1, 2, 2, dtype=torch.uint8); x[1] = 9
        >>> a, b, c = Pool(x, torch.zeros(3, dtype=torch.int64), ("a",)).content().tolist()
        >>> a == c, a == b
        (True, False)
        """
        flat = self.images.reshape(len(self), -1).contiguous().numpy()
        digests = b"".join(hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in flat)
        return torch.from_numpy((np.frombuffer(digests, dtype="<u8") >> np.uint64(1)).astype(np.int64))

    def together(self, content: Tensor) -> Tensor:
        """An id per image, equal for images that must stay on one side of a split.

        Those are images with identical pixels (``content`` is :meth:`content`) and images with the same ``groups`` code;
        an image whose group is not known stands for itself.

        >>> x = torch.zeros(3, 1, 2, 2, dtype=torch.uint8); x[1] = 9
        >>> pool = Pool(x, torch.zeros(3, dtype=torch.int64), ("a",))
        >>> a, b, c = pool.together(pool.content()).tolist()
        >>> a == c, a == b
        (True, False)
        """
        if self.groups is None:
            return content
        same = np.unique(content.numpy(), return_inverse=True)[1].reshape(-1)
        alone = torch.arange(len(self)) + int(self.groups.max()) + 1
        parts = _joined(same, torch.where(self.groups < 0, alone, self.groups).numpy())
        # named by the smallest fingerprint of its members: the id of a group does not change when other images come in
        smallest = torch.full((int(parts.max()) + 1,), torch.iinfo(torch.int64).max)
        return smallest.scatter_reduce(0, parts, content, "amin")[parts]


def _codes(codes: Tensor | None, names: tuple[str, ...], what: str) -> Tensor:
    if codes is None or not names:
        raise UserError(f"{what}s were asked for by name, but the data source has none")
    return codes


def _wanted(wanted: Sequence[str], names: tuple[str, ...], what: str) -> Tensor:
    for name in wanted:
        if name not in names:
            raise UserError(f"the data source has no {what} {name!r}; it has: {', '.join(names)}")
    return torch.tensor([names.index(name) for name in wanted])


def _joined(a: np.ndarray, b: np.ndarray) -> Tensor:
    """Connected components of 'same a or same b': a duplicate of a group's member belongs to the group."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    n = len(a)
    codes = np.unique(b, return_inverse=True)[1]
    rows = np.concatenate([np.arange(n), np.arange(n)])
    cols = np.concatenate([n + a, 2 * n + codes])
    graph = coo_array((np.ones(2 * n, dtype=bool), (rows, cols)), shape=(3 * n, 3 * n))
    return torch.from_numpy(connected_components(graph, directed=False)[1][:n].astype(np.int64))
