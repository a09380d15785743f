"""Noise: Gaussian, of counted photons, and of dead pixels."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from fedshift.data.corruptions.draws import Corruption, Draws


def _gaussian_noise(x: Tensor, draws: Draws, c: tuple[float, ...]) -> Tensor:
    """Add N(0, c) to every value."""
    return x + draws.normal("noise", x.shape[1:]) * (255.0 * c[0])


def _shot_noise(x: Tensor, draws: Draws, c: tuple[float, ...]) -> Tensor:
    """Poisson(x·c)/c, by inverting the distribution function: there are only 256 rates, so it is one sorted table.

    Thresholds and draws are 24-bit integers; row v of the table is offset by v·2**24, which keeps the whole sorted and
    finds value and rate in one search.
    """
    photons = c[0]
    counts = int(photons + 9.0 * photons**0.5 + 20.0)  # beyond this every distribution function is one to 24 bits
    rates = torch.arange(256, dtype=torch.float64)[:, None] * (photons / 255.0)
    k = torch.arange(counts, dtype=torch.float64)
    cdf = torch.exp(torch.xlogy(k, rates) - rates - torch.lgamma(k + 1)).cumsum(1)
    thresholds = (cdf * 2**24).round().clamp(max=2**24).long() + (torch.arange(256) << 24)[:, None]
    levels = x.long()
    found = torch.searchsorted(
        thresholds.flatten().to(x.device), draws.bits24("photons", x.shape[1:]) + (levels << 24), right=True
    )
    return (found - levels * counts).float() * (255.0 / photons)


def _impulse_noise(x: Tensor, draws: Draws, c: tuple[float, ...]) -> Tensor:
    """Set a fraction c of the values to black or white, half each."""
    chance = draws.uniform("impulse", x.shape[1:])
    return x.masked_fill(chance < c[0], 255.0).masked_fill(chance < c[0] / 2, 0.0)


CORRUPTIONS: Mapping[str, Corruption] = MappingProxyType(
    {
        "gaussian-noise": _gaussian_noise,
        "shot-noise": _shot_noise,
        "impulse-noise": _impulse_noise,
    }
)
