"""Where results may be written: links in a folder of somebody else's are never followed."""

from __future__ import annotations

from pathlib import Path

from fedshift.errors import UserError


def fresh(path: Path) -> Path:
    """A file to write anew, whose folder is there. A link of its name is removed: what it leads to stays as it is.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "mine.txt").write_text("mine")
    >>> (folder / "results.txt").symlink_to(folder / "mine.txt")
    >>> _ = fresh(folder / "results.txt").write_text("new")
    >>> (folder / "mine.txt").read_text()
    'mine'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink() or (path.is_file() and path.stat().st_nlink > 1):
        path.unlink()
    return path


def within(folder: Path, name: str) -> Path:
    """A folder that results go to by default, below one that may be somebody else's: it must not be a link."""
    path = folder / name
    if path.is_symlink():
        raise UserError(f"{path} is a link, which may lead anywhere; name a folder with --out")
    return path
