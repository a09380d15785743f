"""What ``fedshift inspect`` found, if somebody ran it: distances between clients, and features in the plane."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from fedshift.store.files import attempt, parsed, read_text

INSPECTED = Path("inspect") / "inspect.json"
MOST_POINTS = 3000  # of a map
MOST_MAPS = 12


def features(folders: Iterable[Path]) -> dict[str, Any] | None:
    """Maps of the first seed of every method, and the summary of each; None where nobody has looked."""
    places = dict.fromkeys(above / INSPECTED for folder in folders for above in (folder, *list(folder.parents)[:3]))
    looks = [look for path in places if (look := attempt(partial(_look, path), [])) is not None]
    first = {made["name"]: made for maps, _ in reversed(looks) for made in reversed(maps)}
    maps = list(reversed(first.values()))[:MOST_MAPS]
    rows = [row for _, found in looks for row in found]
    return {"maps": maps, "rows": rows} if maps or rows else None


def _look(path: Path) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """Maps and rows of one look at some runs."""
    text = read_text(path)
    return parsed(path, lambda: _taken(json.loads(text)))


def _taken(found: dict[str, Any]) -> tuple[list[dict[str, Any]], list[list[str]]]:
    maps = [_map(run["name"], run["tsne"]) for run in found.get("runs", []) if run.get("tsne")]
    return maps, [_row(row) for row in found.get("methods", [])]


def _map(name: str, placed: dict[str, Any]) -> dict[str, Any]:
    count = min(len(placed["x"]), MOST_POINTS)
    return {
        "name": name,
        "stream": placed.get("stream", ""),
        "classes": placed["classes"],
        "clients": placed["clients"],
        "unseen": placed["unseen"],
        **{key: [round(value, 2) for value in placed[key][:count]] for key in ("x", "y")},
        **{key: placed[key][:count] for key in ("label", "prediction", "client")},
    }


def _row(row: dict[str, Any]) -> list[str]:
    columns = {"pad": 2, "pad-union": 2, "risk": 3, "accuracy": 1}
    return [row["name"], row["model"], *(_text(row.get(key), digits) for key, digits in columns.items())]


def _text(number: dict[str, float] | None, digits: int) -> str:
    if number is None:
        return "–"
    return f"{number['mean']:.{digits}f}" + (f" ±{number['std']:.{digits}f}" if number["std"] else "")
