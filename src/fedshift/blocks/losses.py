"""Loss terms that more than one method or adapter uses."""

from __future__ import annotations

import math

import torch
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


def contrastive(z: Tensor, groups: Tensor, temperature: float) -> Tensor:
    """Items of a group attract each other against all others: SupCon, and NT-Xent where a group is two views of one image.

    ``-mean_i mean_p log softmax_a(z_i . z_a / temperature)_p`` with normalised z; p runs over the other items of i's group
    and a over all other items. Every item needs at least one other in its group.

    >>> import torch
    >>> alike = torch.ones(6, 3)
    >>> contrastive(alike, torch.tensor([0, 1, 2, 0, 1, 2]), 0.1).exp().round(decimals=3)
    tensor(5.)
    """
    z = F.normalize(z, dim=1)
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    log_p = (z @ z.T / temperature).masked_fill(itself, -math.inf).log_softmax(1)
    friends = (groups[:, None] == groups) & ~itself
    return -(torch.where(friends, log_p, 0).sum(1) / friends.sum(1)).mean()


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
