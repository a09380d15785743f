"""Clients that teach one another with logits on public images: their networks may differ, and no weight travels.

Everybody holds the public set D_p of N_p unlabelled images. What is said about it is a table ``[N_p, classes]`` whose row i
belongs to image i. A pass that only looks (a fold) goes along D_p in order, so it counts its rows; a training phase sees
shuffled batches, whose rows are found by the images' ids.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from fedshift.blocks.inner_step import stepped
from fedshift.core.context import ClientInfo, Context, Phase, ServerContext
from fedshift.core.grad import gradient
from fedshift.core.method import Batch, Method
from fedshift.core.options import NonNegativeInt
from fedshift.core.tree import Tensors, Tree, pick, uniform_mean, zeros_like
from fedshift.errors import UserError

if TYPE_CHECKING:
    from fedshift.data.task import Task


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """``KL(softmax teacher || softmax student)`` in nats, the mean over the rows; zero where they agree.

    >>> divergence(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]))
    tensor(0.)
    """
    log_p, log_q = teacher.log_softmax(-1), student.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


def ordered(ids: Tensor) -> Tensors:
    """The public images' ids in ascending order, and the row of each.

    >>> ordered(torch.tensor([30, 10, 20]))
    {'ids': tensor([10, 20, 30]), 'rows': tensor([1, 2, 0])}
    """
    rows = ids.argsort(stable=True)
    return {"ids": ids[rows], "rows": rows}


def rows_of(public: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    """The rows of images by their ids; of equal images (one id) always the first one's.

    >>> rows_of(ordered(torch.tensor([30, 10, 20])), torch.tensor([20, 30]))
    tensor([2, 0])
    """
    found = torch.searchsorted(public["ids"], ids)
    return public["rows"][found.clamp(max=public["ids"].shape[-1] - 1)]


@dataclass(frozen=True)
class LogitExchange(Method):
    """The skeleton: digest what all think of D_p, train on one's own data, say what one thinks of D_p now.

    The server keeps one mean table for each name in ``ensembles``. Each client, also one that joins later, starts from a
    random network of its own. An unseen client digests, and needs no labels for it.
    """

    digest_epochs: NonNegativeInt = 1
    unseen_epochs: NonNegativeInt = 2

    personal: ClassVar[bool] = True
    linear: ClassVar[bool] = True
    ensembles: ClassVar[tuple[str, ...]] = ("base",)

    def prepare_task(self, task: Task) -> Task:
        """Without public images there is nothing to talk about."""
        if task.public is None or not len(task.public):
            raise UserError(
                f"{type(self).__name__} exchanges logits on a public set of unlabelled images; add [split] public = 0.1"
            )
        return task

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """Digest, revisit, communicate; in the first round there is nothing to digest yet."""
        digest = (self.digest_phase(self.digest_epochs),) if ctx.round > 0 else ()
        return (*digest, *super().phases(ctx), *self.looks())

    def last_phases(self, ctx: Context) -> tuple[Phase, ...]:
        """An unseen client digests."""
        return (self.digest_phase(self.unseen_epochs),) if ctx.stage == "unseen" else ()

    def digest_phase(self, epochs: int) -> Phase:
        """Some epochs over D_p."""
        return Phase(name="digest", data="public", epochs=epochs, labelled=False)

    def looks(self) -> tuple[Phase, ...]:
        """Passes over D_p that train nothing; the last one makes what is sent."""
        return (Phase(name="communicate", data="public", kind="fold", labelled=False, batch_stats=False),)

    def private(self, ctx: Context) -> frozenset[str]:
        """The whole model."""
        return self.arch.encoder | self.arch.head

    def init_local(self, model: Tensors, info: ClientInfo, ctx: Context) -> Tree:
        """A random network of one's own, and which public image is which."""
        own = {name: leaf.to(model[name]) for name, leaf in self.arch.init(info.seed).items()}
        return {"model": own, "public": ordered(info.public)}

    def begin(self, down: Tree, local: Tree) -> Tree:
        """Beside the model: what all think, and an empty table for what this client thinks."""
        counter = {"next": torch.zeros_like(local["public"]["rows"][0])}
        own = {**super().begin(down, local), **{slot: local[slot] for slot in local if slot != "model"}}
        return {**own, "logits": zeros_like(down["consensus"]), "row": counter}

    def teachers(self, state: Tree, batch: Batch) -> Tensors:
        """What all think of a batch of public images, by ensemble."""
        rows = rows_of(state["public"], batch["index"])
        return {name: table[rows] for name, table in state["consensus"].items()}

    @abstractmethod
    def opinions(self, state: Tree, x: Tensor) -> Tensors:
        """What this client thinks of public images, by ensemble."""

    def fold(self, state: Tree, batch: Batch, phase: Phase) -> Tree:
        """Write down this client's logits of a batch of D_p."""
        count = len(batch["index"])
        rows = state["row"]["next"] + torch.arange(count, device=batch["index"].device)
        said = self.opinions(state, batch["x"])
        tables = {name: table.index_copy(0, rows, said[name]) for name, table in state["logits"].items()}
        return {**state, "logits": tables, "row": {"next": state["row"]["next"] + count}}

    def finish(self, state: Tree, down: Tree, local: Tree) -> tuple[Tree, Tree]:
        """Logits go up, everything else stays."""
        return {"logits": state["logits"]}, super().finish(state, down, local)[1]

    def settle(self, state: Tree | None, down: Tree, local: Tree, ctx: Context) -> tuple[Tree, Tree]:
        """An unseen client keeps what it has learnt."""
        return {}, local if state is None else {slot: pick(state[slot], leaves) for slot, leaves in local.items()}

    @property
    def gives(self) -> bool:
        """Nothing: what was learnt is in the logits of the rounds."""
        return False

    def init_server(self, models: Mapping[str, Tensors], clients: tuple[str, ...], public: Tensor) -> Tree:
        """Tables with a row for each image, whose zeros nobody reads; the clients may have any networks."""
        like = next(iter(next(iter(models.values())).values()))
        tables = {name: like.new_zeros(len(public), self.arch.classes) for name in self.ensembles}
        return {"model": {}, "consensus": tables}

    def broadcast(self, server: Tree, client: str, ctx: Context) -> Tree:
        """What all think; the same for everybody, seen or not."""
        return {"model": {}, "consensus": server["consensus"]}

    def aggregate(self, server: Tree, ups: Mapping[str, Tree], ctx: ServerContext) -> tuple[Tree, Tensors]:
        """The mean over this round's clients, each with the same weight."""
        return {**server, "consensus": uniform_mean([up["logits"] for up in ups.values()])}, {}


@dataclass(frozen=True)
class AdaptedExchange(LogitExchange):
    """Clients also say what they think of D_p after one step of all weights on a loss over D_p that needs no labels.

    A first pass adds up the gradient of :meth:`unlabelled`; the second takes ``w - rate (clip(gradient) + wd w)``, the rate
    with the round's decay, and looks with the result, which is then forgotten.
    """

    def looks(self) -> tuple[Phase, ...]:
        """Find the slope, then look."""
        (communicate,) = super().looks()
        return (
            Phase(name="slope", data="public", kind="fold", labelled=False, batch_stats=False),
            communicate,
        )

    @abstractmethod
    def step_settings(self) -> tuple[float, float, float | None]:
        """Rate (of the first round), weight decay and clip of the step."""

    @abstractmethod
    def unlabelled(self, state: Tree, tensors: Tensors, x: Tensor) -> Tensor:
        """A batch's share of the loss on all of D_p."""

    def begin(self, down: Tree, local: Tree) -> Tree:
        """The slope starts at zero."""
        state = super().begin(down, local)
        return {**state, "slope": zeros_like(pick(state["model"], self.arch.trainable))}

    def fold(self, state: Tree, batch: Batch, phase: Phase) -> Tree:
        """Add a batch's gradient, or write down the logits."""
        if phase.name != "slope":
            return super().fold(state, batch, phase)
        model = state["model"]
        live = pick(model, self.arch.trainable)
        grads, _, _ = gradient(lambda t: (self.unlabelled(state, {**model, **t}, batch["x"]), None), live)
        return {**state, "slope": {name: leaf + grads[name] for name, leaf in state["slope"].items()}}

    def adapted(self, state: Tree) -> Tensors:
        """The model after its step."""
        rate, weight_decay, clip = self.step_settings()
        live = pick(state["model"], state["slope"])
        return {**state["model"], **stepped(live, state["slope"], rate * state["now"]["decay"], weight_decay, clip)}
