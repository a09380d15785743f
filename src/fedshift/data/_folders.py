"""The scheme ``folder:``: pictures in folders that say their class, and perhaps their domain and split.

A CSV file in the folder may say more of each picture: its group, its hospital, even its class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fedshift.data._columns import group_hint
from fedshift.data._pixels import in_threads
from fedshift.data._rows import SPLITS, Request, Rows, as_codes, facts_of, ordered, refuse_columns, with_hints
from fedshift.data._sheet import find_sheet
from fedshift.data._source_cache import cached, file_digest
from fedshift.data._walk import walk
from fedshift.data.pool import Pool
from fedshift.errors import UserError


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
