"""The kernels of ``implicit.py`` against torch's convolutions, number by number in Triton's interpreter.

Run by ``test_convolutions.py`` in a process of its own, with TRITON_INTERPRET=1; it computes in float32 on a CPU.
"""

from __future__ import annotations

import torch

from fedshift.engines import trilinear
from fedshift.engines.trilinear import BY_GROUPS, BY_KERNELS, Geometry, Role


def check(channels: int, out: int, geometry: Geometry) -> None:
    """Each of the three from the other two."""
    pairs = zip(*geometry, strict=True)
    places = ((image + 2 * pad - size) // step + 1 for image, size, step, pad in pairs)
    given = {
        Role.IMAGES: torch.randn(2, 3, channels, *geometry.image),
        Role.KERNELS: torch.randn(2, out, channels, *geometry.size),
        Role.ANSWERS: torch.randn(2, 3, out, *places),
    }
    for role, make in BY_KERNELS.items():
        expected = BY_GROUPS[role](given, geometry)
        torch.testing.assert_close(make(given, geometry), expected, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    assert trilinear.implicit is not None
    torch.manual_seed(0)
    for channels, out in ((3, 32), (32, 5), (64, 96)):
        for size, stride, padding in (
            ((3, 3), (1, 1), (1, 1)),
            ((5, 5), (1, 1), (2, 2)),
            ((3, 3), (2, 2), (1, 1)),
            ((1, 1), (2, 2), (0, 0)),
            ((3, 5), (2, 1), (1, 2)),
            ((2, 2), (1, 1), (2, 2)),  # more zeros around than a kernel reaches
        ):
            check(channels, out, Geometry((9, 11), size, stride, padding))
