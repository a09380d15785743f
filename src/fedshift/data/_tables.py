"""The schemes ``parquet:`` and ``hub:``: tables with a column of encoded pictures, in the layout of Hugging Face."""

from __future__ import annotations

import glob
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedshift.data._columns import ROLES, group_hint, optional, text_of, usual
from fedshift.data._patterns import matches
from fedshift.data._pixels import in_threads
from fedshift.data._rows import SPLITS, Request, Rows, as_codes, class_names, facts_of, line
from fedshift.data._source_cache import cached, file_digest, table_digest
from fedshift.data.pool import Pool
from fedshift.errors import UserError

_REQUIRED = ("image", "label")
_ALWAYS = (*_REQUIRED, "group")  # looked for even if columns are named: nobody wants a patient on two sides
_PATHS = re.compile(r"(?P<column>[^~]+)\.path(?:~(?P<pattern>.*))?", re.DOTALL)  # image.path, image.path~REGEX


def parquet(request: Request) -> Pool:
    paths = _parquet_files(request)
    digests = dict(zip(paths, in_threads(file_digest, list(paths.values())), strict=True))
    return cached(request, digests, lambda: _read_parts(request, [parquet_part(n, p) for n, p in paths.items()]))


def hub(request: Request) -> Pool:
    try:
        import datasets
    except ImportError:
        raise UserError(
            f'the source "{request.source}" needs the datasets library: pip install "fedshift[hub]"'
        ) from None
    name, _, config = request.rest.partition(":")
    try:
        found = datasets.load_dataset(name, config or None)
    except Exception as error:  # the library raises its own, its hub client's and its network stack's exceptions
        raise UserError(f'the source "{request.source}" could not be loaded: {line(error)}') from error
    parts = [_hub_part(split, data) for split, data in found.items()]
    digests = {part.name: table_digest(part.table(part.columns)) for part in parts}
    return cached(request, digests, lambda: _read_parts(request, parts))


@dataclass(frozen=True)
class Part:
    """One Parquet file, or one split of a hub dataset."""

    name: str
    columns: tuple[str, ...]
    names: Mapping[str, tuple[str, ...]]  # column -> the names behind its integers (ClassLabel)
    table: Callable[[Sequence[str]], Any]  # reads some columns as a pyarrow table
    split: str | None  # what the part's own name says
    small: tuple[str, ...] = ()  # columns of text or whole numbers
    local_paths: bool = False  # whether a path without bytes may be opened


def _parquet_files(request: Request) -> dict[str, Path]:
    """Name -> file, in a fixed order; names leave out the part of the path that differs between machines."""
    found: dict[Path, str] = {}
    for item in filter(None, (text.strip() for text in request.rest.split(","))):
        path = request.path(item)
        root, hits = path.parent, [path]
        if path.is_dir():
            root, hits = path, sorted(path.rglob("*.parquet"))
        elif not path.exists():
            hits = sorted(map(Path, glob.glob(str(path), recursive=True)))
            while set(str(root)) & set("*?["):
                root = root.parent
        files = [hit for hit in hits if hit.is_file()]
        if not files:
            raise UserError(f'no Parquet file matches "{item}" in the source "{request.source}"')
        for file in files:
            found.setdefault(file, file.relative_to(root).as_posix())
    names = Counter(found.values())
    numbered = (name if names[name] == 1 else f"{name}#{i}" for i, name in enumerate(found.values()))
    return dict(zip(numbered, found, strict=True))


def parquet_part(name: str, path: Path) -> Part:
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
    word = re.match(r"[a-z]+(?=$|[-_.])", Path(name).stem)
    split = word.group() if word and word.group() in SPLITS else None
    small = tuple(field.name for field in schema if re.fullmatch(r"u?int\d+|(large_)?string", str(field.type)))
    return Part(name, tuple(schema.names), _class_labels(schema.metadata or {}), read, split, small)


def _class_labels(metadata: Mapping[bytes, bytes]) -> dict[str, tuple[str, ...]]:
    """Column -> class names, from the features that Hugging Face writes into a schema; odd metadata name nothing."""
    try:
        features = json.loads(metadata.get(b"huggingface", b"{}"))["info"]["features"]
        found = {column: feature["names"] for column, feature in features.items() if "names" in feature}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
    return {column: tuple(map(str, names)) for column, names in found.items() if isinstance(names, list)}


def _hub_part(split: str, data: Any) -> Part:
    named = {column: getattr(feature, "names", None) for column, feature in data.features.items()}
    names = {column: tuple(map(str, found)) for column, found in named.items() if isinstance(found, list | tuple)}
    table = data.with_format("arrow")  # pictures stay encoded: we decode them as we decode every other source's
    kinds = {column: str(getattr(feature, "dtype", "")) for column, feature in data.features.items()}
    small = tuple(column for column, kind in kinds.items() if re.fullmatch(r"u?int\d+|(large_)?string", kind))
    return Part(split, tuple(data.features), names, lambda columns: table[:].select(list(columns)), split, small, True)


def _roles(part: Part, columns: Mapping[str, str] | None) -> dict[str, str]:
    """Role -> column of this part."""
    there = ", ".join(part.columns)
    named = {role: name for role, name in (columns or {}).items() if role != "group" or name}  # "": no group is wanted
    for role, name in named.items():
        _check_column(part, _column(part, role, name), role)
    roles = dict(named)
    for role in ROLES:
        found = usual(role, part.columns, roles.values() if role == "group" else ())
        if role not in {*roles, *(columns or ())} and found is not None and (role in _ALWAYS or optional(columns)):
            roles[role] = found
        if role in _REQUIRED and role not in roles:
            raise UserError(f'"{part.name}" has no {role} column that is known by name; name it in columns: {there}')
    return roles


def _check_column(part: Part, column: str, use: str) -> None:
    if column not in part.columns:
        raise UserError(f'"{part.name}" has no column "{column}" ({use}); its columns are {", ".join(part.columns)}')


def _read_parts(request: Request, parts: Sequence[Part]) -> Rows:
    roles = [_roles(part, request.columns) for part in parts]
    for part, found in zip(parts, roles, strict=True):
        if odd := sorted(set(found) ^ set(roles[0])):
            raise UserError(f'"{parts[0].name}" and "{part.name}" do not both have a column for {odd[0]}')
        for name in request.attributes:
            _check_column(part, name, "attributes")
    maybe = _maybe_groups(request, parts, roles)
    tables = [
        part.table(sorted({*(_column(part, *item) for item in found.items()), *request.attributes, *maybe}))
        for part, found in zip(parts, roles, strict=True)
    ]
    if not any(table.num_rows for table in tables):
        raise UserError(f'the source "{request.source}" holds no images')
    triples = list(zip(parts, roles, tables, strict=True))
    starts = np.cumsum([0, *(table.num_rows for table in tables)])

    def where(i: int) -> str:
        at = int(np.searchsorted(starts, i, side="right")) - 1
        return f'"{parts[at].name}", row {i - int(starts[at])}'

    texts = {
        role: [text for part, found, table in triples for text in _texts(part, role, found[role], table)]
        for role in roles[0]
        if role != "image"
    }
    labels = texts.pop("label")
    named = _agreed_classes(parts, roles, tables)
    classes = named or class_names(labels, where)
    codes = as_codes(labels, classes, where)
    present = set(labels)
    if missing := [name for name in classes if name not in present]:
        more = f" (and {len(missing) - 1} more classes have none)" if len(missing) > 1 else ""
        raise UserError(f"class {missing[0]!r} has no samples in {request.source}{more}")
    if "split" not in texts and (hints := _split_hints(parts, tables)) is not None:
        texts["split"] = hints
    pictures = [item for part, found, table in triples for item in encoded(part, found["image"], table)]
    asked, unused = (
        {
            name: [text for part, table in zip(parts, tables, strict=True) for text in _cells(part, name, table)]
            for name in columns
        }
        for columns in (request.attributes, maybe)
    )
    facts = facts_of(roles[0].get("group"), (group_hint(name, values, labels) for name, values in unused.items()))
    return Rows(pictures, where, codes, classes, texts, _names(triples), asked, facts)


def _maybe_groups(request: Request, parts: Sequence[Part], roles: Sequence[Mapping[str, str]]) -> list[str]:
    """Columns that play no role, all of which may hold the ids of groups, if the user says nothing of groups."""
    if not parts or "group" in {*roles[0], *(request.columns or ())}:
        return []
    used = {*roles[0].values(), *request.attributes}
    return [name for name in parts[0].small if name not in used and all(name in part.small for part in parts)]


def _names(triples: Sequence[tuple[Part, Mapping[str, str], Any]]) -> list[str]:
    """What every picture is called: its path if that is its own, or else its file and row."""
    import pyarrow as pa
    import pyarrow.compute as pc

    paths: list[str | None] = []
    for _, found, table in triples:
        pictures = table.column(found["image"])
        named = pa.types.is_struct(pictures.type) and pictures.type.get_field_index("path") >= 0
        paths += pc.struct_field(pictures, "path").to_pylist() if named else [None] * len(pictures)
    if all(paths) and len(set(paths)) == len(paths):
        return [str(path) for path in paths]
    return [f"{part.name} row {i}" for part, _, table in triples for i in range(table.num_rows)]


def _cells(part: Part, column: str, table: Any) -> list[str]:
    """A column as texts, empty where there is nothing."""
    names = part.names.get(column, ())
    values = (text_of(value) for value in table.column(column).to_pylist())
    return [names[int(text)] if text.isdecimal() and int(text) < len(names) else text for text in values]


def _column(part: Part, role: str, named: str) -> str:
    """The column behind what ``columns`` says: only a group may be read from the paths of the pictures."""
    if role != "group" or named in part.columns or (paths := _PATHS.fullmatch(named)) is None:
        return named
    return paths.group("column")


def _path_groups(part: Part, named: str, table: Any) -> list[str]:
    """What the pattern matches in every picture's path; a path in which it matches nothing is a group of its own."""
    import pyarrow as pa
    import pyarrow.compute as pc

    paths = _PATHS.fullmatch(named)
    assert paths is not None
    column, pattern = paths.group("column", "pattern")
    try:
        re.compile(pattern or "")
    except (re.error, RecursionError, OverflowError) as error:
        raise UserError(f'the group "{named}" is no regular expression after its "~": {line(error)}') from error
    kind = table.column(column).type
    if not pa.types.is_struct(kind) or kind.get_field_index("path") < 0:
        raise UserError(f'column "{column}" of "{part.name}" holds no paths to make groups of')
    found = pc.struct_field(table.column(column), "path").to_pylist()
    for i, path in enumerate(found):
        if not path:
            raise UserError(f'there is no path in column "{column}" of "{part.name}", row {i}, to make a group of')
    hits = matches(pattern, found) if pattern else found
    return [f"part {hit}" if hit else f"path {path}" for hit, path in zip(hits, found, strict=True)]


def _texts(part: Part, role: str, column: str, table: Any) -> list[str]:
    """A column as strings, its integers replaced by their names where the schema has them."""
    if _column(part, role, column) != column:
        return _path_groups(part, column, table)
    if role == "group":
        return _cells(part, column, table)  # whether one may be missing is for the split to say
    values = table.column(column).to_pylist()
    for i, value in enumerate(values):
        if value is None or (isinstance(value, str) and not value.strip()):
            raise UserError(f'column "{column}" is empty in "{part.name}", row {i}')
        if not isinstance(value, str | int):
            raise UserError(
                f'column "{column}" of "{part.name}" must hold strings or integers, not {table.column(column).type}'
            )
    names = part.names.get(column)
    if names is None or not values or isinstance(values[0], str):
        return [str(value) for value in values]
    strange = next((i for i, value in enumerate(values) if not 0 <= value < len(names)), None)
    if strange is not None:
        raise UserError(
            f'column "{column}" is {values[strange]} in "{part.name}", row {strange}, '
            f"but there are names for 0..{len(names) - 1} only"
        )
    return [names[value] for value in values]


def _agreed_classes(
    parts: Sequence[Part], roles: Sequence[Mapping[str, str]], tables: Sequence[Any]
) -> tuple[str, ...] | None:
    """The class names of the schemas, None where there are none; parts that differ cannot be one data set."""
    kinds: list[tuple[str, ...] | str] = []
    for part, found, table in zip(parts, roles, tables, strict=True):
        column = found["label"]
        text = "string" in str(table.schema.field(column).type)
        kinds.append(part.names.get(column) or ("names in the label column" if text else "integers without names"))
        if kinds[-1] != kinds[0]:
            first, other = (k if isinstance(k, str) else ", ".join(k) for k in (kinds[0], kinds[-1]))
            raise UserError(
                f'"{parts[0].name}" and "{part.name}" do not agree on the classes: {first[:200]} against {other[:200]}'
            )
    return kinds[0] if isinstance(kinds[0], tuple) else None


def _split_hints(parts: Sequence[Part], tables: Sequence[Any]) -> list[str] | None:
    """The split of every row as the parts' names say it; None when they say nothing.

    A lone "train" says nothing: it is what the hub calls a data set that was never split.
    """
    said = [part for part in parts if part.split is not None]
    if not said or {part.split for part in parts} == {"train"}:
        return None
    for part in parts:
        if part.split is None:
            raise UserError(
                f'the name of "{said[0].name}" says its split but that of "{part.name}" does not: rename or drop it'
            )
    return [str(part.split) for part, table in zip(parts, tables, strict=True) for _ in range(table.num_rows)]


def encoded(part: Part, column: str, table: Any) -> list[Any]:
    """The encoded pictures of a column, without a copy; every row must have one."""
    found = pictures_of(part, column, table)
    for i in (i for i, picture in enumerate(found) if picture is None):
        raise UserError(f'there is no picture in column "{column}" of "{part.name}", row {i}')
    return found


def pictures_of(part: Part, column: str, table: Any) -> list[Any]:
    """The encoded pictures of a column, without a copy; None where a row has none."""
    import pyarrow as pa
    import pyarrow.compute as pc

    values = table.column(column)
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
