"""The pictures of a table's column: encoded in its cells, or files that it names."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedshift.data._naming import meant, plain, positions
from fedshift.data._parts import Part, place
from fedshift.data._rows import line
from fedshift.data._walk import walk
from fedshift.errors import UserError


def encoded(part: Part, column: str, table: Any) -> list[Any]:
    """The encoded pictures of a column, without a copy, or their paths; every row must have one."""
    found = pictures_of(part, column, table)
    for i in (i for i, picture in enumerate(found) if picture is None):
        raise UserError(f'there is no picture in column "{column}" of {place(part.name, i)}')
    return found


def pictures_of(part: Part, column: str, table: Any) -> list[Any]:
    """The encoded pictures of a column, without a copy, or their paths; None where a row has none."""
    import pyarrow as pa
    import pyarrow.compute as pc

    values = table.column(column)
    if part.folder is not None and _is_text(values):
        return list(_named(part.name, values.to_pylist(), part.folder))
    paths: list[str | None] = [None] * len(values)
    if pa.types.is_struct(values.type):
        fields = {values.type.field(i).name for i in range(values.type.num_fields)}
        if part.local_paths and "path" in fields:
            paths = pc.struct_field(values, "path").to_pylist()
        values = pc.struct_field(values, "bytes") if "bytes" in fields else values
    if not (pa.types.is_binary(values.type) or pa.types.is_large_binary(values.type)):
        raise UserError(f'column "{column}" of "{part.name}" holds no encoded pictures but {values.type}')
    found: list[Any] = [value.as_buffer() for chunk in values.chunks for value in chunk]
    return [Path(path) if data is None and path is not None else data for data, path in zip(found, paths, strict=True)]


def picture_files(part: Part, column: str) -> dict[str, Path]:
    """What a column of paths names, each file once; nothing where pictures are in the cells."""
    if part.folder is None or column not in part.small:
        return {}
    table = part.table([column])
    if not _is_text(table.column(column)):
        return {}
    return {str(path): path for path in encoded(part, column, table)}


def paths_of(values: Any) -> list[str | None] | None:
    """The path of every picture of a column as its author wrote it; None where there are none."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_struct(values.type) and values.type.get_field_index("path") >= 0:
        values = pc.struct_field(values, "path")
    return list(values.to_pylist()) if _is_text(values) else None


def _named(table: str, cells: Sequence[str | None], folder: Path) -> list[Path | None]:
    """The files that cells name: as paths, from the table's folder, or else as names of pictures anywhere below it."""
    paths = [folder / plain(cell) if cell and cell.strip() else None for cell in cells]
    lost = [i for i, path in enumerate(paths) if path is not None and not _is_there(path)]
    if not lost:
        return paths
    names, _ = walk(folder)
    found = positions(names)
    for i in lost:
        cell = plain(str(cells[i]))
        at = meant(cell, names, found, table)
        if at is None:
            raise UserError(f'{place(table, i)}: there is no picture "{cell[:100]}" in "{folder}" or below it')
        paths[i] = folder / names[at]
    return paths


def _is_there(path: Path) -> bool:
    """Whether a file is there. What is too long for a name is none: somebody's text, or pixels written as text."""
    try:
        return path.is_file()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise UserError(f'"{path}" cannot be read: {line(error)}') from error


def _is_text(values: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(values.type) or pa.types.is_large_string(values.type))
