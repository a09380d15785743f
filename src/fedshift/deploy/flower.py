"""The server's contact with Flower: a grid as an exchange, and the app of the server."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from fedshift.deploy.federation import Federation
from fedshift.deploy.keys import same_key
from fedshift.deploy.kit import ServerKit
from fedshift.deploy.log import Log
from fedshift.deploy.packet import Packet
from fedshift.deploy.records import TYPES, from_records, to_records
from fedshift.deploy.server import carry_out, offer
from fedshift.errors import UserError

PAUSE = 1.0  # seconds between two looks whether somebody has come
HELLO, AGAIN = 300.0, 30.0  # seconds for an answer to a hello, and until one who was refused is asked again


@dataclass
class GridExchange:
    """Packets through a grid. It knows a party by its key, or without keys by what it says at its first hello."""

    grid: Grid
    federation: Federation
    note: Callable[[str], object]
    nodes: dict[str, int] = field(default_factory=dict)  # who is there now
    _sizes: dict[str, int] = field(default_factory=dict)
    _met: dict[int, str] = field(default_factory=dict)  # nodes that said hello: who each is, "" for nobody we know
    _refused: dict[int, float] = field(default_factory=dict)  # when a node that cannot take part may say hello again

    def sizes(self) -> Mapping[str, int]:
        """How many images each party trains on, of those that were ever there."""
        return self._sizes

    def gather(self, wait: float, patience: float) -> None:
        """Wait for all parties; after ``wait`` seconds for as many as a round needs, after ``patience`` no longer."""
        began, least = time.monotonic(), self.federation.spec.least
        self._look()
        while len(self.nodes) < len(self.federation.names):
            waited = time.monotonic() - began
            missing = ", ".join(name for name in self.federation.names if name not in self.nodes)
            if waited > wait and len(self.nodes) >= least:
                self.note(f"starting without {missing}")
                return
            if waited > patience:
                there = f"{len(self.nodes)} of at least {least} parties"
                raise UserError(f"{there} are there after {patience:.0f} s; missing: {missing}")
            time.sleep(PAUSE)
            self._look()

    def __call__(self, packets: Mapping[str, Packet]) -> Mapping[str, Packet | str]:
        """The answers within the deadline, by party; a text says why there is none."""
        self._look()
        there = {name: packet for name, packet in packets.items() if name in self.nodes}
        found: dict[str, Packet | str] = dict.fromkeys(packets, "it is not connected")
        deadline = self.federation.spec.deadline
        found |= dict.fromkeys(there, f"it did not answer within {deadline:g} s")
        by_node = {self.nodes[name]: name for name in there}
        for node, answer in self._sent({self.nodes[name]: packet for name, packet in there.items()}, deadline):
            if node in by_node:
                found[by_node[node]] = answer
        return found

    def _sent(self, packets: Mapping[int, Packet], deadline: float) -> Iterable[tuple[int, Packet | str]]:
        messages = [
            Message(to_records(packet), node, TYPES[packet.kind], ttl=deadline, group_id=str(packet.facts.get("round")))
            for node, packet in packets.items()
        ]
        replies = self.grid.send_and_receive(messages, timeout=deadline) if messages else []
        asked = {message.metadata.message_id: message.metadata.dst_node_id for message in messages}
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_error() and node not in packets:  # the server speaks for a node that is gone
                node = asked.get(reply.metadata.reply_to_message_id, node)
            try:
                if reply.has_error():
                    raise UserError(_plain(reply.error.reason or "it failed"))
                yield node, from_records(reply.content)
            except UserError as error:
                yield node, str(error)

    def _look(self) -> None:
        """See who is there; who is new says hello first."""
        nodes = {node.node_id: node.public_key for node in self.grid.get_nodes()}
        keyed = {node: self._by_key(key) for node, key in nodes.items()}
        for node in [node for node in nodes if not self.federation.spec.insecure and keyed[node] is None]:
            if node not in self._met:
                self._met[node] = ""
                self.note("a node whose key belongs to no party is connected; it is not asked")
        now = time.monotonic()
        new = [node for node in nodes if node not in self._met and self._refused.get(node, 0.0) <= now]
        hello = {
            node: Packet(
                "hello", {"federation": self.federation.id, **({"client": who} if (who := keyed[node]) else {})}
            )
            for node in new
        }
        for node, answer in self._sent(hello, min(HELLO, self.federation.spec.deadline)):
            if node in hello:
                self._greet(node, answer, keyed[node], nodes)
        self.nodes = {name: node for node, name in self._met.items() if name and node in nodes}

    def _greet(self, node: int, answer: Packet | str, keyed: str | None, there: Container[int]) -> None:
        try:
            if isinstance(answer, str):
                raise UserError(answer)
            name = _checked_hello(answer, self.federation, keyed)
            before = next((old for old, who in self._met.items() if who == name), None)
            if keyed is None and before is not None and before in there:
                raise UserError(f"it says it is {name!r}, who is there already")
        except UserError as error:
            self.note(f"{keyed or 'a node'} cannot take part: {error}")
            self._refused[node] = time.monotonic() + AGAIN  # it may be mended by then
            return
        self._met = {**{old: who for old, who in self._met.items() if who != name}, node: name}
        self._sizes[name] = int(answer.facts["samples"])

    def _by_key(self, key: bytes) -> str | None:
        return next((p.name for p in self.federation.spec.party if p.key and same_key(p.key, key)), None)


def _checked_hello(answer: Packet, federation: Federation, keyed: str | None) -> str:
    """The name of a party that means the same as the server does."""
    name, samples = answer.facts.get("client"), answer.facts.get("samples")
    if keyed is not None and name != keyed:
        raise UserError(f"it says it is {name!r}, but its key is that of {keyed!r}")
    if name not in federation.names:
        raise UserError(f"it says it is {name!r}, who is no party of this federation")
    if answer.facts.get("federation") != federation.id:
        raise UserError("its federation.toml or experiment.toml is not that of the server")
    if not isinstance(samples, int) or not 0 < samples < 1 << 40:
        raise UserError(f"it says it trains on {samples!r} images")
    if answer.facts.get("classes") != federation.spec.classes or answer.facts.get("shape") != federation.spec.shape:
        raise UserError("its classes or image sizes are not those of the federation")
    return str(name)


def _plain(reason: str) -> str:
    """What a party's app said when it failed, without the name of the error's class."""
    return reason.partition(":<'")[2].removesuffix("'>") or reason


def server_app() -> ServerApp:
    """The app of ``fedshift deploy run``; which federation it is stands in the run's settings."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        kit = ServerKit(Path(str(context.run_config["folder"])))
        with Log(kit.log) as log:
            serve(grid, kit, bool(context.run_config["resume"]), log)

    return app


def serve(grid: Grid, kit: ServerKit, resume: bool, log: Log) -> None:
    """Carry a federation's run out over a grid; a mistake of a person is one sentence in the log."""
    federation = kit.federation
    try:
        exchange = GridExchange(grid, federation, log.note)
        log.note(f"federation {federation.spec.name} ({federation.id}): waiting for parties")
        exchange.gather(federation.spec.wait, federation.spec.deadline)
        folder = carry_out(federation, exchange, kit.runs, resume, log)
        offer(folder, kit.offer)
        log.note(f"finished: {folder.path}")
    except UserError as error:
        log.note(f"error: {error}")
        raise
