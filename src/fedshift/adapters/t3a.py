"""T3A: replace the classifier by prototypes of confident test samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedshift.blocks.losses import entropy
from fedshift.core.adapter import Adapter
from fedshift.core.arch import Output
from fedshift.core.options import Count
from fedshift.core.registry import adapter
from fedshift.core.tree import Tensors, Tree

PROTOTYPE_NUMBERS = 1 << 23  # held at once: samples x classes x features


@adapter(
    "t3a",
    paper="Test-Time Classifier Adjustment Module for Model-Agnostic Domain Generalization",
    venue="NeurIPS",
    year=2021,
)
@dataclass(frozen=True)
class PrototypeClassifier(Adapter):
    """Each class keeps the ``keep`` least uncertain features it was given; a sample goes to the nearest prototype.

    The rows of the classifier are the first supports, each under the class it predicts for itself. A sample joins the
    class it is predicted to be, the most uncertain support beyond ``keep`` leaves, and the sample is then scored by
    ``z . c_y``, where c_y is the normalised sum of the class's normalised supports (zero for a class without any). No
    gradients; the bias of the classifier is not used. Ties in entropy keep the earlier arrival.

    Who is among the ``keep`` best after sample n is a matter of ranks: a support leaves at the first n at which ``keep``
    better ones of its class have arrived, and never comes back. So the scan over a chunk is a comparison matrix and a
    cumulative sum, without a loop, and chunks of any size agree.
    """

    keep: Count = 50

    def init(self, deployed: Tree) -> Tree:
        """The classifier's own rows."""
        rows = next(leaf for name, leaf in deployed["model"].items() if name in self.arch.head and leaf.dim() == 2)
        return {**deployed, "supports": _entries(rows, self.arch.classify(deployed["model"], rows))}

    def predict(self, state: Tree, x: Tensor, draws: Mapping[str, Tensor]) -> tuple[Output, Tree]:
        """Score the whole chunk as if its samples came one by one."""
        output = self.predict_with(state, x)
        supports, scores = state["supports"], []
        size = max(1, min(512, PROTOTYPE_NUMBERS // (output.logits.shape[1] * output.features.shape[1])))
        for features, logits in zip(output.features.split(size), output.logits.split(size), strict=True):
            score, supports = self._scan(supports, features, logits)
            scores.append(score)
        return output._replace(logits=torch.cat(scores)), {**state, "supports": supports}

    def _scan(self, old: Tensors, features: Tensor, logits: Tensor) -> tuple[Tensor, Tensors]:
        """Scores of some samples in a row, and the supports that are left after them."""
        new, count = _entries(features, logits), len(features)
        every = {name: torch.cat([leaf, new[name]]) for name, leaf in old.items()}
        departure = self._departures(every, count)
        arrival = torch.arange(-len(old["label"]), count, device=features.device).clamp(min=0)
        present = departure > arrival  # a sample may be too uncertain to be kept at all
        # each support is added to its class when it arrives and taken away when it leaves
        moves = every["unit"].new_zeros(count + 1, logits.shape[1], features.shape[1])
        units, labels = every["unit"][present], every["label"][present]
        moves.index_put_((arrival[present], labels), units, accumulate=True)
        moves.index_put_((departure[present], labels), -units, accumulate=True)
        prototypes = F.normalize(moves[:-1].cumsum(0), dim=2, eps=1e-9)
        scores = torch.einsum("ncd,nd->nc", prototypes, features.to(prototypes.dtype))
        staying = present & (departure == count)
        return scores.to(logits.dtype), {name: leaf[staying] for name, leaf in every.items()}

    def _departures(self, every: Tensors, count: int) -> Tensor:
        """When each support leaves: the number of the first sample after which ``keep`` better ones are there."""
        labels = every["label"]
        first = len(labels) - count
        places = torch.arange(len(labels), device=labels.device)
        order = every["entropy"].argsort(stable=True)
        rank = torch.empty_like(order).index_copy(0, order, places)
        # sorted by class, and by entropy within: how many of its class are better is the place within the class
        order = order[labels[order].argsort(stable=True)]
        sorted_labels = labels[order]
        within = torch.empty_like(order).index_copy(0, order, places - torch.searchsorted(sorted_labels, sorted_labels))
        better = (labels[:, None] == labels[first:]) & (rank[first:] < rank[:, None])  # [support, new sample]
        crowded = (within - better.sum(1))[:, None] + better.cumsum(1) >= self.keep
        return torch.where(crowded.any(1), crowded.to(torch.uint8).argmax(1), count)


def _entries(features: Tensor, logits: Tensor) -> Tensors:
    """What is remembered of samples; sums are kept in double precision so that chunks of any size agree."""
    unit = F.normalize(features.double(), dim=1)
    return {"unit": unit, "label": logits.argmax(1), "entropy": entropy(logits)}
