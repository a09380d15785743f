"""What ``fedshift inspect`` found, if somebody ran it: distances between clients, and features in the plane."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

INSPECTED = Path("inspect") / "inspect.json"
MOST_POINTS = 3000  # of a map
MOST_MAPS = 12


def features(folders: Iterable[Path]) -> dict[str, Any] | None:
    """Maps of the first seed of every method, and the summary of each; None where nobody has looked."""
    found = _read(folders)
    runs = {run["name"]: run for run in reversed([run for one in found for run in one.get("runs", [])])}
    maps = [_map(name, run["tsne"]) for name, run in reversed(runs.items()) if run.get("tsne")][:MOST_MAPS]
    rows = [_row(row) for one in found for row in one.get("methods", [])]
    return {"maps": maps, "rows": rows} if maps or rows else None


def _read(folders: Iterable[Path]) -> list[dict[str, Any]]:
    """Numbers of every look at these runs; one that cannot be read is passed over."""
    places = dict.fromkeys(above / INSPECTED for folder in folders for above in (folder, *list(folder.parents)[:3]))
    found = []
    for path in places:
        try:
            found.append(json.loads(path.read_text()))
        except (OSError, ValueError):
            continue
    return [one for one in found if isinstance(one, dict)]


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
