"""What adapters want to know of everybody's validation images, asked over packets: the same as on one machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message, RecordDict

import fedshift
from fedshift.blocks.calibration import SLOT
from fedshift.core.tree import Tensors, Tree
from fedshift.deploy.leaving import SUMS_LEAVE, leaving
from fedshift.deploy.memory import Memory
from fedshift.deploy.packet import Packet
from fedshift.deploy.records import from_records, to_records
from fedshift.engines.base import Compute
from fedshift.engines.sequential import Sequential
from fedshift.errors import UserError
from fedshift.runs.calibrate import calibrated
from fedshift.runs.deployment import Snapshot
from fedshift.runs.session import Session
from fedshift.store.folder import RunFolder
from tests.deploy.parties import TRAIN, InProcess, whole_task

pytestmark = pytest.mark.usefixtures("uncounted")
UNIFORM = {**TRAIN, "weights": "uniform"}
SECURE = {"clip": 50.0, "secure": True}

ASKING = [
    ("fedavg", ["prior-em"]),
    ("fedavg", [{"name": "prior-em", "views": 2}, {"name": "prior-em", "label": "as they are"}]),
    ("fedbn", ["prior-em"]),
    ("fedthe", ["home-or-away", "prior-em"]),
    ("ours", [{"name": "ours", "batch-size": 2}]),
]


def federation(folder: Path, method: str, adapters: list[Any], **more: Any) -> InProcess:
    return InProcess.of(folder, method, norm=True, options={"adapters": ["none", *adapters]}, **more)


def found_by(folder: RunFolder) -> Tensors:
    return Snapshot.load(folder.path).server.get(SLOT, {})


def gap(one: Tensors, other: Tensors) -> float:
    assert set(one) == set(other)
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize(("method", "adapters"), ASKING)
def test_parties_find_out_what_a_simulation_finds_out(method: str, adapters: list[Any], tmp_path: Path) -> None:
    """And serve with it, as does whoever comes later; its bytes are counted."""
    fed = federation(tmp_path, method, adapters)
    folder, log = fed.run()
    assert not [line for line in log if "left out" in line or "probabilities" in line]
    session, state = fed.simulated()
    specs = session.setup.spec.adapters
    simulated = calibrated(session, session.deploy(state), specs)
    found = found_by(folder)
    assert {name.partition(":")[0] for name in found} >= {"common"}
    assert gap(found, simulated.server[SLOT]) <= 1e-6
    for client, tree in simulated.trained().items():
        served = fedshift.load(fed.party(fed.task.client(client)).artefacts / "artefacts")
        assert gap(served.deployed[SLOT], tree[SLOT]) <= 1e-6
    nobody = torch.zeros(0, dtype=torch.int64)
    newcomer = replace(
        fed.task, clients=(), unseen=(replace(fed.task.clients[0], name="new", train=nobody, val=nobody),)
    )
    compute = Compute()
    trees, _ = Snapshot.load(folder.path).deployment(session.setup).admit(newcomer, Sequential(compute), compute)
    assert set(trees["new"][SLOT]) == {name for name in found if name.startswith("common")}
    last = {row.label: row for rows in folder.scores().values() for row in rows if row.selection == "last"}
    assert {row.given_bytes for row in last.values()} == {simulated.given_bytes}


def test_scores_are_those_of_a_simulation(tmp_path: Path) -> None:
    fed = federation(tmp_path, "fedavg", ["prior-em"])
    folder, _ = fed.run()
    session, state = fed.simulated()
    deployment = calibrated(session, session.deploy(state), session.setup.spec.adapters)
    (spec,) = (spec for spec in session.setup.spec.adapters if spec.name == "prior-em")
    scores = session.evaluate(session.setup.adapters(spec), deployment.trained(), ["original"])
    (row,) = (row for row in folder.scores()["prior-em"] if row.selection == "last" and row.metric.stream == "original")
    assert {name: own.correct for name, own in row.by_client.items()} == {
        name: score.correct for (name, _), score in scores.items()
    }


@pytest.mark.parametrize("evaluate", [{}, {"every": 1}, {"every": 1, "adapted": True}], ids=["last", "best", "adapted"])
def test_what_leaves_is_what_a_party_was_told_would_leave(evaluate: dict[str, Any], tmp_path: Path) -> None:
    fed = federation(tmp_path, "fedthe", ["home-or-away"], evaluate=evaluate, rounds=3)
    sent: dict[str, int] = {}
    looked: set[int] = set()

    def weigh(name: str, message: Message, content: RecordDict) -> RecordDict:
        packet = from_records(content)
        if packet.kind == "calibrate":
            looked.add(packet.facts["round"])
            size = sum(leaf.nbytes for leaves in packet.tree.values() for leaf in leaves.values())
            sent[name] = sent.get(name, 0) + size
            shapes = {tuple(leaf.shape) for leaves in packet.tree.values() for leaf in leaves.values()}
            assert shapes <= {(5, 6), (4, 4), (3,)}  # sums for four classes, and nothing of a single image
        return content

    fed.tamper = weigh
    fed.run()
    party = fed.party(fed.task.clients[0])
    (told,) = (kind for kind in leaving(party, fed.federation) if kind.when == SUMS_LEAVE)
    assert sent == {client.name: len(looked) * told.bytes for client in fed.task.clients}
    assert evaluate or len(looked) == 1


def test_adapters_that_do_not_ask_are_scored_once(tmp_path: Path) -> None:
    """Whether something was measured makes no difference to them, and a message takes long."""
    fed = federation(tmp_path, "fedavg", ["prior-em"], evaluate={"every": 1})
    asked: list[tuple[str, int, str]] = []

    def listen(name: str, message: Message, content: RecordDict) -> RecordDict:
        packet = from_records(message.content)
        if packet.kind == "evaluate" and packet.facts["adapter"]["name"] == "none":
            asked.extend((name, packet.facts["round"], part) for part in packet.facts["parts"])
        return content

    fed.tamper = listen
    fed.run()
    assert len(asked) == len(set(asked)) > 0


def test_who_does_not_tell_counts_tells_no_sums(tmp_path: Path) -> None:
    fed = federation(tmp_path, "fedavg", ["prior-em"])
    fed.shares = False
    grid = fed.grid()
    folder, log = fed.run(grid=grid)
    assert not found_by(folder)
    assert len([line for line in log if "nothing is known of validation images" in line]) == 1
    assert not list(tmp_path.rglob("answers-*"))
    assert [kind for kind in leaving(fed.party(fed.task.clients[0]), fed.federation) if "sums" in kind.when] == []


def test_of_one_or_two_parties_nothing_is_told_to_everybody(tmp_path: Path) -> None:
    """Two of three are away when they are asked: the sum would be the third's own numbers."""
    fed = federation(tmp_path, "fedavg", ["prior-em"])

    def away(name: str, _: Message, content: RecordDict) -> RecordDict | None:
        return None if name != "client-2" and from_records(content).kind == "calibrate" else content

    fed.tamper = away
    folder, log = fed.run()
    assert not found_by(folder)
    assert [line for line in log if "nothing is known of validation images" in line]


@pytest.mark.parametrize(
    ("stage", "spoilt"),
    [
        (1, lambda leaf: torch.full_like(leaf, 1e300)),
        (1, lambda leaf: -leaf),
        (9, lambda leaf: leaf - 50),
        (9, lambda leaf: leaf + 0.5),
        (10, lambda leaf: leaf + 2),
    ],
    ids=["huge", "concave", "negative", "halves", "two clients"],
)
def test_who_says_what_nobody_can_have_counted_is_left_out_alone(stage: int, spoilt: Any, tmp_path: Path) -> None:
    fed = federation(tmp_path, "fedavg", ["prior-em"], rounds=1, task=whole_task((17, 7, 12, 8)))
    asked: list[str] = []

    def spoil(name: str, _: Message, content: RecordDict) -> RecordDict:
        packet = from_records(content)
        if packet.kind != "calibrate" or name != "client-0" or not packet.tree:
            return content
        asked.append(name)
        if len(asked) != stage:
            return content
        tree = {topic: {"sums": spoilt(leaves["sums"])} for topic, leaves in packet.tree.items()}
        return to_records(replace(packet, tree=tree))

    fed.tamper = spoil
    folder, log = fed.run()
    assert bool(found_by(folder)["common: fit"].isfinite().all())
    (line,) = (line for line in log if "is left out of the calibration" in line)
    assert "'client-0' is left out of the calibration: its numbers cannot be sums over images" in line


@pytest.mark.parametrize(
    ("facts", "tree"),
    [({}, {}), ({"ask": "step"}, {"common": {"fit": torch.ones(5)}}), ({"ask": "everything"}, {})],
    ids=["nothing", "half", "unknown"],
)
def test_an_odd_question_gets_a_sentence(facts: dict[str, Any], tree: Tree, tmp_path: Path) -> None:
    fed = federation(tmp_path, "fedavg", ["prior-em"], rounds=1)
    fed.run()
    party = fed.party(fed.task.clients[0])
    about = {"federation": party.federation, "client": party.client.name, "round": 1}
    with pytest.raises(UserError):
        party.answer(Packet("calibrate", {**about, **facts}, tree))


def test_what_was_answered_before_is_forgotten_when_it_is_asked_again(tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    memory.keep_answers(3, {"common": {"x": torch.ones(1)}, "own": {"x": torch.ones(1)}}, ["common", "own"])
    memory.keep_answers(3, {}, ["common"])
    assert set(memory.answers(3) or {}) == {"own"}


def wrong(name: str, message: Message, content: RecordDict) -> RecordDict | None:
    """One says odd things, another one nothing."""
    packet = from_records(content)
    if packet.kind != "calibrate" or not packet.tree:
        return content
    if name == "client-0":
        return None
    if name == "client-1":
        tree = {topic: {own: leaf[:1] for own, leaf in leaves.items()} for topic, leaves in packet.tree.items()}
        return to_records(replace(packet, tree=tree))
    return content


def test_who_says_odd_things_or_nothing_is_left_out(tmp_path: Path) -> None:
    fed = federation(tmp_path, "fedavg", ["prior-em"], task=whole_task((17, 7, 12, 8, 9)))
    fed.tamper = wrong
    folder, log = fed.run()
    assert [line for line in log if "'client-1' is left out of the calibration: its common/sums is" in line]
    assert [line for line in log if "'client-0' is left out (calibrate" in line]
    others = torch.cat([client.val for client in fed.task.clients[2:]])
    assert found_by(folder)["common: labels"].tolist() == fed.task.labels[others].bincount(minlength=4).tolist()


def test_artefacts_that_are_written_later_have_what_was_measured_before(tmp_path: Path) -> None:
    """Who was away when artefacts were written has the same as all others."""
    fed = federation(tmp_path, "fedavg", ["prior-em"])

    def deaf(name: str, message: Message, content: RecordDict) -> RecordDict | None:
        return None if name == "client-2" and from_records(content).kind == "serve" else content

    fed.tamper = deaf
    folder, log = fed.run()
    assert [line for line in log if "no artefact was written at client-2" in line]
    fed.tamper = None
    away = fed.grid(absent=["client-0", "client-1"])
    fed.run(resume=True, grid=away)
    for client in fed.task.clients:
        served = fedshift.load(fed.party(client).artefacts / "artefacts")
        assert gap(served.deployed[SLOT], found_by(folder)) == 0


# ---- behind masks --------------------------------------------------------------------------------------------------------
def secure_federation(folder: Path, parties: tuple[int, ...] = (17, 7, 12), **more: Any) -> InProcess:
    return federation(
        folder, "fedavg", ["prior-em"], train=UNIFORM, privacy=SECURE, rounds=1, task=whole_task(parties), **more
    )


def test_behind_masks_the_same_is_found(tmp_path: Path) -> None:
    """As in a simulation with masks, and as in one without; all that leaves is what a party was shown before."""
    fed = secure_federation(tmp_path)
    heard: list[Packet] = []
    fed.tamper = lambda *reply: heard.append(from_records(reply[-1])) or reply[-1]
    folder, _ = fed.run()
    session, state = fed.simulated()
    specs = session.setup.spec.adapters
    simulated = calibrated(session, session.deploy(state), specs)
    found = found_by(folder)
    assert gap(found, simulated.server[SLOT]) <= 1e-6
    open_ = calibrated(replace_privacy(session), session.deploy(state), specs)
    assert gap(found, open_.server[SLOT]) <= 1e-5
    assert int(found["common: labels"].sum().round()) == sum(len(client.val) for client in fed.task.clients)
    said = [packet.tree for packet in heard if packet.kind in ("calibrate", "share", "mask", "unmask")]
    assert not any(leaf.is_floating_point() for tree in said for leaves in tree.values() for leaf in leaves.values())
    every = leaving(fed.party(fed.task.clients[0]), fed.federation)
    assert sum(kind.bytes for kind in every) * 3 == sum(
        leaf.nbytes
        for packet in heard
        if packet.kind in ("train", "calibrate", "share", "mask", "unmask")
        for leaves in packet.tree.values()
        for leaf in leaves.values()
    )
    last = [row for rows in folder.scores().values() for row in rows if row.selection == "last"]
    assert {row.given_bytes for row in last if row.label == "prior-em"} == {simulated.given_bytes}


def replace_privacy(session: Session) -> Session:
    setup = replace(session.setup, privacy=None)
    return Session(setup, session.task, session.engine, session.compute, session.seed, session.rounds)


@pytest.mark.parametrize("kind", ["evaluate.calibrate", "train.share", "train.mask"])
def test_who_is_lost_between_two_sums_ends_them(kind: str, tmp_path: Path) -> None:
    """Two sums of nearly the same, with somebody and without him, would tell what he said."""
    fed = secure_federation(tmp_path, (9, 7, 8, 6, 5))
    seen: list[str] = []
    opened: list[str] = []

    def lose(name: str, message: Message, content: RecordDict) -> RecordDict | None:
        own = message.metadata.message_type
        if own == "train.unmask":
            opened.append(name)
        if name != "client-1" or own != kind:
            return content
        seen.append(name)
        return None if len(seen) > 2 else content  # a look and a sum, or a round and a sum

    fed.tamper = lose
    folder, log = fed.run()
    assert not found_by(folder)
    assert len(opened) == 2 * 5  # of the round and of the first sum; the second one stayed closed
    assert [line for line in log if "sums over validation images: " in line]
    assert [line for line in log if "nothing is known of validation images" in line]


def test_a_sum_that_was_garbled_is_not_used(tmp_path: Path) -> None:
    fed = secure_federation(tmp_path)
    seen: list[str] = []

    def garble(name: str, message: Message, content: RecordDict) -> RecordDict:
        packet = from_records(content)
        if packet.kind != "mask" or name != "client-1":
            return content
        seen.append(name)
        if len(seen) == 1:  # of the round
            return content
        words = packet.tree["words"]["words"].roll(1)
        return to_records(replace(packet, tree={"words": {"words": words}}))

    fed.tamper = garble
    folder, log = fed.run()
    assert not found_by(folder)
    assert [line for line in log if "it is garbled and not used" in line]


class Killed(BaseException):
    """As a signal would end the server."""


@pytest.mark.parametrize("absent", [[], ["client-1"]], ids=["all", "one away"])
def test_a_server_that_was_killed_between_two_sums_asks_the_same_parties_or_nobody(
    absent: list[str], tmp_path: Path
) -> None:
    fed = secure_federation(tmp_path, (9, 7, 8, 6, 5), least=3)
    opened: list[str] = []

    def kill(name: str, message: Message, content: RecordDict) -> RecordDict:
        if message.metadata.message_type == "train.unmask":
            opened.append(name)
        if len(opened) > 3 * 5:  # of the round, of the first sum and of the second one
            raise Killed
        return content

    fed.tamper = kill
    with pytest.raises(Killed):
        fed.run()
    fed.tamper = None
    folder, log = fed.run(resume=True, grid=fed.grid(absent=absent))
    assert bool(found_by(folder)) == (not absent)
    assert bool([line for line in log if "with or without 'client-1', would tell what one said" in line]) == bool(
        absent
    )
