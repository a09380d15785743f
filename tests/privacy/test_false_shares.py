"""A secure summation with parties that tell or deal what they should not: seen, named, survived where that is possible."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch

from fedshift.errors import UserError
from fedshift.privacy.letters import ENVELOPE, right_shares
from fedshift.privacy.noise import seeded
from fedshift.privacy.secure_sum import Keys, Member, total_of
from fedshift.privacy.settings import Privacy
from fedshift.privacy.upload import check_sum, code_of, words_of

COUNT, THRESHOLD, LOST = 5, 3, 4  # the last one deals its letters and sends no vector
VALUES = {k: np.random.default_rng(k).integers(0, 2**32, 50, dtype=np.uint32) for k in range(COUNT)}
EXPECTED = np.sum([VALUES[k] for k in range(COUNT) if k != LOST], axis=0, dtype=np.uint32)


class Summation:
    """All that was said until shares are told."""

    def __init__(self, dealers: dict[int, Member] | None = None) -> None:
        self.members = {k: Member(k, THRESHOLD, b"x") for k in range(COUNT)}
        self.keys: dict[int, Keys] = {k: member.advertise() for k, member in self.members.items()}
        # who deals other secrets than its own still seals its letters with the key that it has advertised
        own = {k: replace(m, letter_secret=self.members[k].letter_secret) for k, m in (dealers or {}).items()}
        self.letters = {k: {**self.members, **own}[k].share(self.keys) for k in self.members}
        self.masked = {
            k: member.mask(self.keys, self.received(k), VALUES[k]) for k, member in self.members.items() if k != LOST
        }

    def received(self, party: int) -> dict[int, bytes]:
        return {sender: sent[party] for sender, sent in self.letters.items()}

    def opened(self) -> dict[int, dict[int, bytes]]:
        return {k: self.members[k].unmask(self.keys, self.received(k), self.masked) for k in self.masked}

    def total(self, opened: dict[int, dict[int, bytes]]) -> np.ndarray:
        return total_of(self.keys, self.letters, self.masked, opened, THRESHOLD, b"x", "clinic {}".format)


def changed(share: bytes) -> bytes:
    """The number next to it: with it a secret can be moved to where one likes."""
    return (int.from_bytes(share, "big") ^ 1).to_bytes(len(share), "big")


@pytest.mark.parametrize("liar", range(COUNT - 1))
@pytest.mark.parametrize("victim", range(COUNT))
def test_a_false_share_is_not_used_and_its_teller_is_known(liar: int, victim: int) -> None:
    """Of a survivor's own mask (that went unseen once) or of a lost party's secret alike."""
    made = Summation()
    opened = made.opened()
    opened[liar][victim] = changed(opened[liar][victim])
    np.testing.assert_array_equal(made.total(opened), EXPECTED)
    right = right_shares(made.letters, made.masked, opened)
    missing = {(teller, dealer) for dealer in right for teller in opened if teller not in right[dealer]}
    assert missing == {(liar, victim)}


def test_more_false_shares_than_there_are_to_spare_are_a_sentence_and_no_sum() -> None:
    for liars in combinations(range(COUNT - 1), 2):  # four tell, and it takes three
        made = Summation()
        opened = made.opened()
        for liar in liars:
            opened[liar] = {dealer: changed(share) for dealer, share in opened[liar].items()}
        with pytest.raises(UserError, match=r"masks of clinic 0 .* takes 3 true shares of them, and 2 are left"):
            made.total(opened)


@pytest.mark.parametrize("dealer", [1, LOST])
def test_who_deals_shares_of_another_secret_is_named(dealer: int) -> None:
    made = Summation({dealer: Member(dealer, THRESHOLD, b"x")})
    with pytest.raises(UserError, match=f"masks of clinic {dealer} .* another secret than its own"):
        made.total(made.opened())


def test_a_letter_that_is_not_what_it_says_is_not_told_and_does_not_stop_the_others() -> None:
    """So that whoever tells a false share has made it false: an honest party that was dealt one keeps silent about it."""
    made = Summation()
    torn, lying = made.letters[0][1], made.letters[0][2]
    made.letters[0] = {**made.letters[0], 1: bytes(ENVELOPE) + torn[ENVELOPE:], 2: lying[:ENVELOPE] + bytes(64)}
    opened = made.opened()
    assert [0 in opened[k] for k in range(4)] == [True, False, False, True]
    assert all(set(opened[k]) >= {1, 2, 3, 4} for k in opened)
    with pytest.raises(UserError, match="masks of clinic 0"):
        made.total(opened)  # two of three
    made.letters[0] = {**made.letters[0], 2: lying}
    np.testing.assert_array_equal(made.total(made.opened()), EXPECTED)


def test_who_can_read_nothing_says_so() -> None:
    made = Summation()
    stranger = replace(made.members[0], letter_secret=bytes(range(32)))
    with pytest.raises(UserError, match="can read none of the letters"):
        stranger.unmask(made.keys, made.received(0), made.masked)


@pytest.mark.parametrize("what", ["own_mask", "mask_secret", "letter_secret"])
def test_secrets_that_changed_on_the_way_put_on_no_mask(what: str) -> None:
    made = Summation()
    damaged = replace(made.members[0], **{what: bytes(range(32))})
    with pytest.raises(UserError, match="not those it has advertised"):
        damaged.mask(made.keys, made.received(0), VALUES[0])


def test_what_is_told_of_an_own_mask_is_another_in_every_summation() -> None:
    one = Member(0, THRESHOLD, b"x")
    prints = {
        one.advertise().own,
        replace(one, session=b"y").advertise().own,
        Member(0, THRESHOLD, b"x").advertise().own,
    }
    assert len(prints) == 3
    assert one.own_mask not in prints


def test_survivors_who_are_named_again_and_again_are_not_many() -> None:
    made = Summation()
    with pytest.raises(UserError, match="needs 3 parties"):
        made.members[0].unmask(made.keys, made.received(0), [0, 0, 0, 1])


@pytest.mark.parametrize("noise", [0.0, 0.5, 8.0])
@pytest.mark.parametrize("size", [20, 5000])
def test_a_garbled_sum_is_longer_than_a_sum_can_be(noise: float, size: int) -> None:
    """The last guard, whatever garbled it; an honest sum, as long as clipping allows, passes."""
    privacy, parties = Privacy(clip=0.3, noise=noise, secure=True), 5
    code = code_of(privacy, parties)
    longest = torch.full((size,), 0.3 / size**0.5)
    for seed in range(20):
        words = [words_of(privacy, longest, parties, seeded(seed), (k,)) for k in range(parties)]
        check_sum(privacy, code.decode(np.sum(words, axis=0, dtype=np.uint32)), parties, parties)
        garbled = np.random.default_rng(seed).integers(0, 2**32, size, dtype=np.uint32)
        with pytest.raises(UserError, match="it is garbled and not used"):
            check_sum(privacy, code.decode(garbled), parties, parties)
