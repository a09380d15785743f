"""Small networks that are nothing but tensors: layers ``NAME.0.weight``, ``NAME.0.bias``, ``NAME.1.weight``, ..."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from fedshift.core import rng
from fedshift.core.tree import Tensors


def fresh(like: Tensor, name: str, sizes: Sequence[int]) -> Tensors:
    """An untrained perceptron; another start of the run (``like``) draws another one.

    >>> {name: list(leaf.shape) for name, leaf in fresh(torch.ones(1), "g", (3, 8, 2)).items()}
    {'g.0.weight': [8, 3], 'g.0.bias': [8], 'g.1.weight': [2, 8], 'g.1.bias': [2]}
    """
    return drawn(like, {f"{name}.{i}": (writes, reads) for i, (reads, writes) in enumerate(pairwise(sizes))})


def perceptron(tensors: Tensors, name: str, x: Tensor, slope: float = 0.0) -> Tensor:
    """Linear layers with (leaky) ReLU between them, and none after the last.

    >>> perceptron(fresh(torch.ones(1), "g", (3, 8, 2)), "g", torch.ones(5, 3)).shape
    torch.Size([5, 2])
    """
    layer = 0
    while f"{name}.{layer}.weight" in tensors:
        x = F.leaky_relu(x, slope) if layer else x
        x = F.linear(x, tensors[f"{name}.{layer}.weight"], tensors[f"{name}.{layer}.bias"])
        layer += 1
    return x


def drawn(like: Tensor, layers: dict[str, tuple[int, ...]]) -> Tensors:
    """Weights that keep the variance of what they read, and biases of zero.

    As torch draws layers, what differs between two clients would be lost behind their biases after a few of them.
    """
    start, tensors = float(like.flatten()[0]), {}
    for layer, (writes, *reads) in layers.items():
        u = rng.uniform(rng.seed_of(layer, start), torch.arange(writes), reads)
        tensors[f"{layer}.weight"] = ((2 * u - 1) * math.sqrt(3 / math.prod(reads))).to(like)
        tensors[f"{layer}.bias"] = like.new_zeros(writes)
    return tensors


def drawn_by_torch(like: Tensor, layers: Mapping[str, tuple[int, ...]]) -> Tensors:
    """Weights and biases uniform within one over the root of how many numbers they read: torch's own start of a layer.

    >>> float(drawn_by_torch(torch.ones(1), {"layer": (50, 16)})["layer.bias"].abs().max()) < 0.25
    True
    """
    start, tensors = float(like.flatten()[0]), {}
    for layer, (writes, *reads) in layers.items():
        for part, shape in (("weight", reads), ("bias", [])):
            u = rng.uniform(rng.seed_of(f"{layer}.{part}", start), torch.arange(writes), shape)
            tensors[f"{layer}.{part}"] = ((2 * u - 1) / math.sqrt(math.prod(reads))).to(like)
    return tensors
