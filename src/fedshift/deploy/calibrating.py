"""Calibration over packets (``runs/calibrate.py``): parties predict their validation images once, then tell sums of that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fedshift.core.tree import Tensors, Tree
from fedshift.deploy.checks import check_shape
from fedshift.deploy.packet import Packet
from fedshift.errors import UserError
from fedshift.privacy.coding import Tallies
from fedshift.privacy.settings import FEWEST
from fedshift.runs.calibrate import ORDER, STAGES, Answers, Heard, check_said, parted, sum_of, told, unknown, vector_of

if TYPE_CHECKING:
    from fedshift.deploy.engine import Remote

LOOK = "look"  # asked first, with the models; what is asked then are the stages
SUMS = "sums"


def message(stage: str, answers: Mapping[str, Answers], known: Tree) -> Tree:
    """What a party says in a stage, of the topics it has something to say about.

    >>> said = message("step", {"common": Answers.none(2)}, {"common": unknown(2), "own": unknown(2)})
    >>> {topic: list(leaves[SUMS].shape) for topic, leaves in said.items()}
    {'common': [3, 4]}
    """
    return {topic: {SUMS: told(stage, answers[topic], own)} for topic, own in known.items() if topic in answers}


def check_asked(stage: str, known: Tree, classes: int) -> None:
    """A server must say what it asks for, and what is known so far."""
    if stage not in STAGES:
        raise UserError(f"nobody knows what {stage!r} asks for")
    check_shape(known, {topic: unknown(classes) for topic in known})


def messages_like(topics: Sequence[str], classes: int) -> Tree:
    """All that a party says."""
    said = {stage: told(stage, Answers.none(classes), unknown(classes)) for stage in STAGES}
    return {
        "calibration": {f"{topic}: {n} {stage}": said[stage] for topic in topics for n, stage in enumerate(ORDER, 1)}
    }


def veiled_like(topics: Sequence[str], classes: int, parties: int) -> Tree:
    """All that a party sends if nobody but a secure summation may look into what it says."""
    from fedshift.deploy.summing import sent_like  # most federations need no cryptography of ours

    known = {topic: unknown(classes) for topic in topics}
    lengths = [Tallies().length(len(vector_of(stage, {}, known))) for stage in ORDER]
    sent = [sent_like(length, parties) for length in lengths]
    return {
        slot: {f"{number} {name}": leaf for number, own in enumerate(sent, 1) for name, leaf in own[slot].items()}
        for slot in sent[0]
    }


@dataclass(frozen=True)
class Afield:
    """Parties that have predicted their validation images, asked for their messages."""

    asked: Callable[[Mapping[str, Packet]], Mapping[str, Packet]]
    facts: Mapping[str, Mapping[str, Any]]  # to whom a packet goes, by party
    classes: int
    note: Callable[[str], object] = field(default=print, repr=False)

    def __call__(self, _: int, stage: str, known: Mapping[str, Tensors]) -> Heard:
        """The sums of what those say that answer; who says something odd is left out.

        Of one or two nothing is taken: whoever gets the model gets the sums, and would know what one of them said.
        """
        tree = dict(known)
        packets = {name: Packet("calibrate", {**own, "ask": stage}, tree) for name, own in self.facts.items()}
        answers = self.asked(packets) if known else {}
        like = message(stage, dict.fromkeys(known, Answers.none(self.classes)), tree)
        heard = {name: answers[name].tree for name in packets if name in answers}
        sound = [tree for name, tree in heard.items() if self._sound(name, stage, tree, like)]
        said = {topic: [own[topic][SUMS] for own in sound if topic in own] for topic in known}
        size = sum(leaf.nbytes for own in said.values() for leaf in own)
        return Heard({topic: sum_of(own) for topic, own in said.items() if len(own) >= FEWEST}, size)

    def _sound(self, name: str, stage: str, tree: Tree, like: Tree) -> bool:
        try:
            check_shape(tree, {topic: leaves for topic, leaves in like.items() if topic in tree})
            for leaves in tree.values():
                check_said(stage, leaves[SUMS])
        except UserError as error:
            self.note(f"{name!r} is left out of the calibration: {error}")
            return False
        return True


@dataclass(frozen=True)
class Veiled:
    """The same behind a secure summation: the server learns sums over all of them, or nothing."""

    remote: Remote
    facts: Mapping[str, Mapping[str, Any]]  # to whom a packet goes, by party
    where: int  # after how many rounds

    def __call__(self, number: int, stage: str, known: Mapping[str, Tensors]) -> Heard:
        """A summation for every stage; raises if a party is lost that was there in the beginning."""
        from fedshift.deploy.summing import keys_like  # most federations need no cryptography of ours

        what = f"calibrate {number}"
        packets = {
            name: Packet("calibrate", {**own, "ask": stage, "summation": what}, dict(known))
            for name, own in self.facts.items()
        }
        answers = self.remote.asked(packets)
        if lost := [repr(name) for name in packets if name not in answers]:
            raise UserError(f"{', '.join(lost)} did not answer")
        keys = {name: answers[name].tree for name in packets}
        for tree in keys.values():
            check_shape(tree, keys_like())
        whole, weight = self.remote.tallied(keys, self.where, what, len(vector_of(stage, {}, known)))
        found = parted(stage, whole, known)
        for own in found.values():
            check_said(stage, own, len(keys))
        return Heard(found, weight)
