"""Every measure against scikit-learn, on random and on degenerate predictions."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
from sklearn import metrics as sk

from fedshift.measures import exact
from fedshift.measures.confusion import Confusion
from fedshift.measures.counts import Counts
from fedshift.measures.intervals import by_subgroup, interval
from fedshift.measures.measurement import MEASURES, Measurement, measure_of
from fedshift.measures.predictions import Predictions


def drawn(seed: int, samples: int = 200, classes: int = 5, ties: bool = False) -> Predictions:
    random = np.random.default_rng(seed)
    labels = random.integers(classes, size=samples)
    logits = random.normal(size=(samples, classes)) + 1.5 * np.eye(classes)[labels]
    if ties:
        logits = logits.round()
    return Predictions((logits - np.log(np.exp(logits).sum(1, keepdims=True))).astype(np.float32), labels)


def cases() -> Iterator[tuple[str, Predictions]]:
    whole = drawn(0)
    yield "random", whole
    yield "ties", drawn(1, ties=True)
    yield "two classes", drawn(2, classes=2)
    yield "a class is absent", (some := drawn(3)).take(some.labels != 2)
    yield "one class only", whole.take(whole.labels == 1)
    yield "one sample", whole.take(np.arange(1))
    constant = np.log(np.tile([0.6, 0.1, 0.1, 0.1, 0.1], (200, 1))).astype(np.float32)
    yield "constant", Predictions(constant, whole.labels)
    sure = np.where(np.eye(5)[whole.labels] > 0, 0.0, -np.inf).astype(np.float32)
    yield "certain", Predictions(sure, whole.labels)


CASES = dict(cases())


@pytest.fixture(params=list(CASES))
def some(request: pytest.FixtureRequest) -> Predictions:
    return CASES[request.param]


def quiet(function, *args, **options):  # type: ignore[no-untyped-def]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **options)


def test_what_follows_from_counts(some: Predictions) -> None:
    count, y, p = Confusion.of(some), some.labels, some.predicted
    assert count.accuracy == pytest.approx(sk.accuracy_score(y, p))
    assert count.balanced_accuracy == pytest.approx(quiet(sk.balanced_accuracy_score, y, p))
    assert count.macro_f1 == pytest.approx(sk.f1_score(y, p, average="macro"))
    recall = sk.recall_score(y, p, labels=range(5), average=None, zero_division=math.nan)
    precision = sk.precision_score(y, p, labels=range(5), average=None, zero_division=math.nan)
    k = some.classes
    np.testing.assert_allclose(count.recall(), recall[:k])
    np.testing.assert_allclose(count.precision(), precision[:k])
    assert (count.matrix == sk.confusion_matrix(y, p, labels=range(k))).all()
    assert count.top_share == np.bincount(p).max() / len(p)


def test_areas_under_curves(some: Predictions) -> None:
    areas, precisions = exact.auroc_by_class(some), exact.auprc_by_class(some)
    for k in range(some.classes):
        own, scores = some.labels == k, some.log_probabilities[:, k].astype(float)
        scores = np.where(np.isfinite(scores), scores, -1e9)
        if own.any() and not own.all():
            assert areas[k] == pytest.approx(sk.roc_auc_score(own, scores))
        else:
            assert math.isnan(areas[k])
        if own.any():
            assert precisions[k] == pytest.approx(sk.average_precision_score(own, scores))
        else:
            assert math.isnan(precisions[k])


def test_auroc_is_the_macro_mean_of_scikit_learn() -> None:
    whole = CASES["random"]
    theirs = sk.roc_auc_score(whole.labels, whole.probabilities, multi_class="ovr", average="macro")
    assert exact.auroc(whole) == pytest.approx(theirs)


@pytest.mark.parametrize("specificity", [0.0, 0.5, 0.9, 0.95, 1.0])
def test_sensitivity_at_a_specificity(some: Predictions, specificity: float) -> None:
    found = []
    for k in range(some.classes):
        own = some.labels == k
        if own.any() and not own.all():
            scores = np.where(np.isfinite(s := some.log_probabilities[:, k]), s, -1e9)
            false, true, _ = sk.roc_curve(own, scores, drop_intermediate=False)
            found.append(true[false <= 1 - specificity + 1e-9].max())
    ours = exact.sensitivity_at(some, specificity)
    assert ours == (pytest.approx(np.mean(found)) if found else None)


def test_loss(some: Predictions) -> None:
    ours = exact.loss(some)
    one_hot = np.eye(some.classes)[some.labels]
    own = np.where(one_hot > 0, some.log_probabilities, 0.0).sum(1)
    assert ours == pytest.approx(-own.mean(), abs=1e-6)
    if np.isfinite(some.log_probabilities).all() and len(some) > 1:
        theirs = quiet(sk.log_loss, some.labels, some.probabilities, labels=range(some.classes))
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_calibration_errors_by_hand(some: Predictions) -> None:
    sure = np.exp(some.log_probabilities.max(1).astype(float))
    right = (some.predicted == some.labels).astype(float)
    equal = 0.0
    for k in range(15):
        inside = (sure > k / 15) & (sure <= (k + 1) / 15)
        if inside.any():
            equal += abs(sure[inside].mean() - right[inside].mean()) * inside.mean()
    assert exact.ece(some) == pytest.approx(equal)
    order = np.argsort(sure, kind="stable")
    place = np.arange(len(sure)) * 15 // len(sure)
    adaptive = sum(abs(sure[order][place == k].sum() - right[order][place == k].sum()) / len(sure) for k in range(15))
    assert exact.adaptive_ece(some) == pytest.approx(adaptive)


def test_predictions_that_are_no_numbers() -> None:
    whole = drawn(4, samples=20)
    logs = whole.log_probabilities.copy()
    logs[3] = np.nan
    some = Predictions(logs, whole.labels)
    count = Confusion.of(some)
    assert count.samples == 20
    assert count.answered.sum() == 19
    assert count.support.sum() == 20  # a broken answer is a wrong one
    assert [function(some) for function in (exact.auroc, exact.auprc, exact.loss, exact.ece)] == [None] * 4


def test_nobody() -> None:
    empty = drawn(0).take(np.zeros(0, int))
    kept = Measurement.of(empty)
    assert {name: kept.value(name) for name in MEASURES} == dict.fromkeys(MEASURES)


def test_measurements_say_what_measures_say(some: Predictions) -> None:
    kept = Measurement.of(some)
    for name, measure in MEASURES.items():
        exactly = measure.of(some)
        assert kept.value(name) == (None if exactly is None else pytest.approx(exactly, abs=1e-5))
    assert Measurement.of_json(kept.to_json(), some.classes) == kept


def test_confusions_of_clients_add_up() -> None:
    one, other = drawn(5), drawn(6)
    both = Predictions(
        np.concatenate([one.log_probabilities, other.log_probabilities]), np.concatenate([one.labels, other.labels])
    )
    assert Confusion.summed([Confusion.of(one), Confusion.of(other)]) == Confusion.of(both)


def test_a_constant_classifier_has_collapsed_and_a_right_one_has_not() -> None:
    assert Confusion.of(CASES["constant"]).collapsed
    assert not any(Confusion.of(CASES[name]).collapsed for name in CASES if name != "constant")


@pytest.mark.parametrize("seed", range(5))
def test_counts_keep_their_bounds(seed: int) -> None:
    parts = [drawn(10 * seed + k, samples=300, ties=k == 1) for k in range(3)]
    both = Predictions(*(np.concatenate([getattr(p, n) for p in parts]) for n in ("log_probabilities", "labels")))
    counted = Counts.of(parts[0]) + Counts.of(parts[1]) + Counts.of(parts[2])
    assert counted.samples == len(both)
    assert (counted.confusion == Confusion.of(both).matrix).all()
    assert counted.loss() == pytest.approx(exact.loss(both), rel=1e-5)
    for name, function in (("auroc", exact.auroc), ("auprc", exact.auprc), ("ece", exact.ece)):
        value, error = getattr(counted, name)()
        exactly = function(both)
        assert exactly is not None
        assert abs(value - exactly) <= error + 1e-9, name
        assert error < 0.05, name  # a bound that says something


def test_intervals_resample_groups_not_images() -> None:
    """Ten copies of every sample tell nothing new: resampling images would think they do."""
    few = drawn(7, samples=40)
    copied = few.take(np.repeat(np.arange(40), 10))
    accuracy = measure_of("accuracy").of
    honest = interval(accuracy, copied, np.repeat(np.arange(40), 10), draws=400)
    fooled = interval(accuracy, copied, np.arange(400), draws=400)
    plain = interval(accuracy, few, np.arange(40), draws=400)
    assert honest.groups == plain.groups == 40
    assert None not in (honest.low, honest.high, fooled.low, fooled.high, plain.low, plain.high)
    assert honest.high - honest.low == pytest.approx(plain.high - plain.low, rel=0.1)  # type: ignore[operator]
    assert fooled.high - fooled.low < 0.5 * (honest.high - honest.low)  # type: ignore[operator]


def test_subgroups() -> None:
    whole = drawn(8)
    sites = ["left" if k % 3 else "right" for k in range(len(whole))]
    found = by_subgroup(measure_of("balanced-accuracy").of, whole, sites, np.arange(len(whole)), draws=50)
    mask = np.array(sites) == "left"
    theirs = 100 * sk.balanced_accuracy_score(whole.labels[mask], whole.predicted[mask])
    assert found["left"].value == pytest.approx(theirs)
    assert found["left"].samples + found["right"].samples == len(whole)


def test_of_one_class_counts_tell_no_auroc_and_warn_of_nothing() -> None:
    alone = Counts.of(Predictions(np.log([[0.9, 0.1], [0.6, 0.4]]), np.array([0, 0])))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isnan(alone.auroc().value)
        assert alone.auprc().value > 0
