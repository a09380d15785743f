"""One process at a time writes into a run folder: ``.lock`` says which, and the system frees it when that one dies.

The lock is the operating system's (``flock``), held for as long as the file is open; what is written inside is only for
people. Where there is no such lock (Windows, some network disks) the file itself is the lock: whoever made it owns it,
and it is taken over once its owner is seen to be dead, which can only be seen on the owner's own machine.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, get_args

from fedshift.errors import HostError, UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
MOST = 1 << 31  # no process has this number
TRIES, PAUSE = 6, 0.05  # one who only looks holds the lock for a moment too, and a new owner needs one to sign
CAREFUL = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # somebody may have put a link or a pipe there
Way = Literal["flock", "file"]


class Occupied(UserError):
    """Another process writes into this run folder."""


@dataclass(frozen=True)
class Owner:
    """Who writes into a run folder."""

    pid: int
    host: str
    since: str  # ISO
    started: str = ""  # when the process began, in the system's own count: a number may be given to another one later
    way: Way = "flock"

    @staticmethod
    def me(way: Way) -> Owner:
        """This process, from now on."""
        pid = os.getpid()
        return Owner(pid, platform.node(), datetime.now().astimezone().isoformat(), _started(pid), way)

    @property
    def here(self) -> bool:
        """Whether it is a process of this machine."""
        return self.host == platform.node()

    def __str__(self) -> str:
        begun = datetime.fromisoformat(self.since).astimezone()
        today = begun.date() == datetime.now().astimezone().date()
        return f"process {self.pid} on {self.host} since {begun:{'%H:%M' if today else '%Y-%m-%d %H:%M'}}"


class RunLock:
    """Held while a run folder is written; refuses in a sentence that names the process that holds it.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with RunLock(folder):
    ...     owner_of(folder).pid == os.getpid()
    True
    >>> owner_of(folder) is None
    True
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / LOCK
        self._held: tuple[int, Way] | None = None

    def __enter__(self) -> Self:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for trial in range(TRIES):
                time.sleep(PAUSE if trial else 0)
                self._held = _take(self._path)
                if self._held is not None:
                    return self
        except OSError as error:
            raise HostError.of(error, str(self._folder)) from None
        raise Occupied(_refusal(self._folder, _signed(self._path)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._held is None:
            return
        handle, way = self._held
        self._held = None
        if way == "flock":  # removed while it is held: nobody can have taken it in between
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(handle)
        else:  # Windows removes no file that is open
            os.close(handle)
            with contextlib.suppress(OSError):
                self._path.unlink()


@contextlib.contextmanager
def locked(folders: Iterable[Path]) -> Iterator[None]:
    """All of these folders, or none."""
    with contextlib.ExitStack() as stack:
        for folder in folders:
            stack.enter_context(RunLock(folder))
        yield


def owner_of(folder: Path) -> Owner | None:
    """The living process that writes into a run folder, if any."""
    path = folder / LOCK
    try:
        handle = os.open(path, os.O_RDONLY | CAREFUL)
    except OSError:
        return None
    try:
        free = _flocked(handle, exclusive=False)
        signed = _signed(path)
    finally:
        os.close(handle)
    if signed is None or (free and signed.way == "flock"):
        return None
    return signed if free is False or not _dead(signed, path) else None


def check_free(folder: Path) -> None:
    """Refuse a run folder that another process writes into."""
    owner = owner_of(folder)
    if owner is not None:
        raise Occupied(_refusal(folder, owner))


def _refusal(folder: Path, owner: Owner | None) -> str:
    path = folder / LOCK
    if owner is None:
        return f"{folder} is locked by a process that left no name; if none writes there, remove {path}"
    if owner.way == "file" and not owner.here:
        return f"{folder} is locked by {owner}, which cannot be looked at from here; if it has ended, remove {path}"
    doing = "scored" if (folder / "done").is_file() else "trained"
    return f"{folder} is being {doing} by {owner} (wait for it, or stop it first)"


def _take(path: Path) -> tuple[int, Way] | None:
    """Try once: the open file and how it is held, or nothing."""
    try:
        handle, made = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), True
    except FileExistsError:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise UserError(f"{path} is no file of fedshift's; remove it") from None
        try:
            handle, made = os.open(path, os.O_RDWR | CAREFUL), False
        except FileNotFoundError:  # just given back
            return None
    free = _flocked(handle, exclusive=True)
    way: Way | None = None
    if free and _still(handle, path):
        before = _signed(path)
        way = "flock" if before is None or before.way == "flock" or _dead(before, path) else None
    elif free is None and made:
        way = "file"
    if way is None:
        os.close(handle)
        if free is None:
            _take_away(path)
        return None
    os.ftruncate(handle, 0)
    os.write(handle, json.dumps(asdict(Owner.me(way))).encode())
    return handle, way


def _flocked(handle: int, exclusive: bool) -> bool | None:
    """Whether the system gave its lock; None if it has none for this file."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(handle, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES) else None
    return True


def _still(handle: int, path: Path) -> bool:
    """Whether the open file is still the one of this name: its last owner may have removed it meanwhile."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _signed(path: Path) -> Owner | None:
    """What is written in a lock; nothing if it is not signed yet."""
    try:
        if not path.is_file():
            return None
        found = Owner(**json.loads(path.read_text(encoding="utf-8")))
        words = (found.host, found.started)
        sound = type(found.pid) is int and 0 < found.pid < MOST and all(isinstance(word, str) for word in words)
        datetime.fromisoformat(found.since)
        return found if sound and found.way in get_args(Way) else None
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def _take_away(path: Path) -> None:
    """Remove the file of a dead owner."""
    seen = _signed(path)
    if seen is None or not _dead(seen, path):
        return
    aside = path.with_name(f"{LOCK}.{os.getpid()}")
    with contextlib.suppress(OSError):
        path.rename(aside)  # of two who want to take it over, one finds it gone
        if _signed(aside) == seen:
            aside.unlink()
        else:  # another one was faster, and this is its lock
            aside.rename(path)


def _dead(owner: Owner, path: Path) -> bool:
    """Whether the process that made a lock file has ended, as far as can be seen from here."""
    if not owner.here:
        return False
    if os.name == "nt":  # a living owner has the file open, and then it cannot be removed
        try:
            path.unlink()
        except OSError:
            return not path.exists()
        return True
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # somebody else's, and alive
        pass
    return bool(owner.started) and _started(owner.pid) not in ("", owner.started)


def _started(pid: int) -> str:
    """When a process began, where the system tells (Linux)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
