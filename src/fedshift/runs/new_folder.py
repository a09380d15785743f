"""A folder that is written whole or not at all, and never over something."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from fedshift.errors import HostError, UserError


def check_free(folder: Path) -> None:
    """Refuse to write over something."""
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{folder} is there already; choose another folder with --out, or remove it")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A place to write into, which becomes ``folder`` at the end; after a failure nothing of it is left.

    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "deep" / "new"
    >>> with new_folder(target) as place:
    ...     _ = (place / "a.txt").write_text("a")
    >>> [path.name for path in files_in(target)]
    ['a.txt']
    """
    check_free(folder)
    made = [parent for parent in folder.parents if not parent.exists()]
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        yield temporary
        for path in files_in(temporary):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        os.rename(temporary, folder)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        for parent in made:
            with suppress(OSError):
                parent.rmdir()
        if isinstance(error, OSError | SafetensorError):
            raise HostError.of(error, str(folder), "make room, or choose another with --out") from None
        raise


def files_in(folder: Path) -> list[Path]:
    """All files below a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(files, key=lambda path: (len(path.parts), path))  # what lies in the folder itself comes first


def digest_of(path: Path) -> str:
    """Of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
