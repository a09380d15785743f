"""Folders for what processes tell each other, in memory or in the temporary folder; those of the dead are swept."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path

from fedshift.data import _own_folders

MEMORY = Path("/dev/shm")
PREFIX = "fedshift-"


class Scratch:
    """A folder that is gone when it is closed or its process has ended; if that was killed, when the next one starts."""

    def __init__(self, place: str | None = None) -> None:
        sweep()
        where = None if place is None else Path(place)
        self.path, lock = _own_folders.claimed(where, f"{PREFIX}{os.getpid()}-")
        self.close = weakref.finalize(self, _own_folders.removed, self.path, lock)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def roomy_memory() -> str | None:
    """Memory-backed storage if there is room for a data set in it."""
    try:
        return str(MEMORY) if shutil.disk_usage(MEMORY).free > 2 << 30 and os.access(MEMORY, os.W_OK) else None
    except OSError:
        return None


def sweep() -> None:
    """Remove the folders whose owners are dead."""
    for place in {MEMORY, Path(tempfile.gettempdir())}:
        _own_folders.sweep(place, PREFIX)
