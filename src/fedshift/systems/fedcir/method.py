"""FedCiR: a stochastic representation that is informative about the class and, given the class, the same everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedshift.blocks import gaussians
from fedshift.blocks.generator import GeneratorMethod, generated, server_seed
from fedshift.blocks.stochastic_encoder import StochasticMethod
from fedshift.core import rng
from fedshift.core.context import Context, Phase, ServerContext
from fedshift.core.method import Batch, Method
from fedshift.core.options import Count, NonNegative, Positive
from fedshift.core.registry import method
from fedshift.core.tree import Tensors, Tree


@method(
    "fedcir",
    paper="FedCiR: Client-Invariant Representation Learning for Federated Non-IID Features",
    venue="IEEE Transactions on Mobile Computing",
    year=2024,
)
@dataclass(frozen=True)
class FedCiR(StochasticMethod, GeneratorMethod):
    """FedAvg with a stochastic encoder, a generator ``G(y, e)`` of representations and a Gaussian of every class.

    Client, with ``z = m(x) + s(x) noise`` and uniform labels y'; both regularisers act from the second round on:

        ``CE(head(z), y) + reg CE(head(G(y', e)), y') + align mean sum_dims KL( N(m(x), s(x)^2) | N(m_g[y], s_g[y]^2) )``

    Server, in every round: ``generator-steps`` with Adam on ``mean -log mean_k softmax(head_k(G(y, e)))[y]`` over the heads
    that came up and uniform labels (``blocks/generator.py``); FedAvg; then ``m_g``, ``s_g`` are the most likely Gaussians of
    ``class-samples`` generated representations of each class (inference mode, deviation at least ``floor``).

    ``align = 0`` is FedReg, and the Gaussians stay on the server; ``reg = 0`` is FedAlign, and the generator does. Both zero
    is FedAvg with a stochastic encoder. ``reg`` reaches the head only, ``align`` the encoder only.

    The paper averages uniformly (``[train] weights = "uniform"``). It prints a deviation of y where one of x is meant and a
    logit where a probability is; the sum over dimensions, Adam with its rate, sizes, ``class-samples`` and ``floor`` are
    not stated and ours. The representation has as many dimensions as the backbone's features.
    """

    reg: NonNegative = 0.5
    align: NonNegative = 5e-7
    class_samples: Count = 1000
    floor: Positive = 1e-3

    def loss(self, state: Tree, tensors: Tensors, batch: Batch, phase: Phase) -> tuple[Tensor, Tensors]:
        """Cross-entropy of a sample, of a generated representation, and the distance from the class's Gaussian."""
        output = self.outputs(tensors, batch, phase)
        value = self.cross_entropy(output.logits, batch)
        if self.reg:
            value = value + self.started(state) * self.reg * self.imagined_loss(state, tensors, batch)
        if self.align:
            own = gaussians.of_classes(state["gaussians"], batch["y"])
            apart = gaussians.divergence(output.aux["mean"], output.aux["deviation"], *own)
            value = value + self.started(state) * self.align * apart.mean()
        return value, output.buffers

    def init_server(self, models: Mapping[str, Tensors], clients: tuple[str, ...], public: Tensor) -> Tree:
        """Standard Gaussians, until there is something to fit them to."""
        server = super().init_server(models, clients, public)
        like, shape = server["model"][self.arch.parameters[0]], (self.arch.classes, self.arch.feature_size)
        return {**server, "gaussians": {"mean": like.new_zeros(shape), "deviation": like.new_ones(shape)}}

    def broadcast(self, server: Tree, client: str, ctx: Context) -> Tree:
        """The model and what its regularisers need."""
        down = super().broadcast(server, client, ctx)
        if ctx.ending:
            return down
        needed = {slot for slot, weight in (("generator", self.reg), ("gaussians", self.align)) if weight}
        return {"model": down["model"], **{slot: server[slot] for slot in sorted(needed)}}

    def aggregate(self, server: Tree, ups: Mapping[str, Tree], ctx: ServerContext) -> tuple[Tree, Tensors]:
        """FedAvg, and of the generator and the Gaussians of what it makes now those that a regulariser needs."""
        if not self.reg and not self.align:
            return Method.aggregate(self, server, ups, ctx)  # nobody asks for a generator
        merged, metrics = super().aggregate(server, ups, ctx)
        if not self.align:
            return merged, metrics
        fitted = self.class_gaussians(merged["generator"], server_seed(ctx, "classes"))
        return {**merged, "gaussians": fitted}, metrics

    def class_gaussians(self, generator: Tensors, seed: int) -> Tensors:
        """Mean and deviation of every class's generated representations; one class at a time, for the memory's sake."""
        like = next(iter(generator.values()))
        count, found = self.class_samples, []
        for label in range(self.arch.classes):
            ids = torch.arange(count, device=like.device) + label * count
            noise = rng.normal(seed, ids, (self.noise_size,)).to(like.dtype)
            made, _ = generated(generator, torch.full_like(ids, label), noise)
            found.append(gaussians.fitted(made, self.floor))
        return {name: torch.stack([one[name] for one in found]) for name in ("mean", "deviation")}
