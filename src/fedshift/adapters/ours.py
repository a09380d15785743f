"""Ours: one adapter for everybody: home-or-away where there are labels, prior-em where there are none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedshift.adapters.home_or_away import HomeOrAway
from fedshift.adapters.prior_em import PriorEM
from fedshift.blocks.mean_views import like
from fedshift.core.adapter import Adapter
from fedshift.core.arch import Output
from fedshift.core.registry import adapter
from fedshift.core.tree import Tree


@adapter("ours", paper="(fedshift)")
@dataclass(frozen=True)
class Ours(HomeOrAway):
    """A client that trained is served by ``home-or-away``; an unseen one, who has no labels, by ``prior-em``.

    The first knows which classes are at home, the second finds out from the unlabelled images, as far as that proved right
    at the training clients. Both use what the federation measured, and have no setting that depends on the data.
    """

    telemetry: ClassVar[tuple[str, ...]] = ("home", "strength")

    def init(self, deployed: Tree) -> Tree:
        """The states of both; only one of them will move."""
        return {**self._finder.init(deployed), **super().init(deployed)}

    def fit(self, state: Tree, x: Tensor, draws: Mapping[str, Tensor]) -> Tree:
        """An unseen client finds its classes."""
        return state if self._at_home(state) else self._finder.fit(state, x, draws)

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
