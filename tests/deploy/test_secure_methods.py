"""Secure sums across machines: who gives nothing away, several networks, false shares, a server that asks too much."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import fedshift.deploy.flower as flower
from fedshift.blocks.logit_exchange import LogitExchange
from fedshift.deploy.memory import Memory
from fedshift.deploy.packet import Packet
from fedshift.deploy.records import from_records, to_records
from fedshift.deploy.summing import Summand
from fedshift.errors import UserError
from fedshift.privacy.coding import Updates
from fedshift.privacy.letters import known
from fedshift.privacy.settings import Privacy
from tests.deploy.parties import whole_task
from tests.deploy.test_private import federation, last_of
from tests.test_engines_agree import gap

SECURE = {"clip": 50.0, "secure": True}
FIVE = (9, 7, 8, 6, 5)
MIXED = [{"name": "mlp", "hidden": [4], "label": "small"}, {"name": "cnn", "width": 2, "hidden": 6, "label": "big"}]
HIDDEN = ("train", "share", "mask", "unmask", "settle")  # kinds of answers that a sum must hide


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[Packet]:
    """Every answer that reaches the server."""
    found: list[Packet] = []
    read = flower.from_records
    monkeypatch.setattr(flower, "from_records", lambda records: found.append(read(records)) or found[-1])
    return found


def forging(name: str, kind: str, change: Callable[[Packet], Packet]) -> Any:
    """One party's answers of one kind, changed on their way."""
    return lambda party, message, reply: (
        to_records(change(from_records(reply)))
        if party == name and message.metadata.message_type == f"train.{kind}"
        else reply
    )


# ---- what runs with it ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("knn-per", {}),
        ("finetune-rotation", {}),
        ("fedthe", {"options": {"sync-descriptors": False}}),
        ("local", {}),
        ("fedmd", {}),
        ("fedmd", {"model": MIXED}),
        ("heterofedtta", {"model": MIXED}),
        ("local", {"model": MIXED}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
@pytest.mark.usefixtures("uncounted")
def test_methods_that_give_nothing_away_run_and_nothing_unmasked_travels(
    tmp_path: Path, method: str, more: dict[str, Any], heard: list[Packet]
) -> None:
    own = federation(tmp_path / "f", SECURE, method, task=whole_task(FIVE), **more)
    folder, notes = own.run()
    _, simulated = own.simulated()
    assert gap(simulated.server, last_of(folder).server) <= 1e-5
    assert [line.participants for line in folder.history().rounds] == [5, 5]
    assert not any("is left out" in note for note in notes)
    sent = [packet for packet in heard if packet.kind in HIDDEN]
    assert {"train", "share", "mask", "unmask"} <= {packet.kind for packet in sent}
    assert {leaf.dtype for p in sent for tree in p.tree.values() for leaf in tree.values()} <= {
        torch.uint8,
        torch.int32,
    }
    assert not any(packet.tree for packet in sent if packet.kind == "settle")
    assert {packet.facts.get("loss") for packet in sent if packet.kind == "train"} == {None}
    masked = [packet.tree["words"]["words"] for packet in sent if packet.kind == "mask"]
    assert all(len(set(words.tolist())) >= 0.99 * len(words) for words in masked)  # nothing that repeats


@pytest.mark.usefixtures("uncounted")
def test_a_party_lost_among_several_networks_is_survived(tmp_path: Path) -> None:
    """One sum over all of them: of each network alone there would be too few."""
    own = federation(tmp_path / "f", SECURE, "fedmd", task=whole_task(FIVE), model=MIXED, rounds=1)
    own.tamper = lambda name, message, reply: (
        None if name == "client-4" and message.metadata.message_type == "train.mask" else reply
    )
    folder, _ = own.run()
    assert folder.history().rounds[0].participants == 4
    _, simulated = replace(own, task=replace(own.task, clients=own.task.clients[:4])).simulated()
    assert gap(simulated.server, last_of(folder).server) <= 1e-5


@pytest.mark.parametrize("name", ["fedbn", "fedper", "fedthe", "fedicon"])
def test_methods_that_give_something_away_are_refused(tmp_path: Path, name: str) -> None:
    own = federation(tmp_path / "f", SECURE, name, **({"norm": True} if name == "fedbn" else {}))
    with pytest.raises(
        UserError, match=r"gives something away after the last round, which .* hides in simulation only"
    ):
        own.run()


@pytest.mark.usefixtures("uncounted")
def test_what_a_method_denies_to_give_stays_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heard: list[Packet]
) -> None:
    """A method of somebody's own may be wrong about itself: its parties are not."""
    given = {"model": {"w": torch.ones(1)}}
    monkeypatch.setattr(LogitExchange, "settle", lambda *given_to: (given, given_to[3]))
    own = federation(tmp_path / "f", SECURE, "fedmd", rounds=1)
    _, notes = own.run()
    assert sum("is not hidden, and is not sent" in note for note in notes) == 3
    assert not [packet for packet in heard if packet.kind == "settle"]
    session, state = own.simulated()
    with pytest.raises(UserError, match="FedMD gives something away after the last round and says it does not"):
        session.deploy(state)


# ---- false shares --------------------------------------------------------------------------------------------------------
def false_shares(packet: Packet) -> Packet:
    wrong = {dealer: share ^ (torch.arange(len(share)) == 65).byte() for dealer, share in packet.tree["shares"].items()}
    return replace(packet, tree={"shares": wrong})


@pytest.mark.usefixtures("uncounted")
def test_false_shares_are_survived_and_their_teller_is_named(tmp_path: Path) -> None:
    own = federation(tmp_path / "f", SECURE, task=whole_task(FIVE), rounds=1)
    own.tamper = forging("client-1", "unmask", false_shares)
    folder, notes = own.run()
    _, simulated = own.simulated()
    assert gap(simulated.server, last_of(folder).server) <= 1e-6
    said = [note for note in notes if "false shares" in note]
    assert len(said) == 1
    assert "'client-1' told false shares of masks of 'client-0', 'client-1'" in said[0]


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        (
            "unmask",
            false_shares,
            "masks of 'client-0' cannot be taken off the sum: that takes 3 true shares of them, and 2",
        ),
        (
            "mask",
            lambda packet: replace(packet, tree={"words": {"words": packet.tree["words"]["words"].flip(0)}}),
            "the sum of 3 updates is longer than they can be",
        ),
    ],
    ids=["shares", "words"],
)
@pytest.mark.usefixtures("uncounted")
def test_a_garbled_sum_is_never_used(tmp_path: Path, kind: str, change: Callable[[Packet], Packet], words: str) -> None:
    own = federation(tmp_path / "f", SECURE, rounds=2)  # of three parties, who all must be right
    own.tamper = forging("client-1", kind, change)
    with pytest.raises(UserError, match=f"round 1: {words}.*; go on with .* --resume"):
        own.run()
    own.tamper = None
    folder, _ = own.run(resume=True)
    _, simulated = own.simulated()
    assert gap(simulated.server, last_of(folder).server) <= 1e-6


@pytest.mark.usefixtures("uncounted")
def test_a_noisy_sum_that_could_not_be_used_counts(tmp_path: Path) -> None:
    """Its masks are off for whoever has seen all messages, and the round is asked for again under other noise."""
    own = federation(tmp_path / "f", {"clip": 0.5, "noise": 3.0, "epsilon": 2.6, "secure": True}, rounds=5)
    own.tamper = forging("client-1", "unmask", false_shares)
    with pytest.raises(UserError, match="true shares"):
        own.run()
    own.tamper = None
    folder, _ = own.run(resume=True)
    assert len(folder.history().rounds) == 2  # three are affordable


@pytest.mark.usefixtures("uncounted")
def test_letters_that_are_none_leave_their_dealer_out(tmp_path: Path) -> None:
    own = federation(tmp_path / "f", SECURE, task=whole_task(FIVE), rounds=1)
    short = forging(
        "client-1", "share", lambda p: replace(p, tree={"letters": {k: v[:40] for k, v in p.tree["letters"].items()}})
    )
    own.tamper = short
    folder, _ = own.run()
    assert folder.history().rounds[0].participants == 4


# ---- never both secrets of one party -------------------------------------------------------------------------------------
class Asked:
    """Parties as a server sees them; what each of them ever tells of each other one is written down."""

    def __init__(self, folder: Path, count: int = 5) -> None:
        privacy = Privacy(clip=1.0, secure=True)
        self.parties = [Summand(privacy, Memory(folder / str(k)), b"x", Updates(privacy)) for k in range(count)]
        self.keys = {
            f"{k}/{kind}": key
            for k, party in enumerate(self.parties)
            for kind, key in party.advertise(torch.zeros(5))["keys"].items()
        }
        self.letters: list[dict[str, torch.Tensor]] = []
        self.told: dict[tuple[int, int], set[bool]] = {}  # (teller, dealer): of the own mask, or of the pairwise secret

    def shared(self) -> None:
        packets = [Packet("share", {"number": k}, {"keys": self.keys}) for k in range(len(self.parties))]
        self.letters = [party.share(packet)["letters"] for party, packet in zip(self.parties, packets, strict=True)]

    def mask(self, teller: int, senders: list[int]) -> None:
        letters = {str(j): self.letters[j][str(teller)] for j in senders}
        self.parties[teller].mask(Packet("mask", {}, {"letters": letters}))

    def unmask(self, teller: int, survivors: list[int]) -> None:
        told = self.parties[teller].unmask(Packet("unmask", {"survivors": survivors}))["shares"]
        for dealer, share in told.items():
            letter = self.letters[int(dealer)][str(teller)].numpy().tobytes()
            kinds = {own for own in (True, False) if known(letter, share.numpy().tobytes(), own)}
            assert len(kinds) == 1
            self.told.setdefault((teller, int(dealer)), set()).update(kinds)


def test_another_set_of_survivors_is_not_answered_after_the_first(tmp_path: Path) -> None:
    asked = Asked(tmp_path)
    asked.shared()
    for k in range(5):
        asked.mask(k, [0, 1, 2, 3, 4])
    asked.unmask(0, [0, 1, 2, 3, 4])
    for survivors in ([0, 1, 2, 3], [0, 1, 2, 3, 4]):
        with pytest.raises(UserError, match="nothing to add"):
            asked.unmask(0, survivors)
    assert asked.told == {(0, dealer): {True} for dealer in range(5)}


@pytest.mark.parametrize("phase", ["mask", "unmask"])
def test_of_two_questions_at_once_one_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    """The second one comes after the first has read what it needs and before it has answered."""
    asked = Asked(tmp_path)
    asked.shared()
    for k in range(phase == "mask", 5):
        asked.mask(k, [0, 1, 2, 3, 4])
    ask, read, refused = getattr(asked, phase), Summand._again, list[str]()

    def between(self: Summand, aside: Any) -> Any:
        found = read(self, aside)
        if not refused:
            with pytest.raises(UserError) as said:
                ask(0, [0, 1, 2, 3])
            refused.append(str(said.value))
        return found

    monkeypatch.setattr(Summand, "_again", between)
    ask(0, [0, 1, 2, 3, 4])
    assert len(refused) == 1
    with pytest.raises(UserError, match="nothing to add"):
        ask(0, [0, 1, 2, 3])
    assert asked.told == ({} if phase == "mask" else {(0, dealer): {True} for dealer in range(5)})


def test_keys_of_a_round_that_was_begun_anew_open_nothing_of_before(tmp_path: Path) -> None:
    asked = Asked(tmp_path)
    asked.shared()
    asked.mask(0, [0, 1, 2, 3, 4])
    again = asked.parties[0].advertise(torch.zeros(5))["keys"]  # asked to train again in the same round
    assert not any(torch.equal(again[kind], asked.keys[f"0/{kind}"]) for kind in again)
    with pytest.raises(UserError, match="nothing to add"):
        asked.unmask(0, [0, 1, 2, 3])
    with pytest.raises(UserError, match="another key than it has"):
        asked.parties[0].share(Packet("share", {"number": 0}, {"keys": asked.keys}))


@pytest.mark.parametrize("seed", range(8))
def test_whatever_a_server_asks_it_is_never_told_both_secrets_of_one_party(tmp_path: Path, seed: int) -> None:
    """In any order, again and again, for any parties and survivors; and never for fewer than must survive."""
    random, asked = Random(seed), Asked(tmp_path)
    asked.shared()
    for _ in range(100):
        teller = random.randrange(5)
        some = [random.randrange(5) for _ in range(random.randrange(3, 20))]  # some are named twice
        try:
            (asked.mask if random.random() < 0.4 else asked.unmask)(teller, some)
        except UserError:
            continue
    assert asked.told
    assert all(len(kinds) == 1 for kinds in asked.told.values())
    for dealer in range(5):
        tellers = {True: 0, False: 0}
        for (_, whose), kinds in asked.told.items():
            for kind in kinds:
                tellers[kind] += whose == dealer
        assert min(tellers.values()) < asked.parties[0].privacy.threshold(5)
