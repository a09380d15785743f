"""Local: no federation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedshift.core.method import Method, Now
from fedshift.core.registry import method
from fedshift.core.tree import Tensors, Tree


@method("local", paper="(baseline)", venue="", year=0)
@dataclass(frozen=True)
class Local(Method):
    """Every client on its own: nothing travels.

    All clients start from one common initialisation and train for as many epochs in total as a federated client does
    (rounds x local epochs). Optimiser state starts anew each round, as it does for everybody else.
    """

    personal: ClassVar[bool] = True

    def private(self, now: Now) -> frozenset[str]:
        """The whole model."""
        return self.arch.encoder | self.arch.head

    def server_init(self, models: Mapping[str, Tensors], clients: tuple[str, ...]) -> Tree:
        """The server has nothing, so clients may have any network."""
        return {"model": {}}

    def aggregate(self, server: Tree, ups: object, now: Tensors, draws: object) -> Tree:
        """There is nothing to combine."""
        return server
