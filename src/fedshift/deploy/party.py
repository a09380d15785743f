"""A party: one client's half of a session, on its own machine. It answers packets with the reference engine's work."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fedshift
from fedshift.core import rng
from fedshift.core.adapter import Adapter
from fedshift.core.context import Context
from fedshift.core.method import Method
from fedshift.core.tree import Tree, to
from fedshift.data.task import Client, Task
from fedshift.deploy.calibrating import LOOK, check_asked, message
from fedshift.deploy.counting import told
from fedshift.deploy.memory import Memory
from fedshift.deploy.packet import Packet
from fedshift.engines.base import Compute, Reply, Score
from fedshift.engines.reference import evaluate, first_local, placed, prepared, settle, work
from fedshift.engines.schedule import Plan
from fedshift.engines.sequential import Sequential
from fedshift.engines.torch_flags import steady
from fedshift.errors import UserError
from fedshift.experiment.schema import AdapterSpec, Experiment
from fedshift.privacy.coding import Tallies, Updates
from fedshift.privacy.frame import Frame
from fedshift.privacy.upload import UNSENT, packed, unpacked
from fedshift.runs.calibrate import Answers, as_unseen, vector_of
from fedshift.runs.deployment import admitted, calibration_in, offered, unseen_phases
from fedshift.runs.setup import Setup
from fedshift.store.folder import artefacts_folder
from fedshift.store.metric import VALIDATION

if TYPE_CHECKING:
    from fedshift.deploy.summing import Summand


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

    @property
    def hides(self) -> bool:
        """Whether the server may see sums only, and hence no loss, no size and no counts of this party."""
        return self.setup.privacy is not None and self.setup.privacy.sums

    @property
    def tallies(self) -> bool:
        """Whether sums over its validation images may leave: as they are, or behind masks if it hides everything else."""
        privacy = self.setup.privacy
        return self.shares and (privacy is None or not privacy.noise)

    def answer(self, packet: Packet) -> Packet:
        """Do what a packet asks for, and say what came of it.

        The same packet twice gives the same answer, but for a secure summation: its keys are new each time, and its phases
        are answered once.
        """
        if packet.facts.get("federation") != self.federation:
            raise UserError(f"this packet belongs to federation {packet.facts.get('federation')!r}, not to this one")
        if packet.facts.get("client", self.client.name) != self.client.name:
            raise UserError(f"this packet is for {packet.facts['client']!r}, not for {self.client.name!r}")
        work_of: Mapping[str, Callable[[Packet], tuple[dict[str, Any], Tree]]] = {
            "hello": self._hello,
            "train": self._train,
            "share": self._summed,
            "mask": self._summed,
            "unmask": self._summed,
            "settle": self._settle,
            "calibrate": self._calibrate,
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
            "samples": 1 if self.hides else len(self.client.train),  # with fixed weights nobody needs to know
            "classes": list(self.task.classes),
            "shape": list(self.task.shape),
            "shares": self.shares and not self.hides,
            "fedshift": fedshift.__version__,
        }
        return facts, {}

    def _train(self, packet: Packet) -> tuple[dict[str, Any], Tree]:
        """A round's local work; the new local state is on disk before anybody hears of it."""
        ctx, method = self._where(packet)
        local, notes = self._local(packet, method, ctx)
        plan = Plan(method.phases(ctx), ctx, self.seed)
        reply = work(method, self._down(packet), local, *self._here(), plan, self.compute)
        message, kept = self._protected(packet, reply) if reply.finite else ({}, {})
        held = reply.finite and bool(kept)
        if held:
            base = packet.facts.get("base")
            others = [*packet.facts.get("keep", []), *([] if base is None else [base])]
            self.memory.keep(ctx.round + 1, to(kept, "cpu"), others)
        told = reply.finite and not self.hides
        facts = {"loss": reply.loss if told else None, "steps": reply.steps if told else 0, "finite": reply.finite}
        return {**facts, "held": held, "notes": notes}, message

    def _protected(self, packet: Packet, reply: Reply) -> tuple[Tree, Tree]:
        """What travels of an upload, and what is kept: as they are, or after ``[privacy]``."""
        privacy = self.setup.privacy
        if privacy is None:
            return reply.up, reply.local
        base = packet.facts.get("base")
        before = (None if base is None else self.memory.recall(base)) or {}
        frame = Frame.of(reply.up, self._down(packet))
        message, unsent = packed(privacy, frame, reply.up, before)
        if privacy.secure:
            message = self._summand(packet).advertise(unpacked(privacy, frame, message))
        return message, {**reply.local, **unsent}

    def _summed(self, packet: Packet) -> tuple[dict[str, Any], Tree]:
        """A phase of a secure summation."""
        summand = self._summand(packet)
        phases = {"share": summand.share, "mask": summand.mask, "unmask": summand.unmask}
        return {"notes": []}, phases[packet.kind](packet)

    def _summand(self, packet: Packet) -> Summand:
        from fedshift.deploy.summing import Summand, session_of  # most federations need no cryptography of ours

        privacy, what = self.setup.privacy, str(packet.facts.get("summation", ""))
        if privacy is None or not privacy.secure:
            raise UserError("this federation has not agreed on a secure summation")
        session = session_of(self.federation, int(packet.facts["round"]), what)
        return Summand(privacy, self.memory, session, Tallies() if what else Updates(privacy))

    def _settle(self, packet: Packet) -> tuple[dict[str, Any], Tree]:
        """The last phases of this round's models: what it gives away travels, what it keeps is put aside."""
        gift, kept, finite = self._settled(packet)
        if self.hides and any(gift.values()):  # a method that says so is refused long before: this one has denied it
            raise UserError("what this party would give away after the last round is not hidden, and is not sent")
        self.memory.keep_settled(packet.facts["round"], to(kept, "cpu"))
        return {"finite": finite, "notes": []}, gift

    def _calibrate(self, packet: Packet) -> tuple[dict[str, Any], Tree]:
        """Predict its validation images and keep the answers, or tell sums over what it has kept."""
        if not self.tallies:
            return {"topics": []}, {}
        number, ask = packet.facts["round"], str(packet.facts.get("ask", ""))
        if ask == LOOK:
            answers, asked = self._answers(packet), packet.facts["looking"]
            self.memory.keep_answers(number, {topic: own._asdict() for topic, own in answers.items()}, asked)
            return {"topics": list(asked if self.hides else answers)}, {}
        kept = self.memory.answers(number)
        if kept is None:
            raise UserError("its predictions of validation images are not there any more")
        known = {topic: Answers(**own) for topic, own in kept.items()}
        check_asked(ask, packet.tree, self.setup.method.arch.classes)
        if self.hides:
            return {}, self._summand(packet).advertise(vector_of(ask, known, packet.tree))
        return {}, message(ask, known, packet.tree)

    def _answers(self, packet: Packet) -> dict[str, Answers]:
        """How it predicts its validation images, by topic; nothing for models that are not offered to unseen clients."""
        ctx, method = self._where(packet)
        tree = self._as_unseen(packet) if ctx.stage == "unseen" else self._deployed(packet)
        if not offered(method, tree):
            return {}
        found: dict[str, Answers] = {}
        for topic, entry in packet.facts["looking"].items():
            score = self._scores(self.setup.adapter(AdapterSpec(**entry), method), tree, [VALIDATION])[VALIDATION]
            if (own := Answers.of(score)) is not None:
                found[topic] = own
        return found

    def _as_unseen(self, packet: Packet) -> Tree:
        """What it would serve with if it had never taken part, from its validation images alone."""
        ctx, method = self._where(packet)
        task = as_unseen(self._here()[1], validation=True)
        model = self.setup.initial(self.seed, self.compute)[packet.facts["network"]]
        engine, plan = Sequential(self.compute), Plan(unseen_phases(method, ctx), ctx, self.seed)
        trees, _ = admitted(method, model, {self.client.name: self._down(packet)}, task, engine, self.compute, plan)
        return trees[self.client.name]

    def _evaluate(self, packet: Packet) -> tuple[dict[str, Any], Tree]:
        """Let an adapter run along its own streams; only counts are told, and only if it agrees."""
        if not self.shares or self.hides:
            return {"scores": {}}, {}
        _, method = self._where(packet)
        adapter = self.setup.adapter(AdapterSpec(**packet.facts["adapter"]), method)
        parts = [part for part in packet.facts["parts"] if part in (VALIDATION, "test") or part in self.task.streams]
        facts, tree = told(self._scores(adapter, self._deployed(packet), parts))
        return {"scores": facts}, tree

    def _scores(self, adapter: Adapter, tree: Tree, parts: Sequence[str]) -> dict[str, Score]:
        client, task = self._here()
        ready = prepared(adapter, tree, task, client, self.setup.train.batch_size, self.compute)
        scores = evaluate(adapter, ready, task, client, parts, rng.seed_of(self.seed, "adapter"), self.compute)
        return {part: score for (_, part), score in scores.items()}

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
        if found is not None:  # what compression has left is no business of a method's, and all that some parties keep
            found = {slot: leaves for slot, leaves in found.items() if slot != UNSENT}
        if found is None and base is not None:
            notes = [f"its local state of round {base} is not there any more: it begins anew"]
        if not found:
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
        down = self._down(packet)
        measured = calibration_in(down)
        received = {slot: leaves for slot, leaves in down.items() if slot not in measured}
        return {**method.deployed(received, to(kept, self.compute.device)), **measured}
