"""FedTHE+ at test time: FedTHE's weight, then a few tuning steps for this sample alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedshift.blocks import augmix
from fedshift.blocks.per_sample_tuning import tuned_on_views
from fedshift.core.arch import Output
from fedshift.core.context import RandomSpec
from fedshift.core.options import Count, NonNegative, NonNegativeInt
from fedshift.core.registry import adapter
from fedshift.core.tree import Tensors, Tree
from fedshift.systems.fedthe.adapter import HeadEnsemble


@adapter("the-plus", paper="Test-Time Robust Personalization for Federated Learning", venue="ICLR", year=2023)
@dataclass(frozen=True)
class TunedHeadEnsemble(HeadEnsemble):
    """FedTHE, and with its weight e held fixed ``tune-steps`` of SGD on the marginal entropy of AugMix views.

    Extractor and both heads are tuned, the clean image is predicted, and the weights are forgotten: history and e come from
    untuned features, so every sample is still on its own. ``tune-lr = 0`` is FedTHE. ``flip = false`` for images that a
    mirror changes (digits).
    """

    views: Count = 16
    tune_steps: NonNegativeInt = 3
    tune_lr: NonNegative = 5e-4
    flip: bool = True

    stackable: ClassVar[bool] = False  # views are made by sorting them, and samples are stacked already

    def draws(self) -> dict[str, RandomSpec]:
        """New views for every step."""
        return {"views": RandomSpec("uniform", (self.tune_steps, self.views, augmix.NUMBERS))}

    def predict(self, state: Tree, x: Tensor, draws: Mapping[str, Tensor]) -> tuple[Output, Tree]:
        """FedTHE's weights for all, then tuning for each."""
        output, moved = super().predict(state, x, draws)
        own = set(state["model"])
        tensors = {**state["model"], **{f"generic {name}": leaf for name, leaf in state["generic"].items()}}

        def logits(live: Tensors, images: Tensor, e: Tensor) -> Tensor:
            result = self.predict_with({**state, "model": {name: live[name] for name in own}}, images)
            generic = self.arch.classify({name: live[f"generic {name}"] for name in state["generic"]}, result.features)
            return torch.lerp(result.logits, generic, e)

        trainable = self.arch.trainable | {f"generic {name}" for name in state["generic"]}
        tuned = tuned_on_views(
            logits,
            tensors,
            x,
            draws["views"],
            output.aux["e"],
            steps=[trainable] * self.tune_steps,
            lr=self.tune_lr,
            flip=self.flip,
            convolutional=self.arch.has_convolution,
        )
        return output._replace(logits=tuned), moved
