"""The table of a folder of pictures, CSV or Parquet: what it says of each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedshift.data._columns import optional, usual
from fedshift.data._naming import meant, plain, positions
from fedshift.data._parts import is_csv, table_part
from fedshift.data._rows import Request
from fedshift.errors import UserError

_PREFERRED = "metadata"


@dataclass(frozen=True)
class Sheet:
    """A table, its lines in the order of the pictures."""

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
    """The table that names the pictures, if there is one, and a sentence on every one that does not.

    It is ``metadata.csv`` (or ``.parquet``), any other table in the folder, or the file beside it that is called like it.
    """
    inside = sorted(path for path in root.iterdir() if _is_table(path) and not path.name.startswith("."))
    preferred = [path for path in inside if path.stem == _PREFERRED]
    named = [root.parent / f"{root.name}{suffix}" for suffix in (".csv", ".tsv", ".parquet")]
    beside = [path for path in named if _is_table(path)]
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
        raise UserError(
            f'{both} both name pictures of the source "{request.source}": call the right one {_PREFERRED}.csv'
        )
    return (found[0] if found else None), hints


def _is_table(path: Path) -> bool:
    return (is_csv(path) or path.suffix.lower() == ".parquet") and path.is_file()


def _matched(path: Path, names: Sequence[str], wanted: str | None) -> Sheet | None:
    part = table_part(path.name, path)
    if wanted is not None and wanted not in part.cells:
        raise UserError(f'"{path.name}" has no column "{wanted}" (image); its columns are {", ".join(part.cells)}')
    lines, known = part.lines(), positions(names)
    first = usual("image", part.cells)
    candidates = [wanted] if wanted else sorted(part.cells, key=lambda name: name != first)
    for column in candidates:
        cells = [plain(found[column]) for found in lines]
        if any(cell in known for cell in cells):
            return Sheet(path, column, part.cells, _ordered(path, lines, cells, names, known))
    return None


def _ordered(
    path: Path,
    lines: Sequence[Mapping[str, str]],
    cells: Sequence[str],
    names: Sequence[str],
    known: Mapping[str, Sequence[int]],
) -> tuple[Mapping[str, str] | None, ...]:
    """The line of every picture."""
    ordered: list[Mapping[str, str] | None] = [None] * len(names)
    for found, cell in zip(lines, cells, strict=True):
        i = meant(cell, names, known, path.name)
        if i is None:
            continue
        if ordered[i] is not None:
            raise UserError(f'"{path.name}" names {names[i]} twice')
        ordered[i] = found
    return tuple(ordered)
