"""Which way up is this image? The self-supervised task of test-time training."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedshift.core.tree import Tensors

TURNS = 4
NAMES = ("rotation.weight", "rotation.bias")


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """Each square image turned by its own number of quarter turns.

    >>> turned(torch.tensor([[[[1, 2], [3, 4]]]]), torch.tensor([1])).tolist()
    [[[[2, 4], [1, 3]]]]
    """
    every = torch.stack([torch.rot90(x, number, (-2, -1)) for number in range(TURNS)])
    index = turns.reshape(1, -1, *[1] * (x.dim() - 1)).expand(1, *x.shape)
    return every.gather(0, index)[0]


def untrained(like: Tensor, features: int) -> Tensors:
    """A rotation head that has not learnt anything: all zero, so that it pulls at no feature."""
    return {NAMES[0]: like.new_zeros(TURNS, features), NAMES[1]: like.new_zeros(TURNS)}


def turn_losses(head: Tensors, features: Tensor, turns: Tensor) -> Tensor:
    """Cross-entropy of guessing the turn, for every sample."""
    return F.cross_entropy(F.linear(features, head[NAMES[0]], head[NAMES[1]]), turns, reduction="none")
