"""The loss that is learnt: the little network, its norm with two derivatives, and the step on it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from fedshift.blocks.inner_step import stepped
from fedshift.core import rng
from fedshift.core.tree import Tensors, stack
from fedshift.systems.fedtta.learned_loss import NAMES, fresh, norms, scores

LIKE = torch.tensor([0.37], dtype=torch.float64)


def logits_of(count: int, classes: int = 10, seed: int = 0) -> Tensor:
    return 2 * rng.normal(seed, torch.arange(count), (classes,)).double()


def silent(loss: Tensors) -> Tensors:
    """A network that says zero to everything."""
    return {**loss, **{name: torch.zeros_like(loss[name]) for name in NAMES[-2:]}}


def module_of(loss: Tensors, classes: int) -> nn.Sequential:
    layers = [nn.Linear(classes, 32), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 1)]
    for number, layer in enumerate(layers):
        layer.double().load_state_dict({kind: loss[f"learned-loss.{number}.{kind}"] for kind in ("weight", "bias")})
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2], nn.ReLU(), layers[3])


@pytest.mark.parametrize("classes", [2, 10, 62, 100])
def test_it_is_three_hidden_layers_of_32_and_one_number(classes: int) -> None:
    loss = fresh(LIKE, classes)
    assert tuple(loss) == NAMES
    assert sum(leaf.numel() for leaf in loss.values()) == 32 * classes + 32 + 2 * (32 * 32 + 32) + 32 + 1
    assert classes != 10 or sum(leaf.numel() for leaf in loss.values()) == 2497
    x = logits_of(7, classes)
    assert torch.allclose(scores(loss, x), module_of(loss, classes)(x)[:, 0], rtol=0, atol=1e-13)


def test_it_is_drawn_as_torch_draws_and_for_each_start_anew() -> None:
    loss = fresh(LIKE, 10)
    for name, leaf in loss.items():
        bound = (10 if ".0." in name else 32) ** -0.5
        assert leaf.dtype == torch.float64
        assert leaf.abs().max() <= bound
        assert leaf.numel() < 100 or (leaf.abs().max() > 0.9 * bound and leaf.mean().abs() < 0.2 * bound)
    assert all(torch.equal(leaf, fresh(LIKE, 10)[name]) for name, leaf in loss.items())
    assert not any(torch.equal(leaf, fresh(LIKE + 1, 10)[name]) for name, leaf in loss.items())
    assert not torch.equal(loss[NAMES[2]], loss[NAMES[4]])


def test_the_order_of_samples_does_not_matter() -> None:
    loss, x = fresh(LIKE, 10), logits_of(9)
    assert torch.allclose(norms(loss, x, 9), norms(loss, x.flip(0), 9), rtol=1e-14, atol=0)


def test_a_sample_that_scores_zero_changes_nothing() -> None:
    loss = {name: leaf if "weight" in name else torch.zeros_like(leaf) for name, leaf in fresh(LIKE, 10).items()}
    x = logits_of(5)
    longer = torch.cat([x[:2], torch.zeros(1, 10, dtype=torch.float64), x[2:]])
    assert scores(loss, longer)[2] == 0
    assert norms(loss, longer, 6) == pytest.approx(float(norms(loss, x, 5)), abs=1e-15)


@pytest.mark.parametrize("count", [1, 3, 4, 5, 12, 13])
def test_every_chunk_has_its_own_norm_and_a_short_last_one_a_smaller_one(count: int) -> None:
    loss, x = fresh(LIKE, 10), logits_of(count)
    expected = [(scores(loss, part).square().sum() + 1e-12).sqrt() for part in x.split(4)]
    found = norms(loss, x, 4)
    assert len(found) == -(-count // 4)
    assert torch.allclose(found, torch.stack(expected), rtol=1e-14, atol=0)


def test_silence_has_no_slope_and_finite_second_derivatives() -> None:
    loss = {name: leaf.clone().requires_grad_() for name, leaf in silent(fresh(LIKE, 10)).items()}
    x = logits_of(6).requires_grad_()

    def second(norm: Tensor) -> tuple[Tensor, list[Tensor]]:
        (slope,) = torch.autograd.grad(norm, x, create_graph=True)
        moved = x - 0.5 * slope
        return slope, list(torch.autograd.grad((moved.square()).sum(), [x, *loss.values()]))

    slope, derivatives = second(norms(loss, x, 6).sum())
    assert not slope.any()
    assert all(leaf.isfinite().all() for leaf in derivatives)
    plain = second(scores(loss, x).norm())[1]  # what the root of a sum with nothing added gives
    assert not all(leaf.isfinite().all() for leaf in plain)


def test_the_second_derivative_is_right() -> None:
    loss, x = fresh(LIKE, 4), logits_of(3, 4).requires_grad_()
    names = list(loss)

    def value(x: Tensor, *leaves: Tensor) -> Tensor:
        return norms(dict(zip(names, leaves, strict=True)), x, 3).sum()

    leaves = [leaf.clone().requires_grad_() for leaf in loss.values()]
    assert torch.autograd.gradcheck(value, (x, *leaves), fast_mode=True)
    assert torch.autograd.gradgradcheck(value, (x, *leaves), fast_mode=True)


@pytest.mark.parametrize("clip", [None, 0.1, 100.0])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_a_step_is_torchs_sgd(clip: float | None, decay: float) -> None:
    start, slope = fresh(LIKE, 3), fresh(LIKE + 1, 3)
    parameters = [nn.Parameter(leaf.clone()) for leaf in start.values()]
    for parameter, grad in zip(parameters, slope.values(), strict=True):
        parameter.grad = grad.clone()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(parameters, clip)
    torch.optim.SGD(parameters, 0.7, weight_decay=decay).step()
    for rate in (0.7, torch.tensor(0.7, dtype=torch.float64)):
        after = stepped(start, slope, rate, decay, clip)
        for leaf, parameter in zip(after.values(), parameters, strict=True):
            assert torch.allclose(leaf, parameter, rtol=0, atol=1e-14)


def test_many_clients_at_once_have_their_own_losses() -> None:
    many = [fresh(LIKE + k, 5) for k in range(3)]
    x = torch.stack([logits_of(7, 5, seed=k) for k in range(3)])
    together = vmap(lambda tree, x: norms(tree["loss"], x, 4))(stack([{"loss": loss} for loss in many]), x)
    apart = torch.stack([norms(loss, one, 4) for loss, one in zip(many, x, strict=True)])
    assert torch.allclose(together, apart, rtol=1e-13, atol=0)
