"""FedICON at test time: go on with the contrast between views, on the client's own test images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from fedshift.blocks import views as augment
from fedshift.blocks.losses import contrastive
from fedshift.core.adapter import Adapter
from fedshift.core.arch import Output
from fedshift.core.batching import batch_sizes
from fedshift.core.context import RandomSpec
from fedshift.core.grad import gradient
from fedshift.core.options import Count, NonNegative, Positive, Share, Whole, at_least
from fedshift.core.registry import adapter
from fedshift.core.tree import Tensors, Tree, pick


@adapter(
    "fedicon",
    paper="Taming Heterogeneity to Deal with Test-Time Shift in Federated Learning",
    venue="NeurIPS",
    year=2023,
)
@dataclass(frozen=True)
class ContrastiveAdaptation(Adapter):
    """One SGD step on NT-Xent for every test batch; the encoder moves, the head does not.

    ``mode = "offline"`` (as published): ``epochs`` over the whole unlabelled set, then predict all of it. ``mode =
    "online"``: each batch is predicted right after the ``epochs`` steps on it, and what was learnt stays for the next one.
    Normalisation layers keep their running statistics, so ``lr = 0`` changes nothing. Works on any method's model.
    ``flip = false`` for images that a mirror changes (digits). Temperature and rate were chosen on validation images of
    digits and office objects; the paper has neither, nor epochs and batch.
    """

    temperature: Positive = 0.5
    lr: NonNegative = 1e-2
    epochs: Count = 1
    batch_size: Annotated[Whole, at_least(2, "one image has none to differ from")] = 32
    mode: Literal["offline", "online"] = "offline"
    flip: bool = True
    crop: Share = 0.2  # a view shows at least this share of the image
    colour: NonNegative = 1.0  # how much a view's colours change; 0 leaves them alone

    @property
    def fits(self) -> bool:
        """Offline it looks at everything first."""
        return self.mode == "offline"

    @property
    def batch(self) -> int | None:
        """Online the contrast is within what is predicted together."""
        return self.batch_size if self.mode == "online" else None

    def draws(self) -> dict[str, RandomSpec]:
        """Two views for every epoch."""
        return {"views": RandomSpec("uniform", (self.epochs, 2, augment.NUMBERS))}

    def fit(self, state: Tree, x: Tensor, draws: Mapping[str, Tensor]) -> Tree:
        """Every epoch goes through the set in its order."""
        sizes = batch_sizes(len(x), self.batch_size)
        for epoch in range(self.epochs):
            for images, numbers in zip(x.split(sizes), draws["views"].split(sizes), strict=True):
                state = self._step(state, images, numbers[:, epoch])
        return state

    def predict(self, state: Tree, x: Tensor, draws: Mapping[str, Tensor]) -> tuple[Output, Tree]:
        """Online, learn from the batch before it is predicted."""
        if self.mode == "online":
            for epoch in range(self.epochs):
                state = self._step(state, x, draws["views"][:, epoch])
        return self.predict_with(state, x), state

    def _step(self, state: Tree, x: Tensor, numbers: Tensor) -> Tree:
        if len(x) == 1:  # nothing to differ from
            return state
        views = torch.cat(
            [augment.contrastive_views(x, own, self.flip, self.crop, self.colour) for own in numbers.unbind(1)]
        )
        live = pick(state["model"], self.arch.trainable - self.arch.head)
        groups = torch.arange(len(x), device=x.device).repeat(2)

        def loss(tensors: Tensors) -> tuple[Tensor, None]:
            features = self.predict_with({**state, "model": {**state["model"], **tensors}}, views).features
            return contrastive(features, groups, self.temperature), None

        grads, _, _ = gradient(loss, live)
        moved = {name: leaf - self.lr * grads[name] for name, leaf in live.items()}
        return {**state, "model": {**state["model"], **moved}}
