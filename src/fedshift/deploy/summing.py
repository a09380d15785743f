"""A secure summation over packets: the party's half of its phases and the server's, neither of whom sees more than it must.

What a party needs from one phase to the next lies in its own folder, until it has opened its shares. Every phase is answered
once: a second answer would hide the same numbers behind the same masks, with other noise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedshift.core.tree import Tensors, Tree
from fedshift.deploy.memory import Memory
from fedshift.deploy.packet import Kind, Packet
from fedshift.errors import UserError
from fedshift.privacy.coding import Coding
from fedshift.privacy.compression import message_bytes
from fedshift.privacy.letters import LETTER_BYTES, Letters, right_shares
from fedshift.privacy.secure_sum import Keys, Member, total_of
from fedshift.privacy.settings import Privacy
from fedshift.privacy.sharing import SHARE_BYTES

SUM, KEYS, LETTERS, SHARES, WORDS = "sum", "keys", "letters", "shares", "words"


def keys_like() -> Tree:
    """What a party answers when it has trained."""
    return {KEYS: {part.name: torch.zeros(32, dtype=torch.uint8) for part in fields(Keys)}}


def sent_like(size: int, parties: int) -> Tree:
    """What a party sends in all phases of one summation of vectors of this size, if everybody is there."""
    letter, share = (torch.zeros(count, dtype=torch.uint8) for count in (LETTER_BYTES, SHARE_BYTES))
    words = {WORDS: {WORDS: torch.zeros(size, dtype=torch.int32)}}
    everybody = [str(number) for number in range(parties)]
    return {**keys_like(), LETTERS: dict.fromkeys(everybody, letter), **words, SHARES: dict.fromkeys(everybody, share)}


# ---- the party -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Summand:
    """A party's half. ``session`` says which summation it is.

    Each phase reads what the last one left, and leaves something else, while no other process of this party can.
    """

    privacy: Privacy
    memory: Memory
    session: bytes
    coding: Coding

    def advertise(self, update: Tensor) -> Tree:
        """Put the vector aside with new secrets; their public keys travel."""
        member = Member(0, 0, self.session)
        secrets = {name: _tensor(getattr(member, name)) for name in ("mask_secret", "letter_secret", "own_mask")}
        about = {"session": _tensor(self.session)}
        with self.memory.alone():
            self.memory.put_aside({"own": {"update": {"values": update.cpu()}, "secrets": secrets, "about": about}})
        keys = member.advertise()
        return {KEYS: {part.name: _tensor(getattr(keys, part.name)) for part in fields(Keys)}}

    def share(self, packet: Packet) -> Tree:
        """Letters for everybody whose keys these are."""
        with self.memory.alone():
            aside = self._aside("own")
            keys, number = _keys(packet.tree[KEYS]), int(packet.facts["number"])
            member = self._member(aside, number, len(keys))
            if keys.get(number) != member.advertise():
                raise UserError("the server says that this party has another key than it has")
            letters = member.share(keys)
            about = {"number": torch.tensor(number)}
            self.memory.put_aside({**aside, "shared": {KEYS: packet.tree[KEYS], "about": about}})
        return {LETTERS: {str(other): _tensor(letter) for other, letter in letters.items()}}

    def mask(self, packet: Packet) -> Tree:
        """The vector behind its masks."""
        with self.memory.alone():
            aside = self._aside("own", "shared")
            keys, member = self._again(aside)
            letters = packet.tree[LETTERS]
            update = aside["own"]["update"]["values"]
            words = self.coding.words(update, len(keys))
            masked = member.mask(keys, _letters(letters), words)
            self.memory.put_aside({**aside, "masked": {LETTERS: letters}})
        return {WORDS: {WORDS: torch.from_numpy(masked.view(np.int32))}}

    def unmask(self, packet: Packet) -> Tree:
        """The shares that take masks off; then everything is forgotten."""
        with self.memory.alone():
            aside = self._aside("own", "shared", "masked")
            keys, member = self._again(aside)
            letters, survivors = _letters(aside["masked"][LETTERS]), [int(k) for k in packet.facts["survivors"]]
            shares = member.unmask(keys, letters, survivors)
            self.memory.forget_aside()
        return {SHARES: {str(other): _tensor(share) for other, share in shares.items()}}

    def _aside(self, *phases: str) -> dict[str, Tree]:
        """What these phases of this summation left, which must be the last ones."""
        aside = self.memory.aside()
        if tuple(aside) != phases or _bytes(aside["own"]["about"]["session"]) != self.session:
            raise UserError(
                "this party has nothing to add to this secure summation; it is asked again in the next round"
            )
        return aside

    def _again(self, aside: Mapping[str, Tree]) -> tuple[dict[int, Keys], Member]:
        keys = _keys(aside["shared"][KEYS])
        return keys, self._member(aside, int(aside["shared"]["about"]["number"]), len(keys))

    def _member(self, aside: Mapping[str, Tree], number: int, parties: int) -> Member:
        """Itself; how many must survive it works out for itself."""
        own = {name: _bytes(leaf) for name, leaf in aside["own"]["secrets"].items()}
        return Member(number, self.privacy.threshold(parties), self.session, **own)


# ---- the server ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Sums:
    """The server's half: asks the parties that have trained, phase by phase, and goes on with those that answer."""

    privacy: Privacy
    ask: Callable[[Mapping[str, Packet]], Mapping[str, Packet]]
    session: bytes
    size: int  # of a vector
    coding: Coding
    opening: Callable[[], object]  # called before the sum is known
    note: Callable[[str], object]
    everybody: bool = False  # nobody may be lost before it is known

    def total(self, sent: Mapping[str, Tree], facts: Callable[[str], dict[str, Any]]) -> tuple[Tree, list[str]]:
        """The sum, as a tree with what its messages weighed, and whose it is.

        ``sent`` has the keys of those that have trained, ``facts`` say to whom a packet goes.
        """
        names, weight = list(sent), [0, 0]  # bytes up and down
        length = self.coding.length(self.size)

        def asked(
            kind: Kind, slot: str, trees: Mapping[int, Tree], about: Callable[[int], dict[str, Any]]
        ) -> dict[int, Tensors]:
            """The slots that came back, by number; one that lacks it is as good as none."""
            packets = {names[k]: Packet(kind, {**facts(names[k]), **about(k)}, tree) for k, tree in trees.items()}
            answers = self.ask(packets)
            weight[0] += sum(message_bytes(answer.tree) for answer in answers.values())
            weight[1] += sum(message_bytes(packet.tree) for packet in packets.values())
            return {k: own for k in trees if (a := answers.get(names[k])) and (own := a.tree.get(slot))}

        numbers = [str(k) for k in range(len(names))]
        advertised = {f"{k}/{kind}": key for k, name in enumerate(names) for kind, key in sent[name][KEYS].items()}
        everybody = {k: {KEYS: advertised} for k in range(len(names))}
        letters = asked("share", LETTERS, everybody, lambda k: {"number": k})
        letters = {k: own for k, own in letters.items() if list(own) == numbers and _are_letters(own)}
        dealt = {k: {LETTERS: {str(j): own[str(k)] for j, own in letters.items()}} for k in letters}
        masked = asked("mask", WORDS, dealt, lambda _: {})
        words = {
            k: own[WORDS].numpy().view(np.uint32)
            for k, own in masked.items()
            if WORDS in own and own[WORDS].dtype == torch.int32 and own[WORDS].shape == (length,)
        }
        threshold = self.privacy.threshold(len(names))
        if len(words) < (needed := len(names) if self.everybody else threshold):
            raise UserError(f"a secure summation needs {needed} parties; {len(words)} are left")
        self.opening()
        opened = asked("unmask", SHARES, {k: {} for k in words}, lambda _: {"survivors": list(words)})
        shares = {k: _letters(own) for k, own in opened.items() if set(own) <= {str(j) for j in letters}}
        envelopes = {k: _letters(own) for k, own in letters.items()}
        self._say_false(names, envelopes, list(words), shares)
        keys, called = _keys(advertised), lambda k: repr(names[k])
        whole = total_of(keys, envelopes, words, shares, threshold, self.session, called)
        total = self.coding.total(whole, len(words), len(names))
        weight[0] += sum(message_bytes(tree) for tree in sent.values())
        found = {"total": total, "up": torch.tensor(weight[0]), "down": torch.tensor(weight[1])}
        return {SUM: found}, [names[k] for k in words]

    def _say_false(
        self,
        names: Sequence[str],
        letters: Letters,
        survivors: Sequence[int],
        opened: Mapping[int, Mapping[int, bytes]],
    ) -> None:
        """Who told shares that are not those that were dealt, and who could not tell some."""
        right = right_shares(letters, survivors, opened)
        for teller, told in opened.items():
            false = [repr(names[dealer]) for dealer in told if teller not in right[dealer]]
            untold = [repr(names[dealer]) for dealer in letters if dealer not in told]
            if false:
                self.note(
                    f"{names[teller]!r} told false shares of masks of {', '.join(false)}, which are not used: its disk "
                    "is damaged, or it does not keep to the protocol"
                )
            if untold:
                self.note(f"{names[teller]!r} could not read what {', '.join(untold)} dealt it for a secure summation")


def session_of(federation: str, round_: int, what: str = "") -> bytes:
    """Which summation it is: of a round's uploads, or of ``what``.

    >>> session_of("f", 3), session_of("f", 3, "calibrate 1")
    (b'f 3', b'f 3 calibrate 1')
    """
    return f"{federation} {round_}{what and ' ' + what}".encode()


def _keys(leaves: Tensors) -> dict[int, Keys]:
    try:
        numbers = sorted({int(name.partition("/")[0]) for name in leaves})
        return {k: Keys(*(_bytes(leaves[f"{k}/{part.name}"]) for part in fields(Keys))) for k in numbers}
    except (LookupError, ValueError):
        raise UserError("the keys of a secure summation are not what they must be") from None


def _are_letters(leaves: Tensors) -> bool:
    return all(leaf.dtype == torch.uint8 and leaf.shape == (LETTER_BYTES,) for leaf in leaves.values())


def _letters(leaves: Tensors) -> dict[int, bytes]:
    return {int(sender): _bytes(letter) for sender, letter in leaves.items()}


def _tensor(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _bytes(leaf: Tensor) -> bytes:
    return leaf.to(torch.uint8).numpy().tobytes()
