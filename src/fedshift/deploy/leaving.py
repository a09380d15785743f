"""What ``fedshift deploy check`` says: whether a party's data fit, and everything that would leave its machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fedshift.core.context import Context
from fedshift.core.tree import Tree
from fedshift.deploy.calibrating import messages_like, veiled_like
from fedshift.deploy.checks import Entry, entries, rehearsed
from fedshift.deploy.counting import told
from fedshift.deploy.federation import Federation
from fedshift.deploy.packet import Packet
from fedshift.deploy.party import Party
from fedshift.engines.base import Compute, Score
from fedshift.engines.sequential import Sequential
from fedshift.privacy.frame import Frame
from fedshift.privacy.settings import Privacy
from fedshift.privacy.upload import packed
from fedshift.results.plain import Sheet
from fedshift.runs.calibrate import looking_of, topics_of
from fedshift.runs.session import Session

SUMS_LEAVE = "for each model that is scored: sums over validation images, which all who get the model get"


@dataclass(frozen=True)
class Leaving:
    """One kind of answer: when it is given, and the tensors in it."""

    when: str
    tensors: Mapping[tuple[str, str], Entry]

    @property
    def bytes(self) -> int:
        """Of all its tensors."""
        return sum(entry.bytes for entry in self.tensors.values())


def leaving(party: Party, federation: Federation) -> list[Leaving]:
    """All kinds of answers that this party would give; numbers and names beside them are in :func:`facts`."""
    clients = len(federation.names)
    compute = Compute()
    session = Session(
        party.setup, federation.roster({}), Sequential(compute), compute, party.seed, party.experiment.rounds
    )
    number = federation.names.index(party.client.name)
    network, method = party.setup.of(number)
    rounds = party.experiment.rounds + method.extra_rounds
    start, found = session.start().server, dict[object, tuple[list[int], Tree]]()
    for round_ in range(rounds):
        ctx = Context(round_, party.experiment.rounds, clients)
        key = (method.phases(ctx), method.private(ctx))
        if key not in found:
            down = party.setup.method.broadcast(start, party.client.name, ctx)
            up = rehearsed(method, party.setup, network, party.task, party.client, party.seed, ctx, down)
            found[key] = ([], _message(party.setup.privacy, up, down, clients))
        found[key][0].append(round_ + 1)
    told_of = [Leaving(_rounds(numbers), entries(up)) for numbers, up in found.values()]
    last = Context(rounds, party.experiment.rounds, clients, "final")
    down = party.setup.method.broadcast(start, party.client.name, last)
    gift = rehearsed(method, party.setup, network, party.task, party.client, party.seed, last, down)
    if entries(gift):
        told_of.append(Leaving("once, after the last round, and when models are validated", entries(gift)))
    if party.shares and not party.hides:
        blank = Score(1, 0, 0.0, log_probabilities=_blank(method.arch.classes), labels=party.task.labels[:1] * 0)
        counts = told(dict.fromkeys(("val", *party.task.streams), blank))[1]
        told_of.append(Leaving("with every evaluation: counts of answers, no image's own", entries(counts)))
    looking = looking_of(session, party.setup.spec.adapters) if party.tallies else {}
    if topics := topics_of(looking):
        classes = method.arch.classes
        sums = veiled_like(topics, classes, clients) if party.hides else messages_like(topics, classes)
        told_of.append(Leaving(SUMS_LEAVE, entries(sums)))
    return told_of


def _message(privacy: Privacy | None, up: Tree, down: Tree, clients: int) -> Tree:
    """What travels of an upload."""
    if privacy is None:
        return up
    frame = Frame.of(up, down)
    if privacy.secure:
        from fedshift.deploy.summing import sent_like  # most federations need no cryptography of ours

        return sent_like(frame.size, clients)
    return packed(privacy, frame, up, {})[0]


def _blank(classes: int) -> torch.Tensor:
    return torch.zeros(1, classes).log_softmax(-1)


def _rounds(numbers: list[int]) -> str:
    return f"in round {numbers[0]}" if len(numbers) == 1 else f"in rounds {numbers[0]} to {numbers[-1]}"


def facts(party: Party) -> dict[str, object]:
    """The plain values that leave beside tensors."""
    hello = party.answer(Packet("hello", {"federation": party.federation}))
    tells = party.shares and not party.hides
    beside = "whether all is finite" if party.hides else "training loss, number of steps, whether all is finite"
    shares = "for each test stream: images, right answers, summed loss" if tells else "nothing about test images"
    return {**hello.facts, "with every round": beside, "scores": shares}


def check_tables(party: Party, federation: Federation) -> list[Sheet | str]:
    """For a person."""
    task, client = party.task, party.client
    title = f"{client.name} in {federation.spec.name}: its data fit the experiment"
    data = Sheet("class", "train", "val", "test", title=title, title_justify="left")
    labels = {part: task.labels[getattr(client, part)] for part in ("train", "val", "test")}
    for code, name in enumerate(task.classes):
        data.add_row(name, *(str(int((labels[part] == code).sum())) for part in labels))
    data.add_section()
    data.add_row("all", *(str(len(labels[part])) for part in labels))
    out: list[Sheet | str] = [data]
    lacking = [name for code, name in enumerate(task.classes) if not bool((labels["train"] == code).any())]
    if lacking:
        out.append(f"No training image of: {', '.join(lacking)}.")
    table = Sheet("when", "tensors", "numbers", "kB", title="What would leave this machine", title_justify="left")
    for kind in leaving(party, federation):
        slots: dict[str, list[Entry]] = {}
        for entry in kind.tensors.values():
            slots.setdefault(entry.slot, []).append(entry)
        for slot, own in slots.items():
            size, count = sum(entry.bytes for entry in own), sum(_count(entry) for entry in own)
            table.add_row(kind.when, f"{slot} ({len(own)})", f"{count:,}", f"{size / 1000:,.1f}")
    out.append(table)
    out += [f"{key}: {value!s}" for key, value in facts(party).items()]
    out.append("Images, their labels and what the method keeps private stay on this machine.")
    return out


def _count(entry: Entry) -> int:
    return entry.bytes // entry.dtype.itemsize
