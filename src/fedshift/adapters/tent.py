"""Tent: minimise the entropy of one's own predictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from fedshift.blocks.losses import entropy
from fedshift.core.adapter import Adapter
from fedshift.core.arch import Output
from fedshift.core.grad import gradient
from fedshift.core.optim import OPTIMISERS, SGD, Optim, Optimiser, clip_by_norm
from fedshift.core.options import BelowOne, Count, NonNegative, NonNegativeInt, Positive
from fedshift.core.registry import adapter
from fedshift.core.tree import Tensors, Tree, pick

BITS = 1.4426950408889634  # in a nat


@adapter("tent", paper="Tent: Fully Test-Time Adaptation by Entropy Minimization", venue="ICLR", year=2021)
@dataclass(frozen=True)
class Tent(Adapter):
    """One optimiser step per test batch on the mean prediction entropy, carried along the stream.

    ``params = "bn-affine"`` (the authors'): normalisation layers use the batch's statistics, and only their scale and
    shift are trained. ``params = "all"`` (FedTTA's baseline for networks without BatchNorm): all weights, running
    statistics if there are any. ``predict-when = "before"`` gives the outputs of the pass the step was taken on (the
    authors' choice), ``"after"`` predicts again. FedTTA's row is ``params = "all"``, ``predict-when = "after"``,
    ``bits = true``, ``clip = 10``, with SGD at FedAvg's rate (``train-lr = true``: ``[train] lr`` with the decay of the
    round that trained the model, in place of ``lr``) and the client's data as one batch (``batch-size = 0``).
    """

    lr: NonNegative = 1e-3
    train_lr: bool = False
    optimiser: Optimiser = "adam"
    momentum: BelowOne = 0.0
    weight_decay: NonNegative = 0.0
    batch_size: NonNegativeInt = 32  # 0: the whole stream at once
    steps: Count = 1
    params: Literal["bn-affine", "all"] = "bn-affine"
    predict_when: Literal["before", "after"] = "before"
    bits: bool = False  # entropy in bits scales the step by 1.44
    clip: Positive | None = None

    requires_arch: ClassVar[frozenset[str]] = frozenset({"batch-norm"})

    def requirements(self) -> frozenset[str]:
        """Only the affine variant needs BatchNorm."""
        return self.requires_arch if self.params == "bn-affine" else frozenset()

    @property
    def batch(self) -> int | None:
        """The entropy is that of a batch."""
        return self.batch_size or 1 << 62

    def at(self, lr: float) -> Tent:
        """At the method's rate, if that is wanted."""
        return replace(self, lr=lr) if self.train_lr else self

    def trained(self) -> frozenset[str]:
        """The names that move."""
        return self.arch.norm & self.arch.trainable if self.params == "bn-affine" else self.arch.trainable

    def init(self, deployed: Tree) -> Tree:
        """The optimiser's memory lasts for the stream."""
        return {**deployed, "optim": self._rule().memory(pick(deployed["model"], self.trained()))}

    def predict(self, state: Tree, x: Tensor, draws: Mapping[str, Tensor]) -> tuple[Output, Tree]:
        """Step, and answer with the outputs before or after it."""
        output, state = self._step(state, x)
        for _ in range(self.steps - 1):
            output, state = self._step(state, x)
        if self.predict_when == "after":
            output = self.predict_with(state, x, self._batch_stats(x))._replace(aux=output.aux)
        return output, state

    def _rule(self) -> Optim:
        if self.optimiser == "sgd":
            return SGD(self.lr, self.momentum, self.weight_decay)
        return OPTIMISERS[self.optimiser](lr=self.lr, weight_decay=self.weight_decay)

    def _batch_stats(self, x: Tensor) -> bool:
        return self.params == "bn-affine" and len(x) > 1

    def _step(self, state: Tree, x: Tensor) -> tuple[Output, Tree]:
        live = pick(state["model"], self.trained())

        def loss(tensors: Tensors) -> tuple[Tensor, tuple[Output, Tree]]:
            output = self.predict_with({**state, "model": {**state["model"], **tensors}}, x, self._batch_stats(x))
            value, output, notes = self._objective(state, tensors, output)
            return value, (output, notes)

        grads, _, (output, notes) = gradient(loss, live)
        output = output._replace(logits=output.logits.detach(), features=output.features.detach())
        if self.clip is not None:
            grads = clip_by_norm(grads, self.clip)
        moved, memory = self._rule().update(live, grads, state["optim"], 1.0)
        return output, self._stepped(state, {"model": {**state["model"], **moved}, "optim": memory}, notes)

    def _objective(self, state: Tree, tensors: Tensors, output: Output) -> tuple[Tensor, Output, Tree]:
        """What a step lowers, the output (with telemetry), and what is remembered of this batch."""
        return entropy(output.logits).mean() * (BITS if self.bits else 1.0), output, {}

    def _stepped(self, state: Tree, moved: Tree, notes: Tree) -> Tree:
        """The state after a step."""
        return {**state, **moved}
