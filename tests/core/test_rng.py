"""Randomness is a function of (seed, id, position): pinned, checked against plain integers, and statistically sound."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from fedshift.core import rng

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def plain_mix(x: int) -> int:
    """SplitMix64's finaliser in Python's integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def plain_bits(seed: int, identity: int, position: int) -> int:
    key = plain_mix((plain_mix((identity * GOLDEN + seed) & MASK) + seed) & MASK)
    value = plain_mix((key + (position + 1) * GOLDEN) & MASK)
    return value - (1 << 64) if value >> 63 else value


# --- pinned: a change of these numbers changes every result anybody has -----------------------------------------------


def test_pinned_seeds() -> None:
    assert rng.seed_of(0, 3, "hospital-a", "batches") == 6066190507521092079
    assert rng.seed_of() == 6510301506637419378


def test_pinned_draws() -> None:
    assert rng.bits(7, torch.tensor([0, 1, 5]), (2,)).tolist() == [
        [-5088628653561970625, 4614732406292982416],
        [-578311034186374497, 8771551501398884114],
        [3502432001404406559, 3269988998322890914],
    ]
    assert rng.uniform(7, torch.arange(3)).tolist() == [0.7241448760032654, 0.968649685382843, 0.7469874024391174]
    assert rng.integers(7, torch.arange(8), 10).tolist() == [5, 9, 5, 2, 8, 9, 7, 2]
    assert rng.permutations(3, 2, 7).tolist() == [[5, 0, 4, 2, 1, 6, 3], [1, 5, 3, 6, 4, 2, 0]]
    expected = torch.tensor([-0.7384520769119263, -0.17002587020397186, 0.276563823223114])
    assert torch.allclose(
        rng.normal(7, torch.arange(3)), expected, rtol=0, atol=1e-6
    )  # log and cos may differ by an ulp


def test_bits_are_splitmix64_in_plain_integers() -> None:
    ids = [0, 1, 2, 1000, 2**40, 2**62 + 5, -1]
    for seed in (0, 1, 2**63 - 1, rng.seed_of("x")):
        drawn = rng.bits(seed, torch.tensor(ids), (2, 3)).reshape(len(ids), 6).tolist()
        assert drawn == [[plain_bits(seed, i, p) for p in range(6)] for i in ids]


def test_other_draws_follow_from_the_bits() -> None:
    raw = rng.bits(5, torch.arange(50), (4,))
    top = [[(v & MASK) >> 40 for v in row] for row in raw.tolist()]
    assert torch.equal(rng.uniform(5, torch.arange(50), (4,)), torch.tensor(top, dtype=torch.float32) / 2**24)
    numbers = [[((v & MASK) >> 1) % 7 for v in row] for row in raw.tolist()]
    assert rng.integers(5, torch.arange(50), 7, (4,)).tolist() == numbers
    for value, z in zip(raw.flatten().tolist(), rng.normal(5, torch.arange(50), (4,)).flatten().tolist(), strict=True):
        radius = (((value & MASK) >> 32) + 1) / 2**32
        angle = 2 * math.pi * (value & 0xFFFFFF) / 2**24
        assert abs(z - math.sqrt(-2 * math.log(radius)) * math.cos(angle)) < 1e-5


# --- seeds ------------------------------------------------------------------------------------------------------------


def test_seeds_depend_on_every_part_its_type_and_its_place() -> None:
    parts: list[tuple[object, ...]] = [
        (), (0,), (1,), ("0",), (0, 0), (0, 1), (1, 0), ("a", "b"), ("b", "a"), ("ab",), ("ab", ""), ("", "ab"),
        (0, "final"), (0, 3, "a", "draw"), (0, 3, "a", "batches"), (True,), (1.0,), (None,),
    ]  # fmt: skip
    seeds = [rng.seed_of(*some) for some in parts]
    assert len(set(seeds)) == len(parts)
    assert all(0 <= seed < 2**63 for seed in seeds)
    grid = {rng.seed_of(s, r, c, "train") for s, r, c in itertools.product(range(10), range(30), "abcdefghij")}
    assert len(grid) == 10 * 30 * 10


# --- independence of everything else ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bits", "uniform", "normal", "integers"])
def test_an_ids_numbers_depend_on_nothing_but_seed_id_and_position(kind: str) -> None:
    def drawn(seed: int | torch.Tensor, ids: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        extra = (1000,) if kind == "integers" else ()
        result: torch.Tensor = getattr(rng, kind)(seed, ids, *extra, shape)
        return result

    whole = drawn(9, torch.arange(101), (3, 2))
    assert whole.shape == (101, 3, 2)
    order = rng.permutation(1, 101)
    assert torch.equal(drawn(9, order, (3, 2)), whole[order])
    assert all(torch.equal(drawn(9, torch.tensor([i]), (3, 2))[0], whole[i]) for i in (0, 1, 50, 99, 100))
    assert torch.equal(drawn(9, torch.arange(101), (6,)), whole.reshape(101, 6))
    assert torch.equal(drawn(9, torch.arange(101), (4,)), whole.reshape(101, 6)[:, :4])  # a longer draw begins the same
    assert torch.equal(drawn(9, torch.arange(101, dtype=torch.int32), (3, 2)), whole)
    seeds = torch.tensor([9, 10, 9])  # many clients at once: one seed for each id
    each = [drawn(int(seed), torch.tensor([i]), (3,))[0] for i, seed in zip((4, 4, 5), seeds, strict=True)]
    assert torch.equal(drawn(seeds, torch.tensor([4, 4, 5]), (3,)), torch.stack(each))
    assert drawn(9, torch.arange(0), (3,)).shape == (0, 3)
    assert drawn(9, torch.arange(4), ()).shape == (4,)


def test_torchs_own_generator_has_no_part_in_it() -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    a = rng.normal(3, torch.arange(10), (2,))
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(rng.normal(3, torch.arange(10), (2,)), a)


# --- quality ----------------------------------------------------------------------------------------------------------


def test_no_two_draws_are_the_same() -> None:
    values = torch.cat([rng.bits(seed, torch.arange(2000), (20,)).flatten() for seed in (0, 1, 2, 3, 1 << 24)])
    assert len(values.unique()) == len(values)


def test_every_bit_is_fair_and_follows_no_neighbour() -> None:
    raw = rng.bits(11, torch.arange(4096), (16,))
    ones = torch.stack([(raw >> b) & 1 for b in range(64)]).double()  # [64, 4096, 16]
    assert float((ones.mean((1, 2)) - 0.5).abs().max()) < 0.01  # five standard errors
    signs = 2 * ones - 1
    for other in (signs.roll(1, 0), signs.roll(1, 1), signs.roll(1, 2)):  # next bit, next id, next position
        assert float((signs * other).mean((1, 2)).abs().max()) < 0.02
    neighbour = 2 * torch.stack([(rng.bits(12, torch.arange(4096), (16,)) >> b) & 1 for b in range(64)]).double() - 1
    assert float((signs * neighbour).mean((1, 2)).abs().max()) < 0.02


def test_uniform_is_uniform() -> None:
    u = rng.uniform(5, torch.arange(20_000), (5,)).double()
    assert u.dtype == torch.float64
    assert 0.0 <= float(u.min()) < 1e-4
    assert 1 - 1e-4 < float(u.max()) < 1.0
    counts = torch.histc(u, 100, 0, 1)
    chi2 = float(((counts - 1000).square() / 1000).sum())
    assert 50 < chi2 < 160  # 99 degrees of freedom


def test_normal_is_normal() -> None:
    z = rng.normal(5, torch.arange(20_000), (5,))
    assert z.dtype == torch.float32
    assert bool(z.isfinite().all())
    z = z.double().flatten()
    moments = [float(z.pow(k).mean()) for k in (1, 2, 3, 4)]
    assert moments == pytest.approx([0, 1, 0, 3], abs=0.08)
    ordered = z.sort().values
    ideal = torch.special.ndtr(ordered)
    steps = torch.arange(1, len(z) + 1, dtype=torch.float64) / len(z)
    assert float((ideal - steps).abs().max()) < 1.63 / math.sqrt(len(z))  # Kolmogorov and Smirnov, one per cent


def test_integers_are_uniform_and_in_range() -> None:
    drawn = rng.integers(5, torch.arange(7000), 7, (10,))
    counts = torch.bincount(drawn.flatten(), minlength=7).double()
    assert drawn.dtype == torch.int64
    assert int(drawn.min()) == 0
    assert int(drawn.max()) == 6
    assert float((counts - 10_000).square().sum() / 10_000) < 22.5  # 6 degrees of freedom, 0.1 per cent
    assert rng.integers(5, torch.arange(3), 1).tolist() == [0, 0, 0]


# --- permutations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 2, 7, 1000])
def test_permutations_are_permutations(n: int) -> None:
    drawn = rng.permutations(3, 4, n)
    assert drawn.shape == (4, n)
    assert all(sorted(row) == list(range(n)) for row in drawn.tolist())
    assert torch.equal(rng.permutation(3, n), drawn[0])
    assert torch.equal(rng.permutations(3, 2, n), drawn[:2])  # more epochs do not change the first ones
    assert rng.permutations(3, 0, n).shape == (0, n)
    if n > 100:
        assert len({tuple(row) for row in drawn.tolist()}) == 4
        assert rng.permutation(4, n).tolist() != drawn[0].tolist()


def test_all_orders_are_equally_likely() -> None:
    drawn = rng.permutations(8, 24_000, 4)
    counts = torch.bincount((drawn * torch.tensor([64, 16, 4, 1])).sum(1))
    counts = counts[counts > 0].double()
    assert len(counts) == 24
    assert float((counts - 1000).square().sum() / 1000) < 49.7  # 23 degrees of freedom, 0.1 per cent
