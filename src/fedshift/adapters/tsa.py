"""TSA: weigh the heads so that two views of a sample agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedshift.blocks import views as augment
from fedshift.blocks.head_mixing import agreement_slope, search_weight
from fedshift.blocks.mean_views import second_head
from fedshift.core.adapter import Adapter
from fedshift.core.arch import Output
from fedshift.core.context import RandomSpec
from fedshift.core.options import NonNegative, NonNegativeInt
from fedshift.core.registry import adapter
from fedshift.core.tree import Tree


@adapter(
    "tsa",
    paper="Self-Supervised Aggregation of Diverse Experts for Test-Agnostic Long-Tailed Recognition",
    venue="NeurIPS",
    year=2022,
)
@dataclass(frozen=True)
class ViewAgreement(Adapter):
    """Logits ``e y_g + (1 - e) y_l`` with the e that maximises the cosine between the predictions of two views.

    From e = 1/2, ``steps`` of Adam for every sample on its own, in closed form and for all samples at once; the clean image
    is predicted with the weight found. FedTHE's row 3 of Table 3 is this on ``fedthe`` with ``balanced = false``. Views are
    :func:`fedshift.blocks.views.contrastive_views`; ``flip = false`` for images that a mirror changes (digits).
    """

    lr: NonNegative = 0.1
    steps: NonNegativeInt = 10
    flip: bool = True

    requires: ClassVar[frozenset[str]] = frozenset({"model", "generic"})
    telemetry: ClassVar[tuple[str, ...]] = ("e",)

    def draws(self) -> dict[str, RandomSpec]:
        """Two views."""
        return {"views": RandomSpec("uniform", (2, augment.NUMBERS))}

    def predict(self, state: Tree, x: Tensor, draws: Mapping[str, Tensor]) -> tuple[Output, Tree]:
        """Three passes of the network, one search."""
        views = [augment.contrastive_views(x, numbers, self.flip) for numbers in draws["views"].unbind(1)]
        first, second = (self._heads(state, view) for view in views)

        def slope(e: Tensor) -> Tensor:
            mixed = tuple(personal + e[:, None] * way for personal, way in (first, second))
            return -agreement_slope((mixed[0], mixed[1]), (first[1], second[1]))

        e = search_weight(slope, first[0][:, 0], self.lr, self.steps)
        output = self.predict_with(state, x)
        generic = second_head(self.arch, state["generic"], output)
        return output._replace(logits=torch.lerp(output.logits, generic, e[:, None]), aux={"e": e}), state

    def _heads(self, state: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the personal head, and the way from them to the global one's."""
        output = self.predict_with(state, x)
        return output.logits, self.arch.classify(state["generic"], output.features) - output.logits
