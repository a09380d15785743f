"""Blur: out of focus, through glass, by motion, by zooming; and the two slips that were published."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor

from fedshift.data.corruptions import filters
from fedshift.data.corruptions.draws import Corruption, Draws


def _defocus_blur(x: Tensor, _: Draws, c: tuple[float, ...]) -> Tensor:
    """Convolve with a disk of radius c0 whose edge is softened by a Gaussian of c1."""
    return filters.disk_blur(x, *c)


def _glass_blur(x: Tensor, draws: Draws, c: tuple[float, ...]) -> Tensor:
    """Blur (c0), swap every pixel with a neighbour at most c1 away, c2 times over, blur again."""
    reach, passes = round(c[1]), round(c[2])
    height, width = x.shape[2:]
    jumps = draws.integers("swaps", (2 * reach + 1) ** 2, (passes, height, width))
    return _through_glass(x, filters.swap_pixels(height, width, reach, jumps), c[0])


def _published_glass_blur(x: Tensor, draws: Draws, c: tuple[float, ...]) -> Tensor:
    """The same with pixels copied instead of swapped, from neighbours at -c1 to c1 - 1."""
    reach, passes = round(c[1]), round(c[2])
    height, width = x.shape[2:]
    jumps = draws.integers("copies", (2 * reach) ** 2, (passes, height, width))
    return _through_glass(x, filters.swap_pixels(height, width, reach, jumps, copies=True), c[0])


def _through_glass(x: Tensor, source: Tensor, sigma: float) -> Tensor:
    blurred = filters.gaussian_blur(x, sigma).flatten(2)
    return filters.gaussian_blur(blurred.gather(2, source[:, None].expand_as(blurred)).reshape(x.shape), sigma)


def _motion_blur(x: Tensor, draws: Draws, c: tuple[float, ...]) -> Tensor:
    """Blur along a line (radius c0, sigma c1), one-sided, at an angle in -45..45 degrees."""
    return filters.line_blur(x, draws.integers("angle", filters.ANGLES), c[0], c[1], -45.0, 45.0)


def _zoom_blur(x: Tensor, _: Draws, c: tuple[float, ...]) -> Tensor:
    """Mean of the image and its zooms by 1, 1 + c1, ... below c0."""
    return _zoomed(x, c[1], math.ceil((c[0] - 1.0 - 1e-6) / c[1]))


def _published_zoom_blur(x: Tensor, _: Draws, c: tuple[float, ...]) -> Tensor:
    """The same with as many zooms as NumPy's ``arange(1, c0, c1)`` has numbers."""
    return _zoomed(x, c[1], math.ceil((c[0] - 1.0) / c[1]))


def _zoomed(x: Tensor, step: float, zooms: int) -> Tensor:
    total = x
    for number in range(zooms):
        total = total + filters.zoom(x, 1.0 + number * step)
    return total / (zooms + 1)


CORRUPTIONS: Mapping[str, Corruption] = MappingProxyType(
    {
        "defocus-blur": _defocus_blur,
        "glass-blur": _glass_blur,
        "motion-blur": _motion_blur,
        "zoom-blur": _zoom_blur,
    }
)
PUBLISHED: Mapping[str, Corruption] = MappingProxyType(
    {"glass-blur": _published_glass_blur, "zoom-blur": _published_zoom_blur}
)
