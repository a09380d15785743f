"""Maximum pooling and steps of gradient descent for stacked clients, each in one pass.

torch's pooling remembers eight bytes for every window, and goes back by looking for them in all windows that a pixel might
be in; ours remembers one. A step of SGD is three or four passes over the weights of all clients; ours is one.

Pooling and its derivatives are three functions closed under differentiation: the maximum, numbers of windows back to
their pixels, and the pixels that windows chose. On a GPU kernels of our own compute them (``map_kernels.py``), elsewhere
torch, which is what the former are tested against.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedshift.engines.cuda import trilinear
from fedshift.engines.cuda.geometry import Geometry

MOST_IN_A_WINDOW = 256  # numbers that a byte can name


def max_pool(x: Tensor, window: Geometry) -> Tensor:
    """``F.max_pool2d`` of images (N, C, H, W).

    >>> x = torch.tensor([[[[1.0, 5.0], [2.0, 3.0]]]])
    >>> max_pool(x, Geometry((2, 2), (2, 2), (2, 2), (0, 0)))
    tensor([[[[5.]]]])
    """
    y: Tensor = _Highest.apply(x, window)[0]  # type: ignore[no-untyped-call]
    return y


class _Highest(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, window: Geometry) -> tuple[Tensor, Tensor]:
        if _has_kernels(x):
            from fedshift.engines.cuda import map_kernels

            with torch.cuda.device_of(x):
                return map_kernels.highest(x, window)
        y, flat = F.max_pool2d(x, window.size, window.stride, window.padding, return_indices=True)
        return y, _named(flat, window)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Geometry], output: tuple[Tensor, Tensor]) -> None:
        ctx.window = inputs[1]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])
        ctx.save_for_forward(output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor, None]:
        return _scattered(gradient, ctx.saved_tensors[0], ctx.window), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> tuple[Tensor, None]:
        return _gathered(tangent, ctx.saved_tensors[0], ctx.window), None

    @staticmethod
    def vmap(
        info: Any,  # noqa: ARG004
        in_dims: tuple[int, None],
        x: Tensor,
        window: Geometry,
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        stacked = x.movedim(in_dims[0], 0)
        y, which = _Highest.apply(stacked.flatten(0, 1), window)  # type: ignore[no-untyped-call]
        return (y.unflatten(0, stacked.shape[:2]), which.unflatten(0, stacked.shape[:2])), (0, 0)


class _Moved(torch.autograd.Function):
    """Numbers of windows to pixels (``back``), or of pixels to windows: linear, and each the other's transpose."""

    @staticmethod
    def forward(numbers: Tensor, which: Tensor, window: Geometry, back: bool) -> Tensor:
        if _has_kernels(numbers):
            from fedshift.engines.cuda import map_kernels

            with torch.cuda.device_of(numbers):
                return (map_kernels.scattered if back else map_kernels.gathered)(numbers, which, window)
        flat = _flat(which, window).flatten(2)
        if not back:
            return numbers.flatten(2).gather(2, flat).view(which.shape)
        pixels = numbers.new_zeros(*numbers.shape[:2], window.image[0] * window.image[1])
        return pixels.scatter_add(2, flat, numbers.flatten(2)).view(*numbers.shape[:2], *window.image)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Geometry, bool], output: Tensor) -> None:  # noqa: ARG004
        _, which, ctx.window, ctx.back = inputs
        ctx.save_for_backward(which)
        ctx.save_for_forward(which)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _moved(gradient, ctx.saved_tensors[0], ctx.window, not ctx.back), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return _moved(tangent, ctx.saved_tensors[0], ctx.window, ctx.back)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], numbers: Tensor, which: Tensor, window: Geometry, back: bool
    ) -> tuple[Tensor, int]:
        def stacked(tensor: Tensor, at: int | None) -> Tensor:
            whole = tensor.expand(info.batch_size, *tensor.shape) if at is None else tensor.movedim(at, 0)
            return whole.flatten(0, 1)

        moved = _moved(stacked(numbers, in_dims[0]), stacked(which, in_dims[1]), window, back)
        return moved.unflatten(0, (info.batch_size, -1)), 0


def _moved(numbers: Tensor, which: Tensor, window: Geometry, back: bool) -> Tensor:
    moved: Tensor = _Moved.apply(numbers, which, window, back)  # type: ignore[no-untyped-call]
    return moved


def _scattered(numbers: Tensor, which: Tensor, window: Geometry) -> Tensor:
    return _moved(numbers, which, window, back=True)


def _gathered(numbers: Tensor, which: Tensor, window: Geometry) -> Tensor:
    return _moved(numbers, which, window, back=False)


def _corners(like: Tensor, window: Geometry) -> tuple[Tensor, Tensor]:
    """Row and column of the first number of every window, which may lie in the padding."""
    down, across = (torch.arange(count, device=like.device) for count in window.positions)
    return (down * window.stride[0] - window.padding[0])[:, None], across * window.stride[1] - window.padding[1]


def _named(flat: Tensor, window: Geometry) -> Tensor:
    """Positions in the image as positions in the window."""
    (top, left), wide = _corners(flat, window), window.image[1]
    return ((flat // wide - top) * window.size[1] + flat % wide - left).to(torch.uint8)


def _flat(which: Tensor, window: Geometry) -> Tensor:
    top, left = _corners(which, window)
    named = which.long()
    return (named // window.size[1] + top) * window.image[1] + named % window.size[1] + left


def descended(
    leaf: Tensor, grad: Tensor, velocity: Tensor | None, rate: Tensor, momentum: float, decay: float
) -> tuple[Tensor, Tensor | None]:
    """A step of stacked clients' SGD; what it takes is not differentiated."""
    if velocity is None:
        moved: Tensor = _Descended.apply(leaf, grad, leaf, rate, 0.0, decay, False)[0]  # type: ignore[no-untyped-call]
        return moved, None
    both: tuple[Tensor, Tensor] = _Descended.apply(leaf, grad, velocity, rate, momentum, decay, True)  # type: ignore[no-untyped-call]
    return both


class _Descended(torch.autograd.Function):
    @staticmethod
    def forward(
        leaf: Tensor, grad: Tensor, velocity: Tensor, rate: Tensor, momentum: float, decay: float, heavy: bool
    ) -> tuple[Tensor, Tensor]:
        """Of one client; of many when they are stacked, which they are wherever this is called."""
        step = grad + decay * leaf + (momentum * velocity if heavy else 0.0)
        return leaf - rate * step, step

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: nobody goes back through it."""

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        leaf: Tensor,
        grad: Tensor,
        velocity: Tensor,
        rate: Tensor,
        momentum: float,
        decay: float,
        heavy: bool,
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        stacked = _whole(info, in_dims, leaf, grad, velocity, rate)
        return _Stacked.apply(*stacked, momentum, decay, heavy), (0, 0)  # type: ignore[no-untyped-call]


class _Stacked(torch.autograd.Function):
    """Of clients (K, ...), each with a rate."""

    @staticmethod
    def forward(
        leaf: Tensor, grad: Tensor, velocity: Tensor, rate: Tensor, momentum: float, decay: float, heavy: bool
    ) -> tuple[Tensor, Tensor]:
        if leaf.dtype == torch.float32 and _has_kernels(leaf):
            from fedshift.engines.cuda import map_kernels

            with torch.cuda.device_of(leaf):
                moved, kept = map_kernels.descended(
                    leaf, grad, velocity if heavy else None, rate.contiguous(), momentum, decay
                )
            return moved, leaf.new_empty(len(leaf), 0) if kept is None else kept
        rates = rate.view(-1, *[1] * (leaf.dim() - 1))
        return _Descended.forward(leaf, grad, velocity, rates, momentum, decay, heavy)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        leaf: Tensor,
        grad: Tensor,
        velocity: Tensor,
        rate: Tensor,
        momentum: float,
        decay: float,
        heavy: bool,
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        """Clients of clients are so many clients; kernels are only given what no other ``vmap`` still holds."""
        flat = [one.flatten(0, 1) for one in _whole(info, in_dims, leaf, grad, velocity, rate)]
        both = _Stacked.apply(*flat, momentum, decay, heavy)  # type: ignore[no-untyped-call]
        moved, kept = (one.unflatten(0, (info.batch_size, -1)) for one in both)
        return (moved, kept), (0, 0)


def _whole(info: Any, in_dims: tuple[Any, ...], *tensors: Tensor) -> list[Tensor]:
    """All of them with the stack first."""
    return [
        one.expand(info.batch_size, *one.shape) if at is None else one.movedim(at, 0)
        for one, at in zip(tensors, in_dims, strict=False)
    ]


def _has_kernels(like: Tensor) -> bool:
    return like.is_cuda and like.dtype in (torch.float32, torch.float64) and trilinear.works(like.device)
