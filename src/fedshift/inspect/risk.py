"""How right a model is at each client: its risk there, and what it takes for what."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor


def local_risk(logits: Tensor, labels: Tensor) -> float | None:
    """Mean cross-entropy of predictions, in nats; None without samples and where it is not finite.

    >>> round(local_risk(torch.zeros(3, 10), torch.arange(3)), 4)
    2.3026
    """
    if not len(labels):
        return None
    value = float(F.cross_entropy(logits.double(), labels))
    return value if math.isfinite(value) else None


def average_risk(risks: Mapping[str, float | None]) -> float | None:
    """The mean over clients, each counting the same; None unless all of them have one.

    >>> average_risk({"a": 1.0, "b": 3.0}), average_risk({"a": None}), average_risk({})
    (2.0, None, None)
    """
    known = [risk for risk in risks.values() if risk is not None]
    return statistics.fmean(known) if known and len(known) == len(risks) else None


def confusion(labels: Tensor, answers: Tensor, classes: int, outputs: int | None = None) -> Tensor:
    """How often class i was taken for class j: int64 [classes, outputs].

    >>> confusion(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]), classes=2).tolist()
    [[1, 1], [0, 1]]
    """
    width = classes if outputs is None else outputs
    return torch.bincount(labels * width + answers, minlength=classes * width).reshape(classes, width)
