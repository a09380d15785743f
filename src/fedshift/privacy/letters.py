"""What a party deals to another in a secure summation: two sealed shares, and on the envelope by what each is known again.

Without that a false share, told by malice or from a damaged disk, would make a false secret and garble a sum unseen. The
server keeps the envelopes: a share that is told and is not the one that was dealt is not used, and it is known who told it.
Whoever receives a letter looks at it, too, and tells no share that was false from the start. Fingerprints are no secret: a
share is a random number of 521 bits, and fewer shares than it takes leave the others as unknown as the secret itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeAlias

from fedshift.errors import UserError
from fedshift.privacy.masks import SEALED, fingerprint, seal, unseal
from fedshift.privacy.sharing import SHARE_BYTES

Letters: TypeAlias = Mapping[int, Mapping[int, bytes]]
"""By sender and receiver."""

PRINT = 32
ENVELOPE = 2 * SHARE_BYTES + SEALED  # what is sealed; fingerprints are behind it
LETTER_BYTES = ENVELOPE + 2 * PRINT


def letter_for(key: bytes, pairwise: bytes, own: bytes, about: bytes) -> bytes:
    """A letter with a share of each secret; ``about`` says from whom to whom."""
    prints = fingerprint(pairwise, _purpose(False)) + fingerprint(own, _purpose(True))
    return seal(key, pairwise + own, about) + prints


def share_in(key: bytes, letter: bytes, about: bytes, own: bool) -> bytes | None:
    """One of the two shares of a letter; None if it cannot be read, or is another one than the letter says.

    >>> letter = letter_for(bytes(32), b"p" * 66, b"o" * 66, b"a to b")
    >>> share_in(bytes(32), letter, b"a to b", own=True) == b"o" * 66, share_in(bytes(32), letter, b"a to c", own=True)
    (True, None)
    """
    try:
        inside = unseal(key, letter[:ENVELOPE], about)
    except UserError:
        return None
    share = inside[SHARE_BYTES:] if own else inside[:SHARE_BYTES]
    return share if known(letter, share, own) else None


def known(letter: bytes, share: bytes, own: bool) -> bool:
    """Whether it is this share that the letter was about.

    >>> letter = letter_for(bytes(32), b"p" * 66, b"o" * 66, b"a to b")
    >>> known(letter, b"o" * 66, own=True), known(letter, b"o" * 66, own=False), known(letter, b"x" * 66, own=True)
    (True, False, False)
    """
    prints = letter[ENVELOPE:]
    return fingerprint(share, _purpose(own)) == (prints[PRINT:] if own else prints[:PRINT])


def right_shares(
    letters: Letters, survivors: Collection[int], opened: Mapping[int, Mapping[int, bytes]]
) -> dict[int, dict[int, bytes]]:
    """What was told and is what was dealt, by dealer and teller: of survivors' own masks, of others' pairwise secrets.

    >>> letter = letter_for(bytes(32), b"p" * 66, b"o" * 66, b"0 to 1")
    >>> [len(right_shares({0: {1: letter}}, {0}, {1: {0: share}})[0]) for share in (b"o" * 66, b"p" * 66)]
    [1, 0]
    """
    return {
        dealer: {
            teller: told[dealer]
            for teller, told in opened.items()
            if dealer in told and teller in dealt and known(dealt[teller], told[dealer], dealer in survivors)
        }
        for dealer, dealt in letters.items()
    }


def _purpose(own: bool) -> bytes:
    return b"fedshift share of an own mask" if own else b"fedshift share of a pairwise secret"
