"""ODPFL-HN: a hyper-network makes every client's weights from what its unlabelled images look like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedshift.core.checks import not_negative, positive
from fedshift.core.grad import gradient
from fedshift.core.hypernetwork import embedded, fresh_encoder, fresh_hypernetwork, made, pull
from fedshift.core.method import Batch, Method, Now, Phase
from fedshift.core.registry import method
from fedshift.core.tree import Tensors, Tree, pick, weighted_mean, zeros_like

LAYERS = 4  # of the trunk: one, and three more with ReLU before each


@method("odpfl-hn", paper="On-Demand Unlabeled Personalized Federated Learning", venue="arXiv", year=2021)
@dataclass(frozen=True)
class ODPFL(Method):
    """Client k describes itself by ``e_k = mean_x encoder(x)`` and trains what the hyper-network makes of that.

    ``psi_k = base + W h(e_k)``, where h is a perceptron (32 -> 100, three times [ReLU, 100 -> 100]) and base and W are the
    bias and the weight of one linear output for each tensor of the network. From psi_k the client takes its local steps to
    ``psi~_k``. With ``Delta_k = psi_k - psi~_k`` the hyper-network and the encoder take a step of SGD along the mean over
    clients of the gradient of ``<Delta_k, psi_k>`` (Delta held fixed), at their own rates times ``[train] lr-decay``. A
    newcomer sends its unlabelled images through the encoder and is served by its psi, without adaptation.

    What travels: encoder and hyper-network go down, so a round is one round trip; up go psi~_k, e_k and the gradient of the
    encoder, for which the client's images are needed. The hyper-network's gradient follows from psi~_k and e_k, and the
    server takes it for all clients at once: the same update as if it had been sent, for a hundredth of the bytes.

    Our choices, where the papers are silent: W starts at zero, so everybody starts from the run's initialisation and not
    from a network of the wrong scale; h and the encoder (two convolutions, whatever the network is) start so that clients
    differ behind them, see :mod:`fedshift.core.hypernetwork`; BatchNorm statistics are averaged as in FedAvg. Deployed
    clients are described by their training images, newcomers by their test images. No spectral norm. The rates are FedTTA's
    for CIFAR-10 (MNIST: 0.5 and 0.5).
    """

    hyper_lr: float = 0.5
    encoder_lr: float = 0.1
    embedding: int = 32
    hidden: int = 100

    personal: ClassVar[bool] = True
    common: ClassVar[frozenset[str]] = frozenset({"hyper", "encoder", "base"})

    def __post_init__(self) -> None:
        """Refuse settings that cannot be meant."""
        not_negative(hyper_lr=self.hyper_lr, encoder_lr=self.encoder_lr)
        positive(embedding=self.embedding, hidden=self.hidden)

    # ---- the client ----------------------------------------------------------------------------------------------------
    def phases(self, now: Now) -> tuple[Phase, ...]:
        """Describe oneself, train, and look back for the encoder's sake."""
        return (_look("describe"), Phase(), _look("look-back"))

    def final_phases(self) -> tuple[Phase, ...]:
        """Describe oneself, who has training images by those and a newcomer by all it has."""
        return (_look("describe"), _look("describe-newcomer", labelled=False))

    def client_init(self, down: Tree, mine: Tree) -> Tree:
        """Nothing is known of the client's images yet."""
        nothing = down["model"][self.arch.parameters[0]].new_zeros(())
        seen = {"sum": nothing.new_zeros(self.embedding), "count": nothing}
        state = {**super().client_init(down, mine), "seen": seen, "base": self._base(down)}
        state = {**state, "hyper": down["hyper"], "encoder": down["encoder"], "slope": zeros_like(down["encoder"])}
        return self._personal(state)

    def fold(self, state: Tree, batch: Batch, phase: Phase) -> Tree:
        """Add to the description and form the model anew, or add to the encoder's gradient."""
        x = self.arch.normalise(batch["x"])
        if phase.name == "look-back":
            return {**state, "slope": self._looked_back(state, x)}
        counts = torch.ones_like(state["seen"]["count"])
        if not phase.labelled:  # test images are a newcomer's only ones, and nobody else's business
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

    def client_final(self, state: Tree, down: Tree, mine: Tree) -> tuple[Tree, Tree]:
        """The trained model, who it was made for, and the encoder's gradient."""
        up, kept = super().client_final(state, down, mine)
        return {**up, "embedding": {"mean": _description(state)}, "encoder": state["slope"]}, kept

    # ---- the server ----------------------------------------------------------------------------------------------------
    def server_init(self, models: Mapping[str, Tensors], clients: tuple[str, ...]) -> Tree:
        """The outputs' biases are the model."""
        server = super().server_init(models, clients)
        base = self._base(server)
        encoder = fresh_encoder(base[self.arch.parameters[0]], self.arch.input_shape[0], self.embedding)
        hyper = fresh_hypernetwork(base, (self.embedding, *[self.hidden] * LAYERS))
        return {**server, "hyper": hyper, "encoder": encoder}

    def broadcast(self, server: Tree, client: str | None, now: Now) -> Tree:
        """Everything that makes a model of a client."""
        return {**super().broadcast(server, client, now), "hyper": server["hyper"], "encoder": server["encoder"]}

    def aggregate(self, server: Tree, ups: Mapping[str, Tree], now: Tensors, draws: Batch) -> Tree:
        """A step of the hyper-network towards what the clients made of its models, and one of the encoder."""
        merged = super().aggregate(server, ups, now, draws)["model"]
        base, hyper, encoder = self._base(server), server["hyper"], server["encoder"]
        es = torch.stack([up["embedding"]["mean"] for up in ups.values()])
        trained = {name: torch.stack([up["model"][name] for up in ups.values()]) for name in base}
        shares = self.weights(now)

        def mean_pull(t: Tensors) -> tuple[Tensor, None]:
            return (shares.to(es) * pull(t, pick(t, base), es, trained)).sum(), None

        slope, _, _ = gradient(mean_pull, {**hyper, **base})
        decay = Now(int(now["round"]), int(now["rounds"]), int(now["clients"])).decay(self.train)
        moved = {name: leaf - self.hyper_lr * decay * slope[name] for name, leaf in {**hyper, **base}.items()}
        back = weighted_mean([up["encoder"] for up in ups.values()], shares)
        return {
            "model": {**merged, **pick(moved, base)},
            "hyper": pick(moved, hyper),
            "encoder": {name: leaf - self.encoder_lr * decay * back[name] for name, leaf in encoder.items()},
        }

    def _base(self, tree: Tree) -> Tensors:
        return pick(tree["model"], self.arch.trainable)


def _look(name: str, labelled: bool = True) -> Phase:
    """A look at all training images, or at those of somebody who has no others."""
    part: Literal["train", "test"] = "train" if labelled else "test"
    return Phase(name=name, trainable=frozenset(), batch_stats=False, labelled=labelled, data=part)


def _description(state: Tree) -> Tensor:
    """The mean embedding of what was looked at."""
    return state["seen"]["sum"] / state["seen"]["count"].clamp(min=1)
