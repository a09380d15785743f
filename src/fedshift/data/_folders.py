"""The scheme ``folder:``: pictures in folders that say their class, and perhaps their domain and split."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fedshift.data._pixels import in_threads
from fedshift.data._rows import SPLITS, Request, Rows, as_codes, ordered, refuse_columns
from fedshift.data._source_cache import cached, file_digest
from fedshift.data.pool import Pool
from fedshift.errors import UserError

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp"})


def folder(request: Request) -> Pool:
    refuse_columns(request)
    root = request.path(request.rest)
    if not root.is_dir():
        raise UserError(f'the source "{request.source}" is not a folder')
    names, folders = walk(root)
    levels = _levels(request, names, folders)
    digests = dict(zip(names, in_threads(file_digest, [root / name for name in names]), strict=True))

    def read() -> Rows:
        texts = {level: [name.split("/")[i] for name in names] for i, level in enumerate(levels)}
        labels = texts.pop("class")
        classes = ordered(labels)
        return Rows([root / name for name in names], names.__getitem__, as_codes(labels, classes, str), classes, texts)

    return cached(request, digests, read)


def walk(root: Path) -> tuple[list[str], list[str]]:
    """Pictures and folders below root as sorted relative names; hidden ones are no data."""
    files, folders = _walk(root)
    return [name for name in files if _is_picture(name)], folders


def others(root: Path) -> tuple[str, ...]:
    """The files below root that are no pictures."""
    return tuple(name for name in _walk(root)[0] if not _is_picture(name))


def _walk(root: Path) -> tuple[list[str], list[str]]:
    names: list[str] = []
    folders: list[str] = []
    for place, below, files in os.walk(root, followlinks=True):
        below[:] = sorted(name for name in below if not name.startswith((".", "__MACOSX")))
        here = Path(place).relative_to(root)
        folders += [(here / name).as_posix() for name in below]
        names += [(here / name).as_posix() for name in files if not name.startswith(".")]
    return sorted(names), folders


def _is_picture(name: str) -> bool:
    return Path(name).suffix.lower() in SUFFIXES


_LAYOUTS = {  # (is the outermost level a split?, number of levels) -> what the levels are
    (False, 1): ("class",),
    (False, 2): ("client", "class"),
    (True, 2): ("split", "class"),
    (True, 3): ("split", "client", "class"),
}


def _levels(request: Request, names: Sequence[str], folders: Sequence[str]) -> tuple[str, ...]:
    """What the folder levels mean, outermost first: some of split, client and class."""
    if not names:
        raise UserError(f'there are no pictures in the source "{request.source}"')
    depth = names[0].count("/")
    odd = next((name for name in names if name.count("/") != depth), None)
    if odd is not None:
        raise UserError(f'pictures lie at different depths in the source "{request.source}": {names[0]} and {odd}')
    filled = {"/".join(name.split("/")[:level]) for name in names for level in range(1, depth + 1)}
    hollow = next((folder for folder in folders if folder.count("/") < depth and folder not in filled), None)
    if hollow is not None:
        raise UserError(f'the folder "{hollow}" of the source "{request.source}" holds no pictures')
    outer = {name.split("/")[0] for name in names} if depth else set()
    splits = outer & set(SPLITS)
    if splits and splits != outer and depth > 1:
        raise UserError(
            f'the source "{request.source}" mixes split folders with others at its top: '
            f"{min(splits)} and {min(outer - splits)}"
        )
    levels = _LAYOUTS.get((bool(splits) and splits == outer, depth))
    if levels is None:
        raise UserError(
            f'pictures of the source "{request.source}" must lie in class/ or domain/class/, optionally below train/, '
            f"val/ and test/, unlike {names[0]}"
        )
    return levels
