"""Home or away: does a sample come from the client's own classes, or from anywhere?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedshift.blocks.calibration import calibrated_log, calibration_of
from fedshift.blocks.mean_views import second_head
from fedshift.core.adapter import Adapter
from fedshift.core.arch import Output
from fedshift.core.options import UnitInterval
from fedshift.core.registry import adapter
from fedshift.core.tree import Tree
from fedshift.systems.ours.home_weight import follow, home_probability


@adapter("home-or-away", paper="(fedshift)")
@dataclass(frozen=True)
class HomeOrAway(Adapter):
    """Two heads, weighed by the evidence that a sample comes from the client's own class prior.

    With the client's class shares pi, the prior q behind the global head's probabilities p_G (the federation measures it)
    and the same images in a class wherever they come from, Bayes' rule gives how much likelier a sample is at home:

        r = p(x | home) / p(x | away) = sum_y pi(y) / q(y) p_G(y | x)

    The probability of home is ``w = omega r / (omega r + 1 - omega)``. omega starts at ``start`` and follows the stream at
    ``rate``, within ``[least, 1 - least]``. The answer is ``w home + (1 - w) p_G``, where home is the personal head's
    probabilities with share ``own``, and otherwise p_G made for pi in place of q.

    Forward passes only, and a scan that gives the same answers in chunks of any size. A client without labels of its own
    has no home: it is answered with p_G (see ``prior-em``). It fails where home and away differ in their images but
    not in their classes, since then r says nothing: omega stays where it is, and the answer between the heads.
    """

    rate: UnitInterval = 0.1
    own: UnitInterval = 0.5
    start: UnitInterval = 0.5
    least: UnitInterval = 0.02

    requires: ClassVar[frozenset[str]] = frozenset({"model", "generic"})
    telemetry: ClassVar[tuple[str, ...]] = ("home",)
    calibrated: ClassVar[bool] = True

    def prepare(self, deployed: Tree, batches: Iterable[Mapping[str, Tensor]]) -> Tree:
        """Count the client's own labels."""
        total = sum(torch.bincount(batch["y"], minlength=self.arch.classes) for batch in batches)
        return {"home": {"labels": torch.as_tensor(total).double()}}

    def init(self, deployed: Tree) -> Tree:
        """Home is as likely as ``start`` says; a client that has no labels is away."""
        like = next(iter(deployed["generic"].values()))
        none = like.new_zeros(self.arch.classes, dtype=torch.float64)
        labels = deployed.get("home", {"labels": none})["labels"]
        start = torch.where(labels.sum() > 0, torch.as_tensor(self.start).to(labels), torch.zeros_like(labels[0]))
        return {**deployed, "home": {"labels": labels, "weight": start}}

    def predict(self, state: Tree, x: Tensor, draws: Mapping[str, Tensor]) -> tuple[Output, Tree]:
        """One pass of the network, one scan."""
        output = self.predict_with(state, x)
        common, own = calibration_of(self, state, "common"), calibration_of(self, state, "own")
        away = calibrated_log(second_head(self.arch, state["generic"], output), common.fit).exp()
        personal = (own.fit[0] * output.logits.double()).softmax(1)
        labels, start = state["home"]["labels"], state["home"]["weight"]
        shares = (labels + common.prior) / (labels.sum() + 1)  # one more image, of nobody knows which class
        ratio = away * (shares / common.prior)
        evidence = ratio.sum(1)
        weight, after = follow(evidence, start, self.rate, self.least) if labels.sum() > 0 else (0 * evidence, start)
        w = home_probability(evidence, weight)[:, None]
        home = self.own * personal + (1 - self.own) * ratio / evidence[:, None]
        mixed = (w * home + (1 - w) * away).clamp(min=1e-30).log().to(output.logits.dtype)
        aux = {**output.aux, "home": w[:, 0].to(mixed.dtype)}
        return output._replace(logits=mixed, aux=aux), {**state, "home": {"labels": labels, "weight": after}}
