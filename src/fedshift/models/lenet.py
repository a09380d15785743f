"""FedTTA's convolutional network: LeNet's form, with padded 5x5 convolutions and one wide hidden layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from fedshift.core.options import Count
from fedshift.core.registry import model
from fedshift.errors import UserError
from fedshift.models.mlp import Headed
from fedshift.models.pretrained import load_pretrained


@model("lenet", paper="FedTTA", year=2023)
@dataclass(frozen=True)
class LeNet:
    """Two padded 5x5 convolutions with pooling, one hidden layer of 512.

    Conv(32) - ReLU - Pool - Conv(64) - ReLU - Pool - FC(hidden) - ReLU - head, from UPFL: Unsupervised personalized
    federated learning towards new clients (2023), whose FEMNIST network has ``hidden=2048``. ``norm`` puts BatchNorm,
    which the paper does not use, after each convolution in place of its bias.

    >>> network = LeNet().make((3, 32, 32), classes=10)
    >>> sum(p.numel() for p in network.parameters())
    2156490
    """

    hidden: Count = 512
    width: Count = 32  # of the first convolution; the second has twice as many (FedTTA's three sizes: 16, 32, 64)
    norm: bool = False
    weights: str = ""  # safetensors file to start from

    def make(self, shape: Sequence[int], classes: int) -> nn.Module:
        """The network for images of this shape."""
        channels, height, width = shape
        if min(height, width) < 4:
            raise UserError(f"model 'lenet' needs images of at least 4x4 pixels, not {height}x{width}")
        layers: list[nn.Module] = []
        for before, after in ((channels, self.width), (self.width, 2 * self.width)):
            layers.append(nn.Conv2d(before, after, 5, padding=2, bias=not self.norm))
            layers += [nn.BatchNorm2d(after)] if self.norm else []
            layers += [nn.MaxPool2d(2), nn.ReLU()]  # the maximum first: the same numbers, a quarter of the ReLUs
        layers += [nn.Flatten(), nn.Linear(2 * self.width * (height // 4) * (width // 4), self.hidden), nn.ReLU()]
        network = Headed(nn.Sequential(*layers), self.hidden, classes)
        load_pretrained(network, self.weights)
        return network
