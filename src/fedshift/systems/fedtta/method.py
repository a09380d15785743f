"""FedTTA: learn, beside the model, the loss that a new client without labels can adapt it with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedshift.blocks.inner_step import stepped
from fedshift.core.context import Context, Phase
from fedshift.core.grad import gradient
from fedshift.core.method import Batch, Method
from fedshift.core.optim import SGD, clip_by_norm
from fedshift.core.options import BelowOne, NonNegative, Positive
from fedshift.core.registry import method
from fedshift.core.tree import Tensors, Tree, drop, pick
from fedshift.systems.fedtta.learned_loss import NAMES, RATE, SLOT, fresh, norms


@method(
    "fedtta",
    paper="UPFL: Unsupervised Personalized Federated Learning towards New Clients",
    venue="arXiv",
    year=2023,
)
@dataclass(frozen=True)
class FedTTA(Method):
    """FedAvg of a model ``psi`` and of a network ``phi`` on its logits, trained through a step without labels.

    On every batch (X, Y), with ``l = |g(f(X; psi); phi)|`` (the norm over the batch of one number per image):

        ``psi~ = psi - inner_lr grad_psi l``,  ``L = CE(f(X; psi~), Y) + mu KL( f(X; psi_received) | f(X; psi) )``

    and one step of both psi and phi on L, through the first step (second order). ``mu = 0`` is FedTTA, above it
    FedTTA-Prox, whose teacher, the received model, is a constant. Deployed: the plain ``model``, and phi with the inner
    rate in slot ``learned-loss``, with which the adapter ``fedtta`` takes the first step at test time (with more
    ``steps``: FedTTA++). psi has ``[train]``'s optimiser, so ``inner-lr = 0`` is FedAvg; phi has SGD with momentum, fresh in
    every round, and ``[train]``'s weight decay.

    From the authors' code: ``clip`` for psi's and for phi's gradient each (instead of ``[train] clip``), weight decay in the
    inner step, no clipping there, ``lr-decay`` on all three rates, the KL divergence's direction. The paper averages
    uniformly (``[train] weights = "uniform"``). Default rates are its CIFAR-10 ones. The norm is rooted at 1e-12, because
    that of a constant zero has no second derivative.

    The paper's networks have no BatchNorm. With it all three passes use the batch's statistics, and psi~'s pass refreshes
    the running ones. Right after one more local round (``[evaluate] after-local``) the deployed rate is that of round one.
    """

    mu: NonNegative = 0.0
    inner_lr: NonNegative = 0.5
    inner_weight_decay: NonNegative = 1e-4
    loss_lr: NonNegative = 0.005
    loss_momentum: BelowOne = 0.9
    clip: Positive = 10.0  # the norm of each of the two gradients

    linear: ClassVar[bool] = True
    provides: ClassVar[frozenset[str]] = frozenset({"model", SLOT})

    def _loss_rule(self) -> SGD:
        return SGD(self.loss_lr, self.loss_momentum, self.train.weight_decay)

    def init_server(self, models: Mapping[str, Tensors], clients: tuple[str, ...], public: Tensor) -> Tree:
        """The network on logits travels with the model."""
        server = super().init_server(models, clients, public)
        head = next(iter(pick(server["model"], self.arch.head).values()))
        return {**server, "model": {**server["model"], **fresh(head, self.arch.classes)}}

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Both are trained, each in its own way."""
        own = frozenset(NAMES)
        return (Phase(trainable=self.arch.trainable | own, groups=((own, self._loss_rule()),)),)

    def begin(self, down: Tree, local: Tree) -> Tree:
        """Remember what was received, if there is a term for it."""
        state = super().begin(down, local)
        return {**state, "received": drop(down["model"], NAMES)} if self.mu else state

    def loss(self, state: Tree, tensors: Tensors, batch: Batch, phase: Phase) -> tuple[Tensor, Tensors]:
        """Cross-entropy after a step on the learnt loss."""
        psi = pick(tensors, self.arch.trainable)

        def personal(live: Tensors) -> tuple[Tensor, Tensor]:
            logits = self.outputs({**tensors, **live}, batch, phase).logits
            return norms(tensors, logits, len(logits)).sum(), logits

        grads, _, before = gradient(personal, psi, differentiable=True)
        rate = self.inner_lr * state["now"]["decay"]
        adapted = stepped(psi, grads, rate, self.inner_weight_decay, clip=None)
        output = self.outputs({**tensors, **adapted}, batch, phase)
        value = self.cross_entropy(output.logits, batch)
        if self.mu:
            teacher = self.outputs(state["received"], batch, phase).logits.log_softmax(1)
            apart = (teacher.exp() * (teacher - before.log_softmax(1))).sum(1).mean()
            value = value + self.mu * apart
        return value, output.buffers

    def transform_grads(self, state: Tree, grads: Tensors, phase: Phase) -> Tensors:
        """The gradients of model and loss are clipped, each for itself."""
        parts = [clip_by_norm(pick(grads, names), self.clip) for names, _ in self.groups(phase)]
        return {name: leaf for part in parts for name, leaf in part.items()}

    def broadcast(self, server: Tree, client: str, ctx: Context) -> Tree:
        """Model and loss; who is about to serve with them also learns the rate they were trained with."""
        down = super().broadcast(server, client, ctx)
        if not ctx.ending:
            return down
        return {**down, SLOT: self._rate(down["model"], ctx.decay(self.train))}

    def deployed(self, down: Tree, local: Tree) -> Tree:
        """The model before any adaptation, and what it can be adapted with."""
        whole = super().deployed(down, local)["model"]
        rate = down.get(SLOT) or self._rate(whole, 1.0)
        return {"model": drop(whole, NAMES), SLOT: {**pick(whole, NAMES), **rate}}

    def _rate(self, model: Tensors, decay: float) -> Tensors:
        return {RATE: model[NAMES[0]].new_tensor(self.inner_lr * decay)}
