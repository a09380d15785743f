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
        """One sample after the other."""
        logits, features = [], []
        for image, turns in zip(x.split(1), draws["turns"], strict=True):
            state = self._step(state, image, turns)
            output = self.predict_with(state, image)
            logits.append(output.logits)
            features.append(output.features)
        return Output(torch.cat(logits), torch.cat(features), {}, {}), state

    def _step(self, state: Tree, image: Tensor, turns: Tensor) -> Tree:
        trained = self.arch.trainable - self.arch.head
        live = {**pick(state["model"], trained), **state["rotation"]}
        batch_stats = self.arch.has_batch_norm and self.copies > 1
        if batch_stats:
            weights = torch.full_like(turns, 1 / self.copies, dtype=image.dtype)
        else:
            drawn, turns = turns, torch.arange(TURNS, device=image.device)
            weights = (drawn[:, None] == turns).to(image.dtype).mean(0)
        copies = turned(image.expand(len(turns), *image.shape[1:]), turns)

        def loss(tensors: Tensors) -> tuple[Tensor, Tensors]:
            model = {**state["model"], **pick(tensors, trained)}
            output = self.predict_with({**state, "model": model}, copies, batch_stats=batch_stats)
            return (weights * turn_losses(tensors, output.features, turns)).sum(), output.buffers

        grads, _, buffers = gradient(loss, live)
        moved = {name: leaf - self.lr * grads[name] for name, leaf in live.items()}
        model = {**state["model"], **pick(moved, trained), **buffers}
        return {**state, "model": model, "rotation": pick(moved, state["rotation"])}
