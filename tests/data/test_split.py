import time

import pytest
import torch
from torch import Tensor

from fedshift.core import rng
from fedshift.data.split import COPY, SIBLING, Split, choose_unseen, purge, split, split_by_file
from fedshift.errors import UserError


def crossing(parts: Split, groups: Tensor) -> int:
    """How many groups lie on more than one side."""
    sides = [set(groups[part].tolist()) for part in parts]
    return len((sides[0] & sides[1]) | (sides[0] & sides[2]) | (sides[1] & sides[2]))


def counts(parts: Split) -> list[int]:
    return [len(part) for part in parts]


def is_complete(parts: Split, indices: Tensor) -> bool:
    return torch.equal(torch.cat(parts).sort().values, indices.sort().values)


# --- split ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "fractions", "expected"),
    [
        (3000, (0.6, 0.2, 0.2), [1800, 600, 600]),
        (2500, (0.6, 0.2, 0.2), [1500, 500, 500]),
        (700, (0.85, 0.15, 0.0), [595, 105, 0]),
        (157, (0.8, 0.1, 0.1), [125, 16, 16]),
        (10, (0.7, 0.2, 0.1), [7, 2, 1]),
        (10, (0.0, 0.0, 1.0), [0, 0, 10]),
        (5, (0.8, 0.1, 0.1), [4, 0, 1]),
        (3, (0.8, 0.1, 0.1), [2, 0, 1]),
        (2, (0.98, 0.01, 0.01), [1, 0, 1]),
        (2, (0.01, 0.98, 0.01), [1, 0, 1]),
        (2, (0.01, 0.01, 0.98), [1, 0, 1]),
        (1, (0.6, 0.2, 0.2), [1, 0, 0]),
        (1, (0.5, 0.0, 0.5), [1, 0, 0]),
        (0, (0.6, 0.2, 0.2), [0, 0, 0]),
    ],
)
def test_counts_of_single_images(n: int, fractions: tuple[float, float, float], expected: list[int]) -> None:
    indices = torch.arange(n) * 3 + 1
    parts = split(indices, torch.arange(3 * n + 1), fractions, seed=4)
    assert counts(parts) == expected
    assert is_complete(parts, indices)
    for part in parts:
        assert part.dtype == torch.int64
        assert bool((part.diff() > 0).all())


def test_same_seed_same_split_other_seed_other_split_arguments_untouched() -> None:
    indices, groups = torch.arange(99, -1, -1), torch.arange(100) // 2
    before = indices.clone(), groups.clone()
    a, b, c = (split(indices, groups, (0.6, 0.2, 0.2), seed) for seed in (1, 1, 2))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not torch.equal(a[0], c[0])
    assert torch.equal(indices, before[0])
    assert torch.equal(groups, before[1])


def test_the_order_of_indices_does_not_matter() -> None:
    indices, groups = torch.arange(50), torch.arange(50) // 3
    a = split(indices, groups, (0.6, 0.2, 0.2), seed=1)
    b = split(indices[rng.permutation(9, 50)], groups, (0.6, 0.2, 0.2), seed=1)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_groups_never_cross(seed: int) -> None:
    groups = rng.integers(seed, torch.arange(300), 120)  # sizes 1 to about 8
    indices = rng.permutation(seed, 300)[:200]
    parts = split(indices, groups, (0.6, 0.2, 0.2), seed)
    assert crossing(parts, groups) == 0
    assert is_complete(parts, indices)
    assert counts(parts) == [120, 40, 40]  # single images fill what the groups leave open


@pytest.mark.parametrize("seed", range(10))
def test_counts_are_near_when_all_groups_are_large(seed: int) -> None:
    groups = torch.arange(200) // 10
    parts = split(torch.arange(200), groups, (0.6, 0.2, 0.2), seed)
    assert crossing(parts, groups) == 0
    assert counts(parts) == [120, 40, 40]
    odd = split(torch.arange(200), torch.arange(200) // 7, (0.6, 0.2, 0.2), seed)
    assert max(abs(a - b) for a, b in zip(counts(odd), (120, 40, 40), strict=True)) <= 7


@pytest.mark.parametrize("fractions", [(0.6, 0.2, 0.2), (0.98, 0.01, 0.01), (0.01, 0.98, 0.01), (0.01, 0.01, 0.98)])
@pytest.mark.parametrize("sizes", [(5, 5), (9, 1), (1, 9), (30, 1, 1), (4, 4, 4), (10, 10, 1), (1, 1), (2, 1)])
@pytest.mark.parametrize("seed", range(4))
def test_train_and_test_are_never_empty_with_two_groups(
    sizes: tuple[int, ...], fractions: tuple[float, float, float], seed: int
) -> None:
    groups = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    parts = split(torch.arange(len(groups)), groups, fractions, seed)
    assert len(parts[0]) > 0
    assert len(parts[2]) > 0
    assert crossing(parts, groups) == 0
    assert is_complete(parts, torch.arange(len(groups)))


def test_the_smallest_group_is_given_away() -> None:
    groups = torch.arange(3).repeat_interleave(torch.tensor([5, 3, 1]))
    assert counts(split(torch.arange(9), groups, (0.98, 0.01, 0.01), seed=0)) == [8, 0, 1]


def test_a_fraction_of_zero_stays_empty() -> None:
    groups = torch.tensor([0, 0, 0, 0, 0, 1, 1, 2])
    for seed in range(20):
        assert counts(split(torch.arange(8), groups, (0.5, 0.5, 0.0), seed))[2] == 0
        assert counts(split(torch.arange(8), groups, (0.0, 0.5, 0.5), seed))[0] == 0
        assert counts(split(torch.arange(8), groups, (0.5, 0.0, 0.5), seed))[1] == 0


def test_one_group_stays_whole() -> None:
    assert counts(split(torch.arange(6), torch.zeros(6, dtype=torch.int64), (0.6, 0.2, 0.2), seed=0)) == [6, 0, 0]


def test_every_image_has_its_fair_chance_of_being_tested() -> None:
    """Single images and large groups alike: about 20 % of the seeds put each of them into the test split."""
    groups = torch.tensor([0] * 6 + [1] * 3 + [2] * 3 + list(range(3, 51)))  # 60 images
    tested, seeds = torch.zeros(60), 600
    for seed in range(seeds):
        tested[split(torch.arange(60), groups, (0.6, 0.2, 0.2), seed)[2]] += 1
    share = tested / seeds
    assert float(share.min()) > 0.12
    assert float(share.max()) < 0.28


def test_a_large_client_is_fast() -> None:
    parts = split(torch.arange(200_000), torch.arange(200_000), (0.6, 0.2, 0.2), seed=0)
    assert counts(parts) == [120_000, 40_000, 40_000]


@pytest.mark.parametrize(
    ("fractions", "sentence"),
    [
        ((0.6, 0.2, 0.3), "must add up to 1, but .* add up to 1.1"),
        ((0.5, 0.2, 0.2), "must add up to 1, but .* add up to 0.9"),
        ((1.2, -0.4, 0.2), "must be numbers from 0 to 1"),
        ((float("nan"), 0.5, 0.5), "must be numbers from 0 to 1"),
        ((0.5, 0.5), "needs three fractions .* not 2"),
    ],
)
def test_impossible_fractions(fractions: tuple[float, float, float], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        split(torch.arange(10), torch.arange(10), fractions, seed=0)


def test_groups_of_another_pool() -> None:
    with pytest.raises(UserError, match="group ids for 5 images, but image 9 is asked for"):
        split(torch.arange(10), torch.arange(5), (0.6, 0.2, 0.2), seed=0)


# --- the file's own split -------------------------------------------------------------------------------------------


def test_the_file_decides() -> None:
    own = torch.tensor([0, 1, 2, 0, 1, 2, 0, 0])
    train, val, test = split_by_file(torch.tensor([7, 5, 3, 1]), torch.arange(8), own, 0.5, seed=0)
    assert (train.tolist(), val.tolist(), test.tolist()) == ([3, 7], [1], [5])


def test_a_client_without_val_rows_in_a_file_that_has_some_gets_none() -> None:
    own = torch.tensor([0, 0, 0, 2, 0, 1, 2])
    assert counts(split_by_file(torch.arange(4), torch.arange(7), own, 0.5, seed=0)) == [3, 0, 1]


@pytest.mark.parametrize("seed", range(5))
def test_val_is_drawn_from_train_by_groups(seed: int) -> None:
    own = torch.cat([torch.zeros(100), torch.full((20,), 2)]).long()
    groups = torch.arange(120) // 2
    parts = split_by_file(torch.arange(120), groups, own, 0.2, seed)
    assert counts(parts) == [80, 20, 20]
    assert crossing(parts, groups) == 0
    assert parts[2].tolist() == list(range(100, 120))
    assert int(parts[1].max()) < 100


def test_no_val_wanted_and_tiny_clients() -> None:
    own = torch.tensor([0, 0, 2, 0])
    assert counts(split_by_file(torch.arange(3), torch.arange(4), own, 0.0, seed=0)) == [2, 0, 1]
    assert counts(split_by_file(torch.tensor([2, 3]), torch.arange(4), own, 0.9, seed=0))[2] == 1
    assert counts(split_by_file(torch.arange(2), torch.arange(4), own, 0.99, seed=0)) == [1, 1, 0]
    assert counts(split_by_file(torch.tensor([2]), torch.arange(4), own, 0.5, seed=0)) == [0, 0, 1]


def test_wrong_split_columns() -> None:
    own = torch.tensor([0, 3])
    with pytest.raises(UserError, match=r"must hold 0 \(train\), 1 \(val\) or 2 \(test\), found 3"):
        split_by_file(torch.arange(2), torch.arange(2), own, 0.1, seed=0)
    for wrong in (1.0, -0.1, float("nan"), "a"):
        with pytest.raises(UserError, match="val-fraction must be a number from 0 to below 1"):
            split_by_file(torch.arange(2), torch.arange(2), own * 0, wrong, seed=0)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="split ids for 2 images, but image 4 is asked for"):
        split_by_file(torch.arange(5), torch.arange(5), own, 0.1, seed=0)


# --- purge ----------------------------------------------------------------------------------------------------------


def no_leak(clients: dict[str, Split], groups: Tensor, held_out: list[Tensor]) -> bool:
    def of(rows: list[Tensor]) -> set[int]:
        return set(groups[torch.cat([*rows, torch.zeros(0, dtype=torch.int64)])].tolist())

    train, val, test = ([parts[side] for parts in clients.values()] for side in range(3))
    return not (of(train) & of(val + test + held_out) or of(val) & of(test + held_out))


@pytest.mark.parametrize("seed", range(10))
def test_purge_works_across_clients(seed: int) -> None:
    groups = rng.integers(seed, torch.arange(400), 300)
    owners = dict(zip("abcd", rng.permutation(seed, 400).reshape(4, 100), strict=True))
    clients = {name: split(rows, groups, (0.6, 0.2, 0.2), seed) for name, rows in owners.items() if name != "d"}
    assert not no_leak(clients, groups, [owners["d"]])
    clean, left_out = purge(clients, groups, groups, [owners["d"]])
    assert no_leak(clean, groups, [owners["d"]])
    assert list(clean) == list(clients)
    gone = 0
    for name, (train, val, test) in clients.items():
        assert torch.equal(clean[name][2], test)  # test data are never touched
        for before, after in zip((train, val), clean[name][:2], strict=True):
            assert set(after.tolist()) <= set(before.tolist())
            assert bool((after.diff() > 0).all())
            gone += len(before) - len(after)
    assert sum(len(left.rows) for left in left_out) == gone > 0
    again, nothing = purge(clean, groups, groups, [owners["d"]])
    assert nothing == ()
    assert all(torch.equal(x, y) for name in clean for x, y in zip(again[name], clean[name], strict=True))


def test_purge_takes_exactly_the_leaks() -> None:
    t = torch.tensor
    clients = {"a": (t([0, 1, 2]), t([3, 4]), t([5])), "b": (t([6, 7, 8]), t([9]), t([10]))}
    #                  0  1  2  3  4   5  6  7  8  9  10 11
    groups = torch.tensor([0, 9, 2, 3, 10, 5, 5, 7, 8, 9, 10, 2])
    #                       0  1  2  3  4   5  6  7  8  9  10  11: pixels; 1 and 4 are other pictures of their groups
    content = torch.tensor([0, 1, 2, 3, 4, 5, 5, 7, 8, 9, 10, 2])
    clean, left_out = purge(clients, groups, content, held_out=[t([11])])
    # 1 is b's val image 9, 2 is the unseen 11, 4 (val) is b's test image 10, 6 is a's test image 5
    assert [part.tolist() for part in clean["a"]] == [[0], [3], [5]]
    assert [part.tolist() for part in clean["b"]] == [[7, 8], [9], [10]]
    assert [(left.client, left.reason, left.rows.tolist()) for left in left_out] == [
        ("a", COPY, [2]),
        ("a", SIBLING, [1, 4]),
        ("b", COPY, [6]),
    ]
    assert clients["a"][0].tolist() == [0, 1, 2]


def test_purge_treats_unseen_data_as_test_data_for_validation_too() -> None:
    t = torch.tensor
    pixels = t([0, 1, 2, 1])
    clean, left_out = purge({"a": (t([0]), t([1]), t([2]))}, pixels, pixels, held_out=[t([3])])
    assert [part.tolist() for part in clean["a"]] == [[0], [], [2]]
    assert [left.rows.tolist() for left in left_out] == [[1]]


def test_purge_without_duplicates_changes_nothing() -> None:
    clients = {"a": split(torch.arange(20), torch.arange(20), (0.6, 0.2, 0.2), seed=0)}
    clean, left_out = purge(clients, torch.arange(20), torch.arange(20))
    assert left_out == ()
    assert all(torch.equal(x, y) for x, y in zip(clean["a"], clients["a"], strict=True))
    assert purge({}, torch.arange(20), torch.arange(20)) == ({}, ())


def test_purge_is_fast_for_many_clients() -> None:
    groups = torch.arange(60_000)
    clients = {f"{i}": (rows[:4], rows[4:5], rows[5:]) for i, rows in enumerate(groups.reshape(10_000, 6))}
    start = time.perf_counter()
    assert purge(clients, groups, groups)[1] == ()
    assert time.perf_counter() - start < 5  # comparing every client with all test images took 18 seconds


def test_purge_with_groups_of_another_pool() -> None:
    clients = {"a": (torch.tensor([9]), torch.tensor([1]), torch.tensor([2]))}
    with pytest.raises(UserError, match="group ids for 5 images, but image 9"):
        purge(clients, torch.arange(5), torch.arange(5))


# --- unseen clients -------------------------------------------------------------------------------------------------

NAMES = [f"client-{i:02d}" for i in range(10)]


@pytest.mark.parametrize(
    ("n", "fraction", "expected"),
    [
        (10, 0.5, 5),
        (10, 0.25, 3),
        (10, 0.24, 2),
        (10, 0.01, 1),
        (10, 0.99, 9),
        (2, 0.9, 1),
        (100, 0.145, 15),
        (10, 0, 0),
    ],
)
def test_a_fraction_is_rounded_half_up_never_none_never_all(n: int, fraction: float, expected: int) -> None:
    names = [f"client-{i:03d}" for i in range(n)]
    chosen = choose_unseen(names, fraction, seed=0)
    assert len(chosen) == len(set(chosen)) == expected
    assert list(chosen) == sorted(chosen)
    assert set(chosen) <= set(names)


def test_chosen_by_seed_whatever_the_order() -> None:
    a = choose_unseen(NAMES, 0.5, seed=0)
    assert a == choose_unseen(NAMES, 0.5, seed=0)
    assert set(a) == set(choose_unseen(NAMES[::-1], 0.5, seed=0))
    assert len({choose_unseen(NAMES, 0.5, seed) for seed in range(10)}) > 5
    hits = sum("client-03" in choose_unseen(NAMES, 0.5, seed) for seed in range(400))
    assert 150 < hits < 250


def test_by_name_in_client_order() -> None:
    assert choose_unseen(NAMES, ["client-07", "client-02", "client-07"], seed=0) == ("client-02", "client-07")
    assert choose_unseen(["art", "photo"], "photo", seed=0) == ("photo",)
    assert choose_unseen(NAMES, (), seed=0) == ()


@pytest.mark.parametrize(
    ("names", "unseen", "sentence"),
    [
        (NAMES, ["client-3"], "no client is called 'client-3', which unseen asks for; did you mean client-03 or"),
        (NAMES, ["xyz"], "no client is called 'xyz'.* the first ones are called client-00, client-01, client-02"),
        (NAMES, NAMES, "all 10 clients are unseen: leave at least one to train on"),
        (NAMES, 1.0, "unseen must be a fraction from 0 to below 1, or a list of client names, not 1.0"),
        (NAMES, 3, "unseen must be a fraction .* not 3"),
        (NAMES, -0.1, "unseen must be a fraction .* not -0.1"),
        (NAMES, float("nan"), "unseen must be a fraction .* not nan"),
        (NAMES, True, "unseen must be a fraction .* not True"),
        (["only"], 0.5, "only where there are two or more, not 1"),
    ],
)
def test_impossible_choices(names: list[str], unseen: float | list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as info:
        choose_unseen(names, unseen, seed=0)
    assert "\n" not in str(info.value)
