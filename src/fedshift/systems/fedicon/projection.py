"""Two layers behind the features that a contrastive loss may look through, and that are thrown away afterwards."""

from __future__ import annotations

from torch import Tensor

from fedshift.blocks.mlp import drawn_by_torch, perceptron
from fedshift.core.tree import Tensors

NAMES = ("projection.0.weight", "projection.0.bias", "projection.1.weight", "projection.1.bias")


def fresh(like: Tensor, size: int) -> Tensors:
    """Two square layers, drawn as torch draws linear ones; another start of the run (``like``) draws others.

    >>> import torch
    >>> sorted(fresh(torch.ones(2), 4)) == sorted(NAMES)
    True
    """
    return drawn_by_torch(like, {f"projection.{layer}": (size, size) for layer in range(2)})


def projected(tensors: Tensors, features: Tensor) -> Tensor:
    """Linear, ReLU, linear.

    >>> import torch
    >>> projected(fresh(torch.ones(2), 4), torch.ones(3, 4)).shape
    torch.Size([3, 4])
    """
    return perceptron(tensors, "projection", features)
