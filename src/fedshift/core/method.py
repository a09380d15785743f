"""A method: how clients and server train, as a frozen dataclass of hyper-parameters whose methods are pure.

The defaults are FedAvg. A method is written by overriding the few hooks in which it differs; engines call the hooks and
know no method. The client half must be vmappable: no Python branching on tensor values, no ``item()``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedshift.core.arch import Arch, BatchStats, Output
from fedshift.core.grad import gradient
from fedshift.core.losses import balanced_softmax
from fedshift.core.optim import OPTIMISERS, Optim, clip_by_norm
from fedshift.core.tree import Tensors, Tree, drop, pick, weighted_mean
from fedshift.errors import UserError

if TYPE_CHECKING:
    from fedshift.data.task import Task

Batch = Mapping[str, Tensor]
"""One step's data: ``x`` images in [0, 1] (or features), ``y`` labels, ``index`` sample ids, and the method's draws."""


@dataclass(frozen=True)
class Train:
    """The settings every method shares: the experiment's ``[train]`` table.

    >>> Train(lr=0.1).optim()
    SGD(lr=0.1, momentum=0.0, weight_decay=0.0)
    """

    lr: float = 0.01
    batch_size: int = 32
    local_epochs: int = 1
    local_steps: int | None = None  # instead of epochs: this many batches, starting over when the data end
    optimiser: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    lr_decay: float = 1.0  # the rate of round r (from 0) is lr * lr_decay**r
    clip: float | None = None  # joint gradient norm
    last_batch: Literal["keep", "drop", "wrap"] = "keep"
    weights: Literal["size", "uniform"] = "size"  # FedAvg's weights
    augment: Literal["none", "flip", "shift", "shift-flip"] = "none"  # of the images a phase trains on

    def __post_init__(self) -> None:
        """Refuse settings that cannot be meant, in the words of the TOML file."""
        if self.batch_size < 1:
            raise UserError(f"batch-size must be at least 1, not {self.batch_size}")
        if self.local_epochs < 0:
            raise UserError(f"local-epochs must not be negative, not {self.local_epochs}")
        if self.local_steps is not None and self.local_steps < 0:
            raise UserError(f"local-steps must not be negative, not {self.local_steps}")
        if self.optimiser not in OPTIMISERS:
            raise UserError(f"optimiser must be one of {', '.join(OPTIMISERS)}, not {self.optimiser!r}")
        if not 0 < self.lr_decay <= 1:
            raise UserError(f"lr-decay must lie in (0, 1], not {self.lr_decay}")
        if self.clip is not None and not self.clip > 0:
            raise UserError(f"clip must be positive, not {self.clip}")
        self.optim()

    def optim(self, lr: float | None = None) -> Optim:
        """The optimiser, optionally with another rate."""
        rate = self.lr if lr is None else lr
        if self.optimiser == "adam":
            return OPTIMISERS["adam"](lr=rate, weight_decay=self.weight_decay)
        return OPTIMISERS["sgd"](lr=rate, momentum=self.momentum, weight_decay=self.weight_decay)  # type: ignore[call-arg]


@dataclass(frozen=True)
class Now:
    """Where in a run we are, for the hooks that decide things in Python; tensors of it are in every state's ``now``."""

    round: int  # from 0
    rounds: int
    clients: int  # of the whole task, not only this round's
    final: bool = False  # after the last aggregation, when clients make ready what they serve with

    def decay(self, train: Train) -> float:
        """The factor on every learning rate in this round."""
        return train.lr_decay ** min(self.round, max(self.rounds - 1, 0))


@dataclass(frozen=True)
class Facts:
    """What a client that starts now knows about itself."""

    client: str
    number: int  # position among the task's clients; -1 for a client nobody has seen
    samples: int
    histogram: Tensor  # int64 [classes] of its training labels; zeros without labels
    seed: int  # of the run and this client
    public: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))  # ids of the images all hold


@dataclass(frozen=True)
class Draw:
    """Random tensors a step wants: ``[batch, *shape]`` of this kind (views, noise, a generator's labels)."""

    kind: Literal["uniform", "normal", "integers"]
    shape: tuple[int, ...] = ()
    high: int = 0  # for integers


@dataclass(frozen=True)
class Phase:
    """One stretch of a client's local work: what is trained, for how long, on what.

    A phase with no trainable names is a *fold*: every batch is passed to :meth:`Method.fold` once.
    """

    slot: str = "model"
    trainable: frozenset[str] | None = None  # None: every parameter of the arch
    epochs: int | None = None  # None: [train] local-epochs (or local-steps)
    steps: int | None = None
    optim: Optim | None = None  # None: [train]'s
    groups: tuple[tuple[frozenset[str], Optim], ...] = ()  # names with an optimiser of their own
    data: Literal["train", "val", "test", "public"] = "train"  # test: a newcomer's, in phases without labels
    inputs: Literal["x", "features"] = "x"
    batch_stats: bool = True  # False: normalisation layers keep their running statistics
    labelled: bool = True  # unseen clients skip phases that need labels
    name: str = "train"


@dataclass(frozen=True)
class Method:
    """FedAvg's skeleton; see ``docs/how-to/own-method.md`` and any file in ``fedshift/methods``.

    Slots by convention: ``model`` is what is trained and travels, ``now`` is filled by the engine, ``tuned`` is a model
    that :meth:`final_phases` left behind. Entries of ``mine`` never leave the client.
    """

    arch: Arch
    train: Train = field(default_factory=Train)

    linear: ClassVar[bool] = False  # the aggregate is a weighted mean: secure aggregation and central DP need that
    personal: ClassVar[bool] = False  # clients end with models of their own
    needs: ClassVar[frozenset[str]] = frozenset()  # of the architecture: "norm", "batch-norm"
    deploys: ClassVar[frozenset[str]] = frozenset({"model"})  # slots adapters can ask for
    common: ClassVar[frozenset[str]] = frozenset()  # slots everybody receives alike, and only folds read: kept once

    @property
    def extra_rounds(self) -> int:
        """Rounds of its own after the experiment's (``now.round >= now.rounds``); they are stated with the run.

        Before them training is half done, so validation chooses among them only.
        """
        return 0

    # ---- before anything runs -------------------------------------------------------------------------------------
    @classmethod
    def build(cls, backbone: Arch, options: Mapping[str, Any]) -> Arch:
        """Surgery on the network: a second head, other blocks. Default: none. ``options``: the hyper-parameters."""
        return backbone

    def prepare_task(self, task: Task) -> Task:
        """The task this method trains on (Centralised pools the clients). Evaluation always uses the original."""
        return task

    # ---- what a client does in a round ------------------------------------------------------------------------------
    def phases(self, now: Now) -> tuple[Phase, ...]:
        """Local work of a round, in order."""
        return (Phase(),)

    def final_phases(self) -> tuple[Phase, ...]:
        """Work done once after the last aggregation, and by a client that joins later."""
        return ()

    def joining_phases(self) -> tuple[Phase, ...]:
        """Work of a client that joins later and has no labels: by default the final phases that need none."""
        return tuple(phase for phase in self.final_phases() if not phase.labelled)

    def draws(self, phase: Phase) -> dict[str, Draw]:
        """Random tensors wanted in each step's batch, by name."""
        return {}

    # ---- client half: pure, vmappable -------------------------------------------------------------------------------
    def private(self, now: Now) -> frozenset[str]:
        """Entries of the model that never leave the client."""
        return frozenset()

    def birth(self, model: Tensors, facts: Facts, now: Now) -> Tree:
        """Private memory of a client that starts now; ``model`` is the run's common initialisation."""
        # a stranger has no trained private part, and an untrained one would be worse than none
        private = pick(model, self.private(now)) if facts.number >= 0 else {}
        return {"model": private} if private else {}

    def client_init(self, down: Tree, mine: Tree) -> Tree:
        """The state local work starts from."""
        return {**down, "model": {**mine.get("model", {}), **down["model"]}}

    def loss(self, state: Tree, tensors: Tensors, batch: Batch, phase: Phase) -> tuple[Tensor, Tensors]:
        """The loss of ``tensors`` (``state[phase.slot]`` with the trainable ones live), and refreshed buffers."""
        output = self.outputs(tensors, batch, phase)
        return F.cross_entropy(output.logits, batch["y"]), output.buffers

    def outputs(self, tensors: Tensors, batch: Batch, phase: Phase) -> Output:
        """Forward pass of a training batch, whose inputs are images or cached features."""
        if phase.inputs == "features":
            return Output(self.arch.classify(tensors, batch["x"]), batch["x"], {}, {})
        return self.arch(tensors, batch["x"], phase.batch_stats)

    def fix_grad(self, state: Tree, grads: Tensors, phase: Phase) -> Tensors:
        """Correct the gradients before the optimiser sees them."""
        return grads

    def clipped(self, grads: Tensors, phase: Phase) -> Tensors:
        """Limit the gradients: by default their joint norm, to ``[train] clip``."""
        return grads if self.train.clip is None else clip_by_norm(grads, self.train.clip)

    def client_step(self, state: Tree, batch: Batch, phase: Phase) -> Tree:
        """One batch: gradient, :meth:`fix_grad`, clipping, optimiser. Override when a batch needs several updates."""
        slot = state[phase.slot]
        live = pick(slot, self.trainable(phase))
        frozen = {name: leaf for name, leaf in slot.items() if name not in live}
        grads, value, buffers = gradient(lambda t: self.loss(state, {**frozen, **t}, batch, phase), live)
        grads = self.clipped(self.fix_grad(state, grads, phase), phase)
        memory = state["optim"]
        scale = state["now"]["decay"]
        for names, rule in self.groups(phase):
            group = pick(live, names)
            moved, kept = rule.update(group, pick(grads, names), memory, scale)
            live, memory = {**live, **moved}, {**memory, **kept}
        log = {"loss": state["log"]["loss"] + value, "steps": state["log"]["steps"] + 1}
        return {**state, phase.slot: {**slot, **live, **buffers}, "optim": memory, "log": log}

    def fold(self, state: Tree, batch: Batch, phase: Phase) -> Tree:
        """A phase that trains nothing: collect descriptors, prototypes, losses."""
        return state

    def client_final(self, state: Tree, down: Tree, mine: Tree) -> tuple[Tree, Tree]:
        """What goes up and what is kept: by default, what came down goes up and what was private stays."""
        up = {"model": pick(state["model"], down["model"])}
        return up, {slot: pick(state[slot], leaves) for slot, leaves in mine.items()}

    def settle(self, state: Tree, down: Tree, mine: Tree) -> Tree:
        """What a client keeps of its :meth:`final_phases`: by default the tuned model."""
        return {**mine, "tuned": state["model"]}

    def publish(self, mine: Tree) -> Tree:
        """Opt-in, once, after the final phases: what a client gives to the others and to newcomers (counted in bytes)."""
        return {}

    # ---- server half ------------------------------------------------------------------------------------------------
    def server_init(self, models: Mapping[str, Tensors], clients: tuple[str, ...]) -> Tree:
        """The server's state; ``models`` has one entry per architecture."""
        if len(models) != 1:
            raise UserError(
                f"{type(self).__name__} averages weights, so all clients need one architecture, not {', '.join(models)}"
            )
        return {"model": next(iter(models.values()))}

    def public_init(self, server: Tree, public: Tensor) -> Tree:
        """The server's state where there is a public set; ``public`` are the ids of its images, in their order."""
        return server

    def broadcast(self, server: Tree, client: str | None, now: Now) -> Tree:
        """What goes down to this client; None is a client nobody has seen, who also gets what others published."""
        if client is None:
            return {"model": {**drop(server["model"], self.private(now)), **server.get("newcomer", {})}}
        return {"model": drop(server["model"], self.private(now))}

    def told(self, server: Tree) -> Tensors:
        """Numbers about the server's own work in the round that has just ended, by name, for the log; most have none."""
        return {}

    def aggregate(self, server: Tree, ups: Mapping[str, Tree], now: Tensors, draws: Batch) -> Tree:
        """The next server state. ``now`` has ``samples`` [K] in the order of ``ups`` (client order).

        ``draws["seed"]`` is this round's server seed, for :mod:`fedshift.core.rng`.
        """
        merged = weighted_mean([up["model"] for up in ups.values()], self.weights(now))
        return {**server, "model": {**server["model"], **merged}}

    def weights(self, now: Tensors) -> Tensor:
        """FedAvg's weights of this round's clients: by size or uniform; they sum to one."""
        samples = now["samples"].to(torch.float64)
        raw = samples if self.train.weights == "size" else torch.ones_like(samples)
        return raw / raw.sum()

    def welcome(self, server: Tree, published: Mapping[str, Tree]) -> Tree:
        """Put what clients published where :meth:`broadcast` finds it: by default their uniform mean, for newcomers."""
        gifts = [tree["model"] for tree in published.values() if tree.get("model")]
        if not gifts:
            return server
        return {
            **server,
            "newcomer": weighted_mean(gifts, torch.full((len(gifts),), 1 / len(gifts), dtype=torch.float64)),
        }

    # ---- hand-over to the second axis -------------------------------------------------------------------------------
    def deployed(self, down: Tree, mine: Tree) -> Tree:
        """What a client serves with: what it last received and its private memory."""
        if "tuned" in mine:
            return {"model": mine["tuned"]}
        return {"model": {**mine.get("model", {}), **down["model"]}}

    def forward(self, deployed: Tree, x: Tensor, batch_stats: BatchStats = False) -> Output:
        """Prediction of a deployed model."""
        return self.arch(deployed["model"], x, batch_stats)

    # ---- not hooks ----------------------------------------------------------------------------------------------------
    def balanced_loss(self, state: Tree, tensors: Tensors, batch: Batch, phase: Phase) -> tuple[Tensor, Tensors]:
        """:meth:`loss` with balanced softmax on the client's own class counts instead of cross-entropy."""
        output = self.outputs(tensors, batch, phase)
        return balanced_softmax(output.logits, batch["y"], state["now"]["histogram"]), output.buffers

    def trainable(self, phase: Phase) -> frozenset[str]:
        """The names a phase trains."""
        return self.arch.trainable if phase.trainable is None else phase.trainable

    def groups(self, phase: Phase) -> tuple[tuple[frozenset[str], Optim], ...]:
        """Every trained name with its optimiser."""
        named = frozenset(name for names, _ in phase.groups for name in names)
        rest = self.trainable(phase) - named
        base = phase.optim if phase.optim is not None else self.train.optim()
        return (*phase.groups, (rest, base)) if rest else phase.groups
