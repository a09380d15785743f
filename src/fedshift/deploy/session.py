"""The server's half of a run: the session of every run, whose clients keep their local states to themselves."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedshift.core.adapter import Adapter
from fedshift.core.context import Context
from fedshift.core.method import Method
from fedshift.core.tree import Tree, shapes
from fedshift.data.task import Client, Task
from fedshift.deploy.calibrating import LOOK, Afield, Veiled
from fedshift.deploy.engine import Remote, without_handle
from fedshift.deploy.packet import Handle, Packet
from fedshift.engines.base import Compute, Engine, Reply, Score
from fedshift.errors import UserError
from fedshift.experiment.schema import AdapterSpec
from fedshift.privacy.frame import Frame
from fedshift.privacy.noise import Noise, secret
from fedshift.runs.artefact import settings_of
from fedshift.runs.calibrate import Looking, Measured, measure, topics_of
from fedshift.runs.deployment import Deployment, calibration_in
from fedshift.runs.plan import Job
from fedshift.runs.progress import Reporter
from fedshift.runs.round import Begun
from fedshift.runs.session import Session
from fedshift.runs.uploads import Delivered, common
from fedshift.store.metric import VALIDATION
from fedshift.store.state import State
from fedshift.store.trees import load

if TYPE_CHECKING:
    from fedshift.blocks.calibration import Kind


class ServerSession(Session):
    """A session that knows of every client's local state only which round it is of (:class:`Handle`).

    A message takes long: what parties did or told for the models of one round is remembered, and not asked for again.
    """

    def __init__(self, *arguments: Any, last: int, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._last = last  # after so many rounds its test streams are asked for
        self._deployments: dict[int, Deployment] = {}
        # parts and scores, by round, adapters and whether they go by what was measured
        self._told: dict[tuple[int, str, bool], tuple[tuple[str, ...], dict[tuple[str, str], Score]]] = {}
        self._measured: dict[tuple[int, str], Measured] = {}

    def size_of(self, client: Client) -> int:
        """How many images a party says it trains on."""
        return self._remote.exchange.sizes()[client.name]

    def deploy(self, state: State) -> Deployment:
        """The models of this state, which are at the parties."""
        if state.round not in self._deployments:
            made = super().deploy(state)
            self._deployments[state.round] = Afar(**{part.name: getattr(made, part.name) for part in fields(made)})
        return self._deployments[state.round]

    def evaluate(
        self,
        adapters: Mapping[str, Adapter],
        deployed: Mapping[str, Tree],
        parts: Sequence[str],
        task: Task | None = None,
    ) -> dict[tuple[str, str], Score]:
        """Scores by (client, part), of the parties that answer and agree to tell counts."""
        one = next(iter(deployed.values()))
        number = Handle.of(one).models
        assert number is not None
        how = json.dumps({name: settings_of(own) for name, own in adapters.items()}, default=str)
        key = number, how, bool(calibration_in(one)) and any(own.calibrated for own in adapters.values())
        asked, known = self._told.get(key, ((), {}))
        wanted = (*parts, VALIDATION, *self.task.streams) if number == self._last else parts
        if missing := [part for part in dict.fromkeys(wanted) if part not in asked]:
            known = {**known, **super().evaluate(adapters, deployed, missing, task)}
            self._told[key] = ((*asked, *missing), known)
        return {(name, part): score for (name, part), score in known.items() if part in parts}

    def measured(self, deployment: Deployment, looking: Looking) -> Measured:
        """Parties predict with their models, then tell sums; only those that agree to tell counts."""
        key = deployment.ctx.round, json.dumps({kind: list(specs) for kind, specs in looking.items()})
        if key not in self._measured:
            self._measured[key] = self._asked_for_sums(deployment, looking)
            if not self._measured[key].found:
                self._note("nothing is known of validation images: adapters take probabilities as they are")
        return self._measured[key]

    def _asked_for_sums(self, deployment: Deployment, looking: Looking) -> Measured:
        tells: dict[str, dict[str, Any]] = {}
        for kind, specs in looking.items():
            listed = {topic: entry_of(spec) for topic, spec in specs.items()}
            models = self._models(kind, deployment)
            packets = {
                name: Packet("calibrate", {**facts, "ask": LOOK, "looking": listed}, tree)
                for name, (facts, tree) in models.items()
            }
            for name, answer in self._remote.asked(packets).items():
                if answer.facts.get("topics"):
                    tells[name] = models[name][0]
        ordered = {client.name: tells[client.name] for client in self.task.clients if client.name in tells}
        topics, classes = topics_of(looking), self.setup.method.arch.classes
        if not self._remote.secure or not ordered:
            return measure(Afield(self._remote.asked, ordered, classes, self._note), topics, classes)
        try:
            return measure(Veiled(self._remote, ordered, deployment.ctx.round), topics, classes)
        except UserError as error:
            self._note(f"sums over validation images: {error}")
            return Measured({}, 0)

    def _models(self, kind: Kind, deployment: Deployment) -> dict[str, tuple[dict[str, Any], Tree]]:
        """Facts and tree of a packet with the model that a party would have as an unseen client, or with its own."""
        remote, found = self._remote, dict[str, tuple[dict[str, Any], Tree]]()
        if kind == "common" and self.setup.method.personal:
            ctx = replace(deployment.ctx, stage="unseen")
            for name, down in self._downs(deployment.server, self.task.clients, ctx).items():
                found[name] = remote.of_context(name, self.arch_of(self.task.client(name)), ctx, {}), down
            return found
        for name, tree in deployment.trained().items():
            found[name] = remote.of_models(name, self.arch_of(self.task.client(name)), tree), without_handle(tree)
        return found

    def after_local(self, state: State) -> dict[str, Tree]:
        """Parties are not asked to train for a score alone."""
        return {}

    def prepared(self, adapter: Adapter, tree: Tree, client: Client) -> Tree:
        """A party does that itself, with its own images."""
        return tree

    def _delivered(self, state: State, begun: Begun, replies: Mapping[str, Reply]) -> Delivered:
        """Parties have done their half of ``[privacy]``; what they sent is looked at as far as it can be."""
        privacy = self.setup.privacy
        if privacy is None:
            return super()._delivered(state, begun, replies)
        messages = {name: reply.up for name, reply in replies.items() if reply.finite}
        if not messages and not self.uploads.always:
            return Delivered({}, 0)
        names = list(messages) or [self.task.clients[0].name]
        downs = {**self._downs(state.server, [self.task.client(name) for name in names], begun.ctx), **begun.downs}
        frames = self._frames({name: downs[name] for name in names}, begun.ctx)
        if privacy.noise and not privacy.secure:  # of a secure summation the engine has written it down
            self._remote.opening()
        if not messages:
            return self.uploads.nothing(frames[names[0]], (begun.ctx.round,))
        if privacy.secure:
            found = messages[names[0]]["sum"]
            weights = (int(found["up"]), int(found["down"]))
            return self.uploads.of_sum(frames[names[0]], found["total"], names, *weights)
        return self.uploads.received(messages, frames, (begun.ctx.round,))

    def _train(
        self, state: State, clients: Sequence[Client], downs: Mapping[str, Tree], ctx: Context
    ) -> dict[str, Reply]:
        """Parties of all networks train; a secure sum is over all of them together."""
        replies = super()._train(state, clients, downs, ctx)
        sound = {name: downs[name] for name, reply in replies.items() if reply.finite}
        if not self._remote.secure or ctx.ending or not sound:
            return replies
        return self._remote.summed(replies, ctx.round, common(self._frames(sound, ctx)).size)

    def _frames(self, downs: Mapping[str, Tree], ctx: Context) -> dict[str, Frame]:
        """What uploads are measured from, by client; what they look like is found out once for each network and message."""
        ups, frames = dict[object, Tree](), dict[str, Frame]()
        for name, down in downs.items():
            method = self.method_of(self.task.client(name))
            key = self.arch_of(self.task.client(name)), shapes(down)
            if key not in ups:
                ups[key] = self._remote.expected(method, self.task, ctx, self.seed, name, down)
            frames[name] = Frame.of(ups[key], down)
        return frames

    def _noise(self) -> Noise:
        """A seed that others know would take it off again."""
        return secret

    def _lots(self, number: int) -> list[float]:
        """Who is drawn is nobody's business either."""
        return [secrets.randbelow(1 << 53) / (1 << 53) for _ in self.training.clients]

    def _local(self, state: State, client: Client, ctx: Context) -> Tree:
        return state.locals.get(client.name, {})

    def _settled(
        self, state: State, downs: Mapping[str, Tree], ctx: Context
    ) -> tuple[Mapping[str, Tree], Mapping[str, Tree]]:
        clients = self.task.clients
        own = {client.name: self._local(state, client, ctx) for client in clients}
        if not any(_settles(method, ctx) for method in self.setup.methods.values()):
            return {}, own
        replies = self._train(state, clients, downs, ctx)
        self._name_failed(replies)
        return {name: r.up for name, r in replies.items()}, {**own, **{name: r.local for name, r in replies.items()}}

    @property
    def _remote(self) -> Remote:
        assert isinstance(self.engine, Remote)
        return self.engine


def entry_of(spec: AdapterSpec) -> dict[str, Any]:
    """An adapter as a packet names it."""
    return {"name": spec.name, **({"label": spec.label} if spec.label else {}), **spec.options()}


def _settles(method: Method, ctx: Context) -> bool:
    """Whether a party has anything to do or to give after the last round."""
    return bool(method.last_phases(ctx)) or type(method).settle is not Method.settle


@dataclass(frozen=True)
class Afar(Deployment):
    """A deployment whose models are at the parties."""

    def trained(self) -> dict[str, Tree]:
        """What a party needs to make its model: what it would receive now, and which local state it is to take."""
        handles = {name: replace(Handle.of(local), models=self.ctx.round) for name, local in self.locals.items()}
        broadcast = self.setup.method.broadcast
        downs = {name: {**broadcast(self.server, name, self.ctx), **own.slot()} for name, own in handles.items()}
        return {name: self._counted(down) for name, down in downs.items()}


@dataclass(frozen=True)
class ServerJob(Job):
    """A job whose clients are elsewhere."""

    sessions: dict[int, Session] = field(
        default_factory=dict, repr=False, compare=False
    )  # by engine: one for all its work

    def session(self, engine: Engine, compute: Compute, say: Reporter) -> Session:
        """The session that trains it."""
        if id(engine) not in self.sessions:
            shared = (self.setup, self.task, engine, compute, self.seed)
            variant = self.experiment
            whole = (*shared, variant.rounds, variant.participation, say.note)
            made = ServerSession(*whole, last=self.rounds, lost=self.lost)
            self.sessions[id(engine)] = made
        return self.sessions[id(engine)]


def pinned(folder: Path) -> dict[str, list[int]]:
    """The local states that parties must not forget: those of the states that are best on validation so far."""
    found: dict[str, set[int]] = {}
    for path in (folder / "best.safetensors", *folder.glob("best/*.safetensors")):
        if path.is_file():
            trees, facts = load(path)
            state = State.of(trees, int(str(facts["round"])), torch.device("cpu"))
            for name, local in state.locals.items():
                base = Handle.of(local).base
                found.setdefault(name, set()).update([] if base is None else [base])
    return {name: sorted(rounds) for name, rounds in found.items()}
