"""A grid in one process: Flower's own messages, apps and records, without a server, a node or a socket."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

Tamper = Callable[[str, Message, RecordDict], RecordDict | None]


def through_the_wire(content: RecordDict) -> RecordDict:
    """As bytes and back."""
    proto = recorddict_to_proto(content)
    return recorddict_from_proto(type(proto).FromString(proto.SerializeToString()))


@dataclass
class Node:
    name: str
    app: ClientApp
    key: bytes = b""
    online: bool = True
    state: RecordDict = field(default_factory=RecordDict)


class Loopback(Grid):
    """``tamper`` may change or swallow an answer on its way."""

    def __init__(self, nodes: dict[int, Node], tamper: Tamper | None = None) -> None:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 0
        self.nodes, self.tamper = nodes, tamper
        self.sent = 0  # messages

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return SimpleNamespace(run_id=0)

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return [number for number, node in self.nodes.items() if node.online]

    def get_nodes(self) -> Iterable[Any]:
        return [SimpleNamespace(node_id=number, public_key=self.nodes[number].key) for number in self.get_node_ids()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        replies = []
        for message in messages:
            self.sent += 1
            number = message.metadata.dst_node_id
            node = self.nodes[number]
            message = Message(
                through_the_wire(message.content), number, message.metadata.message_type, ttl=message.metadata.ttl
            )
            context = Context(0, number, {}, node.state, {})
            try:
                reply = node.app(message, context)
                node.state = context.state
                content: RecordDict | None = through_the_wire(reply.content)
            except Exception as error:  # as a SuperNode says it
                reason = f"{type(error)}:<'{error}'>"
                reply = Message(Error(code=2, reason=reason), reply_to=message)
                reply.metadata.__dict__["_src_node_id"] = number
                replies.append(reply)
                continue
            if self.tamper is not None:
                content = self.tamper(node.name, message, content)
            if content is None:
                continue
            reply = Message(content, reply_to=message)
            reply.metadata.__dict__["_src_node_id"] = number
            replies.append(reply)
        return reversed(replies)  # no order is promised
