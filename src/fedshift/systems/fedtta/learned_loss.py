"""A loss without labels that is itself learnt: a little network that looks at logits and says how bad they are.

The network ``g`` gives every logit vector one number, and the loss of some images is the norm of their numbers. Methods
train it through a step of the model on that loss; adapters take such a step where there are no labels.
"""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor

from fedshift.blocks.mlp import drawn_by_torch, perceptron
from fedshift.core.tree import Tensors

SLOT = "learned-loss"  # where it is deployed
HIDDEN = 32
DEPTH = 3  # hidden layers
NAMES = tuple(f"{SLOT}.{layer}.{kind}" for layer in range(DEPTH + 1) for kind in ("weight", "bias"))
RATE = f"{SLOT}.rate"  # of the step it was learnt through, deployed beside it
TINY = 1e-12  # under the root: a norm of zeros has a first derivative, but no second one


def fresh(like: Tensor, classes: int, width: int = HIDDEN) -> Tensors:
    """The network drawn as torch draws linear layers; another start of the run (``like``) draws another.

    >>> import torch
    >>> sum(leaf.numel() for leaf in fresh(torch.ones(2), 10).values())
    2497
    """
    sizes = (classes, *[width] * DEPTH, 1)
    layers = {f"{SLOT}.{layer}": (writes, reads) for layer, (reads, writes) in enumerate(pairwise(sizes))}
    return drawn_by_torch(like, layers)


def scores(loss: Tensors, logits: Tensor) -> Tensor:
    """One number for each row of logits: linear layers with ReLU between them.

    >>> import torch
    >>> scores(fresh(torch.ones(2), 10), torch.ones(5, 10)).shape
    torch.Size([5])
    """
    return perceptron(loss, SLOT, logits).squeeze(-1)


def norms(loss: Tensors, logits: Tensor, size: int) -> Tensor:
    """``sqrt(sum s^2 + 1e-12)`` of every ``size`` rows in their order; a short last chunk has a smaller norm.

    >>> import torch
    >>> constant = {name: torch.zeros_like(leaf) for name, leaf in fresh(torch.ones(2), 3).items()}
    >>> constant[NAMES[-1]] += 1
    >>> norms(constant, torch.zeros(5, 3), 4)
    tensor([2., 1.])
    """
    squares = scores(loss, logits).square()
    padded = F.pad(squares, (0, -len(squares) % size))  # a score of zero leaves a norm as it is
    return (padded.reshape(-1, size).sum(1) + TINY).sqrt()
