"""A run in memory: one method on one task under one seed. It trains, settles and evaluates."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property

import torch

from fedshift.core import rng
from fedshift.core.adapter import Adapter
from fedshift.core.context import Context, ServerContext
from fedshift.core.method import Method
from fedshift.core.tree import Tensors, Tree, float_bytes, to
from fedshift.data.task import Client, Task
from fedshift.engines.base import Compute, Engine, Reply, Score
from fedshift.engines.parallel import Parallel
from fedshift.engines.pulse import share_told
from fedshift.engines.ray import Ray
from fedshift.engines.reference import first_local, prepared
from fedshift.engines.schedule import Plan
from fedshift.engines.stopping import stop_now
from fedshift.engines.vmapped.multi_seed import Errand
from fedshift.privacy.frame import Frame
from fedshift.privacy.noise import Noise, seeded
from fedshift.privacy.upload import UNSENT
from fedshift.runs.calibrate import Looking, Measured, Nearby, answers_of, measure, topics_of
from fedshift.runs.deployment import Deployment
from fedshift.runs.memory import memory_so_far, resident_peak
from fedshift.runs.private import check_given, lots, possible, told_by
from fedshift.runs.round import Begun, RoundReport, drawn, phases_of, work_in
from fedshift.runs.setup import Setup
from fedshift.runs.uploads import Delivered, Sent, Uploads
from fedshift.store.state import State


class Session:
    """One run; all of its methods are functions of the state they are given."""

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
        moved: Callable[[float, bool], object] = lambda _share, _training: None,
        lost: int = 0,
    ) -> None:
        self._note, self._moved = note, moved
        self.setup, self.task, self.engine, self.compute = setup, task, engine, compute
        self.seed, self.rounds, self.participation = seed, rounds, participation
        self.lost = lost  # rounds that have told something about clients, and were run again
        self.training = setup.method.prepare_task(task)  # whose clients train
        self._resident = resident_peak()
        self.initial = setup.initial(seed, compute)  # what everybody starts from, by architecture
        self.uploads = Uploads(setup.privacy, self._noise(), participation * len(self.training.clients))

    @cached_property
    def _places(self) -> dict[str, int]:
        """Networks are dealt to clients in turn, and to unseen ones again from the first one on."""
        return {client.name: i for group in (self.task.unseen, self.training.clients) for i, client in enumerate(group)}

    @cached_property
    def _others(self) -> frozenset[str]:
        """The task's clients who do not train: mostly the unseen ones, so that millions who do are not gone through."""
        others = frozenset(client.name for client in self.task.unseen)
        if self.training is self.task:
            return others
        return others.union(c.name for c in self.task.clients).difference(c.name for c in self.training.clients)

    # ---- rounds --------------------------------------------------------------------------------------------------------
    def start(self) -> State:
        """Before the first round."""
        clients = tuple(client.name for client in self.training.clients)
        shared = self.training.public
        public = torch.zeros(0, dtype=torch.int64) if shared is None else self.training.ids[shared]
        server = self.setup.method.init_server(self.initial, clients, public)
        return State(0, to({**server}, self.compute.device))

    def step(self, state: State) -> tuple[State, RoundReport]:
        """One round: send, train locally, aggregate."""
        begun = self.begun(state)
        return self.ended(state, begun, self._train(state, begun.clients, begun.downs, begun.ctx))

    def begun(self, state: State) -> Begun:
        """The first half of a round: who takes part, and what goes down to them. Nothing is half done before it."""
        stop_now()
        started = time.perf_counter()
        if self.compute.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.compute.device)
        ctx, clients = self.context(state.round), self.participants(state.round)
        return Begun(ctx, clients, self._downs(state.server, clients, ctx), started)

    def errand(self, state: State, begun: Begun) -> Errand:
        """The clients' work between the two halves, for an engine that does that of several federations at once."""
        own = {client.name: self._local(state, client, begun.ctx) for client in begun.clients}
        return Errand(begun.downs, own, Plan(self.setup.method.phases(begun.ctx), begun.ctx, self.seed))

    def ended(
        self, state: State, begun: Begun, replies: Mapping[str, Reply], beside: int = 1
    ) -> tuple[State, RoundReport]:
        """The second half: aggregate; ``beside`` federations shared the time."""
        sound = {name: reply for name, reply in replies.items() if reply.finite}
        server, metrics = state.server, dict[str, torch.Tensor]()
        delivered = self._delivered(state, begun, replies)
        if delivered.ups:
            server, metrics = self.aggregated(server, delivered.ups, begun.clients, begun.ctx)
        whole = {name: {**reply.local, **delivered.kept.get(name, {})} for name, reply in sound.items()}
        kept = {name: local for name, local in whole.items() if local}
        report = RoundReport(
            participants=len(replies),
            loss=self._mean_loss(begun.clients, sound),
            bytes_down=sum(float_bytes(down) for down in begun.downs.values()) + delivered.bytes_down,
            bytes_up=delivered.bytes_up,
            seconds=(time.perf_counter() - begun.started) / beside,
            diverged=tuple(name for name in replies if name not in sound),
            memory=self._memory() if beside == 1 else {},  # others' is in it
            server={name: float(value) for name, value in metrics.items()} | self._spent(state.round + 1, delivered),
            losses={name: reply.loss for name, reply in replies.items()},
        )
        return State(state.round + 1, server, {**state.locals, **kept}), report

    def aggregated(
        self, server: Tree, ups: Mapping[str, Tree], clients: Sequence[Client], ctx: Context
    ) -> tuple[Tree, Tensors]:
        """The server after these clients' messages, and its numbers about that; a message may also be nobody's."""
        sizes = {client.name: self.size_of(client) for client in clients if client.name in ups}
        samples = torch.tensor([float(sizes.get(name, 1)) for name in ups])
        seed = rng.seed_of(self.seed, ctx.round, "server")
        whole = ServerContext(ctx.round, ctx.rounds, ctx.clients, ctx.stage, samples=samples, seed=seed)
        return self.setup.method.aggregate(server, ups, whole)

    def size_of(self, client: Client) -> int:
        """How many images a client trains on."""
        return len(client.train)

    def context(self, number: int) -> Context:
        """Where in the run round ``number`` (from 0) is."""
        return Context(number, self.rounds, len(self.task.clients))

    def participants(self, number: int) -> list[Client]:
        """Who takes part in round ``number`` (from 0)."""
        clients = self.training.clients
        if self.setup.privacy is not None and self.setup.privacy.sampling == "poisson":
            return [client for client, lot in zip(clients, self._lots(number), strict=True) if lot < self.participation]
        count = max(1, math.floor(self.participation * len(clients) + 0.5))
        if count >= len(clients):
            return list(clients)
        return [clients[i] for i in drawn(rng.seed_of(self.seed, number, "participants"), len(clients), count)]

    def by_arch(self, clients: Sequence[Client]) -> dict[str, list[Client]]:
        """These clients by their architecture, which is never one without clients."""
        members = {arch: [client for client in clients if self.arch_of(client) == arch] for arch in self.setup.methods}
        return {arch: own for arch, own in members.items() if own}

    def first_errand(self, client: Client, ctx: Context) -> tuple[Method, Tree, Tree]:
        """What a client would start local work with if this were its first: method, message and local state."""
        down = self.setup.method.broadcast(self.start().server, client.name, ctx)
        return self.method_of(client), down, self._first_local(client, ctx)

    # ---- what clients serve with ---------------------------------------------------------------------------------------
    def deploy(self, state: State) -> Deployment:
        """The models of this state: all clients take the last phases, and give away what they give to the others."""
        ctx = replace(self.context(state.round), stage="final")
        clients = self.task.clients
        gifts, own = self._settled(state, self._downs(state.server, clients, ctx), ctx)
        # who has never taken part has nothing trained to give
        given = {name: gifts[name] for name in state.locals if gifts.get(name)}
        check_given(self.setup.privacy, self.setup.method, given)
        common = {name: {"model": self.initial[self.arch_of(self.task.client(name))]} for name in given}
        delivered = self.uploads.given(Sent(given, common), ("gifts", state.round), len(clients))
        taken = possible(delivered.ups, self.setup.method) if delivered.noisy else delivered.ups
        return Deployment(
            setup=self.setup,
            ctx=ctx,
            seed=self.seed,
            server=self.setup.method.take_gifts(state.server, taken),
            locals=own,
            networks={client.name: self.arch_of(client) for client in (*clients, *self.task.unseen)},
            given_bytes=delivered.bytes_up,
        )

    def _settled(
        self, state: State, downs: Mapping[str, Tree], ctx: Context
    ) -> tuple[Mapping[str, Tree], Mapping[str, Tree]]:
        """What every client gives away after the last phases, and what it keeps."""
        clients = self.task.clients
        own = {client.name: self._local(state, client, ctx) for client in clients}
        gifts: dict[str, Tree] = {}
        replies = self._train(state, clients, downs, ctx) if self.setup.method.last_phases(ctx) else {}
        self._name_failed(replies)
        for client in clients:
            reply = replies.get(client.name)
            if reply is not None and reply.finite:
                gifts[client.name], own[client.name] = reply.up, reply.local
            else:
                settled = self.method_of(client).settle(None, downs[client.name], own[client.name], ctx)
                gifts[client.name], own[client.name] = settled
        return gifts, own

    def unseen(self, deployment: Deployment, task: Task | None = None) -> dict[str, Tree]:
        """Models of the task's unseen clients (or of another task's); empty if nothing is offered to them."""
        trees, failed = deployment.admit(self.task if task is None else task, self.engine, self.compute)
        self._say_failed(failed)
        return trees

    def after_local(self, state: State) -> dict[str, Tree]:
        """Every client's model right after one more local round, as some papers score it.

        Empty where clients do not train for themselves; one whose training fails serves what it received.
        """
        if self.training is not self.task:
            return {}
        ctx = self.context(state.round)
        downs = self._downs(state.server, self.task.clients, ctx)
        replies = self._train(state, self.task.clients, downs, ctx)
        self._name_failed(replies)
        result: dict[str, Tree] = {}
        for client in self.task.clients:
            down, reply = downs[client.name], replies[client.name]
            if reply.finite:
                down = {slot: {**leaves, **reply.up.get(slot, {})} for slot, leaves in down.items()}
            own = reply.local if reply.finite else self._local(state, client, ctx)
            result[client.name] = self.method_of(client).deployed(down, own)
        return result

    # ---- scores --------------------------------------------------------------------------------------------------------
    def evaluate(
        self,
        adapters: Mapping[str, Adapter],
        deployed: Mapping[str, Tree],
        parts: Sequence[str],
        task: Task | None = None,
    ) -> dict[tuple[str, str], Score]:
        """Scores by (client, part); ``adapters`` are by architecture. ``task`` has other images of the same clients."""
        task = self.task if task is None else task
        scores: dict[tuple[str, str], Score] = {}
        for name, adapter in adapters.items():
            members = {c: tree for c, tree in deployed.items() if self.arch_of(task.client(c)) == name}
            if members:
                stop_now()
                ready = {c: self.prepared(adapter, tree, task.client(c)) for c, tree in members.items()}
                shown = [len(task.samples(task.client(c), p)) * task.setting(p).passes for c in ready for p in parts]
                with share_told(sum(shown), lambda share: self._moved(share, False)):
                    scores |= self.engine.evaluate(adapter, ready, task, parts, rng.seed_of(self.seed, "adapter"))
        return scores

    def measured(self, deployment: Deployment, looking: Looking) -> Measured:
        """How far these models can be believed, by sums that training clients tell of their validation images."""
        ask = Nearby(answers_of(self, deployment, looking), self.setup.privacy)
        return measure(ask, topics_of(looking), self.setup.method.arch.classes)

    def prepared(self, adapter: Adapter, tree: Tree, client: Client) -> Tree:
        """A deployed tree with what the adapter makes of the client's training data before (nothing, for most)."""
        return prepared(adapter, tree, self.task, client, self.setup.train.batch_size, self.compute)

    def arch_of(self, client: Client) -> str:
        """The name of a client's architecture."""
        return self.setup.of(self._place(client))[0]

    def method_of(self, client: Client) -> Method:
        """The method on a client's architecture."""
        return self.setup.of(self._place(client))[1]

    def _place(self, client: Client) -> int:
        """Of no interest where there is one network, which is nearly always: millions of clients are not looked through."""
        return self._places.get(client.name, 0) if len(self.setup.methods) > 1 else 0

    # ---- inner ---------------------------------------------------------------------------------------------------------
    def _downs(self, server: Tree, clients: Sequence[Client], ctx: Context) -> dict[str, Tree]:
        return {client.name: self.setup.method.broadcast(server, client.name, ctx) for client in clients}

    def _train(
        self, state: State, clients: Sequence[Client], downs: Mapping[str, Tree], ctx: Context
    ) -> dict[str, Reply]:
        """Local work, one call of the engine per architecture; replies in client order, of those who answer."""
        task = self.task if ctx.ending else self.training
        replies: dict[str, Reply] = {}
        with self.told(clients, ctx):
            for arch, members in self.by_arch(clients).items():
                method = self.setup.methods[arch]
                own = {client.name: self._local(state, client, ctx) for client in members}
                received = {client.name: downs[client.name] for client in members}
                plan = Plan(phases_of(method, ctx), ctx, self.seed)
                replies |= self.engine.train(method, received, own, task, plan)
        return {client.name: replies[client.name] for client in clients if client.name in replies}

    def told(self, clients: Sequence[Client], ctx: Context, beside: int = 1) -> AbstractContextManager[None]:
        """Say how far these clients' work is; that of ``beside`` federations is done at the same time."""
        task = self.task if ctx.ending else self.training
        whole = sum(work_in(task, own, self.setup.methods[arch], ctx) for arch, own in self.by_arch(clients).items())
        return share_told(whole * beside, lambda share: self._moved(share, not ctx.ending))

    def _name_failed(self, replies: Mapping[str, Reply]) -> None:
        self._say_failed([name for name, reply in replies.items() if not reply.finite])

    def _say_failed(self, names: Sequence[str]) -> None:
        """Say whose last training steps came to nothing."""
        for name in names:
            self._note(f"client {name!r} is scored without its last training steps: their loss or update is not finite")

    def _local(self, state: State, client: Client, ctx: Context) -> Tree:
        found = state.locals.get(client.name)
        if found is not None and UNSENT in found:  # of no interest to a method, and all that some clients keep
            found = {slot: leaves for slot, leaves in found.items() if slot != UNSENT} or None
        return found if found is not None else self._first_local(client, ctx)

    def _delivered(self, state: State, begun: Begun, replies: Mapping[str, Reply]) -> Delivered:
        """What the server gets of a round's uploads."""
        ups = {name: reply.up for name, reply in replies.items() if reply.finite}
        when = (begun.ctx.round,)
        if not ups and self.uploads.always:  # what a message looks like is seen from one that nobody sends
            down = self._downs(state.server, self.training.clients[:1], begun.ctx)
            someone = next(iter(self._train(state, self.training.clients[:1], down, begun.ctx).values()))
            return self.uploads.nothing(Frame.of(someone.up, next(iter(down.values()))), when)
        delivered = self.uploads.delivered(Sent(ups, begun.downs, state.locals), when)
        lost = sum(float_bytes(reply.up) for reply in replies.values() if not reply.finite and not self.setup.privacy)
        return replace(delivered, bytes_up=delivered.bytes_up + lost)

    def _spent(self, rounds: int, delivered: Delivered) -> dict[str, float]:
        """What so many rounds have told about a client, where that is counted."""
        privacy = self.setup.privacy
        if privacy is None or not delivered.noisy:
            return {}
        return told_by(privacy, self.participation, rounds, self.setup.method, self.lost)

    def _noise(self) -> Noise:
        """Where noise comes from: a study can be repeated."""
        return seeded(self.seed)

    def _lots(self, number: int) -> list[float]:
        """A number between 0 and 1 for every client in round ``number``."""
        return lots(self.seed, number, len(self.training.clients))

    def _first_local(self, client: Client, ctx: Context) -> Tree:
        trains = client.name not in self._others
        task, model = self.training if trains else self.task, self.initial[self.arch_of(client)]
        made = first_local(self.method_of(client), model, task, client, self.seed, ctx, unseen=not trains)
        return to(made, self.compute.device)

    def _memory(self) -> dict[str, int]:
        """Peak memory so far; what other processes need is not known here."""
        return {} if isinstance(self.engine, Parallel | Ray) else memory_so_far(self.compute.device, self._resident)

    def _mean_loss(self, clients: Sequence[Client], replies: Mapping[str, Reply]) -> float:
        sizes = {client.name: self.size_of(client) for client in clients if client.name in replies}
        total = sum(sizes.values())
        return sum(reply.loss * sizes[name] for name, reply in replies.items()) / total if total else float("nan")
