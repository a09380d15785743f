"""Smaller uploads: the largest entries of an update, or one byte for each. What is cut off is sent in a later round.

What a client could not send stays in its local state and is added to its next update (error feedback: Seide et al. 2014,
Stich et al. 2018), so that nothing is lost in the long run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from fedshift.core.tree import Tensors, Tree
from fedshift.errors import UserError

Kind: TypeAlias = Literal["none", "top-k", "int8"]
CHUNK = 1024  # entries that share a scale


class Compressor(Protocol):
    """How a vector becomes a message, and again a vector that is nowhere larger."""

    def encode(self, vector: Tensor) -> Tensors:
        """The message."""

    def decode(self, message: Tensors, size: int) -> Tensor:
        """What the message says."""


@dataclass(frozen=True)
class Whole:
    """All of it, as it is.

    >>> Whole().decode(Whole().encode(torch.ones(2)), 2)
    tensor([1., 1.])
    """

    def encode(self, vector: Tensor) -> Tensors:
        """The vector."""
        return {"values": vector}

    def decode(self, message: Tensors, size: int) -> Tensor:
        """The vector."""
        return message["values"]


@dataclass(frozen=True)
class TopK:
    """The entries that are farthest from zero, with their places; eight bytes for each.

    >>> TopK(0.5).decode(TopK(0.5).encode(torch.tensor([0.1, -3.0, 2.0, 0.0])), 4)
    tensor([ 0., -3.,  2.,  0.])
    """

    keep: float

    def encode(self, vector: Tensor) -> Tensors:
        """Places in ascending order, and what is there."""
        count = min(len(vector), max(1, math.ceil(self.keep * len(vector))))
        places = vector.abs().topk(count).indices.sort().values
        return {"places": places.to(torch.int32), "values": vector[places].to(torch.float32)}

    def decode(self, message: Tensors, size: int) -> Tensor:
        """Zero everywhere else; a sentence if there are no such places, or one is named twice."""
        values, places = message["values"], message["places"].long()
        inside = len(places) == 0 or (int(places[0]) >= 0 and int(places[-1]) < size)
        if not inside or not bool((places[1:] > places[:-1]).all()):
            raise UserError("a compressed update names places that it cannot have")
        return values.new_zeros(size).index_copy(0, places, values)


@dataclass(frozen=True)
class Int8:
    """One byte for an entry, and a scale for a thousand; rounded towards zero, so that no norm grows but by rounding.

    >>> Int8().decode(Int8().encode(torch.tensor([1.27, -0.019, 0.005])), 3)
    tensor([ 1.2700, -0.0100,  0.0000])
    """

    def encode(self, vector: Tensor) -> Tensors:
        """Bytes and scales."""
        chunks = _chunks(vector.to(torch.float32))
        scales = chunks.abs().amax(1) / 127
        steps = torch.where(scales > 0, scales, 1.0)
        # half of the last digit is forgiven: an entry that is a whole number of steps must not lose one
        values = (chunks / steps[:, None] * (1 + 2.0**-22)).trunc().clamp(-127, 127).to(torch.int8)
        return {"scales": scales, "values": values.flatten()[: len(vector)]}

    def decode(self, message: Tensors, size: int) -> Tensor:
        """Every byte times its scale."""
        chunks = _chunks(message["values"].to(torch.float32))
        return (chunks * message["scales"][:, None]).flatten()[:size]


def _chunks(vector: Tensor) -> Tensor:
    rows = math.ceil(len(vector) / CHUNK)
    return torch.cat([vector, vector.new_zeros(rows * CHUNK - len(vector))]).reshape(rows, CHUNK)


COMPRESSORS: Mapping[Kind, Callable[[float], Compressor]] = {
    "none": lambda _: Whole(),
    "top-k": TopK,
    "int8": lambda _: Int8(),
}
"""By name; what they are made from is the share of the entries that is kept."""


def message_bytes(message: Tree) -> int:
    """What a message weighs: the bytes of all its tensors, places and counters too.

    >>> message_bytes({"update": {"places": torch.zeros(3, dtype=torch.int32), "values": torch.zeros(3)}})
    24
    """
    return sum(leaf.numel() * leaf.element_size() for leaves in message.values() for leaf in leaves.values())
