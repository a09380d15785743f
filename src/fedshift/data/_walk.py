"""The files below a folder, and which of them are pictures."""

from __future__ import annotations

import os
import re
from pathlib import Path

from fedshift.data._rows import line
from fedshift.data.dicom import DICOM_HEAD, is_dicom
from fedshift.errors import UserError

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".dcm", ".dicom", ".ima"})
# files without a picture among them, before somebody is asked whether the folder is the right one
MOST_OTHERS = 200_000
_NO_SUFFIX = re.compile(r"|\.\d+")  # IM000001, or 1.2.840.113619.2.55


def walk(root: Path) -> tuple[list[str], list[str]]:
    """Pictures and folders below root as sorted relative names; hidden ones are no data."""
    files, folders = _walk(root)
    return [name for name in files if is_picture(root / name)], folders


def others(root: Path) -> tuple[str, ...]:
    """The files below root that are no pictures."""
    return tuple(name for name in _walk(root)[0] if not is_picture(root / name))


def _walk(root: Path) -> tuple[list[str], list[str]]:
    """Files and folders. Links are followed, but no folder is read twice: loops of links would never end."""
    names: list[str] = []
    folders: list[str] = []
    seen = {_identity(folder) for folder in (root, *root.resolve().parents)}
    todo = [("", root)]
    while todo:
        above, folder = todo.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError as error:
            raise UserError(f'"{folder}" cannot be read: {line(error)}') from error
        for entry in entries:
            name = above + entry.name
            if entry.name.startswith((".", "__MACOSX")):
                continue
            if not _is_utf8(name):
                raise UserError(f'the name of "{name}" in "{root}" is not UTF-8: give it another one')
            if entry.is_dir():
                if (identity := _identity(Path(entry.path))) in seen:
                    raise UserError(f'"{name}" in "{root}" leads to a folder that is there, or above it, already')
                seen.add(identity)
                folders.append(name)
                todo.append((f"{name}/", Path(entry.path)))
            elif entry.is_file() or not _called_picture(name):
                names.append(name)
            else:  # a pipe or a device, which one could read for ever, or a link that leads nowhere
                raise UserError(f'"{name}" in "{root}" is no ordinary file')
        if len(names) > MOST_OTHERS and not any(is_picture(root / name) for name in names[:MOST_OTHERS]):
            raise UserError(f'there are more than {MOST_OTHERS:,} files below "{root}", but no picture among the first')
    return sorted(names), sorted(folders)


def _identity(folder: Path) -> tuple[int, int]:
    there = folder.stat()
    return there.st_dev, there.st_ino


def _is_utf8(name: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in name)


def is_picture(path: Path) -> bool:
    """Whether a file is a picture: by its suffix, or, where it has none, as scanners name DICOM files, by its first bytes.

    >>> is_picture(Path("scan.TIF")), is_picture(Path("notes.txt"))
    (True, False)
    """
    if _called_picture(path.name):
        return True
    if not _NO_SUFFIX.fullmatch(path.suffix) or path.name.upper() == "DICOMDIR":  # the last: a list of others
        return False
    try:
        with path.open("rb") as file:
            return is_dicom(file.read(DICOM_HEAD))
    except OSError:
        return False


def _called_picture(name: str) -> bool:
    return Path(name).suffix.lower() in SUFFIXES
