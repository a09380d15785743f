"""Folders that belong to a living process; those of the dead are swept.

A folder belongs to the process that holds a lock on the file ``owner`` in it. The system drops that lock however the
process ends, so a folder that can be locked has no owner any more. Numbers of processes would not do: another container
that shares the place has its own.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: nothing is swept there
    fcntl = None  # type: ignore[assignment]

OWNER = "owner"


def claimed(place: Path | None, prefix: str) -> tuple[Path, int]:
    """A new folder that only this user may look into, and the lock that makes it this process's own."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        lock = os.open(path / OWNER, os.O_CREAT | os.O_RDWR, 0o600)
        if _locked(lock) is not False and (path / OWNER).exists():
            return path, lock
        os.close(lock)  # a sweeper came between two of these lines


def sweep(place: Path, prefix: str) -> None:
    """Remove the folders whose owners are dead."""
    for path in place.glob(f"{prefix}*"):
        try:
            lock = os.open(path / OWNER, os.O_RDWR)  # that of another user cannot be opened
        except OSError:  # not such a folder, or somebody else was faster
            continue
        if _locked(lock):
            removed(path, lock)
        else:
            os.close(lock)


def removed(path: Path, lock: int) -> None:
    """Give a folder up: it is removed, if it is still there under this name."""
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


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
