"""Blend: a fixed mixture of the personal and the global model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedshift.core.adapter import Adapter
from fedshift.core.arch import Output
from fedshift.core.options import UnitInterval
from fedshift.core.registry import adapter
from fedshift.core.tree import Tree


@adapter("blend", paper="Three Approaches for Personalization with Applications to Federated Learning", year=2020)
@dataclass(frozen=True)
class Blend(Adapter):
    """Logits ``e y_global + (1 - e) y_personal`` of two whole models, the same e for every sample (FedTHE, Figure 15)."""

    e: UnitInterval = 0.5

    requires: ClassVar[frozenset[str]] = frozenset({"model", "global"})

    def predict(self, state: Tree, x: Tensor, draws: Mapping[str, Tensor]) -> tuple[Output, Tree]:
        """Two forward passes."""
        personal, common = self.predict_with(state, x), self.predict_with({**state, "model": state["global"]}, x)
        return personal._replace(logits=torch.lerp(personal.logits, common.logits, self.e)), state
