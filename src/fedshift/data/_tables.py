"""The schemes ``parquet:``, ``csv:`` and ``hub:``: tables with a column of encoded pictures, or of their paths."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedshift.data._columns import ROLES, group_hint, optional, text_of, usual
from fedshift.data._encoded import encoded, paths_of, picture_files
from fedshift.data._parts import Part, hub_part, is_csv, place, table_files, table_part
from fedshift.data._patterns import matches
from fedshift.data._pixels import in_threads
from fedshift.data._rows import Request, Rows, as_codes, class_names, facts_of, line
from fedshift.data._source_cache import cached, file_digest, table_digest, text_digest
from fedshift.data.pool import Pool
from fedshift.errors import UserError

_REQUIRED = ("image", "label")
_ALWAYS = (*_REQUIRED, "group")  # looked for even if columns are named: nobody wants a patient on two sides
_PATHS = re.compile(r"(?P<column>[^~]+)\.path(?:~(?P<pattern>.*))?", re.DOTALL)  # image.path, image.path~REGEX


def parquet(request: Request) -> Pool:
    return _tables(request, ".parquet", "Parquet")


def comma_separated(request: Request) -> Pool:
    return _tables(request, ".csv", "CSV")


def _tables(request: Request, suffix: str, noun: str) -> Pool:
    files = table_files(request, suffix, noun)
    parts = [table_part(name, path) for name, path in files.items()]
    named = [picture_files(part, _roles(part, request.columns)["image"]) for part in parts]
    digests = dict(zip(files, in_threads(file_digest, list(files.values())), strict=True))
    for part, pictures in zip(parts, named, strict=True):  # a digest of all of them: the table says which is which
        if pictures:
            digests[f"{part.name} pictures"] = text_digest(in_threads(file_digest, list(pictures.values())))
    return cached(request, digests, lambda: _read_parts(request, parts))


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
    parts = [hub_part(split, data) for split, data in found.items()]
    digests = {part.name: table_digest(part.table(part.columns)) for part in parts}
    return cached(request, digests, lambda: _read_parts(request, parts))


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
        return place(parts[at].name, i - int(starts[at])) + _picture(*triples[at], i - int(starts[at]))

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
    paths: list[str | None] = []
    for _, found, table in triples:
        pictures = table.column(found["image"])
        paths += paths_of(pictures) or [None] * len(pictures)
    if all(paths) and len(set(paths)) == len(paths):
        return [str(path) for path in paths]
    return [f"{part.name} row {i}" for part, _, table in triples for i in range(table.num_rows)]


def _picture(part: Part, found: Mapping[str, str], table: Any, row: int) -> str:
    """The path of a row's picture, where somebody has written it into a CSV file."""
    written = paths_of(table.column(found["image"])) if is_csv(Path(part.name)) else None
    return "" if written is None or not written[row] else f" ({written[row]})"


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
    paths = _PATHS.fullmatch(named)
    assert paths is not None
    column, pattern = paths.group("column", "pattern")
    try:
        re.compile(pattern or "")
    except (re.error, RecursionError, OverflowError) as error:
        raise UserError(f'the group "{named}" is no regular expression after its "~": {line(error)}') from error
    written = paths_of(table.column(column))
    if written is None:
        raise UserError(f'column "{column}" of "{part.name}" holds no paths to make groups of')
    found: list[str] = []
    for i, path in enumerate(written):
        if not path:
            raise UserError(f'there is no path in column "{column}" of {place(part.name, i)}, to make a group of')
        found.append(path)
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
            raise UserError(f'column "{column}" is empty in {place(part.name, i)}')
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
            f'column "{column}" is {values[strange]} in {place(part.name, strange)}, '
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
