"""No adaptation, and no draws: a stochastic representation is taken at its mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedshift.core.adapter import Adapter
from fedshift.core.arch import Output
from fedshift.core.registry import adapter
from fedshift.core.tree import Tree


@adapter("deterministic", paper="(baseline)")
@dataclass(frozen=True)
class Deterministic(Adapter):
    """Predict with the head's answer to the mean of the representation, ``head(m(x))``; change nothing.

    For methods that otherwise average their answer over draws of the representation (FedSR, FedCiR and its limits): what
    these draws are worth.
    """

    requires_arch: ClassVar[frozenset[str]] = frozenset({"stochastic"})
    reasons: ClassVar[Mapping[str, str]] = {
        "stochastic": "a stochastic representation, which methods 'fedsr' and 'fedcir' have"
    }

    def predict(self, state: Tree, x: Tensor, draws: Mapping[str, Tensor]) -> tuple[Output, Tree]:
        """The network as it is, whatever the method makes of it."""
        return self.arch(state["model"], x), state
