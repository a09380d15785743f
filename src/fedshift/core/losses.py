"""Loss terms that more than one method or adapter uses."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor


def entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of the softmax of each row.

    >>> import torch
    >>> entropy(torch.zeros(1, 4)).exp()
    tensor([4.])
    """
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def balanced_softmax(logits: Tensor, labels: Tensor, histogram: Tensor) -> Tensor:
    """Cross-entropy that forgives rare classes: every logit is raised by the log of its class's count plus one.

    A model trained with it and used without the counts has seen, in effect, balanced data. A constant histogram changes
    nothing.

    >>> import torch
    >>> logits, labels = torch.tensor([[2.0, 1.0]]), torch.tensor([1])
    >>> torch.equal(balanced_softmax(logits, labels, torch.tensor([0, 0])), F.cross_entropy(logits, labels))
    True
    """
    return F.cross_entropy(logits + (histogram.to(logits.dtype) + 1).log(), labels)


def marginal_entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of the mean prediction over the rows (one image's views): ``[..., views, classes] -> [...]``.

    >>> import torch
    >>> certain_but_split = torch.tensor([[50.0, 0.0], [0.0, 50.0]])
    >>> marginal_entropy(certain_but_split).exp()
    tensor(2.)
    """
    log_p = logits.log_softmax(-1)
    mean = log_p.logsumexp(-2) - math.log(logits.shape[-2])
    return -(mean.exp() * mean).sum(-1)
