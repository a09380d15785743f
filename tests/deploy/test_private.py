"""[privacy] across machines: parties do their half, the server sees what it may, and numbers are those of a simulation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from fedshift.deploy.checks import entries
from fedshift.deploy.leaving import facts, leaving
from fedshift.deploy.memory import Memory
from fedshift.deploy.packet import Packet
from fedshift.deploy.records import from_records, to_records
from fedshift.deploy.server import offer
from fedshift.deploy.summing import Summand
from fedshift.errors import UserError
from fedshift.privacy.accountant import Accountant
from fedshift.privacy.coding import Updates
from fedshift.privacy.settings import Privacy
from fedshift.store.folder import RunFolder
from tests.deploy.parties import TRAIN, InProcess, whole_task
from tests.test_engines_agree import gap

CPU = torch.device("cpu")
UNIFORM = {**TRAIN, "weights": "uniform"}


def federation(folder: Path, privacy: dict[str, Any], method: str = "fedavg", **more: Any) -> InProcess:
    return InProcess.of(folder, method, train=UNIFORM, privacy=privacy, **more)


def last_of(folder: RunFolder) -> Any:
    return folder.last(CPU)


@pytest.mark.parametrize(
    "privacy",
    [{"clip": 0.3, "compress": "top-k", "keep": 0.2}, {"compress": "int8"}, {"clip": 50.0, "secure": True}],
    ids=["top-k", "int8", "secure"],
)
@pytest.mark.usefixtures("uncounted")
def test_it_ends_where_a_simulation_ends(tmp_path: Path, privacy: dict[str, Any]) -> None:
    own = federation(tmp_path / "f", privacy)
    folder, _ = own.run()
    session, simulated = own.simulated()
    assert gap(simulated.server, last_of(folder).server) <= 1e-6
    _, report = session.step(session.start())
    line = folder.history().rounds[0]
    assert (line.bytes_up, line.bytes_down) == (report.bytes_up, report.bytes_down)
    if "compress" in privacy:  # what could not be said waits at the parties
        found = own.locals(last_of(folder))
        assert all(gap(tree, found[name]) <= 1e-6 for name, tree in simulated.locals.items())
    else:
        assert not list((tmp_path / "f").rglob("summing*"))  # secrets are forgotten


@pytest.mark.usefixtures("uncounted")
def test_the_server_sees_no_upload_no_loss_no_size_and_no_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fedshift.deploy.flower as flower

    heard: list[Packet] = []
    read = flower.from_records
    monkeypatch.setattr(flower, "from_records", lambda records: heard.append(read(records)) or heard[-1])
    own = federation(tmp_path / "f", {"clip": 50.0, "secure": True}, rounds=1)
    folder, _ = own.run()
    assert {packet.facts["samples"] for packet in heard if packet.kind == "hello"} == {1}
    assert {packet.facts["loss"] for packet in heard if packet.kind == "train"} == {None}
    assert all(not packet.facts["scores"] for packet in heard if packet.kind == "evaluate")
    assert not any(
        leaf.is_floating_point() for packet in heard for own in packet.tree.values() for leaf in own.values()
    )
    masked = [packet.tree["words"]["words"] for packet in heard if packet.kind == "mask"]
    assert len(masked) == 3
    for words in masked:
        counts = torch.bincount(words.contiguous().view(torch.uint8).int(), minlength=256)
        assert chisquare(counts.numpy()).pvalue > 1e-6
    (line,) = folder.history().rounds
    sent = sum(leaf.nbytes for p in heard if p.kind in ("train", "share", "mask", "unmask")
               for tree in p.tree.values() for leaf in tree.values())  # fmt: skip
    assert line.bytes_up == sent
    first, *_ = leaving(own.party(own.task.clients[0]), own.federation)  # what a party was shown before
    assert first.bytes * 3 == sent
    mine = [p.tree for p in heard if p.facts.get("client") == "client-0" and p.kind not in ("hello", "evaluate")]
    assert first.tensors == {key: entry for tree in mine for key, entry in entries(tree).items()}


@pytest.mark.parametrize("compress", ["none", "top-k", "int8"])
@pytest.mark.usefixtures("uncounted")
def test_the_ledger_has_the_bytes_of_the_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compress: str
) -> None:
    import fedshift.deploy.flower as flower

    heard: list[Packet] = []
    read = flower.from_records
    monkeypatch.setattr(flower, "from_records", lambda records: heard.append(read(records)) or heard[-1])
    own = federation(tmp_path / "f", {"clip": 50.0, "compress": compress}, rounds=1)
    folder, _ = own.run()
    sent = [
        leaf for packet in heard if packet.kind == "train" for tree in packet.tree.values() for leaf in tree.values()
    ]
    assert folder.history().rounds[0].bytes_up == sum(leaf.numpy().nbytes for leaf in sent) > 0


@pytest.mark.parametrize(
    "phase",
    ["train.mask", *(pytest.param(f"train.{name}", marks=pytest.mark.grid) for name in ("train", "share", "unmask"))],
)
@pytest.mark.usefixtures("uncounted")
def test_a_party_lost_in_any_phase_is_survived(tmp_path: Path, phase: str) -> None:
    own = federation(
        tmp_path / "f", {"clip": 50.0, "secure": True}, rounds=1, task=whole_task((9, 7, 8, 6, 5)), least=3
    )
    own.tamper = lambda name, message, reply: (
        None if name == "client-1" and message.metadata.message_type == phase else reply
    )
    folder, notes = own.run()
    (line,) = folder.history().rounds
    survivors = tuple(c for c in own.task.clients if phase == "train.unmask" or c.name != "client-1")
    assert line.participants == len(survivors)
    _, simulated = replace(own, task=replace(own.task, clients=survivors)).simulated()
    assert gap(simulated.server, last_of(folder).server) <= 1e-6  # the mean is theirs
    kind = phase.removeprefix("train.")
    assert any(f"'client-1' is left out ({kind}, round 1)" in note for note in notes)


@pytest.mark.usefixtures("uncounted")
def test_a_message_that_names_impossible_places_is_left_out(tmp_path: Path) -> None:
    own = federation(tmp_path / "f", {"compress": "top-k"}, rounds=1)

    def forged(name: str, message: Any, reply: Any) -> Any:
        if name == "client-1" and message.metadata.message_type == "train.train":
            packet = from_records(reply)
            wrong = {"update": {**packet.tree["update"], "places": packet.tree["update"]["places"] + 10_000}}
            return to_records(replace(packet, tree=wrong))
        return reply

    own.tamper = forged
    folder, notes = own.run()
    assert folder.history().rounds[0].participants == 2
    assert any("'client-1' is left out" in note and "places" in note for note in notes)


@pytest.mark.usefixtures("uncounted")
def test_noise_is_secret_and_counted(tmp_path: Path) -> None:
    privacy = {"clip": 0.5, "noise": 3.0, "epsilon": 2.6}
    ends = []
    for number in range(2):
        folder, notes = federation(tmp_path / str(number), privacy, rounds=5).run()
        ends.append(last_of(folder))
        assert any("epsilon" in note and "after round" in note for note in notes)
        rounds = folder.history().rounds
        assert len(rounds) == 3  # the budget
        assert rounds[-1].server["epsilon"] <= 2.6
    assert gap(ends[0].server, ends[1].server) > 0.01  # the same seed, other noise


@pytest.mark.parametrize("last", [2, 3])  # three rounds are affordable
@pytest.mark.parametrize(("secure", "phase"), [(True, "train.unmask"), (False, "train.train")], ids=["secure", "open"])
@pytest.mark.usefixtures("uncounted")
def test_a_sum_that_was_known_before_the_server_was_killed_counts(
    tmp_path: Path, secure: bool, phase: str, last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its noise is not drawn again: the round that is asked for again tells more, and the budget has one round less."""
    own = federation(tmp_path / "f", {"clip": 0.5, "noise": 3.0, "epsilon": 2.6, "secure": secure}, rounds=5)
    kept = RunFolder.checkpoint

    def killed(self: RunFolder, state: Any, progress: Any) -> None:
        if state.round == last:
            raise KeyboardInterrupt
        kept(self, state, progress)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "checkpoint", killed)
        with pytest.raises(KeyboardInterrupt):
            own.run()
    asked: list[str] = []
    own.tamper = lambda _, message, reply: asked.append(message.metadata.message_type) or reply
    folder, notes = own.run(resume=True)
    rounds = folder.history().rounds
    assert len(rounds) == 2  # one is lost
    assert asked.count(phase) == 3 * (last == 2)  # the last one is not asked for again
    spent = Accountant(3.0, 1.0, 1e-5).epsilon(3)
    costs = folder.costs()
    assert costs is not None
    assert costs.epsilon == pytest.approx(spent)
    assert rounds[-1].server["epsilon"] <= spent <= 2.6
    assert any("is enough for 2 of 5 rounds" in note for note in notes)
    before = len(asked)
    again, _ = own.run(resume=True)  # nothing is left to do, and nothing is told
    assert phase not in asked[before:]
    assert again.history().rounds == rounds


@pytest.mark.usefixtures("uncounted")
def test_a_round_that_failed_before_its_sum_was_known_costs_nothing(tmp_path: Path) -> None:
    own = federation(tmp_path / "f", {"clip": 0.5, "noise": 3.0, "epsilon": 2.6, "secure": True}, rounds=5)
    own.tamper = lambda name, message, reply: (
        None if name == "client-1" and message.metadata.message_type == "train.mask" else reply
    )
    with pytest.raises(
        UserError, match=r"round 1: a secure summation needs 3 parties; 2 are left; go on with .* --resume"
    ):
        own.run()
    own.tamper = None
    folder, _ = own.run(resume=True)
    assert len(folder.history().rounds) == 3


@pytest.mark.parametrize("noise", [1e-3, 0.0])
@pytest.mark.usefixtures("uncounted")
def test_under_noise_nobodys_update_counts_less_because_of_others(tmp_path: Path, noise: float) -> None:
    """Leaving out who is far longer than the others would let one client decide whether another one is in the sum."""
    own = federation(tmp_path / "f", {"clip": 1e6, "noise": noise}, rounds=1, norm_factor=2.0)

    def longer(name: str, message: Any, reply: Any) -> Any:
        if name == "client-1" and message.metadata.message_type == "train.train":
            packet = from_records(reply)
            return to_records(replace(packet, tree={"update": {"values": 1e4 * packet.tree["update"]["values"]}}))
        return reply

    own.tamper = longer
    folder, notes = own.run()
    assert folder.history().rounds[0].participants == (3 if noise else 2)
    assert any("the norm of its update" in note for note in notes) == (not noise)


@pytest.mark.usefixtures("uncounted")
def test_too_few_for_a_sum_are_asked_again(tmp_path: Path) -> None:
    own = federation(
        tmp_path / "f", {"clip": 50.0, "secure": True}, rounds=1
    )  # of three parties, who all must be there
    away = ["client-1"]
    own.tamper = lambda name, message, reply: (
        None if message.metadata.message_type == "train.train" and name in away and away.pop() else reply
    )
    folder, notes = own.run()
    assert folder.history().rounds[0].participants == 3
    assert any("2 of at least 3 sound replies; asking again" in note for note in notes)
    assert any("'client-1' is left out (train, round 1)" in note for note in notes)


@pytest.mark.parametrize("hides", [True, False])
@pytest.mark.usefixtures("uncounted")
def test_who_gets_the_model_is_not_told_who_took_part(tmp_path: Path, hides: bool) -> None:
    """Sampling hides a client only from those who do not know who was drawn, and who diverged says something of data."""
    hidden = {"clip": 0.5, "noise": 3.0, "sampling": "poisson"}
    own = federation(tmp_path / "f", hidden if hides else {"clip": 0.5}, participation=0.7, rounds=3)
    done, _ = own.run()
    offer(done, tmp_path / "offer")
    offered = RunFolder(tmp_path / "offer")
    told, kept = offered.history(), done.history()
    assert len(told.rounds) == len(kept.rounds) == 3
    assert told.evaluations == kept.evaluations
    assert [line.server for line in told.rounds] == [line.server for line in kept.rounds]
    assert any(line.participants for line in kept.rounds)
    assert (told.rounds == kept.rounds) == (not hides)
    if hides:
        assert {(line.participants, line.bytes_up, line.bytes_down, line.seconds) for line in told.rounds} == {
            (0, 0, 0, 0.0)
        }
        texts = [path.read_text() for path in offered.path.rglob("*.jsonl")]
        assert not any(client.name in text for client in own.task.clients for text in texts)


def test_every_phase_of_a_summation_is_answered_once(tmp_path: Path) -> None:
    """A second answer to the same question would have other noise under the same masks."""
    privacy = Privacy(clip=1.0, noise=1.0, secure=True)
    parties = [Summand(privacy, Memory(tmp_path / str(k)), b"x", Updates(privacy)) for k in range(3)]
    keys = {f"{k}/{kind}": key for k, party in enumerate(parties)
            for kind, key in party.advertise(torch.zeros(5))["keys"].items()}  # fmt: skip
    share = [Packet("share", {"number": k}, {"keys": keys}) for k in range(3)]
    letters = [party.share(packet)["letters"] for party, packet in zip(parties, share, strict=True)]
    mask = [Packet("mask", {}, {"letters": {str(j): own[str(k)] for j, own in enumerate(letters)}}) for k in range(3)]
    for party, packet in zip(parties, mask, strict=True):
        party.mask(packet)
    for phase, packet in (("share", share[0]), ("mask", mask[0])):
        with pytest.raises(UserError, match="nothing to add"):
            getattr(parties[0], phase)(packet)
    unmask = Packet("unmask", {"survivors": [0, 1, 2]})
    assert len(parties[0].unmask(unmask)["shares"]) == 3
    with pytest.raises(UserError, match="nothing to add"):
        parties[0].unmask(unmask)
    with parties[1].memory.alone(), pytest.raises(UserError, match="this party is answering another message"):
        parties[1].unmask(unmask)


def test_what_would_leave_is_shown_as_it_leaves(tmp_path: Path) -> None:
    for privacy, slots, tells in (
        ({"clip": 1.0, "secure": True}, {"keys", "letters", "words", "shares"}, False),
        ({"compress": "int8"}, {"update"}, True),
    ):
        own = federation(tmp_path / str(tells), privacy)
        party = own.party(own.task.clients[0])
        first, *rest = leaving(party, own.federation)
        assert {entry.slot for entry in first.tensors.values()} == slots
        assert bool(rest) == tells  # counts
        assert facts(party)["samples"] == (len(party.client.train) if tells else 1)
        assert ("training loss" in str(facts(party)["with every round"])) == tells


def test_what_a_federation_cannot_hide_is_refused(tmp_path: Path) -> None:
    own = federation(tmp_path / "f", {"clip": 1.0, "noise": 1.0}, "fedper")
    with pytest.raises(UserError, match="gives something away"):
        own.run()
