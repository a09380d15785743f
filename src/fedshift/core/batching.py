"""How many samples are worked on at once."""

from __future__ import annotations

from torch import Tensor

from fedshift.core.tree import Tensors


def batch_sizes(samples: int, size: int, no_singles: bool = True) -> list[int]:
    """How a set is cut into batches; where one sample alone is no batch, a last one joins those before it.

    >>> batch_sizes(7, 3), batch_sizes(6, 3), batch_sizes(1, 3), batch_sizes(7, 3, no_singles=False)
    ([3, 4], [3, 3], [1], [3, 3, 1])
    """
    full, rest = divmod(samples, size)
    if rest == 1 and full and no_singles:
        return [*[size] * (full - 1), size + 1]
    return [size] * full + [rest] * (rest > 0)


def at_once(tensors: Tensors, x: Tensor, views: int, budget: int = 1 << 32) -> int:
    """How many samples to tune together: their weights, gradients and activations should stay within about ``budget``.

    >>> import torch
    >>> at_once({"w": torch.zeros(1000)}, torch.zeros(5, 3, 32, 32), views=16, budget=1 << 30)
    85
    """
    weights = 3 * sum(leaf.numel() * leaf.element_size() for leaf in tensors.values())
    activations = 64 * views * x[0].numel() * x.element_size() if len(x) else 1
    return max(1, min(1024, budget // max(weights + activations, 1)))
