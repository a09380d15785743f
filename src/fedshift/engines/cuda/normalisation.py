"""BatchNorm for stacked clients, each with the statistics of its own batch.

``vmap`` puts clients side by side as channels, copies images there and back for it, and scales and shifts in passes of
their own. On a GPU kernels of our own (``norm_kernels.py``) leave images where they are; elsewhere the formula stands, which
is what the former are tested against. Steps through steps (second derivatives) stay torch's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedshift.engines.cuda import trilinear


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Images (N, C, ...) normalised by their own statistics, and their means and biased variances, without gradient.

    >>> y, mean, var = batch_norm(torch.tensor([[1.0], [3.0]]), torch.ones(1), torch.zeros(1), 0.0)
    >>> y.flatten(), mean, var
    (tensor([-1.,  1.]), tensor([2.]), tensor([1.]))
    """
    flat = x.reshape(1, len(x), x.shape[1], -1)
    y, mean, var = _Normalised.apply(flat, weight[None], bias[None], eps)  # type: ignore[no-untyped-call]
    return y.reshape(x.shape), mean[0], var[0]


def suits(x: Tensor) -> bool:
    """Whether kernels of our own take such images."""
    return x.is_cuda and x.dtype == torch.float32 and trilinear.works(x.device)


class _Normalised(torch.autograd.Function):
    """Of clients (K, N, C, S) with weights and biases (K, C)."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        if suits(x):
            from fedshift.engines.cuda import norm_kernels

            with torch.cuda.device_of(x):
                return norm_kernels.normalised(x.contiguous(), weight.contiguous(), bias.contiguous(), eps)
        mean, var = x.mean((1, 3)), x.var((1, 3), correction=0)
        scale = (var + eps).rsqrt() * weight
        y = (x - _wide(mean)) * _wide(scale) + _wide(bias)
        return y, mean, var

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, float], output: tuple[Tensor, ...]) -> None:
        x, weight, _, ctx.eps = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(x, weight, *output[1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight, mean, var = ctx.saved_tensors
        found: tuple[Tensor, Tensor, Tensor] = _Back.apply(gradient, x, mean, (var + ctx.eps).rsqrt(), weight)  # type: ignore[no-untyped-call]
        return *found, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], *given: Any
    ) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, int, int]]:
        *tensors, eps = given
        found = _Normalised.apply(*_stacked(info, in_dims, tensors), eps)  # type: ignore[no-untyped-call]
        y, mean, var = (one.unflatten(0, (info.batch_size, -1)) for one in found)
        return (y, mean, var), (0, 0, 0)


class _Back(torch.autograd.Function):
    """The gradients of images, weights and biases; nobody goes on from there."""

    @staticmethod
    def forward(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if suits(x):
            from fedshift.engines.cuda import norm_kernels

            with torch.cuda.device_of(x):
                return norm_kernels.gradients(*(one.contiguous() for one in (g, x, mean, rstd, weight)))
        off = (x - _wide(mean)) * _wide(rstd)
        total, along = g.sum((1, 3)), (g * off).sum((1, 3))
        slope = g - (_wide(total) + off * _wide(along)) / (x.shape[1] * x.shape[3])
        return slope * _wide(rstd * weight), along, total

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], *given: Tensor
    ) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, int, int]]:
        found = _Back.apply(*_stacked(info, in_dims, list(given)))  # type: ignore[no-untyped-call]
        dx, along, total = (one.unflatten(0, (info.batch_size, -1)) for one in found)
        return (dx, along, total), (0, 0, 0)


def _stacked(info: Any, in_dims: tuple[Any, ...], tensors: list[Tensor]) -> list[Tensor]:
    """Clients of clients as so many clients."""
    whole = [
        one.expand(info.batch_size, *one.shape) if at is None else one.movedim(at, 0)
        for one, at in zip(tensors, in_dims, strict=False)
    ]
    return [one.flatten(0, 1) for one in whole]


def _wide(rows: Tensor) -> Tensor:
    return rows[:, None, :, None]
