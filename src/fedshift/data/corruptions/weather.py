"""Weather: snow, frost, fog, brightness."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from fedshift.data.corruptions import filters
from fedshift.data.corruptions.draws import Corruption, Draws


def _grey(x: Tensor) -> Tensor:
    """Luminance ``[B, 1, H, W]``."""
    return x[:, :1] * 0.299 + x[:, 1:2] * 0.587 + x[:, 2:3] * 0.114 if x.shape[1] == 3 else x


def _snow(x: Tensor, draws: Draws, c: tuple[float, ...]) -> Tensor:
    """Whiten the image and add falling flakes: thresholded noise, blurred along one direction, and its half turn."""
    mean, spread, factor, threshold, radius, sigma, keep = c
    layer = draws.normal("flakes", (1, *x.shape[2:])) * spread + mean
    layer = filters.zoom(layer, factor)
    layer = layer.masked_fill(layer < threshold, 0.0).clamp(0, 1).mul(255.0).round()
    layer = filters.line_blur(layer, draws.integers("angle", filters.ANGLES), radius, sigma, -135.0, -45.0)
    white = x * keep + torch.maximum(x, _grey(x) * 1.5 + 127.5) * (1.0 - keep)
    return white + layer + layer.flip((2, 3))


def _clouds(x: Tensor, draws: Draws, purpose: str, decay: float) -> Tensor:
    """A plasma fractal per image, ``[B, H, W]`` in 0..1."""
    side = 1 << (max(x.shape[2:]) - 1).bit_length()
    return filters.plasma(draws.symmetric(purpose, (side, side)), decay)[:, : x.shape[2], : x.shape[3]]


def _frost_texture(x: Tensor, draws: Draws) -> Tensor:
    """Ice on a window, ``[B, 1, H, W]`` in 0..1: feathered six-armed crystals over veins and a granular haze.

    Each crystal is a distance field: coordinates about its centre are folded into one twelfth of the circle, where an
    arm lies along the first axis and side branches leave it at 60 degrees at even spacing, shorter towards the tip.
    """
    directions = 256
    rows, columns = filters.pixel_grid(x)
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


def _frost(x: Tensor, draws: Draws, c: tuple[float, ...]) -> Tensor:
    """c0·x + c1·frost, where the frost is a procedural texture that stands in for the reference's photographs."""
    tint = torch.tensor([0.86, 0.95, 1.0] if x.shape[1] == 3 else [0.94], device=x.device)
    return x * c[0] + _frost_texture(x, draws) * tint[:, None, None] * (255.0 * c[1])


def _fog(x: Tensor, draws: Draws, c: tuple[float, ...]) -> Tensor:
    """Add c0 times a plasma fractal (roughness decay c1), then scale back by max/(max + c0)."""
    top = x.amax((1, 2, 3), keepdim=True)
    return (x + _clouds(x, draws, "fog", c[1])[:, None] * (255.0 * c[0])) * (top / (top + 255.0 * c[0]))


def _brightness(x: Tensor, _: Draws, c: tuple[float, ...]) -> Tensor:
    """Raise the value of HSV by c; hue and saturation stay, which scales the channels alike."""
    value = x.amax(1, keepdim=True)
    raised = (value + 255.0 * c[0]).clamp(max=255.0)
    return torch.where(value > 0, x * (raised / value.clamp(min=1.0)), raised)


CORRUPTIONS: Mapping[str, Corruption] = MappingProxyType(
    {
        "snow": _snow,
        "frost": _frost,
        "fog": _fog,
        "brightness": _brightness,
    }
)
