"""TTT: keep learning which way up images are, on the test stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedshift.blocks.rotation import TURNS, turn_losses, turned
from fedshift.core.adapter import Adapter
from fedshift.core.arch import Output
from fedshift.core.context import RandomSpec
from fedshift.core.grad import gradient
from fedshift.core.options import Count, NonNegative
from fedshift.core.registry import adapter
from fedshift.core.tree import Tensors, Tree, pick

TOGETHER = 64  # samples whose copies are made at once


@adapter(
    "ttt",
    paper="Test-Time Training with Self-Supervision for Generalization under Distribution Shifts",
    venue="ICML",
    year=2020,
)
@dataclass(frozen=True)
class TestTimeTraining(Adapter):
    """For each sample one SGD step on guessing the turns of ``copies`` of it, then its prediction; nothing is reset.

    Extractor and rotation head move, the classifier does not. What a sample does to the weights stays for the next ones of
    the stream (the online variant), so the order matters and chunks do not. Copies of one image with the same turn are the
    same image, so without BatchNorm four of them, weighted by how often each turn was drawn, give the same gradient.
    """

    __test__ = False  # pytest would take the class for one of its own

    lr: NonNegative = 1e-3
    copies: Count = 32

    requires: ClassVar[frozenset[str]] = frozenset({"model", "rotation"})
    sequential: ClassVar[bool] = True

    def draws(self) -> dict[str, RandomSpec]:
        """The turns of a sample's copies."""
        return {"turns": RandomSpec("integers", (self.copies,), high=TURNS)}

    def predict(self, state: Tree, x: Tensor, draws: Mapping[str, Tensor]) -> tuple[Output, Tree]:
        """One sample after the other; only their copies are made together."""
        logits, features = [], []
        for images, drawn in zip(x.split(TOGETHER), draws["turns"].split(TOGETHER), strict=True):
            turns, weights = self._asked(images, drawn)
            size = turns.shape[1]
            copies = turned(images.repeat_interleave(size, 0), turns.flatten()).unflatten(0, turns.shape)
            for image, *question in zip(images.split(1), copies, turns, weights, strict=True):
                state = self._step(state, *question)
                output = self.predict_with(state, image)
                logits.append(output.logits)
                features.append(output.features)
        return Output(torch.cat(logits), torch.cat(features), {}, {}), state

    @property
    def _batch_stats(self) -> bool:
        return self.arch.has_batch_norm and self.copies > 1

    def _asked(self, images: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """Turns of every image's copies, and what each counts."""
        if self._batch_stats:
            return drawn, torch.full_like(drawn, 1 / self.copies, dtype=images.dtype)
        turns = torch.arange(TURNS, device=images.device)
        return turns.expand(len(images), -1), (drawn[:, :, None] == turns).to(images.dtype).mean(1)

    def _step(self, state: Tree, copies: Tensor, turns: Tensor, weights: Tensor) -> Tree:
        trained = self.arch.trainable - self.arch.head
        live = {**pick(state["model"], trained), **state["rotation"]}

        def loss(tensors: Tensors) -> tuple[Tensor, Tensors]:
            model = {**state["model"], **pick(tensors, trained)}
            output = self.predict_with({**state, "model": model}, copies, batch_stats=self._batch_stats)
            return (weights * turn_losses(tensors, output.features, turns)).sum(), output.buffers

        grads, _, buffers = gradient(loss, live)
        moved = {name: leaf - self.lr * grads[name] for name, leaf in live.items()}
        model = {**state["model"], **pick(moved, trained), **buffers}
        return {**state, "model": model, "rotation": pick(moved, state["rotation"])}
