"""Files of a run: read whole or called damaged by name, written whole or not at all.

Whoever reads a file of a run reads it here. What is not what was written is :class:`Damaged`: the sentence names the file,
says what is wrong with it, and what to do about it. What follows from other files is made again by repeating the run;
what does not (states, metrics) is never replaced by itself.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fedshift.errors import HostError, UserError

T = TypeVar("T")
AGAIN = "repeat its fedshift run to make it again, finished rounds are not run again"
LOST = "put it back from a copy, or train this run again with fedshift run ... --restart"
GONE = "put it back from a copy, or remove the folder of this run and train it again"
ENDED = "go on with fedshift run ... --resume, which writes it again"
STATES = re.compile(r"(metrics\.jsonl|openings\.json|ckpt-\d+\.safetensors|best\.safetensors|best/.+\.safetensors)$")
TEMPORARY = re.compile(r"\..+\.\d+")
GO_ON = "what was written before is whole: make room, then go on with --resume"


class Damaged(UserError):
    """A file of a run is not what was written.

    >>> print(Damaged(Path("runs/a/costs.json"), "it is empty"))
    runs/a/costs.json is damaged (it is empty); repeat its fedshift run to make it again, finished rounds are not run again
    >>> print(Damaged(Path("runs/a/best.safetensors"), "missing", "copy it"))
    runs/a/best.safetensors is missing; copy it
    """

    def __init__(self, path: Path, why: str, remedy: str = "") -> None:
        self.path, self.why = path, why
        what = why if why == MISSING else f"damaged ({why})"
        super().__init__(f"{path} is {what}; {remedy or remedy_of(path, why)}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Whole in another process too."""
        return UserError, (str(self),)


MISSING = "missing"


def remedy_of(path: Path, why: str = "") -> str:
    """What to do about a damaged file of a run."""
    if path.is_dir():
        return "remove that folder, then repeat the fedshift run"
    if path.name == "done":
        return ENDED
    if not STATES.search(path.as_posix()):
        return AGAIN
    return GONE if why == MISSING else LOST


def attempt(read: Callable[[], T], damaged: list[Damaged]) -> T | None:
    """What is read, or nothing: then it is added to the damaged ones.

    >>> found: list[Damaged] = []
    >>> attempt(lambda: read_text(Path("nowhere/notes.txt")), found), [one.why for one in found]
    (None, ['missing'])
    """
    try:
        return read()
    except Damaged as error:
        damaged.append(error)
        return None


# ---- reading -------------------------------------------------------------------------------------------------------------
def read_bytes(path: Path, remedy: str = "") -> bytes:
    """A file's content; one that is not there or is no file is damaged, one that the system refuses is not."""
    check_file(path, remedy)
    try:
        return path.read_bytes()
    except OSError as error:
        raise HostError(f"{path} cannot be read ({error.strerror})") from None


def check_file(path: Path, remedy: str = "") -> None:
    """Refuse what is no file: one would wait for ever for the end of a pipe or a device.

    >>> check_file(Path("/dev/null"))
    Traceback (most recent call last):
    ...
    fedshift.store.files.Damaged: /dev/null is damaged (it is no file); repeat its fedshift run ...
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise Damaged(path, MISSING, remedy) from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Damaged(path, "it is a link to itself", remedy) from None
        raise HostError(f"{path} cannot be read ({error.strerror})") from None
    if not stat.S_ISREG(mode):
        raise Damaged(path, "it is a folder" if stat.S_ISDIR(mode) else "it is no file", remedy)


def read_text(path: Path, remedy: str = "") -> str:
    """A text file's content."""
    try:
        return read_bytes(path, remedy).decode()
    except UnicodeDecodeError:
        raise Damaged(path, "it is no text", remedy) from None


def parsed(path: Path, read: Callable[[], T], where: str = "", remedy: str = "") -> T:
    """What ``read`` makes of a file's content, which may have any shape.

    >>> parsed(Path("costs.json"), lambda: json.loads("[1")["a"])
    Traceback (most recent call last):
    ...
    fedshift.store.files.Damaged: costs.json is damaged (it is no JSON); repeat its fedshift run to make it again, ...
    """
    try:
        return read()
    except Damaged:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise Damaged(path, where + _why(error), remedy) from None


def _why(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return "it is no JSON"
    if isinstance(error, tomllib.TOMLDecodeError):
        return f"it is no TOML: {error}"
    if isinstance(error, KeyError):
        return f"it has no {error}"
    return str(error) if isinstance(error, ValueError) else f"it has another shape: {error}"


# ---- writing -------------------------------------------------------------------------------------------------------------
def write(path: Path, content: str | bytes, hint: str = GO_ON) -> None:
    """Write a file, all or nothing: it appears under its name only when it is complete and on disk.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "notes.txt"
    >>> write(path, "one")
    >>> [file.name for file in path.parent.iterdir()], path.read_text()
    (['notes.txt'], 'one')
    """
    plain = content.encode() if isinstance(content, str) else content
    replace_with(path, lambda temporary: temporary.write_bytes(plain), hint)


def replace_with(path: Path, make: Callable[[Path], object], hint: str = GO_ON) -> None:
    """:func:`write` for whoever writes files for himself; ``make`` is given a name to write to.

    ``hint`` is what to do where the system says no.
    """
    if path.is_dir():
        raise Damaged(path, "it is a folder")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        make(temporary)
        flush(temporary)
        os.replace(temporary, path)
        flush(path.parent)
    except OSError as error:
        raise HostError.of(error, str(path), hint) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Wait until a file, or who is in a folder, is on disk; some systems cannot say so of folders."""
    folder = path.is_dir()
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:
        if folder:
            return
        raise
    try:
        os.fsync(handle)
    except OSError:
        if not folder:
            raise
    finally:
        os.close(handle)


def append(path: Path, line: str) -> None:
    """Add a line to a file; it is on disk after :func:`flush`."""
    try:
        with open(path, "a", encoding="utf-8", newline="\n", opener=_no_link) as file:
            file.write(line + "\n")
    except IsADirectoryError:
        raise Damaged(path, "it is a folder") from None
    except OSError as error:
        raise HostError.of(error, str(path), GO_ON) from None


def _no_link(path: str, flags: int) -> int:
    """A link in a folder of somebody else's is not followed."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def sweep(folder: Path) -> None:
    """Remove what killed processes had begun to write into a folder; nobody may write there meanwhile."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if TEMPORARY.fullmatch(path.name):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
