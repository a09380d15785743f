"""Gaussians with a deviation of their own in every dimension, for a sample's representation or for a class."""

from __future__ import annotations

from torch import Tensor

from fedshift.core.tree import Tensors


def divergence(mean: Tensor, deviation: Tensor, other_mean: Tensor, other_deviation: Tensor) -> Tensor:
    """``KL(N(mean, deviation^2) | N(other_mean, other_deviation^2))``, summed over the last dimension.

    >>> import torch
    >>> divergence(torch.ones(4), torch.ones(4), torch.zeros(4), torch.ones(4))
    tensor(2.)
    """
    squares = (deviation.square() + (mean - other_mean).square()) / (2 * other_deviation.square())
    return (other_deviation.log() - deviation.log() + squares - 0.5).sum(-1)


def fitted(samples: Tensor, floor: float) -> Tensors:
    """The most likely Gaussian of ``[..., samples, size]``: mean and biased deviation, which is at least ``floor``.

    >>> import torch
    >>> fitted(torch.tensor([[1.0, 5.0], [3.0, 5.0]]), floor=0.1)
    {'mean': tensor([2., 5.]), 'deviation': tensor([1.0000, 0.1000])}
    """
    return {"mean": samples.mean(-2), "deviation": samples.var(-2, correction=0).sqrt().clamp(min=floor)}


def of_classes(gaussians: Tensors, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each label's class.

    >>> import torch
    >>> of_classes({"mean": torch.tensor([[1.0], [2.0]]), "deviation": torch.ones(2, 1)}, torch.tensor([1]))[0]
    tensor([[2.]])
    """
    return gaussians["mean"][labels], gaussians["deviation"][labels]
