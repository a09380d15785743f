"""A secure summation among parties in one process: what a study and the tests use. The secrets are real ones."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fedshift.privacy.fixed_point import Words
from fedshift.privacy.secure_sum import Keys, Member, total_of

Phase: TypeAlias = Literal["advertise", "share", "mask", "unmask"]


@dataclass(frozen=True)
class Summed:
    """A sum, whose it is, and what all messages of the parties weighed."""

    total: Words
    survivors: tuple[str, ...]
    bytes_up: int
    bytes_down: int


def summed(
    vectors: Mapping[str, Words],
    threshold: int,
    session: bytes,
    lost: Mapping[Phase, Collection[str]] | None = None,
) -> Summed:
    """The sum of the parties' vectors; those ``lost`` in a phase send nothing from then on.

    Masks cancel to the last bit, so the sum is the same whatever the secrets are: a study with it can be repeated.

    >>> import numpy as np
    >>> vectors = {name: np.full(3, 7, dtype=np.uint32) for name in "abc"}
    >>> found = summed(vectors, 2, b"example", {"mask": ["b"]})
    >>> found.total.tolist(), found.survivors
    ([14, 14, 14], ('a', 'c'))
    """
    gone: set[str] = set()
    names = list(vectors)

    def still_there(phase: Phase, parties: Collection[int]) -> list[int]:
        gone.update((lost or {}).get(phase, ()))
        return [number for number in parties if names[number] not in gone]

    members = [Member(number, threshold, session) for number in range(len(names))]
    keys: dict[int, Keys] = {k: members[k].advertise() for k in still_there("advertise", range(len(names)))}
    letters = {k: members[k].share(keys) for k in still_there("share", keys)}
    received = {k: {sender: sent[k] for sender, sent in letters.items()} for k in letters}
    masked = {k: members[k].mask(keys, received[k], vectors[names[k]]) for k in still_there("mask", letters)}
    opened = {k: members[k].unmask(keys, received[k], masked) for k in still_there("unmask", masked)}
    sent = [len(one.masks) + len(one.letters) + len(one.own) for one in keys.values()]
    sealed = sum(len(letter) for own in letters.values() for letter in own.values())
    told = sum(len(share) for own in opened.values() for share in own.values())
    return Summed(
        total_of(keys, letters, masked, opened, threshold, session),
        tuple(names[k] for k in masked),
        bytes_up=sum(sent) + sealed + sum(vector.nbytes for vector in masked.values()) + told,
        bytes_down=sum(sent) * len(keys) + sum(len(x) for own in received.values() for x in own.values()),
    )
