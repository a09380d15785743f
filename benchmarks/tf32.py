"""How far rounding to TF32 alone takes every method, without a GPU: what the tolerances of tests/cuda/test_kernels.py are.

    python benchmarks/tf32.py                       all methods, some minutes on one core
    python benchmarks/tf32.py odpfl-hn fedtta       some

Operands of convolutions and products are rounded to the ten bits that tensor cores read, forwards and backwards, and
everything else is float32 on a CPU. Printed is the distance from float64, as a share of the way that weights went, and
that of the loss after the second round.
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

ROUNDED = {F.conv2d, torch.conv2d, F.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__}


class Rounded(torch.autograd.Function):
    """To the nearest number with ten bits behind the point; its gradient is that of no rounding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        return gradient


class RoundedBackwards(torch.autograd.Function):
    """The gradient is an operand on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        rounded: Tensor = Rounded.apply(gradient)
        return rounded


class TensorCores(TorchFunctionMode):
    """While it lasts, products see rounded operands."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        single = all(isinstance(one, Tensor) and one.dtype == torch.float32 for one in args[:2])
        if func not in ROUNDED or not single:
            return func(*args, **given)
        with torch._C.DisableTorchFunctionSubclass():
            return RoundedBackwards.apply(func(*map(Rounded.apply, args[:2]), *args[2:], **given))


def main() -> None:
    """A line for each method, with normalisation and without."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", metavar="METHOD")
    torch.set_num_threads(1)
    print(f"{'method':<16}{'norm':>6}{'convolutions':>14}{'rest':>8}{'loss':>8}")
    for name in parser.parse_args().methods or list(METHODS):
        for norm in (False, True):
            method = made(name, norm)
            if method is None:
                continue
            with TensorCores():
                found = trained(method, Sequential(Compute()), Compute())
            expected = reference(name, norm)
            off, losses = off_by(found, expected), (found.losses[-1], expected.losses[-1])
            loss = abs(losses[0] - losses[1]) / max(abs(losses[1]), 1e-12)
            print(f"{name:<16}{norm:>6}{off['convolutions']:>14.3f}{off['rest']:>8.3f}{loss:>8.4f}", flush=True)


if __name__ == "__main__":
    main()
