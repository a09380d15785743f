"""The server's half of a run: the session of every run, whose clients keep their local states to themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from fedshift.core.adapter import Adapter
from fedshift.core.context import Context
from fedshift.core.method import Method
from fedshift.core.tree import Tree
from fedshift.data.task import Client
from fedshift.deploy.engine import Remote
from fedshift.deploy.packet import Handle
from fedshift.engines.base import Compute, Engine
from fedshift.runs.deployment import Deployment
from fedshift.runs.plan import Job
from fedshift.runs.progress import Reporter
from fedshift.runs.session import Session
from fedshift.store.state import State
from fedshift.store.trees import load


class ServerSession(Session):
    """A session that knows of every client's local state only which round it is of (:class:`Handle`)."""

    def size_of(self, client: str) -> int:
        """How many images a party says it trains on."""
        return self._remote.exchange.sizes()[client]

    def deploy(self, state: State) -> Deployment:
        """The models of this state, which are at the parties."""
        made = super().deploy(state)
        return Afar(**{part.name: getattr(made, part.name) for part in fields(made)})

    def after_local(self, state: State) -> dict[str, Tree]:
        """Parties are not asked to train for a score alone."""
        return {}

    def prepared(self, adapter: Adapter, tree: Tree, client: Client) -> Tree:
        """A party does that itself, with its own images."""
        return tree

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
        return {name: {**broadcast(self.server, name, self.ctx), **own.slot()} for name, own in handles.items()}


@dataclass(frozen=True)
class ServerJob(Job):
    """A job whose clients are elsewhere."""

    def session(self, engine: Engine, compute: Compute, say: Reporter) -> Session:
        """The session that trains it."""
        variant = self.experiment
        return ServerSession(
            self.setup, self.task, engine, compute, self.seed, variant.rounds, variant.participation, say.note
        )


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
