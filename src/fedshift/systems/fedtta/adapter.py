"""FedTTA at a new client: steps on the loss that was learnt for it, until the predictions are surest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedshift.blocks.inner_step import stepped
from fedshift.blocks.losses import entropy
from fedshift.core.adapter import Adapter
from fedshift.core.arch import Output
from fedshift.core.grad import gradient
from fedshift.core.options import Count, NonNegative, Positive
from fedshift.core.registry import adapter
from fedshift.core.tree import Tensors, Tree, pick, zeros_like
from fedshift.systems.fedtta.learned_loss import RATE, SLOT, norms

AT_ONCE = 1 << 22  # numbers of images in one pass; only memory depends on it


@adapter(
    "fedtta",
    paper="UPFL: Unsupervised Personalized Federated Learning towards New Clients",
    venue="arXiv",
    year=2023,
)
@dataclass(frozen=True)
class LearnedAdaptation(Adapter):
    """One step of all weights on the learnt loss of the whole unlabelled set, then predict it.

    ``psi <- psi - rate clip( grad_psi mean_b |g(f(D_b; psi); phi)| )`` and weight decay, over batches D_b of ``batch-size``
    images in their order: the norm grows with the batch, so they are as large as in training. A short last one keeps its
    smaller norm. ``lr`` is by default the inner rate that training had come to with this model.

    FedTTA++ is ``steps = 50``: after every step the mean entropy of the predictions is measured; when it has not fallen for
    ``patience`` steps that is the end, and the state with the least entropy predicts. Candidates are the states after at
    least one step; ``include-initial`` adds the one before. (The authors' released code takes the entropy of the wrong
    variable and never adapts.) An entropy that is not a number is no improvement.

    The paper's networks have no BatchNorm. With it the step uses each batch's statistics, as training does (those of one
    image alone: the running ones); entropy and predictions use the running ones, which never move.

    Told of every prediction: ``uncertainty``, its entropy over that of a guess.
    """

    steps: Count = 1
    lr: NonNegative | None = None
    weight_decay: NonNegative = 1e-4
    clip: Positive = 10.0
    batch_size: Count = 64
    patience: Count = 1
    include_initial: bool = False

    requires: ClassVar[frozenset[str]] = frozenset({"model", SLOT})
    telemetry: ClassVar[tuple[str, ...]] = ("uncertainty",)

    def fit(self, state: Tree, x: Tensor, draws: Mapping[str, Tensor]) -> Tree:
        """Step, and keep the state whose predictions are surest."""
        if len(x) == 0:
            return state
        if self.steps == 1 and not self.include_initial:  # nothing to choose from
            return self.step(state, x)[0]
        best, waited = state, 0
        least = float(self.uncertainty(state, x)) if self.include_initial else math.inf
        for _ in range(self.steps):
            state, _ = self.step(state, x)
            found = float(self.uncertainty(state, x))
            best, least, waited = (state, found, 0) if found < least else (best, least, waited + 1)
            if waited >= self.patience:
                break
        return best

    def predict(self, state: Tree, x: Tensor, draws: Mapping[str, Tensor]) -> tuple[Output, Tree]:
        """The adapted model's answer, and how sure it is."""
        output = self.predict_with(state, x)
        doubt = entropy(output.logits) / math.log(max(output.logits.shape[1], 2))
        return output._replace(aux={**output.aux, "uncertainty": doubt.clamp(0, 1)}), state

    def step(self, state: Tree, x: Tensor) -> tuple[Tree, Tensor]:
        """The state after a step on these images, and the loss before it."""
        grads, value = self._slope(state, x)
        live = pick(state["model"], self.arch.trainable)
        moved = stepped(live, grads, self._rate(state), self.weight_decay, self.clip)
        return {**state, "model": {**state["model"], **moved}}, value

    def update(self, tensors: Tensors, x: Tensor) -> Tensors:
        """A step with derivatives, hence without clipping, as in training; the learnt loss is among the tensors."""
        state = {"model": tensors, SLOT: tensors}
        grads, _ = self._slope(state, x, differentiable=True)
        live = pick(tensors, self.arch.trainable)
        return {**tensors, **stepped(live, grads, self._rate(state), self.weight_decay, clip=None)}

    @torch.no_grad()
    def answers(self, state: Tree, x: Tensor) -> Tensor:
        """The logits of all images."""
        return torch.cat([self.predict_with(state, images).logits for images in x.split(self._block(x))])

    def uncertainty(self, state: Tree, x: Tensor) -> Tensor:
        """The mean entropy of the predictions, in nats."""
        return entropy(self.answers(state, x)).mean()

    def _slope(self, state: Tree, x: Tensor, differentiable: bool = False) -> tuple[Tensors, Tensor]:
        """The gradient of the learnt loss, and its value; blocks of batches one after the other."""
        live = pick(state["model"], self.arch.trainable)
        batches = -(-len(x) // self.batch_size)
        slope, total = zeros_like(live), x.new_zeros(())
        for images in x.split(self._block(x)):

            def loss(tensors: Tensors, images: Tensor = images) -> tuple[Tensor, None]:
                moved = {**state, "model": {**state["model"], **tensors}}
                logits = self.predict_with(moved, images, self.arch.has_batch_norm and len(images) > 1).logits
                return norms(state[SLOT], logits, self.batch_size).sum() / batches, None

            grads, value, _ = gradient(loss, live, differentiable)
            slope, total = {name: leaf + grads[name] for name, leaf in slope.items()}, total + value
        return slope, total

    def _block(self, x: Tensor) -> int:
        """How many images go through the network together: whole batches, and one where they have statistics."""
        batches = 1 if self.arch.has_batch_norm else AT_ONCE // (self.batch_size * x[0].numel())
        return self.batch_size * max(batches, 1)

    def _rate(self, state: Tree) -> Tensor | float:
        return state[SLOT][RATE] if self.lr is None else self.lr


def curve(adapter: LearnedAdaptation, state: Tree, x: Tensor, labels: Tensor | None = None) -> list[dict[str, float]]:
    """What happens during adaptation (the paper's Fig. 2): ``loss`` and ``entropy`` before it and after each step.

    All ``steps`` are taken from ``state`` (of ``adapter.init``), whatever ``patience`` says. With ``labels``, which serve no
    other purpose, ``accuracy`` is told too.
    """
    points: list[dict[str, float]] = []
    for _ in range(adapter.steps + 1):
        logits = adapter.answers(state, x)
        state, loss = adapter.step(state, x)
        point = {"loss": float(loss), "entropy": float(entropy(logits).mean())}
        if labels is not None:
            point["accuracy"] = float((logits.argmax(1) == labels).double().mean())
        points.append(point)
    return points
