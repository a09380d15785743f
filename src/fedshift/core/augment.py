"""Random views of images for contrastive learning, as batched torch operations: one function of pixels and numbers.

A view is made from its own image and its own uniform numbers, so that a batch plan (or a sample id) decides it, on any
device, in any batch, and under ``vmap``.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

NUMBERS = 10  # uniform numbers that one view needs
LUMA = (0.299, 0.587, 0.114)
# luma and two colour axes (YIQ): turning the plane of the two changes hues and leaves brightness alone
YIQ = ((0.299, 0.587, 0.114), (0.596, -0.274, -0.322), (0.211, -0.523, 0.312))


def contrastive_views(
    x: Tensor, numbers: Tensor, flip: bool = True, smallest: float = 0.2, jitter: float = 0.4, gray: float = 0.2
) -> Tensor:
    """MoCo-style views: a random part of the image at full size, other colours, sometimes gray, perhaps mirrored.

    ``x`` is ``[n, channels, H, W]`` in [0, 1], ``numbers`` is ``[n, NUMBERS]`` uniform. The part has between ``smallest``
    and all of the area and sides in a ratio of 3/4 to 4/3; brightness, contrast and saturation change by a factor in
    ``1 +- jitter``, the hue by up to ``jitter`` of a full turn; colours only where there are three channels.

    >>> x = torch.rand(2, 3, 8, 8)
    >>> contrastive_views(x, torch.rand(2, NUMBERS)).shape
    torch.Size([2, 3, 8, 8])
    """
    u = numbers.to(x.dtype).unbind(1)
    view = _part(x, u[0], u[1], u[2], u[3], u[4] < 0.5 if flip else torch.zeros_like(u[4], dtype=torch.bool), smallest)
    factors = [(1 + jitter * (2 * number - 1))[:, None, None, None] for number in u[5:8]]
    view = (view * factors[0]).clamp(0, 1)
    middle = _gray(view).mean((1, 2, 3), keepdim=True)
    view = (middle + factors[1] * (view - middle)).clamp(0, 1)
    if x.shape[1] != 3:
        return view
    plain = _gray(view)
    view = (plain + factors[2] * (view - plain)).clamp(0, 1)
    view = _hue(view, 2 * math.pi * jitter * (2 * u[8] - 1))
    return torch.where((u[9] < gray)[:, None, None, None], _gray(view).expand_as(view), view)


def _part(x: Tensor, area: Tensor, ratio: Tensor, top: Tensor, left: Tensor, mirror: Tensor, smallest: float) -> Tensor:
    """A rectangle of each image, scaled to the whole by bilinear sampling."""
    share = smallest + (1 - smallest) * area
    shape = ((2 * ratio - 1) * math.log(4 / 3)).exp()
    height, width = (share / shape).sqrt().clamp(max=1), (share * shape).sqrt().clamp(max=1)
    nothing = torch.zeros_like(share)
    across = torch.stack([torch.where(mirror, -width, width), nothing, (2 * left - 1) * (1 - width)], 1)
    down = torch.stack([nothing, height, (2 * top - 1) * (1 - height)], 1)
    grid = F.affine_grid(torch.stack([across, down], 1), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)


def _gray(x: Tensor) -> Tensor:
    if x.shape[1] != 3:
        return x.mean(1, keepdim=True)
    return (x * x.new_tensor(LUMA)[:, None, None]).sum(1, keepdim=True)


def _hue(x: Tensor, angle: Tensor) -> Tensor:
    """Colours turned by an angle."""
    to = x.new_tensor(YIQ)
    cos, sin, one, zero = angle.cos(), angle.sin(), torch.ones_like(angle), torch.zeros_like(angle)
    rows = [torch.stack(row, 1) for row in ((one, zero, zero), (zero, cos, -sin), (zero, sin, cos))]
    turn = torch.linalg.inv(to) @ torch.stack(rows, 1) @ to
    return torch.einsum("nij,njhw->nihw", turn, x).clamp(0, 1)
