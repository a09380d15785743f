"""The scheme ``folder:``: pictures in folders that say their class, and perhaps their domain and split.

A CSV file in the folder may say more of each picture: its group, its hospital, even its class.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedshift.data._columns import group_hint
from fedshift.data._pixels import in_threads
from fedshift.data._rows import SPLITS, Request, Rows, as_codes, facts_of, line, ordered, refuse_columns, with_hints
from fedshift.data._sheet import find_sheet
from fedshift.data._source_cache import cached, file_digest
from fedshift.data.pool import Pool
from fedshift.errors import UserError

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp"})
MOST_OTHERS = (
    200_000  # files without a picture among them, before somebody is asked whether the folder is the right one
)


def folder(request: Request) -> Pool:
    root = request.path(request.rest)
    if not root.is_dir():
        raise UserError(f'the source "{request.source}" is not a folder')
    names, folders = walk(root)
    sheet, hints = find_sheet(request, root, names) if names else (None, [])
    if sheet is None:
        refuse_columns(request, ", or put a CSV file that names the pictures into the folder")
    # where the class is in the table, folders are only places
    flat = sheet is not None and ("label" in (request.columns or {}) or not any("/" in name for name in names))
    levels = () if flat else _levels(request, names, folders)
    roles = {} if sheet is None else sheet.roles(request.columns, levels, flat)
    paths = {name: root / name for name in names} | ({} if sheet is None else {sheet.path.name: sheet.path})
    digests = dict(zip(paths, in_threads(file_digest, list(paths.values())), strict=True))

    def read() -> Rows:
        texts = {level: [name.split("/")[i] for name in names] for i, level in enumerate(levels)}
        if sheet is None:
            return _rows(root, names, texts, {}, {})
        for use in request.attributes:
            sheet.check(use, "attributes")
        texts |= {
            "class" if role == "label" else role: (
                sheet.texts(column) if role == "group" else sheet.required(role, column, names)
            )
            for role, column in roles.items()
        }
        if "class" not in texts:
            raise UserError(
                f'"{sheet.path.name}" has no label column that is known by name; name it in columns: '
                f"{', '.join(sheet.columns)}"
            )
        unused = sheet.unused(request, roles)
        told = [group_hint(name, sheet.texts(name), texts["class"]) for name in unused]
        attributes = {name: sheet.texts(name) for name in request.attributes}
        return _rows(root, names, texts, attributes, facts_of(roles.get("group"), told))

    return with_hints(cached(request, digests, read), hints)  # on files that decide nothing


def _rows(
    root: Path,
    names: Sequence[str],
    texts: Mapping[str, Sequence[str]],
    attributes: Mapping[str, Sequence[str]],
    facts: Mapping[str, object],
) -> Rows:
    labels = texts["class"]
    classes, others = ordered(labels), {role: column for role, column in texts.items() if role != "class"}
    codes = as_codes(labels, classes, str)
    pictures = [root / name for name in names]
    return Rows(pictures, names.__getitem__, codes, classes, others, names, attributes, facts)


def walk(root: Path) -> tuple[list[str], list[str]]:
    """Pictures and folders below root as sorted relative names; hidden ones are no data."""
    files, folders = _walk(root)
    return [name for name in files if _is_picture(name)], folders


def others(root: Path) -> tuple[str, ...]:
    """The files below root that are no pictures."""
    return tuple(name for name in _walk(root)[0] if not _is_picture(name))


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
            elif entry.is_file() or not _is_picture(name):
                names.append(name)
            else:  # a pipe or a device, which one could read for ever, or a link that leads nowhere
                raise UserError(f'"{name}" in "{root}" is no ordinary file')
        if len(names) > MOST_OTHERS and not any(map(_is_picture, names)):
            raise UserError(f'there are more than {MOST_OTHERS:,} files below "{root}", but no picture among the first')
    return sorted(names), sorted(folders)


def _identity(folder: Path) -> tuple[int, int]:
    there = folder.stat()
    return there.st_dev, there.st_ino


def _is_utf8(name: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in name)


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
