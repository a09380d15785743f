"""Kernels of our own take tensors in any order of memory: as ``movedim``, ``expand`` and slices leave them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedshift.engines.cuda import maps
from fedshift.engines.cuda.geometry import Geometry
from tests.engines.test_kernels import HERE, check_convolution, lent, needs_kernels


def turned(tensor: Tensor) -> Tensor:
    """Its last two dimensions the other way round, and its first: as ``movedim`` leaves what vmap had elsewhere."""
    return lent(tensor.movedim(0, 2).transpose(-1, -2)).transpose(-1, -2).movedim(2, 0)


def spread(tensor: Tensor) -> Tensor:
    """One number for each map, as the gradient of a mean is."""
    return lent(tensor[..., :1, :1]).expand(tensor.shape)


def strided(tensor: Tensor) -> Tensor:
    """Every second number of something larger, whose others are none."""
    wide = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), torch.nan)
    wide[..., ::2] = tensor
    return lent(wide)[..., ::2]


LAYS: dict[str, Callable[[Tensor], Tensor]] = {"turned": turned, "spread": spread, "strided": strided}


@needs_kernels
@pytest.mark.parametrize("lay", LAYS)
@pytest.mark.parametrize(
    ("clients", "count", "channels", "stride"),
    [(1, 1, 16, (2, 2)), (2, 1, 5, (2, 2)), (3, 2, 48, (1, 1)), (2, 3, 1, (2, 1))],
)
def test_convolutions_take_tensors_in_any_order_of_memory(
    clients: int, count: int, channels: int, stride: tuple[int, int], lay: str
) -> None:
    check_convolution(clients, count, Geometry((7, 5), (3, 3), stride, (1, 1)), channels, 17, LAYS[lay])


@needs_kernels
@pytest.mark.parametrize("lay", LAYS)
def test_passes_over_tensors_in_any_order_of_memory(lay: str) -> None:
    from fedshift.engines.cuda import map_kernels

    laid, window = LAYS[lay], Geometry((9, 11), (3, 3), (2, 2), (1, 1))
    x = laid(torch.randn(3, 2, 9, 11))
    y, flat = F.max_pool2d(x.cpu(), window.size, window.stride, window.padding, return_indices=True)
    which = lent(maps._named(flat, window))
    assert torch.equal(map_kernels.highest(x, window)[0].cpu(), y)
    assert torch.equal(map_kernels.gathered(x, which, window).cpu(), y)
    g = laid(torch.randn(y.shape))
    pixels = torch.zeros(3, 2, 99).scatter_add(2, flat.flatten(2), g.cpu().flatten(2)).view(3, 2, 9, 11)
    torch.testing.assert_close(map_kernels.scattered(g, which, window).cpu(), pixels)

    leaf, gradient, velocity = (laid(torch.randn(3, 4, 5, 7)) for _ in range(3))
    rate = torch.tensor([0.1, 0.2, 0.0])
    moved, kept = map_kernels.descended(leaf, gradient, velocity, lent(rate), 0.9, 5e-4)
    step = gradient + 5e-4 * leaf + 0.9 * velocity
    assert kept is not None
    torch.testing.assert_close(kept, step)
    torch.testing.assert_close(moved, leaf - rate.to(HERE).view(3, 1, 1, 1) * step)
