"""Multi-layer perceptron (FedTTA's MNIST network is the default: two hidden layers of 200)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from torch import Tensor, nn

from fedshift.core.options import Rule
from fedshift.core.registry import model
from fedshift.models.pretrained import load_pretrained

Widths = Annotated[
    tuple[int, ...], Rule(lambda v: all(width > 0 for width in v), "{name} must be positive numbers, not {value}")
]


@model("mlp", paper="FedTTA", year=2023)
@dataclass(frozen=True)
class MLP:
    """Fully connected network on flattened pixels.

    >>> network = MLP(hidden=(8,)).make((1, 4, 4), classes=3)
    >>> sum(p.numel() for p in network.parameters())
    163
    """

    hidden: Widths = (200, 200)
    norm: bool = False  # BatchNorm after each hidden layer
    bias: bool = True
    weights: str = ""  # a safetensors file to start from

    def make(self, shape: Sequence[int], classes: int) -> nn.Module:
        """The network for images of this shape."""
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise((math.prod(shape), *self.hidden)):
            layers.append(nn.Linear(before, after, bias=self.bias and not self.norm))
            layers += [nn.BatchNorm1d(after), nn.ReLU()] if self.norm else [nn.ReLU()]
        features = self.hidden[-1] if self.hidden else math.prod(shape)
        network = Headed(nn.Sequential(*layers), features, classes, self.bias)
        load_pretrained(network, self.weights)
        return network


class Headed(nn.Module):
    """A body and a linear head: the form every network of this package has."""

    def __init__(self, body: nn.Module, features: int, classes: int, bias: bool = True) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(features, classes, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.head(self.body(x))
        return logits
