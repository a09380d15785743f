"""The two-layer convolutional network of the FedICON and FedTHE papers, for any input size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from fedshift.core.options import Count
from fedshift.core.registry import model
from fedshift.errors import UserError
from fedshift.models.mlp import Headed
from fedshift.models.pretrained import load_pretrained


@model("cnn", paper="FedTHE, FedICON", year=2023)
@dataclass(frozen=True)
class CNN:
    """Two 5x5 convolutions with pooling, one hidden layer of 64.

    Conv(32) - Pool - Conv(64) - Pool - FC(64) - head. Without bias and on 32x32 pixels it has FedTHE's 156,640
    parameters; ``norm`` puts BatchNorm after each convolution, whose bias is then left out because BatchNorm would cancel
    it. Below 16 pixels the convolutions are padded, so that something is left after them.

    >>> network = CNN(bias=False).make((3, 32, 32), classes=10)
    >>> sum(p.numel() for p in network.parameters())
    156640
    """

    norm: bool = False
    bias: bool = True
    width: Count = 32
    hidden: Count = 64
    weights: str = ""  # a safetensors file to start from

    def make(self, shape: Sequence[int], classes: int) -> nn.Module:
        """The network for images of this shape."""
        channels, height, width = shape
        if min(height, width) < 4:
            raise UserError(f"model 'cnn' needs images of at least 4x4 pixels, not {height}x{width}")
        padding = 0 if min(height, width) >= 16 else 2
        layers: list[nn.Module] = []
        for before, after in ((channels, self.width), (self.width, 2 * self.width)):
            layers.append(nn.Conv2d(before, after, 5, padding=padding, bias=self.bias and not self.norm))
            layers += [nn.BatchNorm2d(after)] if self.norm else []
            layers += [nn.MaxPool2d(2), nn.ReLU()]  # the maximum first: the same numbers, a quarter of the ReLUs
            height, width = ((side + 2 * padding - 4) // 2 for side in (height, width))
        layers += [nn.Flatten(), nn.Linear(2 * self.width * height * width, self.hidden, bias=self.bias), nn.ReLU()]
        network = Headed(nn.Sequential(*layers), self.hidden, classes, self.bias)
        load_pretrained(network, self.weights)
        return network
