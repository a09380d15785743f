"""FedTHE: a global and a personal head on one extractor, and descriptors that tell whose data a sample looks like."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from fedshift.blocks.descriptors import DescribedMethod
from fedshift.blocks.heads import head_phase
from fedshift.core.context import ClientInfo, Context, Phase
from fedshift.core.options import NonNegative, NonNegativeInt
from fedshift.core.registry import method
from fedshift.core.tree import Tensors, Tree, drop, pick


@method("fedthe", paper="Test-Time Robust Personalization for Federated Learning", venue="ICLR", year=2023)
@dataclass(frozen=True)
class FedTHE(DescribedMethod):
    """Two heads: a shared one trained for balance, a private one for the client's own classes.

    A round, with the received extractor f, global head W_g and descriptor h_g:

    1. extractor and W_g are trained with BalancedSoftmax, ``CE(y + log(counts + 1))``, and go up;
    2. the private head W_l is trained with plain CE on the *received* extractor, which stands still;
    3. the local descriptor ``h_l = mean f(x)`` over the client's training images, with the received extractor, goes up.

    The server averages models, and descriptors uniformly; the first ``h_g`` is all ones. After the last aggregation every
    client takes steps 2 and 3 once more on the final extractor. With ``sync-descriptors`` (our default) those last ``h_l``
    are averaged into the ``h_g`` that is deployed; without it h_g is one extractor older, as in the authors' code.

    Deployed: ``model`` predicts with the private head, ``generic`` is the global head, ``descriptors`` are both; the
    adapters ``the`` and ``the-plus`` choose between the heads for every test sample. Unseen clients have the global
    head twice.

    ``[train] balance`` has no say: step 1 is balanced already, and the head of step 2 is there to know the client's own
    classes. With ``balanced = false`` step 1 is what ``[train] balance`` says.

    Deviations from the authors' code: private head and descriptor see images as they are, in inference mode, also where
    ``[train] augment`` changes those of generic training (so features are computed once, and the descriptor is over all
    samples); the private head has a bias if the network's head has one. Only clients that have taken part in a round give
    their last descriptor away.
    """

    balanced: bool = True
    personal_epochs: NonNegativeInt = 1
    personal_lr: NonNegative | None = None  # default: [train] lr
    sync_descriptors: bool = True

    personal: ClassVar[bool] = True
    linear: ClassVar[bool] = True

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Generic training, then what is done for oneself."""
        return (Phase(name="generic", balance="softmax" if self.balanced else None), *self.last_phases(ctx))

    def last_phases(self, ctx: Context) -> tuple[Phase, ...]:
        """The private head and the descriptor on the received extractor, whose features are computed once."""
        head = head_phase(self, "personal", "personal", self.personal_epochs, self.personal_lr)
        return (replace(head, balance="none"), self.descriptor_phase("personal"))

    def init_local(self, model: Tensors, info: ClientInfo, ctx: Context) -> Tree:
        """The private head starts where everybody starts; an unseen client has none."""
        if info.unseen:
            return {}
        head = pick(model, self.arch.head)
        return {"personal": head, "descriptor": {"local": self.undescribed(model)}}

    def begin(self, down: Tree, local: Tree) -> Tree:
        """The private head sits on the extractor as it was received."""
        personal = {**drop(down["model"], self.arch.head), **local["personal"]}
        empty = {"local": torch.zeros_like(local["descriptor"]["local"])}
        return {"model": down["model"], "personal": personal, "descriptor": empty}

    def finish(self, state: Tree, down: Tree, local: Tree) -> tuple[Tree, Tree]:
        """Model and descriptor go up; head and descriptor stay."""
        return {"model": state["model"], "descriptor": state["descriptor"]}, self._kept(state)

    def settle(self, state: Tree | None, down: Tree, local: Tree, ctx: Context) -> tuple[Tree, Tree]:
        """Head and descriptor stay; the descriptor is given away too, unless it is to stay one extractor behind."""
        kept = local if state is None else self._kept(state)
        return self.descriptor_gift(kept) if self.sync_descriptors else {}, kept

    @property
    def gives(self) -> bool:
        """The descriptor, if it is given away at all."""
        return self.sync_descriptors

    def _kept(self, state: Tree) -> Tree:
        return {"personal": pick(state["personal"], self.arch.head), "descriptor": state["descriptor"]}

    def deployed(self, down: Tree, local: Tree) -> Tree:
        """Both heads and both descriptors; an unseen client's own are the global ones."""
        return {
            "model": {**down["model"], **local.get("personal", {})},
            "generic": pick(down["model"], self.arch.head),
            "descriptors": self.descriptors(down, local),
        }
