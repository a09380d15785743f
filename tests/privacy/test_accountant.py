"""What is told is what Opacus says."""

from __future__ import annotations

import pytest
from opacus.accountants import PRVAccountant, RDPAccountant

from fedshift.privacy.accountant import Accountant, Mechanism

DELTA = 1e-5


@pytest.mark.parametrize(("noise", "rate"), [(1.0, 0.1), (0.7, 0.5), (4.0, 1.0)])
def test_epsilon_is_opacus_for_the_same_schedule(noise: float, rate: float) -> None:
    theirs = RDPAccountant()
    for _ in range(15):
        theirs.step(noise_multiplier=noise, sample_rate=rate)
    assert Accountant(noise, rate, DELTA).epsilon(15) == theirs.get_epsilon(DELTA)


def test_gifts_are_one_more_message_of_everybody() -> None:
    theirs = RDPAccountant()
    for rate in (0.2, 0.2, 0.2, 1.0):
        theirs.step(noise_multiplier=2.0, sample_rate=rate)
    assert Accountant(2.0, 0.2, DELTA).epsilon(3, of_all=1) == theirs.get_epsilon(DELTA)


def test_the_tighter_accountant_is_opacus_too() -> None:
    theirs = PRVAccountant()
    for _ in range(5):
        theirs.step(noise_multiplier=1.0, sample_rate=0.1)
    assert Accountant(1.0, 0.1, DELTA, "prv").epsilon(5) == theirs.get_epsilon(DELTA)
    assert Accountant(1.0, 0.1, DELTA, "prv").epsilon(5) < Accountant(1.0, 0.1, DELTA).epsilon(5)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("mechanism", ["rdp", "prv"])
def test_who_counts_says_nothing_beside(mechanism: Mechanism) -> None:
    assert Accountant(4.0, 1.0, DELTA, mechanism).epsilon(21) > 0


def test_a_budget_is_spent_to_the_last_round_and_never_exceeded() -> None:
    accountant = Accountant(1.5, 0.3, DELTA)
    rounds = accountant.affordable(budget=4.0, most=500)
    assert accountant.epsilon(rounds) <= 4.0 < accountant.epsilon(rounds + 1)
    assert accountant.affordable(budget=4.0, most=3) == 3
    assert accountant.affordable(budget=0.01, most=3) == 0
