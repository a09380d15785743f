"""No adaptation: the model is used as it was deployed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedshift.core.adapter import Adapter
from fedshift.core.registry import adapter


@adapter("none", paper="(baseline)")
@dataclass(frozen=True)
class NoAdaptation(Adapter):
    """Predict, change nothing."""

    requires: ClassVar[frozenset[str]] = frozenset()
