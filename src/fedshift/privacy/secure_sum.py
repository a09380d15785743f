"""Secure summation: a server learns the sum of its parties' vectors and nothing else, also if some are lost on the way.

Pairwise masks with dropout recovery, after Bonawitz et al. (CCS 2017), for parties and a server that are curious but keep
to the protocol. Every pair of parties agrees on a mask that one adds and the other takes off; every party adds one more
of its own. Shares of both secrets are dealt to all parties, sealed, through the server. In the end the survivors open the
own mask of whoever has sent his vector, and the pairwise key of whoever has not: never both of one party.

1. **advertise**: two public keys, one for masks and one for letters;
2. **share**: for every other party, a sealed letter with a share of each secret;
3. **mask**: the masked vector;
4. **unmask**: the shares that the server needs to take the masks off the sum.

All arithmetic is modulo 2**32, so masks cancel exactly, and a masked vector is uniform noise whatever is under it.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from fedshift.errors import UserError
from fedshift.privacy.fixed_point import Words
from fedshift.privacy.masks import SEALED, key_between, mask_of, public_of, seal, unseal
from fedshift.privacy.sharing import SHARE_BYTES, secret_of, shares_of

SECRET = 32
LETTER_BYTES = 2 * SHARE_BYTES + SEALED


@dataclass(frozen=True)
class Keys:
    """A party's public keys in one summation."""

    masks: bytes
    letters: bytes


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
        """Its public keys."""
        return Keys(public_of(self.mask_secret), public_of(self.letter_secret))

    def share(self, keys: Mapping[int, Keys]) -> dict[int, bytes]:
        """A sealed letter for everybody who advertised; its own share stays with it, sealed like the others."""
        self._enough(keys)
        if len({key for pair in keys.values() for key in (pair.masks, pair.letters)}) < 2 * len(keys):
            raise UserError("two parties of a secure summation have the same key")
        parts = [shares_of(secret, self.threshold, keys) for secret in (self.mask_secret, self.own_mask)]
        return {
            other: seal(
                self._letter_key(keys, other), parts[0][other] + parts[1][other], self._about(self.number, other)
            )
            for other in keys
        }

    def mask(self, keys: Mapping[int, Keys], letters: Mapping[int, bytes], values: Words) -> Words:
        """The vector behind its masks; ``letters`` are those it was sent, by sender, who are all that take part now."""
        self._enough(letters)
        masked = values + mask_of(self.own_mask, len(values))
        for other in letters:
            if other != self.number:
                pairwise = mask_of(key_between(self.mask_secret, keys[other].masks, self._mask_purpose()), len(values))
                masked = masked + pairwise if self.number < other else masked - pairwise
        return masked

    def unmask(
        self, keys: Mapping[int, Keys], letters: Mapping[int, bytes], survivors: Collection[int]
    ) -> dict[int, bytes]:
        """For every party of the letters: a share of its own mask if it survived, of its pairwise secret if it did not."""
        self._enough(survivors)
        if not set(survivors) <= set(letters):
            raise UserError("the server names survivors of a secure summation who did not take part")
        opened = {
            other: unseal(self._letter_key(keys, other), letter, self._about(other, self.number))
            for other, letter in letters.items()
        }
        return {
            other: letter[SHARE_BYTES:] if other in survivors else letter[:SHARE_BYTES]
            for other, letter in opened.items()
        }

    def _enough(self, others: Collection[int]) -> None:
        if len(others) < self.threshold or self.number not in others:
            raise UserError(
                f"a secure summation needs {self.threshold} parties, this one among them; {len(others)} are left"
            )

    def _letter_key(self, keys: Mapping[int, Keys], other: int) -> bytes:
        return key_between(self.letter_secret, keys[other].letters, b"fedshift letters " + self.session)

    def _mask_purpose(self) -> bytes:
        return b"fedshift masks " + self.session

    @staticmethod
    def _about(sender: int, receiver: int) -> bytes:
        return f"{sender} to {receiver}".encode()


def total_of(
    keys: Mapping[int, Keys],
    sharers: Collection[int],
    masked: Mapping[int, Words],
    opened: Mapping[int, Mapping[int, bytes]],
    threshold: int,
    session: bytes,
) -> Words:
    """The server's part: the sum of the survivors' vectors.

    ``sharers`` sent letters, ``masked`` has the vectors of those among them who survived, ``opened`` what survivors told
    in the end, by whom. Raises if too few did.
    """
    if len(opened) < threshold:
        raise UserError(f"a secure summation needs {threshold} parties to the end; {len(opened)} are left")
    helpers = sorted(opened)[:threshold]
    total = np.zeros_like(next(iter(masked.values())))
    for vector in masked.values():
        total += vector
    for party in sharers:
        secret = secret_of({helper: opened[helper][party] for helper in helpers})
        if party in masked:
            total -= mask_of(secret, len(total))
            continue
        if public_of(secret) != keys[party].masks:
            raise UserError("shares of a lost party's secret do not fit together")
        for other in masked:  # what every survivor put on for the lost party
            pairwise = mask_of(key_between(secret, keys[other].masks, b"fedshift masks " + session), len(total))
            total = total - pairwise if other < party else total + pairwise
    return total
