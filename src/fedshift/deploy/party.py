"""A party: one client's half of a session, on its own machine. It answers packets with the reference engine's work."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fedshift
from fedshift.core import rng
from fedshift.core.context import Context
from fedshift.core.method import Method
from fedshift.core.tree import Tree, to
from fedshift.data.task import Client, Task
from fedshift.deploy.counting import told
from fedshift.deploy.memory import Memory
from fedshift.deploy.packet import Packet
from fedshift.engines.base import Compute
from fedshift.engines.reference import evaluate, first_local, placed, prepared, settle, work
from fedshift.engines.schedule import Plan
from fedshift.engines.torch_flags import steady
from fedshift.errors import UserError
from fedshift.experiment.schema import AdapterSpec, Experiment
from fedshift.runs.setup import Setup
from fedshift.store.folder import artefacts_folder


@dataclass(frozen=True)
class Party:
    """What a party is made of; everything that changes is in its memory."""

    federation: str  # its id: packets of another one are refused
    experiment: Experiment
    setup: Setup
    task: Task  # with one client: itself
    seed: int
    memory: Memory
    artefacts: Path  # where what it serves with is written
    compute: Compute
    shares: bool = True  # whether counts of its predictions may leave

    @property
    def client(self) -> Client:
        """Itself."""
        return self.task.clients[0]

    def answer(self, packet: Packet) -> Packet:
        """Do what a packet asks for, and say what came of it; the same packet twice gives the same answer."""
        if packet.facts.get("federation") != self.federation:
            raise UserError(f"this packet belongs to federation {packet.facts.get('federation')!r}, not to this one")
        if packet.facts.get("client", self.client.name) != self.client.name:
            raise UserError(f"this packet is for {packet.facts['client']!r}, not for {self.client.name!r}")
        work_of: Mapping[str, Callable[[Packet], tuple[dict[str, Any], Tree]]] = {
            "hello": self._hello,
            "train": self._train,
            "settle": self._settle,
            "evaluate": self._evaluate,
            "serve": self._serve,
        }
        with steady(self.compute.tf32):
            facts, tree = work_of[packet.kind](packet)
        signed = {"federation": self.federation, "client": self.client.name, "round": packet.facts.get("round")}
        return Packet(packet.kind, {**signed, **facts}, to(tree, "cpu"))

    # ---- what it can be asked for --------------------------------------------------------------------------------------
    def _hello(self, packet: Packet) -> tuple[dict[str, Any], Tree]:
        """Who it is, so that the server can weigh it and see that both mean the same."""
        facts = {
            "samples": len(self.client.train),
            "classes": list(self.task.classes),
            "shape": list(self.task.shape),
            "shares": self.shares,
            "fedshift": fedshift.__version__,
        }
        return facts, {}

    def _train(self, packet: Packet) -> tuple[dict[str, Any], Tree]:
        """A round's local work; the new local state is on disk before anybody hears of it."""
        ctx, method = self._where(packet)
        local, notes = self._local(packet, method, ctx)
        plan = Plan(method.phases(ctx), ctx, self.seed)
        reply = work(method, self._down(packet), local, *self._here(), plan, self.compute)
        held = reply.finite and bool(reply.local)
        if held:
            base = packet.facts.get("base")
            others = [*packet.facts.get("keep", []), *([] if base is None else [base])]
            self.memory.keep(ctx.round + 1, to(reply.local, "cpu"), others)
        facts = {"loss": reply.loss if reply.finite else None, "steps": reply.steps, "finite": reply.finite}
        return {**facts, "held": held, "notes": notes}, reply.up if reply.finite else {}

    def _settle(self, packet: Packet) -> tuple[dict[str, Any], Tree]:
        """The last phases of this round's models: what it gives away travels, what it keeps is put aside."""
        gift, kept, finite = self._settled(packet)
        self.memory.keep_settled(packet.facts["round"], to(kept, "cpu"))
        return {"finite": finite, "notes": []}, gift

    def _evaluate(self, packet: Packet) -> tuple[dict[str, Any], Tree]:
        """Let an adapter run along its own streams; only counts are told, and only if it agrees."""
        if not self.shares:
            return {"scores": {}}, {}
        _, method = self._where(packet)
        adapter = self.setup.adapter(AdapterSpec(**packet.facts["adapter"]), method)
        client, task = self._here()
        ready = prepared(adapter, self._deployed(packet), task, client, self.setup.train.batch_size, self.compute)
        seed = rng.seed_of(self.seed, "adapter")
        parts = [part for part in packet.facts["parts"] if part in ("val", "test") or part in task.streams]
        scores = evaluate(adapter, ready, task, client, parts, seed, self.compute)
        facts, tree = told({part: score for (_, part), score in scores.items()})
        return {"scores": facts}, tree

    def _serve(self, packet: Packet) -> tuple[dict[str, Any], Tree]:
        """Write the artefact of this round's model into the party's own folder; nothing leaves."""
        from fedshift.runs.write_artefacts import made_of  # once in a run: other messages need not wait for it

        ctx, _ = self._where(packet)
        target = self.artefacts / artefacts_folder(packet.facts["chooser"])
        if target.is_dir():
            return {"written": False}, {}
        origin = {
            "run": packet.facts["run"],
            "federation": self.federation,
            "seed": self.seed,
            "round": ctx.round,
            "selection": packet.facts["selection"],
            "task-hash": self.task.hash,
        }
        client, task = self._here()
        artefact = made_of(
            self._deployed(packet),
            client,
            task,
            self.setup,
            self.experiment,
            packet.facts["network"],
            ctx,
            [AdapterSpec(**entry) for entry in packet.facts["adapters"]],
            origin,
            self.compute,
        )
        artefact.save(target)
        return {"written": True}, {}

    # ---- inner ---------------------------------------------------------------------------------------------------------
    def _where(self, packet: Packet) -> tuple[Context, Method]:
        try:
            ctx = Context(*(packet.facts[key] for key in ("round", "rounds", "clients", "stage")))
            return ctx, self.setup.methods[packet.facts["network"]]
        except LookupError as error:
            raise UserError(f"this packet does not say where in the run it belongs ({error!r})") from None

    def _here(self) -> tuple[Client, Task]:
        return self.client, placed(self.task, self.compute.device)

    def _down(self, packet: Packet) -> Tree:
        return to(packet.tree, self.compute.device)

    def _local(self, packet: Packet, method: Method, ctx: Context) -> tuple[Tree, list[str]]:
        """The local state the packet continues from; one that is lost is begun anew, and the server hears of it."""
        base, notes = packet.facts.get("base"), list[str]()
        found = None if base is None else self.memory.recall(base)
        if found is None and base is not None:
            notes = [f"its local state of round {base} is not there any more: it begins anew"]
        if found is None:
            model = self.setup.initial(self.seed, self.compute)[packet.facts["network"]]
            found = first_local(method, model, self.task, self.client, self.seed, ctx)
        return to(found, self.compute.device), notes

    def _settled(self, packet: Packet) -> tuple[Tree, Tree, bool]:
        ctx, method = self._where(packet)
        local, _ = self._local(packet, method, ctx)
        plan = Plan(method.last_phases(ctx), ctx, self.seed)
        reply = settle(method, self._down(packet), local, *self._here(), plan, self.compute)
        return reply.up, reply.local, reply.finite or not math.isnan(reply.loss)

    def _deployed(self, packet: Packet) -> Tree:
        """What it serves with: what it received and what it kept of the last phases."""
        _, method = self._where(packet)
        kept = self.memory.settled(packet.facts["round"]) if packet.facts["settled"] else None
        if kept is None:
            _, kept, _ = self._settled(packet)
        return method.deployed(self._down(packet), to(kept, self.compute.device))
