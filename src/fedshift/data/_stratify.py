"""Splits that keep every class on both sides: whole groups, class by class, the rarest class first.

A class that two groups or more have is trained and tested on, whatever the fractions say; beyond that, every class and all
images together come as near to the fractions as whole groups allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from fedshift.core import rng

_TRAIN, _VAL, _TEST = 0, 1, 2
_SPARE_ORDER = (_TRAIN, _TEST, _VAL)  # who gets an odd image first: a client can do without validation
_STEPS, _MOVES = 400, 256  # that mending a draw may take, and that are looked at in each


@dataclass(frozen=True)
class Groups:
    """The groups of one client: how many images of which class each of them has."""

    group: np.ndarray  # a line for every group and class that meet: the group,
    label: np.ndarray  # the class,
    count: np.ndarray  # and how many images
    luck: np.ndarray  # of every group: equal sizes come in this order

    @classmethod
    def of(cls, member: np.ndarray, labels: np.ndarray, luck: np.ndarray) -> Groups:
        """From every image's group number and class."""
        classes = int(labels.max()) + 1
        pairs, count = np.unique(member * classes + labels, return_counts=True)
        return cls(pairs // classes, pairs % classes, count, luck)

    @cached_property
    def sizes(self) -> np.ndarray:
        """Images of every group."""
        return np.bincount(self.group, weights=self.count).astype(np.int64)

    @cached_property
    def lines(self) -> dict[int, np.ndarray]:
        """The lines of every class; those of the fewest groups first, equal ones in an order that their groups draw."""
        order = self.label.argsort(kind="stable")
        labels, starts = np.unique(self.label[order], return_index=True)
        found = dict(zip(labels.tolist(), np.split(order, starts[1:]), strict=True))
        rarest = sorted(found, key=lambda label: (len(found[label]), int(self.luck[self.group[found[label]]].min())))
        return {label: found[label] for label in rarest}

    def change(self, group: int, before: int, after: int) -> np.ndarray:
        """What a move of a group changes in :meth:`held`."""
        first, last = np.searchsorted(self.group, [group, group + 1])
        moved = np.zeros((3, int(self.label.max()) + 1), dtype=np.int64)
        moved[after, self.label[first:last]] += 1
        moved[before, self.label[first:last]] -= 1
        return moved

    def held(self, sides: np.ndarray) -> np.ndarray:
        """Groups of every class on every side, [3, classes]; a group without a side is on none."""
        found = np.zeros((3, int(self.label.max()) + 1), dtype=np.int64)
        side = sides[self.group]
        placed = side >= 0
        np.add.at(found, (side[placed], self.label[placed]), 1)
        return found


def stratified(groups: Groups, shares: np.ndarray, seed: int) -> np.ndarray:
    """The side of every group.

    >>> label = np.array([0] * 6 + [1] * 3)
    >>> nine = Groups.of(np.arange(9), label, np.arange(9))
    >>> sides = stratified(nine, np.array([0.6, 0.2, 0.2]), seed=0)
    >>> [sorted(label[sides == side].tolist()) for side in (0, 1, 2)]
    [[0, 0, 0, 1, 1], [0, 0], [0, 1]]
    """
    return _mended(groups, _drawn(groups, shares, rng.seed_of(seed, "drawn")), shares, rng.seed_of(seed, "mended"))


def _drawn(groups: Groups, shares: np.ndarray, seed: int) -> np.ndarray:
    """A side for every group, class by class."""
    sides = np.full(len(groups.sizes), -1, dtype=np.int64)
    total = np.zeros(3)  # images of all groups that have a side
    for lines in groups.lines.values():
        everyone, counts = groups.group[lines], groups.count[lines]
        settled = sides[everyone] >= 0  # together with a rarer class
        free, own = everyone[~settled], counts[~settled]
        if not len(free):
            continue
        has = np.bincount(sides[everyone[settled]], weights=counts[settled], minlength=3)
        # what the class still wants of every side, and what the classes before it were rounded by
        need = shares * counts.sum() - has + (shares * total.sum() - total)
        lacking = [side for side in _required(shares) if not has[side]] if len(everyone) > 1 else []
        order = np.lexsort((groups.luck[free], -groups.sizes[free], -own))
        free, own = free[order], own[order]
        single = int((groups.sizes[free] == 1).sum())  # they come last
        large = _large(own[: len(own) - single], need, lacking, single, rng.seed_of(seed, int(groups.luck[free].min())))
        need = need - np.bincount(large, weights=own[: len(own) - single], minlength=3)
        sides[free] = np.concatenate([large, _single(single, need, [s for s in lacking if s not in large])])
        total += np.bincount(sides[free], weights=groups.sizes[free], minlength=3)
    return sides


def _large(own: np.ndarray, need: np.ndarray, lacking: Sequence[int], single: int, seed: int) -> np.ndarray:
    """Sides of the groups of several images: drawn with the chances of what is needed, so that they do not always train.

    When as many groups are left as sides that must not stay empty, these get them.
    """
    sides = np.empty(len(own), dtype=np.int64)
    luck = rng.uniform(seed, torch.arange(len(own))).double().numpy()
    for i, count in enumerate(own.tolist()):
        chances = np.where(need + 0.5 >= count, need, 0)  # room for half an image is room for one
        if lacking and len(own) - i + single <= len(lacking):
            sides[i] = max(lacking, key=lambda side: (need[side], -_SPARE_ORDER.index(side)))
        elif chances.any():
            sides[i] = np.searchsorted(chances.cumsum(), luck[i] * chances.sum(), side="right")
        else:
            sides[i] = need.argmax()
        need = need - count * (np.arange(3) == sides[i])
        lacking = [side for side in lacking if side != sides[i]]
    return sides


def _single(count: int, need: np.ndarray, lacking: Sequence[int]) -> np.ndarray:
    """Sides of single images, whose order is random already: they fill what is open to the last place."""
    if not count:
        return np.empty(0, dtype=np.int64)
    open_ = need.clip(min=0)
    counts = apportioned(count, open_ if open_.any() else np.ones(3))
    for side in (side for side in lacking if not counts[side]):
        donors = [other for other in range(3) if counts[other] > int(other in lacking)]
        if donors:
            counts[max(donors, key=lambda other: counts[other] - open_[other])] -= 1
            counts[side] += 1
    return np.repeat([_TRAIN, _VAL, _TEST], counts)


def apportioned(total: int, shares: np.ndarray) -> np.ndarray:
    """Whole numbers that add up to ``total`` in proportion to ``shares``, by largest remainder.

    >>> apportioned(7, np.array([0.6, 0.2, 0.2])).tolist()
    [4, 1, 2]
    """
    exact = total * shares / shares.sum()
    counts: np.ndarray = np.floor(exact).astype(np.int64)
    rest = np.round(exact - counts, 9)  # a tie is a tie, and 2.9999... is nearly three, whatever the last bits say
    for side in sorted(_SPARE_ORDER, key=lambda side: -rest[side])[: total - int(counts.sum())]:
        counts[side] += 1
    return counts


def _required(shares: np.ndarray) -> list[int]:
    """The sides on which every class should be."""
    return [side for side in (_TRAIN, _TEST) if shares[side] > 0]


def _mended(groups: Groups, sides: np.ndarray, shares: np.ndarray, seed: int) -> np.ndarray:
    """The same sides after moves of whole groups, until every class of several groups is on the required sides.

    Groups of several classes can stand in each other's way, so a move that does not help is taken when none does; there
    may be no way at all, and then the best that was seen is returned.
    """
    required, held = _required(shares), groups.held(sides)
    several = held.sum(0) > 1
    now = best = sides
    fewest = np.inf
    for step in range(_STEPS):
        missing = (held[required] == 0) & several
        if (count := int(missing.sum())) < fewest:
            best, fewest = now, count
        if not count:
            break
        wanted = [(int(label), required[row]) for row, label in zip(*missing.nonzero(), strict=True)]
        luck = rng.integers(rng.seed_of(seed, step), torch.arange(2), 2**31).tolist()
        group, side = _move(groups, now, held, several, required, wanted, luck)
        held = held + groups.change(group, int(now[group]), side)
        now = np.where(np.arange(len(now)) == group, side, now)
    return best


def _move(
    groups: Groups,
    sides: np.ndarray,
    held: np.ndarray,
    several: np.ndarray,
    required: list[int],
    wanted: list[tuple[int, int]],
    luck: list[int],
) -> tuple[int, int]:
    """The group that leaves the least missing where it goes, the smallest of them; any if that is no less than now."""
    moves = sorted(
        {
            (int(groups.sizes[group]), int(group), side)
            for label, side in wanted
            for group in groups.group[groups.lines[label]][:_MOVES]
        }
    )
    left = [
        int((((held + groups.change(group, int(sides[group]), side))[required] == 0) & several).sum())
        for _, group, side in moves
    ]
    if min(left) < len(wanted):
        return moves[left.index(min(left))][1:]
    label, side = wanted[luck[0] % len(wanted)]
    holders = groups.group[groups.lines[label]]
    return int(holders[luck[1] % len(holders)]), side
