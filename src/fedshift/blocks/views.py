"""Random views of images for training, as batched torch operations: functions of pixels and numbers.

A view is made from its own image and its own uniform numbers, so that a batch plan (or a sample id) decides it, on any
device, in any batch, and under ``vmap``.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

NUMBERS = 11  # uniform numbers that one view needs
LUMA = (0.299, 0.587, 0.114)
# how much colours change in a view, after MoCo: how often, factors 1 +- JITTER, turns of the hue, how often gray
JITTERED, JITTER, HUE_RANGE, GRAY = 0.8, 0.4, 0.1, 0.2


def _hue_turn() -> tuple[tuple[tuple[float, float, float], ...], ...]:
    """How a turn of the plane of two colour axes (YIQ), which leaves brightness alone, mixes red, green and blue."""
    to = np.array([LUMA, (0.596, -0.274, -0.322), (0.211, -0.523, 0.312)])
    parts = [np.zeros((3, 3)) for _ in range(3)]
    parts[0][0, 0] = parts[1][1, 1] = parts[1][2, 2] = parts[2][2, 1] = 1
    parts[2][1, 2] = -1
    fixed, along, across = (np.linalg.inv(to) @ part @ to for part in parts)
    rows = [zip(*(part[i].tolist() for part in (fixed, along, across)), strict=True) for i in range(3)]
    return tuple(tuple(row) for row in rows)


HUE = _hue_turn()  # plain numbers: nothing is copied to a device while a CUDA graph is captured


def contrastive_views(
    x: Tensor,
    numbers: Tensor,
    flip: bool = True,
    smallest: float = 0.2,
    colour: float = 1.0,
) -> Tensor:
    """MoCo-style views: a random part of the image at full size, other colours, sometimes gray, perhaps mirrored.

    ``x`` is ``[n, channels, H, W]`` in [0, 1], ``numbers`` is ``[n, NUMBERS]`` uniform. The part has between
    ``smallest`` and all of the area and sides in a ratio of 3/4 to 4/3 where they fit. With probability 0.8
    brightness, contrast and saturation change by a factor in ``1 +- 0.4 colour`` and the hue by up to ``0.1 colour``
    of a full turn, in this order; with probability ``0.2 colour`` colours go. Saturation and hue only where there are
    three channels; ``colour = 0`` leaves all as it is.

    >>> x = torch.rand(2, 3, 8, 8)
    >>> contrastive_views(x, torch.rand(2, NUMBERS)).shape
    torch.Size([2, 3, 8, 8])
    """
    u = numbers.to(x.dtype).unbind(1)
    view = _part(x, u[0], u[1], u[2], u[3], u[4] < 0.5 if flip else torch.zeros_like(u[4], dtype=torch.bool), smallest)
    # a strength of zero leaves the colours as they are
    strength = colour * (u[10] < JITTERED).to(x.dtype)
    factors = [(1 + JITTER * strength * (2 * number - 1)).clamp(min=0)[:, None, None, None] for number in u[5:8]]
    view = (view * factors[0]).clamp(0, 1)
    middle = _gray(view).mean((1, 2, 3), keepdim=True)
    view = (middle + factors[1] * (view - middle)).clamp(0, 1)
    if x.shape[1] != 3:
        return view
    plain = _gray(view)
    view = (plain + factors[2] * (view - plain)).clamp(0, 1)
    view = _hue(view, 2 * math.pi * HUE_RANGE * strength * (2 * u[8] - 1))
    return torch.where((u[9] < GRAY * colour)[:, None, None, None], _gray(view).expand_as(view), view)


def _part(x: Tensor, area: Tensor, ratio: Tensor, top: Tensor, left: Tensor, mirror: Tensor, smallest: float) -> Tensor:
    """A rectangle of each image, scaled to the whole by bilinear sampling."""
    share = smallest + (1 - smallest) * area
    widest = (-share.log()).clamp(max=math.log(4 / 3))  # a large part has no room for long sides
    sides = ((2 * ratio - 1) * widest).exp()
    height, width = (share / sides).sqrt(), (share * sides).sqrt()
    # grid_sample's coordinates run from -1 to 1 over the image; pixels sit in the middle of their cells
    rows, columns = (
        (2 * torch.arange(side, dtype=x.dtype, device=x.device) + 1) / side - 1 for side in (x.shape[2], x.shape[3])
    )
    down = height[:, None] * rows + ((2 * top - 1) * (1 - height))[:, None]
    across = torch.where(mirror, -width, width)[:, None] * columns + ((2 * left - 1) * (1 - width))[:, None]
    shape = (len(x), x.shape[2], x.shape[3])
    grid = torch.stack([across[:, None].expand(shape), down[:, :, None].expand(shape)], 3)
    return F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)


def _gray(x: Tensor) -> Tensor:
    if x.shape[1] != 3:
        return x.mean(1, keepdim=True)
    red, green, blue = x.split(1, 1)
    gray: Tensor = LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue
    return gray


def _hue(x: Tensor, angle: Tensor) -> Tensor:
    """Colours turned by an angle: ``fixed + cos(angle) along + sin(angle) across`` is the turn in red, green and blue."""
    cos, sin = angle.cos()[:, None, None], angle.sin()[:, None, None]
    turned = []
    for row in HUE:
        parts = [(fixed + cos * along + sin * across) * x[:, j] for j, (fixed, along, across) in enumerate(row)]
        turned.append(parts[0] + parts[1] + parts[2])
    return torch.stack(turned, 1).clamp(0, 1)
