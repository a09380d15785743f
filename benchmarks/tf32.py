"""How far rounding to TF32 alone takes every method, without a GPU: what the tolerances of tests/cuda/test_kernels.py are.

    python benchmarks/tf32.py                       all methods, some minutes on one core
    python benchmarks/tf32.py odpfl-hn fedtta       some
    python benchmarks/tf32.py ours --rounded        rounded, as cuBLAS and cuDNN do before tensor cores see a number

Operands of convolutions and products are cut off behind the ten bits that tensor cores read, as kernels of our own leave it
to them, forwards and backwards, and everything else is float32 on a CPU. Printed is the distance from float64, as a share of
the way that weights went, and that of the loss after the second round.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.cuda.fast import made, off_by, reference, trained

from fedshift.core.registry import METHODS
from fedshift.engines.base import Compute
from fedshift.engines.sequential import Sequential

PRODUCTS = {F.conv2d, torch.conv2d, F.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__}


class Fewer(torch.autograd.Function):
    """A number with ten bits behind the point: ``half`` of the last one is added before the rest is cut off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, half: int) -> Tensor:  # noqa: ARG004
        return ((x.contiguous().view(torch.int32) + half) & ~0x1FFF).view(torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return gradient, None


class FewerBackwards(torch.autograd.Function):
    """The gradient is an operand on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, half: int) -> Tensor:
        ctx.half = half
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return Fewer.apply(gradient, ctx.half), None


class TensorCores(TorchFunctionMode):
    """While it lasts, products see operands of fewer bits, rounded or cut off."""

    def __init__(self, rounded: bool) -> None:
        super().__init__()
        self._half = 0x1000 if rounded else 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        single = all(isinstance(one, Tensor) and one.dtype == torch.float32 for one in args[:2])
        if func not in PRODUCTS or not single:
            return func(*args, **given)
        with torch._C.DisableTorchFunctionSubclass():
            few = [Fewer.apply(one, self._half) for one in args[:2]]
            return FewerBackwards.apply(func(*few, *args[2:], **given), self._half)


def main() -> None:
    """A line for each method, with normalisation and without."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", metavar="METHOD")
    parser.add_argument("--rounded", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'method':<16}{'norm':>6}{'convolutions':>14}{'rest':>8}{'loss':>8}")
    for name in options.methods or list(METHODS):
        for norm in (False, True):
            method = made(name, norm)
            if method is None:
                continue
            with TensorCores(options.rounded):
                found = trained(method, Sequential(Compute()), Compute())
            expected = reference(name, norm)
            off, losses = off_by(found, expected), (found.losses[-1], expected.losses[-1])
            loss = abs(losses[0] - losses[1]) / max(abs(losses[1]), 1e-12)
            print(f"{name:<16}{norm:>6}{off['convolutions']:>14.3f}{off['rest']:>8.3f}{loss:>8.4f}", flush=True)


if __name__ == "__main__":
    main()
