"""Domain-shift erasers: layers whose smaller half is a client's own and turns its features into everybody's.

A layer with T outputs becomes a domain-agnostic extractor (DFE) of half as many and a cheap depth-wise eraser (DSE) for the
rest. The extractor and the outer normalisation are shared; the eraser and the inner normalisation belong to the client.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedshift.core.tree import Tensors
from fedshift.errors import UserError

OWN = ("dse.weight", "dse_norm.weight", "dse_norm.bias")
ANCHORS = ("dfe_norm.running_mean", "dfe_norm.running_var")
TRACKED = ("tracked_mean", "tracked_var")
STATISTICS = ("dse_norm.running_mean", "dse_norm.running_var", "dse_norm.num_batches_tracked")
AT_HOME = (*STATISTICS, *TRACKED, "tracked_steps")
REASONS = {"erasers": "domain-shift erasers, which method 'fdse' makes of layers with BatchNorm ([model] norm = true)"}


class DepthWise(nn.Module):
    """Makes more of every channel: a small convolution of maps, or a factor for single numbers."""

    def __init__(self, channels: int, times: int, kernel: int) -> None:
        super().__init__()
        self.channels, self.kernel = channels, kernel
        self.weight = nn.Parameter(torch.empty(channels * times, 1, kernel, kernel))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(self, u: Tensor) -> Tensor:
        """``times`` channels for each."""
        if u.dim() == 2:
            return (u[:, :, None] * self.weight.view(self.channels, -1)).flatten(1)
        return F.conv2d(u, self.weight, padding=self.kernel // 2, groups=self.channels)


class Eraser(nn.Module):
    """In place of a layer with T outputs and the BatchNorm after it.

    ``u = BN_DSE(DFE x)``, ``X = [u, DSE u]`` cut to T channels, output ``BN_DFE X``. In training mode it tracks mean and
    variance of X over the batches since ``tracked_steps`` was last zero; :meth:`Arch.encode` returns both, with gradient
    through the newest batch, among a pass's inner activations.
    """

    capability = "erasers"
    exposed = TRACKED
    tracked_mean: Tensor
    tracked_var: Tensor
    tracked_steps: Tensor

    def __init__(
        self, layer: nn.Conv2d | nn.Linear, norm: nn.Module | None, expansion: int, kernel: int, relu: bool, bias: bool
    ) -> None:
        super().__init__()
        wide = layer.out_channels if isinstance(layer, nn.Conv2d) else layer.out_features
        half = math.ceil(wide / expansion)
        self.dfe = _narrower(layer, half, bias)
        self.dse_norm = nn.BatchNorm2d(half) if isinstance(layer, nn.Conv2d) else nn.BatchNorm1d(half)
        self.relu = relu
        self.dse = DepthWise(half, expansion - 1, kernel if isinstance(layer, nn.Conv2d) else 1)
        self.bias = nn.Parameter(torch.zeros(wide)) if bias and layer.bias is not None else None
        self.dfe_norm = norm if norm is not None else nn.BatchNorm1d(wide)
        self.old = 1 - (getattr(self.dfe_norm, "momentum", None) or 0.1)  # how much of what was tracked stays
        for name in TRACKED:
            self.register_buffer(name, torch.zeros(wide))
        self.register_buffer("tracked_steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, T, H, W], numbers [B, T] or tokens [B, N, T]."""
        if x.dim() == 3:  # tokens are so many samples
            tokens: Tensor = self.forward(x.flatten(0, 1)).unflatten(0, x.shape[:2])
            return tokens
        u = self.dse_norm(self.dfe(x))
        u = u.relu() if self.relu else u
        both = torch.cat([u, self.dse(u)], 1)[:, : len(self.tracked_mean)]
        if self.bias is not None:
            both = both + self.bias.view(-1, *[1] * (both.dim() - 2))
        if self.training:
            self._track(both)
        erased: Tensor = self.dfe_norm(both)
        return erased

    def _track(self, both: Tensor) -> None:
        over = [0, *range(2, both.dim())]
        old = self.old * (self.tracked_steps > 0).to(both.dtype)  # the first batch stands for itself
        # the variance BatchNorm keeps is the unbiased one
        for buffer, now in ((self.tracked_mean, both.mean(over)), (self.tracked_var, both.var(over))):
            buffer.copy_(old * buffer + (1 - old) * now)
        self.tracked_steps.add_(1)


def _narrower(layer: nn.Conv2d | nn.Linear, outputs: int, bias: bool) -> nn.Module:
    """The same kind of layer with fewer outputs."""
    biased = bias and layer.bias is not None
    if isinstance(layer, nn.Linear):
        return nn.Linear(layer.in_features, outputs, bias=biased)
    if layer.groups != 1:
        raise UserError("method 'fdse' cannot divide a grouped convolution")
    return nn.Conv2d(
        layer.in_channels,
        outputs,
        cast(tuple[int, int], layer.kernel_size),
        cast(tuple[int, int], layer.stride),
        layer.padding,  # type: ignore[arg-type]
        cast(tuple[int, int], layer.dilation),
        bias=biased,
        padding_mode=layer.padding_mode,
    )


# ---- what belongs to whom, and how far features are from everybody's ------------------------------------------------
def entries(blocks: Iterable[str], names: Iterable[str]) -> frozenset[str]:
    """The entries of these names of all blocks.

    >>> sorted(entries(["body.0"], ["dse.weight"]))
    ['body.0.dse.weight']
    """
    return frozenset(f"{block}.{name}" for block in blocks for name in names)


def fresh_tracking(model: Mapping[str, Tensor], blocks: Iterable[str], from_anchor: bool = False) -> Tensors:
    """Tracked statistics that start with the next batch, or from the shared ones (``from_anchor``)."""
    made: Tensors = {}
    for block in blocks:
        for tracked, anchor in zip(TRACKED, ANCHORS, strict=True):
            shared = model[f"{block}.{anchor}"]
            made[f"{block}.{tracked}"] = shared.clone() if from_anchor else torch.zeros_like(shared)
        steps = torch.zeros_like(next(iter(made.values())).sum())
        made[f"{block}.tracked_steps"] = steps + 1 if from_anchor else steps
    return made


def inconsistency(
    seen: Mapping[str, Tensor], anchor: Mapping[str, Tensor], blocks: tuple[str, ...], beta: float
) -> Tensor:
    """How far the tracked statistics (``seen``) are from the shared ones (``anchor``), later blocks weighted more.

    ``sum_l w_l (mean_c (M - mu)^2 + (mean_c V - mean_c var)^2)`` with ``w = softmax(beta l)``.
    """
    like = seen[f"{blocks[0]}.tracked_mean"]
    total = torch.zeros_like(like.sum())
    highest = max(0.0, beta * (len(blocks) - 1))
    raw = [math.exp(beta * number - highest) for number in range(len(blocks))]
    for weight, block in zip(raw, blocks, strict=True):
        (mean, variance), (mu, sigma) = (
            [tensors[f"{block}.{name}"] for name in names] for tensors, names in ((seen, TRACKED), (anchor, ANCHORS))
        )
        total = total + weight / sum(raw) * ((mean - mu).square().mean() + (variance.mean() - sigma.mean()).square())
    return total
