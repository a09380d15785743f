"""Weighing two heads against each other, for every sample of a stream at once and without autograd."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

aten = torch.ops.aten  # derivatives of softmax and sigmoid as one operation each, which torch itself uses
BLOCK = 64  # samples whose history is one matrix product


def moving_average(values: Tensor, start: Tensor, rate: float) -> Tensor:
    """``H_n = rate * values_n + (1 - rate) * H_{n-1}`` for all n, with ``H_0 = start``: ``[n, d] -> [n, d]``.

    Inside a block the recurrence is a product with a triangular matrix. The blocks' last rows obey the same recurrence
    with the decay of a whole block, so the function calls itself on them: a stream of 10,000 takes three levels, no loop.

    >>> moving_average(torch.tensor([[2.0], [4.0]]), torch.tensor([0.0]), 0.5).tolist()
    [[1.0], [2.5]]
    """
    return _recurrence(rate * values, start, values.new_full((), 1 - rate))


def _recurrence(inputs: Tensor, start: Tensor, decay: Tensor) -> Tensor:
    """``H_n = decay * H_{n-1} + inputs_n``."""
    count, size = inputs.shape
    if count == 1:  # a single image that arrives needs no matrix
        return decay * start + inputs
    width = min(BLOCK, count)
    blocks = -(-count // width)
    padded = torch.cat([inputs, inputs.new_zeros(blocks * width - count, size)]).reshape(blocks, width, size)
    steps = torch.arange(width, device=inputs.device)
    distance = steps[:, None] - steps
    kernel = torch.where(distance >= 0, decay ** distance.clamp(min=0), 0)
    inside = kernel @ padded
    before = start[None]
    if blocks > 1:
        before = torch.cat([before, _recurrence(inside[:-1, -1], start, decay**width)])
    result = inside + (decay ** (steps + 1))[:, None] * before[:, None]
    return result.reshape(-1, size)[:count]


def covariance(logits: Tensor, direction: Tensor) -> Tensor:
    """``Cov_p(logits, direction)`` with ``p = softmax(logits)``, in as few operations as there can be.

    >>> covariance(torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 3.0]]))
    tensor([0.])
    """
    p = logits.softmax(-1)
    centred = aten._softmax_backward_data.default(logits, p, -1, logits.dtype)  # p (logits - their mean)
    found: Tensor = (centred * direction).sum(-1)
    return found


def agreement_slope(logits: tuple[Tensor, Tensor], directions: tuple[Tensor, Tensor]) -> Tensor:
    """The derivative of the cosine between two softmax predictions when each moves along its direction.

    >>> a = (torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 0.0]]))
    >>> agreement_slope(a, (torch.tensor([[-1.0, 0.0]]), torch.zeros(1, 2))) > 0    # the first comes nearer
    tensor([True])
    """
    p, q = (part.softmax(-1) for part in logits)
    dp, dq = (prob * (way - (prob * way).sum(-1, keepdim=True)) for prob, way in zip((p, q), directions, strict=True))
    inner, norms = (p * q).sum(-1), (p.norm(dim=-1), q.norm(dim=-1))
    turned = ((dp * q).sum(-1) + (p * dq).sum(-1)) / (norms[0] * norms[1])
    grown = (p * dp).sum(-1) / norms[0].square() + (q * dq).sum(-1) / norms[1].square()
    slope: Tensor = turned - inner / (norms[0] * norms[1]) * grown
    return slope


def search_weight(slope: Callable[[Tensor], Tensor], like: Tensor, lr: float, steps: int) -> Tensor:
    """The weight e in (0, 1) after some Adam steps on two logits whose softmax is (e, 1 - e), from e = 1/2.

    By symmetry the two logits move by ``+delta`` and ``-delta`` for ever, so one number for each sample is enough:
    ``e = sigmoid(2 delta)``, and the gradient of the first logit is ``slope(e) e (1 - e)``. ``slope`` gives dL/de.

    A single image that arrives waits for every operation, so there are few: all factors that are known become one.

    >>> search_weight(lambda e: torch.ones_like(e), torch.zeros(1), lr=0.1, steps=20) < 0.5
    tensor([True])
    """
    difference = m = v = torch.zeros_like(like)  # 2 delta
    for step in range(1, steps + 1):
        e = difference.sigmoid()
        grad = aten.sigmoid_backward.default(slope(e), e)  # slope e (1 - e)
        m, v = torch.lerp(m, grad, 0.1), torch.lerp(v, grad.square(), 0.001)
        scale = (1 - 0.999**step) ** 0.5
        difference = torch.addcdiv(difference, m, v.sqrt() + 1e-8 * scale, value=-2 * lr * scale / (1 - 0.9**step))
    return difference.sigmoid()
