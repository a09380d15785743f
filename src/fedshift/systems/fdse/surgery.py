"""How erasers come into a network: which layers they replace."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import cast

from torch import nn

from fedshift.core.arch import BATCH_NORMS, Arch
from fedshift.systems.fdse.eraser import Eraser


def with_erasers(backbone: Arch, expansion: int = 2, kernel: int = 3, relu: bool = False, bias: bool = False) -> Arch:
    """The backbone with an eraser for the last layer of every block.

    A block says by ``last = (layer, norm)`` which one that is (residual and transformer blocks do); in a network without
    such blocks it is every convolution or linear layer that BatchNorm follows in an ``nn.Sequential``. Where there is none
    the network stays as it is.

    >>> net = lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    >>> with_erasers(Arch.of(net, (1, 2, 2))).layers(Eraser)
    ('1',)
    """

    def surgery(network: nn.Module) -> nn.Module:
        for layer, norm in list(_declared(network)) or list(_adjacent(network)):
            inner, after = network.get_submodule(layer), network.get_submodule(norm) if norm else None
            if isinstance(inner, nn.Conv2d | nn.Linear) and (after is None or _keeps_statistics(after)):
                _replace(network, layer, Eraser(inner, copy.deepcopy(after), expansion, kernel, relu, bias))
                if norm:
                    _replace(network, norm, nn.Identity())
        return network

    return backbone.changed(surgery)


def _declared(network: nn.Module) -> Iterator[tuple[str, str]]:
    for name, block in network.named_modules():
        last = getattr(block, "last", None)
        if isinstance(last, tuple):
            layer, norm = last
            yield f"{name}.{layer}".lstrip("."), f"{name}.{norm}".lstrip(".") if norm else ""


def _keeps_statistics(norm: nn.Module) -> bool:
    return isinstance(norm, BATCH_NORMS) and norm.running_mean is not None


def _adjacent(network: nn.Module) -> Iterator[tuple[str, str]]:
    for path, sequence in network.named_modules():
        if isinstance(sequence, nn.Sequential):
            names = [f"{path}.{child}".lstrip(".") for child in sequence._modules]
            layers = list(sequence)
            for i in range(len(layers) - 1):
                if isinstance(layers[i], nn.Conv2d | nn.Linear) and _keeps_statistics(layers[i + 1]):
                    yield names[i], names[i + 1]


def _replace(network: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    cast(dict[str, nn.Module], network.get_submodule(parent)._modules)[leaf] = layer
