"""Small networks that are nothing but tensors, and one whose outputs are the weights of another network.

A perceptron's layers are called ``NAME.0.weight``, ``NAME.0.bias``, ``NAME.1.weight``, ...; a hyper-network is a perceptron
(the trunk) that reads a description of a client, and a matrix for every tensor of the target network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from fedshift.core import rng
from fedshift.core.tree import Tensors

TRUNK = "hyper-trunk"
CELLS = 4  # along each side, of the grid that an encoder's activations are averaged on
CHANNELS = (16, 32)


def fresh(like: Tensor, name: str, sizes: Sequence[int]) -> Tensors:
    """An untrained perceptron; another start of the run (``like``) draws another one.

    >>> {name: list(leaf.shape) for name, leaf in fresh(torch.ones(1), "g", (3, 8, 2)).items()}
    {'g.0.weight': [8, 3], 'g.0.bias': [8], 'g.1.weight': [2, 8], 'g.1.bias': [2]}
    """
    return _drawn(like, {f"{name}.{i}": (writes, reads) for i, (reads, writes) in enumerate(pairwise(sizes))})


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


def fresh_encoder(like: Tensor, channels: int, size: int) -> Tensors:
    """An untrained encoder of images into ``size`` numbers.

    >>> sum(leaf.numel() for leaf in fresh_encoder(torch.ones(1), 3, 32).values())
    30464
    """
    first, second = CHANNELS
    shapes = {"conv.0": (first, channels, 5, 5), "conv.1": (second, first, 5, 5), "out": (size, second * CELLS**2)}
    return _drawn(like, shapes)


def embedded(tensors: Tensors, x: Tensor) -> Tensor:
    """Two convolutions with stride 2 and ReLU, means over a grid of cells, and a linear layer.

    >>> embedded(fresh_encoder(torch.ones(1), 1, 32), torch.rand(5, 1, 28, 28)).shape
    torch.Size([5, 32])
    """
    for layer in ("conv.0", "conv.1"):
        x = F.conv2d(x, tensors[f"{layer}.weight"], tensors[f"{layer}.bias"], stride=2, padding=2).relu()
    rows, columns = (_cells(side, x) for side in x.shape[-2:])
    means = rows @ x @ columns.T  # a product has the same bits every time, unlike the gradient of adaptive pooling
    return F.linear(means.flatten(1), tensors["out.weight"], tensors["out.bias"])


def fresh_hypernetwork(base: Tensors, sizes: Sequence[int]) -> Tensors:
    """A trunk of these sizes and an output for each tensor of ``base``, all zero: at first everybody has ``base``."""
    like = next(iter(base.values()))
    outputs = {output_of(name): like.new_zeros(leaf.numel(), sizes[-1]) for name, leaf in base.items()}
    return {**fresh(like, TRUNK, sizes), **outputs}


def output_of(name: str) -> str:
    """What the matrix that makes a target tensor is called."""
    return f"output for {name}"


def made(hyper: Tensors, base: Tensors, embedding: Tensor) -> Tensors:
    """The tensors of a client with this embedding [size], or of many [clients, size]: ``base + matrix @ trunk``.

    >>> base = {"w": torch.ones(2, 3)}
    >>> made(fresh_hypernetwork(base, (4, 5, 5)), base, torch.rand(7, 4))["w"].shape
    torch.Size([7, 2, 3])
    """
    hidden, many = perceptron(hyper, TRUNK, embedding), embedding.shape[:-1]
    return {
        name: leaf + F.linear(hidden, hyper[output_of(name)]).reshape(*many, *leaf.shape) for name, leaf in base.items()
    }


def pull(hyper: Tensors, base: Tensors, embedding: Tensor, trained: Tensors) -> Tensor:
    """``<made - trained, made>`` with the difference held fixed, for each client.

    Its gradient with respect to anything ``made`` depends on is the vector-Jacobian product with that difference.

    >>> base = {"w": torch.ones(2)}
    >>> pull(fresh_hypernetwork(base, (4, 5)), base, torch.ones(4), {"w": torch.tensor([1.0, 0.5])})
    tensor(0.5000)
    """
    products = [
        ((leaf - trained[name]).detach() * leaf).reshape(*embedding.shape[:-1], -1).sum(-1)
        for name, leaf in made(hyper, base, embedding).items()
    ]
    return torch.stack(products).sum(0)


def _drawn(like: Tensor, layers: dict[str, tuple[int, ...]]) -> Tensors:
    """Weights that keep the variance of what they read, and biases of zero.

    As torch draws layers, what differs between two clients would be lost behind their biases after a few of them.
    """
    start, tensors = float(like.flatten()[0]), {}
    for layer, (writes, *reads) in layers.items():
        u = rng.uniform(rng.seed_of(layer, start), torch.arange(writes), reads)
        tensors[f"{layer}.weight"] = ((2 * u - 1) * math.sqrt(3 / math.prod(reads))).to(like)
        tensors[f"{layer}.bias"] = like.new_zeros(writes)
    return tensors


def _cells(side: int, like: Tensor) -> Tensor:
    """``[CELLS, side]``: each row averages its part of a side; a side with fewer places than cells repeats them."""
    cell, place = torch.arange(CELLS, device=like.device)[:, None], torch.arange(side, device=like.device)
    first, end = cell * side // CELLS, ((cell + 1) * side + CELLS - 1) // CELLS
    inside = ((place >= first) & (place < end)).to(like.dtype)
    return inside / inside.sum(1, keepdim=True)
