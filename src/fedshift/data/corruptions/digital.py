"""Digital: contrast, elastic distortion, large pixels, JPEG."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor

from fedshift.data.corruptions import filters
from fedshift.data.corruptions.draws import Corruption, Draws


def _contrast(x: Tensor, _: Draws, c: tuple[float, ...]) -> Tensor:
    """Shrink the deviations from each channel's mean to the fraction c."""
    mean = x.long().sum((2, 3), keepdim=True).float() / (x.shape[2] * x.shape[3])  # whole numbers: an exact sum
    return (x - mean) * c[0] + mean


def _elastic(x: Tensor, draws: Draws, c: tuple[float, ...]) -> Tensor:
    """Move three points by up to ± c2 and the image with them, then every pixel by smoothed noise (scale c0, sigma c1).

    All three constants are fractions of the shorter side.
    """
    side = float(min(x.shape[2:]))
    scale, sigma, shift = (side * value for value in c)
    rows, columns = filters.pixel_grid(x)
    if shift > 0:
        middle, centre, arm = x.shape[2] // 2, x.shape[3] // 2, int(side) // 3
        moves = draws.symmetric("points", (3, 2)) * shift  # of (+arm, +arm), (+arm, -arm), (-arm, -arm) as (x, y)
        px, py = centre + arm + moves[:, 1, 0], middle - arm + moves[:, 1, 1]  # the corner the two edges start from
        ax, ay = moves[:, 0, 0] - moves[:, 1, 0], moves[:, 0, 1] - moves[:, 1, 1] + 2 * arm
        bx, by = moves[:, 2, 0] - moves[:, 1, 0] - 2 * arm, moves[:, 2, 1] - moves[:, 1, 1]
        px, py, ax, ay, bx, by = (t[:, None, None] for t in (px, py, ax, ay, bx, by))
        dx, dy, area = columns - px, rows - py, ax * by - ay * bx
        along_a, along_b = (dx * by - dy * bx) / area, (dy * ax - dx * ay) / area
        x = filters.warp(x, along_a * (2 * arm) + (middle - arm), along_b * (-2 * arm) + (centre + arm))
    if scale > 0:
        moves = filters.gaussian_blur(draws.symmetric("field", (2, *x.shape[2:])), sigma, truncate=3.0) * scale
        x = filters.warp(x, rows + moves[:, 0], columns + moves[:, 1])
    return x


def _pixelate(x: Tensor, _: Draws, c: tuple[float, ...]) -> Tensor:
    """Box-resize to 1/c of the side and back (the constants here are pixel sizes, the inverse of the fractions)."""
    return filters.pixelate(x, 1.0 / c[0])


def _jpeg(x: Tensor, _: Draws, c: tuple[float, ...]) -> Tensor:
    """Encode and decode at quality c."""
    return filters.jpeg(x, round(c[0]))


CORRUPTIONS: Mapping[str, Corruption] = MappingProxyType(
    {
        "contrast": _contrast,
        "elastic": _elastic,
        "pixelate": _pixelate,
        "jpeg": _jpeg,
    }
)
