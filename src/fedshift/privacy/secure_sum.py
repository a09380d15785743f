"""Secure summation: a server learns the sum of its parties' vectors and nothing else, also if some are lost on the way.

Pairwise masks with dropout recovery, after Bonawitz et al. (CCS 2017), for parties and a server that are curious but keep
to the protocol. Every pair of parties agrees on a mask that one adds and the other takes off; every party adds one more
of its own. Shares of both secrets are dealt to all parties, sealed, through the server. In the end the survivors open the
own mask of whoever has sent his vector, and the pairwise key of whoever has not: never both of one party.

1. **advertise**: two public keys, one for masks and one for letters, and the fingerprint of the own mask;
2. **share**: for every other party, a sealed letter with a share of each secret, and on it the fingerprints of both shares;
3. **mask**: the masked vector;
4. **unmask**: the shares that the server needs to take the masks off the sum.

All arithmetic is modulo 2**32, so masks cancel exactly, and a masked vector is uniform noise whatever is under it. Shares
and secrets are used only if they are what was dealt and advertised: see :mod:`fedshift.privacy.letters`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from fedshift.errors import UserError
from fedshift.privacy.fixed_point import Words
from fedshift.privacy.letters import Letters, letter_for, right_shares, share_in
from fedshift.privacy.masks import fingerprint, key_between, mask_of, public_of
from fedshift.privacy.sharing import secret_of, shares_of

SECRET = 32


@dataclass(frozen=True)
class Keys:
    """What a party tells of itself in one summation."""

    masks: bytes  # a public key
    letters: bytes  # another
    own: bytes  # by which its own mask is known when it is opened


@dataclass(frozen=True)
class Member:
    """A party in one summation: its number, and its secrets, which are drawn anew for each.

    Whoever keeps it between messages must forget it with :meth:`unmask`, which is answered once.
    """

    number: int
    threshold: int  # so many must survive, or nothing is learnt
    session: bytes  # which summation it is: no key is used in two
    mask_secret: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET), repr=False)
    letter_secret: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET), repr=False)
    own_mask: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET), repr=False)

    def advertise(self) -> Keys:
        """Its public keys, and by what its own mask is known."""
        own = fingerprint(self.own_mask, _own_purpose(self.session))
        return Keys(public_of(self.mask_secret), public_of(self.letter_secret), own)

    def share(self, keys: Mapping[int, Keys]) -> dict[int, bytes]:
        """A sealed letter for everybody who advertised; its own share stays with it, sealed like the others."""
        self._enough(keys)
        if len({key for own in keys.values() for key in (own.masks, own.letters)}) < 2 * len(keys):
            raise UserError("two parties of a secure summation have the same key")
        pairwise, own = (shares_of(secret, self.threshold, keys) for secret in (self.mask_secret, self.own_mask))
        return {
            other: letter_for(
                self._letter_key(keys, other), pairwise[other], own[other], self._about(self.number, other)
            )
            for other in keys
        }

    def mask(self, keys: Mapping[int, Keys], letters: Mapping[int, bytes], values: Words) -> Words:
        """The vector behind its masks; ``letters`` are those it was sent, by sender, who are all that take part now."""
        self._enough(letters)
        if keys.get(self.number) != self.advertise():  # masks that nobody could take off
            raise UserError("this party's secrets for a secure summation are not those it has advertised")
        masked = values + mask_of(self.own_mask, len(values))
        for other in letters:
            if other != self.number:
                pairwise = mask_of(
                    key_between(self.mask_secret, keys[other].masks, _pair_purpose(self.session)), len(values)
                )
                masked = masked + pairwise if self.number < other else masked - pairwise
        return masked

    def unmask(
        self, keys: Mapping[int, Keys], letters: Mapping[int, bytes], survivors: Collection[int]
    ) -> dict[int, bytes]:
        """For every party of the letters: a share of its own mask if it survived, of its pairwise secret if it did not.

        Parties whose letter cannot be read, or is not what its fingerprints say, are left out.
        """
        there = set(survivors)  # whoever is named twice is there once
        self._enough(there)
        if not there <= set(letters):
            raise UserError("the server names survivors of a secure summation who did not take part")
        told = {
            other: share_in(self._letter_key(keys, other), letter, self._about(other, self.number), other in there)
            for other, letter in letters.items()
        }
        found = {other: share for other, share in told.items() if share is not None}
        if not found:
            raise UserError("this party can read none of the letters of a secure summation")
        return found

    def _enough(self, others: Collection[int]) -> None:
        if len(others) < self.threshold or self.number not in others:
            raise UserError(
                f"a secure summation needs {self.threshold} parties, this one among them; {len(others)} are left"
            )

    def _letter_key(self, keys: Mapping[int, Keys], other: int) -> bytes:
        return key_between(self.letter_secret, keys[other].letters, b"fedshift letters " + self.session)

    @staticmethod
    def _about(sender: int, receiver: int) -> bytes:
        return f"{sender} to {receiver}".encode()


def total_of(
    keys: Mapping[int, Keys],
    letters: Letters,
    masked: Mapping[int, Words],
    opened: Mapping[int, Mapping[int, bytes]],
    threshold: int,
    session: bytes,
    called: Callable[[int], str] = "party {}".format,
) -> Words:
    """The server's part: the sum of the survivors' vectors.

    ``letters`` are what the parties have dealt, by sender and receiver, ``masked`` has the vectors of those among them who
    survived, ``opened`` what survivors told in the end, by whom and of whom. A share that is not the one that was dealt is
    not used. Raises if too few are left, or if they say something else than was advertised; ``called`` says whose they are.
    """
    if len(opened) < threshold:
        raise UserError(f"a secure summation needs {threshold} parties to the end; {len(opened)} are left")
    shares = right_shares(letters, masked, opened)
    total = np.zeros_like(next(iter(masked.values())))
    for vector in masked.values():
        total += vector
    for party in letters:
        if len(shares[party]) < threshold:
            raise UserError(
                f"masks of {called(party)} cannot be taken off the sum: that takes {threshold} true shares of them, and "
                f"{len(shares[party])} are left"
            )
        secret = secret_of({helper: shares[party][helper] for helper in sorted(shares[party])[:threshold]})
        if party in masked:
            _advertised(fingerprint(secret, _own_purpose(session)) == keys[party].own, called(party))
            total -= mask_of(secret, len(total))
            continue
        _advertised(public_of(secret) == keys[party].masks, called(party))
        for other in masked:  # what every survivor put on for the lost party
            pairwise = mask_of(key_between(secret, keys[other].masks, _pair_purpose(session)), len(total))
            total = total - pairwise if other < party else total + pairwise
    return total


def _advertised(same: bool, whose: str) -> None:
    if not same:
        raise UserError(
            f"masks of {whose} cannot be taken off the sum: it has dealt shares of another secret than its own"
        )


def _own_purpose(session: bytes) -> bytes:
    return b"fedshift own mask " + session


def _pair_purpose(session: bytes) -> bytes:
    return b"fedshift masks " + session
