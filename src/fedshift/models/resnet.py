"""Residual networks: ResNet18 and ResNet50 with BatchNorm, and FedTHE's small ResNet20 with GroupNorm."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from torch import Tensor, nn
from torch.nn.functional import relu

from fedshift.core.options import NonNegativeInt, Whole, at_least
from fedshift.core.registry import model
from fedshift.errors import UserError
from fedshift.models.mlp import Headed
from fedshift.models.pretrained import load_pretrained

Norm = Callable[[int], nn.Module]
Block = Callable[[int, int, int, Norm], nn.Module]  # channels before, width, stride, normalisation


@model("resnet18", paper="ResNet", venue="CVPR", year=2016)
@dataclass(frozen=True)
class ResNet18:
    """ResNet18 with BatchNorm (the backbone of FedCiR and of FedICON on DomainNet).

    He et al., Deep residual learning for image recognition. ``stem="cifar"`` replaces the first 7x7 convolution and the
    pooling after it by a 3x3 convolution, for images below about 64 pixels. ``groups`` above 0 replaces BatchNorm by
    GroupNorm with so many groups. Entries have torchvision's names behind ``body.``, with ``head`` for ``fc``: weights
    from there are taken as they are (``weights``).

    >>> network = ResNet18().make((3, 32, 32), classes=10)
    >>> sum(p.numel() for p in network.parameters())
    11181642
    """

    stem: Literal["imagenet", "cifar"] = "imagenet"
    groups: NonNegativeInt = 0
    weights: str = ""  # safetensors to start from: a file, or hub:OWNER/NAME; see models/pretrained.py

    def make(self, shape: Sequence[int], classes: int) -> nn.Module:
        """The network for images of this shape."""
        return _large("resnet18", self, shape, classes, Basic, 1, (2, 2, 2, 2))


@model("resnet50", paper="ResNet", venue="CVPR", year=2016)
@dataclass(frozen=True)
class ResNet50:
    """ResNet50 with BatchNorm (FDSE's large network on DomainNet).

    He et al., Deep residual learning for image recognition, with the stride in the 3x3 convolution as torchvision has it.
    The options and the names of entries are those of ``resnet18``.

    >>> network = ResNet50().make((3, 32, 32), classes=10)
    >>> sum(p.numel() for p in network.parameters())
    23528522
    """

    stem: Literal["imagenet", "cifar"] = "imagenet"
    groups: NonNegativeInt = 0
    weights: str = ""  # safetensors to start from: a file, or hub:OWNER/NAME; see models/pretrained.py

    def make(self, shape: Sequence[int], classes: int) -> nn.Module:
        """The network for images of this shape."""
        return _large("resnet50", self, shape, classes, Bottleneck, 4, (3, 4, 6, 3))


@model("resnet20-gn", paper="FedTHE", venue="ICLR", year=2023)
@dataclass(frozen=True)
class ResNet20GN:
    """The CIFAR ResNet20 with GroupNorm of two groups and a head without bias.

    As in FedTHE's code (Test-time robust personalization for federated learning): ``width`` 1 on CIFAR10 gives 64
    features, 4 on ImageNet-32 gives 256; shortcuts that change the shape are 1x1 convolutions with a norm.

    >>> network = ResNet20GN().make((3, 32, 32), classes=10)
    >>> sum(p.numel() for p in network.parameters())
    272464
    """

    width: Annotated[Whole, at_least(1)] = 1  # multiplies the 16, 32 and 64 channels
    bias: bool = False  # of the head
    weights: str = ""  # safetensors to start from: a file, or hub:OWNER/NAME; see models/pretrained.py

    def make(self, shape: Sequence[int], classes: int) -> nn.Module:
        """The network for images of this shape."""
        if self.width < 1:
            raise UserError(f"model 'resnet20-gn': width must be at least 1, not {self.width}")
        _check_size("resnet20-gn", shape, 4)
        width = 16 * self.width
        norm = _norm("resnet20-gn", 2, width)
        body = _body(_stem(shape[0], width, norm, full=False), Basic, 1, (3, 3, 3), width, norm)
        network = Headed(body, 4 * width, classes, self.bias)
        load_pretrained(network, self.weights)
        return network


class Basic(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    last = ("conv2", "bn2")  # what a method replaces that changes one layer of every block

    def __init__(self, before: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(before, width, 3, stride), norm(width)
        self.conv2, self.bn2 = _conv(width, width, 3), norm(width)
        self.downsample = _shortcut(before, width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """The block's activations."""
        out = relu(self.bn1(self.conv1(x)))
        return relu(self.bn2(self.conv2(out)) + self.downsample(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a shortcut; four times as many channels leave as the inner ones have."""

    last = ("conv3", "bn3")

    def __init__(self, before: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(before, width, 1), norm(width)
        self.conv2, self.bn2 = _conv(width, width, 3, stride), norm(width)
        self.conv3, self.bn3 = _conv(width, 4 * width, 1), norm(4 * width)
        self.downsample = _shortcut(before, 4 * width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """The block's activations."""
        out = relu(self.bn1(self.conv1(x)))
        out = relu(self.bn2(self.conv2(out)))
        return relu(self.bn3(self.conv3(out)) + self.downsample(x))


def _large(
    name: str,
    options: ResNet18 | ResNet50,
    shape: Sequence[int],
    classes: int,
    block: Block,
    expansion: int,
    depths: Sequence[int],
) -> nn.Module:
    full = options.stem == "imagenet"
    _check_size(name, shape, 16 if full else 8, "; with stem = 'cifar' it takes 8x8" if full else "")
    norm = _norm(name, options.groups, 64)
    body = _body(_stem(shape[0], 64, norm, full), block, expansion, depths, 64, norm)
    network = Headed(body, 512 * expansion, classes)
    load_pretrained(network, options.weights)
    return network


def _stem(channels: int, width: int, norm: Norm, full: bool) -> OrderedDict[str, nn.Module]:
    """What comes before the blocks: ``full`` for large images, a quarter of whose side is left after it."""
    convolution = _conv(channels, width, 7, 2) if full else _conv(channels, width, 3)
    pool = {"maxpool": nn.MaxPool2d(3, 2, padding=1)} if full else {}
    return OrderedDict(conv1=convolution, bn1=norm(width), relu=nn.ReLU(), **pool)


def _body(
    stem: OrderedDict[str, nn.Module], block: Block, expansion: int, depths: Sequence[int], width: int, norm: Norm
) -> nn.Module:
    """Stages of blocks, each with twice the channels and half the side of the one before; then the mean over pixels."""
    layers, before = OrderedDict(stem), width
    for stage, depth in enumerate(depths):
        inner = width * 2**stage
        blocks = [block(before, inner, 2 if stage else 1, norm)]
        before = inner * expansion
        blocks += [block(before, inner, 1, norm) for _ in range(depth - 1)]
        layers[f"layer{stage + 1}"] = nn.Sequential(*blocks)
    body = nn.Sequential(OrderedDict(**layers, avgpool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten()))
    for layer in body.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return body


def _conv(before: int, after: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(before, after, kernel, stride, kernel // 2, bias=False)


def _shortcut(before: int, after: int, stride: int, norm: Norm) -> nn.Module:
    if stride == 1 and before == after:
        return nn.Identity()
    return nn.Sequential(_conv(before, after, 1, stride), norm(after))


def _norm(name: str, groups: int, channels: int) -> Norm:
    if groups == 0:
        return nn.BatchNorm2d
    if groups < 0 or channels % groups:
        raise UserError(f"model {name!r}: groups must divide its {channels} channels, which {groups} does not")
    return lambda after: nn.GroupNorm(groups, after)


def _check_size(name: str, shape: Sequence[int], least: int, hint: str = "") -> None:
    _, height, width = shape
    if min(height, width) < least:
        raise UserError(f"model {name!r} needs images of at least {least}x{least} pixels, not {height}x{width}{hint}")
