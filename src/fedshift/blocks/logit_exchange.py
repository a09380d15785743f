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
from fedshift.core.checks import not_negative
from fedshift.core.grad import gradient
from fedshift.core.method import Batch, Facts, Method, Now, Phase
from fedshift.core.tree import Tensors, Tree, pick, weighted_mean, zeros_like
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
    random network of its own. A newcomer digests, and needs no labels for it.
    """

    digest_epochs: int = 1
    newcomer_epochs: int = 2

    personal: ClassVar[bool] = True
    linear: ClassVar[bool] = True
    ensembles: ClassVar[tuple[str, ...]] = ("base",)

    def __post_init__(self) -> None:
        """Refuse settings that cannot be meant."""
        not_negative(digest_epochs=self.digest_epochs, newcomer_epochs=self.newcomer_epochs)

    def prepare_task(self, task: Task) -> Task:
        """Without public images there is nothing to talk about."""
        if task.public is None or not len(task.public):
            raise UserError(
                f"{type(self).__name__} exchanges logits on a public set of unlabelled images; add [split] public = 0.1"
            )
        return task

    def phases(self, now: Now) -> tuple[Phase, ...]:
        """Digest, revisit, communicate; in the first round there is nothing to digest yet."""
        digest = (self.digest_phase(self.digest_epochs),) if now.round > 0 else ()
        return (*digest, *super().phases(now), *self.looks())

    def joining_phases(self) -> tuple[Phase, ...]:
        """A newcomer digests."""
        return (self.digest_phase(self.newcomer_epochs),)

    def digest_phase(self, epochs: int) -> Phase:
        """Some epochs over D_p."""
        return Phase(name="digest", data="public", epochs=epochs, labelled=False)

    def looks(self) -> tuple[Phase, ...]:
        """Passes over D_p that train nothing; the last one makes what is sent."""
        return (Phase(name="communicate", data="public", trainable=frozenset(), labelled=False, batch_stats=False),)

    def private(self, now: Now) -> frozenset[str]:
        """The whole model."""
        return self.arch.encoder | self.arch.head

    def birth(self, model: Tensors, facts: Facts, now: Now) -> Tree:
        """A random network of one's own, and which public image is which."""
        own = {name: leaf.to(model[name]) for name, leaf in self.arch.init(facts.seed).items()}
        return {"model": own, "public": ordered(facts.public)}

    def client_init(self, down: Tree, mine: Tree) -> Tree:
        """Beside the model: what all think, and an empty table for what this client thinks."""
        counter = {"next": torch.zeros_like(mine["public"]["rows"][0])}
        own = {**super().client_init(down, mine), **{slot: mine[slot] for slot in mine if slot != "model"}}
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

    def client_final(self, state: Tree, down: Tree, mine: Tree) -> tuple[Tree, Tree]:
        """Logits go up, everything else stays."""
        return {"logits": state["logits"]}, super().client_final(state, down, mine)[1]

    def settle(self, state: Tree, down: Tree, mine: Tree) -> Tree:
        """A newcomer keeps what it has learnt."""
        return {slot: pick(state[slot], leaves) for slot, leaves in mine.items()}

    def server_init(self, models: Mapping[str, Tensors], clients: tuple[str, ...]) -> Tree:
        """Tables without rows; the clients may have any networks."""
        like = next(iter(next(iter(models.values())).values()))
        return {"model": {}, "consensus": {name: like.new_zeros(0, self.arch.classes) for name in self.ensembles}}

    def public_init(self, server: Tree, public: Tensor) -> Tree:
        """A row for each image; nobody reads the zeros of the first round."""
        tables = {name: table.new_zeros(len(public), table.shape[1]) for name, table in server["consensus"].items()}
        return {**server, "consensus": tables}

    def broadcast(self, server: Tree, client: str | None, now: Now) -> Tree:
        """What all think; the same for everybody, seen or not."""
        return {"model": {}, "consensus": server["consensus"]}

    def aggregate(self, server: Tree, ups: Mapping[str, Tree], now: Tensors, draws: Batch) -> Tree:
        """The mean over this round's clients, each with the same weight."""
        uniform = torch.full((len(ups),), 1 / len(ups), dtype=torch.float64)
        return {**server, "consensus": weighted_mean([up["logits"] for up in ups.values()], uniform)}


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
            Phase(name="slope", data="public", trainable=frozenset(), labelled=False, batch_stats=False),
            communicate,
        )

    @abstractmethod
    def step_settings(self) -> tuple[float, float, float | None]:
        """Rate (of the first round), weight decay and clip of the step."""

    @abstractmethod
    def unlabelled(self, state: Tree, tensors: Tensors, x: Tensor) -> Tensor:
        """A batch's share of the loss on all of D_p."""

    def client_init(self, down: Tree, mine: Tree) -> Tree:
        """The slope starts at zero."""
        state = super().client_init(down, mine)
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
