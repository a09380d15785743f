"""Ways to convolve that torch has none of: by patches that are written out, and with a stride folded into channels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedshift.engines.cuda import trilinear
from fedshift.engines.cuda.geometry import Pair, Shape, positions


def by_folding(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    """A convolution with a stride as one without, of images whose squares of pixels have become channels.

    Kernels grow to whole squares, by zeros.

    >>> x, weight = torch.randn(2, 3, 17, 17), torch.randn(4, 3, 5, 5)
    >>> folded, plain = by_folding(x, weight, None, (4, 4), (2, 2)), F.conv2d(x, weight, None, 4, 2)
    >>> torch.allclose(folded, plain, atol=1e-4)
    True
    """
    size = (weight.shape[2], weight.shape[3])
    frame = (x.shape[2] + 2 * padding[0], x.shape[3] + 2 * padding[1])
    squares = tuple(-(-side // step) for side, step in zip(size, stride, strict=True))  # of a kernel
    spots = positions(frame, size, stride)
    whole = [(spot - 1 + square) * step for spot, square, step in zip(spots, squares, stride, strict=True)]
    down, across = (side - had - pad for side, had, pad in zip(whole, x.shape[2:], padding, strict=True))
    images = F.pad(x, (padding[1], across, padding[0], down))
    more = [square * step - side for square, step, side in zip(squares, stride, size, strict=True)]
    kernels = F.pad(weight, (0, more[1], 0, more[0]))
    return trilinear.convolution(_folded(images, stride), _folded(kernels, stride), bias, (1, 1), (0, 0))


def by_patches(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    """A convolution as one product: patches (images and positions, numbers of a patch) with kernels."""
    down, across = padding
    padded, size = F.pad(x, (across, across, down, down)), (weight.shape[2], weight.shape[3])
    tall, wide = positions((padded.shape[2], padded.shape[3]), size, stride)
    outputs = F.linear(_patches(padded, size, stride), weight.flatten(1), bias)
    # vmap cannot make tensors in the order of memory that CUDA's BatchNorm would choose for channels last
    return outputs.reshape(len(x), tall, wide, len(weight)).permute(0, 3, 1, 2).contiguous()


def _folded(maps: Tensor, stride: Pair) -> Tensor:
    """``[n, channels, H, W]`` as ``[n, channels * stride * stride, H / stride, W / stride]``."""
    cut = maps.unflatten(3, (-1, stride[1])).unflatten(2, (-1, stride[0]))
    folded: Tensor = cut.permute(0, 1, 3, 5, 2, 4).flatten(1, 3).contiguous()
    return folded


class _Patches(torch.autograd.Function):
    """The patches of images, a row for each; clients' images are those of one long batch."""

    @staticmethod
    def forward(x: Tensor, size: Pair, stride: Pair) -> Tensor:
        views = x.unfold(2, size[0], stride[0]).unfold(3, size[1], stride[1])
        return views.permute(0, 2, 3, 1, 4, 5).reshape(-1, x.shape[1] * size[0] * size[1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Pair, Pair], output: Tensor) -> None:  # noqa: ARG004
        ctx.shape, ctx.size, ctx.stride = tuple(inputs[0].shape), inputs[1], inputs[2]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _joined(gradient, ctx.shape, ctx.size, ctx.stride), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return _patches(tangent, ctx.size, ctx.stride)

    @staticmethod
    def vmap(
        info: Any,  # noqa: ARG004
        in_dims: tuple[int, None, None],
        x: Tensor,
        size: Pair,
        stride: Pair,
    ) -> tuple[Tensor, int]:
        stacked = x.movedim(in_dims[0], 0)
        return _patches(stacked.flatten(0, 1), size, stride).unflatten(0, (len(stacked), -1)), 0


class _Joined(torch.autograd.Function):
    """The transpose of ``_Patches``: every pixel is the sum over its positions in patches."""

    @staticmethod
    def forward(rows: Tensor, shape: Shape, size: Pair, stride: Pair) -> Tensor:
        count, channels = shape[:2]
        tall, wide = positions(shape[2:], size, stride)
        views = rows.reshape(count, tall, wide, channels, *size).permute(0, 3, 1, 2, 4, 5)
        part = (count, channels, tall, shape[3], size[0])
        columns = torch.ops.aten.unfold_backward(views.contiguous(), part, 3, size[1], stride[1])
        joined: Tensor = torch.ops.aten.unfold_backward(columns, shape, 2, size[0], stride[0])
        return joined

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Shape, Pair, Pair], output: Tensor) -> None:  # noqa: ARG004
        ctx.shape, ctx.size, ctx.stride = inputs[1], inputs[2], inputs[3]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _patches(gradient, ctx.size, ctx.stride), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Tensor:
        return _joined(tangent, ctx.shape, ctx.size, ctx.stride)

    @staticmethod
    def vmap(
        info: Any,  # noqa: ARG004
        in_dims: tuple[int, None, None, None],
        rows: Tensor,
        shape: Shape,
        size: Pair,
        stride: Pair,
    ) -> tuple[Tensor, int]:
        stacked = rows.movedim(in_dims[0], 0)
        whole = (len(stacked) * shape[0], *shape[1:])
        return _joined(stacked.flatten(0, 1), whole, size, stride).unflatten(0, (len(stacked), -1)), 0


def _patches(x: Tensor, size: Pair, stride: Pair) -> Tensor:
    rows: Tensor = _Patches.apply(x, size, stride)  # type: ignore[no-untyped-call]
    return rows


def _joined(rows: Tensor, shape: Shape, size: Pair, stride: Pair) -> Tensor:
    images: Tensor = _Joined.apply(rows, shape, size, stride)  # type: ignore[no-untyped-call]
    return images
