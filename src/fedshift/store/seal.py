"""Seals: a digest inside a file, by which a reader knows that it holds what was written.

A JSON table has it under ``seal``, a line of JSON too, with its place (``3`` or ``3/14``); TOML in a comment at the end.
Older versions wrote none, so that one who reads says whether there must be one.
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedshift.errors import UserError
from fedshift.store.files import Damaged, parsed, read_bytes, read_text

SEAL = "seal"
COMMENT, EDITED = "# seal: ", "edited"
BROKEN, NONE = "it is not what was written", "its seal is gone"


def digest_of(content: bytes) -> str:
    """Short, for what happens by itself; it does not keep out whoever wants to deceive."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


# ---- JSON ----------------------------------------------------------------------------------------------------------------
def sealed(table: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """A table for JSON with its seal; numbers that are not finite become None, because JSON has no word for them.

    >>> sealed({"a": math.inf}, "1/2")
    {'a': None, 'seal': '1/2 565f1ef4d07f6fdd'}
    >>> opened(sealed({"a": 1}, "1/2"), "1/2")
    {'a': 1}
    """
    plain = json.loads(json.dumps(finite_in(table), allow_nan=False))
    return {**plain, SEAL: _seal(plain, place)}


def opened(stored: Any, place: str = "", must: bool = False) -> dict[str, Any]:
    """A table without its seal; a ValueError says that it is not what was written."""
    if not isinstance(stored, dict):
        raise ValueError("it has another shape")
    table = {key: value for key, value in stored.items() if key != SEAL}
    if SEAL in stored and stored[SEAL] != _seal(table, place):
        raise ValueError(BROKEN)
    if must and SEAL not in stored:
        raise ValueError(NONE)
    return table


def _seal(table: Mapping[str, Any], place: str) -> str:
    content = json.dumps([place, table], sort_keys=True).encode()
    return f"{place} {digest_of(content)}".strip()


def finite_in(value: Any) -> Any:
    """With None for every number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite_in(item) for key, item in value.items()}
    return [finite_in(item) for item in value] if isinstance(value, list | tuple) else value


def read_table(path: Path, must: bool = False) -> dict[str, Any]:
    """A JSON file that holds one table."""
    text = read_text(path)
    return parsed(path, lambda: opened(json.loads(text), must=must))


def table_text(table: Mapping[str, Any]) -> str:
    """A JSON file of one table."""
    return json.dumps(sealed(table), indent=1) + "\n"


def read_lines(path: Path, must: bool = False, counted: bool = False, growing: bool = False) -> list[dict[str, Any]]:
    """A file of JSON tables, one a line; where they are ``counted`` each says how many there are.

    The last line of one that is ``growing`` may be half-written, and is left out then.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "none.jsonl"
    >>> _ = path.write_text(lines_text([{"a": 1}, {"a": 2}]))
    >>> read_lines(path, counted=True)
    [{'a': 1}, {'a': 2}]
    >>> _ = path.write_text(path.read_text().splitlines()[0])
    >>> read_lines(path, counted=True)
    Traceback (most recent call last):
    ...
    fedshift.store.files.Damaged: ... is damaged (line 1: it is not what was written); repeat its fedshift run ...
    """
    text = read_text(path)
    lines = (text[: text.rfind("\n") + 1] if growing else text).splitlines()
    if must and counted and not lines:
        raise Damaged(path, "it is empty")
    total = f"/{len(lines)}" if counted else ""
    return [read_line(path, text, number, total, must) for number, text in enumerate(lines, 1)]


def read_line(path: Path, text: str, number: int, total: str = "", must: bool = False) -> dict[str, Any]:
    """One line of a file."""
    return parsed(path, lambda: opened(json.loads(text), f"{number}{total}", must), f"line {number}: ")


def lines_text(tables: Iterable[Mapping[str, Any]]) -> str:
    """A file of tables, which say how many they are."""
    every = list(tables)
    return "".join(line_text(table, f"{k}/{len(every)}") + "\n" for k, table in enumerate(every, 1))


def line_text(table: Mapping[str, Any], place: str) -> str:
    """One line of JSON."""
    return json.dumps(sealed(table, place))


# ---- TOML ----------------------------------------------------------------------------------------------------------------
def toml_sealed(text: str) -> str:
    """TOML with its seal; whoever edits the file by hand puts a word in its place.

    >>> print(toml_sealed("a = 1\\n"), end="")
    a = 1
    # seal: 44baf272602f2a18 (write "edited" for the number if you change this file)
    """
    return f'{text}{COMMENT}{digest_of(text.encode())} (write "{EDITED}" for the number if you change this file)\n'


def has_seal(path: Path) -> bool:
    """Whether a TOML file has a seal, sound or not."""
    try:
        return COMMENT.encode() in read_bytes(path)
    except UserError:
        return False


def read_toml(path: Path, must: bool = False, remedy: str = "") -> dict[str, Any]:
    """A TOML file."""
    text = read_text(path, remedy)
    content, found, seal = text.rpartition(COMMENT)
    table = parsed(path, lambda: tomllib.loads(text), remedy=remedy)
    if found and not seal.startswith(EDITED) and text != toml_sealed(content):
        raise Damaged(path, BROKEN, remedy)
    if must and not found:
        raise Damaged(path, NONE, remedy)
    return table
