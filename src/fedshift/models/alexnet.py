"""AlexNet with BatchNorm, the backbone of FDSE, FedBN and FedFA for multi-domain images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from fedshift.core.registry import model
from fedshift.errors import UserError
from fedshift.models.mlp import Headed
from fedshift.models.pretrained import load_pretrained

# channels, kernel, stride, padding, whether pooling follows
CONVOLUTIONS = (
    (64, 11, 4, 2, True),
    (192, 5, 1, 2, True),
    (384, 3, 1, 1, False),
    (256, 3, 1, 1, False),
    (256, 3, 1, 1, True),
)


@model("alexnet", paper="FDSE", venue="CVPR", year=2025)
@dataclass(frozen=True)
class AlexNet:
    """Five convolutions and two hidden layers of 1024, each with BatchNorm.

    Table A5 of FDSE (Federated learning with domain shift eraser, 2025), for images from 63 pixels on. The published
    count of 12,974,154 parameters for 10 classes includes the 3,200 biases directly before BatchNorm, which cancels them:
    their gradient is rounding noise. ``bias=False`` leaves them out, which matters for methods that normalise updates.

    >>> network = AlexNet().make((3, 64, 64), classes=10)
    >>> sum(p.numel() for p in network.parameters())
    12974154
    """

    bias: bool = True  # biases of the seven layers before BatchNorm; the head always has one
    weights: str = ""  # safetensors file to start from

    def make(self, shape: Sequence[int], classes: int) -> nn.Module:
        """The network for images of this shape."""
        channels, height, width = shape
        if min(height, width) < 63:
            raise UserError(f"model 'alexnet' needs images of at least 63x63 pixels, not {height}x{width}")
        layers: list[nn.Module] = []
        for after, kernel, stride, padding, pool in CONVOLUTIONS:
            layers.append(nn.Conv2d(channels, after, kernel, stride, padding, bias=self.bias))
            layers += [nn.BatchNorm2d(after), nn.ReLU()]
            layers += [nn.MaxPool2d(3, 2)] if pool else []
            channels = after
        layers += [nn.AdaptiveAvgPool2d(6), nn.Flatten()]
        for before in (channels * 36, 1024):
            layers += [nn.Linear(before, 1024, bias=self.bias), nn.BatchNorm1d(1024), nn.ReLU()]
        network = Headed(nn.Sequential(*layers), 1024, classes)
        load_pretrained(network, self.weights)
        return network
