"""Splits: which of a client's images train, validate and test it, and which clients nobody trains on.

``groups`` is everywhere one id per image of the *pool* (``Pool.together``): images with equal ids, exact duplicates
or crops of one photograph, never end on two sides of a split. ``purge`` extends that promise over all clients.
"""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import torch
from torch import Tensor

from fedshift.core import rng
from fedshift.core.rng import seed_of
from fedshift.data._stratify import Groups, apportioned, stratified
from fedshift.errors import UserError

Split = tuple[Tensor, Tensor, Tensor]

_TRAIN, _VAL, _TEST = 0, 1, 2


def split(
    indices: Tensor, groups: Tensor, fractions: tuple[float, float, float], seed: int, labels: Tensor | None = None
) -> Split:
    """Train, validation and test indices of one client, each sorted; together they are ``indices``.

    Sizes are the fractions of the images as nearly as whole groups allow. A client with at least two groups has at
    least one train and one test image where those fractions are positive. With ``labels`` (of the whole pool) the same
    holds for every class: one that two groups or more have is trained and tested on.

    >>> train, val, test = split(torch.arange(10), torch.arange(10), (0.6, 0.2, 0.2), seed=0)
    >>> len(train), len(val), len(test), sorted(torch.cat([train, val, test]).tolist()) == list(range(10))
    (6, 2, 2, True)
    >>> twins = torch.arange(10) // 5                                      # two photographs, five crops of each
    >>> [len(set(twins[part].tolist())) for part in split(torch.arange(10), twins, (0.6, 0.0, 0.4), seed=1)]
    [1, 0, 1]
    >>> rare = (torch.arange(40) < 2).long()                               # two images of forty are of a class of their own
    >>> train, _, test = split(torch.arange(40), torch.arange(40), (0.6, 0.2, 0.2), seed=0, labels=rare)
    >>> int(rare[train].sum()), int(rare[test].sum())
    (1, 1)
    """
    shares = _checked(fractions)
    _covers(indices, groups)
    if len(indices) == 0:
        return indices.to(torch.int64), indices.to(torch.int64), indices.to(torch.int64)
    found = np.unique(groups[indices].numpy(), return_inverse=True, return_counts=True)
    ids, member, sizes = (torch.from_numpy(array) for array in found)
    # Large groups are placed while there is room for them. Equal sizes come in an order drawn from the groups' own ids,
    # so it is a random permutation that stays when the client's other images change.
    luck = rng.bits(seed_of(seed, "split"), ids)
    order = luck.argsort(stable=True)
    order = order[sizes[order].argsort(descending=True, stable=True)]
    sides = torch.empty(len(ids), dtype=torch.int64)
    if labels is None:
        sides[order] = torch.from_numpy(_placed(sizes[order].numpy(), shares, seed_of(seed, "split", "sides")))
    else:
        _covers(indices, labels, "class")
        held = Groups.of(member.numpy(), labels[indices].numpy(), luck.numpy())
        drawn = stratified(held, shares, seed_of(seed, "split", "classes"))
        sides[order] = torch.from_numpy(_occupied(drawn[order.numpy()], sizes[order].numpy(), shares))
    side = sides[member]
    train, val, test = (indices[side == part].to(torch.int64).sort().values for part in (_TRAIN, _VAL, _TEST))
    return train, val, test


def _checked(fractions: Sequence[float]) -> np.ndarray:
    """The three fractions as an array; one sentence when they are not three shares of one."""
    if len(fractions) != 3:
        raise UserError(f"a split needs three fractions (train, val, test), not {len(fractions)}: {list(fractions)}")
    shares = np.asarray(fractions, dtype=np.float64)
    if not (np.isfinite(shares).all() and (shares >= 0).all()):
        raise UserError(f"the fractions of a split must be numbers from 0 to 1, not {list(fractions)}")
    if abs(shares.sum() - 1.0) > 1e-6:
        raise UserError(f"the fractions of a split must add up to 1, but {list(fractions)} add up to {shares.sum():g}")
    return shares


def _covers(indices: Tensor, ids: Tensor, what: str = "group") -> None:
    """Refuse ids that do not reach to the largest index: they belong to another pool."""
    if len(indices) and int(indices.max()) >= len(ids):
        raise UserError(
            f"there are {what} ids for {len(ids)} images, but image {int(indices.max())} is asked for: "
            f"give one id per image of the pool"
        )


def _placed(sizes: np.ndarray, shares: np.ndarray, seed: int) -> np.ndarray:
    """The side of every group, for group sizes in descending order.

    A group of several images goes to a side drawn with the chances of the room left there, so that large groups are not
    always training data. What is left are single images, which fill the sides to the last place.
    """
    room = apportioned(int(sizes.sum()), shares)
    large = int((sizes > 1).sum())
    luck = rng.uniform(seed, torch.arange(large)).double().numpy()
    sides = np.empty(len(sizes), dtype=np.int64)
    for i, size in enumerate(sizes[:large].tolist()):
        chances = np.where(room >= size, room, 0)
        fits = bool(chances.any())
        drawn = int(np.searchsorted(chances.cumsum(), luck[i] * chances.sum(), side="right"))
        sides[i] = drawn if fits else room.argmax()
        room[sides[i]] -= size
    single = len(sizes) - large
    if single:  # their order is random already
        sides[large:] = np.repeat([_TRAIN, _VAL, _TEST], apportioned(single, room.clip(min=0)))
    return _occupied(sides, sizes, shares)


def _occupied(sides: np.ndarray, sizes: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """The same sides, with a small group moved to train or test where that should not be empty and need not be."""
    sides = sides.copy()
    needed = [side for side in (_TRAIN, _TEST) if shares[side] > 0]
    for side in needed:
        held = np.bincount(sides, minlength=3)
        if held[side] or len(sizes) < 2:
            continue
        # A donor must not end up empty itself, unless it is the validation split.
        donors = [other for other in range(3) if other != side and held[other] > int(other in needed)]
        images = np.bincount(sides, weights=sizes, minlength=3) - shares * sizes.sum()
        donor = max(donors, key=lambda other: images[other])
        sides[np.flatnonzero(sides == donor)[-1]] = side  # the last one, because sizes descend
    return sides


def split_by_file(
    indices: Tensor, groups: Tensor, splits: Tensor, val_fraction: float, seed: int, labels: Tensor | None = None
) -> Split:
    """The split the file itself declares: ``splits`` holds 0 train, 1 val or 2 test for every image of the pool.

    When the whole file has no val rows, ``val_fraction`` of the client's train rows become its validation split,
    class by class where ``labels`` are given.

    >>> own = torch.tensor([0, 0, 0, 0, 2, 2])
    >>> [len(part) for part in split_by_file(torch.arange(6), torch.arange(6), own, 0.25, seed=0)]
    [3, 1, 2]
    """
    if not (isinstance(val_fraction, numbers.Real) and 0 <= val_fraction < 1):
        raise UserError(f"val-fraction must be a number from 0 to below 1, not {val_fraction!r}")
    _covers(indices, splits, "split")
    strange = sorted(set(splits.unique().tolist()) - {_TRAIN, _VAL, _TEST})
    if strange:
        raise UserError(f"the split column must hold 0 (train), 1 (val) or 2 (test), found {strange[0]}")
    own = splits[indices]
    rows = indices.to(torch.int64)
    train, val, test = (rows[own == part].sort().values for part in (_TRAIN, _VAL, _TEST))
    if not bool((splits == _VAL).any()):
        train, val, _ = split(train, groups, (1.0 - val_fraction, val_fraction, 0.0), seed, labels)
    return train, val, test


COPY = "copy of a test or validation image"
SIBLING = "same group as a test or validation image"


@dataclass(frozen=True, eq=False)
class LeftOut:
    """Images of a client that are in none of its parts, and why; nobody's have no client."""

    client: str
    reason: str
    rows: Tensor


def purge(
    clients: Mapping[str, Split], groups: Tensor, content: Tensor, held_out: Sequence[Tensor] = ()
) -> tuple[dict[str, Split], tuple[LeftOut, ...]]:
    """The same clients without leaks, and the images that were taken out.

    A train image goes when its group occurs in any client's val or test split or in ``held_out`` (the data of unseen
    clients); a val image goes when its group occurs in any test split or in ``held_out``, which is test data too. Test
    splits stay. Afterwards no test image, nor a duplicate of one, is in any training split of any client. A client may
    be left without train or val images: the caller says what that means. ``content`` are the ids of the images' pixels:
    they tell a copy from an image that only belongs to the same group.

    >>> a = (torch.tensor([0, 1]), torch.tensor([2]), torch.tensor([3]))
    >>> b = (torch.tensor([4, 5]), torch.tensor([6]), torch.tensor([7]))
    >>> groups = torch.tensor([0, 1, 2, 3, 3, 5, 6, 1])
    >>> clean, gone = purge({"a": a, "b": b}, groups, torch.tensor([0, 1, 2, 3, 3, 5, 6, 7]))
    >>> [part.tolist() for part in clean["a"]], [part.tolist() for part in clean["b"]]
    ([[0], [2], [3]], [[5], [6], [7]])
    >>> for left in gone:
    ...     print(left.client, left.rows.tolist(), left.reason)
    a [1] same group as a test or validation image
    b [4] copy of a test or validation image
    """
    _covers(torch.cat([*(part for parts in clients.values() for part in parts), *held_out, groups[:0]]), groups)
    tested = torch.cat([*(test for _, _, test in clients.values()), *held_out, torch.empty(0, dtype=torch.int64)])
    evaluated = torch.cat([tested, *(val for _, val, _ in clients.values())])
    # Once per image of the pool and not once per client: ten thousand clients are ordinary.
    in_test, in_either = (torch.isin(groups, groups[rows]) for rows in (tested, evaluated))
    copy_of_test, copy_of_either = (torch.isin(content, content[rows]) for rows in (tested, evaluated))
    clean: dict[str, Split] = {}
    gone: list[LeftOut] = []
    for name, (train, val, test) in clients.items():
        clean[name] = (train[~in_either[train]], val[~in_test[val]], test)
        out = torch.cat([train[in_either[train]], val[in_test[val]]])
        copy = torch.cat([copy_of_either[train[in_either[train]]], copy_of_test[val[in_test[val]]]])
        gone += [LeftOut(name, why, out[here]) for why, here in ((COPY, copy), (SIBLING, ~copy)) if bool(here.any())]
    return clean, tuple(gone)


def choose_unseen(names: Sequence[str], unseen: float | Sequence[str], seed: int) -> tuple[str, ...]:
    """The clients that take no part in training, in the order of ``names``: a fraction of them at random, or by name.

    A name may be a pattern such as ``new-*``.

    A fraction is rounded half up, to at least one client when it is positive and never to all. Who is chosen depends on
    the names alone, not on their order.

    >>> choose_unseen(["art", "cartoon", "photo", "sketch"], ["sketch"], seed=0)
    ('sketch',)
    >>> len(choose_unseen([f"client-{i}" for i in range(10)], 0.25, seed=0))
    3
    """
    if isinstance(unseen, int | float):
        chosen = _drawn(names, unseen, seed)
    else:
        wanted = {unseen} if isinstance(unseen, str) else set(unseen)  # one name alone is also a sequence of letters
        matched = {
            wish: {name for name in names if fnmatchcase(name, wish)} for wish in wanted - set(names) if "*" in wish
        }
        chosen = {name for wish in wanted for name in matched.get(wish) or {wish}}
        _known(names, chosen)
        if chosen and chosen >= set(names):
            raise UserError(f"all {len(names)} clients are unseen: leave at least one to train on")
    return tuple(name for name in names if name in chosen)


def _drawn(names: Sequence[str], fraction: float, seed: int) -> set[str]:
    """A random fraction of the names."""
    if isinstance(fraction, bool) or not 0 <= fraction < 1:
        raise UserError(
            f"unseen must be a fraction from 0 to below 1, or a list of client names, not {fraction!r}: "
            f"somebody has to train"
        )
    if fraction == 0:
        return set()
    if len(names) < 2:
        raise UserError(f"a fraction of clients can be unseen only where there are two or more, not {len(names)}")
    count = math.floor(fraction * len(names) + 0.5 + 1e-9)  # 0.145 * 100 is 14.5 to a user, whatever the last bit says
    ranked = sorted(names, key=lambda name: (seed_of(seed, "unseen", name), name))
    return set(ranked[: min(max(count, 1), len(names) - 1)])


def _known(names: Sequence[str], chosen: set[str]) -> None:
    """Refuse names nobody has, with the nearest ones that exist."""
    unknown = sorted(chosen - set(names), key=str)
    if unknown:
        near = difflib.get_close_matches(str(unknown[0]), names, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"the first ones are called {', '.join(names[:3])}"
        raise UserError(f"no client is called {unknown[0]!r}, which unseen asks for; {hint}")
