"""BatchNorm of stacked clients on an NVIDIA GPU: one pass for statistics and one to use them, there and back.

Images are (K, N, C, S): clients, samples, channels, pixels; every client's channel has statistics of its own. Sums have a
fixed order: the same bits each time. Importing this module needs Triton.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# (a kernel's arguments are pointers and numbers of Triton's own)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # numbers that a program takes at once


def normalised(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Images normalised by their own statistics, these statistics' means and biased variances, (K, C)."""
    clients, count, channels, pixels = x.shape
    mean, var, y = x.new_empty(clients, channels), x.new_empty(clients, channels), torch.empty_like(x)
    sizes = (count, channels, pixels)
    _statistics[(clients * channels,)](x, mean, var, *sizes, _block(count * pixels))
    given = (x, mean, (var + eps).rsqrt(), weight, bias)
    _apply[_grid(x)](*given, y, x.numel(), *sizes, BLOCK)
    return y, mean, var


def gradients(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Those of images, weights and biases."""
    clients, count, channels, pixels = x.shape
    total, along, dx = torch.empty_like(mean), torch.empty_like(mean), torch.empty_like(x)
    sizes = (count, channels, pixels)
    _sums[(clients * channels,)](g, x, mean, rstd, total, along, *sizes, _block(count * pixels))
    _back[_grid(x)](g, x, mean, rstd, weight, total, along, dx, x.numel(), 1 / (count * pixels), *sizes, BLOCK)
    return dx, along, total


def _grid(like: Tensor) -> tuple[int]:
    return (triton.cdiv(like.numel(), BLOCK),)


def _block(numbers: int) -> int:
    return min(BLOCK, max(32, int(triton.next_power_of_2(numbers))))


@triton.jit
def _statistics(x, mean, var, count, CHANNELS: tl.constexpr, PIXELS: tl.constexpr, BLOCK: tl.constexpr):
    """A program takes one client's channel; sums are of differences to its first number, which keeps them small."""
    row = tl.program_id(0).to(tl.int64)
    x += (row // CHANNELS) * count * (CHANNELS * PIXELS) + (row % CHANNELS) * PIXELS
    first = tl.load(x)
    one = tl.zeros((BLOCK,), dtype=x.dtype.element_ty)
    two = tl.zeros((BLOCK,), dtype=x.dtype.element_ty)
    for start in range(0, count * PIXELS, BLOCK):
        m = start + tl.arange(0, BLOCK)
        there = m < count * PIXELS
        found = tl.load(x + (m // PIXELS) * (CHANNELS * PIXELS) + m % PIXELS, mask=there, other=0.0)
        off = tl.where(there, found - first, 0.0)
        one += off
        two += off * off
    numbers = count * PIXELS
    shift = tl.sum(one, 0) / numbers
    tl.store(mean + row, first + shift)
    tl.store(var + row, tl.maximum(tl.sum(two, 0) / numbers - shift * shift, 0.0))


@triton.jit
def _apply(
    x, mean, rstd, weight, bias, y, numbers, count, CHANNELS: tl.constexpr, PIXELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program takes so many numbers."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = i < numbers
    plane = i // PIXELS
    row = (plane // CHANNELS) // count * CHANNELS + plane % CHANNELS
    scale = tl.load(rstd + row, mask=there, other=0.0) * tl.load(weight + row, mask=there, other=0.0)
    off = tl.load(x + i, mask=there, other=0.0) - tl.load(mean + row, mask=there, other=0.0)
    tl.store(y + i, off * scale + tl.load(bias + row, mask=there, other=0.0), mask=there)


@triton.jit
def _sums(g, x, mean, rstd, total, along, count, CHANNELS: tl.constexpr, PIXELS: tl.constexpr, BLOCK: tl.constexpr):
    """A program takes one client's channel: the sum of gradients, and that of gradients times normalised numbers."""
    row = tl.program_id(0).to(tl.int64)
    begin = (row // CHANNELS) * count * (CHANNELS * PIXELS) + (row % CHANNELS) * PIXELS
    x += begin
    g += begin
    middle, scale = tl.load(mean + row), tl.load(rstd + row)
    one = tl.zeros((BLOCK,), dtype=x.dtype.element_ty)
    two = tl.zeros((BLOCK,), dtype=x.dtype.element_ty)
    for start in range(0, count * PIXELS, BLOCK):
        m = start + tl.arange(0, BLOCK)
        there = m < count * PIXELS
        at = (m // PIXELS) * (CHANNELS * PIXELS) + m % PIXELS
        slope = tl.load(g + at, mask=there, other=0.0)
        one += slope
        two += slope * (tl.load(x + at, mask=there, other=0.0) - middle)
    tl.store(total + row, tl.sum(one, 0))
    tl.store(along + row, tl.sum(two, 0) * scale)


@triton.jit
def _back(
    g, x, mean, rstd, weight, total, along, dx, numbers, share, count,
    CHANNELS: tl.constexpr, PIXELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program takes so many numbers."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = i < numbers
    plane = i // PIXELS
    row = (plane // CHANNELS) // count * CHANNELS + plane % CHANNELS
    scale = tl.load(rstd + row, mask=there, other=0.0)
    off = (tl.load(x + i, mask=there, other=0.0) - tl.load(mean + row, mask=there, other=0.0)) * scale
    sums = tl.load(total + row, mask=there, other=0.0) + off * tl.load(along + row, mask=there, other=0.0)
    slope = tl.load(g + i, mask=there, other=0.0) - sums * share
    tl.store(dx + i, slope * scale * tl.load(weight + row, mask=there, other=0.0), mask=there)
