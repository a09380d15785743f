"""Plain tables as TOML, which the standard library reads but does not write."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any


def toml_text(table: Mapping[str, Any]) -> str:
    """A mapping of plain values as TOML.

    >>> print(toml_text({"rounds": 2, "train": {"lr": 0.1}, "method": [{"name": "fedavg"}]}))
    rounds = 2
    <BLANKLINE>
    [train]
    lr = 0.1
    <BLANKLINE>
    [[method]]
    name = "fedavg"
    <BLANKLINE>
    """
    return "\n".join(_toml_lines(table, ())) + "\n"


def _toml_lines(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    plain = {key: value for key, value in table.items() if not _is_table(value) and value is not None}
    lines = [f"{_key(key)} = {_value(value)}" for key, value in plain.items()]
    for key, value in table.items():
        here = (*path, key)
        dotted = ".".join(_key(part) for part in here)
        if isinstance(value, Mapping) and value:
            lines += ["", f"[{dotted}]", *_toml_lines(value, here)]
        elif _is_table(value) and not isinstance(value, Mapping):
            for item in value:
                lines += ["", f"[[{dotted}]]", *_toml_lines(item, here)]
    return lines


def _is_table(value: Any) -> bool:
    if isinstance(value, Mapping):
        return True
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _text(key)


def _text(text: str) -> str:
    """A TOML string: JSON's, but characters beyond ASCII as they are, and the one control character JSON lets through."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + " }"
    return _text(str(value))
