"""The app of a party: Flower starts it anew for every message, so it imports little."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedshift.deploy.kit import party_of
from fedshift.deploy.packet import KINDS, Packet
from fedshift.deploy.party import Party
from fedshift.deploy.records import TYPES, from_records, to_records

KEPT = 2  # local states that are in memory too


def client_app(party: Callable[[Context], Party]) -> ClientApp:
    """An app that answers packets; it has no code about any method."""
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        own = party(context)
        restore(own, context.state)
        reply = Message(to_records(own.answer(from_records(message.content))), reply_to=message)
        context.state = spare(own)
        return reply

    decorators = {"query": app.query, "train": app.train, "evaluate": app.evaluate}
    for kind in KINDS:
        category, action = TYPES[kind].split(".")
        decorators[category](action)(answer)
    return app


def spare(party: Party) -> RecordDict:
    """The newest local states, as Flower's node holds them in memory beside the files on disk."""
    records = RecordDict()
    for number in party.memory.rounds()[-KEPT:]:
        local = party.memory.recall(number)
        if local is not None:
            facts = {"federation": party.federation, "round": number}
            records.update({f"{number}/{key}": own for key, own in to_records(Packet("train", facts, local)).items()})
    return records


def restore(party: Party, records: RecordDict) -> None:
    """Write local states that a node has in memory and whose files are gone; those of another federation are not ours."""
    for number in sorted({int(key.partition("/")[0]) for key in records}):
        own = {key.partition("/")[2]: one for key, one in records.items() if key.startswith(f"{number}/")}
        packet = from_records(RecordDict(own))
        if packet.facts["federation"] == party.federation and party.memory.recall(number) is None:
            party.memory.keep(number, packet.tree, others=party.memory.rounds())


@cache
def _party(settings: tuple[tuple[str, Any], ...]) -> Party:
    return party_of(dict(settings))


def node_app() -> ClientApp:
    """The app of ``fedshift deploy client``: everything it needs is in the node's own settings and on its own disk."""
    return client_app(lambda context: _party(tuple(sorted(context.node_config.items()))))
