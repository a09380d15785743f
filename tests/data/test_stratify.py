"""Stratified splits: groups stay whole, and every class is trained and tested on where arithmetic allows it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from fedshift.data.split import Split, split, split_by_file

SHARES = [(0.6, 0.2, 0.2), (0.8, 0.1, 0.1), (0.7, 0.0, 0.3), (0.34, 0.33, 0.33), (0.98, 0.01, 0.01)]


def random_case(seed: int, mixed: bool) -> tuple[Tensor, Tensor]:
    """Groups and labels: sizes from 1 to 12, classes from very rare to common; mixed groups hold several classes."""
    generator = np.random.default_rng(seed)
    classes = int(generator.integers(2, 7))
    odds = generator.dirichlet(np.full(classes, 0.6))
    sizes = generator.geometric(generator.uniform(0.2, 1.0), int(generator.integers(2, 60))).clip(max=12)
    groups = np.arange(len(sizes)).repeat(sizes)
    own = generator.choice(classes, len(sizes), p=odds)[groups]
    other = generator.choice(classes, len(groups), p=odds)
    labels = np.where(generator.random(len(groups)) < (0.3 if mixed else 0.0), other, own)
    return torch.from_numpy(groups), torch.from_numpy(labels)


def on(part: Tensor, labels: Tensor) -> set[int]:
    return set(labels[part].tolist())


def several(groups: Tensor, labels: Tensor) -> set[int]:
    """Classes that two groups or more have."""
    return {c for c in labels.unique().tolist() if len(groups[labels == c].unique()) > 1}


def check_whole(parts: Split, groups: Tensor) -> None:
    """Every image once, no group on two sides."""
    assert torch.cat(parts).sort().values.tolist() == list(range(len(groups)))
    for a, b in itertools.combinations(parts, 2):
        assert not set(groups[a].tolist()) & set(groups[b].tolist())
    assert all(bool((part.diff() > 0).all()) for part in parts)


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("seed", range(60))
def test_groups_of_one_class(seed: int, shares: tuple[float, float, float]) -> None:
    groups, labels = random_case(seed, mixed=False)
    parts = split(torch.arange(len(groups)), groups, shares, seed, labels)
    check_whole(parts, groups)
    assert several(groups, labels) <= on(parts[0], labels) & on(parts[2], labels)
    assert shares[1] > 0 or len(parts[1]) == 0


def possible(groups: Tensor, labels: Tensor) -> bool:
    """Whether some way of placing the groups tests and trains every class of two groups or more."""
    wanted = several(groups, labels)
    held = [set(labels[groups == g].tolist()) & wanted for g in range(int(groups.max()) + 1)]
    for sides in itertools.product((0, 2), repeat=len(held)):
        both = [set().union(*(h for h, s in zip(held, sides, strict=True) if s == side)) for side in (0, 2)]
        if wanted <= both[0] and wanted <= both[1]:
            return True
    return False


@pytest.mark.parametrize("seed", range(150))
def test_groups_of_several_classes_find_a_way_where_there_is_one(seed: int) -> None:
    """Against all 2^n ways: rare classes of the same patients stand in each other's way."""
    generator = np.random.default_rng(seed)
    count, classes = int(generator.integers(3, 9)), int(generator.integers(3, 9))
    pairs = [(g, int(c)) for g in range(count) for c in generator.choice(classes, min(3, classes), replace=False)]
    groups, labels = (torch.tensor(column) for column in zip(*pairs, strict=True))
    parts = split(torch.arange(len(groups)), groups, (0.6, 0.2, 0.2), seed, labels)
    check_whole(parts, groups)
    both = on(parts[0], labels) & on(parts[2], labels)
    assert (several(groups, labels) <= both) == possible(groups, labels)


@pytest.mark.parametrize("seed", range(40))
def test_large_mixed_cases(seed: int) -> None:
    groups, labels = random_case(1000 + seed, mixed=True)
    parts = split(torch.arange(len(groups)), groups, (0.6, 0.2, 0.2), seed, labels)
    check_whole(parts, groups)
    assert several(groups, labels) <= on(parts[0], labels) & on(parts[2], labels)


@pytest.mark.parametrize("seed", range(10))
def test_sizes_and_classes_come_near_the_fractions(seed: int) -> None:
    generator = np.random.default_rng(seed)
    labels = torch.from_numpy(generator.choice(7, 1000, p=[0.67, 0.11, 0.1, 0.05, 0.03, 0.02, 0.02]))
    groups = torch.from_numpy(np.arange(1000) // generator.integers(1, 4))
    labels = labels[groups]  # one class a group
    parts = split(torch.arange(1000), groups, (0.6, 0.2, 0.2), seed, labels)
    largest = int(groups.bincount().max())
    for part, share in zip(parts, (0.6, 0.2, 0.2), strict=True):
        assert abs(len(part) - share * 1000) <= largest
        for c in range(7):
            assert abs(int((labels[part] == c).sum()) - share * int((labels == c).sum())) <= 2 * largest


def test_single_images_are_split_as_exactly_as_without_classes() -> None:
    labels = torch.arange(3000) % 10
    parts = split(torch.arange(3000), torch.arange(3000), (0.6, 0.2, 0.2), 3, labels)
    assert [len(part) for part in parts] == [1800, 600, 600]
    assert all(labels[part].bincount().tolist() == [len(part) // 10] * 10 for part in parts)
    odd = split(torch.arange(157), torch.arange(157), (0.8, 0.1, 0.1), 3, labels[:157])
    assert [len(part) for part in odd] == [125, 16, 16]


def test_classes_of_one_group_follow_the_fractions() -> None:
    """Thirty classes of one image each: nothing can be trained and tested, but sizes stay what they should be."""
    parts = split(torch.arange(30), torch.arange(30), (0.6, 0.2, 0.2), 0, torch.arange(30))
    assert [len(part) for part in parts] == [18, 6, 6]
    tested = {
        tuple(split(torch.arange(30), torch.arange(30), (0.6, 0.2, 0.2), s, torch.arange(30))[2].tolist())
        for s in range(9)
    }
    assert len(tested) == 9  # which ones is drawn


def test_every_image_has_its_fair_chance_of_being_tested() -> None:
    groups = torch.tensor([0] * 5 + [1] * 3 + [2] * 3 + list(range(3, 52)))  # 60 images, each group fits into test
    labels = (torch.arange(60) >= 11).long() * (torch.arange(60) % 3)
    tested, seeds = torch.zeros(60), 400
    for seed in range(seeds):
        tested[split(torch.arange(60), groups, (0.6, 0.2, 0.2), seed, labels)[2]] += 1
    share = tested / seeds
    assert float(share.min()) > 0.1
    assert float(share.max()) < 0.3


def test_other_images_and_the_order_do_not_matter() -> None:
    groups, labels = random_case(5, mixed=True)
    indices = torch.arange(len(groups))
    plain = split(indices, groups, (0.6, 0.2, 0.2), 1, labels)
    turned = split(indices.flip(0), groups, (0.6, 0.2, 0.2), 1, labels)
    assert all(torch.equal(a, b) for a, b in zip(plain, turned, strict=True))
    renamed = split(indices, groups, (0.6, 0.2, 0.2), 1, labels + 3)  # more classes elsewhere
    assert all(torch.equal(a, b) for a, b in zip(plain, renamed, strict=True))
    assert not torch.equal(plain[0], split(indices, groups, (0.6, 0.2, 0.2), 2, labels)[0])


def test_validation_drawn_from_the_files_training_images_has_every_class() -> None:
    own = torch.cat([torch.zeros(100), torch.full((20,), 2)]).long()
    labels = (torch.arange(120) % 10 == 0).long()
    train, val, test = split_by_file(torch.arange(120), torch.arange(120), own, 0.2, 0, labels)
    assert (len(train), len(val), len(test)) == (80, 20, 20)
    assert int(labels[val].sum()) == 2
    assert torch.equal(test, torch.arange(100, 120))


def test_a_large_client_is_fast() -> None:
    labels = torch.arange(200_000) % 1000
    parts = split(torch.arange(200_000), torch.arange(200_000) // 2, (0.6, 0.2, 0.2), 0, labels)
    assert abs(len(parts[0]) - 120_000) <= 1000
