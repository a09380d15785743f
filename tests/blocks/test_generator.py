"""The server's generator against torch modules and loops over heads, and the inequality its loss obeys."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from fedshift.blocks import generator
from fedshift.blocks.generator import STATISTICS
from fedshift.core import rng
from fedshift.core.optim import Adam
from fedshift.core.tree import Tensors, drop

CLASSES, NOISE, HIDDEN, FEATURES = 3, 4, 10, 5


def normal(seed: int, *shape: int) -> Tensor:
    return rng.normal(seed, torch.arange(shape[0]), shape[1:]).double()


def made(seed: int = 0) -> Tensors:
    return generator.fresh(normal(seed, 1), CLASSES, NOISE, HIDDEN, FEATURES)


class Slow(nn.Module):
    """The generator as torch would have it."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()
        hidden, reads = tensors["inner.weight"].shape
        self.inner = nn.Linear(reads, hidden, bias=False)
        self.norm = nn.BatchNorm1d(hidden)
        self.outer = nn.Linear(hidden, len(tensors["outer.bias"]))
        self.double()
        self.load_state_dict({name: leaf.clone() for name, leaf in tensors.items()}, strict=False)

    def forward(self, labels: Tensor, noise: Tensor) -> Tensor:
        given = torch.zeros(len(labels), self.inner.in_features - noise.shape[1], dtype=torch.float64)
        for row, label in enumerate(labels.tolist()):
            given[row, label] = 1
        found: Tensor = self.outer(self.norm(self.inner(torch.cat([given, noise], 1))).relu())
        return found

    def tensors(self) -> Tensors:
        return drop(dict(self.state_dict()), ["norm.num_batches_tracked"])


def slow_ensemble_loss(heads: Sequence[Tensors], features: Tensor, labels: Tensor) -> Tensor:
    """Sample by sample and head by head."""
    total = torch.zeros((), dtype=torch.float64)
    for feature, label in zip(features, labels.tolist(), strict=True):
        mean = torch.zeros((), dtype=torch.float64)
        for head in heads:
            logits = head["head.weight"] @ feature + head.get("head.bias", 0)
            mean = mean + logits.softmax(0)[label] / len(heads)
        total = total - mean.log()
    return total / len(features)


def some_heads(count: int, bias: bool = True, scale: float = 1.0) -> list[Tensors]:
    rows = [{"head.weight": scale * normal(k, CLASSES, FEATURES), "body": normal(k, 2)} for k in range(count)]
    return [{**row, "head.bias": scale * normal(50 + k, CLASSES)} for k, row in enumerate(rows)] if bias else rows


def stacked(heads: Sequence[Tensors]) -> Tensors:
    return generator.stacked_heads(heads, frozenset(name for name in heads[0] if name.startswith("head.")))


def batch(steps: int = 5, size: int = 8) -> tuple[Tensor, Tensor]:
    return rng.integers(1, torch.arange(steps), CLASSES, (size,)), normal(2, steps, size, NOISE)


def far(a: Tensors, b: Tensors) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


# ---- the generator ------------------------------------------------------------------------------------------------------
def test_a_fresh_generator_is_drawn_as_torch_draws_layers() -> None:
    tensors = generator.fresh(torch.ones(1), 10, 512, 4096, 512)
    for name, reads in (("inner.weight", 522), ("outer.weight", 4096), ("outer.bias", 4096)):
        assert float(tensors[name].abs().max()) <= 1.00001 / math.sqrt(reads)
        assert float(tensors[name].std()) == pytest.approx(1 / math.sqrt(3 * reads), rel=0.1)
        assert abs(float(tensors[name].mean())) < 0.1 / math.sqrt(reads)
    assert sum(leaf.numel() for name, leaf in tensors.items() if name not in STATISTICS) == 4_243_968  # 4.25 M
    assert tensors.keys() == Slow(made()).tensors().keys()


def test_another_start_of_the_run_draws_another_generator() -> None:
    assert far(made(0), made(0)) == 0
    assert far(made(0), made(1)) > 0.1
    assert made()["inner.weight"].dtype == torch.float64
    assert generator.fresh(torch.ones(1), 2, 3, 4, 5)["outer.weight"].dtype == torch.float32


@pytest.mark.parametrize("batch_stats", [False, True])
def test_features_are_torchs(batch_stats: bool) -> None:
    tensors = {**made(), "norm.running_mean": normal(8, HIDDEN), "norm.running_var": normal(9, HIDDEN).exp()}
    tensors = {**tensors, "norm.weight": normal(10, HIDDEN), "norm.bias": normal(11, HIDDEN)}
    before = {name: leaf.clone() for name, leaf in tensors.items()}
    slow = Slow(tensors).train(batch_stats)
    labels, noise = (part[0] for part in batch())
    found, refreshed = generator.generated(tensors, labels, noise, batch_stats)
    assert torch.allclose(found, slow(labels, noise), rtol=0, atol=1e-13)
    assert found.shape == (8, FEATURES)
    assert set(refreshed) == (set(STATISTICS) if batch_stats else set())
    assert far({**tensors, **refreshed}, slow.tensors()) < 1e-13
    assert far(tensors, before) == 0  # nothing is changed in place


def test_features_depend_on_label_and_noise() -> None:
    noise = normal(1, 6, NOISE)
    zero, one = (generator.generated(made(), torch.full((6,), label), noise)[0] for label in (0, 1))
    assert float((zero - one).abs().min(1).values.max()) > 0
    assert float((zero[0] - zero[1]).abs().max()) > 1e-3


def test_many_generators_at_once() -> None:
    tensors = [made(seed) for seed in range(3)]
    labels, noise = batch(3)
    together = vmap(lambda t, y, e: generator.generated(t, y, e)[0])(
        {name: torch.stack([one[name] for one in tensors]) for name in tensors[0]}, labels, noise
    )
    for k in range(3):
        assert torch.allclose(together[k], generator.generated(tensors[k], labels[k], noise[k])[0], atol=1e-14)


# ---- heads --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("count", [1, 4])
def test_stacked_heads_say_what_each_head_says(count: int, bias: bool) -> None:
    heads = some_heads(count, bias)
    features, labels = normal(7, 6, FEATURES), torch.tensor([0, 1, 2, 2, 1, 0])
    found = generator.log_likelihoods(stacked(heads), features, labels)
    assert found.shape == (count, 6)
    for k, head in enumerate(heads):
        for row in range(6):
            logits = F.linear(features[row], head["head.weight"], head.get("head.bias"))
            assert float(found[k, row]) == pytest.approx(float(logits.log_softmax(0)[labels[row]]), abs=1e-13)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_the_ensembles_loss_is_the_loop_over_clients(count: int, bias: bool) -> None:
    heads = some_heads(count, bias)
    features, labels = normal(7, 9, FEATURES), rng.integers(3, torch.arange(9), CLASSES)
    found = generator.ensemble_loss(stacked(heads), features, labels)
    assert float(found) == pytest.approx(float(slow_ensemble_loss(heads, features, labels)), abs=1e-13)


def test_the_ensembles_loss_is_at_most_the_mean_cross_entropy() -> None:
    """Jensen: with equality when all heads agree, and for one head."""
    labels = rng.integers(3, torch.arange(9), CLASSES)

    def both(heads: Sequence[Tensors], features: Tensor) -> tuple[float, float]:
        each = [F.cross_entropy(F.linear(features, h["head.weight"], h["head.bias"]), labels) for h in heads]
        return float(generator.ensemble_loss(stacked(heads), features, labels)), float(torch.stack(each).mean())

    for seed in range(20):
        features = normal(100 + seed, 9, FEATURES)
        together, apart = both(some_heads(5), features)
        assert together < apart - 1e-3
        for heads in (some_heads(1), some_heads(1) * 4):
            assert both(heads, features)[0] == pytest.approx(both(heads, features)[1], abs=1e-13)


def test_heads_that_are_certain_and_wrong_give_finite_losses() -> None:
    heads = stacked(some_heads(3, scale=1e4))
    features = normal(7, 9, FEATURES).requires_grad_()
    value = generator.ensemble_loss(heads, features, torch.zeros(9, dtype=torch.int64))
    (slope,) = torch.autograd.grad(value, [features])
    assert float(value.detach()) > 100
    assert bool(slope.isfinite().all())


# ---- training -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_steps_are_torchs_and_go_on_where_they_stopped(decay: float) -> None:
    heads = some_heads(4)
    rule = Adam(lr=0.01, weight_decay=decay)
    tensors = made()
    memory = rule.memory(drop(tensors, STATISTICS))
    slow = Slow(tensors).train()
    optimiser = torch.optim.Adam(slow.parameters(), 0.01, weight_decay=decay)
    objective = lambda z, y, _: generator.ensemble_loss(stacked(heads), z, y)  # noqa: E731
    for part in range(2):
        labels, noise = (rows[3 * part : 3 * part + 3] for rows in batch(6))
        tensors, memory, losses = generator.trained(tensors, memory, rule, objective, labels, noise)
        for step in range(3):
            optimiser.zero_grad()
            value = slow_ensemble_loss(heads, slow(labels[step], noise[step]), labels[step])
            value.backward()
            optimiser.step()
            assert float(losses[step]) == pytest.approx(float(value.detach()), abs=1e-11)
        assert far(tensors, slow.tensors()) < 1e-11
    assert float(memory["t/inner.weight"]) == 6


def test_the_loss_falls() -> None:
    heads = stacked(some_heads(4))
    rule = Adam(lr=0.01)
    tensors = made()
    labels, noise = batch(60)
    objective = lambda z, y, _: generator.ensemble_loss(heads, z, y)  # noqa: E731
    after, _, losses = generator.trained(
        tensors, rule.memory(drop(tensors, STATISTICS)), rule, objective, labels, noise
    )
    assert float(losses[-10:].mean()) < 0.7 * float(losses[:10].mean())
    fixed = [objective(generator.generated(t, labels[0], noise[0])[0], labels[0], noise[0]) for t in (tensors, after)]
    assert float(fixed[1]) < 0.7 * float(fixed[0])  # in inference mode too


def test_training_moves_the_generator_alone() -> None:
    heads = {name: leaf.requires_grad_() for name, leaf in stacked(some_heads(3)).items()}
    before = {name: leaf.detach().clone() for name, leaf in heads.items()}
    rule, tensors = Adam(lr=0.01), made()
    start = {name: leaf.clone() for name, leaf in tensors.items()}
    objective = lambda z, y, _: generator.ensemble_loss(heads, z, y)  # noqa: E731
    after, _, _ = generator.trained(tensors, rule.memory(drop(tensors, STATISTICS)), rule, objective, *batch())
    assert all(leaf.grad is None for leaf in heads.values())
    assert far({name: leaf.detach() for name, leaf in heads.items()}, before) == 0
    assert far(tensors, start) == 0
    assert all(not torch.equal(after[name], start[name]) for name in start)
    assert all(not leaf.requires_grad for leaf in after.values())


def test_no_steps_change_nothing() -> None:
    rule, tensors = Adam(), made()
    memory = rule.memory(drop(tensors, STATISTICS))
    labels, noise = batch(0)
    after, kept, losses = generator.trained(tensors, memory, rule, lambda z, *_: z.sum(), labels, noise)
    assert far(after, tensors) == far(kept, memory) == 0
    assert len(losses) == 0
