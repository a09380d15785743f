"""ODPFL-HN: a hyper-network makes every client's weights from what its unlabelled images look like."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedshift.blocks.mlp import drawn_by_torch, fresh, perceptron
from fedshift.core.context import Context, Phase, ServerContext
from fedshift.core.grad import gradient
from fedshift.core.method import Batch, Method
from fedshift.core.options import Count, NonNegative
from fedshift.core.registry import method
from fedshift.core.tree import Tensors, Tree, pick, weighted_mean, zeros_like

TRUNK = "hyper-trunk"
ENCODER = "encoder"  # of images as vectors
HIDDEN = 200  # its only hidden layer
CHANNELS = (32, 64)  # of the encoder that convolves
HALVINGS = 4  # what two poolings leave of a side
LAYERS = 4  # of the trunk: one, and three more with ReLU before each


@method("odpfl-hn", paper="On-Demand Unlabeled Personalized Federated Learning", venue="arXiv", year=2021)
@dataclass(frozen=True)
class ODPFL(Method):
    """Client k describes itself by ``e_k = mean_x encoder(x)`` and trains what the hyper-network makes of that.

    ``psi_k = base + W h(e_k)``, where h is a perceptron (32 -> 100, three times [ReLU, 100 -> 100]) and base and W are the
    bias and the weight of one linear output for each tensor of the network. From psi_k the client takes its local steps to
    ``psi~_k``. With ``Delta_k = psi_k - psi~_k`` the hyper-network and the encoder take a step of SGD along the mean over
    clients of the gradient of ``<Delta_k, psi_k>`` (Delta held fixed), at their own rates times ``[train] lr-decay``. An
    unseen client sends its unlabelled images through the encoder and is served by its psi, without adaptation.

    What travels: encoder and hyper-network go down, so a round is one round trip; up go psi~_k, e_k and the gradient of the
    encoder, for which the client's images are needed. The hyper-network's gradient follows from psi~_k and e_k, and the
    server takes it for all clients at once: the same update as if it had been sent, for a hundredth of the bytes.

    Encoder and start are those of FedTTA's released code: two 5x5 convolutions of 32 and 64 channels with pooling and a
    linear layer, or, where the network has no convolution, one hidden layer of 200; every layer starts as torch's do. So
    the first psi has weights of one scale in all layers. ``start = "network"`` begins with W = 0 and the run's own
    initialisation as base, and with an h that keeps clients apart (``drawn``), so that everybody starts from the same
    network as other methods do.

    Our choices, where paper and code are silent: BatchNorm statistics are averaged as in FedAvg. Deployed clients are
    described by their training images, unseen clients by the images they are tested on, anew for each stream that shows
    a part of them or changes them; their artefacts are of all their test images as they are. No spectral norm. The rates
    are FedTTA's for CIFAR-10 (MNIST: 0.5 and 0.5).
    """

    hyper_lr: NonNegative = 0.5
    encoder_lr: NonNegative = 0.1
    embedding: Count = 32
    hidden: Count = 100
    start: Literal["released", "network"] = "released"

    personal: ClassVar[bool] = True
    revision: ClassVar[int] = 1
    common: ClassVar[frozenset[str]] = frozenset({"hyper", "encoder", "base"})

    # ---- the client ----------------------------------------------------------------------------------------------------
    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Describe oneself, train, and look back for the encoder's sake."""
        return (_look("describe"), Phase(), _look("look-back"))

    def last_phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Describe oneself, who has training images by those and an unseen client by all it has."""
        return (_look("describe"), _look("describe-unseen", labelled=False))

    def begin(self, down: Tree, local: Tree) -> Tree:
        """Nothing is known of the client's images yet."""
        nothing = down["model"][self.arch.parameters[0]].new_zeros(())
        seen = {"sum": nothing.new_zeros(self.embedding), "count": nothing}
        state = {**super().begin(down, local), "seen": seen, "base": self._base(down)}
        state = {**state, "hyper": down["hyper"], "encoder": down["encoder"], "slope": zeros_like(down["encoder"])}
        return self._personal(state)

    def fold(self, state: Tree, batch: Batch, phase: Phase) -> Tree:
        """Add to the description and form the model anew, or add to the encoder's gradient."""
        x = self.arch.normalise(batch["x"])
        if phase.name == "look-back":
            return {**state, "slope": self._looked_back(state, x)}
        counts = torch.ones_like(state["seen"]["count"])
        if not phase.labelled:  # test images are an unseen client's only ones, and nobody else's business
            counts = (state["now"]["samples"] == 0).to(counts.dtype)
        total = state["seen"]["sum"] + counts * embedded(state["encoder"], x).sum(0)
        seen = {"sum": total, "count": state["seen"]["count"] + counts * len(x)}
        return self._personal({**state, "seen": seen})

    def _personal(self, state: Tree) -> Tree:
        """With the model that belongs to the description so far."""
        own = made(state["hyper"], state["base"], _description(state))
        return {**state, "model": {**state["model"], **own}}

    def _looked_back(self, state: Tree, x: Tensor) -> Tensors:
        """The gradient of ``<Delta, psi(e)>`` through the embeddings of these images."""
        trained, e = pick(state["model"], self.arch.trainable), _description(state)
        towards, _, _ = gradient(lambda t: (pull(state["hyper"], state["base"], t["e"], trained), None), {"e": e})
        share = towards["e"] / state["seen"]["count"]
        slope, _, _ = gradient(lambda t: ((embedded(t, x).sum(0) * share).sum(), None), state["encoder"])
        return {name: leaf + slope[name] for name, leaf in state["slope"].items()}

    def finish(self, state: Tree, down: Tree, local: Tree) -> tuple[Tree, Tree]:
        """The trained model, who it was made for, and the encoder's gradient."""
        up, kept = super().finish(state, down, local)
        return {**up, "embedding": {"mean": _description(state)}, "encoder": state["slope"]}, kept

    # ---- the server ----------------------------------------------------------------------------------------------------
    def init_server(self, models: Mapping[str, Tensors], clients: tuple[str, ...], public: Tensor) -> Tree:
        """The outputs' biases are the model."""
        server = super().init_server(models, clients, public)
        base, sizes = self._base(server), (self.embedding, *[self.hidden] * LAYERS)
        like = base[self.arch.parameters[0]]
        encoder = fresh_encoder(like, self.arch.input_shape, self.embedding, self.arch.has_convolution)
        hyper, base = fresh_hypernetwork(base, sizes) if self.start == "network" else torchs_hypernetwork(base, sizes)
        return {"model": {**server["model"], **base}, "hyper": hyper, "encoder": encoder}

    def broadcast(self, server: Tree, client: str, ctx: Context) -> Tree:
        """Everything that makes a model of a client."""
        return {**super().broadcast(server, client, ctx), "hyper": server["hyper"], "encoder": server["encoder"]}

    def aggregate(self, server: Tree, ups: Mapping[str, Tree], ctx: ServerContext) -> tuple[Tree, Tensors]:
        """A step of the hyper-network towards what the clients made of its models, and one of the encoder."""
        merged, metrics = super().aggregate(server, ups, ctx)
        base, hyper, encoder = self._base(server), server["hyper"], server["encoder"]
        es = torch.stack([up["embedding"]["mean"] for up in ups.values()])
        trained = {name: torch.stack([up["model"][name] for up in ups.values()]) for name in base}
        shares = self.weights(ctx)

        def mean_pull(t: Tensors) -> tuple[Tensor, None]:
            return (shares.to(es) * pull(t, pick(t, base), es, trained)).sum(), None

        slope, _, _ = gradient(mean_pull, {**hyper, **base})
        decay = ctx.decay(self.train)
        moved = {name: leaf - self.hyper_lr * decay * slope[name] for name, leaf in {**hyper, **base}.items()}
        back = weighted_mean([up["encoder"] for up in ups.values()], shares)
        return {
            "model": {**merged["model"], **pick(moved, base)},
            "hyper": pick(moved, hyper),
            "encoder": {name: leaf - self.encoder_lr * decay * back[name] for name, leaf in encoder.items()},
        }, metrics

    def _base(self, tree: Tree) -> Tensors:
        return pick(tree["model"], self.arch.trainable)


def _look(name: str, labelled: bool = True) -> Phase:
    """A look at all training images, or at those of somebody who has no others."""
    part: Literal["train", "test"] = "train" if labelled else "test"
    return Phase(name=name, kind="fold", batch_stats=False, labelled=labelled, data=part)


def _description(state: Tree) -> Tensor:
    """The mean embedding of what was looked at."""
    return state["seen"]["sum"] / state["seen"]["count"].clamp(min=1)


# ---- the hyper-network: a perceptron (the trunk) that reads a description of a client, and a matrix for every tensor ----
def fresh_encoder(like: Tensor, shape: Sequence[int], size: int, convolves: bool = True) -> Tensors:
    """An untrained encoder of images of this shape into ``size`` numbers; very small images are not convolved.

    >>> sum(leaf.numel() for leaf in fresh_encoder(torch.ones(1), (3, 32, 32), 32).values())
    184800
    >>> list(fresh_encoder(torch.ones(1), (1, 28, 28), 32, convolves=False))[:2]
    ['encoder.0.weight', 'encoder.0.bias']
    """
    channels, height, width = shape
    cells = (height // HALVINGS) * (width // HALVINGS)
    if not convolves or not cells:
        layers: dict[str, tuple[int, ...]] = {"0": (HIDDEN, math.prod(shape)), "1": (size, HIDDEN)}
        return drawn_by_torch(like, {f"{ENCODER}.{layer}": sizes for layer, sizes in layers.items()})
    first, second = CHANNELS
    layers = {"conv.0": (first, channels, 5, 5), "conv.1": (second, first, 5, 5), "out": (size, second * cells)}
    return drawn_by_torch(like, layers)


def embedded(tensors: Tensors, x: Tensor) -> Tensor:
    """Two padded convolutions with ReLU and pooling and a linear layer, or a perceptron.

    >>> embedded(fresh_encoder(torch.ones(1), (1, 28, 28), 32), torch.rand(5, 1, 28, 28)).shape
    torch.Size([5, 32])
    """
    if "out.weight" not in tensors:
        return perceptron(tensors, ENCODER, x.flatten(1))
    for layer in ("conv.0", "conv.1"):
        x = F.conv2d(x, tensors[f"{layer}.weight"], tensors[f"{layer}.bias"], padding=2)
        x = F.max_pool2d(x, 2).relu()  # the maximum first: the same numbers, a quarter of the ReLUs
    return F.linear(x.flatten(1), tensors["out.weight"], tensors["out.bias"])


def fresh_hypernetwork(base: Tensors, sizes: Sequence[int]) -> tuple[Tensors, Tensors]:
    """A trunk of these sizes and an output for each tensor of ``base``, all zero: at first everybody has ``base``."""
    like = next(iter(base.values()))
    outputs = {output_of(name): like.new_zeros(leaf.numel(), sizes[-1]) for name, leaf in base.items()}
    return {**fresh(like, TRUNK, sizes), **outputs}, base


def torchs_hypernetwork(base: Tensors, sizes: Sequence[int]) -> tuple[Tensors, Tensors]:
    """The same, every layer as torch draws it, the biases of the outputs, which take the place of ``base``, too.

    >>> hyper, base = torchs_hypernetwork({"w": torch.ones(2, 3)}, (4, 5, 25))
    >>> base["w"].shape, float(base["w"].abs().max()) < 0.2
    (torch.Size([2, 3]), True)
    """
    like = next(iter(base.values()))
    trunk = {f"{TRUNK}.{i}": (writes, reads) for i, (reads, writes) in enumerate(pairwise(sizes))}
    drawn = drawn_by_torch(like, {output_of(name): (leaf.numel(), sizes[-1]) for name, leaf in base.items()})
    outputs = {output_of(name): drawn[f"{output_of(name)}.weight"] for name in base}
    biases = {name: drawn[f"{output_of(name)}.bias"].view_as(leaf) for name, leaf in base.items()}
    return {**drawn_by_torch(like, trunk), **outputs}, biases


def output_of(name: str) -> str:
    """What the matrix that makes a target tensor is called."""
    return f"output for {name}"


def made(hyper: Tensors, base: Tensors, embedding: Tensor) -> Tensors:
    """The tensors of a client with this embedding [size], or of many [clients, size]: ``base + matrix @ trunk``.

    >>> base = {"w": torch.ones(2, 3)}
    >>> made(fresh_hypernetwork(base, (4, 5, 5))[0], base, torch.rand(7, 4))["w"].shape
    torch.Size([7, 2, 3])
    """
    hidden, many = perceptron(hyper, TRUNK, embedding), embedding.shape[:-1]
    return {
        name: leaf + F.linear(hidden, hyper[output_of(name)]).reshape(*many, *leaf.shape) for name, leaf in base.items()
    }


def pull(hyper: Tensors, base: Tensors, embedding: Tensor, trained: Tensors) -> Tensor:
    """``<made - trained, made>`` with the difference held fixed, for each client.

    Its gradient with respect to anything ``made`` depends on is the vector-Jacobian product with that difference.

    >>> base = {"w": torch.ones(2)}
    >>> pull(fresh_hypernetwork(base, (4, 5))[0], base, torch.ones(4), {"w": torch.tensor([1.0, 0.5])})
    tensor(0.5000)
    """
    products = [
        ((leaf - trained[name]).detach() * leaf).reshape(*embedding.shape[:-1], -1).sum(-1)
        for name, leaf in made(hyper, base, embedding).items()
    ]
    return torch.stack(products).sum(0)
