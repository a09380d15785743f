"""Whether what is asked for fits into memory, asked before it is made."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

from fedshift.errors import UserError


def free_memory() -> int | None:
    """Bytes that can still be taken, within the limits of a container; None where the system does not say.

    >>> free_memory() > 0
    True
    """
    found = [size for size in (_of_machine(), _of_container()) if size is not None]
    return min(found) if found else None


def _of_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _of_container() -> int | None:
    here = Path("/sys/fs/cgroup")
    try:
        most, now = ((here / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return None if most == "max" else max(int(most) - int(now), 0)
    except (OSError, ValueError):
        return None


def gibibytes(size: float) -> str:
    """Bytes for people.

    >>> gibibytes(3 << 30), gibibytes(5e13)
    ('3.0 GiB', '46,566 GiB')
    """
    return f"{size / 2**30:,.{1 if size < 2**34 else 0}f} GiB"


def check_room(count: int, shape: Sequence[int]) -> None:
    """Refuse more images of this shape, a byte a number, than there is memory for."""
    need, free = count * math.prod(shape), free_memory()
    if free is not None and need > free:
        raise UserError(
            f"{count:,} images of {shape[2]:,}x{shape[1]:,} pixels need {gibibytes(need)} of memory, and {gibibytes(free)} "
            "are free: set a smaller [data] size"
        )
