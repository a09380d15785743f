"""FDSE at a new domain: erasers learn, without labels, to make its features look like everybody's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar

from torch import Tensor

from fedshift.core.adapter import Adapter
from fedshift.core.batching import batch_sizes
from fedshift.core.grad import gradient
from fedshift.core.options import Finite, NonNegative, NonNegativeInt, Whole, at_least
from fedshift.core.registry import adapter
from fedshift.core.tree import Tensors, Tree, pick
from fedshift.systems.fdse import eraser as erasure


@adapter("fdse-align", paper="Federated Learning with Domain Shift Eraser", venue="CVPR", year=2025)
@dataclass(frozen=True)
class EraserAlignment(Adapter):
    """``epochs`` of SGD on FDSE's consistency term over the unlabelled images, then predict them (Algorithm 3).

    Only the erasers and the affine part of their inner normalisation learn; that normalisation uses each batch's statistics
    and refreshes its running ones. Everything shared, the outer statistics included, stays as it is to the bit: these
    statistics are what the features are drawn to. Epochs, rate and batch are our choice; the paper has none.
    """

    lr: NonNegative = 0.01
    epochs: NonNegativeInt = 5
    batch_size: Annotated[Whole, at_least(2, "one image has no statistics")] = 50
    beta: Finite = 0.001

    requires_arch: ClassVar[frozenset[str]] = frozenset({"erasers"})
    reasons: ClassVar[Mapping[str, str]] = erasure.REASONS

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """The erasers."""
        return self.arch.layers(erasure.Eraser)

    def fit(self, state: Tree, x: Tensor, draws: Mapping[str, Tensor]) -> Tree:
        """Go over the whole set, batch by batch, in its order."""
        model = {**state["model"], **erasure.fresh_tracking(state["model"], self.blocks)}
        for _ in range(self.epochs):
            for images in x.split(batch_sizes(len(x), self.batch_size)):
                model = self._step({**state, "model": model}, images)
        return {**state, "model": {**model, **erasure.fresh_tracking(model, self.blocks)}}

    def _step(self, state: Tree, x: Tensor) -> Tensors:
        model = state["model"]
        if len(x) == 1:  # no statistics
            return model
        live = pick(model, erasure.entries(self.blocks, erasure.OWN))
        moving = erasure.entries(self.blocks, (*erasure.OWN, *erasure.AT_HOME))

        def loss(tensors: Tensors) -> tuple[Tensor, Tensors]:
            output = self.predict_with({**state, "model": {**model, **tensors}}, x, moving)
            return erasure.inconsistency(output.aux, model, self.blocks, self.beta), output.buffers

        grads, _, refreshed = gradient(loss, live)
        moved = {name: leaf - self.lr * grads[name] for name, leaf in live.items()}
        return {**model, **moved, **refreshed}
