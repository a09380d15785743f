"""BatchNorm of stacked clients is torch's, whatever computes it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

from fedshift.engines.cuda import convolutions, normalisation
from fedshift.engines.cuda.convolutions import StackedNormalisation

SHAPES = [(4, 5, 3, 7, 6), (3, 9, 4), (2, 2, 5, 1, 1)]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_normalisation_by_own_statistics(shape: tuple[int, ...], affine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    x, target = (torch.randn(shape, dtype=torch.double, generator=generator) * 2 + 1 for _ in range(2))
    channels = (shape[0], shape[2])
    weight, bias, mean, var = (torch.rand(channels, dtype=torch.double, generator=generator) for _ in range(4))
    calls: list[int] = []
    real = normalisation.batch_norm
    monkeypatch.setattr(normalisation, "batch_norm", lambda *given: (calls.append(1), real(*given))[1])

    def loss(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, target: Tensor) -> tuple:
        mean, var = mean.clone(), var.clone()
        scale = (weight, bias) if affine else (None, None)
        y = F.batch_norm(x, mean, var, *scale, training=True, momentum=0.3)
        return (y * target).sin().sum(), (mean, var)

    stacked = vmap(grad(loss, (0, 1, 2), has_aux=True))
    expected = stacked(x, weight, bias, mean, var, target)
    assert not calls
    monkeypatch.setattr(normalisation, "suits", lambda _: False)
    with StackedNormalisation():
        torch.testing.assert_close(stacked(x, weight, bias, mean, var, target), expected)
        assert not calls
        monkeypatch.undo()
        monkeypatch.setattr(normalisation, "batch_norm", lambda *given: (calls.append(1), real(*given))[1])
        asked = iter([True])  # by whoever chooses; the formula takes the place of kernels
        monkeypatch.setattr(normalisation, "suits", lambda _: next(asked, False))
        torch.testing.assert_close(stacked(x, weight, bias, mean, var, target), expected)
    assert calls


def test_steps_through_steps_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normalisation, "suits", lambda _: True)
    monkeypatch.setattr(normalisation, "batch_norm", None)
    x, weight = torch.randn(3, 4, 2, dtype=torch.double), torch.rand(3, 2, dtype=torch.double)

    def inner(x: Tensor, weight: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, weight, training=True).sin().sum()

    def outer(x: Tensor, weight: Tensor) -> Tensor:
        return grad(inner)(x, weight).square().sum()

    expected = vmap(grad(outer))(x, weight)
    with StackedNormalisation():
        torch.testing.assert_close(vmap(grad(outer))(x, weight), expected)


def test_more_numbers_than_kernels_can_count_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normalisation, "suits", lambda _: True)
    monkeypatch.setattr(normalisation, "batch_norm", None)
    monkeypatch.setattr(convolutions, "ADDRESSABLE", 2 * 3 * 5)
    x = torch.randn(4, 2, 3, 5)
    with StackedNormalisation():
        found = vmap(lambda x: F.batch_norm(x, None, None, training=True))(x)
    torch.testing.assert_close(found, vmap(lambda x: F.batch_norm(x, None, None, training=True))(x))
