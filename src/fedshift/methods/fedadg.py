"""FedADG: features of every client are drawn to a distribution that a shared generator learns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedshift.blocks.mlp import fresh, perceptron
from fedshift.core.context import ClientInfo, Context, Phase, RandomSpec
from fedshift.core.method import Batch, Method
from fedshift.core.options import Count, NonNegative, NonNegativeInt, UnitInterval
from fedshift.core.registry import method
from fedshift.core.tree import Tensors, Tree, drop

G, D = "fedadg-generator", "fedadg-discriminator"
GENERATOR, DISCRIMINATOR = (
    frozenset(f"{network}.{layer}.{part}" for layer in (0, 1) for part in ("weight", "bias")) for network in (G, D)
)
SLOPE = 0.01  # torch's, of a leaky ReLU


@method("fedadg", paper="Federated Learning with Domain Generalization", venue="arXiv", year=2021)
@dataclass(frozen=True)
class FedADG(Method):
    """FedAvg with an adversary: encoder F, head C, a generator ``G(e, y)`` of features and a discriminator ``D(h, y)``.

    F, C and G travel and are averaged; D never leaves its client. Every batch takes three steps, in this order:

    1. D raises ``mean D(G(e, y), y)^2 + (1 - D(F(x), y))^2``;
    2. F and C lower ``(1 - weight) CE(C(F(x)), y) + weight mean (1 - D(F(x), y))^2``;
    3. G lowers ``mean (1 - D(G(e, y), y))^2``, through D and G, nothing detached (in a public copy G never learns).

    ``warm-up`` counts the first rounds, in which F and C are trained with cross-entropy alone and G and D rest; the authors'
    code has five such epochs, and repeats them in every round. ``weight = 0`` is FedAvg.

    G and D have one hidden layer with leaky ReLU, both are given the class as a one-hot vector, and D ends in a sigmoid. The
    e are uniform, as in the authors' code, one draw for steps 1 and 3. Left out of it: the frozen random projection in D,
    the ReLU after G (our features need not be positive), the one-hot vector's factor 0.6 or 0.7, label smoothing. D sees
    features in the mode of training (theirs: inference), which are those that step 2 moves.
    """

    weight: UnitInterval = 0.15
    warm_up: NonNegativeInt = 5
    noise: Count = 10
    hidden: Count = 512
    adversary_lr: NonNegative | None = None  # of G and D; default: [train] lr

    linear: ClassVar[bool] = True

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Cross-entropy alone, or all three."""
        if ctx.round < self.warm_up:
            return (Phase(name="warm-up"),)
        rule = self.train.optim(self.adversary_lr)
        everything = self.arch.trainable | GENERATOR | DISCRIMINATOR
        return (Phase(trainable=everything, groups=((GENERATOR, rule), (DISCRIMINATOR, rule))),)

    def draws(self, phase: Phase) -> dict[str, RandomSpec]:
        """What the generator makes features of."""
        return {} if phase.name == "warm-up" else {"noise": RandomSpec("uniform", (self.noise,))}

    # ---- the client ----------------------------------------------------------------------------------------------------
    def private(self, ctx: Context) -> frozenset[str]:
        """The discriminator."""
        return DISCRIMINATOR

    def init_local(self, model: Tensors, info: ClientInfo, ctx: Context) -> Tree:
        """A discriminator that knows nothing; an unseen client needs none."""
        if info.unseen:
            return {}
        sizes = (self.arch.feature_size + self.arch.classes, self.hidden, 1)
        return {"model": fresh(model[self.arch.parameters[0]], D, sizes)}

    def client_step(self, state: Tree, batch: Batch, phase: Phase) -> Tree:
        """One step for the discriminator, one for the network, which is logged, and one for the generator."""
        if phase.name == "warm-up":
            return super().client_step(state, batch, phase)
        for name, trained in ((D, DISCRIMINATOR), ("network", self.arch.trainable), (G, GENERATOR)):
            groups = tuple((names, rule) for names, rule in phase.groups if names <= trained)
            turn = replace(phase, name=name, trainable=trained, groups=groups)
            after = super().client_step(state, batch, turn)
            state = after if name == "network" else {**after, "log": state["log"]}
        return state

    def loss(self, state: Tree, tensors: Tensors, batch: Batch, phase: Phase) -> tuple[Tensor, Tensors]:
        """What this turn lowers."""
        if phase.name not in (D, "network", G):
            return super().loss(state, tensors, batch, phase)
        given = self._one_hot(batch)
        if phase.name == G:
            return (1 - self._judged(tensors, self._generated(tensors, batch), given)).square().mean(), {}
        output = self.outputs(tensors, batch, phase)
        mistaken = (1 - self._judged(tensors, output.features, given)).square().mean()
        if phase.name == D:
            return -mistaken - self._judged(tensors, self._generated(tensors, batch), given).square().mean(), {}
        return (1 - self.weight) * self.cross_entropy(output.logits, batch) + self.weight * mistaken, output.buffers

    def _one_hot(self, batch: Batch) -> Tensor:
        classes = torch.arange(self.arch.classes, device=batch["y"].device)
        return (batch["y"][:, None] == classes).to(batch["x"].dtype)

    def _generated(self, tensors: Tensors, batch: Batch) -> Tensor:
        return perceptron(tensors, G, torch.cat([batch["noise"], self._one_hot(batch)], dim=1), SLOPE)

    def _judged(self, tensors: Tensors, features: Tensor, given: Tensor) -> Tensor:
        return perceptron(tensors, D, torch.cat([features, given], dim=1), SLOPE).sigmoid()

    # ---- the server ----------------------------------------------------------------------------------------------------
    def init_server(self, models: Mapping[str, Tensors], clients: tuple[str, ...], public: Tensor) -> Tree:
        """The generator is averaged like everything else."""
        model = super().init_server(models, clients, public)["model"]
        sizes = (self.noise + self.arch.classes, self.hidden, self.arch.feature_size)
        return {"model": {**model, **fresh(model[self.arch.parameters[0]], G, sizes)}}

    def deployed(self, down: Tree, local: Tree) -> Tree:
        """The network alone."""
        return {"model": drop(super().deployed(down, local)["model"], GENERATOR | DISCRIMINATOR)}
