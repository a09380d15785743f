"""One step of a model inside a loss, or on unlabelled images."""

from __future__ import annotations

from torch import Tensor

from fedshift.core.optim import SGD, clip_by_norm
from fedshift.core.tree import Tensors


def stepped(tensors: Tensors, grads: Tensors, rate: Tensor | float, weight_decay: float, clip: float | None) -> Tensors:
    """The inner step ``w - rate (g + weight_decay w)``; without clipping it has derivatives of any order."""
    if clip is not None:
        grads = clip_by_norm(grads, clip)
    return SGD(lr=1.0, weight_decay=weight_decay).update(tensors, grads, {}, rate)[0]
