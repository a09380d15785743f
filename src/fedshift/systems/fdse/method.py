"""FDSE: every client erases what is particular to its domain, and the rest is shared by consensus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedshift.core.arch import Arch
from fedshift.core.context import Context, Phase, ServerContext
from fedshift.core.method import Batch, Method
from fedshift.core.options import Finite, NonNegative, Positive, Rule, Whole, at_least
from fedshift.core.registry import method
from fedshift.core.tree import Tensors, Tree, drop, pick, uniform_mean, weighted_mean
from fedshift.systems.fdse import eraser as erasure
from fedshift.systems.fdse.consensus import agreed, gram_of
from fedshift.systems.fdse.surgery import with_erasers

OWN = "own "  # and a client: the slot of its erasers on the server


@method("fdse", paper="Federated Learning with Domain Shift Eraser", venue="CVPR", year=2025)
@dataclass(frozen=True)
class FDSE(Method):
    """A network of erasers (:mod:`fedshift.systems.fdse.eraser`), three ideas, each with a switch (A, B, C of Table 3).

    A, ``consensus``: a shared tensor moves along the least-norm mixture of the clients' unit updates,
    ``w <- w + mean_k |D_k| sum_k u_k D_k / |D_k|``, instead of FedAvg's mean. B, ``similarity``: a client's eraser becomes
    ``sum_j A_kj v_j`` with ``A = softmax(S S^T / tau)`` over the unit rows S of all clients' tensors; otherwise it stays
    the client's own. C, ``lam``: from the second round on the loss has ``lam sum_l w_l (mean (M - mu)^2 + (mean V - mean
    var)^2)``, which draws the statistics M, V of every eraser's output to those of the model received, with
    ``w = softmax(beta l)``; 0 leaves it out.

    Statistics of the outer normalisation are averaged, those of the inner one stay at home and are published once, at
    the end. An unseen client starts from the means over clients of both and of the erasers, and the adapter
    ``fdse-align`` goes on.

    Where the paper is silent or its code differs: no activation between the two normalisations, as in the code
    (``activation = true``: the ReLU of the paper's Eq. 3 and Table A7. Without it the outer normalisation undoes
    whatever the inner one's affine part does to its own half of the channels, so that half tells no domain); one
    problem for each tensor, as in the code (``granularity = "layer"`` joins weight and bias, ``"module"`` all that is
    shared, or all that is a client's own, in a block, which is what Eq. 8 and 9 call a layer); M and V start with the
    round's first batch (``start = "received"``: from the received statistics); the biases directly before a
    normalisation, which it cancels and whose update is noise, are left out (``bias = true`` keeps them as the code
    does: for AlexNet 24.86 instead of 24.84 MiB; the paper's 24.87 has room for one in every eraser too, which the
    code does not have). Not here: the released code's regulariser, another function than the paper's.
    """

    lam: NonNegative = 0.1
    tau: Positive = 0.5
    beta: Finite = 0.001
    consensus: bool = True
    similarity: bool = True
    granularity: Literal["tensor", "layer", "module"] = "tensor"
    start: Literal["batch", "received"] = "batch"
    expansion: Annotated[Whole, at_least(2, "there would be nothing to erase with")] = 2
    kernel: Annotated[Whole, Rule(lambda k: k > 0 and k % 2 == 1, "{name} must be odd and positive, not {value}")] = 3
    activation: bool = False
    bias: bool = False

    personal: ClassVar[bool] = True
    requires: ClassVar[frozenset[str]] = frozenset({"erasers"})
    reasons: ClassVar[Mapping[str, str]] = erasure.REASONS

    @classmethod
    def build(cls, backbone: Arch, options: Mapping[str, Any]) -> Arch:
        """Erasers in place of layers."""
        expansion, kernel = options.get("expansion", cls.expansion), options.get("kernel", cls.kernel)
        relu, bias = options.get("activation", cls.activation), options.get("bias", cls.bias)
        return with_erasers(backbone, expansion, kernel, relu, bias)

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """The erasers."""
        return self.arch.layers(erasure.Eraser)

    @cached_property
    def own(self) -> frozenset[str]:
        """What is a client's own and yet goes to the server, who mixes it with that of similar clients."""
        return erasure.entries(self.blocks, erasure.OWN)

    # ---- the client ----------------------------------------------------------------------------------------------------
    def private(self, ctx: Context) -> frozenset[str]:
        """The statistics of the inner normalisation, and what is tracked during a round."""
        return erasure.entries(self.blocks, erasure.AT_HOME)

    def begin(self, down: Tree, local: Tree) -> Tree:
        """The statistics received are what this round's features are drawn to."""
        state = super().begin(down, local)
        tracking = erasure.fresh_tracking(down["model"], self.blocks, self.start == "received")
        anchor = pick(down["model"], erasure.entries(self.blocks, erasure.ANCHORS))
        return {**state, "model": {**state["model"], **tracking}, "anchor": anchor}

    def loss(self, state: Tree, tensors: Tensors, batch: Batch, phase: Phase) -> tuple[Tensor, Tensors]:
        """Cross-entropy and the distance of this client's statistics from everybody's."""
        output = self.outputs(tensors, batch, phase)
        value = self.cross_entropy(output.logits, batch)
        if self.lam and output.buffers:  # a lone last image has no statistics
            penalty = erasure.inconsistency(output.aux, state["anchor"], self.blocks, self.beta)
            value = value + self.lam * ((state["now"]["round"] >= 1) * penalty)
        return value, output.buffers

    def settle(self, state: Tree | None, down: Tree, local: Tree, ctx: Context) -> tuple[Tree, Tree]:
        """The inner statistics are given away; their mean is an unseen client's start."""
        known = erasure.entries(self.blocks, erasure.STATISTICS)
        return {slot: pick(leaves, known) for slot, leaves in local.items()}, local

    # ---- the server ----------------------------------------------------------------------------------------------------
    def init_server(self, models: Mapping[str, Tensors], clients: tuple[str, ...], public: Tensor) -> Tree:
        """The shared part, and every client's erasers."""
        server = super().init_server(models, clients, public)
        own = pick(server["model"], self.own)
        return {"model": drop(server["model"], self.own), **{OWN + client: own for client in clients}}

    def broadcast(self, server: Tree, client: str, ctx: Context) -> Tree:
        """The shared part and one's own erasers; for an unseen client the mean of all."""
        if ctx.stage != "unseen":
            return {"model": {**drop(server["model"], self.private(ctx)), **server[OWN + client]}}
        mean = uniform_mean([leaves for slot, leaves in server.items() if slot.startswith(OWN)])
        return {"model": {**server["model"], **mean, **server.get("gifts", {})}}

    def aggregate(self, server: Tree, ups: Mapping[str, Tree], ctx: ServerContext) -> tuple[Tree, Tensors]:
        """Means of the statistics, consensus on the shared tensors, similarity among the erasers."""
        models = [up["model"] for up in ups.values()]
        uniform = torch.full((len(models),), 1 / len(models), dtype=torch.float64)
        shared = [drop(model, self.own) for model in models]
        learnt = [name for name in shared[0] if name in self.arch.trainable]
        merged = weighted_mean([drop(model, learnt) for model in shared], uniform)
        if self.consensus:
            merged |= self._agreed(server["model"], [pick(model, learnt) for model in shared])
        else:
            merged |= weighted_mean([pick(model, learnt) for model in shared], self.weights(ctx))
        own = [pick(model, self.own) for model in models]
        mixed = self._mixed(own) if self.similarity else own
        erasers = {OWN + client: leaves for client, leaves in zip(ups, mixed, strict=True)}
        return {**server, "model": {**server["model"], **merged}, **erasers}, {}

    def _agreed(self, start: Tensors, ends: list[Tensors]) -> Tensors:
        """Every tensor (or layer) along its least-norm direction."""
        grams = {name: gram_of(start[name], [end[name] for end in ends]) for name in ends[0]}
        group = self._groups(grams)
        order = list(dict.fromkeys(group.values()))
        problems = torch.stack([sum((grams[n] for n in grams if group[n] == own), torch.tensor(0.0)) for own in order])
        factors = dict(zip(order, agreed(problems), strict=True))
        moved: Tensors = {}
        for name in grams:
            moved[name] = start[name]
            for end, factor in zip(ends, factors[group[name]].to(start[name].dtype), strict=True):
                moved[name] = moved[name] + factor * (end[name] - start[name])
        return moved

    def _mixed(self, own: list[Tensors]) -> list[Tensors]:
        """Every client's tensors as a mixture of everybody's, by the cosine between them."""
        rows = {name: torch.stack([leaves[name].flatten() for leaves in own]) for name in own[0]}
        group = self._groups(rows)
        joined = {g: torch.cat([rows[name] for name in rows if group[name] == g], 1) for g in group.values()}
        weights = {g: attention(F.normalize(row.double(), dim=1), self.tau) for g, row in joined.items()}
        mixed = {name: (weights[group[name]] @ row.double()).to(row.dtype) for name, row in rows.items()}
        return [{name: mixed[name][k].view_as(leaf) for name, leaf in leaves.items()} for k, leaves in enumerate(own)]

    def _groups(self, names: Iterable[str]) -> dict[str, str]:
        """Which tensors are one problem: each its own, or those of a layer or of a block together."""
        if self.granularity == "tensor":
            return {name: name for name in names}
        layers = {name: name.rpartition(".")[0] for name in names}
        if self.granularity == "layer":
            return layers
        inside = {name: next((block for block in self.blocks if name.startswith(f"{block}.")), "") for name in layers}
        return {name: inside[name] or layer for name, layer in layers.items()}


def attention(unit: Tensor, tau: float) -> Tensor:
    """``softmax(S S^T / tau)``: how much every row listens to every other; the rows add up to one.

    >>> attention(torch.eye(2), tau=1e-3)
    tensor([[1., 0.],
            [0., 1.]])
    """
    return (unit @ unit.T / tau).softmax(1)
