"""Randomness as a pure function: every number drawn anywhere is a function of a seed and a position.

There is no generator object and no hidden state. A draw is computed from ``(seed, id, counter)`` with the SplitMix64
finaliser in 64-bit integer arithmetic, so it is the same bit pattern on a CPU, on a GPU, in another process, in
another batch and in another version of any library. That is what lets engines agree, runs resume and streams keep
their bytes when a client is added.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_A = -0x40A7B892E31B1A47  # 0xBF58476D1CE4E5B9
_MIX_B = -0x6B2FB644ECCEEE15  # 0x94D049BB133111EB


def seed_of(*parts: object) -> int:
    """A 63-bit seed that is a function of all parts, for instance of (run seed, round, client, purpose).

    >>> seed_of(0, 3, "hospital-a", "batches") == seed_of(0, 3, "hospital-a", "batches")
    True
    >>> seed_of(0, 3, "hospital-a", "batches") == seed_of(0, 3, "hospital-b", "batches")
    False
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift (torch shifts signed integers arithmetically)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser: a bijection of 64-bit integers whose output looks random for consecutive inputs."""
    x = (x ^ _shift_right(x, 30)) * _MIX_A
    x = (x ^ _shift_right(x, 27)) * _MIX_B
    return x ^ _shift_right(x, 31)


def bits(seed: int | Tensor, ids: Tensor, shape: Sequence[int] = ()) -> Tensor:
    """64 random bits as int64 for every id and every position of ``shape``; result ``[len(ids), *shape]``.

    ``seed`` may be a tensor with one seed for each id (many clients at once).

    >>> a = bits(7, torch.arange(5), (3,))
    >>> torch.equal(a[2:4], bits(7, torch.tensor([2, 3]), (3,)))    # an id's numbers do not depend on its neighbours
    True
    """
    count = math.prod(shape)
    start = seed if isinstance(seed, Tensor) else torch.tensor(seed, dtype=torch.int64, device=ids.device)
    keys = _mix(_mix(ids.to(torch.int64) * _GOLDEN + start) + start)
    positions = torch.arange(1, count + 1, dtype=torch.int64, device=ids.device) * _GOLDEN
    return _mix(keys[:, None] + positions).reshape(len(ids), *shape)


def uniform(seed: int | Tensor, ids: Tensor, shape: Sequence[int] = ()) -> Tensor:
    """Float32 uniform on [0, 1), 24 bits each: ``[len(ids), *shape]``.

    >>> float(uniform(1, torch.arange(10_000)).mean().sub(0.5).abs()) < 0.01
    True
    """
    return _shift_right(bits(seed, ids, shape), 40).to(torch.float32) * 2.0**-24


def normal(seed: int | Tensor, ids: Tensor, shape: Sequence[int] = ()) -> Tensor:
    """Float32 standard normal by Box-Muller: ``[len(ids), *shape]``.

    Computed in double precision and then rounded: libraries differ in the last bit of a logarithm, and that bit is lost.

    >>> z = normal(1, torch.arange(10_000))
    >>> abs(float(z.mean())) < 0.05 and abs(float(z.std()) - 1) < 0.05
    True
    """
    raw = bits(seed, ids, shape)
    radius = (_shift_right(raw, 32).to(torch.float64) + 1.0) * 2.0**-32
    angle = (raw & 0xFFFFFF).to(torch.float64) * (2.0 * math.pi * 2.0**-24)
    return (torch.sqrt(-2.0 * torch.log(radius)) * torch.cos(angle)).to(torch.float32)


def integers(seed: int | Tensor, ids: Tensor, high: int, shape: Sequence[int] = ()) -> Tensor:
    """Int64 uniform on {0, ..., high-1}: ``[len(ids), *shape]``.

    >>> sorted(set(integers(3, torch.arange(100), 4).tolist()))
    [0, 1, 2, 3]
    """
    return _shift_right(bits(seed, ids, shape), 1) % high


def permutations(seed: int, rows: int, n: int) -> Tensor:
    """``rows`` independent permutations of 0..n-1 as an int64 tensor ``[rows, n]``.

    >>> sorted(permutations(0, 2, 5)[1].tolist())
    [0, 1, 2, 3, 4]
    """
    keys = bits(seed, torch.arange(rows), (n,)).numpy()
    return torch.from_numpy(np.argsort(keys, axis=1))  # several times faster than torch's; 64-bit keys do not tie


def permutation(seed: int, n: int) -> Tensor:
    """One permutation of 0..n-1.

    >>> permutation(0, 0).tolist()
    []
    """
    return permutations(seed, 1, n)[0]
