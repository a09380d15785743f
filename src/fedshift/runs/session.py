"""One federation in training: rounds, evaluation, and the whole state as trees."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedshift.core import rng
from fedshift.core.adapter import Adapter
from fedshift.core.method import Method, Now, Phase
from fedshift.core.schedule import Plan
from fedshift.core.tree import Tensors, Tree, float_bytes, to
from fedshift.data.task import Client, Task
from fedshift.engines.base import Compute, Engine, Reply, Score
from fedshift.engines.parallel import Parallel
from fedshift.engines.reference import facts_of, pixels
from fedshift.engines.vmapped.multi_seed import Errand, Together
from fedshift.runs.memory import memory_so_far, resident_peak
from fedshift.runs.setup import Setup
from fedshift.store.state import State


@dataclass(frozen=True)
class RoundReport:
    """What one round was like."""

    participants: int
    loss: float  # mean over clients, by size
    bytes_down: int
    bytes_up: int
    seconds: float
    left_out: tuple[str, ...]  # clients whose loss or update was not finite
    memory: Mapping[str, int] = field(default_factory=dict)  # see fedshift.store.costs.memory_so_far
    told: Mapping[str, float] = field(default_factory=dict)  # by the server about its own work


@dataclass(frozen=True)
class Begun:
    """A round after everything was sent and before anything was trained."""

    now: Now
    clients: Sequence[Client]
    downs: Mapping[str, Tree]
    started: float


@dataclass(frozen=True)
class Settled:
    """A federation after its last training steps."""

    server: Tree  # with what clients published
    mines: Mapping[str, Tree]
    published: int  # bytes


class Federation:
    """A method on a task under a seed; all of its methods are functions of the state they are given."""

    def __init__(
        self,
        setup: Setup,
        task: Task,
        engine: Engine,
        compute: Compute,
        seed: int,
        rounds: int,
        participation: float = 1.0,
        note: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._note = note
        self.setup, self.task, self.engine, self.compute = setup, task, engine, compute
        self.seed, self.rounds, self.participation = seed, rounds, participation
        self.training = setup.method.prepare_task(task)  # whose clients train
        self._numbers = {client.name: i for i, client in enumerate(self.training.clients)}
        # networks are dealt to clients in turn, and to those nobody has seen again from the first one on
        self._places = {**{client.name: i for i, client in enumerate(task.unseen)}, **self._numbers}
        self._resident = resident_peak()
        self._initial = {
            name: self._tensors(method.arch.init(rng.seed_of(seed, "init"))) for name, method in setup.methods.items()
        }

    @property
    def initial(self) -> Mapping[str, Tensors]:
        """What everybody starts from, by architecture."""
        return self._initial

    def start(self) -> State:
        """Before the first round."""
        clients = tuple(client.name for client in self.training.clients)
        server = self.setup.method.server_init(self._initial, clients)
        if self.training.public is not None:
            server = self.setup.method.public_init(server, self.training.ids[self.training.public])
        return State(0, to({**server}, self.compute.device))

    def step(self, state: State) -> tuple[State, RoundReport]:
        """One round: send, train locally, aggregate."""
        begun = self.begun(state)
        replies = self._train(state, begun.clients, begun.downs, begun.now)
        return self.ended(state, begun, replies)

    def begun(self, state: State) -> Begun:
        """The first half of a round: who takes part, and what goes down to them."""
        started = time.perf_counter()
        if self.compute.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.compute.device)
        now = self.now(state)
        clients = self.participants(state.round)
        downs = {c.name: self.setup.method.broadcast(state.server, c.name, now) for c in clients}
        return Begun(now, clients, downs, started)

    def errand(self, state: State, begun: Begun) -> Errand:
        """The clients' work between the two halves, for an engine that does that of several federations at once."""
        mines = {c.name: self._mine(state, c, begun.now) for c in begun.clients}
        return Errand(begun.downs, mines, Plan(self.setup.method.phases(begun.now), begun.now, self.seed))

    def ended(
        self, state: State, begun: Begun, replies: Mapping[str, Reply], beside: int = 1
    ) -> tuple[State, RoundReport]:
        """The second half: aggregate; ``beside`` federations shared the time."""
        sound = {name: reply for name, reply in replies.items() if reply.finite}
        server = state.server
        if sound:
            server = self.aggregated(server, {name: reply.up for name, reply in sound.items()}, begun.now)
        kept = {name: reply.mine for name, reply in sound.items() if reply.mine}
        report = RoundReport(
            participants=len(begun.clients),
            loss=self._mean_loss(sound),
            bytes_down=sum(float_bytes(down) for down in begun.downs.values()),
            bytes_up=sum(float_bytes(reply.up) for reply in replies.values()),
            seconds=(time.perf_counter() - begun.started) / beside,
            left_out=tuple(name for name in replies if name not in sound),
            memory=self._memory() if beside == 1 else {},  # others' is in it
            told={name: float(value) for name, value in self.setup.method.told(server).items()},
        )
        return State(state.round + 1, server, {**state.mines, **kept}), report

    def aggregated(self, server: Tree, ups: Mapping[str, Tree], now: Now) -> Tree:
        """The server after these clients' messages."""
        samples = torch.tensor([float(len(self.training.client(name).train)) for name in ups])
        draws = {"seed": torch.tensor(rng.seed_of(self.seed, now.round, "server"))}
        return self.setup.method.aggregate(server, ups, self._moment(now, samples), draws)

    def now(self, state: State) -> Now:
        """Where in the run this state is."""
        return self.moment(state.round)

    def moment(self, number: int) -> Now:
        """Where in the run round ``number`` (from 0) is."""
        return Now(number, self.rounds, len(self.task.clients))

    def by_arch(self, clients: Sequence[Client]) -> dict[str, list[Client]]:
        """These clients by their architecture, which is never one without clients."""
        members = {arch: [client for client in clients if self._arch(client) == arch] for arch in self.setup.methods}
        return {arch: own for arch, own in members.items() if own}

    def first_errand(self, client: Client, now: Now) -> tuple[Method, Tree, Tree]:
        """What a client would start local work with if this were its first: method, message and private memory."""
        down = self.setup.method.broadcast(self.start().server, client.name, now)
        return self._method(client), down, self._birth(client, now)

    # ---- what clients serve with ---------------------------------------------------------------------------------------
    def deployed(self, state: State, settled: Settled | None = None) -> dict[str, Tree]:
        """Every client's model: what it would receive now and its private memory, after the final phases."""
        last = settled or self.settled(state)
        now = self._at_the_end(state)
        downs = {c.name: self.setup.method.broadcast(last.server, c.name, now) for c in self.task.clients}
        return {c.name: self._method(c).deployed(downs[c.name], last.mines[c.name]) for c in self.task.clients}

    def after_local(self, state: State) -> dict[str, Tree]:
        """Every client's model right after one more local round, as some papers score it.

        Empty where clients do not train for themselves; one whose training fails serves what it received.
        """
        if self.training is not self.task:
            return {}
        now = self.now(state)
        downs = {c.name: self.setup.method.broadcast(state.server, c.name, now) for c in self.task.clients}
        replies = self._train(state, self.task.clients, downs, now)
        self._name_failed(replies)
        result: dict[str, Tree] = {}
        for client in self.task.clients:
            down, reply = downs[client.name], replies[client.name]
            if reply.finite:
                down = {slot: {**leaves, **reply.up.get(slot, {})} for slot, leaves in down.items()}
            mine = reply.mine if reply.finite else self._mine(state, client, now)
            result[client.name] = self._method(client).deployed(down, mine)
        return result

    def newcomers(self, state: State, settled: Settled | None = None) -> dict[str, Tree]:
        """Models of clients nobody has seen; empty if nothing is offered to them."""
        now = self._at_the_end(state)
        down = self.setup.method.broadcast((settled or self.settled(state)).server, None, now)
        result: dict[str, Tree] = {}
        for arch, members in self.by_arch(self.task.unseen).items():
            method = self.setup.methods[arch]
            mines = {client.name: self._birth(client, now) for client in members}
            trees, replies = welcomed(method, down, mines, self.task, self.engine, now, self.seed)
            self._name_failed(replies)
            if not all(set(method.arch.parameters) <= set(tree.get("model", {})) for tree in trees.values()):
                return {}
            result |= trees
        return {client.name: result[client.name] for client in self.task.unseen}

    # ---- scores --------------------------------------------------------------------------------------------------------
    def evaluate(
        self, adapters: Mapping[str, Adapter], deployed: Mapping[str, Tree], parts: Sequence[str]
    ) -> dict[tuple[str, str], Score]:
        """Scores by (client, part); ``adapters`` are by architecture."""
        scores: dict[tuple[str, str], Score] = {}
        for name, adapter in adapters.items():
            members = {c: tree for c, tree in deployed.items() if self._arch(self.task.client(c)) == name}
            if members:
                ready = {c: self._prepared(adapter, tree, self.task.client(c)) for c, tree in members.items()}
                scores |= self.engine.evaluate(adapter, ready, self.task, parts, rng.seed_of(self.seed, "adapter"))
        return scores

    def _prepared(self, adapter: Adapter, tree: Tree, client: Client) -> Tree:
        """What the adapter makes of the client's training data before deployment (nothing, for most)."""
        if type(adapter).prepare is Adapter.prepare or not len(client.train):
            return tree
        size = self.setup.train.batch_size
        batches = (
            {
                "x": pixels(self.task.images, index, self.compute.dtype).to(self.compute.device),
                "y": self.task.labels[index].to(self.compute.device),
            }
            for index in client.train.split(size)
        )
        return {**tree, **adapter.prepare(tree, batches)}

    def settled(self, state: State) -> Settled:
        """All clients take the final phases, and publish what they give to each other and to newcomers."""
        now = self._at_the_end(state)
        method = self.setup.method
        mines = {c.name: self._mine(state, c, now) for c in self.task.clients}
        if method.final_phases():
            downs = {c.name: method.broadcast(state.server, c.name, now) for c in self.task.clients}
            replies = self._train(state, self.task.clients, downs, now)
            self._name_failed(replies)
            mines = {name: reply.mine if reply.finite else mines[name] for name, reply in replies.items()}
        # who has never taken part has nothing trained to give
        gifts = {name: gift for name in state.mines if name in mines and (gift := method.publish(mines[name]))}
        published = sum(float_bytes(gift) for gift in gifts.values())
        return Settled(method.welcome(state.server, gifts), mines, published)

    def _at_the_end(self, state: State) -> Now:
        return replace(self.now(state), final=True)

    # ---- inner ---------------------------------------------------------------------------------------------------------
    def _train(self, state: State, clients: Sequence[Client], downs: Mapping[str, Tree], now: Now) -> dict[str, Reply]:
        """Local work, one call of the engine per architecture; replies in client order."""
        task = self.task if now.final else self.training
        replies: dict[str, Reply] = {}
        for arch, members in self.by_arch(clients).items():
            method = self.setup.methods[arch]
            phases: tuple[Phase, ...] = method.final_phases() if now.final else method.phases(now)
            mines = {c.name: self._mine(state, c, now) for c in members}
            plan = Plan(phases, now, self.seed)
            replies |= self.engine.train(method, {c.name: downs[c.name] for c in members}, mines, task, plan)
        return {client.name: replies[client.name] for client in clients}

    def _name_failed(self, replies: Mapping[str, Reply]) -> None:
        """Say whose last training steps came to nothing."""
        for name in (name for name, reply in replies.items() if not reply.finite):
            self._note(f"client {name!r} is scored without its last training steps: their loss or update is not finite")

    def participants(self, number: int) -> list[Client]:
        """Who takes part in round ``number`` (from 0)."""
        clients = self.training.clients
        count = max(1, math.floor(self.participation * len(clients) + 0.5))
        if count == len(clients):
            return list(clients)
        chosen = rng.permutation(rng.seed_of(self.seed, number, "participants"), len(clients))[:count]
        return [clients[i] for i in chosen.sort().values.tolist()]

    def _mine(self, state: State, client: Client, now: Now) -> Tree:
        found = state.mines.get(client.name)
        return found if found is not None else self._birth(client, now)

    def _birth(self, client: Client, now: Now) -> Tree:
        number = self._numbers.get(client.name, -1)
        task = self.task if number < 0 else self.training
        facts = facts_of(task, client, number, rng.seed_of(self.seed, "birth", client.name))
        if task.public is not None:
            facts = replace(facts, public=task.ids[task.public])
        return to(self._method(client).birth(self._initial[self._arch(client)], facts, now), self.compute.device)

    def _arch(self, client: Client) -> str:
        return self.setup.of(self._places.get(client.name, 0))[0]

    def _method(self, client: Client) -> Method:
        return self.setup.of(self._places.get(client.name, 0))[1]

    def _tensors(self, tensors: Tensors) -> Tensors:
        return to({"model": tensors}, self.compute.device, self.compute.dtype)["model"]

    def _memory(self) -> dict[str, int]:
        """Peak memory so far; what other processes need is not known here."""
        return {} if isinstance(self.engine, Parallel) else memory_so_far(self.compute.device, self._resident)

    def _moment(self, now: Now, samples: Tensor) -> Tensors:
        decay = now.decay(self.setup.train)
        values = {"round": now.round, "rounds": now.rounds, "clients": now.clients, "lr": self.setup.train.lr * decay}
        return {
            **{name: torch.tensor(float(value), dtype=torch.float64) for name, value in values.items()},
            "samples": samples,
        }

    def _mean_loss(self, replies: Mapping[str, Reply]) -> float:
        sizes = {name: len(self.training.client(name).train) for name in replies}
        total = sum(sizes.values())
        return sum(reply.loss * sizes[name] for name, reply in replies.items()) / total if total else float("nan")


def welcomed(
    method: Method, down: Tree, mines: Mapping[str, Tree], task: Task, engine: Engine, now: Now, seed: int
) -> tuple[dict[str, Tree], dict[str, Reply]]:
    """What newcomers serve with, after what a newcomer trains without labels, and what came of that training."""
    replies: dict[str, Reply] = {}
    if phases := method.joining_phases():
        replies = engine.train(method, dict.fromkeys(mines, down), mines, task, Plan(phases, now, seed))
    kept = {**mines, **{name: reply.mine for name, reply in replies.items() if reply.finite}}
    return {name: method.deployed(down, mine) for name, mine in kept.items()}, replies


def step_together(
    federations: Sequence[Federation], states: Sequence[State], together: Together
) -> list[tuple[State, RoundReport]]:
    """One round of several federations of one method, whose clients are trained side by side."""
    first = federations[0]
    begun = [federation.begun(state) for federation, state in zip(federations, states, strict=True)]
    errands = [f.errand(state, half) for f, state, half in zip(federations, states, begun, strict=True)]
    replies = together.train(first.engine, first.setup.method, errands)
    halves = zip(federations, states, begun, replies, strict=True)
    return [federation.ended(state, half, own, len(federations)) for federation, state, half, own in halves]
