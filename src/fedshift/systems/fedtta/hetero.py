"""HeteroFedTTA: FedTTA for clients with any networks, who teach one another with logits on public images."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from fedshift.blocks.logit_exchange import AdaptedExchange, LogitExchange, divergence
from fedshift.blocks.losses import entropy
from fedshift.core.context import ClientInfo, Context, Phase
from fedshift.core.method import Batch
from fedshift.core.options import Count, NonNegative
from fedshift.core.registry import method
from fedshift.core.tree import Tensors, Tree, pick
from fedshift.errors import UserError
from fedshift.systems.fedtta.learned_loss import NAMES, RATE, SLOT, fresh, norms
from fedshift.systems.fedtta.method import FedTTA


@method(
    "heterofedtta",
    paper="UPFL: Unsupervised Personalized Federated Learning towards New Clients",
    venue="arXiv",
    year=2023,
)
@dataclass(frozen=True)
class HeteroFedTTA(AdaptedExchange, FedTTA):
    """FedMD with two mean tables: what models think of D_p before (F_base) and after (F_per) a step on their learnt loss.

    A client's model ``psi`` and loss network ``phi`` (see ``fedtta``) are private, and of any size. A round:

    1. *digest* (not in round 0): ``digest-epochs`` over D_p, through the inner step ``psi~(x, phi)`` on each batch, on
       ``KL(softmax F_per || softmax f(x; psi~)) + lam KL(softmax F_base || softmax f(x; psi))``;
    2. *revisit*: FedTTA's local steps, cross-entropy of psi~, on its own labelled data;
    3. *communicate*: ``f(D_p; psi)`` and ``f(D_p; psi~)``, psi~ after one step on the learnt loss of all of D_p, go up.

    The server averages both uniformly. An unseen client starts from a random psi and phi, digests for
    ``unseen-epochs``, and is served like FedTTA's: the adapter ``fedtta`` takes its step on the client's own images. With
    ``lam = 0`` (distillation end to end) F_base is not used.

    [R] The direction of the divergences is that of the authors' code (Eq. 14 has the student first), and so are two epochs
    for unseen clients. The learnt loss of D_p is the mean over batches of ``[train] batch-size``, in their order, as the
    adapter's is at a new client, with the same clip and weight decay. Public batches are as large as the client's own,
    where the code has 100. FedTTA-Prox (``mu``) is not possible, because no model is received; FedTTA++ is the adapter
    with more steps. At the end the inner rate of the last round comes with the tables, one number.

    The layers of phi are 32, 64 and 128 wide for the paper's small, medium and big network, twice its first layer; so they
    are for any other network, unless ``loss-width`` says how wide. One optimiser serves digest and revisit, as in the
    authors' code: phi's momentum (and psi's, with ``[train] momentum``) goes on from one to the other.
    """

    lam: NonNegative = 0.8
    loss_width: Count | None = None  # default: twice the outputs of the network's first layer

    ensembles: ClassVar[tuple[str, ...]] = ("base", "personal")
    revision: ClassVar[int] = 1

    def __post_init__(self) -> None:
        """Refuse a term that has no meaning here."""
        super().__post_init__()
        if self.mu:
            raise UserError("mu must be 0, because nobody receives a model to stay close to")

    def digest_phase(self, epochs: int) -> Phase:
        """Model and loss learn together, each in its own way."""
        own = frozenset(NAMES)
        groups = ((own, self._loss_rule()),)
        return replace(super().digest_phase(epochs), trainable=self.arch.trainable | own, groups=groups)

    def private(self, ctx: Context) -> frozenset[str]:
        """The whole model, and the loss."""
        return super().private(ctx) | frozenset(NAMES)

    def init_local(self, model: Tensors, info: ClientInfo, ctx: Context) -> Tree:
        """A random loss beside the random network."""
        local = super().init_local(model, info, ctx)
        head = next(iter(pick(local["model"], self.arch.head).values()))
        width = self.loss_width or 2 * len(local["model"][self.arch.parameters[0]])
        return {**local, "model": {**local["model"], **fresh(head, self.arch.classes, width)}}

    def begin(self, down: Tree, local: Tree) -> Tree:
        """One optimiser for the whole round."""
        state = super().begin(down, local)
        rules = self.groups(self.digest_phase(self.digest_epochs))
        return {
            **state,
            "momentum": {k: v for own, rule in rules for k, v in rule.memory(pick(state["model"], own)).items()},
        }

    def client_step(self, state: Tree, batch: Batch, phase: Phase) -> Tree:
        """A step that goes on with the momentum of the phase before."""
        after = super().client_step({**state, "optim": state["momentum"]}, batch, phase)
        return {**after, "optim": state["optim"], "momentum": after["optim"]}

    def loss(self, state: Tree, tensors: Tensors, batch: Batch, phase: Phase) -> tuple[Tensor, Tensors]:
        """On public images the divergences from both ensembles, on one's own FedTTA's."""
        if phase.name != "digest":
            return super().loss(state, tensors, batch, phase)
        teachers = self.teachers(state, batch)
        # cross-entropy with soft labels is the divergence and their entropy, a constant
        soft = teachers["personal"].softmax(-1)
        value, buffers = super().loss(state, tensors, {**batch, "y": soft}, phase)
        value = value - entropy(teachers["personal"]).mean()
        if self.lam:
            before = self.outputs(tensors, batch, phase).logits
            value = value + self.lam * divergence(teachers["base"], before)
        return value, buffers

    def step_settings(self) -> tuple[float, float, float | None]:
        """The inner step's, clipped as at a new client."""
        return self.inner_lr, self.inner_weight_decay, self.clip

    def unlabelled(self, state: Tree, tensors: Tensors, x: Tensor) -> Tensor:
        """A batch's share of the mean over batches; statistics are the batch's, as in training."""
        logits = self.arch(tensors, x, self.arch.has_batch_norm and len(x) > 1).logits
        return norms(tensors, logits, len(logits)).sum() / state["now"]["steps"]

    def opinions(self, state: Tree, x: Tensor) -> Tensors:
        """Logits before and after the step."""
        models = {"base": state["model"], "personal": self.adapted(state)}
        return {name: self.arch(tensors, x).logits for name, tensors in models.items()}

    def broadcast(self, server: Tree, client: str, ctx: Context) -> Tree:
        """Both tables; who is about to serve also learns the rate of the inner step."""
        down = LogitExchange.broadcast(self, server, client, ctx)
        if not ctx.ending:
            return down
        rate = down["consensus"]["base"].new_tensor(self.inner_lr * ctx.decay(self.train))
        return {**down, SLOT: {RATE: rate}}
