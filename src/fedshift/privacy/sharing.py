"""Shamir's secret sharing: some of many together know a secret, fewer know nothing."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from functools import lru_cache

PRIME = (1 << 521) - 1  # secrets are shorter
SHARE_BYTES = 66


def shares_of(secret: bytes, threshold: int, holders: Iterable[int]) -> dict[int, bytes]:
    """One share for each holder (a number from 0 on); any ``threshold`` of them are enough."""
    coefficients = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    return {holder: _at(coefficients, holder + 1).to_bytes(SHARE_BYTES, "big") for holder in holders}


def secret_of(shares: Mapping[int, bytes], size: int = 32) -> bytes:
    """The secret of ``size`` bytes, from as many shares as it takes, by holder.

    >>> shares = shares_of(b"forty-two", 2, range(3))
    >>> secret_of({holder: shares[holder] for holder in (0, 2)}, size=9)
    b'forty-two'
    """
    holders = tuple(shares)
    total = sum(int.from_bytes(shares[h], "big") * weight for h, weight in zip(holders, _weights(holders), strict=True))
    # too few shares, or false ones, give a number that need not fit
    return (total % PRIME % (1 << 8 * size)).to_bytes(size, "big")


@lru_cache(maxsize=8)
def _weights(holders: tuple[int, ...]) -> tuple[int, ...]:
    """Lagrange's, at zero; the same holders open the secrets of all parties."""
    weights = []
    for holder in holders:
        above = below = 1
        for other in holders:
            if other != holder:
                above = above * (other + 1) % PRIME
                below = below * (other - holder) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(weights)


def _at(coefficients: list[int], x: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % PRIME
    return value
