"""Concept shift: every client sees the world turned by an angle of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from fedshift.data.pool import Pool
from fedshift.errors import UserError


@dataclass(frozen=True)
class Rotation:
    """``[rotation]``: client i is turned by angle i of its list, counter-clockwise in degrees, starting over at the end.

    Training clients take the angles of ``seen``, unseen ones those of ``unseen`` (rotated MNIST of FedTTA, appendix F).
    """

    seen: tuple[float, ...] = ()
    unseen: tuple[float, ...] = ()
    resample: Literal["bilinear", "bicubic"] = "bilinear"  # bicubic: Pillow's, as in FedTTA's released code

    def __post_init__(self) -> None:
        """Refuse angles that are none."""
        for angle in (*self.seen, *self.unseen):
            if not math.isfinite(angle):
                raise UserError(f"[rotation] angles must be finite numbers, not {angle}")

    def angles(self, seen: Sequence[str], unseen: Sequence[str]) -> dict[str, float]:
        """Every client's own angle.

        >>> Rotation(seen=(0, 30)).angles(["a", "b", "c"], ["z"])
        {'a': 0, 'b': 30, 'c': 0, 'z': 0.0}
        """
        pairs = ((seen, self.seen), (unseen, self.unseen))
        return {
            name: (angles[i % len(angles)] if angles else 0.0)
            for names, angles in pairs
            for i, name in enumerate(names)
        }

    def apply(self, pool: Pool, owned: Mapping[str, Tensor], angles: Mapping[str, float]) -> Pool:
        """The pool with every client's images turned; nobody owns an image together with another client."""
        images = pool.images.clone()
        for name, index in owned.items():
            if angles[name] % 360:
                images[index] = rotate(pool.images[index], angles[name], self.resample)
        return replace(pool, images=images)

    def __bool__(self) -> bool:
        return bool(self.seen or self.unseen)


def rotate(images: Tensor, degrees: float, resample: Literal["bilinear", "bicubic"] = "bilinear") -> Tensor:
    """Turn uint8 images counter-clockwise about their centre; black outside. Quarter turns are exact.

    >>> x = torch.arange(4, dtype=torch.uint8).reshape(1, 1, 2, 2)
    >>> rotate(x, 90).flatten().tolist()
    [1, 3, 0, 2]
    """
    if images.shape[2] != images.shape[3]:
        raise UserError("rotations need square images; set [data] size")
    quarters = degrees / 90
    if quarters == int(quarters):
        return torch.rot90(images, int(quarters) % 4, (2, 3))
    if resample == "bicubic":
        return _by_pillow(images, degrees)
    angle = math.radians(degrees)
    # rows of the grid point down, so this matrix looks up where a pixel came from before a counter-clockwise turn
    matrix = torch.tensor([[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]])
    grid = F.affine_grid(matrix.expand(1, 2, 3), [1, *images.shape[1:]], align_corners=False)
    turned = F.grid_sample(images.float(), grid.expand(len(images), -1, -1, -1), mode="bilinear", align_corners=False)
    return turned.round().clamp(0, 255).to(torch.uint8)


def _by_pillow(images: Tensor, degrees: float) -> Tensor:
    planes = images.flatten(0, 1).numpy()
    turned = [np.asarray(Image.fromarray(plane).rotate(degrees, Image.Resampling.BICUBIC)) for plane in planes]
    return torch.from_numpy(np.stack(turned)).view_as(images) if turned else images
