"""Vision transformer in three sizes, without dropout; its attention is plain matrix products.

Products can be vmapped and differentiated twice; fused attention kernels cannot be differentiated twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from fedshift.core.options import NonNegativeInt
from fedshift.core.registry import model
from fedshift.errors import UserError
from fedshift.models.mlp import Headed
from fedshift.models.pretrained import load_pretrained

SIZES = {"tiny": (192, 3), "small": (384, 6), "base": (768, 12)}  # features, attention heads
DEPTH = 12


@model("vit", paper="ViT", venue="ICLR", year=2021)
@dataclass(frozen=True)
class ViT:
    """Vision transformer of 12 pre-norm blocks with a class token and learnt positions.

    Dosovitskiy et al., An image is worth 16x16 words. FDSE's ViT-B/8 is ``size="base", patch=8``: at 224 pixels and with
    1000 classes it has 86,576,872 parameters (ViT-B/16 has 86,567,656). Entries have timm's names behind ``body.``;
    positions belong to one image size, and weights for another size are refused.

    >>> network = ViT(size="tiny").make((3, 32, 32), classes=10)
    >>> sum(p.numel() for p in network.parameters())
    5381194
    """

    size: Literal["tiny", "small", "base"] = "small"
    patch: NonNegativeInt = 8  # side of a patch in pixels
    weights: str = ""  # safetensors to start from: a file, or hub:OWNER/NAME; see models/pretrained.py

    def make(self, shape: Sequence[int], classes: int) -> nn.Module:
        """The network for images of this shape."""
        channels, height, width = shape
        if self.patch < 1 or height % self.patch or width % self.patch:
            raise UserError(
                f"model 'vit' cannot cut images of {height}x{width} pixels into patches of {self.patch}x{self.patch}; "
                "choose a patch that divides both sides, or another image size"
            )
        features, heads = SIZES[self.size]
        tokens = (height // self.patch) * (width // self.patch)
        network = Headed(Transformer(channels, self.patch, tokens, features, heads), features, classes)
        load_pretrained(network, self.weights)
        return network


class Transformer(nn.Module):
    """Patches to the class token's features."""

    def __init__(self, channels: int, patch: int, tokens: int, features: int, heads: int) -> None:
        super().__init__()
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(channels, features, patch, patch)})
        self.cls_token = nn.Parameter(torch.zeros(1, 1, features))
        self.pos_embed = nn.Parameter(torch.zeros(1, tokens + 1, features))
        self.blocks = nn.Sequential(*(EncoderBlock(features, heads) for _ in range(DEPTH)))
        self.norm = nn.LayerNorm(features, eps=1e-6)
        for leaf in (self.cls_token, self.pos_embed):
            nn.init.trunc_normal_(leaf, std=0.02)
        self.apply(init_linear)

    def forward(self, x: Tensor) -> Tensor:
        """Features of images."""
        patches = self.patch_embed["proj"](x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls_token.expand(patches.shape[0], -1, -1), patches], 1) + self.pos_embed
        features: Tensor = self.norm(self.blocks(tokens))[:, 0]
        return features


class EncoderBlock(nn.Module):
    """Attention and a two-layer perceptron, each behind LayerNorm and beside a shortcut."""

    last = ("mlp.fc2", "")  # what a method replaces that changes one layer of every block; nothing normalises after it

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(features, eps=1e-6)
        self.attn = Attention(features, heads)
        self.norm2 = nn.LayerNorm(features, eps=1e-6)
        hidden = 4 * features
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(features, hidden), "fc2": nn.Linear(hidden, features)})

    def forward(self, x: Tensor) -> Tensor:
        """The block's tokens."""
        x = x + self.attn(self.norm1(x))
        mixed: Tensor = x + self.mlp["fc2"](gelu(self.mlp["fc1"](self.norm2(x))))
        return mixed


class Attention(nn.Module):
    """Self-attention over all tokens."""

    def __init__(self, features: int, heads: int, bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(features, 3 * features, bias=bias)
        self.proj = nn.Linear(features, features)

    def forward(self, x: Tensor) -> Tensor:
        """Every token's mixture of all tokens."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mixing = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1)
        mixed: Tensor = self.proj((mixing @ v).transpose(1, 2).flatten(2))
        return mixed


def init_linear(layer: nn.Module) -> None:
    """The usual start of a transformer's linear layers: small normal weights, no bias."""
    if isinstance(layer, nn.Linear):
        nn.init.trunc_normal_(layer.weight, std=0.02)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
