"""What travels between server and party: a kind, a few plain facts, a tree. Nothing is ever pickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from fedshift.core.tree import Tree
from fedshift.errors import UserError

Kind: TypeAlias = Literal["hello", "train", "share", "mask", "unmask", "settle", "calibrate", "evaluate", "serve"]
KINDS: tuple[str, ...] = get_args(Kind)
HELD = "held"  # the slot of a :class:`Handle`


@dataclass(frozen=True)
class Packet:
    """One message. A party's answer has the kind of the question.

    ``facts`` are plain values (JSON); tensors are only in the tree, whose empty slots survive.

    >>> packet = Packet("train", {"round": 3}, {"model": {"w": torch.ones(2)}, "nothing": {}})
    >>> Packet.read(packet.header(), packet.arrays()).tree == packet.tree
    True
    """

    kind: Kind
    facts: Mapping[str, Any] = field(default_factory=dict)
    tree: Tree = field(default_factory=dict, repr=False)

    def header(self) -> str:
        """Everything but the tensors: facts, and slots and names in their order, also slots that are empty."""
        slots = [[slot, list(leaves)] for slot, leaves in self.tree.items()]
        return json.dumps({"kind": self.kind, "facts": dict(self.facts), "slots": slots})

    def arrays(self) -> Tree:
        """The slots that hold something."""
        return {slot: leaves for slot, leaves in self.tree.items() if leaves}

    @staticmethod
    def read(header: str, arrays: Mapping[str, Mapping[str, Tensor]]) -> Packet:
        """From what :meth:`header` and :meth:`arrays` gave; a sentence if it is not that."""
        try:
            found = json.loads(header)
            kind, facts = found["kind"], dict(found["facts"])
            slots = {str(slot): [str(name) for name in names] for slot, names in found["slots"]}
        except (ValueError, LookupError, TypeError) as error:
            raise UserError(f"this is no packet of fedshift ({error!r})") from None
        if kind not in KINDS:
            raise UserError(f"this is no packet of fedshift (kind {kind!r})")
        there = {slot: set(leaves) for slot, leaves in arrays.items() if leaves}
        if there != {slot: set(names) for slot, names in slots.items() if names}:
            raise UserError("this packet has other tensors than its header names")
        return Packet(
            kind, facts, {slot: {name: arrays[slot][name] for name in names} for slot, names in slots.items()}
        )


@dataclass(frozen=True)
class Handle:
    """What the server has in place of a party's local state: which one it is. It is stored as a slot of numbers.

    >>> Handle.of(Handle(base=4).slot()), Handle.of({}).base
    (Handle(base=4, settled=False, models=None), None)
    """

    base: int | None = None  # the round it is of; None: the party has none yet
    settled: bool = False  # whether the party has put aside what it kept after the last phases
    models: int | None = None  # the round whose models are meant

    def slot(self) -> Tree:
        """As a tree of the one state type; empty if there is nothing to say."""
        numbers = {"base": self.base, "models": self.models}
        leaves = {key: torch.tensor(value) for key, value in numbers.items() if value is not None}
        flags = {"settled": torch.tensor(True)} if self.settled else {}
        return {HELD: {**leaves, **flags}} if leaves or flags else {}

    @staticmethod
    def of(tree: Tree) -> Handle:
        """From such a tree, or one that has it among other slots."""
        leaves = tree.get(HELD, {})
        base, models = (int(leaves[key]) if key in leaves else None for key in ("base", "models"))
        return Handle(base, "settled" in leaves, models)
