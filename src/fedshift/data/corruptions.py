"""The fifteen common corruptions of Hendrycks and Dietterich, batched, on the CPU or a GPU, from uint8 to uint8.

Severity 1 to 5 picks the constants. Images whose shorter side is at most 64 pixels get the constants of CIFAR-C, from
224 pixels up those of ImageNet-C; in between every constant (blur radii, pixel sizes, noise levels, ...) is
interpolated linearly with the side, so that 144-pixel images get the midpoint.

Every draw is a function of (seed, sample id, corruption): a corrupted image never depends on the batch it came in, on
its place there or on how large batches are cut up, and the five severities of one image share their draws. Between a
CPU and a GPU a few values in a hundred thousand differ, by one level as a rule.

Where this departs from the reference implementation:

* values are rounded to the nearest integer at the end (the reference truncates, which darkens by half a level);
* frost is painted by a procedure instead of cropped from six photographs (see ``_frost``);
* zooms (zoom blur, snow) are about the exact centre; the reference crops whole pixels first;
* the angle of motion blur and snow is one of 1024 equally spaced ones.

The reference has two slips, which are in the published CIFAR-C and ImageNet-C files. ``published = True`` repeats them:

* zoom blur takes 7 and 12 zooms instead of 6 and 11 at severities 1 and 2 of small images (and 12 at severity 1 of large
  ones), because a rounding error lets its range go one step too far;
* glass blur does not swap two pixels of a colour image but copies one over the other (both names are views of one
  array), and it never draws the neighbours at +d, so that it takes from one side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from fedshift.core import rng
from fedshift.data import _filters
from fedshift.errors import UserError

_SMALL_SIDE, _LARGE_SIDE = 64, 224
_CHUNK_VALUES = MappingProxyType({"cpu": 2**20, "cuda": 2**25})  # pixels x channels worked on at once


@dataclass(frozen=True)
class _Draws:
    """The random numbers of one corruption for the images at hand, each stream under its own name."""

    seed: int
    name: str
    ids: Tensor

    def _seed(self, purpose: str) -> int:
        return rng.seed_of(self.seed, "corruption", self.name, purpose)

    def bits24(self, purpose: str, shape: Sequence[int]) -> Tensor:
        return rng.integers(self._seed(purpose), self.ids, 2**24, shape)

    def uniform(self, purpose: str, shape: Sequence[int] = ()) -> Tensor:
        return rng.uniform(self._seed(purpose), self.ids, shape)

    def symmetric(self, purpose: str, shape: Sequence[int] = ()) -> Tensor:
        return self.uniform(purpose, shape) * 2.0 - 1.0

    def normal(self, purpose: str, shape: Sequence[int]) -> Tensor:
        return rng.normal(self._seed(purpose), self.ids, shape)

    def integers(self, purpose: str, high: int, shape: Sequence[int] = ()) -> Tensor:
        return rng.integers(self._seed(purpose), self.ids, high, shape)


# A corruption takes float images on the 0..255 scale, its draws and its constants; the caller rounds and clips.
_Function = Callable[[Tensor, _Draws, tuple[float, ...]], Tensor]


def _gaussian_noise(x: Tensor, draws: _Draws, c: tuple[float, ...]) -> Tensor:
    """Add N(0, c) to every value."""
    return x + draws.normal("noise", x.shape[1:]) * (255.0 * c[0])


def _shot_noise(x: Tensor, draws: _Draws, c: tuple[float, ...]) -> Tensor:
    """Poisson(x·c)/c, by inverting the distribution function: there are only 256 rates, so it is one sorted table.

    Thresholds and draws are 24-bit integers; row v of the table is offset by v·2**24, which keeps the whole sorted and
    finds value and rate in one search.
    """
    photons = c[0]
    counts = int(photons + 9.0 * photons**0.5 + 20.0)  # beyond this every distribution function is one to 24 bits
    rates = torch.arange(256, dtype=torch.float64)[:, None] * (photons / 255.0)
    k = torch.arange(counts, dtype=torch.float64)
    cdf = torch.exp(torch.xlogy(k, rates) - rates - torch.lgamma(k + 1)).cumsum(1)
    thresholds = (cdf * 2**24).round().clamp(max=2**24).long() + (torch.arange(256) << 24)[:, None]
    levels = x.long()
    found = torch.searchsorted(
        thresholds.flatten().to(x.device), draws.bits24("photons", x.shape[1:]) + (levels << 24), right=True
    )
    return (found - levels * counts).float() * (255.0 / photons)


def _impulse_noise(x: Tensor, draws: _Draws, c: tuple[float, ...]) -> Tensor:
    """Set a fraction c of the values to black or white, half each."""
    chance = draws.uniform("impulse", x.shape[1:])
    return x.masked_fill(chance < c[0], 255.0).masked_fill(chance < c[0] / 2, 0.0)


def _defocus_blur(x: Tensor, _: _Draws, c: tuple[float, ...]) -> Tensor:
    """Convolve with a disk of radius c0 whose edge is softened by a Gaussian of c1."""
    return _filters.disk_blur(x, *c)


def _glass_blur(x: Tensor, draws: _Draws, c: tuple[float, ...]) -> Tensor:
    """Blur (c0), swap every pixel with a neighbour at most c1 away, c2 times over, blur again."""
    reach, passes = round(c[1]), round(c[2])
    height, width = x.shape[2:]
    jumps = draws.integers("swaps", (2 * reach + 1) ** 2, (passes, height, width))
    return _through_glass(x, _filters.swap_pixels(height, width, reach, jumps), c[0])


def _published_glass_blur(x: Tensor, draws: _Draws, c: tuple[float, ...]) -> Tensor:
    """The same with pixels copied instead of swapped, from neighbours at -c1 to c1 - 1."""
    reach, passes = round(c[1]), round(c[2])
    height, width = x.shape[2:]
    jumps = draws.integers("copies", (2 * reach) ** 2, (passes, height, width))
    return _through_glass(x, _filters.swap_pixels(height, width, reach, jumps, copies=True), c[0])


def _through_glass(x: Tensor, source: Tensor, sigma: float) -> Tensor:
    blurred = _filters.gaussian_blur(x, sigma).flatten(2)
    return _filters.gaussian_blur(blurred.gather(2, source[:, None].expand_as(blurred)).reshape(x.shape), sigma)


def _motion_blur(x: Tensor, draws: _Draws, c: tuple[float, ...]) -> Tensor:
    """Blur along a line (radius c0, sigma c1), one-sided, at an angle in -45..45 degrees."""
    return _filters.line_blur(x, draws.integers("angle", _filters.ANGLES), c[0], c[1], -45.0, 45.0)


def _zoom_blur(x: Tensor, _: _Draws, c: tuple[float, ...]) -> Tensor:
    """Mean of the image and its zooms by 1, 1 + c1, ... below c0."""
    return _zoomed(x, c[1], math.ceil((c[0] - 1.0 - 1e-6) / c[1]))


def _published_zoom_blur(x: Tensor, _: _Draws, c: tuple[float, ...]) -> Tensor:
    """The same with as many zooms as NumPy's ``arange(1, c0, c1)`` has numbers."""
    return _zoomed(x, c[1], math.ceil((c[0] - 1.0) / c[1]))


def _zoomed(x: Tensor, step: float, zooms: int) -> Tensor:
    total = x
    for number in range(zooms):
        total = total + _filters.zoom(x, 1.0 + number * step)
    return total / (zooms + 1)


def _grey(x: Tensor) -> Tensor:
    """Luminance ``[B, 1, H, W]``."""
    return x[:, :1] * 0.299 + x[:, 1:2] * 0.587 + x[:, 2:3] * 0.114 if x.shape[1] == 3 else x


def _snow(x: Tensor, draws: _Draws, c: tuple[float, ...]) -> Tensor:
    """Whiten the image and add falling flakes: thresholded noise, blurred along one direction, and its half turn."""
    mean, spread, factor, threshold, radius, sigma, keep = c
    layer = draws.normal("flakes", (1, *x.shape[2:])) * spread + mean
    layer = _filters.zoom(layer, factor)
    layer = layer.masked_fill(layer < threshold, 0.0).clamp(0, 1).mul(255.0).round()
    layer = _filters.line_blur(layer, draws.integers("angle", _filters.ANGLES), radius, sigma, -135.0, -45.0)
    white = x * keep + torch.maximum(x, _grey(x) * 1.5 + 127.5) * (1.0 - keep)
    return white + layer + layer.flip((2, 3))


def _clouds(x: Tensor, draws: _Draws, purpose: str, decay: float) -> Tensor:
    """A plasma fractal per image, ``[B, H, W]`` in 0..1."""
    side = 1 << (max(x.shape[2:]) - 1).bit_length()
    return _filters.plasma(draws.symmetric(purpose, (side, side)), decay)[:, : x.shape[2], : x.shape[3]]


def _frost_texture(x: Tensor, draws: _Draws) -> Tensor:
    """Ice on a window, ``[B, 1, H, W]`` in 0..1: feathered six-armed crystals over veins and a granular haze.

    Each crystal is a distance field: coordinates about its centre are folded into one twelfth of the circle, where an
    arm lies along the first axis and side branches leave it at 60 degrees at even spacing, shorter towards the tip.
    """
    directions = 256
    rows, columns = _filters.pixel_grid(x)
    side = max(96.0, min(x.shape[2:]))  # smaller images show part of a pane, as crops of a photograph do
    crystals = max(3, round(12 * (min(x.shape[2:]) / side) ** 2))
    place = draws.uniform("place", (crystals, 4))
    turn = draws.integers("turn", directions, (crystals,))
    angles = torch.arange(directions, dtype=torch.float64) * (torch.pi / 3 / directions)
    cosines, sines = (t.float().to(x.device)[turn] for t in (angles.cos(), angles.sin()))
    ice = torch.zeros(len(x), *x.shape[2:], device=x.device)
    for i in range(crystals):
        top, left, size, gap = (place[:, i, j, None, None] for j in range(4))
        dy, dx = (rows - top * x.shape[2]) / side, (columns - left * x.shape[3]) / side
        cos, sin = cosines[:, i, None, None], sines[:, i, None, None]
        u, v = (dx * cos + dy * sin).abs(), (dy * cos - dx * sin).abs()
        beyond = v * 3**0.5 > u
        u, v = (
            torch.where(beyond, u * 0.5 + v * (0.75**0.5), u),
            torch.where(beyond, u * (0.75**0.5) - v * 0.5, v).abs(),
        )
        size, gap = 0.2 + 0.45 * size, 0.05 + 0.06 * gap
        root = u - v * (1 / 3**0.5)  # where the side branch through this point leaves the arm
        phase = root / gap
        apart = (phase - phase.round()).abs() * gap
        left_over = (size - root) * 0.55 - v
        feather = (1.0 - apart / 0.022).clamp(0, 1) * (left_over * 6.0).clamp(0, 1)
        arm = (1.0 - v / 0.02).clamp(0, 1) * ((size - u) * 6.0).clamp(0, 1)
        ice = torch.maximum(ice, torch.maximum(arm, feather))
    haze = _clouds(x, draws, "haze", 1.5)
    veins = 1.0 - (_clouds(x, draws, "veins", 1.4) * 6.0 - 3.0).abs().clamp(0, 1)
    return (0.08 + 0.34 * haze + 0.13 * veins * veins + 0.6 * ice * (0.3 + haze)).clamp(0, 1)[:, None]


def _frost(x: Tensor, draws: _Draws, c: tuple[float, ...]) -> Tensor:
    """c0·x + c1·frost, where the frost is a procedural texture that stands in for the reference's photographs."""
    tint = torch.tensor([0.86, 0.95, 1.0] if x.shape[1] == 3 else [0.94], device=x.device)
    return x * c[0] + _frost_texture(x, draws) * tint[:, None, None] * (255.0 * c[1])


def _fog(x: Tensor, draws: _Draws, c: tuple[float, ...]) -> Tensor:
    """Add c0 times a plasma fractal (roughness decay c1), then scale back by max/(max + c0)."""
    top = x.amax((1, 2, 3), keepdim=True)
    return (x + _clouds(x, draws, "fog", c[1])[:, None] * (255.0 * c[0])) * (top / (top + 255.0 * c[0]))


def _brightness(x: Tensor, _: _Draws, c: tuple[float, ...]) -> Tensor:
    """Raise the value of HSV by c; hue and saturation stay, which scales the channels alike."""
    value = x.amax(1, keepdim=True)
    raised = (value + 255.0 * c[0]).clamp(max=255.0)
    return torch.where(value > 0, x * (raised / value.clamp(min=1.0)), raised)


def _contrast(x: Tensor, _: _Draws, c: tuple[float, ...]) -> Tensor:
    """Shrink the deviations from each channel's mean to the fraction c."""
    mean = x.long().sum((2, 3), keepdim=True).float() / (x.shape[2] * x.shape[3])  # whole numbers: an exact sum
    return (x - mean) * c[0] + mean


def _elastic(x: Tensor, draws: _Draws, c: tuple[float, ...]) -> Tensor:
    """Move three points by up to ± c2 and the image with them, then every pixel by smoothed noise (scale c0, sigma c1).

    All three constants are fractions of the shorter side.
    """
    side = float(min(x.shape[2:]))
    scale, sigma, shift = (side * value for value in c)
    rows, columns = _filters.pixel_grid(x)
    if shift > 0:
        middle, centre, arm = x.shape[2] // 2, x.shape[3] // 2, int(side) // 3
        moves = draws.symmetric("points", (3, 2)) * shift  # of (+arm, +arm), (+arm, -arm), (-arm, -arm) as (x, y)
        px, py = centre + arm + moves[:, 1, 0], middle - arm + moves[:, 1, 1]  # the corner the two edges start from
        ax, ay = moves[:, 0, 0] - moves[:, 1, 0], moves[:, 0, 1] - moves[:, 1, 1] + 2 * arm
        bx, by = moves[:, 2, 0] - moves[:, 1, 0] - 2 * arm, moves[:, 2, 1] - moves[:, 1, 1]
        px, py, ax, ay, bx, by = (t[:, None, None] for t in (px, py, ax, ay, bx, by))
        dx, dy, area = columns - px, rows - py, ax * by - ay * bx
        along_a, along_b = (dx * by - dy * bx) / area, (dy * ax - dx * ay) / area
        x = _filters.warp(x, along_a * (2 * arm) + (middle - arm), along_b * (-2 * arm) + (centre + arm))
    if scale > 0:
        moves = _filters.gaussian_blur(draws.symmetric("field", (2, *x.shape[2:])), sigma, truncate=3.0) * scale
        x = _filters.warp(x, rows + moves[:, 0], columns + moves[:, 1])
    return x


def _pixelate(x: Tensor, _: _Draws, c: tuple[float, ...]) -> Tensor:
    """Box-resize to 1/c of the side and back (the constants here are pixel sizes, the inverse of the fractions)."""
    return _filters.pixelate(x, 1.0 / c[0])


def _jpeg(x: Tensor, _: _Draws, c: tuple[float, ...]) -> Tensor:
    """Encode and decode at quality c."""
    return _filters.jpeg(x, round(c[0]))


@dataclass(frozen=True)
class _Corruption:
    """A function and its constants per severity, for small and for large images."""

    apply: _Function
    small: tuple[tuple[float, ...], ...]
    large: tuple[tuple[float, ...], ...]

    def constants(self, severity: int, side: int) -> tuple[float, ...]:
        """Those of a severity at an image side."""
        t = min(1.0, max(0.0, (side - _SMALL_SIDE) / (_LARGE_SIDE - _SMALL_SIDE)))
        pairs = zip(self.small[severity - 1], self.large[severity - 1], strict=True)
        return tuple(a * (1.0 - t) + b * t for a, b in pairs)


def _each(*values: float) -> tuple[tuple[float, ...], ...]:
    """Five severities of one constant."""
    return tuple((value,) for value in values)


_REGISTRY: Mapping[str, _Corruption] = MappingProxyType(
    {
        "gaussian-noise": _Corruption(
            _gaussian_noise, _each(0.04, 0.06, 0.08, 0.09, 0.10), _each(0.08, 0.12, 0.18, 0.26, 0.38)
        ),
        "shot-noise": _Corruption(_shot_noise, _each(500, 250, 100, 75, 50), _each(60, 25, 12, 5, 3)),
        "impulse-noise": _Corruption(
            _impulse_noise, _each(0.01, 0.02, 0.03, 0.05, 0.07), _each(0.03, 0.06, 0.09, 0.17, 0.27)
        ),
        "defocus-blur": _Corruption(
            _defocus_blur,
            ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
            ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
        ),
        "glass-blur": _Corruption(
            _glass_blur,
            ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
            ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
        ),
        "motion-blur": _Corruption(
            _motion_blur,
            ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
            ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
        ),
        "zoom-blur": _Corruption(
            _zoom_blur,
            ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
            ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
        ),
        "snow": _Corruption(
            _snow,
            (
                (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
                (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
                (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
                (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
                (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
            ),
            (
                (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
                (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
                (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
                (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
                (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
            ),
        ),
        "frost": _Corruption(
            _frost,
            ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
            ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
        ),
        "fog": _Corruption(
            _fog,
            ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
            ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
        ),
        "brightness": _Corruption(_brightness, _each(0.05, 0.1, 0.15, 0.2, 0.3), _each(0.1, 0.2, 0.3, 0.4, 0.5)),
        "contrast": _Corruption(_contrast, _each(0.75, 0.5, 0.4, 0.3, 0.15), _each(0.4, 0.3, 0.2, 0.1, 0.05)),
        "elastic": _Corruption(
            _elastic,
            ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
            tuple((0.005 * scale, 0.01, 0.0) for scale in (12.5, 16.25, 21.25, 25, 30)),
        ),
        "pixelate": _Corruption(
            _pixelate,
            _each(*(1 / c for c in (0.95, 0.9, 0.85, 0.75, 0.65))),
            _each(*(1 / c for c in (0.6, 0.5, 0.4, 0.3, 0.25))),
        ),
        "jpeg": _Corruption(_jpeg, _each(80, 65, 58, 50, 40), _each(25, 18, 15, 10, 7)),
    }
)

NAMES: tuple[str, ...] = tuple(_REGISTRY)
_PUBLISHED: Mapping[str, _Function] = MappingProxyType(
    {"glass-blur": _published_glass_blur, "zoom-blur": _published_zoom_blur}
)


def _check(images: Tensor, severity: int, ids: Tensor, names: Sequence[str]) -> None:
    """Refuse what cannot be corrupted."""
    wrong = ", ".join(repr(name) for name in names if name not in _REGISTRY)
    if wrong:
        raise UserError(f"unknown corruption {wrong}: choose from {', '.join(NAMES)}")
    if severity not in (1, 2, 3, 4, 5):
        raise UserError(f"severity must be 1, 2, 3, 4 or 5, not {severity}")
    if images.dtype == torch.uint8 and images.ndim == 4 and min(images.shape[2:]) < 8:
        raise UserError(f"images to corrupt must have 8 x 8 pixels or more, not {images.shape[2]} x {images.shape[3]}")
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3) or min(images.shape[2:]) < 8:
        raise UserError(
            "images to corrupt must be uint8 [B, 1 or 3, height, width] of at least 8 x 8 pixels, "
            f"not {images.dtype} {list(images.shape)}"
        )
    if ids.shape != (len(images),):
        raise UserError(f"{len(images)} images need as many sample ids, not {list(ids.shape)}")


def corrupt(images: Tensor, name: str, severity: int, seed: int, ids: Tensor, published: bool = False) -> Tensor:
    """Apply the corruption ``name`` at a severity of 1 to 5 to uint8 images ``[B, C, H, W]`` with C 1 or 3.

    ``ids`` ``[B]`` are the images' sample ids. Each result is a function of (seed, id, name, severity, pixels) only,
    bitwise the same in any batch on one device. Between 64 and 224 pixels the constants are interpolated with the
    image side (see the module). ``published`` repeats the slips of the files that were published.

    >>> x = torch.arange(2 * 3 * 16 * 16).reshape(2, 3, 16, 16).to(torch.uint8)
    >>> both = corrupt(x, "fog", 3, seed=0, ids=torch.tensor([4, 9]))
    >>> torch.equal(both[1:], corrupt(x[1:], "fog", 3, seed=0, ids=torch.tensor([9])))
    True
    >>> corrupt(x, "hail", 3, seed=0, ids=torch.tensor([4, 9]))    # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    fedshift.errors.UserError: unknown corruption 'hail': choose from gaussian-noise, shot-noise, ..., jpeg
    """
    _check(images, severity, ids, (name,))
    corruption, ids = _REGISTRY[name], ids.to(images.device)
    apply = _PUBLISHED.get(name, corruption.apply) if published else corruption.apply
    constants = corruption.constants(severity, min(images.shape[2:]))
    chunk = max(1, _CHUNK_VALUES.get(images.device.type, 2**20) // images[:1].numel()) if len(images) else 1
    result = torch.empty_like(images, memory_format=torch.contiguous_format)
    for start in range(0, len(images), chunk):
        part = slice(start, start + chunk)
        values = apply(images[part].float().contiguous(), _Draws(seed, name, ids[part]), constants)
        result[part] = values.round().clamp(0, 255).to(torch.uint8)
    return result


def mixed_choice(seed: int, ids: Tensor, names: Sequence[str] = NAMES) -> Tensor:
    """The index into ``names`` that ``corrupt_mixed`` picks for each sample id, uniformly: int64 ``[B]``.

    >>> mixed_choice(0, torch.arange(3000)).bincount(minlength=15).min().item() > 150
    True
    """
    if not names:
        raise UserError(f"a mixture needs at least one corruption: choose from {', '.join(NAMES)}")
    return rng.integers(rng.seed_of(seed, "corruption", "choice"), ids, len(names))


def corrupt_mixed(
    images: Tensor, severity: int, seed: int, ids: Tensor, names: Sequence[str] = NAMES, published: bool = False
) -> Tensor:
    """Corrupt each image by one of ``names``, picked uniformly as a function of (seed, id).

    >>> x, ids = torch.full((4, 1, 8, 8), 99, dtype=torch.uint8), torch.arange(4)
    >>> first = NAMES[int(mixed_choice(7, ids)[0])]
    >>> torch.equal(corrupt_mixed(x, 5, 7, ids)[:1], corrupt(x[:1], first, 5, 7, ids[:1]))
    True
    """
    _check(images, severity, ids, names)
    ids = ids.to(images.device)
    choice = mixed_choice(seed, ids, names)
    result = torch.empty_like(images, memory_format=torch.contiguous_format)
    for i, name in enumerate(names):
        chosen = (choice == i).nonzero()[:, 0]
        if len(chosen):
            result[chosen] = corrupt(images[chosen], name, severity, seed, ids[chosen], published)
    return result
