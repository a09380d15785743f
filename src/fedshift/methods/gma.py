"""GMA: the server moves a weight less where clients do not agree which way it should go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fedshift.core.context import ServerContext
from fedshift.core.method import Method
from fedshift.core.options import NonNegative, UnitInterval
from fedshift.core.registry import method
from fedshift.core.tree import Tensors, Tree, pick, weighted_mean


@method("gma", paper="Gradient Masked Averaging for Federated Learning", venue="TMLR", year=2023)
@dataclass(frozen=True)
class GMA(Method):
    """FedAvg whose server step is masked, weight by weight, by the agreement of the clients' signs.

    With ``d_k = w_k - w`` and ``A = |mean_k sign(d_k)|`` the server takes ``w <- w + server_lr m sum_k p_k d_k``, where
    ``m`` is 1 if ``A >= threshold`` and ``A`` otherwise. Every client has one vote in ``A`` whatever its weight ``p_k``, and
    a weight that a client did not move (``sign(0) = 0``) counts as no vote. BatchNorm statistics are plainly averaged.
    One client, or ``threshold = 0``, is FedAvg. ``A`` comes in steps of ``1 / K``: with 20 clients that all move a weight,
    the papers' 0.1 stops exact stand-offs and nothing else. ``server-lr`` is a factor on updates that ``[train]
    lr-decay`` has already made smaller, and does not fall itself: with both the step would fall twice (SCAFFOLD's alike).
    """

    threshold: UnitInterval = 0.1
    server_lr: NonNegative = 1.0

    def aggregate(self, server: Tree, ups: Mapping[str, Tree], ctx: ServerContext) -> tuple[Tree, Tensors]:
        """From where the server is towards FedAvg's mean, as far as the mask lets it."""
        models = [up["model"] for up in ups.values()]
        mean = weighted_mean(models, self.weights(ctx))
        moved: Tensors = {}
        for name, leaf in pick(server["model"], self.arch.trainable).items():
            votes = torch.stack([(model[name] - leaf).sign() for model in models])
            agreement = votes.sum(0).abs() / len(models)
            mask = torch.where(agreement >= self.threshold, 1.0, agreement)
            moved[name] = torch.lerp(leaf, mean[name], self.server_lr * mask)  # exact at both ends
        return {**server, "model": {**server["model"], **mean, **moved}}, {}
