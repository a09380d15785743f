"""EATA: Tent on samples that are reliable and new, held near the start where it matters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedshift.adapters.tent import Tent
from fedshift.blocks.losses import entropy
from fedshift.core.arch import Output
from fedshift.core.grad import gradient
from fedshift.core.options import NonNegative, NonNegativeInt, UnitInterval
from fedshift.core.registry import adapter
from fedshift.core.tree import Tensors, Tree, pick, zeros_like


@adapter("eata", paper="Efficient Test-Time Model Adaptation without Forgetting", venue="ICML", year=2022)
@dataclass(frozen=True)
class EfficientTent(Tent):
    """Tent's step on a selection, weighted, with a pull towards the deployed weights.

    A sample is kept if its entropy H is below ``E_0 = margin ln C`` and its prediction is not already known: the cosine to
    the moving average of kept predictions is below ``redundancy``. Kept samples weigh ``exp(E_0 - H)``. The loss has
    ``fisher-weight sum F (w - w_0)^2`` beside it, where F is the mean squared gradient on the client's own training images
    under the model's own labels, taken before deployment (a client without training data has F = 0).

    A batch of which nothing is kept takes no step at all. The share that is kept is reported with the scores, because with
    ten classes and the authors' ``redundancy = 0.05`` it is close to nothing after the first batch.
    """

    margin: NonNegative = 0.4
    redundancy: NonNegative = 0.05
    memory: UnitInterval = 0.9  # of the moving average
    fisher_weight: NonNegative = 2000.0
    fisher_samples: NonNegativeInt = 2000

    telemetry: ClassVar[tuple[str, ...]] = ("kept",)

    def prepare(self, deployed: Tree, batches: Iterable[Mapping[str, Tensor]]) -> Tree:
        """Which weights matter: the mean over batches of the squared gradient."""
        live = pick(deployed["model"], self.trained())
        total, count, seen = zeros_like(live), 0, 0
        for batch in batches:
            if seen >= self.fisher_samples:
                break

            def loss(tensors: Tensors, x: Tensor = batch["x"]) -> tuple[Tensor, None]:
                tree = {**deployed, "model": {**deployed["model"], **tensors}}
                logits = self.predict_with(tree, x, self._batch_stats(x)).logits
                return F.cross_entropy(logits, logits.argmax(1)), None

            grads, _, _ = gradient(loss, live)
            total = {name: leaf + grads[name].square() for name, leaf in total.items()}
            count, seen = count + 1, seen + len(batch["x"])
        return {"fisher": {name: leaf / max(count, 1) for name, leaf in total.items()}}

    def init(self, deployed: Tree) -> Tree:
        """Nothing is known yet, and the deployed weights are the ones to stay near."""
        state = super().init(deployed)
        anchor = pick(deployed["model"], self.trained())
        like = next(iter(anchor.values()))
        known = {"mean": like.new_zeros(self.arch.classes), "seen": like.new_zeros(())}
        return {**state, "anchor": anchor, "fisher": deployed.get("fisher", zeros_like(anchor)), "known": known}

    def _objective(self, state: Tree, tensors: Tensors, output: Output) -> tuple[Tensor, Output, Tree]:
        uncertainty, limit = entropy(output.logits), self.margin * math.log(self.arch.classes)
        p, known = output.logits.detach().softmax(1), state["known"]
        familiar = F.cosine_similarity(p, known["mean"][None], dim=1).abs() >= self.redundancy
        kept = ((uncertainty.detach() < limit) & ~(familiar & (known["seen"] > 0))).to(p.dtype)
        count = kept.sum()
        weight = kept * (limit - uncertainty.detach()).exp() / count.clamp(min=1)
        drift = [
            (state["fisher"][name] * (leaf - state["anchor"][name]).square()).sum() for name, leaf in tensors.items()
        ]
        value = (weight * uncertainty).sum() + self.fisher_weight * torch.stack(drift).sum()
        mean = (kept[:, None] * p).sum(0) / count.clamp(min=1)
        moved = torch.where(known["seen"] > 0, self.memory * known["mean"] + (1 - self.memory) * mean, mean)
        seen = torch.where(count > 0, torch.ones_like(known["seen"]), known["seen"])
        notes = {"known": {"mean": moved, "seen": seen}, "batch": {"kept": count}}
        return value, output._replace(aux={"kept": kept}), notes

    def _stepped(self, state: Tree, moved: Tree, notes: Tree) -> Tree:
        """Nothing moves if nothing was kept: momentum would move it without a reason."""
        some = notes["batch"]["kept"] > 0
        after = {**moved, "known": notes["known"]}
        chosen = {
            slot: {name: torch.where(some, leaf, state[slot][name]) for name, leaf in leaves.items()}
            for slot, leaves in after.items()
        }
        return {**state, **chosen}
