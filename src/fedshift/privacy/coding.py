"""What a secure summation adds up, as words and back: updates, or sums over images; and which totals can be no sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedshift.errors import UserError
from fedshift.privacy.fixed_point import Wide, Words
from fedshift.privacy.noise import secret
from fedshift.privacy.settings import Privacy
from fedshift.privacy.upload import check_sum, code_of, words_of

LARGEST = 1e10  # of one party: log-probabilities are at least -100, so a million images, each with a square of them


class Coding(Protocol):
    """How the vectors of one summation become words, and their sum a vector again."""

    def words(self, vector: Tensor, parties: int) -> Words:
        """A party's vector, one among so many that begin."""

    def length(self, size: int) -> int:
        """How many words a vector of this size has."""

    def total(self, words: Words, survivors: int, parties: int) -> Tensor:
        """What the sum over the survivors says; raises if it can be no sum of theirs."""


@dataclass(frozen=True)
class Updates:
    """Clipped updates, each with its party's part of the noise."""

    privacy: Privacy

    def words(self, vector: Tensor, parties: int) -> Words:
        """With noise that nobody else can draw again."""
        return words_of(self.privacy, vector, parties, secret, ())

    def length(self, size: int) -> int:
        """One for each number."""
        return size

    def total(self, words: Words, survivors: int, parties: int) -> Tensor:
        """No longer than so many clipped updates can be together."""
        total = code_of(self.privacy, parties).decode(words)
        check_sum(self.privacy, total, survivors, parties)
        return total


@dataclass(frozen=True)
class Tallies:
    """Sums over a party's images, of whatever size.

    Every party adds a one at the end. A total that was garbled is noise there too, and not the number of parties.

    >>> words = [Tallies().words(torch.tensor([2.5, -1e6]), 3) for _ in range(3)]
    >>> Tallies().total(sum(words[1:], words[0]), 3, 3).round(decimals=3).tolist()
    [7.5, -3000000.0]
    >>> Tallies().total(words[0] + 1, 1, 3)
    Traceback (most recent call last):
        ...
    fedshift.errors.UserError: a sum of 1 parties is not what they have sent: it is garbled and not used
    """

    def words(self, vector: Tensor, parties: int) -> Words:
        """Two for each number."""
        return Wide(LARGEST, parties).encode(torch.cat([vector.detach().cpu().double(), torch.ones(1).double()]))

    def length(self, size: int) -> int:
        """As :meth:`words` has them."""
        return 2 * (size + 1)

    def total(self, words: Words, survivors: int, parties: int) -> Tensor:
        """Without the last number, which says whether the others mean something."""
        found = Wide(LARGEST, parties).decode(words)
        if abs(float(found[-1]) - survivors) > 0.5:
            raise UserError(f"a sum of {survivors} parties is not what they have sent: it is garbled and not used")
        return found[:-1]
