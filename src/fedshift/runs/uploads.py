"""What lies between a client's upload and the server's half of a method: nothing, or ``[privacy]``.

Behind ``[privacy]`` a server that may only see sums is given the mean in place of every single upload. A method whose
aggregate is a weighted mean (``linear``) cannot tell the difference, so that no method has code about privacy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedshift.core.tree import Tree, float_bytes
from fedshift.errors import UserError
from fedshift.privacy.compression import message_bytes
from fedshift.privacy.frame import Frame
from fedshift.privacy.noise import Noise
from fedshift.privacy.settings import Privacy
from fedshift.privacy.upload import code_of, noisy_sum, packed, unpacked, words_of

NOBODY = "nobody"  # whose upload it is when nobody took part, and there is noise all the same


@dataclass(frozen=True)
class Delivered:
    """What reached the server, and what it cost."""

    ups: Mapping[str, Tree]  # as the server's half of the method is given them
    bytes_up: int
    kept: Mapping[str, Tree] = field(default_factory=dict)  # further slots of clients' local states
    bytes_down: int = 0  # beside what they were sent to train with
    noisy: bool = False  # whether it is something that an accountant counts


@dataclass(frozen=True)
class Sent:
    """What clients would upload, what came down to them, and their local states."""

    ups: Mapping[str, Tree]
    downs: Mapping[str, Tree]
    locals: Mapping[str, Tree] = field(default_factory=dict)


@dataclass(frozen=True)
class Uploads:
    """Uploads of a run on their way to the server."""

    privacy: Privacy | None
    noise: Noise
    expected: float  # how many clients a round has on average: a mean with noise is over so many, whoever came

    @property
    def always(self) -> bool:
        """Whether something reaches the server even if nobody takes part."""
        return self.privacy is not None and self.privacy.noise > 0

    def given(self, sent: Sent, when: tuple[object, ...], clients: int) -> Delivered:
        """What the server gets of what all clients give away, once: there is no next time for what compression leaves."""
        if self.privacy is None or not self.privacy.sums:
            return Uploads(None, self.noise, self.expected).delivered(sent, when)
        return Uploads(replace(self.privacy, compress="none"), self.noise, clients).delivered(sent, when)

    def delivered(self, sent: Sent, when: tuple[object, ...]) -> Delivered:
        """What the server gets of these uploads in a round."""
        if self.privacy is None:
            return Delivered(sent.ups, sum(float_bytes(up) for up in sent.ups.values()))
        frames = {name: Frame.of(up, sent.downs.get(name, {})) for name, up in sent.ups.items()}
        if not any(frame.size for frame in frames.values()):
            return Delivered({name: frame.tree(torch.zeros(0)) for name, frame in frames.items()}, 0)
        messages, kept = dict[str, Tree](), dict[str, Tree]()
        for name, up in sent.ups.items():
            messages[name], kept[name] = packed(self.privacy, frames[name], up, sent.locals.get(name, {}))
        return self.received(messages, frames, when, kept)

    def received(
        self,
        messages: Mapping[str, Tree],
        frames: Mapping[str, Frame],
        when: tuple[object, ...],
        kept: Mapping[str, Tree] | None = None,
    ) -> Delivered:
        """The server's half: what packed messages say."""
        assert self.privacy is not None
        kept = kept or {}
        updates = {name: unpacked(self.privacy, frames[name], message) for name, message in messages.items()}
        weight = sum(message_bytes(message) for message in messages.values())
        if not self.privacy.sums:
            return Delivered({name: frames[name].tree(update) for name, update in updates.items()}, weight, kept)
        one = common(frames)
        if not self.privacy.secure:
            total = noisy_sum(self.privacy, updates, one.size, self.noise, when)
            return replace(self.of_sum(one, total, list(updates), weight), kept=kept)
        from fedshift.privacy.in_process import summed  # whoever needs no cryptography need not have it

        parties = len(updates)
        words = {
            name: words_of(self.privacy, update, parties, self.noise, (*when, name)) for name, update in updates.items()
        }
        found = summed(words, self.privacy.threshold(parties), repr(when).encode())
        total = code_of(self.privacy, parties).decode(found.total)
        return replace(self.of_sum(one, total, list(updates), found.bytes_up, found.bytes_down), kept=kept)

    def of_sum(
        self, frame: Frame, total: Tensor, parties: Sequence[str], bytes_up: int, bytes_down: int = 0
    ) -> Delivered:
        """The mean in place of everybody's upload; with noise over as many as there are usually, whoever came."""
        mean = frame.tree(total / (self.expected if self.always else len(parties)))
        return Delivered(dict.fromkeys(parties, mean), bytes_up, {}, bytes_down, self.always)

    def nothing(self, frame: Frame, when: tuple[object, ...]) -> Delivered:
        """What reaches the server when nobody took part: noise."""
        assert self.privacy is not None
        return self.of_sum(frame, noisy_sum(self.privacy, {}, frame.size, self.noise, when), [NOBODY], 0)


def common(frames: Mapping[str, Frame]) -> Frame:
    """The frame of all uploads, which must be one."""
    first, *others = frames.values()
    if not all(first.same_as(other) for other in others):
        raise UserError("[privacy] clients send, or were sent, different things, of which no sum can be taken")
    return first
