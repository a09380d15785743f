"""Convolutions of stacked clients on an NVIDIA GPU, one Triton kernel for all clients.

Each is a product of matrices, one of which, the patches of images, is never written out: a kernel reads patches where they
lie. Numbers are float32 and multiplied on tensor cores as TF32, so these kernels are for ``precision = "tf32"``. Sums have
a fixed order: the same bits each time. Tensor cores cut a number off where cuBLAS rounds it first; rounding here
(``cvt.rna``) took two fifths of the speed on an H200. ``benchmarks/tf32.py`` says how far either takes every method.

Correlations want channels last, where the numbers of a patch lie beside each other (``_lay`` puts them there, with the zeros
around and between them); images of a few channels are read as they are, by a table of where a patch's numbers lie.
Importing this module needs Triton, which comes with torch's CUDA builds for Linux.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# (a kernel's arguments are pointers and numbers of Triton's own)

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from fedshift.engines.cuda.geometry import Geometry, Pair, Role, positions

SUM = 32  # numbers that every step of a sum takes
FEW = 16  # or so many: channels come last if either makes whole steps of them
BLOCKS = 1024  # enough to keep a GPU busy: sums over images are split until there are so many

# Tiles of rows and columns, warps, stages: the fastest of those tried on an H200.
WIDE_TILES = (128, 64, 4, 3)
NARROW_TILES = (256, 32, 8, 3)  # for up to 32 kernels
TABLE_TILES = (32, 64, 4, 4)
GRADIENT_TILES = (64, 128, 4, 3)


def outputs(given: Mapping[Role, Tensor], geometry: Geometry) -> Tensor:
    """The convolution itself."""
    x, w = given[Role.IMAGES], given[Role.KERNELS]
    return correlate(x, w, geometry.frame, geometry.padding, (1, 1), geometry.stride)


def kernels(given: Mapping[Role, Tensor], geometry: Geometry) -> Tensor:
    """What kernels get from gradients of outputs."""
    return gradients(given[Role.IMAGES], given[Role.OUTPUTS], geometry)


def images(given: Mapping[Role, Tensor], geometry: Geometry) -> Tensor:
    """What images get: outputs, as far apart as they were taken, correlated with the kernels turned round."""
    w, y = given[Role.KERNELS], given[Role.OUTPUTS]
    reach = (geometry.size[0] - 1, geometry.size[1] - 1)
    frame = (geometry.image[0] + reach[0], geometry.image[1] + reach[1])
    corner = (reach[0] - geometry.padding[0], reach[1] - geometry.padding[1])
    return correlate(y, w.flip(3, 4).transpose(1, 2), frame, corner, geometry.stride, (1, 1))


MAKERS = {Role.OUTPUTS: outputs, Role.KERNELS: kernels, Role.IMAGES: images}


def correlate(x: Tensor, w: Tensor, frame: Pair, corner: Pair, apart: Pair, stride: Pair) -> Tensor:
    """Images (K, N, C, H, W) correlated with kernels (K, D, C, R, S), every client's with its own.

    Images lie in a ``frame`` of zeros, (height, width), their first number at ``corner``, neighbours ``apart``.
    """
    clients, count, channels = x.shape[:3]
    out, size = w.shape[1], (w.shape[3], w.shape[4])
    down, across = positions(frame, size, stride)
    last = channels % FEW == 0
    together = SUM if not last or channels % SUM == 0 else FEW
    tiles = (NARROW_TILES if out <= NARROW_TILES[1] else WIDE_TILES) if last else TABLE_TILES
    rows_tile, columns_tile, warps, stages = tiles
    columns_tile = min(columns_tile, _tile(out))
    rows, taps, whole = count * down * across, size[0] * size[1], frame[0] * frame[1]
    y = x.new_empty(clients, count, out, down, across)
    grid = (triton.cdiv(rows, rows_tile), triton.cdiv(out, columns_tile), clients)
    walk = (down * across, across, *stride, rows % rows_tile == 0, rows_tile, columns_tile, together)
    if last:
        x, w = _laid(x, frame, corner, apart), w.permute(0, 1, 3, 4, 2).contiguous()
        _correlate_last[grid](
            x, w, y, rows, channels, taps, size[1], out, whole, frame[1], *walk, num_warps=warps, num_stages=stages
        )
    else:
        x, table = _framed(x, frame, corner, apart), _table(channels, size, frame, x.device, SUM)
        _correlate_table[grid](
            x, w.contiguous(), y, table, rows, channels * taps, out, channels * whole, frame[1], *walk,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return y


def gradients(x: Tensor, g: Tensor, geometry: Geometry) -> Tensor:
    """Images (K, N, C, H, W) and gradients of outputs (K, N, D, OH, OW) to those of kernels, (K, D, C, R, S)."""
    clients, count, channels = x.shape[:3]
    out, down, across = g.shape[2:]
    rows_tile, columns_tile, warps, stages = GRADIENT_TILES
    depth, rows = channels * geometry.size[0] * geometry.size[1], count * down * across
    rows_tile, columns_tile = min(rows_tile, _tile(out)), min(columns_tile, _tile(depth))
    blocks = triton.cdiv(depth, columns_tile) * triton.cdiv(out, rows_tile) * clients
    splits = max(1, min(triton.cdiv(rows, 16 * SUM), triton.cdiv(BLOCKS, blocks)))
    share = triton.cdiv(triton.cdiv(rows, splits), SUM) * SUM
    parts = x.new_empty(splits, clients, out, channels, *geometry.size)
    frame, grid = geometry.frame, (triton.cdiv(depth, columns_tile), triton.cdiv(out, rows_tile), clients * splits)
    table = _table(channels, geometry.size, frame, x.device, columns_tile)
    _gradients[grid](
        _framed(x, frame, geometry.padding, (1, 1)), g.contiguous(), parts, table, rows, splits, share, depth, out,
        channels * frame[0] * frame[1], frame[1], down * across, across, *geometry.stride,
        rows_tile, columns_tile, SUM, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return parts[0] if splits == 1 else parts.sum(0)


def _tile(length: int) -> int:
    """No larger than needed, but what tensor cores can take."""
    return max(16, int(triton.next_power_of_2(length)))


@cache
def _table(channels: int, size: Pair, frame: Pair, device: torch.device, filled: int) -> Tensor:
    """Where the numbers of a patch lie, counted from its first one; filled up with zeros to whole tiles."""
    ranges = (torch.arange(length) for length in (channels, *size))
    channel, row, column = torch.meshgrid(*ranges, indexing="ij")
    flat = ((channel * frame[0] + row) * frame[1] + column).flatten().int()
    return F.pad(flat, (0, -len(flat) % filled)).to(device)


def _laid(x: Tensor, frame: Pair, corner: Pair, apart: Pair) -> Tensor:
    """Images in their frames, channels last."""
    clients, count, channels, height, width = x.shape
    to = x.new_empty(clients, count, *frame, channels)
    channels_tile = min(64, _tile(channels))
    grid = (clients * count, triton.cdiv(frame[0] * frame[1], 64), triton.cdiv(channels, channels_tile))
    _lay[grid](x.contiguous(), to, channels, height, width, *frame, *corner, *apart, 64, channels_tile, num_warps=4)
    return to


def _framed(x: Tensor, frame: Pair, corner: Pair, apart: Pair) -> Tensor:
    """Images in their frames, channels first."""
    if apart != (1, 1):
        spread = x.new_zeros(*x.shape[:3], *((n - 1) * step + 1 for n, step in zip(x.shape[3:], apart, strict=True)))
        spread[..., :: apart[0], :: apart[1]] = x
        x = spread
    below, right = (whole - own - at for whole, own, at in zip(frame, x.shape[3:], corner, strict=True))
    return F.pad(x, (corner[1], right, corner[0], below)).contiguous()


@triton.jit
def _first(
    m, FRAME: tl.constexpr, FRAME_WIDE: tl.constexpr, POSITIONS: tl.constexpr, ACROSS: tl.constexpr,
    DOWN_STEP: tl.constexpr, ACROSS_STEP: tl.constexpr,
):  # fmt: skip
    """Where the patch of the m-th position begins; positions are counted through all images of a client."""
    image, position = m // POSITIONS, m % POSITIONS
    return image * FRAME + (position // ACROSS) * (DOWN_STEP * FRAME_WIDE) + (position % ACROSS) * ACROSS_STEP


@triton.jit
def _output(m, OUT: tl.constexpr, POSITIONS: tl.constexpr):
    """Where the first channel of the output at the m-th position lies."""
    return (m // POSITIONS) * (OUT * POSITIONS) + m % POSITIONS


@triton.jit
def _lay(
    x, to,
    CHANNELS: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, FRAME_TALL: tl.constexpr, FRAME_WIDE: tl.constexpr,
    ABOVE: tl.constexpr, LEFT: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    POSITIONS_TILE: tl.constexpr, CHANNELS_TILE: tl.constexpr,
):  # fmt: skip
    """One image, channels first, into a frame of zeros, channels last."""
    image = tl.program_id(0).to(tl.int64)
    position = tl.program_id(1) * POSITIONS_TILE + tl.arange(0, POSITIONS_TILE)
    channel = tl.program_id(2) * CHANNELS_TILE + tl.arange(0, CHANNELS_TILE)
    down, across = position // FRAME_WIDE - ABOVE, position % FRAME_WIDE - LEFT
    row, column = down // DOWN, across // ACROSS
    taken = (down >= 0) & (across >= 0) & (row < TALL) & (column < WIDE) & (down % DOWN == 0) & (across % ACROSS == 0)
    known = channel < CHANNELS
    source = x + image * (CHANNELS * TALL * WIDE) + (row * WIDE + column)[None, :] + (channel * (TALL * WIDE))[:, None]
    found = tl.load(source, mask=taken[None, :] & known[:, None], other=0.0)
    target = to + image * (FRAME_TALL * FRAME_WIDE * CHANNELS) + position[:, None] * CHANNELS + channel[None, :]
    tl.store(target, tl.trans(found), mask=(position < FRAME_TALL * FRAME_WIDE)[:, None] & known[None, :])


@triton.jit
def _correlate_last(
    x, w, y, rows,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, TAPS_WIDE: tl.constexpr, OUT: tl.constexpr, FRAME: tl.constexpr,
    FRAME_WIDE: tl.constexpr, POSITIONS: tl.constexpr, ACROSS: tl.constexpr, DOWN_STEP: tl.constexpr,
    ACROSS_STEP: tl.constexpr, EVEN: tl.constexpr, ROWS_TILE: tl.constexpr, COLUMNS_TILE: tl.constexpr,
    SUM_TILE: tl.constexpr,
):  # fmt: skip
    """y[m, d] = sum over taps and channels of x[first(m) + tap, c] w[d, tap, c]; a client a layer of the grid."""
    client = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * ROWS_TILE + tl.arange(0, ROWS_TILE)
    d = tl.program_id(1) * COLUMNS_TILE + tl.arange(0, COLUMNS_TILE)
    inside, known = m < rows, d < OUT
    first = _first(m, FRAME, FRAME_WIDE, POSITIONS, ACROSS, DOWN_STEP, ACROSS_STEP) * CHANNELS
    x += client * (rows // POSITIONS) * (FRAME * CHANNELS)
    w += client * (OUT * TAPS * CHANNELS)
    y += client * rows * OUT
    PARTS: tl.constexpr = CHANNELS // SUM_TILE
    k = tl.arange(0, SUM_TILE)
    total = tl.zeros((ROWS_TILE, COLUMNS_TILE), dtype=tl.float32)
    for step in range(TAPS * PARTS):
        tap = step // PARTS
        there = ((tap // TAPS_WIDE) * FRAME_WIDE + tap % TAPS_WIDE) * CHANNELS + (step % PARTS) * SUM_TILE
        patches = x + first[:, None] + (there + k)[None, :]
        a = tl.load(patches) if EVEN else tl.load(patches, mask=inside[:, None], other=0.0)
        kernels = w + (d * (TAPS * CHANNELS))[None, :] + (step * SUM_TILE + k)[:, None]
        b = tl.load(kernels, mask=known[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision="tf32")
    outputs = y + _output(m, OUT, POSITIONS)[:, None] + (d * POSITIONS)[None, :]
    tl.store(outputs, total, mask=inside[:, None] & known[None, :])


@triton.jit
def _correlate_table(
    x, w, y, table, rows,
    DEPTH: tl.constexpr, OUT: tl.constexpr, FRAME: tl.constexpr, FRAME_WIDE: tl.constexpr, POSITIONS: tl.constexpr,
    ACROSS: tl.constexpr, DOWN_STEP: tl.constexpr, ACROSS_STEP: tl.constexpr, EVEN: tl.constexpr,
    ROWS_TILE: tl.constexpr, COLUMNS_TILE: tl.constexpr, SUM_TILE: tl.constexpr,
):  # fmt: skip
    """y[m, d] = sum over k of x[first(m) + table[k]] w[d, k]; a client a layer of the grid."""
    client = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * ROWS_TILE + tl.arange(0, ROWS_TILE)
    d = tl.program_id(1) * COLUMNS_TILE + tl.arange(0, COLUMNS_TILE)
    inside, known = m < rows, d < OUT
    first = _first(m, FRAME, FRAME_WIDE, POSITIONS, ACROSS, DOWN_STEP, ACROSS_STEP)
    x += client * (rows // POSITIONS) * FRAME
    w += client * (OUT * DEPTH)
    y += client * rows * OUT
    total = tl.zeros((ROWS_TILE, COLUMNS_TILE), dtype=tl.float32)
    for start in range(0, DEPTH, SUM_TILE):
        k = start + tl.arange(0, SUM_TILE)
        patches = x + first[:, None] + tl.load(table + k)[None, :]
        a = tl.load(patches) if EVEN else tl.load(patches, mask=inside[:, None], other=0.0)
        b = tl.load(w + (d * DEPTH)[None, :] + k[:, None], mask=(k < DEPTH)[:, None] & known[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision="tf32")
    outputs = y + _output(m, OUT, POSITIONS)[:, None] + (d * POSITIONS)[None, :]
    tl.store(outputs, total, mask=inside[:, None] & known[None, :])


@triton.jit(do_not_specialize=["splits"])  # nor compiled anew for every number of clients
def _gradients(
    x, g, parts, table, rows, splits, share,
    DEPTH: tl.constexpr, OUT: tl.constexpr, FRAME: tl.constexpr, FRAME_WIDE: tl.constexpr, POSITIONS: tl.constexpr,
    ACROSS: tl.constexpr, DOWN_STEP: tl.constexpr, ACROSS_STEP: tl.constexpr,
    ROWS_TILE: tl.constexpr, COLUMNS_TILE: tl.constexpr, SUM_TILE: tl.constexpr,
):  # fmt: skip
    """parts[split, d, k] = sum over that split's share of m of g[m, d] x[first(m) + table[k]]."""
    split = tl.program_id(2) % splits
    client = (tl.program_id(2) // splits).to(tl.int64)
    k = tl.program_id(0) * COLUMNS_TILE + tl.arange(0, COLUMNS_TILE)
    d = tl.program_id(1) * ROWS_TILE + tl.arange(0, ROWS_TILE)
    there, known = tl.load(table + k), d < OUT
    x += client * (rows // POSITIONS) * FRAME
    g += client * rows * OUT
    total = tl.zeros((ROWS_TILE, COLUMNS_TILE), dtype=tl.float32)
    for start in range(0, share, SUM_TILE):
        m = split * share + start + tl.arange(0, SUM_TILE)
        inside = m < rows
        first = _first(m, FRAME, FRAME_WIDE, POSITIONS, ACROSS, DOWN_STEP, ACROSS_STEP)
        outputs = g + _output(m, OUT, POSITIONS)[None, :] + (d * POSITIONS)[:, None]
        a = tl.load(outputs, mask=inside[None, :] & known[:, None], other=0.0)
        b = tl.load(x + first[:, None] + there[None, :], mask=inside[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="tf32")
    parts += (split * (tl.num_programs(2) // splits) + client) * (OUT * DEPTH)
    tl.store(parts + (d * DEPTH)[:, None] + k[None, :], total, mask=known[:, None] & (k < DEPTH)[None, :])
