"""What is kept of runs, beside the pages made of it: ``docs/results/*.json``, and where and on what it was made."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
KEPT = HERE.parent / "results"


def commit() -> str:
    """Of the code that is here; empty where there is no repository."""
    try:
        told = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return told.stdout.strip()


def has(name: str) -> bool:
    """Whether the repository here has a commit; another machine may have made one of its own for its copy."""
    try:
        told = subprocess.run(
            ["git", "cat-file", "-e", f"{name}^{{commit}}"], capture_output=True, cwd=HERE, check=False
        )
    except OSError:
        return bool(name)  # nobody can tell
    return told.returncode == 0


def device() -> str:
    """What it was run on."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def kept(name: str) -> dict[str, Any] | None:
    """The summary of a table, or None if it was never run."""
    path = KEPT / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def as_json(summary: Mapping[str, Any]) -> str:
    """A summary as text, a row of numbers in a line."""
    lines = []
    for key, value in summary.items():
        if isinstance(value, Mapping) and value:
            inner = ",\n".join(f"  {json.dumps(name)}: {json.dumps(own)}" for name, own in value.items())
            lines.append(f" {json.dumps(key)}: {{\n{inner}\n }}")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def take(source: Path, known: Container[str]) -> list[str]:
    """Put the summaries of a folder into the repository, those with rows and of a name that is known; their names."""
    taken = []
    for path in sorted(source.glob("*.json")):
        summary = json.loads(path.read_text(encoding="utf-8"))
        if path.stem in known and summary["rows"]:
            own = [{**one, "commit": one["commit"] if has(one["commit"]) else commit()} for one in made_of(summary)]
            whole = {**summary, "made": own} if "made" in summary else {**summary, **own[0]}
            (KEPT / path.name).write_text(as_json(joined(kept(path.stem), whole)), encoding="utf-8")
            taken.append(path.stem)
    return taken


def made_of(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The commands behind a summary, each with its commit: several where rows were made one after the other."""
    return list(summary.get("made", [{"commit": summary.get("commit", "")}]))


def joined(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> dict[str, Any]:
    """A summary whose rows may be made by several commands keeps those that were there, if they are of the same kind.

    >>> one = {"seeds": [1], "rounds": 2, "made": [{"command": "a", "rows": ["A", "B"]}], "rows": {"A": {}, "B": {}}}
    >>> new = {**one, "made": [{"command": "b", "rows": ["B"]}], "rows": {"B": {"c": [1.0]}}}
    >>> both = joined(one, new)
    >>> [(made["command"], made["rows"]) for made in both["made"]], both["rows"]
    ([('a', ['A']), ('b', ['B'])], {'A': {}, 'B': {'c': [1.0]}})
    >>> list(joined(one, {**new, "seeds": [2]})["rows"])
    ['B']
    """
    alike = old is not None and "made" in new and all(old.get(key) == new[key] for key in ("seeds", "rounds"))
    if old is None or not alike:
        return dict(new)
    before = [{**one, "rows": [row for row in one["rows"] if row not in new["rows"]]} for one in old["made"]]
    made = [*(one for one in before if one["rows"]), *new["made"]]  # of rows that are made again it tells nothing more
    return {**new, "made": made, "rows": {**old["rows"], **new["rows"]}}
