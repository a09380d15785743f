"""The client's half and the server's half of what uploads go through; the same in simulation and in a deployment."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fedshift.core.tree import Tree
from fedshift.errors import UserError
from fedshift.privacy.clipping import clipped, sound
from fedshift.privacy.fixed_point import FixedPoint, Words
from fedshift.privacy.frame import Frame
from fedshift.privacy.noise import Noise
from fedshift.privacy.settings import Privacy

UPDATE = "update"  # the slot of a message
UNSENT = "unsent"  # the slot of a client's local state: what compression has left for the next round
ROUNDING = 0.01  # of lengths: words are whole numbers, and clipping was done in single precision
FARTHEST = 12.0  # standard deviations that the words of a secure summation have room for


# ---- the client ----------------------------------------------------------------------------------------------------------
def packed(privacy: Privacy, frame: Frame, up: Tree, local: Tree) -> tuple[Tree, Tree]:
    """The message that says what a client would upload, and the slot of what it could not say.

    >>> frame = Frame.of({"model": {"w": torch.zeros(4)}}, {})
    >>> up = {"model": {"w": torch.tensor([1.0, 0.0, 0.0, 9.0])}}
    >>> message, kept = packed(Privacy(compress="top-k", keep=0.25), frame, up, {})
    >>> message["update"]["places"].tolist(), kept["unsent"]["update"].tolist()
    ([3], [1.0, 0.0, 0.0, 0.0])
    """
    vector = frame.vector(up)
    left = local.get(UNSENT, {}).get(UPDATE)
    if left is not None and len(left) == len(vector):  # a method may send something else in another stage
        vector = vector + left.to(vector)
    vector = clipped(vector, privacy.clip)
    if not sound(vector):
        raise UserError("an update that is not finite is not sent")
    message = privacy.compressor.encode(vector)
    if privacy.compress == "none":
        return {UPDATE: message}, {}
    unsent = vector - privacy.compressor.decode(message, frame.size).to(vector)
    return {UPDATE: message}, {UNSENT: {UPDATE: unsent}}


def words_of(privacy: Privacy, vector: Tensor, parties: int, noise: Noise, whose: tuple[object, ...]) -> Words:
    """A clipped update as the words of a secure summation, with this party's part of the noise.

    As many parties as must survive make all of the noise together, so that of whoever survives there is enough.
    """
    assert privacy.clip is not None
    share = privacy.noise * privacy.clip / math.sqrt(privacy.threshold(parties))
    noisy = vector.cpu().double() + (share * noise(len(vector), whose) if share else 0.0)
    return code_of(privacy, parties).encode(noisy)


def code_of(privacy: Privacy, parties: int) -> FixedPoint:
    """The words of a secure summation among so many."""
    assert privacy.clip is not None
    share = privacy.noise / math.sqrt(privacy.threshold(parties))
    return FixedPoint(privacy.clip * (1 + FARTHEST * share), parties)


# ---- the server ----------------------------------------------------------------------------------------------------------
def unpacked(privacy: Privacy, frame: Frame, message: Tree) -> Tensor:
    """The update that a message says. The server cuts again what it can see: a client may not have."""
    update = privacy.compressor.decode(message[UPDATE], frame.size)
    if not sound(update):
        raise UserError("what an update says is not finite")
    return clipped(update, privacy.clip)


def check_sum(privacy: Privacy, total: Tensor, parties: int, asked: int) -> None:
    """Refuse what no sum of so many clipped updates can be; so many ``asked`` for it share the noise.

    Nobody can look at a single upload behind masks. A sum that was garbled is noise as large as words can be, and longer.

    >>> check_sum(Privacy(clip=1.0, secure=True), torch.tensor([0.0, 4.0]), 4, 4)
    >>> check_sum(Privacy(clip=1.0, secure=True), torch.tensor([3.0, 4.0]), 4, 4)
    Traceback (most recent call last):
        ...
    fedshift.errors.UserError: the sum of 4 updates is longer than they can be (5 > 4): it is garbled and not used
    """
    assert privacy.clip is not None
    deviation = privacy.noise * privacy.clip * math.sqrt(parties / privacy.threshold(asked))
    most = parties * privacy.clip + deviation * (math.sqrt(len(total)) + FARTHEST)
    found = float(total.norm())
    if found > most * (1 + ROUNDING):
        raise UserError(
            f"the sum of {parties} updates is longer than they can be ({found:.4g} > {most:.4g}): it is garbled and not used"
        )


def noisy_sum(
    privacy: Privacy, updates: Mapping[str, Tensor], size: int, noise: Noise, whose: tuple[object, ...]
) -> Tensor:
    """The sum of updates with the server's noise on it."""
    assert privacy.clip is not None
    total = torch.zeros(size, dtype=torch.float64)
    for update in updates.values():
        total = total + update.cpu().double()
    return total + privacy.noise * privacy.clip * noise(size, whose)
