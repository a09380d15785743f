"""FedTHE at test time: weigh the global against the personal head, for every sample anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedshift.blocks.head_mixing import covariance, moving_average, search_weight
from fedshift.blocks.mean_views import second_head
from fedshift.core.adapter import Adapter
from fedshift.core.arch import Output
from fedshift.core.options import NonNegative, NonNegativeInt, UnitInterval
from fedshift.core.registry import adapter
from fedshift.core.tree import Tree


@adapter("the", paper="Test-Time Robust Personalization for Federated Learning", venue="ICLR", year=2023)
@dataclass(frozen=True)
class HeadEnsemble(Adapter):
    """Logits ``e y_g + (1 - e) y_l`` of the global and the personal head, with a weight e found without labels.

    For sample n with feature h: ``h' = beta h + (1 - beta) H``, where H is the moving average (rate ``alpha``) of the
    features before it, and

        L(e) = s Entropy(e y_g + (1 - e) y_l) + (1 - s) (e |h' - h_g| + (1 - e) |h' - h_l|)

    with ``s = cos(softmax y_g, softmax y_l)``: heads that agree are made surer, heads that do not are chosen by whose
    training data the sample resembles. e starts at 1/2 and takes ``steps`` of Adam.

    H depends on features alone, and given H every sample is on its own, so a whole stream is one forward pass and one
    search in closed form: the same answers in chunks of any size. Weights never change.

    ``weighting``: ``similarity`` is the paper's s; ``em`` entropy only (s = 1), ``fa`` alignment only (s = 0), ``half``
    s = 1/2. ``history = false`` uses h itself for h'. ``batch-size``: one shared e for each batch of this many samples
    (a single last one joins the batch before it).
    ``e``: this weight for every sample, no search. CCT wants ``lr = 0.01``.
    """

    alpha: UnitInterval = 0.1
    beta: UnitInterval = 0.3
    lr: NonNegative = 0.1
    steps: NonNegativeInt = 20
    weighting: Literal["similarity", "em", "fa", "half"] = "similarity"
    history: bool = True
    batch_size: NonNegativeInt = 0
    e: UnitInterval | None = None

    requires: ClassVar[frozenset[str]] = frozenset({"model", "generic", "descriptors"})
    telemetry: ClassVar[tuple[str, ...]] = ("e",)

    def slots(self) -> frozenset[str]:
        """Entropy alone and fixed weights do without descriptors."""
        plain = self.e is not None or self.weighting == "em"
        return self.requires - {"descriptors"} if plain else self.requires

    @property
    def batch(self) -> int | None:
        """Samples that share a weight belong together."""
        return self.batch_size or None

    def init(self, deployed: Tree) -> Tree:
        """No history yet."""
        like = next(iter(deployed["generic"].values()))
        mean = like.new_zeros(self.arch.feature_size, dtype=torch.float64)
        return {**deployed, "history": {"mean": mean, "seen": like.new_zeros(())}}

    def predict(self, state: Tree, x: Tensor, draws: Mapping[str, Tensor]) -> tuple[Output, Tree]:
        """One pass of the network, one search for all weights, and the history goes on."""
        output = self.predict_with(state, x)
        generic = second_head(self.arch, state["generic"], output)
        smoothed, history = self._smoothed(state["history"], output.features)
        e = self._weights(state, generic, output.logits, smoothed)
        mixed = torch.lerp(output.logits, generic, e[:, None])  # exact at both ends
        return output._replace(logits=mixed, aux={"e": e}), {**state, "history": history}

    def _smoothed(self, history: Mapping[str, Tensor], features: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """h' of every sample, from the history before it; the first sample is its own history."""
        features = features.double()  # so that chunks of any size agree
        start = torch.where(history["seen"] > 0, history["mean"], features[0])
        means = moving_average(features, start, self.alpha)
        before = torch.cat([start[None], means[:-1]])
        smoothed = self.beta * features + (1 - self.beta) * before if self.history else features
        return smoothed, {"mean": means[-1], "seen": history["seen"] + len(features)}

    def _weights(self, state: Tree, generic: Tensor, personal: Tensor, smoothed: Tensor) -> Tensor:
        """e of every sample."""
        if self.e is not None:
            return torch.full_like(generic[:, 0], self.e)
        way = generic - personal
        trust = self._trust(generic, personal)
        push = -trust[:, None] * way  # the slope of the entropy is minus a covariance, and linear in the direction
        pull = torch.zeros_like(trust)
        if self.weighting != "em":
            far = [(smoothed - state["descriptors"][name]).norm(dim=1) for name in ("global", "local")]
            pull = (1 - trust) * (far[0] - far[1]).to(trust.dtype)

        def slope(e: Tensor) -> Tensor:
            each = covariance(torch.addcmul(personal, e[:, None], way), push) + pull
            return each.mean(0, keepdim=True) if self.batch_size else each

        e = search_weight(slope, trust[:1] if self.batch_size else trust, self.lr, self.steps)
        return e.expand(len(trust))

    def _trust(self, generic: Tensor, personal: Tensor) -> Tensor:
        """How much the entropy counts; the alignment has the rest."""
        fixed = {"em": 1.0, "fa": 0.0, "half": 0.5}
        if self.weighting in fixed:
            return torch.full_like(generic[:, 0], fixed[self.weighting])
        return F.cosine_similarity(generic.softmax(1), personal.softmax(1))
