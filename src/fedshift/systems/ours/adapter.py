"""Ours: one adapter for everybody: home-or-away where there are labels, prior-em where there are none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedshift.blocks.calibration import with_refreshed_calibration
from fedshift.blocks.mean_views import like
from fedshift.blocks.refreshed_statistics import Refreshing, with_refreshed_statistics
from fedshift.core.adapter import Adapter
from fedshift.core.arch import Output
from fedshift.core.registry import adapter
from fedshift.core.tree import Tree
from fedshift.systems.ours.home_or_away import HomeOrAway
from fedshift.systems.ours.prior_em import PriorEM


@adapter("ours", paper="(fedshift)")
@dataclass(frozen=True)
class Ours(HomeOrAway, Refreshing):
    """A client that trained is served by ``home-or-away``; an unseen one, who has no labels, by ``prior-em``.

    The first knows which classes are at home, the second finds out from the unlabelled images, as far as that proved right
    at the training clients. Both use what the federation measured, and have no setting that depends on the data. Where
    the network has BatchNorm, a client that is served as an unseen one refreshes its statistics first, ``passes`` over
    its images in batches of ``batch-size`` (as ``fedbn-align``), if training clients in its place were answered better
    with that than without: it is a gain where images differ, and a loss where a client's classes are few.
    """

    telemetry: ClassVar[tuple[str, ...]] = ("home", "strength")

    def init(self, deployed: Tree) -> Tree:
        """The states of both; only one of them will move."""
        return {**self._finder.init(deployed), **super().init(deployed)}

    def fit(self, state: Tree, x: Tensor, draws: Mapping[str, Tensor]) -> Tree:
        """An unseen client gets to know its images, then its classes."""
        if self._at_home(state):
            return state
        if self.refreshes and (better := with_refreshed_calibration(self, state)) is not None:
            state = with_refreshed_statistics(self.predict_with, better, x, self.batch_size, self.passes)
        return self._finder.fit(state, x, draws)

    def predict(self, state: Tree, x: Tensor, draws: Mapping[str, Tensor]) -> tuple[Output, Tree]:
        """By whom the client is served."""
        output, state = (
            super().predict(state, x, draws) if self._at_home(state) else self._finder.predict(state, x, draws)
        )
        nothing = output.logits.new_zeros(len(x))
        return output._replace(aux={"home": nothing, "strength": nothing, **output.aux}), state

    @property
    def _finder(self) -> Adapter:
        """It looks at images as this one does."""
        return like(self, PriorEM)

    def _at_home(self, state: Tree) -> bool:
        return bool(state["home"]["labels"].sum() > 0)
