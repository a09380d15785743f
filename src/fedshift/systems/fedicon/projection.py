"""Two layers behind the features that a contrastive loss may look through, and that are thrown away afterwards."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fedshift.core import rng
from fedshift.core.tree import Tensors

NAMES = ("projection.0.weight", "projection.0.bias", "projection.1.weight", "projection.1.bias")


def fresh(like: Tensor, size: int) -> Tensors:
    """Two square layers, drawn as torch draws linear ones; another start of the run (``like``) draws others.

    >>> sorted(fresh(torch.ones(2), 4)) == sorted(NAMES)
    True
    """
    start, rows = float(like.flatten()[0]), torch.arange(size)
    drawn = [rng.uniform(rng.seed_of(name, start), rows, (size,) if "weight" in name else ()) for name in NAMES]
    return {name: ((2 * u - 1) / size**0.5).to(like) for name, u in zip(NAMES, drawn, strict=True)}


def projected(tensors: Tensors, features: Tensor) -> Tensor:
    """Linear, ReLU, linear."""
    inner, inner_bias, outer, outer_bias = (tensors[name] for name in NAMES)
    return F.linear(F.linear(features, inner, inner_bias).relu(), outer, outer_bias)
