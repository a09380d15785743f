"""Experiment files: presets, files that extend others, and dotted keys that change them."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from fedshift.errors import UserError

# as data/_walk.py has them; a test keeps the two alike, because nothing is imported here
PICTURES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".dcm", ".dicom", ".ima"})
PRESETS = resources.files("fedshift.experiment") / "presets"


def presets() -> list[str]:
    """The names ``fedshift run`` knows without a file.

    >>> "default" in presets()
    True
    """
    return sorted(entry.name.removesuffix(".toml") for entry in PRESETS.iterdir() if entry.name.endswith(".toml"))


def extended(source: str) -> dict[str, Any]:
    """A file's table, on top of that of the file it extends, and so on.

    Where no preset is among them the data are somebody's own: their split is stratified unless a file says otherwise.
    """
    entry = _entry(source, Path())
    if entry is None:
        raise UserError(f"there is neither a file nor a preset {source!r}; {_hint(source)}")
    tables: list[dict[str, Any]] = []
    seen = [(source, entry)]
    while True:
        name, entry = seen[-1]
        tables.append(_parsed(name, entry))
        base = tables[-1].pop("extends", None)
        if base is None:
            break
        if not isinstance(base, str):
            raise UserError(f"{name}: extends must be a preset's name or a path, not {base!r}")
        found = _entry(base, None if name in presets() else Path(str(entry)).parent)
        if found is None:
            raise UserError(f"{name} extends {base!r}, which is neither a preset nor a file beside it; {_hint(base)}")
        if any(found == earlier for _, earlier in seen):
            raise UserError(f"{' extends '.join([*(name for name, _ in seen), base])}: that never ends")
        seen.append((base, found))
    table = tables.pop()
    if seen[-1][0] not in presets():  # a preset, and what extends one, is split as it was published
        table["split"] = {"stratify": True, **_table(table, "split", source)}
    while tables:
        table.pop("name", None)  # a run folder of one's own
        table = merged(table, tables.pop())
    table.setdefault("name", Path(source).stem if source not in presets() else source)
    return table


def _table(table: Mapping[str, Any], key: str, name: str) -> Mapping[str, Any]:
    found = table.get(key, {})
    if not isinstance(found, dict):
        raise UserError(f"{name}: [{key}] must be a table")
    return found


def _entry(name: str, beside: Path | None) -> Traversable | None:
    """The preset of this name, or else the file, looked for in a folder."""
    if name in presets():
        return PRESETS / f"{name}.toml"
    path = None if beside is None else beside / name
    return path.resolve() if path is not None and path.is_file() else None


def _hint(name: str) -> str:
    close = difflib.get_close_matches(name, presets(), 1)
    return f"did you mean {close[0]!r}?" if close else "fedshift list presets shows what there is"


def _parsed(name: str, entry: Traversable) -> dict[str, Any]:
    try:
        table = tomllib.loads(entry.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{name} is not valid TOML: {error}") from None
    except RecursionError:
        raise UserError(f"{name} has too many brackets within brackets") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{name} cannot be read ({error})") from None
    for key in ("small", "paper", "sweep"):
        if not isinstance(table.get(key, {}), dict):
            raise UserError(f"{name}: [{key}] must be a table")
    return table


def merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A table on top of the one it extends: tables merge, everything else, lists too, is replaced.

    An empty table empties the base's. ``[model]`` and ``[partition]`` start anew under another name or kind, whose options
    are others. What is swept in the base and set here is not swept any more, methods or streams of one's own are not
    replaced by the base's ``[small]`` ones, and its ``[paper]`` settings are of methods that are there.

    >>> merged({"train": {"lr": 0.1, "momentum": 0.9}, "seeds": [0, 1]}, {"train": {"lr": 0.5}, "seeds": [3]})
    {'train': {'lr': 0.5, 'momentum': 0.9}, 'seeds': [3]}
    >>> merged({"sweep": {"train.lr": [0.1, 0.2]}}, {"sweep": {}})
    {'sweep': {}}
    """
    table = dict(base)
    if isinstance(table.get("sweep"), dict):
        table["sweep"] = {key: values for key, values in table["sweep"].items() if setting(own, key.split(".")) is None}
    for key, word in (("model", "name"), ("partition", "kind")):
        before, after = (setting(side, [key, word]) for side in (base, own))
        if after not in (None, before):
            table.pop(key, None)
            for part in ("sweep", "small"):
                if isinstance(table.get(part), dict):
                    table[part] = {name: v for name, v in table[part].items() if not name.startswith(f"{key}.")}
    if isinstance(table.get("small"), dict):
        table["small"] = {name: v for name, v in table["small"].items() if not isinstance(own.get(name), list)}
    if isinstance(table.get("paper"), dict) and isinstance(own.get("method"), list):
        table["paper"] = {key: v for key, v in table["paper"].items() if _has_place(own, key.split("."))}
    return _joined(table, own)


def _has_place(table: Mapping[str, Any], key: Sequence[str]) -> bool:
    """Whether a dotted key is of no method, of all of them, or of one that is there."""
    return key[0] != "method" or key[1] in TABLES or setting(table, key[:-1]) is not None


def _joined(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Tables in tables."""
    both = {key for key, value in own.items() if isinstance(value, dict) and value and isinstance(base.get(key), dict)}
    return {**base, **{key: _joined(base[key], value) if key in both else value for key, value in own.items()}}


def assignment(item: str) -> tuple[list[str], Any]:
    """A dotted key and a TOML value from ``key=value``; a bare word is a string.

    >>> assignment("train.lr=0.1")
    (['train', 'lr'], 0.1)
    """
    key, equals, text = item.partition("=")
    if not equals or not re.fullmatch(r"[\w.-]+", key.strip()):
        raise UserError(f"an override has the form key=value, for instance train.lr=0.1, not {item!r}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    except RecursionError:
        raise UserError(f"{key} has too many brackets within brackets") from None
    return key.strip().split("."), value


TABLES = ("train", "model", "adapters")  # of every entry of a list: method.train.lr is the rate of all methods


def override(table: dict[str, Any], key: Sequence[str], value: Any) -> None:
    """Set a dotted key. In a list of named tables the next part is a name (``method.fedprox.mu``) or an option of all.

    >>> table = {"method": [{"name": "fedprox"}, {"name": "fedavg"}]}
    >>> override(table, ["method", "fedprox", "mu"], 0.1)
    >>> table["method"][0]
    {'name': 'fedprox', 'mu': 0.1}
    """
    head, *rest = key
    if not rest:
        table[head] = value
        return
    inner = table.setdefault(head, {})
    if isinstance(inner, list):
        inner[:] = [{"name": item} if item == rest[0] else item for item in inner]  # a bare name becomes a table
        named = [item for item in inner if rest[0] in _names(item)]
        if named and len(rest) > 1:
            inner, rest = named, rest[1:]
        elif len(rest) > 1 and rest[0] not in TABLES:
            known = ", ".join(str(next(filter(None, _names(item)), item)) for item in inner)
            raise UserError(f"{'.'.join(key)} cannot be set: no {head} is called {rest[0]!r}; there are: {known}")
        for item in inner:
            if not isinstance(item, dict):
                raise UserError(f"{'.'.join(key)} cannot be set: {head!r} has no table called {rest[0]!r}")
            override(item, rest, value)
    elif isinstance(inner, dict):
        override(inner, rest, value)
    else:
        raise UserError(f"{'.'.join(key)} cannot be set, because {head!r} is not a table")


def setting(table: Any, key: Sequence[str]) -> Any:
    """The value of a dotted key, or None; in a list of named tables the next part is a name."""
    for part in key:
        if isinstance(table, list):
            table = next((item for item in table if part in _names(item)), None)
        else:
            table = table.get(part) if isinstance(table, Mapping) else None
    return table


def _names(item: Any) -> tuple[Any, ...]:
    return (item.get("label"), item.get("name")) if isinstance(item, dict) else ()


def copied(value: Any) -> Any:
    """Tables and lists of one's own, to be changed."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, list) else value


def source_of(path: Path) -> str:
    """The source string of a Parquet or CSV file, a folder of Parquet files, or a folder of pictures.

    >>> source_of(Path("scans.parquet")), source_of(Path("scans.csv"))
    ('parquet:scans.parquet', 'csv:scans.csv')
    """
    if path.suffix.lower() in (".csv", ".tsv"):
        return f"csv:{path}"
    tables = path.suffix == ".parquet" or (path.is_dir() and any(path.rglob("*.parquet")) and not _has_pictures(path))
    return f"{'parquet' if tables else 'folder'}:{path}"


def _has_pictures(folder: Path) -> bool:
    """Whether a table in it is only about the pictures beside it."""
    return any(path.suffix.lower() in PICTURES for path in folder.rglob("*"))
