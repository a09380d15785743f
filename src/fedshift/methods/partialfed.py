"""PartialFed: a client begins a round with some layers of the global model and some of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from fedshift.core.context import ClientInfo, Context, Phase, RandomSpec
from fedshift.core.method import Batch, Method
from fedshift.core.optim import Adam
from fedshift.core.options import NonNegative, NonNegativeInt
from fedshift.core.registry import method
from fedshift.core.tree import Tensors, Tree, pick
from fedshift.errors import UserError

if TYPE_CHECKING:
    from fedshift.data.task import Task

LOGITS = "logits"  # of the policy, [layers, 2]: global, local
HOT, COLD = 5.0, 0.5  # temperatures of the first and of the last round


@method(
    "partialfed",
    paper="PartialFed: Cross-Domain Personalized Federated Learning via Partial Initialization",
    venue="NeurIPS",
    year=2021,
)
@dataclass(frozen=True)
class PartialFed(Method):
    """FedAvg in which a client loads only some layers of what it receives; the others stay as its last round left them.

    All layers go up and are averaged, and an unseen client serves with that average. A layer is what shares a module, for
    instance weight, bias and statistics of a BatchNorm. ``mode`` says who chooses:

    - ``fix``: normalisation layers and the head are the client's own.
    - ``adaptive``: every client learns two logits for each layer, (global, local), at first 0. Before the weights are
      trained, ``policy_steps`` steps of Adam on validation images lower the loss of ``g + z (l - g)``, where g is the
      received layer, l the client's own and ``z = 1[p > 1/2]`` with the gradient of
      ``p = softmax((logits + gumbel) / temperature)[local]`` (straight-through Gumbel-softmax). Layers whose local logit is
      the larger one are then kept. The temperature falls linearly from 5 in the first round to 0.5 in the last.

    A client serves with what its rule chooses between the received model and its own last one; in its first round it has
    none and loads everything. Equal logits mean global, so ``policy_steps = 0`` is FedAvg. No code was published: Adam, its
    steps and rate are ours. The policy is judged in inference mode; running statistics follow z without a gradient.
    """

    mode: Literal["fix", "adaptive"] = "adaptive"
    policy_steps: NonNegativeInt = 5
    policy_lr: NonNegative = 0.1

    personal: ClassVar[bool] = True
    linear: ClassVar[bool] = True
    provides: ClassVar[frozenset[str]] = frozenset({"model", "global"})

    def prepare_task(self, task: Task) -> Task:
        """A policy needs images that the weights were not trained on."""
        if self.mode == "adaptive" and not any(len(client.val) for client in task.clients):
            raise UserError(
                "method 'partialfed' learns its policy on validation images, but no client has any: set [split] val"
            )
        return task

    @property
    def layers(self) -> dict[str, int]:
        """The number of every entry's layer, in the network's order."""
        entries = (*self.arch.parameters, *self.arch.buffers)
        modules = dict.fromkeys(name.rpartition(".")[0] for name in entries)
        numbers = {module: number for number, module in enumerate(modules)}
        return {name: numbers[name.rpartition(".")[0]] for name in entries}

    def phases(self, ctx: Context) -> tuple[Phase, ...]:
        """The policy first, if it is learnt, then all weights."""
        if self.mode == "fix":
            return (Phase(),)
        names, rule = frozenset({LOGITS}), Adam(lr=self.policy_lr)
        policy = Phase(
            slot="policy",
            trainable=names,
            steps=self.policy_steps,
            optim=rule,
            data="val",
            batch_stats=False,
            name="policy",
        )
        return (policy, Phase())

    def draws(self, phase: Phase) -> dict[str, RandomSpec]:
        """Two numbers for each layer; a step uses those of its first image."""
        return {"gumbel": RandomSpec("uniform", (len(set(self.layers.values())), 2))} if phase.slot == "policy" else {}

    def init_local(self, model: Tensors, info: ClientInfo, ctx: Context) -> Tree:
        """What may be kept, as everybody starts, and no preference; an unseen client has nothing."""
        if info.unseen:
            return {}
        past = {"known": torch.zeros((), dtype=torch.bool)}
        if self.mode == "fix":
            return {"kept": pick(model, self.arch.norm | self.arch.head), "past": past}
        logits = model[self.arch.parameters[0]].new_zeros(len(set(self.layers.values())), 2)
        return {"kept": model, "past": past, "policy": {LOGITS: logits}}

    def begin(self, down: Tree, local: Tree) -> Tree:
        """Partial initialisation, and both of its sources."""
        own = self.own(down["model"], local)
        return {**down, **own, "global": down["model"], "model": self.chosen(down["model"], own)}

    def client_step(self, state: Tree, batch: Batch, phase: Phase) -> Tree:
        """A step of the policy chooses anew what the weights start from."""
        after = super().client_step(state, batch, phase)
        return {**after, "model": self.chosen(after["global"], after)} if phase.slot == "policy" else after

    def loss(self, state: Tree, tensors: Tensors, batch: Batch, phase: Phase) -> tuple[Tensor, Tensors]:
        """The policy's loss is that of a drawn model; it refreshes nothing."""
        if phase.slot != "policy":
            return super().loss(state, tensors, batch, phase)
        now = state["now"]
        progress = (now["round"] / (now["rounds"] - 1).clamp(min=1)).clamp(max=1)
        temperature = HOT + (COLD - HOT) * progress
        gumbel = -(-batch["gumbel"][0].clamp(min=2.0**-25).log()).log()
        soft = ((tensors[LOGITS] + gumbel) / temperature).softmax(1)[:, 1]
        hard = soft > 0.5
        keep = hard.to(soft.dtype) + soft - soft.detach()
        layers, received, kept = self.layers, state["global"], state["kept"]
        weights = pick(received, self.arch.trainable)
        drawn = {name: leaf + keep[layers[name]] * (kept[name] - leaf) for name, leaf in weights.items()}
        model = {**self._taken(received, kept, hard), **drawn}
        return self.cross_entropy(self.outputs(model, batch, phase).logits, batch), {}

    def finish(self, state: Tree, down: Tree, local: Tree) -> tuple[Tree, Tree]:
        """The whole model goes up; it is also the next round's local one."""
        up, kept = super().finish(state, down, local)
        past = {"known": torch.ones_like(local["past"]["known"])}
        return up, {**kept, "kept": pick(state["model"], local["kept"]), "past": past}

    def own(self, received: Tensors, local: Tree) -> Tree:
        """A client's memory; one that has never trained takes the received layers for its own."""
        known, kept = local["past"]["known"], local["kept"]
        return {**local, "kept": {name: torch.where(known, leaf, received[name]) for name, leaf in kept.items()}}

    def chosen(self, received: Tensors, own: Tree) -> Tensors:
        """Every layer from where the rule takes it."""
        if "policy" not in own:
            return {**received, **own["kept"]}
        logits = own["policy"][LOGITS]
        return self._taken(received, own["kept"], logits[:, 1] > logits[:, 0])

    def deployed(self, down: Tree, local: Tree) -> Tree:
        """The rule's choice, and the received model, which is all that an unseen client has."""
        received = down["model"]
        return {"model": self.chosen(received, self.own(received, local)) if local else received, "global": received}

    def _taken(self, received: Tensors, kept: Tensors, keep: Tensor) -> Tensors:
        layers = self.layers
        return {name: torch.where(keep[layers[name]], kept[name], leaf) for name, leaf in received.items()}
