"""The least-norm mixture of unit updates against SciPy, and everything it promises, for 2 to 50 clients."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.optimize import nnls
from torch import Tensor

from fedshift.systems.fdse import consensus
from fedshift.systems.fdse.consensus import _by_faces, _by_wolfe, agreed, gram_of, min_norm_weights

Floats = NDArray[np.float64]
CLIENTS = range(2, 51)
GUARD = 1e-8  # added to every norm


def updates(clients: int, seed: int = 0) -> Iterator[tuple[str, Floats]]:
    """Many kinds of updates [clients, numbers], harmless and not."""
    rng = np.random.default_rng([clients, seed])
    size = int(rng.integers(2 * clients, 4 * clients))
    common = rng.standard_normal(size)
    yield "independent", rng.standard_normal((clients, size))
    yield "correlated", rng.standard_normal((clients, size)) + 2 * common
    yield "of very different length", rng.standard_normal((clients, size)) * 10 ** rng.uniform(-2, 2, (clients, 1))
    yield "nearly parallel", common + 1e-3 * rng.standard_normal((clients, size))
    yield "parallel but for rounding", common + 1e-9 * rng.standard_normal((clients, size))
    yield "identical", np.repeat(common[None], clients, 0)
    yield "two camps", np.repeat(rng.standard_normal((2, size)), [1, clients - 1], 0)
    against = rng.standard_normal((clients, size))
    against[1] = -against[0]
    yield "two against each other", against
    yield "all along one line", rng.standard_normal((clients, 1)) * common
    yield "in a plane", rng.standard_normal((clients, 2))
    yield "in a quadrant", np.abs(rng.standard_normal((clients, 2))) + 0.1
    yield "in an octant", np.abs(rng.standard_normal((clients, 3))) + 0.1
    yield "of few dimensions", rng.standard_normal((clients, max(1, clients // 2)))
    yield "of few dimensions on one side", rng.standard_normal((clients, max(2, clients // 2))) + 1.0
    yield "in a subspace", rng.standard_normal((clients, 3)) @ rng.standard_normal((3, size))


def units_of(moves: Floats) -> tuple[Floats, Floats]:
    norms = np.linalg.norm(moves, axis=1)
    return moves / (norms[:, None] + GUARD), norms


def scipy_mixture(units: Floats) -> Floats:
    """Non-negative least squares: the minimum of |D x|^2 + (1 - sum x)^2 is a multiple of the least-norm mixture."""
    system = np.vstack([units.T, np.ones((1, len(units)))])
    goal = np.zeros(len(system))
    goal[-1] = 1
    raw, _ = nnls(system, goal, maxiter=200 * len(units))
    mixture: Floats = raw / raw.sum()
    return mixture


def factors_of(moves: Floats, dtype: torch.dtype = torch.float64) -> Floats:
    """What the server multiplies every update with."""
    start = torch.zeros(moves.shape[1], dtype=dtype)
    found: Floats = agreed(gram_of(start, list(torch.from_numpy(moves).to(dtype)))[None])[0].numpy()
    return found


def weights_of(moves: Floats) -> Floats:
    """The weights on the simplex."""
    units, _ = units_of(moves)
    found: Floats = min_norm_weights(torch.from_numpy(units @ units.T)[None])[0].numpy()
    return found


# ---- the mixture --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("clients", CLIENTS)
def test_it_is_the_point_of_least_norm(clients: int) -> None:
    for kind, moves in updates(clients):
        units, _ = units_of(moves)
        u = weights_of(moves)
        assert u.shape == (clients,), kind
        assert u.min() >= 0, kind
        assert abs(u.sum() - 1) < 1e-12, kind
        point = u @ units
        along = units @ point
        squared = float(point @ point)
        assert along.min() >= squared - 1e-6, kind  # against nobody
        assert np.abs(along - squared)[u > 1e-6].max() < 1e-6, kind
        assert squared <= (units.mean(0) @ units.mean(0)) + 1e-12, kind
        other = scipy_mixture(units) @ units
        assert abs(squared - other @ other) < 1e-9, kind
        assert np.linalg.norm(point - other) < 1e-5, kind  # the point is unique, the weights need not be


@pytest.mark.parametrize("clients", CLIENTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_server_never_goes_against_a_client_and_never_further_than_they_do(
    clients: int, dtype: torch.dtype
) -> None:
    noise = 1e-6 if dtype == torch.float32 else 1e-9  # of the inner products
    for kind, moves in updates(clients, seed=1):
        if dtype == torch.float32:
            moves = moves.astype(np.float32).astype(np.float64)
        units, norms = units_of(moves)
        factors = factors_of(moves, dtype)
        assert factors.min() >= 0, kind
        assert abs((factors * (norms + GUARD)).sum() / norms.mean() - 1) < 10 * noise, kind  # a mixture, so long
        move = factors @ moves
        length = np.linalg.norm(move)
        assert (units @ move).min() >= -1e-5 * norms.mean(), kind
        assert length <= norms.mean() * (1 + 10 * noise), kind
        if (apart := np.linalg.norm(units - units[0], axis=1).max()) > 1e-2:
            assert length < norms.mean() * (1 - 1e-6), kind
        elif apart < 1e-6:
            assert length == pytest.approx(norms.mean(), rel=1e-5), kind


def test_length_is_lost_exactly_when_directions_differ() -> None:
    for clients in (2, 3, 6, 7, 20, 50):
        rng = np.random.default_rng(clients)
        one = rng.standard_normal(40)
        scales = rng.uniform(0.5, 2, (clients, 1))
        same = scales * one
        assert np.linalg.norm(factors_of(same) @ same) == pytest.approx(units_of(same)[1].mean(), rel=1e-7)
        for odd in (1e-1, 1e-2, 1e-3):
            other = same.copy()
            other[-1] += odd * rng.standard_normal(40)
            loss = 1 - np.linalg.norm(factors_of(other) @ other) / units_of(other)[1].mean()
            angle = np.arccos(units_of(other)[0][0] @ units_of(other)[0][-1])
            assert loss == pytest.approx(1 - np.cos(angle / 2), rel=1e-3, abs=1e-8)


def test_two_clients_share_equally() -> None:
    for seed in range(200):
        rng = np.random.default_rng(seed)
        moves = rng.standard_normal((2, int(rng.integers(2, 30)))) * 10 ** rng.uniform(-2, 2, (2, 1))
        units, norms = units_of(moves)
        gram = torch.from_numpy(units @ units.T)[None]
        assert torch.allclose(min_norm_weights(gram)[0], torch.tensor([0.5, 0.5], dtype=torch.float64), atol=1e-6)
        assert np.allclose(factors_of(moves) * (norms + GUARD) / norms.mean(), 0.5, atol=1e-6)


@pytest.mark.parametrize("clients", [1, 2, 3, 6, 7, 13, 50])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_identical_updates_are_the_update(clients: int, dtype: torch.dtype) -> None:
    move = np.random.default_rng(clients).standard_normal(30).astype(np.float32).astype(np.float64)
    moves = np.repeat(move[None], clients, 0)
    precise = 1e-6 if dtype == torch.float32 else 1e-8
    assert np.abs(factors_of(moves, dtype) @ moves - move).max() < precise


@pytest.mark.parametrize("clients", [2, 3, 5, 6, 7, 8, 20, 50])
def test_a_longer_update_has_no_more_say(clients: int) -> None:
    """Rescaling any update changes how far the server goes, and not where to."""
    rng = np.random.default_rng(clients)
    for kind, moves in updates(clients, seed=2):
        factors = rng.uniform(0.1, 10, (clients, 1))
        directions = []
        for scaled in (moves, factors * moves):
            _, norms = units_of(scaled)
            directions.append(factors_of(scaled) @ scaled / norms.mean())
        assert np.linalg.norm(directions[0] - directions[1]) < 1e-5, kind


@pytest.mark.parametrize("clients", [4, 12])
def test_the_order_of_clients_does_not_matter(clients: int) -> None:
    order = np.random.default_rng(5).permutation(clients)
    for kind, moves in updates(clients, seed=3):
        assert np.linalg.norm(factors_of(moves[order]) @ moves[order] - factors_of(moves) @ moves) < 1e-4, kind


# ---- the two solvers ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("clients", range(1, 7))
def test_faces_and_wolfe_agree(clients: int) -> None:
    for seed in range(6):
        for kind, moves in updates(max(clients, 2), seed):
            units, _ = units_of(moves[:clients])
            gram = (units @ units.T)[None]
            rng = np.random.default_rng(seed)
            for there in (np.ones((1, clients), bool), rng.random((1, clients)) < 0.6):
                faces, wolfe = (solve(gram, there)[0] for solve in (_by_faces, _by_wolfe))
                for u in (faces, wolfe):
                    assert u.min() >= 0, kind
                    assert (u[~there[0]] == 0).all(), kind
                    assert u.sum() == pytest.approx(1.0 if there.any() else 0.0, abs=1e-12), kind
                assert abs(faces @ gram[0] @ faces - wolfe @ gram[0] @ wolfe) < 1e-9, kind
                assert np.linalg.norm((faces - wolfe) @ units) < 1e-5, kind


def test_the_number_of_clients_decides_who_solves(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    for name in ("_by_faces", "_by_wolfe"):
        solve = getattr(consensus, name)
        monkeypatch.setattr(consensus, name, lambda *a, n=name, s=solve: asked.append(n) or s(*a))
    for clients in (2, 6, 7, 50):
        min_norm_weights(torch.eye(clients, dtype=torch.float64)[None])
    assert asked == ["_by_faces", "_by_faces", "_by_wolfe", "_by_wolfe"]


@pytest.mark.parametrize("clients", [3, 6, 7, 25])
def test_many_problems_at_once_are_solved_apart(clients: int) -> None:
    problems = [units_of(moves)[0] for _, moves in updates(clients, seed=4)]
    grams = torch.stack([torch.from_numpy(units @ units.T) for units in problems])
    generator = torch.Generator().manual_seed(clients)
    present = torch.rand(len(grams), clients, generator=generator) < 0.7
    present[0] = False
    together = min_norm_weights(grams, present)
    for gram, own, u in zip(grams, present, together, strict=True):
        assert torch.equal(u, min_norm_weights(gram[None], own[None])[0])
        if own.any():
            assert not u[~own].any()
            alone = min_norm_weights(gram[own][:, own][None])[0]
            assert float(u @ gram @ u) == pytest.approx(float(alone @ gram[own][:, own] @ alone), abs=1e-9)
    assert torch.allclose(together[0], torch.full((clients,), 1 / clients, dtype=torch.float64))
    assert torch.allclose(together.sum(1), torch.ones(len(grams), dtype=torch.float64))


def test_what_is_given_is_not_changed() -> None:
    gram = torch.eye(4, dtype=torch.float64)[None] + 0.1
    start, ends = torch.zeros(3), [torch.rand(3) for _ in range(4)]
    kept = gram.clone(), start.clone(), [end.clone() for end in ends]
    min_norm_weights(gram, torch.tensor([[True, True, False, True]]))
    agreed(gram)
    gram_of(start, ends)
    assert torch.equal(gram, kept[0])
    assert torch.equal(start, kept[1])
    assert all(torch.equal(a, b) for a, b in zip(ends, kept[2], strict=True))


# ---- clients that stand still -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("clients", [2, 3, 6, 7, 20])
@pytest.mark.parametrize("tiny", [0.0, 5e-9])
def test_who_stands_still_is_left_out(clients: int, tiny: float) -> None:
    rng = np.random.default_rng(clients)
    moves = rng.standard_normal((clients, 60))
    still = sorted({0, clients // 2} if clients > 2 else {0})
    moves[still] *= tiny / np.linalg.norm(moves[still], axis=1, keepdims=True)
    going = [k for k in range(clients) if k not in still]
    factors = factors_of(moves)
    assert (factors[still] == 0).all()
    units, norms = units_of(moves)
    expected = norms.mean() * scipy_mixture(units[going]) @ units[going]  # the mean norm is over all of them
    assert np.linalg.norm(factors @ moves - expected) < 1e-6


@pytest.mark.parametrize("clients", [1, 2, 6, 7, 20])
@pytest.mark.parametrize("tiny", [0.0, 5e-9])
def test_where_all_stand_still_nothing_moves(clients: int, tiny: float) -> None:
    """An update below 1e-8 has no direction: nothing is left to go along."""
    moves = np.random.default_rng(clients).standard_normal((clients, 9))
    moves *= tiny / np.linalg.norm(moves, axis=1, keepdims=True)
    factors = factors_of(moves)
    assert np.isfinite(factors).all()
    assert (factors @ moves == 0).all()


# ---- inner products -----------------------------------------------------------------------------------------------------
def direct(start: Tensor, ends: list[Tensor]) -> Tensor:
    rows = torch.stack([(end - start).flatten() for end in ends]).double()
    return rows @ rows.T


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (8,), (9,), (3, 5), (2, 3, 4, 1), (0,)])
def test_inner_products_do_not_depend_on_the_chunks(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    start, *ends = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(5))
    precise = 1e-12 if dtype == torch.float64 else 1e-5
    for columns in (1, 2, 4, 1 << 16):
        monkeypatch.setattr(consensus, "COLUMNS", columns)
        found = gram_of(start, ends)
        assert found.dtype == torch.float64
        assert found.shape == (4, 4)
        assert torch.allclose(found, direct(start, ends), rtol=precise, atol=precise)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_inner_products_beyond_one_chunk(dtype: torch.dtype) -> None:
    size = 2 * consensus.COLUMNS + 3
    generator = torch.Generator().manual_seed(0)
    start, *ends = (torch.randn(size, generator=generator, dtype=dtype) for _ in range(4))
    found, expected = gram_of(start, ends), direct(start, ends)
    assert float((found - expected).abs().max() / expected.diagonal().max()) < (
        1e-13 if dtype == torch.float64 else 1e-6
    )
    assert torch.equal(found, found.T)
