"""Folders for what processes tell each other, in memory or in the temporary folder; those of the dead are swept.

A folder belongs to the process that holds a lock on the file ``owner`` in it. The system drops that lock however the
process ends, so a folder that can be locked has no owner any more. Numbers of processes would not do: another container
that shares the place has its own.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: nothing is swept there
    fcntl = None  # type: ignore[assignment]

MEMORY = Path("/dev/shm")
OWNER = "owner"


class Scratch:
    """A folder that is gone when it is closed or its process has ended; if that was killed, when the next one starts."""

    def __init__(self, place: str | None = None) -> None:
        sweep()
        self.path, lock = _claimed(place)
        self.close = weakref.finalize(self, _removed, self.path, lock)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def sweep() -> None:
    """Remove the folders whose owners are dead."""
    for place in {MEMORY, Path(tempfile.gettempdir())}:
        for path in place.glob("fedshift-*"):
            try:
                lock = os.open(path / OWNER, os.O_RDWR)  # that of another user cannot be opened
            except OSError:  # not such a folder, or somebody else was faster
                continue
            if _locked(lock):
                _removed(path, lock)
            else:
                os.close(lock)


def _claimed(place: str | None) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"fedshift-{os.getpid()}-", dir=place))
        lock = os.open(path / OWNER, os.O_CREAT | os.O_RDWR, 0o600)
        if _locked(lock) is not False and (path / OWNER).exists():
            return path, lock
        os.close(lock)  # a sweeper came between two of these lines


def _locked(file: int) -> bool | None:
    """Whether the lock is ours now; None where there are no locks, and nothing is swept."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _removed(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)
