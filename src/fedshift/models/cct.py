"""Compact convolutional transformer, the transformer of the FedTHE paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedshift.core.registry import model
from fedshift.errors import UserError
from fedshift.models.mlp import Headed
from fedshift.models.pretrained import load_pretrained
from fedshift.models.vit import Attention, init_linear

FEATURES, HEADS, DEPTH = 128, 2, 4


@model("cct4", paper="FedTHE", venue="ICLR", year=2023)
@dataclass(frozen=True)
class CCT4:
    """CCT-4/3x2: two 3x3 convolutions make the tokens, four transformer blocks mix them, attention pools them.

    Hassani et al., Escaping the big data paradigm with compact transformers (2021), with learnt positions, 128 features
    and two attention heads as in FedTHE: the published 0.48 million parameters. The original's dropout and stochastic
    depth are left out, so that the network is deterministic.

    >>> network = CCT4().make((3, 32, 32), classes=10)
    >>> sum(p.numel() for p in network.parameters())
    482123
    """

    weights: str = ""  # safetensors file to start from

    def make(self, shape: Sequence[int], classes: int) -> nn.Module:
        """The network for images of this shape."""
        channels, height, width = shape
        if min(height, width) < 4:
            raise UserError(f"model 'cct4' needs images of at least 4x4 pixels, not {height}x{width}")
        tokens = ((height + 3) // 4) * ((width + 3) // 4)
        network = Headed(Compact(channels, tokens), FEATURES, classes)
        load_pretrained(network, self.weights)
        return network


class Compact(nn.Module):
    """Convolutional tokens to pooled features."""

    def __init__(self, channels: int, tokens: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((channels, 64), (64, FEATURES)):
            convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)
            nn.init.kaiming_normal_(convolution.weight)
            layers += [convolution, nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
        self.tokenizer = nn.Sequential(*layers)
        self.positions = nn.Parameter(nn.init.trunc_normal_(torch.zeros(1, tokens, FEATURES), std=0.2))
        self.blocks = nn.Sequential(*(CompactBlock() for _ in range(DEPTH)))
        self.norm = nn.LayerNorm(FEATURES)
        self.pool = nn.Linear(FEATURES, 1)
        self.apply(init_linear)

    def forward(self, x: Tensor) -> Tensor:
        """Features of images: the tokens' mean, weighted by how much each asks to be seen."""
        tokens = self.tokenizer(x).flatten(2).transpose(1, 2) + self.positions
        tokens = self.norm(self.blocks(tokens))
        features: Tensor = (self.pool(tokens).softmax(1) * tokens).sum(1)
        return features


class CompactBlock(nn.Module):
    """Attention and a two-layer perceptron; the second norm is on the main path, as in the authors' code."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(FEATURES)
        self.attn = Attention(FEATURES, HEADS, bias=False)
        self.norm2 = nn.LayerNorm(FEATURES)
        self.mlp = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.GELU(), nn.Linear(FEATURES, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        """The block's tokens."""
        x = self.norm2(x + self.attn(self.norm1(x)))
        mixed: Tensor = x + self.mlp(x)
        return mixed
