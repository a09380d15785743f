"""[privacy] across machines: parties do their half, the server sees what it may, and numbers are those of a simulation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from fedshift.deploy.leaving import facts, leaving
from fedshift.deploy.packet import Packet
from fedshift.deploy.records import from_records, to_records
from fedshift.errors import UserError
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
    _, simulated = own.simulated()
    assert gap(simulated.server, last_of(folder).server) <= 1e-6
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
    assert line.participants == (5 if phase == "train.unmask" else 4)
    assert any("'client-1' is left out" in note for note in notes)


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


def test_what_would_leave_is_shown_as_it_leaves(tmp_path: Path) -> None:
    for privacy, slot, tells in (
        ({"clip": 1.0, "secure": True}, "masked", False),
        ({"compress": "int8"}, "update", True),
    ):
        own = federation(tmp_path / slot, privacy)
        party = own.party(own.task.clients[0])
        first, *rest = leaving(party, own.federation)
        assert {entry.slot for entry in first.tensors.values()} == {slot}
        assert bool(rest) == tells  # counts
        assert facts(party)["samples"] == (len(party.client.train) if tells else 1)
        assert ("training loss" in str(facts(party)["with every round"])) == tells


def test_what_a_federation_cannot_hide_is_refused(tmp_path: Path) -> None:
    own = federation(tmp_path / "f", {"clip": 1.0, "noise": 1.0}, "fedper")
    with pytest.raises(UserError, match="gives something away"):
        own.run()
