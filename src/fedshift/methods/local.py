"""Local: no federation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedshift.core.context import Context, ServerContext
from fedshift.core.method import Method
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
    linear: ClassVar[bool] = True  # the mean of nothing

    def private(self, ctx: Context) -> frozenset[str]:
        """The whole model."""
        return self.arch.encoder | self.arch.head

    def init_server(self, models: Mapping[str, Tensors], clients: tuple[str, ...], public: Tensor) -> Tree:
        """The server has nothing, so clients may have any network."""
        return {"model": {}}

    def aggregate(self, server: Tree, ups: Mapping[str, Tree], ctx: ServerContext) -> tuple[Tree, Tensors]:
        """There is nothing to combine."""
        return server, {}
