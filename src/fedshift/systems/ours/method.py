"""Ours: two heads, normalisation at home, steps without drift, and views instead of images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from fedshift.blocks import views
from fedshift.blocks.control_variates import change_of, check_optimiser, corrected, moved
from fedshift.blocks.heads import head_phase
from fedshift.core.context import ClientInfo, Context, Phase, RandomSpec, ServerContext
from fedshift.core.method import Batch, Method
from fedshift.core.optim import clip_by_norm
from fedshift.core.options import NonNegative, NonNegativeInt, Positive, Share, UnitInterval
from fedshift.core.registry import method
from fedshift.core.tree import Tensors, Tree, drop, pick, zeros_like


@method("ours", paper="(fedshift)")
@dataclass(frozen=True)
class Composition(Method):
    """One treatment for each thing that shifts, all of them together.

    - *Classes of clients*: a shared head trained as if classes were balanced, ``CE(z + tempered log(counts + 1))``, and a
      private one, trained with plain CE on the received extractor, for the client's own classes (FedRoD, FedTHE).
    - *Images of clients*: normalisation layers, where there are any, stay at home (FedBN); an unseen client starts from
      the mean of the clients', which the adapter ``ours`` can refresh on its images.
    - *Drift of local steps*: control variates, ``y <- y - lr (g - c_k + c)``, on what travels (SCAFFOLD); ``control =
      false`` leaves them out. Gradients are clipped, because control variates of a past round can point far away.
    - *Images at test time*: the shared part is trained on views, a random part of the image with ``crop`` of its area or
      more in other colours (``colour`` is how much); ``crop = 1`` and ``colour = 0`` leave images as they are. Digits
      and letters want ``flip = false``.

    Deployed: ``model`` has the private head, ``generic`` is the shared one, as FedTHE deploys them; the adapter ``ours``
    weighs them. With ``control = false``, ``crop = 1``, ``colour = 0``, ``tempered = 1`` and a ``clip`` that is never
    reached, and without normalisation layers, it trains what FedTHE trains, but for descriptors. ``[train] balance`` has no
    say, as in FedTHE. Control variates are uniform means over clients, as SCAFFOLD's: where ``[train] weights`` are by
    size, training still ends at the optimum of the uniform mean. ``[privacy]`` refuses this method: control variates need
    more than a mean, and without them nobody has looked at it.
    """

    tempered: UnitInterval = 0.5  # how much of the balance
    control: bool = True
    clip: Positive = 10.0  # of the shared part's gradient, where [train] clip says nothing
    crop: Share = 0.8
    colour: NonNegative = 0.5
    flip: bool = True
    personal_epochs: NonNegativeInt = 1
    personal_lr: NonNegative | None = None  # default: [train] lr

    personal: ClassVar[bool] = True
    provides: ClassVar[frozenset[str]] = frozenset({"model", "generic"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.control:
            check_optimiser("method 'ours' with control", self.train.optimiser)

    # ---- what a client does ------------------------------------------------------------------------------------------
    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """The private head on what was received, then the shared part, whose steps the control variates count."""
        return (*self.last_phases(ctx), Phase(name="shared", balance="softmax"))

    def last_phases(self, ctx: Context) -> tuple[Phase, ...]:
        """The private head on the received extractor, whose features are computed once."""
        head = head_phase(self, "personal", "personal", self.personal_epochs, self.personal_lr)
        return (replace(head, balance="none"),)

    def draws(self, phase: Phase) -> dict[str, RandomSpec]:
        """One view of every image."""
        return {"view": RandomSpec("uniform", (views.NUMBERS,))} if phase.name == "shared" and self._looks else {}

    def loss(self, state: Tree, tensors: Tensors, batch: Batch, phase: Phase) -> tuple[Tensor, Tensors]:
        """The shared part sees views."""
        if "view" in batch:
            seen = views.contrastive_views(batch["x"], batch["view"], self.flip, self.crop, self.colour)
            batch = {**batch, "x": seen}
        return super().loss(state, tensors, batch, phase)

    def cross_entropy(self, logits: Tensor, batch: Batch) -> Tensor:
        """As balanced as it shall be."""
        if "log-prior" in batch:
            batch = {**batch, "log-prior": self.tempered * batch["log-prior"]}
        return super().cross_entropy(logits, batch)

    def transform_grads(self, state: Tree, grads: Tensors, phase: Phase) -> Tensors:
        """The shared part's, without drift."""
        if phase.name != "shared":
            return super().transform_grads(state, grads, phase)
        steady = corrected(grads, state["ci"], state["c"]) if self.control else grads
        return clip_by_norm(steady, self.train.clip or self.clip)

    # ---- who has what ------------------------------------------------------------------------------------------------
    def private(self, ctx: Context) -> frozenset[str]:
        """Normalisation layers."""
        return self.arch.norm

    def init_local(self, model: Tensors, info: ClientInfo, ctx: Context) -> Tree:
        """A private head where everybody starts, no control yet; an unseen client has neither."""
        if info.unseen:
            return {}
        head = {"personal": pick(model, self.arch.head)}
        return {**super().init_local(model, info, ctx), **head, **self._controls_at_zero("ci", model)}

    def begin(self, down: Tree, local: Tree) -> Tree:
        """The private head sits on the extractor as it was received."""
        state = super().begin(down, local)
        personal = {**drop(state["model"], self.arch.head), **local["personal"]}
        return {**state, "personal": personal, **({"ci": local["ci"]} if self.control else {})}

    def finish(self, state: Tree, down: Tree, local: Tree) -> tuple[Tree, Tree]:
        """What came down goes up, with the change of the control variate; the rest stays."""
        up, kept = super().finish(state, down, _layers(local))
        kept = {**kept, "personal": pick(state["personal"], self.arch.head)}
        if not self.control:
            return up, kept
        change = change_of(down["model"], state["model"], down["c"], state["now"], self.train.momentum)
        own = {name: local["ci"][name] + delta for name, delta in change.items()}
        return {**up, "dc": change}, {**kept, "ci": own}

    def settle(self, state: Tree | None, down: Tree, local: Tree, ctx: Context) -> tuple[Tree, Tree]:
        """The private head stays; normalisation layers are given away too: their mean is an unseen client's start."""
        head = {} if state is None else {"personal": pick(state["personal"], self.arch.head)}
        return _layers(local), {**local, **head}

    def deployed(self, down: Tree, local: Tree) -> Tree:
        """Both heads; an unseen client has the shared one twice."""
        model = super().deployed(down, local)["model"]
        return {"model": {**model, **local.get("personal", {})}, "generic": pick(down["model"], self.arch.head)}

    # ---- the server --------------------------------------------------------------------------------------------------
    def init_server(self, models: Mapping[str, Tensors], clients: tuple[str, ...], public: Tensor) -> Tree:
        """No control yet."""
        server = super().init_server(models, clients, public)
        return {**server, **self._controls_at_zero("c", server["model"])}

    def broadcast(self, server: Tree, client: str, ctx: Context) -> Tree:
        """The server's control variate goes down with the model, while there are rounds."""
        control = {"c": server["c"]} if self.control and not ctx.ending else {}
        return {**super().broadcast(server, client, ctx), **control}

    def aggregate(self, server: Tree, ups: Mapping[str, Tree], ctx: ServerContext) -> tuple[Tree, Tensors]:
        """FedAvg, and SCAFFOLD's mean of changes over all clients, those absent included."""
        merged, metrics = super().aggregate(server, ups, ctx)
        if not self.control:
            return merged, metrics
        return {**merged, "c": moved(server["c"], [up["dc"] for up in ups.values()], ctx.clients)}, metrics

    # ---- not hooks ---------------------------------------------------------------------------------------------------
    @property
    def _looks(self) -> bool:
        return self.crop < 1 or self.colour > 0

    def _controls_at_zero(self, slot: str, model: Tensors) -> Tree:
        """Control variates of what travels, where there are to be some."""
        return {slot: zeros_like(pick(model, self.arch.trainable - self.arch.norm))} if self.control else {}


def _layers(local: Tree) -> Tree:
    """A client's own normalisation layers, if the network has any."""
    return {"model": local["model"]} if "model" in local else {}
