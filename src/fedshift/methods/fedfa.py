"""FedFA: in training, feature maps take on the styles that other clients' images might have."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from fedshift.core.arch import Arch, Output
from fedshift.core.checks import in_unit_interval
from fedshift.core.method import Batch, Draw, Facts, Method, Now, Phase
from fedshift.core.registry import method
from fedshift.core.styles import EPS, Augment, with_styles
from fedshift.core.tree import Tensors, Tree, drop, pick

if TYPE_CHECKING:
    from fedshift.data.task import Task


@method("fedfa", paper="FedFA: Federated Feature Augmentation", venue="ICLR", year=2023)
@dataclass(frozen=True)
class FedFA(Method):
    """FedAvg with feature augmentation after each of the first five stages (Zhou and Konukoglu, not feature anchors).

    In a training step each stage is augmented with ``probability``: with mean mu and deviation sigma of every image and
    channel, ``x <- sigma' (x - mu) / sigma + mu'``, where ``mu' ~ N(mu, (gamma + 1) var(mu))`` and sigma' likewise with the
    variances within the batch. The server makes ``gamma = C g(v) / sum g(v)``, ``g(v) = 1 / (1 + 1 / v)``, of C channels by
    the variance v over clients of their running means (momentum 0.99) of mu and of sigma; at first gamma is 1. A stage is
    a convolution or a block of them and the normalisation, activation and pooling after it, in the outermost
    ``nn.Sequential``: all stages of AlexNet, the stem and layer1 to layer4 of a ResNet. ``probability = 0`` is FedAvg.

    ``shared_variance = "scalar"`` is the released code, which takes one variance over clients and channels together, so
    that gamma is always 1; ``"channel"`` is the paper. The running means stay with the client and go up with its model (the
    released code sends their average back), gamma comes down. As in that code they move only in steps that augment,
    sample variances have n - 1 (unless n is 1) and 1e-6 is added to every variance; v has n. A network without stages,
    such as a perceptron, is trained as by FedAvg, and a warning says so.
    """

    probability: float = 0.5
    shared_variance: Literal["channel", "scalar"] = "channel"

    def __post_init__(self) -> None:
        """Refuse settings that cannot be meant."""
        in_unit_interval(probability=self.probability)

    @classmethod
    def build(cls, backbone: Arch, options: Mapping[str, Any]) -> Arch:
        """A layer after each stage."""
        return with_styles(backbone)

    def prepare_task(self, task: Task) -> Task:
        """Say so where there is nothing to augment."""
        if not self.layers:
            text = f"model {self.arch.name!r} has no stages of feature maps: method 'fedfa' is fedavg on it"
            warnings.warn(text, stacklevel=2)
        return task

    @cached_property
    def layers(self) -> dict[str, int]:
        """The channels of every augmentation layer."""
        return {name: self.arch.init(0)[f"{name}.weight"].shape[1] for name in self.arch.layers(Augment)}

    def draws(self, phase: Phase) -> dict[str, Draw]:
        """Noise for each image and channel, and a coin for each layer; a step uses the coins of its first image."""
        if not self.layers:
            return {}
        noise = Draw("normal", (2, sum(self.layers.values())))
        return {"noise": noise, "coin": Draw("uniform", (len(self.layers),))}

    def outputs(self, tensors: Tensors, batch: Batch, phase: Phase) -> Output:
        """Forward pass with this step's noise in place of the weights, which stay what they were."""
        if not self.layers:
            return super().outputs(tensors, batch, phase)
        parts = batch["noise"].split(list(self.layers.values()), dim=-1)
        coins = (batch["coin"][0] < self.probability).unbind()
        noise = {
            f"{layer}.weight": torch.where(on, (tensors[f"{layer}.weight"] + 1).sqrt() * part, 0)
            for layer, part, on in zip(self.layers, parts, coins, strict=True)
        }
        output = super().outputs({**tensors, **noise}, batch, phase)
        return output._replace(buffers=drop(output.buffers, noise))

    def birth(self, model: Tensors, facts: Facts, now: Now) -> Tree:
        """A client keeps its running means."""
        running = pick(model, self._names("running"))
        return {"model": running} if running and facts.number >= 0 else {}

    def broadcast(self, server: Tree, client: str | None, now: Now) -> Tree:
        """Running means do not come down, except to strangers, who have none."""
        down = super().broadcast(server, client, now)
        return down if client is None else {"model": drop(down["model"], self._names("running"))}

    def client_final(self, state: Tree, down: Tree, mine: Tree) -> tuple[Tree, Tree]:
        """The model without the weights, and the running means."""
        up, kept = super().client_final(state, down, mine)
        model = drop(up["model"], self._names("weight"))
        return {"model": model, "running": pick(state["model"], self._names("running"))}, kept

    def aggregate(self, server: Tree, ups: Mapping[str, Tree], now: Tensors, draws: Batch) -> Tree:
        """FedAvg, and the weights of the next round."""
        after = super().aggregate(server, ups, now, draws)
        running = {layer: [up["running"][f"{layer}.running"] for up in ups.values()] for layer in self.layers}
        weights = {f"{layer}.weight": self.gamma(torch.stack(parts)) for layer, parts in running.items()}
        return {**after, "model": {**after["model"], **weights}}

    def gamma(self, running: Tensor) -> Tensor:
        """``[clients, 2, channels] -> [2, channels]``: how much each channel's style differs between clients."""
        together = (0,) if self.shared_variance == "channel" else (0, 2)
        v = running.var(together, correction=0, keepdim=True)[0] + EPS
        g = (1 / (1 + 1 / v)).expand(running.shape[1:])
        gamma: Tensor = g / g.mean(1, keepdim=True)
        return gamma

    def _names(self, entry: str) -> frozenset[str]:
        return frozenset(f"{layer}.{entry}" for layer in self.layers)
