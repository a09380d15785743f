"""A generator of features on the server, trained on nothing but the clients' heads, and the methods that have one.

It makes a feature of a label and noise: linear, BatchNorm, ReLU, linear. Its tensors and its optimiser's memory are
server slots like any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from fedshift.core import rng
from fedshift.core.context import Context, Phase, RandomSpec, ServerContext
from fedshift.core.grad import gradient
from fedshift.core.method import Batch, Method
from fedshift.core.optim import Adam, Optim
from fedshift.core.options import Count, NonNegative, NonNegativeInt, Rule, Whole
from fedshift.core.tree import Tensors, Tree, drop, pick

INNER, OUTER, OUTER_BIAS = "inner.weight", "outer.weight", "outer.bias"
GAIN, SHIFT = "norm.weight", "norm.bias"
STATISTICS = ("norm.running_mean", "norm.running_var")
EPS = 1e-5  # torch's, in BatchNorm


def fresh(like: Tensor, classes: int, noise: int, hidden: int, features: int) -> Tensors:
    """An untrained generator, drawn as torch draws linear layers; another start of the run (``like``) draws others.

    The layer before BatchNorm has no bias, which would be cancelled.

    >>> {name: list(leaf.shape) for name, leaf in fresh(torch.ones(1), 2, 3, 8, 4).items() if "outer" in name}
    {'outer.weight': [4, 8], 'outer.bias': [4]}
    """
    start = float(like.flatten()[0])
    shapes = {INNER: (hidden, classes + noise), OUTER: (features, hidden), OUTER_BIAS: (features,)}

    def drawn(name: str, reads: int) -> Tensor:
        rows, *rest = shapes[name]
        u = rng.uniform(rng.seed_of("generator", name, start), torch.arange(rows), rest)
        return (2 * u - 1).to(like) / math.sqrt(reads)

    return {
        INNER: drawn(INNER, classes + noise),
        GAIN: like.new_ones(hidden),
        SHIFT: like.new_zeros(hidden),
        OUTER: drawn(OUTER, hidden),
        OUTER_BIAS: drawn(OUTER_BIAS, hidden),
        STATISTICS[0]: like.new_zeros(hidden),
        STATISTICS[1]: like.new_ones(hidden),
    }


def generated(tensors: Tensors, labels: Tensor, noise: Tensor, batch_stats: bool = False) -> tuple[Tensor, Tensors]:
    """Features of these labels, and BatchNorm's refreshed statistics if it took those of the batch.

    >>> generated(fresh(torch.ones(1), 2, 3, 8, 4), torch.tensor([0, 1]), torch.zeros(2, 3))[0].shape
    torch.Size([2, 4])
    """
    classes = tensors[INNER].shape[-1] - noise.shape[-1]
    given = (labels[:, None] == torch.arange(classes, device=labels.device)).to(noise.dtype)
    hidden = F.linear(torch.cat([given, noise], dim=1), tensors[INNER])
    refreshed: Tensors = {}
    if batch_stats:
        refreshed = {name: tensors[name].clone() for name in STATISTICS}
        mean, var = (refreshed[name] for name in STATISTICS)
        normed = F.batch_norm(hidden, mean, var, tensors[GAIN], tensors[SHIFT], training=True)
    else:  # written out: clients do this under vmap, which would go through batch_norm one by one
        mean, var = (tensors[name] for name in STATISTICS)
        normed = (hidden - mean) * (tensors[GAIN] * (var + EPS).rsqrt()) + tensors[SHIFT]
    return F.linear(normed.relu(), tensors[OUTER], tensors[OUTER_BIAS]), refreshed


def stacked_heads(models: Sequence[Tensors], head: frozenset[str]) -> Tensors:
    """The linear heads of many models as one: ``weight`` [models, classes, features] and ``bias`` [models, classes]."""
    weight = torch.stack([leaf for model in models for leaf in pick(model, head).values() if leaf.dim() == 2])
    biases = [leaf for model in models for leaf in pick(model, head).values() if leaf.dim() == 1]
    return {"weight": weight, "bias": torch.stack(biases) if biases else weight.new_zeros(weight.shape[:2])}


def log_likelihoods(heads: Tensors, features: Tensor, labels: Tensor) -> Tensor:
    """``log softmax(head_k(feature_b))[label_b]`` of every head and feature: ``[models, batch]``."""
    logits = torch.einsum("kcd,bd->kbc", heads["weight"], features) + heads["bias"][:, None]
    index = labels.expand(len(logits), -1)[..., None]
    return logits.log_softmax(-1).gather(-1, index)[..., 0]


def ensemble_loss(heads: Tensors, features: Tensor, labels: Tensor) -> Tensor:
    """``mean_b -log mean_k p_k(label_b | feature_b)``: all heads together as one mixture, each with the same weight.

    >>> heads = {"weight": torch.zeros(3, 4, 2), "bias": torch.zeros(3, 4)}
    >>> ensemble_loss(heads, torch.ones(5, 2), torch.zeros(5, dtype=torch.int64)).exp()
    tensor(4.)
    """
    likelihoods = log_likelihoods(heads, features, labels)
    return (math.log(len(likelihoods)) - likelihoods.logsumexp(0)).mean()


Objective = Callable[[Tensor, Tensor, Tensor], Tensor]
"""What a generator minimises: a function of features, their labels and their noise."""


def trained(
    tensors: Tensors,
    memory: Tensors,
    rule: Optim,
    objective: Objective,
    labels: Tensor,
    noise: Tensor,
    scale: float = 1.0,
) -> tuple[Tensors, Tensors, Tensor]:
    """A step for each row of ``labels`` [steps, batch]: the generator, its optimiser's memory, and the losses before."""
    losses = []
    for own, numbers in zip(labels, noise, strict=True):

        def loss(
            live: Tensors, current: Tensors = tensors, own: Tensor = own, numbers: Tensor = numbers
        ) -> tuple[Tensor, Tensors]:
            features, refreshed = generated({**current, **live}, own, numbers, batch_stats=True)
            return objective(features, own, numbers), refreshed

        live = drop(tensors, STATISTICS)
        grads, value, refreshed = gradient(loss, live)
        moved, memory = rule.update(live, grads, memory, scale)
        tensors = {name: {**moved, **refreshed}[name] for name in tensors}
        losses.append(value)
    return tensors, memory, torch.stack(losses) if losses else noise.new_zeros(0)


@dataclass(frozen=True)
class GeneratorMethod(Method):
    """FedAvg whose server also trains a generator on the uploaded heads, ``generator_steps`` in every round, with Adam.

    A subclass says what the generator minimises (:meth:`generator_loss`) and uses :meth:`imagined` in its loss; the
    generator goes down with the model, in inference mode and frozen. Sizes default to as many noise numbers as features
    and eight times as many hidden units.
    """

    generator_steps: NonNegativeInt = 5
    # features in a step
    generator_batch: Annotated[
        Whole, Rule(lambda size: size >= 2, "{name} must be at least 2, because of BatchNorm, not {value}")
    ] = 32
    generator_lr: NonNegative = 3e-4
    generator_decay: NonNegative = 0.0  # weight decay
    generator_noise: Count | None = None  # default: as many as features
    generator_hidden: Count | None = None  # default: eight times as many

    # ---- the client ----------------------------------------------------------------------------------------------------
    def draws(self, phase: Phase) -> dict[str, RandomSpec]:
        """Labels to imagine features of, and noise."""
        return {
            **super().draws(phase),
            "imagined": RandomSpec("integers", high=self.arch.classes),
            "imagined noise": RandomSpec("normal", (self.noise_size,)),
        }

    def imagined(self, state: Tree, labels: Tensor, noise: Tensor) -> Tensor:
        """Features that the frozen generator makes."""
        return generated(state["generator"], labels, noise)[0]

    def imagined_loss(self, state: Tree, tensors: Tensors, batch: Batch) -> Tensor:
        """The head's cross-entropy on generated features of uniform labels; it reaches nothing but the head."""
        features = self.imagined(state, batch["imagined"], batch["imagined noise"])
        return F.cross_entropy(self.arch.classify(tensors, features), batch["imagined"])

    def started(self, state: Tree) -> Tensor:
        """One, or zero in the first round, in which nobody has trained the generator yet."""
        return state["now"]["round"].clamp(max=1)

    # ---- the server ----------------------------------------------------------------------------------------------------
    @property
    def noise_size(self) -> int:
        """How many random numbers a feature is made of."""
        return self.generator_noise or self.arch.feature_size

    @property
    def rule(self) -> Adam:
        """The generator's optimiser."""
        return Adam(lr=self.generator_lr, weight_decay=self.generator_decay)

    def generator_loss(self, ups: Mapping[str, Tree]) -> Objective:
        """What the generator minimises in this round."""
        heads = stacked_heads([up["model"] for up in ups.values()], self.arch.head)
        return lambda features, labels, _: ensemble_loss(heads, features, labels)

    def generator_scale(self, ctx: ServerContext) -> float:
        """The factor on the generator's rate in this round."""
        return 1.0

    def init_server(self, models: Mapping[str, Tensors], clients: tuple[str, ...], public: Tensor) -> Tree:
        """An untrained generator and an optimiser that has seen nothing."""
        server = super().init_server(models, clients, public)
        like, size = server["model"][self.arch.parameters[0]], self.arch.feature_size
        tensors = fresh(like, self.arch.classes, self.noise_size, self.generator_hidden or 8 * size, size)
        return {**server, "generator": tensors, "generator memory": self.rule.memory(drop(tensors, STATISTICS))}

    def broadcast(self, server: Tree, client: str, ctx: Context) -> Tree:
        """The generator goes down with the model; who is only going to predict needs none."""
        down = super().broadcast(server, client, ctx)
        return down if ctx.ending else {**down, "generator": server["generator"]}

    def aggregate(self, server: Tree, ups: Mapping[str, Tree], ctx: ServerContext) -> tuple[Tree, Tensors]:
        """FedAvg, and some steps of the generator on the heads that came up."""
        tensors = server["generator"]
        steps, size = self.generator_steps, self.generator_batch
        ids = torch.arange(steps, device=tensors[INNER].device)
        labels = rng.integers(server_seed(ctx, "labels"), ids, self.arch.classes, (size,))
        noise = rng.normal(server_seed(ctx, "noise"), ids, (size, self.noise_size)).to(tensors[INNER].dtype)
        tensors, memory, losses = trained(
            tensors,
            server["generator memory"],
            self.rule,
            self.generator_loss(ups),
            labels,
            noise,
            self.generator_scale(ctx),
        )
        merged, metrics = super().aggregate(server, ups, ctx)
        mean = {"generator-loss": losses.mean().detach()}  # over its steps, each before the step
        return {**merged, "generator": tensors, "generator memory": memory}, {**metrics, **mean}


def server_seed(ctx: ServerContext, purpose: str) -> int:
    """The seed of one purpose of the server in this round."""
    return rng.seed_of(ctx.seed, "generator", purpose)
