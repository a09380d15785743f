"""A method: how clients and server train, as a frozen dataclass of hyper-parameters whose methods are pure.

The defaults are FedAvg. A method is written by overriding the few hooks in which it differs; engines call the hooks and
know no method. The client half must be vmappable: no Python branching on tensor values, no ``item()``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedshift.core.arch import Arch, BatchStats, Output
from fedshift.core.context import Balance, ClientInfo, Context, Phase, RandomSpec, ServerContext
from fedshift.core.grad import gradient
from fedshift.core.optim import OPTIMISERS, Optim, Optimiser, clip_by_norm
from fedshift.core.options import BelowOne, Checked, Factor, NonNegative, NonNegativeInt, Positive, Whole, at_least
from fedshift.core.tree import Tensors, Tree, drop, pick, uniform_mean, weighted_mean
from fedshift.errors import UserError

if TYPE_CHECKING:
    from fedshift.data.task import Task

Batch = Mapping[str, Tensor]
"""One step's data: ``x`` images in [0, 1] (or features), ``y`` labels, ``index`` sample ids, and the method's draws."""


@dataclass(frozen=True)
class Train(Checked):
    """The settings every method shares: the experiment's ``[train]`` table.

    >>> Train(lr=0.1).optim()
    SGD(lr=0.1, momentum=0.0, weight_decay=0.0)
    """

    lr: NonNegative = 0.01
    batch_size: Annotated[Whole, at_least(1)] = 32
    local_epochs: NonNegativeInt = 1
    local_steps: NonNegativeInt | None = None  # instead of epochs: this many batches, starting over when the data end
    optimiser: Optimiser = "sgd"
    momentum: BelowOne = 0.0
    weight_decay: NonNegative = 0.0
    lr_decay: Factor = 1.0  # the rate of round r (from 0) is lr * lr_decay**r
    clip: Positive | None = None  # joint gradient norm
    last_batch: Literal["keep", "drop", "wrap"] = "keep"
    weights: Literal["size", "uniform"] = "size"  # FedAvg's weights
    augment: Literal["none", "flip", "shift", "shift-flip"] = "none"  # of the images a phase trains on
    balance: Balance = "none"  # of skewed classes, where labels are trained on

    def optim(self, lr: float | None = None) -> Optim:
        """The optimiser, optionally with another rate."""
        rate = self.lr if lr is None else lr
        if self.optimiser == "adam":
            return OPTIMISERS["adam"](lr=rate, weight_decay=self.weight_decay)
        return OPTIMISERS["sgd"](lr=rate, momentum=self.momentum, weight_decay=self.weight_decay)  # type: ignore[call-arg]


@dataclass(frozen=True)
class Method(Checked):
    """FedAvg's skeleton; see ``docs/how-to/own-method.md`` and any file in ``fedshift/methods``.

    A round: the server's :meth:`broadcast`; at each client :meth:`begin`, the steps or folds of its :meth:`phases`,
    :meth:`finish`; the server's :meth:`aggregate`. After the last round: :meth:`last_phases` at every client,
    :meth:`settle`, the server's :meth:`take_gifts`, and :meth:`deployed` is what a client serves with. A client nobody has
    seen goes the same way from there, in the stage ``unseen``.

    Slots by convention: ``model`` is what is trained and travels, ``now`` is filled by the engine, ``tuned`` is a model
    that the last phases left behind. A client's ``local`` state never leaves it.
    """

    arch: Arch
    train: Train = field(default_factory=Train)

    linear: ClassVar[bool] = False  # the aggregate is a weighted mean: secure aggregation and central DP need that
    personal: ClassVar[bool] = False  # clients end with models of their own
    requires: ClassVar[frozenset[str]] = frozenset()  # of the architecture: "norm", "batch-norm", a layer's capability
    provides: ClassVar[frozenset[str]] = frozenset({"model"})  # slots of what it deploys, for adapters to ask for
    reasons: ClassVar[Mapping[str, str]] = {}  # what a required capability is, in words for who does not have it
    common: ClassVar[frozenset[str]] = frozenset()  # slots everybody receives alike, and only folds read: kept once
    revision: ClassVar[int] = 0  # raise when the same options would give other numbers

    @property
    def extra_rounds(self) -> int:
        """Rounds of its own after the experiment's, stated with the run; validation chooses among them only."""
        return 0

    # ---- before anything runs -------------------------------------------------------------------------------------
    @classmethod
    def build(cls, backbone: Arch, options: Mapping[str, Any]) -> Arch:
        """Surgery on the network: a second head, other blocks. Default: none. ``options``: the hyper-parameters."""
        return backbone

    def prepare_task(self, task: Task) -> Task:
        """The task this method trains on (Centralised pools the clients). Evaluation always uses the original."""
        return task

    # ---- a round: what is done ----------------------------------------------------------------------------------------
    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Local work of a round, in order."""
        return (Phase(),)

    def draws(self, phase: Phase) -> dict[str, RandomSpec]:
        """Random tensors wanted in each step's batch, by name."""
        return {}

    # ---- a round: the client, pure and vmappable ----------------------------------------------------------------------
    def private(self, ctx: Context) -> frozenset[str]:
        """Entries of the model that never leave the client."""
        return frozenset()

    def init_local(self, model: Tensors, info: ClientInfo, ctx: Context) -> Tree:
        """The local state of a client that has none yet; ``model`` is the run's common initialisation."""
        # an unseen client has no trained private part, and an untrained one would be worse than none
        private = {} if info.unseen else pick(model, self.private(ctx))
        return {"model": private} if private else {}

    def begin(self, down: Tree, local: Tree) -> Tree:
        """The state local work starts from."""
        return {**down, "model": {**local.get("model", {}), **down["model"]}}

    def loss(self, state: Tree, tensors: Tensors, batch: Batch, phase: Phase) -> tuple[Tensor, Tensors]:
        """The loss of ``tensors`` (``state[phase.slot]`` with the trainable ones live), and refreshed buffers."""
        output = self.outputs(tensors, batch, phase)
        return self.cross_entropy(output.logits, batch), output.buffers

    def cross_entropy(self, logits: Tensor, batch: Batch) -> Tensor:
        """A batch's mean, for every loss to call. To balance it, engines add ``log-prior`` or ``class-weights`` to it."""
        logits = logits + batch["log-prior"] if "log-prior" in batch else logits
        if "class-weights" not in batch:
            return F.cross_entropy(logits, batch["y"])
        return (batch["class-weights"][batch["y"]] * F.cross_entropy(logits, batch["y"], reduction="none")).mean()

    def outputs(self, tensors: Tensors, batch: Batch, phase: Phase) -> Output:
        """Forward pass of a training batch, whose inputs are images or cached features."""
        if phase.inputs == "features":
            return Output(self.arch.classify(tensors, batch["x"]), batch["x"], {}, {})
        return self.arch(tensors, batch["x"], phase.batch_stats)

    def transform_grads(self, state: Tree, grads: Tensors, phase: Phase) -> Tensors:
        """What the optimiser sees of the gradients: by default their joint norm is limited to ``[train] clip``."""
        return grads if self.train.clip is None else clip_by_norm(grads, self.train.clip)

    def client_step(self, state: Tree, batch: Batch, phase: Phase) -> Tree:
        """One batch: gradient, :meth:`transform_grads`, optimiser. Override when a batch needs several updates."""
        slot = state[phase.slot]
        live = pick(slot, self.trainable(phase))
        frozen = {name: leaf for name, leaf in slot.items() if name not in live}
        grads, value, buffers = gradient(lambda t: self.loss(state, {**frozen, **t}, batch, phase), live)
        grads = self.transform_grads(state, grads, phase)
        memory, scale = state["optim"], state["now"]["decay"]
        for names, rule in self.groups(phase):
            group = pick(live, names)
            moved, kept = rule.update(group, pick(grads, names), memory, scale)
            live, memory = {**live, **moved}, {**memory, **kept}
        log = {"loss": state["log"]["loss"] + value, "steps": state["log"]["steps"] + 1}
        return {**state, phase.slot: {**slot, **live, **buffers}, "optim": memory, "log": log}

    def fold(self, state: Tree, batch: Batch, phase: Phase) -> Tree:
        """A batch of a phase that trains nothing: collect descriptors, prototypes, losses."""
        return state

    def finish(self, state: Tree, down: Tree, local: Tree) -> tuple[Tree, Tree]:
        """What goes up and what is kept: by default, what came down goes up and what was private stays."""
        up = {"model": pick(state["model"], down["model"])}
        return up, {slot: pick(state[slot], leaves) for slot, leaves in local.items()}

    # ---- a round: the server ------------------------------------------------------------------------------------------
    def init_server(self, models: Mapping[str, Tensors], clients: tuple[str, ...], public: Tensor) -> Tree:
        """The server's state; ``models`` has one entry per architecture, ``public`` the ids of images that all hold."""
        if len(models) != 1:
            who, names = type(self).__name__, ", ".join(models)
            raise UserError(f"{who} averages weights, so all clients need one architecture, not {names}")
        return {"model": next(iter(models.values()))}

    def broadcast(self, server: Tree, client: str, ctx: Context) -> Tree:
        """What goes down to this client; an unseen one also gets what the others gave away."""
        gifts = server.get("gifts", {}) if ctx.stage == "unseen" else {}
        return {"model": {**drop(server["model"], self.private(ctx)), **gifts}}

    def aggregate(self, server: Tree, ups: Mapping[str, Tree], ctx: ServerContext) -> tuple[Tree, Tensors]:
        """The next server state from the messages in client order, and numbers about its own work for the log."""
        merged = weighted_mean([up["model"] for up in ups.values()], self.weights(ctx))
        return {**server, "model": {**server["model"], **merged}}, {}

    def weights(self, ctx: ServerContext) -> Tensor:
        """FedAvg's weights of this round's clients: by size or uniform; they sum to one."""
        raw = (ctx.samples if self.train.weights == "size" else torch.ones_like(ctx.samples)).to(torch.float64)
        return raw / raw.sum()

    # ---- after the last round, and when an unseen client arrives --------------------------------------------------------
    def last_phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Work done once after the last aggregation; an unseen client does what needs no labels."""
        return ()

    def settle(self, state: Tree | None, down: Tree, local: Tree, ctx: Context) -> tuple[Tree, Tree]:
        """What a client gives to the others, once (it is counted in bytes), and what it keeps.

        ``state`` is that after the last phases, None if there were none. By default only the tuned model is kept.
        """
        return {}, local if state is None else {**local, "tuned": state["model"]}

    @property
    def gives(self) -> bool:
        """Whether :meth:`settle` ever gives something away: one more message of every client, which ``[privacy]`` counts."""
        return type(self).settle is not Method.settle

    def take_gifts(self, server: Tree, gifts: Mapping[str, Tree]) -> Tree:
        """Put gifts where :meth:`broadcast` finds them: by default their uniform mean, for unseen clients."""
        models = [gift["model"] for gift in gifts.values() if gift.get("model")]
        return {**server, "gifts": uniform_mean(models)} if models else server

    # ---- hand-over to the second axis -------------------------------------------------------------------------------
    def deployed(self, down: Tree, local: Tree) -> Tree:
        """What a client serves with: what it last received and its local state."""
        if "tuned" in local:
            return {"model": local["tuned"]}
        return {"model": {**local.get("model", {}), **down["model"]}}

    def predict(self, deployed: Tree, x: Tensor, batch_stats: BatchStats = False) -> Output:
        """Prediction of a deployed model."""
        return self.arch(deployed["model"], x, batch_stats)

    # ---- not hooks ----------------------------------------------------------------------------------------------------
    def trainable(self, phase: Phase) -> frozenset[str]:
        """The names a phase trains."""
        return self.arch.trainable if phase.trainable is None else phase.trainable

    def groups(self, phase: Phase) -> tuple[tuple[frozenset[str], Optim], ...]:
        """Every trained name with its optimiser."""
        rest = self.trainable(phase).difference(*(names for names, _ in phase.groups))
        return (*phase.groups, (rest, phase.optim or self.train.optim())) if rest else phase.groups
