"""How much memory work has needed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch


def resident_peak() -> int | None:
    """The most bytes this process has had in memory so far, or None where the system does not say.

    >>> resident_peak() > 1_000_000
    True
    """
    status = Path("/proc/self/status")  # getrusage would count what the parent process had before this one began
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.is_file() else None
    if found:
        return int(found[1]) * 1024
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def memory_so_far(device: torch.device, before: int | None) -> dict[str, int]:
    """Peak memory: on CUDA what torch has allocated, on a CPU by how much the process outgrew its peak ``before``.

    Nothing if it did not: earlier work needed more, so that nobody knows what this work needed.

    >>> memory_so_far(torch.device("cpu"), before=1 << 60)
    {}
    """
    if device.type == "cuda":
        return {"memory-peak": torch.cuda.max_memory_allocated(device)}
    after = resident_peak()
    grown = after - before if after is not None and before is not None else 0
    return {"memory-grown": grown} if grown > 0 else {}
