"""What a checkpoint holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from fedshift.core.tree import Tree, to


@dataclass(frozen=True)
class State:
    """Everything that changes while a federation trains."""

    round: int  # rounds done
    server: Tree
    locals: Mapping[str, Tree] = field(default_factory=dict)  # only clients that have something private

    def trees(self) -> dict[str, Tree]:
        """As a checkpoint stores it."""
        return {"server": self.server, **{f"client {name}": tree for name, tree in self.locals.items()}}

    @staticmethod
    def of(trees: Mapping[str, Tree], round: int, device: torch.device) -> State:
        """From a checkpoint."""
        locals = {
            name.removeprefix("client "): to(t, device) for name, t in trees.items() if name.startswith("client ")
        }
        return State(round, to(trees["server"], device), locals)
