"""The order in which an experiment planned its runs, as ``plan.json`` beside the methods' folders has it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fedshift.errors import HostError
from fedshift.store.files import attempt, parsed, read_text

PLAN = "plan.json"


def planned(run: Path) -> Mapping[str, Mapping[str, Any]]:
    """What the plan that a run is of says of all its runs, by folder below the experiment's; empty if there is none."""
    base = run.parents[1] if len(run.parents) > 1 else run
    try:
        return attempt(partial(_read, base / PLAN), []) or {}
    except HostError:  # nobody needs it: it is about an order
        return {}


def _read(path: Path) -> Mapping[str, Mapping[str, Any]]:
    text = read_text(path)
    return parsed(path, lambda: {str(entry["folder"]): dict(entry) for entry in json.loads(text)["runs"]})


def in_order(runs: Iterable[Path]) -> list[Path]:
    """Runs in the order of their plans, experiments one after the other; what the last plan has not was before it."""
    by_base: dict[Path, list[Path]] = {}
    for run in runs:
        by_base.setdefault(run.parents[1] if len(run.parents) > 1 else run, []).append(run)
    ordered: list[Path] = []
    for base, some in by_base.items():
        places = {folder: place for place, folder in enumerate(planned(some[0]))}
        ordered += sorted(some, key=lambda run: places.get(_below(run, base), -1))
    return ordered


def adapters_of(run: Path) -> list[str]:
    """The adapters of a run in the order in which they were asked for; empty if no plan says."""
    entry = planned(run).get(_below(run, run.parents[1]) if len(run.parents) > 1 else "", {})
    found = entry.get("adapters", [])
    return [str(label) for label in found] if isinstance(found, list) else []


def _below(run: Path, base: Path) -> str:
    return str(run.relative_to(base)) if base in run.parents else run.name
