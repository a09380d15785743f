"""The contrastive loss against a double loop, its exact values, its symmetries and its gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from fedshift.blocks.losses import contrastive


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def by_loops(z: Tensor, groups: Tensor, temperature: float) -> float:
    """The definition, with numbers: mean over anchors, mean over positives, log of a share of all others."""
    rows = [[x / math.sqrt(sum(y * y for y in row)) for x in row] for row in z.tolist()]
    total = 0.0
    for i, anchor in enumerate(rows):
        dots = [sum(a * b for a, b in zip(anchor, other, strict=True)) / temperature for other in rows]
        top = max(dot for a, dot in enumerate(dots) if a != i)
        others = top + math.log(sum(math.exp(dot - top) for a, dot in enumerate(dots) if a != i))
        positives = [p for p in range(len(rows)) if p != i and groups[p] == groups[i]]
        total -= sum(dots[p] - others for p in positives) / len(positives)
    return total / len(rows)


def two_views(count: int) -> Tensor:
    return torch.arange(count).repeat(2)


LABELS = {
    "ids": two_views(5),
    "labels": torch.tensor([0, 2, 2, 1, 0]).repeat(2),
    "one class": torch.zeros(10, dtype=torch.int64),
    "groups of other sizes": torch.tensor([3, 3, 3, 7, 7, 7, 7, 7, 0, 0]),
}


@pytest.mark.parametrize("temperature", [0.07, 0.5, 2.0])
@pytest.mark.parametrize("labels", LABELS)
def test_it_is_the_double_loop(labels: str, temperature: float) -> None:
    z, groups = 3 * normal(10, 4), LABELS[labels]
    assert float(contrastive(z, groups, temperature)) == pytest.approx(by_loops(z, groups, temperature), abs=1e-12)
    single = contrastive(z.float(), groups, temperature)
    assert single.dtype == torch.float32
    assert single.shape == ()
    assert float(single) == pytest.approx(by_loops(z, groups, temperature), rel=1e-5)


@pytest.mark.parametrize("batch", [1, 2, 5, 32])
@pytest.mark.parametrize("kind", ["ids", "labels", "one class"])
def test_where_all_are_alike_it_is_the_log_of_the_number_of_others(kind: str, batch: int) -> None:
    groups = {"ids": torch.arange(batch), "labels": torch.arange(batch) % 3, "one class": torch.zeros(batch).long()}
    z = normal(1, 6).expand(2 * batch, 6)
    for temperature in (0.07, 1.0):
        value = float(contrastive(z, groups[kind].repeat(2), temperature))
        assert value == pytest.approx(math.log(2 * batch - 1), abs=1e-12)


def test_lengths_do_not_matter() -> None:
    z, groups = normal(10, 4), LABELS["labels"]
    lengths = torch.arange(1, 11, dtype=torch.float64)[:, None]
    assert float(contrastive(z * lengths, groups, 0.07) - contrastive(z, groups, 0.07)) == pytest.approx(0, abs=1e-12)


def test_with_distinct_labels_supervision_says_nothing_new() -> None:
    z = normal(12, 5)
    ids = two_views(6)
    for labels in (torch.tensor([9, 4, 7, 1, 0, 3]).repeat(2), 100 + ids, 5 - ids):
        assert torch.equal(contrastive(z, labels, 0.07), contrastive(z, ids, 0.07))
    shared = torch.tensor([0, 1, 0, 1, 2, 2]).repeat(2)
    assert abs(float(contrastive(z, shared, 0.07) - contrastive(z, ids, 0.07))) > 0.1


@pytest.mark.parametrize("labels", LABELS)
def test_it_knows_no_order_and_no_directions(labels: str) -> None:
    z, groups = normal(10, 4), LABELS[labels]
    value = contrastive(z, groups, 0.1)
    for seed in range(5):
        order = torch.randperm(10, generator=torch.Generator().manual_seed(seed))
        assert float(contrastive(z[order], groups[order], 0.1) - value) == pytest.approx(0, abs=1e-12)
        turn = torch.linalg.qr(normal(4, 4, seed=seed))[0]
        assert float(contrastive(z @ turn, groups, 0.1) - value) == pytest.approx(0, abs=1e-11)
    mirror = torch.diag(torch.tensor([1.0, -1, 1, 1], dtype=torch.float64))
    assert float(contrastive(z @ mirror, groups, 0.1) - value) == pytest.approx(0, abs=1e-12)


def test_items_in_their_groups_order_are_not_what_matters() -> None:
    """Permuting items without their groups is another question."""
    z, groups = normal(10, 4), LABELS["labels"]
    order = torch.tensor([1, 0, 2, 3, 4, 5, 6, 7, 8, 9])
    assert abs(float(contrastive(z[order], groups, 0.1) - contrastive(z, groups, 0.1))) > 1e-3


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("temperature", [0.07, 1.0])
def test_the_gradient_is_the_slope(labels: str, temperature: float) -> None:
    z = normal(10, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: contrastive(z, LABELS[labels], temperature), (z,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("labels", ["ids", "labels", "one class"])
def test_gradients_are_finite_where_vectors_are_equal_or_nought(labels: str, dtype: torch.dtype) -> None:
    """A dead network gives zeros, a collapsed one the same vector for all."""
    groups = LABELS[labels]
    same = normal(1, 4, dtype=dtype).expand(10, 4).clone()
    some_zero = normal(10, 4, dtype=dtype)
    some_zero[[0, 3, 8]] = 0
    opposite = torch.cat([same[:5], -same[5:]])
    for z in (same, torch.zeros(10, 4, dtype=dtype), some_zero, opposite, 1e-20 * same, 1e10 * same):
        for temperature in (0.07, 1e-2):
            live = z.clone().requires_grad_()
            value = contrastive(live, groups, temperature)
            (slope,) = torch.autograd.grad(value, live)
            assert bool(value.isfinite())
            assert bool(slope.isfinite().all())
    assert float(contrastive(torch.zeros(10, 4, dtype=dtype), groups, 0.07)) == pytest.approx(math.log(9), rel=1e-6)


def test_one_image_has_nothing_to_be_told_from() -> None:
    z = normal(2, 4).requires_grad_()
    value = contrastive(z, torch.zeros(2, dtype=torch.int64), 0.07)
    (slope,) = torch.autograd.grad(value, z)
    assert float(value.detach()) == pytest.approx(0, abs=1e-12)
    assert float(slope.abs().max()) < 1e-12


def test_going_down_pulls_views_together_and_pushes_images_apart() -> None:
    z, groups = normal(8, 3), two_views(4)
    for _ in range(500):
        z = z - 0.5 * grad(contrastive)(z, groups, 0.2)
    cosine = torch.nn.functional.normalize(z, dim=1) @ torch.nn.functional.normalize(z, dim=1).T
    same = (groups[:, None] == groups) & ~torch.eye(8, dtype=torch.bool)
    assert float(cosine[same].min()) > 0.95
    assert float(cosine[groups[:, None] != groups].max()) < 0.2


def test_many_at_once_are_each_on_its_own() -> None:
    z, groups = normal(3, 10, 4), torch.stack([LABELS[name] for name in ("ids", "labels", "one class")])
    values = vmap(lambda z, g: contrastive(z, g, 0.07))(z, groups)
    slopes = vmap(grad(lambda z, g: contrastive(z, g, 0.07)))(z, groups)
    for k in range(3):
        assert float(values[k] - contrastive(z[k], groups[k], 0.07)) == pytest.approx(0, abs=1e-12)
        live = z[k].clone().requires_grad_()
        (slope,) = torch.autograd.grad(contrastive(live, groups[k], 0.07), live)
        assert float((slopes[k] - slope).abs().max()) < 1e-12
    shared = vmap(lambda z: contrastive(z, LABELS["ids"], 0.07))(z)  # groups that are the same for all
    assert float(shared[1] - contrastive(z[1], LABELS["ids"], 0.07)) == pytest.approx(0, abs=1e-12)


def test_nothing_is_changed_in_place() -> None:
    z, groups = normal(10, 4), LABELS["labels"].clone()
    before = z.clone(), groups.clone()
    contrastive(z, groups, 0.07)
    assert torch.equal(z, before[0])
    assert torch.equal(groups, before[1])
