"""Secure summation: exact, blind, and whole after losses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from fedshift.errors import UserError
from fedshift.privacy.fixed_point import FixedPoint
from fedshift.privacy.in_process import summed
from fedshift.privacy.masks import unseal
from fedshift.privacy.secure_sum import Member
from fedshift.privacy.sharing import secret_of, shares_of

NAMES = ["a", "b", "c", "d", "e"]


def words(count: int = 50, seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {name: generator.integers(0, 2**32, count, dtype=np.uint32) for name in NAMES}


def added(vectors: dict[str, np.ndarray], names: list[str]) -> np.ndarray:
    total = np.zeros(len(next(iter(vectors.values()))), dtype=np.uint32)
    for name in names:
        total += vectors[name]
    return total


def test_the_sum_is_exact() -> None:
    vectors = words()
    found = summed(vectors, 4, b"x")
    np.testing.assert_array_equal(found.total, added(vectors, NAMES))
    assert found.survivors == tuple(NAMES)


@pytest.mark.parametrize("phase", ["advertise", "share", "mask", "unmask"])
def test_one_party_lost_in_each_phase_is_survived(phase: str) -> None:
    vectors = words()
    found = summed(vectors, 3, b"x", {phase: ["b"]})
    # who is lost after it has sent its vector is in the sum
    expected = NAMES if phase == "unmask" else [name for name in NAMES if name != "b"]
    assert found.survivors == tuple(expected)
    np.testing.assert_array_equal(found.total, added(vectors, expected))


def test_a_party_lost_in_every_phase_at_once() -> None:
    vectors = {str(k): np.full(9, k, dtype=np.uint32) for k in range(9)}
    lost = {"advertise": ["0"], "share": ["1"], "mask": ["2"], "unmask": ["3"]}
    assert summed(vectors, 5, b"x", lost).total.tolist() == [3 + 4 + 5 + 6 + 7 + 8] * 9


@pytest.mark.parametrize("phase", ["advertise", "share", "mask", "unmask"])
def test_too_few_survivors_learn_nothing(phase: str) -> None:
    with pytest.raises(UserError, match="needs 4 parties"):
        summed(words(), 4, b"x", {phase: ["a", "b"]})


def view_of(values: np.ndarray) -> np.ndarray:
    """What the server sees of one party's vector."""
    members = [Member(k, 2, b"x") for k in range(3)]
    keys = {k: member.advertise() for k, member in enumerate(members)}
    letters = {k: member.share(keys) for k, member in enumerate(members)}
    return members[0].mask(keys, {k: sent[0] for k, sent in letters.items()}, values)


def test_the_servers_view_of_one_upload_is_uniform_noise() -> None:
    """A constant vector, the easiest to recognise: every byte of what is sent is as frequent as any other."""
    values = np.full(100_000, 7, dtype=np.uint32)
    seen, again = view_of(values), view_of(values)
    for column in seen.view(np.uint8).reshape(-1, 4).T:
        assert chisquare(np.bincount(column, minlength=256)).pvalue > 1e-6
    # neighbours do not know each other, two summations of one vector neither, and no bit of the vector shows
    assert abs(np.corrcoef(seen[:-1].astype(float), seen[1:].astype(float))[0, 1]) < 0.02
    assert abs(np.corrcoef(seen.astype(float), again.astype(float))[0, 1]) < 0.02
    bits = np.unpackbits(view_of(np.arange(100_000, dtype=np.uint32) // 50_000).view(np.uint8)).reshape(2, -1)
    assert abs(bits[0].mean() - bits[1].mean()) < 0.002


def test_the_test_that_looks_would_see_a_vector_without_masks() -> None:
    plain = np.full(1000, 7, dtype=np.uint32)
    assert chisquare(np.bincount(plain.view(np.uint8), minlength=256)).pvalue < 1e-6


def test_fewer_shares_than_it_takes_say_nothing() -> None:
    secret = b"s" * 32
    shares = shares_of(secret, 3, range(5))
    assert secret_of({k: shares[k] for k in (0, 3, 4)}) == secret
    assert secret_of({k: shares[k] for k in (0, 3)}) != secret


def test_a_letter_is_for_one_party_only() -> None:
    members = [Member(k, 2, b"x") for k in range(3)]
    keys = {k: member.advertise() for k, member in enumerate(members)}
    letters = members[0].share(keys)
    with pytest.raises(UserError, match="changed on its way"):
        unseal(members[2]._letter_key(keys, 0), letters[1], b"0 to 1")


def test_a_party_refuses_to_open_what_the_server_must_not_know() -> None:
    members = [Member(k, 2, b"x") for k in range(3)]
    keys = {k: member.advertise() for k, member in enumerate(members)}
    sent = {k: member.share(keys) for k, member in enumerate(members)}
    received = {k: one[0] for k, one in sent.items() if k < 2}
    with pytest.raises(UserError, match="did not take part"):
        members[0].unmask(keys, received, {0, 1, 2})
    with pytest.raises(UserError, match="same key"):
        members[0].share({0: keys[0], 1: keys[1], 2: keys[1]})
    opened = members[0].unmask(keys, received, {0, 1})
    assert set(opened) == {0, 1}  # one share of each party, of its own mask or of its pairwise secret


def test_the_server_learns_one_secret_of_every_party_and_never_both() -> None:
    """Party 2 dealt its letters and was lost: its pairwise secret is opened, and of the others their own masks."""
    members = [Member(k, 2, b"x") for k in range(3)]
    keys = {k: member.advertise() for k, member in enumerate(members)}
    sent = {k: member.share(keys) for k, member in enumerate(members)}
    opened = [members[k].unmask(keys, {j: one[k] for j, one in sent.items()}, {0, 1}) for k in (0, 1)]
    for party, member in enumerate(members):
        found = secret_of({k: opened[k][party] for k in (0, 1)})
        assert found == (member.mask_secret if party == 2 else member.own_mask)


def test_numbers_are_added_to_within_half_a_step_each() -> None:
    code = FixedPoint(bound=2.0, parties=20)
    vectors = [torch.linspace(-2, 2, 1001, dtype=torch.float64) * (k / 19) for k in range(20)]
    total = sum((code.encode(v) for v in vectors[1:]), code.encode(vectors[0]))
    error = (code.decode(total) - torch.stack(vectors).sum(0)).abs().max()
    assert float(error) <= 20 * code.step / 2
    assert code.step < 1e-7
    edge = code.encode(torch.full((1,), 9.0))  # what lies outside is put on the edge, and twenty of them still fit
    total = sum((edge for _ in range(19)), edge)
    assert float(code.decode(total)) == pytest.approx(40.0)
