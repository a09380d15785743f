"""Proxy A-distance: zero for equal sets, two for sets that a plane separates, the same in either order."""

from __future__ import annotations

import pytest
import torch
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC
from torch import Tensor

from fedshift.inspect.pad import Halves, distances, halved, proxy_distance


def cloud(count: int, width: int, shift: float = 0.0, seed: int = 0) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) + shift


def pad(one: Tensor, other: Tensor) -> float | None:
    return proxy_distance(halved(one), halved(other))


def test_a_set_is_not_far_from_itself() -> None:
    for count, width in ((40, 3), (41, 3), (30, 60), (2, 1)):
        rows = cloud(count, width)
        assert pad(rows, rows) == 0


def test_samples_of_one_distribution_are_close_and_separable_ones_are_two_apart() -> None:
    close = pad(cloud(800, 4, seed=1), cloud(800, 4, seed=2))
    assert close is not None
    assert abs(close) < 0.25
    assert pad(cloud(50, 4, seed=1), cloud(50, 4, shift=20, seed=2)) == 2
    between = pad(cloud(800, 4, seed=1), cloud(800, 4, shift=0.5, seed=2))
    assert between is not None
    assert close + 0.2 < between < 2


@pytest.mark.parametrize(("many", "few", "width"), [(60, 60, 5), (61, 24, 5), (40, 30, 90), (7, 200, 3), (3, 2, 2)])
def test_swapping_the_sets_changes_nothing_and_all_stays_in_range(many: int, few: int, width: int) -> None:
    for seed in range(4):
        one, other = cloud(many, width, seed=seed), cloud(few, width, shift=0.4, seed=seed + 50)
        found = pad(one, other)
        assert found == pad(other, one)
        assert found is not None
        assert -2 <= found <= 2


def test_worse_than_chance_is_negative() -> None:
    """What holds in one half is the other way round in the other half."""
    low, high = torch.zeros(10, 1), torch.ones(10, 1)
    assert proxy_distance(Halves(low, high), Halves(high, low)) == -2


def test_it_is_the_error_of_a_linear_svm() -> None:
    one, other = (halved(cloud(60, 4, shift, seed)) for shift, seed in ((0.0, 1), (0.7, 2)))
    scaler = StandardScaler().fit(torch.cat([one.train, other.train]).double().numpy())
    truth = [0] * 30 + [1] * 30
    svm = LinearSVC(C=1.0, dual=False).fit(
        scaler.transform(torch.cat([one.train, other.train]).double().numpy()), truth
    )
    right = svm.score(scaler.transform(torch.cat([one.test, other.test]).double().numpy()), truth)
    assert 0.5 < right < 1
    assert proxy_distance(one, other) == pytest.approx(2 * (1 - 2 * (1 - right)))


def test_the_scale_of_a_feature_does_not_matter_and_dead_features_tell_nothing() -> None:
    one, other = cloud(60, 3, seed=1), cloud(60, 3, shift=0.6, seed=2)
    assert pad(one * torch.tensor([1.0, 1e4, 1e-4]), other * torch.tensor([1.0, 1e4, 1e-4])) == pad(one, other)
    assert pad(torch.ones(20, 5), torch.ones(30, 5)) == 0


def test_fewer_than_two_images_have_no_distance() -> None:
    assert pad(cloud(1, 3), cloud(30, 3)) is None
    assert pad(cloud(0, 3), cloud(30, 3)) is None
    assert pad(cloud(2, 3), cloud(30, 3)) is not None


# ---- several clients ---------------------------------------------------------------------------------------------------
def test_all_pairs_and_the_union() -> None:
    parts = {"a": cloud(40, 3, seed=1), "b": cloud(30, 3, 0.5, seed=2), "new": cloud(20, 3, 9, seed=3)}
    found = distances(parts, trained=["a", "b"])
    assert found.clients == ("a", "b", "new")
    for i, one in enumerate(parts):
        for j, other in enumerate(parts):
            assert found.pairs[i][j] == (0 if i == j else pad(parts[one], parts[other]))
    a, b = halved(parts["a"]), halved(parts["b"])
    every = Halves(torch.cat([a.train, b.train]), torch.cat([a.test, b.test]))
    assert found.union["a"] == proxy_distance(a, every)
    assert found.union["new"] == proxy_distance(halved(parts["new"]), every) == 2
    # an unseen client is in no mean
    assert found.mean == found.pairs[0][1]
    assert found.mean_union == pytest.approx(sum(v for k, v in found.union.items() if k != "new" and v is not None) / 2)
    assert found.as_dict()["pairs"]["b"] == list(found.pairs[1])


def test_one_client_is_its_own_union_and_has_no_pairs() -> None:
    found = distances({"a": cloud(30, 2)}, trained=["a"])
    assert (found.pairs, found.union, found.mean, found.mean_union) == (((0.0,),), {"a": 0.0}, None, 0.0)


def test_a_client_with_one_image_is_left_out_of_the_means() -> None:
    found = distances({"a": cloud(30, 2), "b": cloud(30, 2, 9), "c": cloud(1, 2)}, trained=["a", "b", "c"])
    assert found.pairs[2] == (None, None, 0.0)
    assert found.mean == 2
    assert found.union["c"] is None
