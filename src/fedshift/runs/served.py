"""Models of a population, ready to be scored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from fedshift.core.tree import Tree

Make: TypeAlias = Callable[[], Mapping[str, Tree]]


@dataclass(frozen=True)
class Served:
    """Models of a population, ready to be scored."""

    model: str  # global, personal or after-local
    population: str  # clients or unseen
    trees: Mapping[str, Tree]
    published: int = 0  # bytes that clients gave once, at the end
    remade: Mapping[str, Make] = field(default_factory=dict)  # by stream: how to make others for it

    @property
    def deployable(self) -> bool:
        """Whether these are what clients serve with."""
        return self.model != "after-local"
