"""Models of a population, ready to be scored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedshift.core.tree import Tree


@dataclass(frozen=True)
class Served:
    """Models of a population, ready to be scored."""

    model: str  # global, personal or after-local
    population: str  # clients or unseen
    trees: Mapping[str, Tree]
    published: int = 0  # bytes that clients gave once, at the end

    @property
    def deployable(self) -> bool:
        """Whether these are what clients serve with."""
        return self.model != "after-local"
