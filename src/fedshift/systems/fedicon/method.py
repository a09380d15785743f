"""FedICON: learn an encoder by contrast between views, share it, and only then a head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedshift.blocks import views as augment
from fedshift.blocks.descriptors import DescribedMethod
from fedshift.blocks.heads import head_phase
from fedshift.blocks.losses import contrastive
from fedshift.core.context import ClientInfo, Context, Phase, RandomSpec, ServerContext
from fedshift.core.method import Batch
from fedshift.core.options import NonNegative, NonNegativeInt, Positive, Share
from fedshift.core.registry import method
from fedshift.core.tree import Tensors, Tree, drop, pick
from fedshift.systems.fedicon import projection


@method(
    "fedicon",
    paper="Taming Heterogeneity to Deal with Test-Time Shift in Federated Learning",
    venue="NeurIPS",
    year=2023,
)
@dataclass(frozen=True)
class FedICON(DescribedMethod):
    """Contrastive rounds for the encoder, then head rounds on the frozen one, then a personal head.

    1. In the experiment's ``rounds`` two views of every image are encoded, and images of one class attract each other
       (SupCon; with ``supervised = false``, FedICON-us, only the two views of one image: NT-Xent). Only the encoder is
       trained and only it travels; there is no classification loss.
    2. ``head-rounds`` more rounds train a linear head with cross-entropy on cached features of the frozen encoder. Only the
       head travels (the encoder once more, in a client's first such round), and the mean feature beside it.
    3. At the end every client tunes the head for itself, ``personal-epochs`` on its own features.

    ``[train] balance`` acts on steps 2 and 3. Step 1 has no cross-entropy and sees the images as they are: skewed classes
    spoil the head more than the representation (Kang et al., ICLR 2020).

    ``share = false`` trains each client's encoder by contrast and its head for itself: nothing travels. ``head-rounds = 0``
    leaves the head to step 3. The adapter ``fedicon`` goes on with the contrast at test time. Deployed: ``model`` with the
    personal head, ``generic`` the federated head, ``descriptors``, so that FedTHE's adapters can sit on it.

    The paper states no temperature, views or head schedule: MoCo-style views (``flip = false`` for digits), ten head
    rounds and five epochs are our choice, the temperature was chosen on validation images of digits and office objects.
    ``head-lr`` depends on the network: 5 was best there, 0.1 without supervision. Weights are ``n_k / N``: its equation
    divides by the number of clients twice.
    """

    supervised: bool = True
    temperature: Positive = 0.1
    share: bool = True
    head_rounds: NonNegativeInt = 10
    head_epochs: NonNegativeInt = 5
    personal_epochs: NonNegativeInt = 5
    head_lr: NonNegative = 1.0  # features are small, because the contrast does not see their length
    flip: bool = True
    crop: Share = 0.2  # a view shows at least this share of the image
    colour: NonNegative = 1.0  # how much a view's colours change; 0 leaves them alone
    projection: bool = False  # contrast behind two more layers, which are thrown away afterwards

    personal: ClassVar[bool] = True
    linear: ClassVar[bool] = True

    @property
    def extra_rounds(self) -> int:
        """The head rounds; a client that shares nothing has no head to average."""
        return self.head_rounds if self.share else 0

    # ---- what a client does ------------------------------------------------------------------------------------------
    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Contrast, and after the experiment's rounds the head."""
        if ctx.round < ctx.rounds:
            beyond = frozenset(projection.NAMES if self.projection else ())
            trained = (self.arch.trainable - self.arch.head) | beyond
            return (Phase(name="contrastive", trainable=trained, balance="none"),)
        return (head_phase(self, "model", "head", self.head_epochs, self.head_lr), self.descriptor_phase("model"))

    def last_phases(self, ctx: Context) -> tuple[Phase, ...]:
        """The personal head and the descriptor."""
        personal = head_phase(self, "model", "personal", self.personal_epochs, self.head_lr)
        return (personal, self.descriptor_phase("model"))

    def draws(self, phase: Phase) -> dict[str, RandomSpec]:
        """Two views of every image."""
        return {"views": RandomSpec("uniform", (2, augment.NUMBERS))} if phase.name == "contrastive" else {}

    def loss(self, state: Tree, tensors: Tensors, batch: Batch, phase: Phase) -> tuple[Tensor, Tensors]:
        """The contrast between views, or the cross-entropy of the head."""
        if phase.name != "contrastive":
            return super().loss(state, tensors, batch, phase)
        x, numbers = batch["x"], batch["views"]
        views = [augment.contrastive_views(x, drawn, self.flip, self.crop, self.colour) for drawn in numbers.unbind(1)]
        z, _, buffers = self.arch.encode(tensors, torch.cat(views), phase.batch_stats)
        if self.projection:
            z = projection.projected(tensors, z)
        own = torch.arange(len(x), device=z.device)
        groups = batch["y"] if self.supervised else own
        return contrastive(z, groups.repeat(2), self.temperature), buffers

    # ---- who has what ------------------------------------------------------------------------------------------------
    def private(self, ctx: Context) -> frozenset[str]:
        """The head stays at home during the contrastive rounds; without sharing everything does."""
        if not self.share:
            return self.arch.encoder | self.arch.head | set(projection.NAMES)
        return self.arch.head if ctx.round < ctx.rounds and not ctx.ending else frozenset()

    def init_local(self, model: Tensors, info: ClientInfo, ctx: Context) -> Tree:
        """A head that waits for its rounds; without sharing, everything."""
        if not self.share:
            return super().init_local({**model, **self._projection(model)}, info, ctx)
        return {"personal": pick(model, self.arch.head)} if not info.unseen else {}

    def begin(self, down: Tree, local: Tree) -> Tree:
        """What does not come down is at home."""
        model = {**self._at_home(local), **down["model"]}
        return {"model": model, "descriptor": {"local": torch.zeros_like(self.undescribed(model))}}

    def finish(self, state: Tree, down: Tree, local: Tree) -> tuple[Tree, Tree]:
        """What came down and was trained goes up: the encoder, then the head with the mean feature."""
        if not self.share:
            return {}, {"model": pick(state["model"], local["model"])}
        if not self.arch.head <= set(down["model"]):  # a contrastive round
            return {"model": pick(state["model"], down["model"])}, local
        head = pick(state["model"], self.arch.head)
        kept = {"personal": head, "encoder": drop(state["model"], self.arch.head)}
        return {"model": head, "descriptor": state["descriptor"]}, kept

    def settle(self, state: Tree | None, down: Tree, local: Tree, ctx: Context) -> tuple[Tree, Tree]:
        """The personal head and the descriptor stay; the descriptor of the final encoder is given away too."""
        own = (
            {}
            if state is None
            else {"personal": pick(state["model"], self.arch.head), "descriptor": state["descriptor"]}
        )
        kept = {**local, **own}
        return self.descriptor_gift(kept) if self.share else {}, kept

    @property
    def gives(self) -> bool:
        """The descriptor, unless nothing is shared."""
        return self.share

    # ---- the server --------------------------------------------------------------------------------------------------
    def init_server(self, models: Mapping[str, Tensors], clients: tuple[str, ...], public: Tensor) -> Tree:
        """Nobody holds the frozen encoder yet."""
        server = super().init_server(models, clients, public)
        server = {**server, "model": {**server["model"], **self._projection(server["model"])}}
        return {**server, "holds": {client: torch.tensor(False) for client in clients}}

    def broadcast(self, server: Tree, client: str, ctx: Context) -> Tree:
        """The encoder alone, later the head alone, with the encoder for those who do not have the frozen one yet."""
        down = super().broadcast(server, client, ctx)
        if not self.share or (ctx.round < ctx.rounds and not ctx.ending):
            return {"model": down["model"]}
        model = drop(down["model"], projection.NAMES)
        holds = ctx.stage != "unseen" and bool(server["holds"].get(client, False))
        return {**down, "model": pick(model, self.arch.head) if holds else model}

    def aggregate(self, server: Tree, ups: Mapping[str, Tree], ctx: ServerContext) -> tuple[Tree, Tensors]:
        """FedAvg of what went up; whoever took part in a head round holds the encoder."""
        if not self.share:
            return server, {}
        merged, metrics = super().aggregate(server, ups, ctx)
        came = {client: torch.tensor(True) for client, up in ups.items() if "descriptor" in up}
        return {**merged, "holds": {**server["holds"], **came}}, metrics

    def deployed(self, down: Tree, local: Tree) -> Tree:
        """The encoder under the personal head, the federated head, both descriptors."""
        whole = drop({**self._at_home(local), **down["model"]}, projection.NAMES)
        model = {**whole, **local.get("personal", {})}
        if not self.arch.head <= set(model):  # nothing for an unseen client
            return {"model": model, "generic": {}, "descriptors": {}}
        shared = {"descriptor": {"global": self._own_descriptor(model, local)}, **down}
        return {
            "model": model,
            "generic": pick(whole if self.share else model, self.arch.head),
            "descriptors": self.descriptors(shared, local),
        }

    def _at_home(self, local: Tree) -> Tensors:
        """What a client has of a model without being sent anything."""
        return {**local.get("model", {}), **local.get("encoder", {}), **local.get("personal", {})}

    def _own_descriptor(self, model: Tensors, local: Tree) -> Tensor:
        return local["descriptor"]["local"] if "descriptor" in local else self.undescribed(model)

    def _projection(self, model: Tensors) -> Tensors:
        """A projection to start with, where there is to be one."""
        head = next(iter(pick(model, self.arch.head).values()))
        return projection.fresh(head, self.arch.feature_size) if self.projection else {}
