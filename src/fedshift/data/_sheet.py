"""The CSV file of a folder of pictures: what it says of each of them."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from fedshift.data._columns import optional, usual
from fedshift.data._rows import Request, line
from fedshift.errors import UserError

_FILE_COLUMNS = ("file_name", "filename", "file", "path", "image", "image_path", "image_name", "image_id", "img")
_PREFERRED = "metadata.csv"


@dataclass(frozen=True)
class Sheet:
    """A CSV file, its lines in the order of the pictures."""

    path: Path
    file: str  # the column that names the pictures
    columns: tuple[str, ...]
    lines: tuple[Mapping[str, str] | None, ...]  # None: it does not name that picture

    def texts(self, column: str) -> list[str]:
        """A column, empty where there is nothing."""
        return ["" if found is None else (found.get(column) or "").strip() for found in self.lines]

    def required(self, role: str, column: str, names: Sequence[str]) -> list[str]:
        """A column that must say something of every picture."""
        texts = self.texts(column)
        for name, text, found in zip(names, texts, self.lines, strict=True):
            if found is None:
                raise UserError(f'"{self.path.name}" does not name {name}, so its {role} is not known')
            if not text:
                raise UserError(f'column "{column}" ({role}) of "{self.path.name}" is empty for {name}')
        return texts

    def check(self, column: str, use: str) -> None:
        """Refuse a column that is not there."""
        if column not in self.columns:
            there = ", ".join(self.columns)
            raise UserError(f'"{self.path.name}" has no column "{column}" ({use}); its columns are {there}')

    def roles(self, columns: Mapping[str, str] | None, known: Sequence[str], flat: bool) -> dict[str, str]:
        """Role -> column, for what the folders do not say; ``flat`` ones do not even say the class."""
        named = {role: name for role, name in (columns or {}).items() if role != "image"}
        for role, name in named.items():
            if name or role != "group":
                self.check(name, role)
        roles = {role: name for role, name in named.items() if name}
        wanted = ["label"] if flat else []
        wanted += ["client", "user", "super", "split"] if optional(named) else []
        for role in [role for role in (*wanted, "group") if role not in {*named, *known}]:
            taken = {self.file, *(roles.values() if role == "group" else ())}
            found = usual(role, self.columns, taken)
            if found is not None:
                roles[role] = found
        return roles

    def unused(self, request: Request, roles: Mapping[str, str]) -> list[str]:
        """Columns that play no role and may hold the ids of groups, if the user says nothing of groups."""
        if "group" in {*roles, *(request.columns or ())}:
            return []
        return [name for name in self.columns if name not in {self.file, *roles.values(), *request.attributes}]


def find_sheet(request: Request, root: Path, names: Sequence[str]) -> tuple[Sheet | None, list[str]]:
    """The CSV file that names the pictures, if there is one, and a sentence on every one that does not.

    It is ``metadata.csv``, any other CSV file in the folder, or the file beside it that is called like the folder.
    """
    inside = sorted(path for path in root.iterdir() if path.suffix.lower() == ".csv" and not path.name.startswith("."))
    preferred = [path for path in inside if path.name == _PREFERRED]
    beside = [path for path in [root.parent / f"{root.name}.csv"] if path.is_file()]
    wanted = (request.columns or {}).get("image")
    found: list[Sheet] = []
    hints: list[str] = []
    for path in preferred or inside or beside:
        sheet = _matched(path, names, wanted)
        if sheet is not None:
            found.append(sheet)
        else:
            hints.append(
                f'"{path.name}" is not used, because none of its columns names the pictures; call that column file_name '
                f'and let it say, for instance, "{names[0]}"'
            )
    if len(found) > 1:
        both = " and ".join(sheet.path.name for sheet in found[:2])
        raise UserError(f'{both} both name pictures of the source "{request.source}": call the right one {_PREFERRED}')
    return (found[0] if found else None), hints


def _matched(path: Path, names: Sequence[str], wanted: str | None) -> Sheet | None:
    columns, lines = _read(path)
    if wanted is not None and wanted not in columns:
        raise UserError(f'"{path.name}" has no column "{wanted}" (image); its columns are {", ".join(columns)}')
    candidates = [wanted] if wanted else sorted(columns, key=lambda name: name.lower() not in _FILE_COLUMNS)
    positions = _positions(names)
    for column in candidates:
        cells = [_plain(found.get(column) or "") for found in lines]
        if any(cell in positions for cell in cells):
            return Sheet(path, column, tuple(columns), _ordered(path, lines, cells, names, positions))
    return None


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = file.readline()
            file.seek(0)
            reader = csv.DictReader(file, delimiter=max(",;\t", key=header.count), restval="")
            columns = [name for name in (reader.fieldnames or []) if name]
            return columns, list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f'"{path.name}" cannot be read as CSV: {line(error)}') from error


def _plain(cell: str) -> str:
    return cell.strip().replace("\\", "/").removeprefix("./")


def _positions(names: Sequence[str]) -> dict[str, list[int]]:
    """The pictures behind every way of naming one: its path below the folder or its name alone, with or without suffix."""
    found: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        path = PurePosixPath(name)
        for called in {name, path.with_suffix("").as_posix(), path.name, path.stem}:
            found.setdefault(called, []).append(i)
    return found


def _ordered(
    path: Path,
    lines: Sequence[Mapping[str, str]],
    cells: Sequence[str],
    names: Sequence[str],
    positions: Mapping[str, Sequence[int]],
) -> tuple[Mapping[str, str] | None, ...]:
    """The line of every picture."""
    ordered: list[Mapping[str, str] | None] = [None] * len(names)
    for found, cell in zip(lines, cells, strict=True):
        meant = positions.get(cell, ())
        exact = [i for i in meant if names[i] == cell]
        if len(exact or meant) > 1:
            several = " and ".join(names[i] for i in meant[:2])
            raise UserError(f'"{cell}" in "{path.name}" may be {several}: write the path below the folder')
        for i in exact or meant:
            if ordered[i] is not None:
                raise UserError(f'"{path.name}" names {names[i]} twice')
            ordered[i] = found
    return tuple(ordered)
