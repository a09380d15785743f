"""Calibration is fitted by sums, and class priors are found by it: right where assumptions hold, harmless elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedshift.blocks.calibration import NAMES, Calibration, calibrated_log, first_guess, newton_step, newton_sums, start
from fedshift.blocks.class_prior import (
    ESTIMATES,
    distance,
    estimate_errors,
    estimated_shift,
    log_likelihood,
    most_likely_prior,
)
from fedshift.errors import UserError
from fedshift.privacy.coding import Tallies
from fedshift.privacy.settings import Privacy
from fedshift.runs.calibrate import Answers, Nearby, check_said, measure

CLASSES = 5
EVEN = torch.full((CLASSES,), 1 / CLASSES, dtype=torch.float64)
NO_SHIFT = EVEN.tolist()
TWO = [0.5, 0.5, 0.0, 0.0, 0.0]


def world(shares: list[float], count: int, seed: int, spread: float = 1.0, moved: float = 0.0) -> Answers:
    """Points around five corners, and the true log-posteriors of even classes; ``moved`` shifts the points."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.multinomial(torch.tensor(shares), count, replacement=True, generator=random)
    corners = 2 * torch.eye(CLASSES)
    points = corners[labels] + spread * torch.randn(count, CLASSES, generator=random)
    points[:, 0] += moved
    logits = 2 * points  # the densities' logs, up to a number for each point
    return Answers(logits, labels)


def measured(clients: list[Answers], privacy: Privacy | None = None) -> tuple[Calibration, int]:
    """What these clients find out together, and the bytes they sent for it."""
    by_client = {f"client-{number}": {"common": own} for number, own in enumerate(clients)}
    found, size = measure(Nearby(by_client, privacy), ["common"], CLASSES)
    return Calibration(**{name.removeprefix("common: "): leaf for name, leaf in found.items()}), size


def skilled(clients: list[Answers]) -> Calibration:
    return measured(clients)[0]


def two_class_clients(moved: float = 0.0) -> list[Answers]:
    pairs = [(a, b) for a in range(CLASSES) for b in range(a)]
    shares = [[0.5 if c in pair else 0.0 for c in range(CLASSES)] for pair in pairs]
    return [world(own, 60, seed, moved=moved) for seed, own in enumerate(shares)]


def fitted(answers: Answers) -> Tensor:
    fit = first_guess(CLASSES)
    for _ in range(8):
        fit = newton_step(newton_sums(*answers, fit), fit)
    return fit


@pytest.mark.parametrize("sure", [0.3, 1.0, 3.0, 10.0])
def test_newton_ends_where_the_penalised_loss_is_flat(sure: float) -> None:
    answers = world([0.4, 0.2, 0.2, 0.1, 0.1], 800, 0)
    warped = Answers(sure * answers.logits + torch.tensor([0.5, 0, 0, -1, 0]), answers.labels)
    fit = fitted(warped)
    gradient = newton_sums(*warped, fit)[:, 0] + fit - start(CLASSES)
    assert gradient.abs().max() < 1e-8
    assert abs(float(fit[0]) * sure - 1) < 0.1


def test_curvature_is_that_of_the_loss() -> None:
    answers, fit = world(NO_SHIFT, 30, 1), start(CLASSES) + 0.1

    def loss(at: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(
            at[0] * answers.logits.double() + at[1:], answers.labels, reduction="sum"
        )

    sums = newton_sums(*answers, fit)
    assert torch.allclose(sums[:, 0], torch.func.grad(loss)(fit))
    assert torch.allclose(sums[:, 1:], torch.func.hessian(loss)(fit))


def test_what_clients_measure_together_is_what_one_would_who_had_all_images() -> None:
    clients = [world([0.6, 0.1, 0.1, 0.1, 0.1], 50, 2), world([0.1, 0.1, 0.1, 0.1, 0.6], 80, 3)]
    whole = Answers(*(torch.cat(parts) for parts in zip(*clients, strict=True)))
    (together, size), (alone, size_alone) = measured(clients), measured([whole])
    for name in ("fit", "labels", "confusion"):
        assert torch.allclose(getattr(together, name), getattr(alone, name))
    assert size == 2 * size_alone == 2 * 8 * (8 * 6 * 7 + 25 + 3)
    assert float(together.skill[2]) == 2


def test_behind_masks_sums_are_the_same() -> None:
    clients = [world(NO_SHIFT, count, count) for count in (200, 3, 50, 7000)]
    (hidden, size), (seen, size_seen) = measured(clients, Privacy(clip=1.0, secure=True)), measured(clients)
    for name in NAMES:
        assert torch.allclose(getattr(hidden, name), getattr(seen, name), rtol=1e-6, atol=1e-5)
    assert size > size_seen


@pytest.mark.parametrize("many", [3, 777, 2000, 20000])
def test_secure_sums_of_counts_are_exact_however_many_count(many: int) -> None:
    """All of them round a number alike, so that its errors would add up: then honest sums would look garbled."""
    own = torch.tensor([[3.0, 0.0], [1.0, 70000.0]], dtype=torch.float64)
    words = Tallies().words(own.flatten(), many)
    whole = Tallies().total(many * words, many, many).reshape(2, 2)
    assert torch.equal(whole, many * own)
    check_said("counts", whole, many)
    with pytest.raises(UserError, match="cannot be sums over images"):
        check_said("counts", own + 0.1)


def test_of_no_clients_nothing_is_known() -> None:
    assert measure(Nearby({}), ["common"], CLASSES) == ({}, 0)


@pytest.mark.parametrize("shares", [TWO, [0.7, 0.1, 0.1, 0.05, 0.05], NO_SHIFT])
def test_expectation_maximisation_finds_the_prior_and_more_images_find_it_better(shares: list[float]) -> None:
    truth = torch.tensor(shares, dtype=torch.float64)
    errors = []
    for count in (50, 5000):
        log_p = calibrated_log(world(shares, count, 4).logits, start(CLASSES))
        errors.append(float((most_likely_prior(log_p - EVEN.log(), EVEN) - truth).abs().sum()))
    assert errors[1] < min(0.06, errors[0])


def test_no_prior_is_likelier_than_the_one_found() -> None:
    log_ratio = calibrated_log(world(TWO, 300, 5).logits, start(CLASSES)) - EVEN.log()
    found = most_likely_prior(log_ratio, EVEN, steps=2000)
    random = torch.Generator().manual_seed(0)
    others = torch.distributions.Dirichlet(torch.ones(CLASSES)).sample((200,)).double()
    near = 0.9 * found + 0.1 * torch.rand(200, CLASSES, generator=random).double().softmax(1)
    best = log_likelihood(log_ratio, found) + 0.1 * CLASSES  # the few images that nobody saw
    for other in (*others, *near):
        assert log_likelihood(log_ratio, other.clamp(min=1e-9)) <= best


def test_clients_side_by_side_agree_with_each_alone() -> None:
    ratios = [calibrated_log(world(TWO, count, count).logits, start(CLASSES)) - EVEN.log() for count in (30, 50)]
    padded = torch.stack([torch.cat([r, r.new_full((50 - len(r), CLASSES), -torch.inf)]) for r in ratios])
    together = most_likely_prior(padded, EVEN)
    for row, alone in zip(together, ratios, strict=True):
        assert torch.allclose(row, most_likely_prior(alone, EVEN), atol=1e-12)


@pytest.mark.parametrize("estimate", list(ESTIMATES))
def test_every_estimate_is_close_where_there_are_many_images(estimate: str) -> None:
    calibration = skilled([world(NO_SHIFT, 2000, 6)])
    log_p = calibrated_log(world([0.6, 0.2, 0.1, 0.1, 0.0], 4000, 7).logits, calibration.fit)
    found = ESTIMATES[estimate](log_p, calibration)  # type: ignore[index]
    assert float((found - torch.tensor([0.6, 0.2, 0.1, 0.1, 0.0])).abs().sum()) < 0.12


def test_the_correction_is_whole_where_estimates_are_good() -> None:
    calibration = skilled(two_class_clients())
    stream = world(TWO, 100, 50)
    plain = float((stream.logits.argmax(1) == stream.labels).float().mean())
    shift, strength = estimated_shift(stream.logits, calibration, "em", guard=True)
    better = (calibration.fit[0] * stream.logits.double() + shift).argmax(1)
    assert float(strength) == 1
    assert float((better == stream.labels).float().mean()) > plain + 0.03


def test_nothing_is_done_where_nothing_has_shifted() -> None:
    calibration = skilled(two_class_clients())
    assert float(estimated_shift(world(NO_SHIFT, 200, 8).logits, calibration, "em", True).strength) == 0


def test_few_images_say_nothing() -> None:
    calibration = skilled(two_class_clients())
    assert float(estimated_shift(world(TWO, 2, 9).logits, calibration, "em", True).strength) == 0


def test_nothing_is_done_where_training_clients_could_not_tell() -> None:
    """Images that differ between clients look like classes that do."""
    alike = [world(NO_SHIFT, 60, seed, moved=(-1.5, 1.5)[seed % 2]) for seed in range(8)]
    calibration = skilled(alike)
    elsewhere = world(NO_SHIFT, 100, 10, moved=1.5)
    assert float(estimated_shift(elsewhere.logits, calibration, "em", guard=False).strength) == 1
    shift, strength = estimated_shift(elsewhere.logits, calibration, "em", guard=True)
    assert float(strength) == 0
    assert not shift.any()


def test_a_large_shift_is_believed_in_part_although_no_training_client_had_one() -> None:
    calibration = skilled([world(NO_SHIFT, 100, seed) for seed in range(8)])
    assert 0.3 < float(estimated_shift(world(TWO, 100, 11).logits, calibration, "em", True).strength) < 1


def test_the_error_of_no_estimate_is_less_what_few_images_are_away_by_chance() -> None:
    calibration = skilled([world(NO_SHIFT, 2000, 12)])
    errors = [
        estimate_errors(calibrated_log(own.logits, calibration.fit), own.labels, calibration)
        for own in (world(NO_SHIFT, 40, seed) for seed in range(20))
    ]
    assert float(torch.stack(errors)[:, 1].mean()) < 0.08
    many = world(TWO, 400, 13)
    truth = torch.bincount(many.labels, minlength=CLASSES).double() / 400
    expected = distance(truth, calibration.prior, calibration.prior) - 4 / 400
    assert torch.allclose(
        estimate_errors(calibrated_log(many.logits, calibration.fit), many.labels, calibration)[1], expected
    )


def test_without_measurements_the_images_and_the_test_decide() -> None:
    plain = Calibration.none(CLASSES)
    assert float(estimated_shift(world(TWO, 100, 14).logits, plain, "em", True).strength) == 1
    assert float(estimated_shift(world(NO_SHIFT, 100, 15).logits, plain, "em", True).strength) == 0
    weak = replace(plain, skill=torch.tensor([5.0, 1.0, 4.0], dtype=torch.float64))
    assert float(estimated_shift(world(TWO, 100, 14).logits, weak, "em", True).strength) == 0
