"""What a convolution is, beside its numbers."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, TypeAlias

Pair: TypeAlias = tuple[int, int]  # down and across
Shape: TypeAlias = tuple[int, int, int, int]  # of a batch of images, or kernels


class Role(Enum):
    """What a tensor is to a convolution; K clients come first."""

    IMAGES = "images"  # (K, N, C, H, W)
    KERNELS = "kernels"  # (K, D, C, R, S)
    OUTPUTS = "outputs"  # (K, N, D, OH, OW), or gradients of them


class Geometry(NamedTuple):
    """Heights and widths.

    >>> Geometry(image=(32, 32), size=(5, 5), stride=(1, 1), padding=(2, 2)).positions
    (32, 32)
    """

    image: Pair
    size: Pair
    stride: Pair
    padding: Pair

    @property
    def frame(self) -> Pair:
        """The image with its padding."""
        return self.image[0] + 2 * self.padding[0], self.image[1] + 2 * self.padding[1]

    @property
    def positions(self) -> Pair:
        """How many outputs lie below and beside each other."""
        return positions(self.frame, self.size, self.stride)


def positions(frame: Pair, size: Pair, stride: Pair) -> Pair:
    """Of a kernel in a frame.

    >>> positions((9, 11), (3, 3), (2, 2))
    (4, 5)
    """
    return (frame[0] - size[0]) // stride[0] + 1, (frame[1] - size[1]) // stride[1] + 1
