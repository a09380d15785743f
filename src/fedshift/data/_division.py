"""Who gets which image for what: public ones, everybody's parts, unseen clients, and what is left out and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedshift.core import rng
from fedshift.data.partition import Partition
from fedshift.data.pool import Pool
from fedshift.data.split import LeftOut, Split, choose_unseen, purge, split, split_by_file
from fedshift.errors import UserError

BEYOND = "beyond train-fraction or train-limit"
HIDDEN = "test image, which tune does not show"
NOBODY = "given to no client by the partition"


@dataclass(frozen=True)
class Splitting:
    """How each client's data are divided, and who is unseen."""

    train: float = 0.6
    val: float = 0.2
    test: float = 0.2
    from_file: bool = False  # use the file's own train/test split; ``val`` is then a share of its training part
    train_fraction: float = 1.0  # keep this share of every client's training data (small-data studies)
    train_limit: int = 0  # keep at most so many of every client's training images; 0: all
    unseen: float | str | tuple[str, ...] = 0.0  # a share of the clients, a name or pattern, or several
    public: float = 0.0  # share of the images set apart, unlabelled, for everybody
    tune: bool = False  # show validation images in place of test images, to choose settings without looking at a test
    stratify: bool = False  # class by class; files of one's own have it, presets split as published
    missing_group: Literal["error", "own"] = "error"  # an image of no known group is refused, or stands for itself

    def __post_init__(self) -> None:
        """Refuse fractions that cannot be meant."""
        for name in ("train", "val", "test", "public", "train_fraction"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise UserError(f"[split] {name.replace('_', '-')} must lie in 0..1, not {value}")
        if not self.from_file and abs(self.train + self.val + self.test - 1) > 1e-6:
            raise UserError(
                f"[split] train + val + test must be 1, not {self.train + self.val + self.test:g} "
                f"({self.train:g} + {self.val:g} + {self.test:g})"
            )
        if isinstance(self.unseen, tuple) and len(set(self.unseen)) < len(self.unseen):
            twice = next(name for name in self.unseen if self.unseen.count(name) > 1)
            raise UserError(f"[split] unseen names {twice!r} twice")
        if self.train_limit < 0:
            raise UserError(f"[split] train-limit must not be negative, not {self.train_limit}")
        if self.tune and self.val == 0:
            raise UserError("[split] tune shows validation images, but val is 0")
        if self.train_fraction == 0 or (not self.from_file and self.train == 0):
            raise UserError("[split] train and train-fraction must be positive")
        if not self.from_file and self.test == 0 and not self.unseen:
            raise UserError("[split] test = 0 leaves nothing to test on; name unseen clients or give test a share")


@dataclass(frozen=True)
class Divided:
    """Every image of a pool in its place; they are rows of the pool."""

    groups: Tensor  # equal for images that stay together
    seen: Mapping[str, Split]
    unseen: Mapping[str, Tensor]
    public: Tensor
    left_out: tuple[LeftOut, ...]


def divide(pool: Pool, content: Tensor, partition: Partition, splitting: Splitting, seed: int) -> Divided:
    """Give every image its place; a sentence where a client would be left without training or test images."""
    groups = _groups(pool, content, splitting)
    public = _public(groups, splitting.public, seed)
    owned = {
        name: indices[~torch.isin(groups[indices], groups[public])] if len(public) else indices
        for name, indices in partition.assign(pool, rng.seed_of(seed, "partition")).items()
    }
    unseen = choose_unseen(list(owned), splitting.unseen, rng.seed_of(seed, "unseen")) if splitting.unseen else ()
    drawn = {
        name: _split_client(pool, owned[name], groups, splitting, rng.seed_of(seed, "split", name))
        for name in owned
        if name not in unseen
    }
    kept = {name: _limited(parts, splitting, rng.seed_of(seed, "split", name)) for name, parts in drawn.items()}
    seen, left_out = purge(kept, groups, content, [owned[name] for name in unseen])
    left_out += tuple(
        LeftOut(name, BEYOND, drawn[name][0][~torch.isin(drawn[name][0], kept[name][0])])
        for name in drawn
        if len(drawn[name][0]) > len(kept[name][0])
    )
    if splitting.tune:
        hidden = {**{name: test for name, (_, _, test) in seen.items()}, **{name: owned[name] for name in unseen}}
        left_out += tuple(LeftOut(name, HIDDEN, rows) for name, rows in hidden.items() if len(rows))
        seen = {name: (train, val, val) for name, (train, val, _) in seen.items()}
        unseen = ()
    tested = splitting.from_file or splitting.test > 0
    for name, (train, _, test) in seen.items():
        if len(train) == 0 or (tested and len(test) == 0):
            shown = "validation" if splitting.tune else "test"
            raise UserError(_without(shown if len(train) else "training", name, owned[name], groups, left_out))
    for name in unseen:
        if len(owned[name]) == 0:
            raise UserError(_without("test", name, owned[name], groups, left_out))
    used = torch.cat([public, *owned.values()])
    nobodys = torch.ones(len(pool), dtype=torch.bool).index_fill_(0, used, False).nonzero().flatten()
    left_out += (LeftOut("", NOBODY, nobodys),) if len(nobodys) else ()
    return Divided(groups, seen, {name: owned[name] for name in unseen}, public, left_out)


def _groups(pool: Pool, content: Tensor, splitting: Splitting) -> Tensor:
    """Which images stay together; one sentence if that is not known of one."""
    if pool.groups is not None and splitting.missing_group == "error" and bool((pool.groups < 0).any()):
        lost = (pool.groups < 0).nonzero().flatten()
        first = int(lost[0])
        name = pool.names[first] if pool.names else f"image {first}"
        column = pool.provenance.get("group", "group")
        more = f", and of {len(lost) - 1:,} more" if len(lost) > 1 else ""
        raise UserError(
            f'the group (column "{column}") of {name} is missing{more}: fill it in, or let such an image stand for itself '
            'with [split] missing-group = "own"'
        )
    return pool.together(content)


def _without(part: str, name: str, owned: Tensor, groups: Tensor, left_out: Sequence[LeftOut]) -> str:
    """Why a client cannot take part."""
    count = len(groups[owned].unique())
    why = [f"its {len(owned)} images are {count} group{'s' if count != 1 else ''}"] if count < len(owned) else []
    why += [f"{len(left.rows)} left out: {left.reason}" for left in left_out if left.client == name]
    told = f" ({'; '.join(why)})" if why else ""
    return f"client {name!r} has no {part} images left{told}; use fewer or larger clients"


def _public(groups: Tensor, fraction: float, seed: int) -> Tensor:
    """Images for everybody; whole groups, so that no client holds a duplicate of one."""
    if not fraction:
        return torch.zeros(0, dtype=torch.int64)
    order = rng.permutation(rng.seed_of(seed, "public"), len(groups))
    chosen = groups[order[: max(1, round(fraction * len(groups)))]].unique()
    return torch.isin(groups, chosen).nonzero().flatten()


def _split_client(pool: Pool, indices: Tensor, groups: Tensor, splitting: Splitting, seed: int) -> Split:
    labels = pool.labels if splitting.stratify else None
    if splitting.from_file:
        if pool.splits is None:
            raise UserError(
                '[split] from-file needs a split column in the data; map it with columns = { split = "..." }'
            )
        return split_by_file(indices, groups, pool.splits, splitting.val, seed, labels)
    return split(indices, groups, (splitting.train, splitting.val, splitting.test), seed, labels)


def _limited(parts: Split, splitting: Splitting, seed: int) -> Split:
    """Only so much of the training images as is wanted."""
    train, val, test = parts
    keep = max(1, round(splitting.train_fraction * len(train)))
    keep = min(keep, splitting.train_limit or keep)
    if keep < len(train):
        train = train[rng.permutation(rng.seed_of(seed, "fraction"), len(train))[:keep]].sort().values
    return train, val, test
