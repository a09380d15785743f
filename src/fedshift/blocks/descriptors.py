"""Methods whose clients describe their data by a mean feature, for adapters that ask whose data a sample looks like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedshift.core.context import Context, Phase, ServerContext
from fedshift.core.method import Batch, Method
from fedshift.core.tree import Tensors, Tree, pick, uniform_mean


@dataclass(frozen=True)
class DescribedMethod(Method):
    """FedAvg, and beside it descriptors: each client's mean feature and their uniform mean.

    A subclass puts :meth:`descriptor_phase` among its phases, keeps ``state["descriptor"]`` and lets it travel. At the end
    clients give away the descriptors of the final extractor, so that the deployed ones belong to the deployed model.
    """

    provides: ClassVar[frozenset[str]] = frozenset({"model", "generic", "descriptors"})

    def descriptor_phase(self, slot: str) -> Phase:
        """One look at the features of all training images under the extractor in a slot."""
        return Phase(slot=slot, name="descriptor", kind="fold", inputs="features", batch_stats=False)

    def fold(self, state: Tree, batch: Batch, phase: Phase) -> Tree:
        """The mean feature, batch by batch."""
        share = batch["x"].sum(0) / state["now"]["samples"]
        return {**state, "descriptor": {"local": state["descriptor"]["local"] + share}}

    def descriptor_gift(self, local: Tree) -> Tree:
        """The descriptor of the final extractor, where there is one."""
        return {"descriptor": local["descriptor"]} if "descriptor" in local else {}

    def init_server(self, models: Mapping[str, Tensors], clients: tuple[str, ...], public: Tensor) -> Tree:
        """Before anybody has sent a descriptor it is all ones."""
        server = super().init_server(models, clients, public)
        return {**server, "descriptor": {"global": self.undescribed(server["model"])}}

    def broadcast(self, server: Tree, client: str, ctx: Context) -> Tree:
        """The global descriptor goes down with the model."""
        return {**super().broadcast(server, client, ctx), "descriptor": server["descriptor"]}

    def aggregate(self, server: Tree, ups: Mapping[str, Tree], ctx: ServerContext) -> tuple[Tree, Tensors]:
        """FedAvg, and the uniform mean of the descriptors."""
        merged, metrics = super().aggregate(server, ups, ctx)
        return self.take_gifts(merged, ups), metrics

    def take_gifts(self, server: Tree, gifts: Mapping[str, Tree]) -> Tree:
        """The uniform mean of the descriptors is the global one."""
        own = [tree["descriptor"] for tree in gifts.values() if "descriptor" in tree]
        return {**server, "descriptor": {"global": uniform_mean(own)["local"]}} if own else server

    def descriptors(self, down: Tree, local: Tree) -> Tensors:
        """Both descriptors; one's own is the global one where there is none."""
        common = down["descriptor"]["global"]
        return {"global": common, "local": local.get("descriptor", {"local": common})["local"]}

    def undescribed(self, model: Tensors) -> Tensor:
        """The descriptor of nothing yet: all ones."""
        return next(iter(pick(model, self.arch.head).values())).new_ones(self.arch.feature_size)
