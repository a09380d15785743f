"""An engine whose clients are elsewhere: what others do with a call is a packet here, and some do not answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from fedshift.core.adapter import Adapter
from fedshift.core.context import Context
from fedshift.core.method import Method
from fedshift.core.tree import Tree, shapes
from fedshift.data.task import Task
from fedshift.deploy.checks import absurd, check_sender, check_shape, rehearsed
from fedshift.deploy.counting import heard
from fedshift.deploy.packet import HELD, Handle, Kind, Packet
from fedshift.engines.base import Reply, Score
from fedshift.engines.schedule import Plan
from fedshift.errors import UserError
from fedshift.privacy.coding import Tallies, Updates
from fedshift.privacy.frame import Frame
from fedshift.privacy.upload import packed, unpacked
from fedshift.runs.artefact import settings_of
from fedshift.runs.setup import Setup

GO_ON = "go on with fedshift deploy run --resume once more of them are there"


class Exchange(Protocol):
    """How packets get to parties and answers come back."""

    def sizes(self) -> Mapping[str, int]:
        """How many images each party trains on, of those that were ever there."""

    def __call__(self, packets: Mapping[str, Packet]) -> Mapping[str, Packet | str]:
        """The answers within the deadline, by party; a text says why there is none."""


@dataclass(frozen=True)
class Terms:
    """What a federation agreed on."""

    federation: str  # its id
    least: int = 1  # a round needs so many sound replies
    attempts: int = 3  # a round with fewer is asked for again, so often in all
    factor: float = 100.0  # a reply whose norm is so many times the usual one is left out


@dataclass(frozen=True)
class Remote:
    """Sends what the session hands to an engine, and gives back the replies that are sound."""

    exchange: Exchange
    terms: Terms
    setup: Setup
    rounds: int
    clients: int
    note: Callable[[str], object] = field(default=print, repr=False)
    keep: Callable[[str], Sequence[int]] = field(default=lambda _: (), repr=False)  # local states to come back to
    opening: Callable[[], object] = field(default=lambda: None, repr=False)  # called before a sum with noise is known
    tellers: Callable[[Sequence[str]], object] = field(default=lambda _: None, repr=False)  # before one over images is

    def train(
        self, method: Method, downs: Mapping[str, Tree], locals: Mapping[str, Tree], task: Task, plan: Plan
    ) -> dict[str, Reply]:
        """The local work of the parties in ``downs``, or what they give away after the last phases; of who answers."""
        kind: Kind = "settle" if plan.ctx.ending else "train"
        network = self._network(method)
        packets = {
            name: Packet(
                kind, {**self.of_context(name, network, plan.ctx, locals[name]), "keep": list(self.keep(name))}, down
            )
            for name, down in downs.items()
        }
        sound: dict[str, Packet] = {}
        least = 0 if plan.ctx.ending else min(self._least, len(packets))
        for attempt in range(self.terms.attempts):
            waiting = {name: packet for name, packet in packets.items() if name not in sound}
            sound |= self._sound(method, task, plan, waiting)
            if len(sound) >= least:
                break
            if attempt + 1 < self.terms.attempts:
                self.note(f"round {plan.ctx.round + 1}: {len(sound)} of at least {least} sound replies; asking again")
        else:
            raise UserError(
                f"round {plan.ctx.round + 1}: {len(sound)} of at least {least} parties gave a sound reply; {GO_ON}"
            )
        return {name: self._reply(sound[name], plan.ctx, locals[name]) for name in downs if name in sound}

    def evaluate(
        self, adapter: Adapter, deployed: Mapping[str, Tree], task: Task, parts: Sequence[str], seed: int
    ) -> dict[tuple[str, str], Score]:
        """Scores by (client, part) of the parties that answer and agree to tell counts."""
        method = next(m for m in self.setup.methods.values() if m.arch is adapter.arch)
        asked = {"adapter": settings_of(adapter), "parts": list(parts)}
        packets = {
            name: Packet(
                "evaluate", {**self.of_models(name, self._network(method), tree), **asked}, without_handle(tree)
            )
            for name, tree in deployed.items()
        }
        scores: dict[tuple[str, str], Score] = {}
        for name, answer in self.asked(packets).items():
            try:
                found = heard(answer.facts.get("scores", {}), answer.tree, method.arch.classes)
            except UserError as error:
                self.note(f"{name!r} is left out of the evaluation: {error}")
                continue
            scores |= {(name, part): score for part, score in found.items() if part in parts}
        return scores

    def close(self) -> None:
        """Nothing is held."""

    def asked(self, packets: Mapping[str, Packet]) -> dict[str, Packet]:
        """The answers that came from whom they were asked of; why others are missing is noted."""
        answers, fine = self.exchange(packets), dict[str, Packet]()
        for name, packet in packets.items():
            answer = answers.get(name, "it is not there")
            try:
                if isinstance(answer, str):
                    raise UserError(answer)
                check_sender(answer, packet)
            except UserError as error:
                self.note(f"{name!r} is left out ({packet.kind}, {_when(packet)}): {error}")
                continue
            for said in answer.facts.get("notes", []):
                self.note(f"{name!r} says: {said}")
            fine[name] = answer
        return fine

    def of_models(self, name: str, network: str, tree: Tree) -> dict[str, Any]:
        """The facts of a packet about the models of one round; ``tree`` is what :meth:`Afar.trained` made."""
        number = Handle.of(tree).models
        assert number is not None
        return self.of_context(name, network, Context(number, self.rounds, self.clients, "final"), tree)

    def of_context(self, name: str, network: str, ctx: Context, local: Tree) -> dict[str, Any]:
        """The facts of a packet: to whom it goes, where in the run it belongs and which local state it is about."""
        handle = Handle.of(local)
        where = {"round": ctx.round, "rounds": ctx.rounds, "clients": ctx.clients, "stage": ctx.stage}
        whose = {"federation": self.terms.federation, "client": name, "network": network}
        return {**whose, **where, "base": handle.base, "settled": handle.settled}

    def expected(self, method: Method, task: Task, ctx: Context, seed: int, name: str, down: Tree) -> Tree:
        """What a party's upload must look like before anything is done to it: only names, shapes and types are right."""
        return rehearsed(method, self.setup, self._network(method), task, task.client(name), seed, ctx, down)

    @property
    def secure(self) -> bool:
        """Whether parties hide their uploads, and answer with keys for :meth:`summed` when they have trained."""
        return self.setup.privacy is not None and self.setup.privacy.secure

    def summed(self, replies: Mapping[str, Reply], where: int, size: int) -> dict[str, Reply]:
        """The same replies with the sum of all uploads in place of each, of those whose uploads are in it.

        The parties, of whatever networks, have trained in round ``where`` (from 0) and sent their keys.
        """
        from fedshift.deploy.summing import Sums, session_of  # most federations need no cryptography of ours

        assert self.setup.privacy is not None
        keys = {name: reply.up for name, reply in replies.items() if reply.finite}
        session = session_of(self.terms.federation, where)
        coding = Updates(self.setup.privacy)
        sums = Sums(self.setup.privacy, self.asked, session, size, coding, self.opening, self.note)
        try:
            total, survivors = sums.total(keys, self._whose(where))
        except UserError as error:
            raise UserError(f"round {where + 1}: {error}; {GO_ON}") from None
        there = {name: replace(replies[name], up=total) for name in survivors}
        return {name: there.get(name, reply) for name, reply in replies.items() if name in there or not reply.finite}

    def tallied(self, keys: Mapping[str, Tree], where: int, what: str, size: int) -> tuple[Tensor, int]:
        """The sum of what all parties whose keys these are counted, and the bytes they sent for it.

        If one of them is lost on the way nobody learns anything, nor if other parties' sums are known already
        (:mod:`fedshift.deploy.tellers`).
        """
        from fedshift.deploy.summing import SUM, Sums, session_of

        assert self.setup.privacy is not None
        session = session_of(self.terms.federation, where, what)
        known = partial(self.tellers, list(keys))
        sums = Sums(self.setup.privacy, self.asked, session, size, Tallies(), known, self.note, everybody=True)
        found = sums.total(keys, self._whose(where, summation=what))[0][SUM]
        return found["total"], int(found["up"])

    # ---- inner ---------------------------------------------------------------------------------------------------------
    def _whose(self, where: int, **more: str) -> Callable[[str], dict[str, Any]]:
        """To whom a packet of a secure summation goes."""
        whose = {"federation": self.terms.federation, "round": where, **more}
        return lambda name: {**whose, "client": name}

    @property
    def _least(self) -> int:
        """How many sound replies a round needs: a secure summation takes some, however few it is among.

        That is among all parties; those of one of several networks may be fewer.
        """
        privacy, alone = self.setup.privacy, len(self.setup.methods) == 1
        return max(self.terms.least, privacy.threshold(1)) if alone and privacy and privacy.secure else self.terms.least

    def _message(self, up: Tree, down: Tree, ctx: Context) -> Tree:
        """What an upload looks like when it arrives."""
        if self.setup.privacy is None or ctx.ending:
            return up
        if self.secure:
            from fedshift.deploy.summing import keys_like  # most federations need no cryptography of ours

            return keys_like()
        return packed(self.setup.privacy, Frame.of(up, down), up, {})[0]

    def _network(self, method: Method) -> str:
        return next(name for name, own in self.setup.methods.items() if own is method)

    def _sound(self, method: Method, task: Task, plan: Plan, packets: Mapping[str, Packet]) -> dict[str, Packet]:
        """The answers that are what they must be; a party that says itself that it diverged is not checked further."""
        answers = self.asked(packets)
        fine: dict[str, Packet] = {}
        expected: dict[object, tuple[Tree, Tree]] = {}  # an upload and its message, by what went down
        for name, answer in answers.items():
            down = packets[name].tree
            key = shapes(down)
            try:
                if _finite(answer):
                    if key not in expected:
                        up = self.expected(method, task, plan.ctx, plan.seed, name, down)
                        expected[key] = (up, self._message(up, down, plan.ctx))
                    check_shape(answer.tree, expected[key][1])
                    if self.setup.privacy is not None and not self.secure and not plan.ctx.ending:
                        unpacked(
                            self.setup.privacy, Frame.of(expected[key][0], down), answer.tree
                        )  # says what is wrong
            except UserError as error:
                self.note(f"{name!r} is left out of round {plan.ctx.round + 1}: {error}")
                continue
            fine[name] = answer
        if self.setup.privacy is not None and self.setup.privacy.noise:
            return fine  # clipping bounds norms, and whose update counts must not depend on how long others' are
        downs = {name: packets[name].tree for name in fine}
        for name, why in absurd({n: p.tree for n, p in fine.items()}, downs, self.terms.factor).items():
            self.note(f"{name!r} is left out of round {plan.ctx.round + 1}: {why}")
            del fine[name]
        return fine

    @staticmethod
    def _reply(answer: Packet, ctx: Context, local: Tree) -> Reply:
        """As a session knows it: in place of the local state stands which one it is."""
        if ctx.ending:
            return Reply(answer.tree, Handle(Handle.of(local).base, settled=True).slot(), 0.0, 0, _finite(answer))
        loss, held = answer.facts.get("loss"), answer.facts.get("held") is True
        return Reply(
            up=answer.tree,
            local=Handle(ctx.round + 1).slot() if held else {},
            loss=float(loss) if isinstance(loss, int | float) else float("nan"),
            steps=int(answer.facts.get("steps", 0)),
            finite=_finite(answer),
        )


def without_handle(tree: Tree) -> Tree:
    """What travels of a tree that has a handle among its slots."""
    return {slot: leaves for slot, leaves in tree.items() if slot != HELD}


def _finite(answer: Packet) -> bool:
    return answer.facts.get("finite") is True


def _when(packet: Packet) -> str:
    number = packet.facts.get("round")
    in_it = packet.kind in ("train", "share", "mask", "unmask")  # others come after so many rounds
    return "at the start" if number is None else f"round {number + in_it}"
