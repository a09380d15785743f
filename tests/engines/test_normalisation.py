"""BatchNorm of stacked clients is torch's, whatever computes it."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

from fedshift.engines.cuda import normalisation, trilinear
from fedshift.engines.cuda.convolutions import StackedNormalisation

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
HAS_GPU = torch.cuda.is_available() and trilinear.works(torch.device("cuda"))
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


@pytest.mark.skipif(not (INTERPRETED or HAS_GPU), reason="needs a GPU, or Triton and TRITON_INTERPRET=1")
@pytest.mark.parametrize("shape", [(3, 5, 4, 42), (2, 40, 3, 64), (5, 7, 16, 1)])
def test_normalisation_kernels(shape: tuple[int, ...]) -> None:
    from fedshift.engines.cuda import norm_kernels

    there = torch.device("cuda" if HAS_GPU else "cpu")
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(shape, generator=generator) * 3 + 20 for _ in range(2))
    weight, bias = (torch.rand(shape[0], shape[2], generator=generator) for _ in range(2))
    given = [one.to(there) for one in (x, weight, bias)]
    found = [one.cpu().double() for one in norm_kernels.normalised(*given, 1e-5)]
    expected = normalisation._Normalised.forward(x.double(), weight.double(), bias.double(), 1e-5)
    torch.testing.assert_close(found, list(expected), rtol=1e-4, atol=1e-4)
    _, mean, var = expected
    rstd = (var + 1e-5).rsqrt()
    back = norm_kernels.gradients(*(one.float().to(there) for one in (g, x, mean, rstd, weight)))
    slopes = normalisation._Back.forward(g.double(), x.double(), mean, rstd, weight.double())
    for one, other in zip(back, slopes, strict=True):
        assert float((one.cpu().double() - other).norm() / other.norm()) < 1e-4
