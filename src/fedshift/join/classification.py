"""How right the answers are, class by class, where labels are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

AVERAGES = ("macro avg", "weighted avg")


def classification(truth: Tensor, codes: Tensor, names: Sequence[str]) -> dict[str, Any]:
    """scikit-learn's ``classification_report``: ``classes`` by name, ``accuracy`` and the two averages.

    A class is listed if it occurs among the labels or the answers. What has nothing to be counted of is zero.

    >>> import torch
    >>> found = classification(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]), ["cat", "dog"])
    >>> found["classes"]["cat"]
    {'precision': 1.0, 'recall': 0.5, 'f1-score': 0.6666666666666666, 'support': 2}
    >>> list(found)
    ['classes', 'accuracy', 'macro avg', 'weighted avg']
    """
    from sklearn.metrics import classification_report

    # by number: a class may be called like an average
    found: Mapping[str, Any] = classification_report(truth.tolist(), codes.tolist(), output_dict=True, zero_division=0)
    present = sorted({*truth.tolist(), *codes.tolist()})
    return {
        "classes": {names[code]: _counted(found[str(code)]) for code in present},
        "accuracy": float(found["accuracy"]),
        **{average: _counted(found[average]) for average in AVERAGES},
    }


def _counted(numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {key: int(value) if key == "support" else float(value) for key, value in numbers.items()}
