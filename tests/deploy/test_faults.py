"""Lost, late, broken and forged replies: left out, named in the log, and the round goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fedshift
from fedshift.core.tree import Tree
from fedshift.deploy.memory import Memory
from fedshift.deploy.packet import Packet
from fedshift.deploy.records import from_records, to_records
from fedshift.errors import UserError
from tests.deploy.parties import InProcess
from tests.test_engines_agree import gap

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("uncounted")


def changed(tree: Tree, **leaves: torch.Tensor) -> Tree:
    return {**tree, "model": {**tree["model"], **leaves}}


def first(tree: Tree) -> tuple[str, torch.Tensor]:
    return next(iter(tree["model"].items()))


def nan(packet: Packet) -> Packet:
    name, leaf = first(packet.tree)
    return Packet("train", packet.facts, changed(packet.tree, **{name: leaf * float("nan")}))


def wrong_shape(packet: Packet) -> Packet:
    name, leaf = first(packet.tree)
    return Packet("train", packet.facts, changed(packet.tree, **{name: leaf[:1]}))


def wrong_type(packet: Packet) -> Packet:
    name, leaf = first(packet.tree)
    return Packet("train", packet.facts, changed(packet.tree, **{name: leaf.double()}))


def missing(packet: Packet) -> Packet:
    name, _ = first(packet.tree)
    model = {key: leaf for key, leaf in packet.tree["model"].items() if key != name}
    return Packet("train", packet.facts, {**packet.tree, "model": model})


def extra(packet: Packet) -> Packet:
    return Packet("train", packet.facts, {**packet.tree, "gifts": {"w": torch.ones(1)}})


def huge(packet: Packet) -> Packet:
    name, leaf = first(packet.tree)
    return Packet("train", packet.facts, changed(packet.tree, **{name: leaf + 1e9}))


def forged(packet: Packet) -> Packet:
    return Packet("train", {**packet.facts, "client": "client-0"}, packet.tree)


def old(packet: Packet) -> Packet:
    return Packet("train", {**packet.facts, "round": 7}, packet.tree)


WRONG = {
    nan: "not finite",
    wrong_shape: "not torch.float32",
    wrong_type: "is torch.float64",
    missing: "it lacks",
    extra: "was not asked for",
    huge: "norm",
    forged: "client 'client-0', but 'client-1' was asked",
    old: "round 7",
}


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """The server after a round in which client-1 said nothing."""
    silent = InProcess.of(tmp_path_factory.mktemp("silent"), "fedbn", rounds=1, norm=True)
    silent.tamper = lambda name, message, content: (
        None if name == "client-1" and message.metadata.message_type == "train.train" else content
    )
    return silent.run()[0].last(CPU).server


@pytest.mark.parametrize("wrong", WRONG, ids=lambda function: function.__name__)
def test_a_reply_that_cannot_be_right_is_left_out_and_named(wrong: Any, without: Tree, tmp_path: Path) -> None:
    """The round is that of the two others; the liar counts as one who did not take part."""
    federation = InProcess.of(tmp_path, "fedbn", rounds=1, norm=True)

    def tamper(name: str, message: Any, content: Any) -> Any:
        if name == "client-1" and message.metadata.message_type == "train.train":
            return to_records(wrong(from_records(content)))
        return content

    federation.tamper = tamper
    folder, log = federation.run()
    (said,) = [line for line in log if "'client-1' is left out" in line]
    assert WRONG[wrong] in said
    assert folder.history().rounds[0].participants == 2
    assert "client-1" not in folder.last(CPU).locals
    assert gap(folder.last(CPU).server, without) == 0


def test_no_packet_can_bring_a_pickle() -> None:
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    header = Packet("train", {}, {"model": {"w": torch.ones(1)}}).header()
    bad = Array(dtype="object", shape=(1,), stype="numpy.ndarray", data=b"\x80\x04N.")
    records = RecordDict({"packet": ConfigRecord({"header": header}), "tree/model": ArrayRecord({"w": bad})})
    with pytest.raises(UserError, match="no packet"):
        from_records(records)


def test_a_lost_reply_is_not_continued_from(tmp_path: Path) -> None:
    """The party has gone on, the server has not: it takes up again where the server is."""
    federation = InProcess.of(tmp_path / "a", "scaffold", rounds=3)
    asked: list[tuple[int, int | None]] = []

    def tamper(name: str, message: Any, content: Any) -> Any:
        if name != "client-2" or message.metadata.message_type != "train.train":
            return content
        facts = from_records(message.content).facts
        asked.append((facts["round"], facts["base"]))
        return None if facts["round"] == 1 else content

    federation.tamper = tamper
    folder, log = federation.run()
    assert asked == [(0, None), (1, 1), (2, 1)]  # the round after the lost one continues from the one before it
    assert any("'client-2' is left out" in line and "did not answer" in line for line in log)
    assert [line.participants for line in folder.history().rounds] == [3, 2, 3]


def test_a_round_with_too_few_replies_is_asked_for_again_and_then_given_up(tmp_path: Path) -> None:
    """What was reached is there, and a resumed run goes on from it to the same end."""
    whole, _ = InProcess.of(tmp_path / "a", "scaffold", rounds=3).run()
    federation = InProcess.of(tmp_path / "b", "scaffold", rounds=3, least=3, attempts=2)
    federation.tamper = lambda name, message, content: (
        None if name == "client-1" and from_records(message.content).facts.get("round") == 2 else content
    )
    with pytest.raises(UserError, match=r"2 of at least 3 parties gave a sound reply; go on with .* --resume"):
        federation.run()
    federation.tamper = None
    with pytest.raises(UserError, match="was interrupted after round 2 of 3"):
        federation.run()
    folder, log = federation.run(resume=True)
    assert any("goes on after round 2 of 3" in line for line in log)
    assert gap(folder.last(CPU).server, whole.last(CPU).server) == 0


def test_a_server_one_round_behind_its_parties_goes_on(tmp_path: Path) -> None:
    """Killed after the parties' work and before its own checkpoint: their states of both rounds are there."""
    whole, _ = InProcess.of(tmp_path / "a", "fedthe", rounds=3).run()
    federation = InProcess.of(tmp_path / "b", "fedthe", rounds=3)
    done: list[str] = []

    def killed(name: str, message: Any, content: Any) -> Any:
        if from_records(message.content).facts.get("round") == 2:
            done.append(name)
            if len(done) == 3:
                raise KeyboardInterrupt
        return content

    federation.tamper = killed
    with pytest.raises(KeyboardInterrupt):
        federation.run()
    memory = Memory(tmp_path / "b" / "client-0" / federation.federation.id)
    assert memory.rounds()[-2:] == [2, 3]  # ahead of the server, which has two rounds
    federation.tamper = None
    folder, _ = federation.run(resume=True)
    assert gap(folder.last(CPU).server, whole.last(CPU).server) == 0
    for name, tree in InProcess.of(tmp_path / "a", "fedthe", rounds=3).locals(whole.last(CPU)).items():
        assert gap(tree, federation.locals(folder.last(CPU))[name]) == 0


@pytest.mark.parametrize("also_memory", [False, True])
def test_a_party_that_lost_its_disk(also_memory: bool, tmp_path: Path) -> None:
    """Its node still has the state in memory; if that is gone too it begins anew and says so."""
    federation = InProcess.of(tmp_path, "scaffold", rounds=3)
    grid = federation.grid()

    def lose(name: str, message: Any, content: Any) -> Any:
        if name == "client-0" and from_records(message.content).facts.get("round") == 1:
            for path in (tmp_path / "client-0").rglob("round-*"):
                path.unlink()
            if also_memory:
                grid.nodes[100].state.clear()
        return content

    grid.tamper = lose
    _, log = federation.run(grid=grid)
    said = [line for line in log if "'client-0' says: its local state of round 2 is not there any more" in line]
    assert bool(said) == also_memory


def test_a_party_that_comes_later_takes_part_from_then_on(tmp_path: Path) -> None:
    federation = InProcess.of(tmp_path, "fedavg", rounds=3)
    grid = federation.grid(absent=["client-2"])

    def arrive(name: str, message: Any, content: Any) -> Any:
        if from_records(message.content).facts.get("round") == 1:
            for node in grid.nodes.values():
                node.online = True
        return content

    grid.tamper = arrive
    folder, log = federation.run(grid=grid)
    assert [line.participants for line in folder.history().rounds] == [2, 2, 3]
    assert any("starting without client-2" in line for line in log)


def test_nobody_can_take_the_place_of_somebody_who_is_there(tmp_path: Path) -> None:
    federation = InProcess.of(tmp_path, "fedavg", rounds=1)
    grid = federation.grid()
    from tests.deploy.loopback import Node

    grid.nodes[7] = Node("impostor", next(node.app for node in grid.nodes.values() if node.name == "client-1"))
    folder, log = federation.run(grid=grid)
    assert any("cannot take part: it says it is 'client-1', who is there already" in line for line in log)
    assert folder.history().rounds[0].participants == 3


def test_a_party_of_another_federation_is_refused(tmp_path: Path) -> None:
    """Two federations on one machine do not see each other's states."""
    one = InProcess.of(tmp_path / "one", "scaffold", rounds=1)
    other = InProcess.of(tmp_path / "other", "scaffold", rounds=2)
    assert one.federation.id != other.federation.id
    packet = Packet("hello", {"federation": one.federation.id})
    with pytest.raises(UserError, match="belongs to federation"):
        other.party(other.task.clients[0]).answer(packet)
    one.run()
    other.run()
    for federation in (one, other):
        kept = {path.parent.name for path in federation.folder.rglob("round-*.safetensors")}
        assert kept == {federation.federation.id}


def test_counts_leave_only_if_a_party_agrees(tmp_path: Path) -> None:
    federation = InProcess.of(tmp_path, "fedavg", rounds=1)
    federation.shares = False
    folder, _ = federation.run()
    rows = folder.scores()["none"]
    assert all(not row.by_client for row in rows)
    assert (tmp_path / "client-0" / federation.federation.id / "artefacts" / "config.toml").is_file()


def test_evaluation_across_parties_is_that_of_the_simulation(tmp_path: Path) -> None:
    """The metrics that counts allow, under the same names, and the round that validation chooses."""
    federation = InProcess.of(tmp_path, "ditto", rounds=2, every=1, options={"adapters": ["none", "tent"]}, norm=True)
    folder, _ = federation.run()
    experiment = federation.federation.experiment
    whole = fedshift.run(experiment, tmp_path / "simulated", engine="sequential", data=federation.task)
    (path,) = whole.folders
    simulated = fedshift.open_run(path).folder
    ours, theirs = (
        {metric: summary for line in run.history().evaluations for metric, summary in line.scores.items()}
        for run in (folder, simulated)
    )
    assert set(ours) == set(theirs)
    for metric, summary in theirs.items():
        assert ours[metric].client_mean == pytest.approx(summary.client_mean)
        assert ours[metric].loss == pytest.approx(summary.loss, abs=1e-6)
    assert folder.best(CPU).round == simulated.best(CPU).round
    for label in ("none", "tent"):
        for mine, other in zip(folder.scores()[label], simulated.scores()[label], strict=True):
            assert (mine.metric, mine.selection, mine.round) == (other.metric, other.selection, other.round)
            assert mine.summary.client_mean == pytest.approx(other.summary.client_mean)
            for name in ("balanced-accuracy", "macro-f1", "loss"):
                assert mine.measures[name].pooled == pytest.approx(other.measures[name].pooled, abs=1e-4)


@pytest.mark.parametrize("write", ["keep", "keep_settled", "put_aside"])
def test_what_a_party_keeps_is_for_its_user_alone(write: str, tmp_path: Path) -> None:
    memory, tree = Memory(tmp_path / "clinics"), {"model": {"w": torch.ones(1)}}
    memory.put_aside({"secrets": tree}) if write == "put_aside" else getattr(memory, write)(1, tree)
    assert memory.folder.stat().st_mode & 0o777 == 0o700
