"""The app of a party: Flower starts it anew for every message, so it imports little."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedshift.deploy.kit import party_of
from fedshift.deploy.packet import KINDS
from fedshift.deploy.party import Party
from fedshift.deploy.records import TYPES, from_records, to_records


def client_app(party: Callable[[Context], Party]) -> ClientApp:
    """An app that answers packets; it has no code about any method."""
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        return Message(to_records(party(context).answer(from_records(message.content))), reply_to=message)

    decorators = {"query": app.query, "train": app.train, "evaluate": app.evaluate}
    for kind in KINDS:
        category, action = TYPES[kind].split(".")
        decorators[category](action)(answer)
    return app


@cache
def _party(settings: tuple[tuple[str, Any], ...]) -> Party:
    return party_of(dict(settings))


def node_app() -> ClientApp:
    """The app of ``fedshift deploy client``: everything it needs is in the node's own settings and on its own disk."""
    return client_app(lambda context: _party(tuple(sorted(context.node_config.items()))))
