"""Methods whose encoder gives a distribution: a mean and a deviation for every feature of an image."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedshift.core import rng
from fedshift.core.arch import Arch, BatchStats, Output
from fedshift.core.context import Phase, RandomSpec
from fedshift.core.method import Batch, Method
from fedshift.core.options import NonNegativeInt
from fedshift.core.tree import Tensors, Tree

SEED = rng.seed_of("what a stochastic representation is predicted with")


class Stochastic(nn.Module):
    """A network with one more layer before its head, which makes a mean and a deviation of every feature.

    Called, it predicts with the mean, so that to whoever does not ask for the deviation it is an ordinary network.
    """

    capability = "stochastic"

    def __init__(self, network: nn.Module, head: str) -> None:
        super().__init__()
        body = network
        last = body.get_submodule(head)
        assert isinstance(last, nn.Linear)
        parent, _, leaf = head.rpartition(".")
        setattr(body.get_submodule(parent), leaf, nn.Identity())
        self.body = body
        self.latent = nn.Linear(last.in_features, 2 * last.in_features)
        self.head = last

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits of the mean; beside them the deviation, and what the network without this layer gives its head."""
        found = self.body(x)
        features, aux = found if isinstance(found, tuple) else (found, {})
        mean, raw = self.latent(features).chunk(2, dim=-1)
        return self.head(mean), {**aux, "deviation": F.softplus(raw), "body": features}


def stochastic(backbone: Arch) -> Arch:
    """The backbone with a stochastic representation of as many features as its head reads; features are the means.

    >>> arch = stochastic(Arch.of(lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Linear(3, 2)), (1, 2, 2)))
    >>> sorted(arch.encoder)
    ['body.1.bias', 'body.1.weight', 'latent.bias', 'latent.weight']
    """
    head = next(iter(backbone.head)).rpartition(".")[0]
    return backbone.changed(lambda network: Stochastic(network, head), head="head")


@dataclass(frozen=True)
class StochasticMethod(Method):
    """FedAvg with a stochastic encoder: training predicts from one sample ``z = mean + deviation noise`` of each image.

    A deployed model averages the probabilities of ``samples`` draws of z; with ``samples = 0`` it predicts with the mean.
    The noise of these draws is the same for every image, so an answer depends on the image alone. The features that
    adapters see are the means.
    """

    samples: NonNegativeInt = 20

    @classmethod
    def build(cls, backbone: Arch, options: Mapping[str, Any]) -> Arch:
        """One more layer, for means and deviations."""
        return stochastic(backbone)

    def draws(self, phase: Phase) -> dict[str, RandomSpec]:
        """Noise for every image of a batch."""
        return {**super().draws(phase), "noise": RandomSpec("normal", (self.arch.feature_size,))}

    def outputs(self, tensors: Tensors, batch: Batch, phase: Phase) -> Output:
        """Forward pass through a sample: ``features`` is z; its ``mean`` and ``deviation`` are beside it."""
        output = super().outputs(tensors, batch, phase)
        if phase.inputs == "features":  # cached ones are means
            return output
        z = output.features + output.aux["deviation"] * batch["noise"]
        return output._replace(
            logits=self.arch.classify(tensors, z), features=z, aux={**output.aux, "mean": output.features}
        )

    def predict(self, deployed: Tree, x: Tensor, batch_stats: BatchStats = False) -> Output:
        """The log of the mean probability over samples of the representation."""
        output = super().predict(deployed, x, batch_stats)
        if not self.samples:
            return output
        device = output.features.device
        seed = torch.full((), SEED, dtype=torch.int64, device=device)  # filled there: nothing is copied from the host
        noise = rng.normal(seed, torch.arange(self.samples, device=device), (self.arch.feature_size,))
        z = output.features + output.aux["deviation"] * noise.to(output.features.dtype)[:, None]
        log_p = self.arch.classify(deployed["model"], z).log_softmax(-1)
        return output._replace(logits=log_p.logsumexp(0) - math.log(self.samples))
