"""Parts of a source that is a table: a Parquet file, a CSV file, a split of a hub data set. Columns are read later."""

from __future__ import annotations

import csv
import glob
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedshift.data._columns import text_of
from fedshift.data._rows import SPLITS, Request, line
from fedshift.errors import UserError

_SMALL = re.compile(r"u?int\d+|(large_)?string")
_BULKY = re.compile(r"(large_)?binary|fixed_size_binary.*|struct.*|(large_)?list.*|map.*")


@dataclass(frozen=True)
class Part:
    """One file of a table, or one split of a hub dataset."""

    name: str
    columns: tuple[str, ...]
    names: Mapping[str, tuple[str, ...]]  # column -> the names behind its integers (ClassLabel)
    table: Callable[[Sequence[str]], Any]  # reads some columns as a pyarrow table
    split: str | None  # what the part's own name says
    small: tuple[str, ...] = ()  # columns of text or whole numbers
    cells: tuple[str, ...] = ()  # columns that one can read as text: no pictures, no lists
    local_paths: bool = False  # whether a path without bytes may be opened
    folder: Path | None = None  # where paths in a column of text begin; None: they are not looked for

    def lines(self) -> list[dict[str, str]]:
        """Its rows as texts, without what has none."""
        columns = {name: map(text_of, self.table([name]).column(name).to_pylist()) for name in self.cells}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def table_part(name: str, path: Path) -> Part:
    """The part that a file is, by its suffix: anything but CSV is taken for Parquet."""
    return (csv_part if is_csv(path) else parquet_part)(name, path)


def is_csv(path: Path) -> bool:
    """Whether a file is text with commas, semicolons or tabs, by its name."""
    return path.suffix.lower() in (".csv", ".tsv")


def parquet_part(name: str, path: Path) -> Part:
    """A Parquet file; what cannot be read is one sentence."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def read(columns: Sequence[str]) -> Any:
        try:
            return pq.read_table(path, columns=list(columns), partitioning=None)
        except (pa.ArrowException, OSError) as error:
            raise UserError(f'"{name}" cannot be read as Parquet: {line(error)}') from error

    try:
        schema = pq.read_schema(path)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f'"{name}" cannot be read as Parquet: {line(error)}') from error
    small = tuple(field.name for field in schema if _SMALL.fullmatch(str(field.type)))
    cells = tuple(field.name for field in schema if not _BULKY.fullmatch(str(field.type)))
    labels = _class_labels(schema.metadata or {})
    return Part(name, tuple(schema.names), labels, read, _split(name), small, cells, folder=path.parent)


def csv_part(name: str, path: Path) -> Part:
    """A CSV file, whose columns are text. Commas, semicolons and tabs are told apart by its first line."""
    import pyarrow as pa

    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = file.readline()
            file.seek(0)
            reader = csv.DictReader(file, delimiter=max(",;\t", key=header.count), restval="")
            columns = tuple(dict.fromkeys(column for column in (reader.fieldnames or []) if column))
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f'"{name}" cannot be read as CSV: {line(error)}') from error

    def read(wanted: Sequence[str]) -> Any:
        return pa.table({column: pa.array([row[column].strip() for row in rows], pa.string()) for column in wanted})

    return Part(name, columns, {}, read, _split(name), columns, columns, folder=path.parent)


def hub_part(split: str, data: Any) -> Part:
    """A split of a hub dataset."""
    named = {column: getattr(feature, "names", None) for column, feature in data.features.items()}
    names = {column: tuple(map(str, found)) for column, found in named.items() if isinstance(found, list | tuple)}
    table = data.with_format("arrow")  # pictures stay encoded: we decode them as we decode every other source's
    kinds = {column: str(getattr(feature, "dtype", "")) for column, feature in data.features.items()}
    small = tuple(column for column, kind in kinds.items() if _SMALL.fullmatch(kind))
    return Part(
        split, tuple(data.features), names, lambda columns: table[:].select(list(columns)), split, small, small, True
    )


def table_files(request: Request, suffix: str, noun: str) -> dict[str, Path]:
    """Name -> file, in a fixed order; names leave out the part of the path that differs between machines."""
    found: dict[Path, str] = {}
    for item in filter(None, (text.strip() for text in request.rest.split(","))):
        path = request.path(item)
        root, hits = path.parent, [path]
        if path.is_dir():
            root, hits = path, sorted(path.rglob(f"*{suffix}"))
        elif not path.exists():
            hits = sorted(map(Path, glob.glob(str(path), recursive=True)))
            while set(str(root)) & set("*?["):
                root = root.parent
        files = [hit for hit in hits if hit.is_file()]
        if not files:
            raise UserError(f'no {noun} file matches "{item}" in the source "{request.source}"')
        for file in files:
            found.setdefault(file, file.relative_to(root).as_posix())
    names = Counter(found.values())
    numbered = (name if names[name] == 1 else f"{name}#{i}" for i, name in enumerate(found.values()))
    return dict(zip(numbered, found, strict=True))


def _split(name: str) -> str | None:
    """The split that a file's name says: ``train-00000-of-00001.parquet``."""
    word = re.match(r"[a-z]+(?=$|[-_.])", Path(name).stem)
    return word.group() if word and word.group() in SPLITS else None


def _class_labels(metadata: Mapping[bytes, bytes]) -> dict[str, tuple[str, ...]]:
    """Column -> class names, from the features that Hugging Face writes into a schema; odd metadata name nothing."""
    try:
        features = json.loads(metadata.get(b"huggingface", b"{}"))["info"]["features"]
        found = {column: feature["names"] for column, feature in features.items() if "names" in feature}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
    return {column: tuple(map(str, names)) for column, names in found.items() if isinstance(names, list)}


def place(table: str, row: int) -> str:
    """Where a row of a table is, as people find it: lines of a CSV file count from one, heads and all, rows of others
    from zero.

    >>> place("scans.csv", 5), place("scans.parquet", 5)
    ('"scans.csv", line 7', '"scans.parquet", row 5')
    """
    return f'"{table}", line {row + 2}' if is_csv(Path(table)) else f'"{table}", row {row}'
