"""Convolutions of stacked clients: one with groups, a product of patches and kernels, or kernels of our own. Needs a GPU.

    python benchmarks/convolutions.py

A row for each layer: milliseconds of a forward and backward pass of all clients (graphs replayed, float32 with TF32), all
ways, how many times faster than groups the one is that `fedshift.engines.cuda.convolutions` takes, and which that is. First
layers get no gradient of their input, as in training.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vmap

from fedshift.engines.cuda import convolutions, trilinear
from fedshift.engines.torch_flags import steady


class Layer(NamedTuple):
    """A convolution as clients have it."""

    name: str
    clients: int
    batch: int
    channels: int
    kernels: int
    side: int
    size: int
    stride: int
    padding: int
    first: bool


LAYERS = [
    Layer("LeNet 1, CIFAR-10", 50, 64, 3, 32, 32, 5, 1, 2, True),
    Layer("LeNet 1, Fashion-MNIST", 50, 64, 1, 32, 28, 5, 1, 2, True),
    Layer("LeNet 2, CIFAR-10", 50, 64, 32, 64, 16, 5, 1, 2, False),
    Layer("ResNet18 stem, 64 px", 4, 32, 3, 64, 64, 7, 2, 3, True),
    Layer("ResNet18 stage 1, 64 px", 4, 32, 64, 64, 16, 3, 1, 1, False),
    Layer("ResNet18 stage 2, 64 px", 4, 32, 128, 128, 8, 3, 1, 1, False),
    Layer("ResNet18 stage 3, 64 px", 4, 32, 256, 256, 4, 3, 1, 1, False),
    Layer("ResNet18 stage 4, 64 px", 4, 32, 512, 512, 2, 3, 1, 1, False),
    Layer("ResNet18 stage 4, 128 px", 4, 32, 512, 512, 4, 3, 1, 1, False),
]


def milliseconds(work: Callable[[], object], repeats: int = 10) -> float:
    """Of one replay of the captured work."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / repeats * 1e3


def slopes(layer: Layer, convolution: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], object]:
    """A pass there and back through every client's layer."""
    x = torch.randn(layer.clients, layer.batch, layer.channels, layer.side, layer.side, device="cuda")
    weight = torch.randn(layer.clients, layer.kernels, layer.channels, layer.size, layer.size, device="cuda")
    bias = torch.zeros(layer.clients, layer.kernels, device="cuda")

    def loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return convolution(x, weight, bias).square().sum()

    stacked = vmap(grad(loss, (1, 2) if layer.first else (0, 1, 2)))
    return lambda: stacked(x, weight, bias)


def main() -> None:
    if not trilinear.works(torch.device("cuda")):
        sys.exit("Kernels of our own do not run here: they need Triton and a GPU with TF32.")
    print(f"{'layer':<26}" + "".join(f"{name:>10}" for name in convolutions.WAYS) + f"{'ratio':>7}  taken")
    for layer in LAYERS:
        stride, padding = (layer.stride, layer.stride), (layer.padding, layer.padding)
        with steady(tf32=True):
            ways = {name: partial(way, stride=stride, padding=padding) for name, way in convolutions.WAYS.items()}
            found = {name: milliseconds(slopes(layer, way)) for name, way in ways.items()}
        images = (layer.batch, layer.channels, layer.side, layer.side)
        kernels = (layer.kernels, layer.channels, layer.size, layer.size)
        taken = convolutions.fastest(layer.clients, images, kernels, stride, padding, ours=True)
        cells = "".join(f"{each:10.3f}" for each in found.values())
        print(f"{layer.name:<26}{cells}{found['groups'] / found[taken]:7.1f}  {taken}")


if __name__ == "__main__":
    main()
