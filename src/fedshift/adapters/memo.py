"""MEMO: make up one's mind about one sample, by agreeing with oneself over its views."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedshift.blocks import augmix
from fedshift.blocks.per_sample_tuning import tuned_on_views
from fedshift.core.adapter import Adapter
from fedshift.core.arch import Output
from fedshift.core.context import RandomSpec
from fedshift.core.options import Count, NonNegative, NonNegativeInt
from fedshift.core.registry import adapter
from fedshift.core.tree import Tensors, Tree


@adapter("memo", paper="MEMO: Test Time Robustness via Adaptation and Augmentation", venue="NeurIPS", year=2022)
@dataclass(frozen=True)
class Memo(Adapter):
    """Per sample: ``steps`` of SGD on the entropy of the mean prediction over AugMix views, then predict and forget.

    MEMO (G) of the FedTHE paper is this on ``fedavg``, MEMO (P) on ``finetune``. No momentum, no weight decay, nothing
    survives a sample; normalisation layers keep their running statistics. ``flip = false`` for images that a mirror
    changes (digits).
    """

    views: Count = 32
    steps: NonNegativeInt = 3
    lr: NonNegative = 5e-4
    flip: bool = True

    def stages(self) -> list[frozenset[str]]:
        """What each step trains."""
        return [self.arch.trainable] * self.steps

    def draws(self) -> dict[str, RandomSpec]:
        """New views for every step."""
        return {"views": RandomSpec("uniform", (len(self.stages()), self.views, augmix.NUMBERS))}

    def predict(self, state: Tree, x: Tensor, draws: Mapping[str, Tensor]) -> tuple[Output, Tree]:
        """Every sample with weights of its own; the state stays what it was."""

        def logits(live: Tensors, images: Tensor, _: Tensor) -> Tensor:
            return self.predict_with({**state, "model": live}, images).logits

        tuned = tuned_on_views(
            logits,
            state["model"],
            x,
            draws["views"],
            x.new_zeros(len(x)),
            steps=self.stages(),
            lr=self.lr,
            flip=self.flip,
            convolutional=self.arch.has_convolution,
        )
        return self.predict_with(state, x)._replace(logits=tuned), state
