"""Batched image operations behind the corruptions; images are float32 ``[B, C, H, W]`` on the 0..255 scale.

An image's result must not depend on what else is in its batch, down to the last bit. So sums run either element by
element in a fixed order (shifted copies, never a convolution or reduction whose algorithm is picked by shape) or over
integers that floating point holds exactly (cumulative sums, the cosine transform), where no order can matter.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

ANGLES = 1024  # directions of a line blur are drawn from this many, so that their sines come from one table

# Quantisation tables of the JPEG standard (annex K), luminance then chrominance, in reading order.
_LUMINANCE = (
    *(16, 11, 10, 16, 24, 40, 51, 61, 12, 12, 14, 19, 26, 58, 60, 55, 14, 13, 16, 24, 40, 57, 69, 56, 14, 17, 22, 29),
    *(51, 87, 80, 62, 18, 22, 37, 56, 68, 109, 103, 77, 24, 35, 55, 64, 81, 104, 113, 92, 49, 64, 78, 87, 103, 121),
    *(120, 101, 72, 92, 95, 98, 112, 100, 103, 99),
)
_CHROMINANCE = (
    *(17, 18, 24, 47, 99, 99, 99, 99, 18, 21, 26, 66, 99, 99, 99, 99, 24, 26, 56, 99, 99, 99, 99, 99, 47, 66, 99, 99),
    *((99,) * 36),
)


def _taps(sigma: float, reach: int) -> list[float]:
    """Weights of a normalised Gaussian at distances 0..reach."""
    weights = [math.exp(-0.5 * (i / sigma) ** 2) if sigma > 0 else float(i == 0) for i in range(reach + 1)]
    total = weights[0] + 2.0 * sum(weights[1:])
    return [weight / total for weight in weights]


def _smooth(padded: Tensor, taps: list[float]) -> Tensor:
    """Correlate with a symmetric kernel along height and width; each side loses ``len(taps) - 1`` pixels."""
    reach = len(taps) - 1
    for dim in (2, 3):
        size = padded.shape[dim] - 2 * reach
        total = padded.narrow(dim, reach, size) * taps[0]
        for i in range(1, reach + 1):
            total += (padded.narrow(dim, reach - i, size) + padded.narrow(dim, reach + i, size)) * taps[i]
        padded = total
    return padded


def gaussian_blur(x: Tensor, sigma: float, truncate: float = 4.0) -> Tensor:
    """Gaussian blur, cut at ``truncate`` sigmas, the border repeated.

    >>> float(gaussian_blur(torch.full((1, 1, 8, 8), 7.0), 1.0).sub(7.0).abs().max()) < 1e-5
    True
    """
    reach = int(truncate * sigma + 0.5)
    return _smooth(F.pad(x, (reach,) * 4, mode="replicate"), _taps(sigma, reach))


def disk_blur(x: Tensor, radius: float, sigma: float) -> Tensor:
    """Mean over a disk, then the small Gaussian that softens its edge (3 x 3, from radius 8 up 5 x 5); mirrored border.

    The disk is summed as horizontal runs of a cumulative sum: two reads per row of the disk instead of one per pixel.

    >>> disk_blur(torch.full((1, 1, 8, 8), 7.0), 1.5, 0.1)[0, 0, 0, :2].tolist()
    [7.0, 7.0]
    """
    soft, reach = (1 if radius <= 8 else 2), int(radius)
    height, width = x.shape[2] + 2 * soft, x.shape[3] + 2 * soft
    sums = F.pad(F.pad(x, (reach + soft,) * 4, mode="reflect").cumsum(3), (1, 0))  # whole numbers below 2 ** 24: exact
    total, count = torch.zeros_like(x[:, :, :1, :1]), 0
    for dy in range(-reach, reach + 1):
        half = int(math.sqrt(radius**2 - dy**2))
        rows = sums.narrow(2, reach + dy, height)
        total = total + rows.narrow(3, reach + half + 1, width) - rows.narrow(3, reach - half, width)
        count += 2 * half + 1
    return _smooth(total / count, _taps(sigma, soft))


def line_blur(x: Tensor, turns: Tensor, radius: float, sigma: float, low: float, high: float) -> Tensor:
    """Blur each image along its own line, one-sided: Gaussian weights at 0, 1, ..., 2·radius pixels from the pixel.

    ``turns`` in 0..ANGLES-1 picks each image's angle between ``low`` and ``high`` degrees. Positions on the line are
    rounded to whole pixels and the border is repeated, as ImageMagick does; weights below a millionth are left out.

    >>> line_blur(torch.full((1, 1, 8, 8), 7.0), torch.tensor([3]), 4, 1.0, -45, 45)[0, 0, 0, 0].round().item()
    7.0
    """
    raw = [math.exp(-0.5 * (i / sigma) ** 2) for i in range(2 * math.ceil(radius) + 1)]
    weights = [weight / sum(raw) for weight in raw if weight > 1e-6]
    batch, channels, height, width = x.shape
    pad = len(weights) - 1
    stride = width + 2 * pad
    angles = torch.deg2rad(low + (high - low) * (torch.arange(ANGLES, dtype=torch.float64) + 0.5) / ANGLES)
    along = torch.arange(len(weights), dtype=torch.float64)
    dx = torch.ceil(along * angles.cos()[:, None] - 0.5).long()
    dy = torch.ceil(along * angles.sin()[:, None] - 0.5).long()
    starts = ((pad + dy) * stride + pad + dx).to(x.device)[turns]  # [B, taps]
    pixels = torch.arange(height, device=x.device)[:, None] * stride + torch.arange(width, device=x.device)
    padded = F.pad(x, (pad,) * 4, mode="replicate").reshape(batch, channels, -1)
    total = torch.zeros(batch, channels, height * width, device=x.device)
    for i, weight in enumerate(weights):
        index = (starts[:, i, None] + pixels.reshape(1, -1))[:, None].expand_as(total)
        total += padded.gather(2, index) * weight
    return total.reshape(x.shape)


def warp(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Read ``x`` bilinearly at fractional pixel positions ``[B, H, W]`` (or ``[1, H, W]``), mirrored at the border.

    >>> image = torch.arange(64.0).reshape(1, 1, 8, 8)
    >>> warp(image, torch.full((1, 8, 8), 2.0), torch.full((1, 8, 8), 3.5))[0, 0, 0, 0].round(decimals=3).item()
    19.5
    """
    grid = torch.stack((columns * (2.0 / (x.shape[3] - 1)) - 1.0, rows * (2.0 / (x.shape[2] - 1)) - 1.0), dim=-1)
    grid = grid.expand(len(x), -1, -1, -1)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="reflection", align_corners=True)


def pixel_grid(x: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of every pixel as float32 ``[1, H, W]``.

    >>> pixel_grid(torch.zeros(1, 1, 2, 3))[1].tolist()
    [[[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]]]
    """
    rows = torch.arange(x.shape[2], device=x.device, dtype=torch.float32)
    columns = torch.arange(x.shape[3], device=x.device, dtype=torch.float32)
    return rows[None, :, None].expand(1, -1, x.shape[3]), columns[None, None, :].expand(1, x.shape[2], -1)


def zoom(x: Tensor, factor: float) -> Tensor:
    """Enlarge about the exact centre, bilinearly, keeping the size.

    >>> zoom(torch.arange(9.0).reshape(1, 1, 3, 3), 2.0)[0, 0, 1].tolist()
    [3.5, 4.0, 4.5]
    """
    rows, columns = pixel_grid(x)
    middle, centre = (x.shape[2] - 1) / 2, (x.shape[3] - 1) / 2
    return warp(x, (rows - middle) / factor + middle, (columns - centre) / factor + centre)


def swap_pixels(height: int, width: int, reach: int, jumps: Tensor, copies: bool = False) -> Tensor:
    """Where each pixel comes from after swapping every pixel with a neighbour, last pixel first: ``[B, height·width]``.

    ``jumps`` ``[B, passes, height, width]`` holds numbers 0..(2·reach+1)²-1, each a neighbour at most ``reach`` away.
    With ``copies`` a pixel takes its neighbour's place and is lost, neighbours are the (2·reach)² at -reach..reach-1, and
    the frame that keeps its pixels is one narrower at the end and one wider at the start.
    The swaps are those of two nested loops over rows and columns, but all swaps of an anti-diagonal of slope
    2·reach+1 are done at once: they cannot touch each other's pixels and every earlier swap that could is done.

    >>> swap_pixels(8, 8, 1, torch.full((1, 1, 8, 8), 4)).equal(torch.arange(64)[None])    # 4: every pixel with itself
    True
    """
    slope, rows, columns = 2 * reach + 1, height - 2 * reach, width - 2 * reach
    source = torch.arange(height * width, device=jumps.device).repeat(len(jumps), 1)
    choices = 2 * reach if copies else slope
    partners = ((jumps // choices - reach) * width + jumps % choices - reach).flatten(2) + source[:, None]
    bottom, right = height - 1 - reach + copies, width - 1 - reach + copies
    for turn in range(jumps.shape[1]):
        for step in range(columns + slope * (rows - 1)):
            first, last = max(0, -((columns - 1 - step) // slope)), min(rows - 1, step // slope)
            if first > last:
                continue
            high, low = ((bottom - i) * width + right - (step - slope * i) for i in (first, last))
            here = slice(low, high + 1, max(1, width - slope))
            there = partners[:, turn, here]
            mine, theirs = source[:, here].clone(), source.gather(1, there)
            if not copies:
                source.scatter_(1, there, mine)
            source[:, here] = theirs
    return source


def plasma(noise: Tensor, decay: float) -> Tensor:
    """Periodic diamond-square fractals from uniform noise on [-1, 1), ``[B, m, m]`` with m a power of two, in [0, 1].

    From level to level the roughness falls by ``decay`` squared, as in the reference, which applies it twice.

    >>> p = plasma(torch.linspace(-1, 1, 64).reshape(1, 8, 8), 2.0)
    >>> (p.min().item(), p.max().item())
    (0.0, 1.0)
    """
    field, step, rough = torch.zeros_like(noise), noise.shape[1], 1.0
    while step >= 2:
        half = step // 2
        corners = field[:, ::step, ::step]
        right, below = corners.roll(-1, 2), corners.roll(-1, 1)
        centres = (corners + right + below + right.roll(-1, 1)) / 4 + noise[:, half::step, half::step] * rough
        field[:, half::step, half::step] = centres
        across = (corners + right + centres + centres.roll(1, 1)) / 4 + noise[:, ::step, half::step] * rough
        down = (corners + below + centres + centres.roll(1, 2)) / 4 + noise[:, half::step, ::step] * rough
        field[:, ::step, half::step], field[:, half::step, ::step] = across, down
        step, rough = half, rough / decay**2
    field = field - field.amin((1, 2), keepdim=True)
    return field / field.amax((1, 2), keepdim=True).clamp(min=1e-12)


def _box(x: Tensor, dim: int, cells: int) -> Tensor:
    """Along one dimension: the rounded mean of each cell's pixels, repeated over the cell."""
    size = x.shape[dim]
    scale = size / cells
    pixels = torch.arange(size, dtype=torch.float64) + 0.5
    centres = (torch.floor(pixels * cells / size) + 0.5) * scale
    offsets = (pixels - centres[:, None]) / scale
    inside = ((offsets > -0.5) & (offsets <= 0.5)).long()
    count, low = inside.sum(1).to(x.device), inside.argmax(1).to(x.device)
    sums = F.pad(x.cumsum(dim), (1, 0) if dim == 3 else (0, 0, 1, 0))
    total = sums.index_select(dim, low + count) - sums.index_select(dim, low)
    return torch.floor(total / count.reshape((-1,) if dim == 3 else (-1, 1)) + 0.5)


def pixelate(x: Tensor, fraction: float) -> Tensor:
    """Shrink to ``fraction`` of each side and enlarge again, both with Pillow's box filter, to the same whole numbers.

    >>> pixelate(torch.arange(8.0).reshape(1, 1, 1, 8).expand(1, 1, 8, 8), 0.5)[0, 0, 0].tolist()
    [1.0, 1.0, 3.0, 3.0, 5.0, 5.0, 7.0, 7.0]
    """
    for dim in (3, 2):
        x = _box(x, dim, max(1, int(x.shape[dim] * fraction + 1e-9)))
    return x


def _through_dct(plane: Tensor, table: tuple[int, ...], quality: int) -> Tensor:
    """What is left of a plane of whole numbers ``[B, H, W]`` after quantising its 8 x 8 cosine coefficients."""
    scale = 5000 // quality if quality < 50 else 200 - 2 * quality
    steps = torch.tensor([min(255, max(1, (q * scale + 50) // 100)) for q in table], dtype=torch.float64)
    k = torch.arange(8, dtype=torch.float64)
    basis = torch.cos((2 * k + 1) * k[:, None] * (math.pi / 16)) / 2
    basis[0] /= math.sqrt(2)
    basis = torch.kron(basis, basis).mul(2**24).round().div(2**24)  # so that every sum below is exact in float64
    steps, basis = steps.to(plane.device), basis.to(plane.device)
    batch, height, width = plane.shape
    plane = F.pad(plane[:, None], (0, -width % 8, 0, -height % 8), mode="replicate")[:, 0]
    down, across = plane.shape[1] // 8, plane.shape[2] // 8
    blocks = plane.reshape(batch, down, 8, across, 8).transpose(2, 3).reshape(-1, 64).double() - 128
    levels = torch.floor((blocks @ basis.T) * 8 + 0.5) / (8 * steps)
    levels = levels.sign() * torch.floor(levels.abs() + 0.5) * steps
    blocks = torch.floor(levels @ basis + 128.5).clamp(0, 255)
    plane = blocks.reshape(batch, down, across, 8, 8).transpose(2, 3).reshape(batch, 8 * down, 8 * across)
    return plane[:, :height, :width].float()


def _halve(plane: Tensor) -> Tensor:
    """Mean of 2 x 2 pixels, rounded down and up in turn from column to column as libjpeg does."""
    height, width = plane.shape[1:]
    plane = F.pad(plane[:, None], (0, -width % 16, 0, height % 2), mode="replicate")[:, 0]
    sums = plane[:, ::2, ::2] + plane[:, 1::2, ::2] + plane[:, ::2, 1::2] + plane[:, 1::2, 1::2]
    bias = 1.0 + torch.arange(sums.shape[2], device=plane.device) % 2
    return torch.floor((sums + bias) / 4)


def _double(plane: Tensor, height: int, width: int) -> Tensor:
    """Enlarge twofold with libjpeg's triangle filter (weights 9, 3, 3, 1) and crop."""
    rows = F.pad(plane[:, None], (1, 1, 1, 1), mode="replicate")[:, 0]
    rows = torch.stack((3 * rows[:, 1:-1] + rows[:, :-2], 3 * rows[:, 1:-1] + rows[:, 2:]), dim=2).flatten(1, 2)
    inner = 3 * rows[:, :, 1:-1]
    both = torch.stack(
        (torch.floor((inner + rows[:, :, :-2] + 8) / 16), torch.floor((inner + rows[:, :, 2:] + 7) / 16)), 3
    )
    return both.flatten(2, 3)[:, :height, :width]


def jpeg(x: Tensor, quality: int) -> Tensor:
    """Encode and decode as baseline JPEG: 4:2:0 chroma and the standard tables scaled to ``quality``, as libjpeg does.

    Entropy coding is left out because it loses nothing. Images of one channel are coded as greyscale.

    >>> jpeg(torch.full((1, 3, 8, 8), 200.0), 50)[0, :, 0, 0].tolist()
    [200.0, 200.0, 200.0]
    """
    if x.shape[1] == 1:
        return _through_dct(x[:, 0], _LUMINANCE, quality)[:, None]
    height, width = x.shape[2:]
    red, green, blue = x.double().unbind(1)  # libjpeg's sixteen-bit fixed point, exact in float64
    luma = torch.floor((19595 * red + 38470 * green + 7471 * blue + 32768) / 65536)
    blueness = torch.floor((-11059 * red - 21709 * green + 32768 * blue + 32767) / 65536 + 128)
    redness = torch.floor((32768 * red - 27439 * green - 5329 * blue + 32767) / 65536 + 128)
    luma = _through_dct(luma, _LUMINANCE, quality).double()
    half = (height + 1) // 2, (width + 1) // 2
    colours = [
        _through_dct(_halve(plane), _CHROMINANCE, quality)[:, : half[0], : half[1]] for plane in (blueness, redness)
    ]
    cb, cr = (_double(plane, height, width).double() - 128 for plane in colours)
    red = luma + torch.floor((91881 * cr + 32768) / 65536)
    green = luma + torch.floor((-22554 * cb - 46802 * cr + 32768) / 65536)
    blue = luma + torch.floor((116130 * cb + 32768) / 65536)
    return torch.stack((red, green, blue), dim=1).clamp(0, 255).float()
