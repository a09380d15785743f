"""Passes over numbers on an NVIDIA GPU, for stacked clients: the maximum of windows, and steps of gradient descent.

Nothing is rounded to TF32 here, so these kernels serve every precision. Each result is written once and in a fixed order:
the same bits each time. Importing this module needs Triton.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# (a kernel's arguments are pointers and numbers of Triton's own)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedshift.engines.cuda.geometry import Geometry

BLOCK = 1024  # numbers that a program takes


def highest(x: Tensor, window: Geometry) -> tuple[Tensor, Tensor]:
    """The maximum of every window of images (N, C, H, W), and which of its numbers that is, row by row."""
    y = x.new_empty(*x.shape[:2], *window.positions)
    which = torch.empty_like(y, dtype=torch.uint8)
    x = x.contiguous()
    _highest[_grid(y)](x, y, which, y.numel(), *window.image, *window.positions, *_settings(window), BLOCK)
    return y, which


def scattered(g: Tensor, which: Tensor, window: Geometry) -> Tensor:
    """Numbers of windows back where they came from; every pixel is the sum over its windows."""
    dx = g.new_empty(*g.shape[:2], *window.image)
    g, which = g.contiguous(), which.contiguous()
    _scattered[_grid(dx)](g, which, dx, dx.numel(), *window.image, *window.positions, *_settings(window), BLOCK)
    return dx


def gathered(x: Tensor, which: Tensor, window: Geometry) -> Tensor:
    """The number of every window that ``which`` names."""
    y = x.new_empty(which.shape)
    x, which = x.contiguous(), which.contiguous()
    _gathered[_grid(y)](x, which, y, y.numel(), *window.image, *window.positions, *_settings(window)[1:], BLOCK)
    return y


def descended(
    leaf: Tensor, grad: Tensor, velocity: Tensor | None, rate: Tensor, momentum: float, decay: float
) -> tuple[Tensor, Tensor | None]:
    """``leaf - rate step`` and ``step = grad + decay leaf + momentum velocity`` of clients (K, ...), each with a rate."""
    leaf, grad = leaf.contiguous(), grad.contiguous()
    moved = torch.empty_like(leaf)
    each = leaf[0].numel()
    old = leaf if velocity is None else velocity.contiguous()
    kept = moved if velocity is None else torch.empty_like(leaf)
    grid = (triton.cdiv(each, BLOCK), len(leaf))
    _descended[grid](leaf, grad, old, rate, moved, kept, each, momentum, decay, velocity is not None, BLOCK)
    return moved, None if velocity is None else kept


def _grid(like: Tensor) -> tuple[int]:
    return (triton.cdiv(like.numel(), BLOCK),)


def _settings(window: Geometry) -> tuple[int, ...]:
    return (*window.size, *window.stride, *window.padding)


@triton.jit
def _highest(
    x, y, which, count,
    TALL: tl.constexpr, WIDE: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DOWN_STEP: tl.constexpr, ACROSS_STEP: tl.constexpr, ABOVE: tl.constexpr, LEFT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program takes so many outputs; NaN is the highest, and of equals the first one."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = o < count
    position = o % (DOWN * ACROSS)
    top = (position // ACROSS).to(tl.int32) * DOWN_STEP - ABOVE
    left = (position % ACROSS).to(tl.int32) * ACROSS_STEP - LEFT
    plane = x + o // (DOWN * ACROSS) * (TALL * WIDE)
    best = tl.zeros((BLOCK,), dtype=x.dtype.element_ty) - float("inf")
    chosen = tl.zeros((BLOCK,), dtype=tl.int32) - 1
    for row in tl.static_range(ROWS):
        for column in tl.static_range(COLUMNS):
            h, w = top + row, left + column
            inside = there & (h >= 0) & (h < TALL) & (w >= 0) & (w < WIDE)
            found = tl.load(plane + h * WIDE + w, mask=inside, other=-float("inf"))
            taken = inside & ((found > best) | (found != found) | (chosen < 0))
            best = tl.where(taken, found, best)
            chosen = tl.where(taken, row * COLUMNS + column, chosen)
    tl.store(y + o, best, mask=there)
    tl.store(which + o, chosen.to(tl.uint8), mask=there)


@triton.jit
def _scattered(
    g, which, dx, count,
    TALL: tl.constexpr, WIDE: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DOWN_STEP: tl.constexpr, ACROSS_STEP: tl.constexpr, ABOVE: tl.constexpr, LEFT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program takes so many pixels, and looks at all windows that each is in."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = i < count
    pixel = i % (TALL * WIDE)
    h, w = (pixel // WIDE).to(tl.int32) + ABOVE, (pixel % WIDE).to(tl.int32) + LEFT
    first = i // (TALL * WIDE) * (DOWN * ACROSS)
    total = tl.zeros((BLOCK,), dtype=g.dtype.element_ty)
    for a in tl.static_range((ROWS + DOWN_STEP - 1) // DOWN_STEP):
        for b in tl.static_range((COLUMNS + ACROSS_STEP - 1) // ACROSS_STEP):
            down, across = h // DOWN_STEP - a, w // ACROSS_STEP - b
            row, column = h - down * DOWN_STEP, w - across * ACROSS_STEP
            inside = there & (down >= 0) & (down < DOWN) & (across >= 0) & (across < ACROSS)
            inside = inside & (row < ROWS) & (column < COLUMNS)
            at = first + down * ACROSS + across
            chosen = tl.load(which + at, mask=inside, other=0).to(tl.int32)
            taken = inside & (chosen == row * COLUMNS + column)
            total += tl.load(g + at, mask=taken, other=0.0)
    tl.store(dx + i, total, mask=there)


@triton.jit
def _gathered(
    x, which, y, count,
    TALL: tl.constexpr, WIDE: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    COLUMNS: tl.constexpr, DOWN_STEP: tl.constexpr, ACROSS_STEP: tl.constexpr, ABOVE: tl.constexpr, LEFT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program takes so many windows."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = o < count
    position = o % (DOWN * ACROSS)
    chosen = tl.load(which + o, mask=there, other=0).to(tl.int32)
    h = (position // ACROSS).to(tl.int32) * DOWN_STEP - ABOVE + chosen // COLUMNS
    w = (position % ACROSS).to(tl.int32) * ACROSS_STEP - LEFT + chosen % COLUMNS
    plane = x + o // (DOWN * ACROSS) * (TALL * WIDE)
    tl.store(y + o, tl.load(plane + h * WIDE + w, mask=there, other=0.0), mask=there)


@triton.jit
def _descended(
    leaf, grad, old, rate, moved, kept, each,
    MOMENTUM: tl.constexpr, DECAY: tl.constexpr, HEAVY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program takes so many numbers of one client."""
    client = tl.program_id(1).to(tl.int64)
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = own < each
    at = client * each + own
    w = tl.load(leaf + at, mask=there, other=0.0)
    step = tl.load(grad + at, mask=there, other=0.0) + DECAY * w
    if HEAVY:
        step += MOMENTUM * tl.load(old + at, mask=there, other=0.0)
        tl.store(kept + at, step, mask=there)
    tl.store(moved + at, w - tl.load(rate + client) * step, mask=there)
