"""Whatever runs are found in some folders, as one result; what cannot be read is named and left out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedshift.errors import UserError
from fedshift.results.collect import collect
from fedshift.results.result import Result
from fedshift.store.files import Damaged, attempt
from fedshift.store.folder import RunFolder
from fedshift.store.found import read_config
from fedshift.store.lock import owner_of

MOST = 5  # folders that an error names


@dataclass(frozen=True)
class LeftOut:
    """A folder that looks like a run and is not read."""

    path: Path
    why: str

    def __str__(self) -> str:
        return f"{self.path} is left out: {self.why}"


@dataclass(frozen=True)
class Gathered:
    """The result of all runs that can be read, and what was left out."""

    result: Result
    left_out: tuple[LeftOut, ...] = ()


def gather(paths: Sequence[Path]) -> Gathered:
    """All finished runs in these folders, each a run or any folder above some.

    A folder that is truncated, unfinished, foreign or there twice is left out and named; a UserError says so if nothing
    remains.
    """
    out: dict[Path, str] = {}
    fit: dict[Path, str] = {}  # what tells it from other runs
    for path in paths:
        if not path.exists():
            raise UserError(f"there is no folder {path}")
        found = sorted(candidates(path), key=begun)
        if not found:
            out[path] = "it holds no run"
        for folder in found:
            why, identity = _unfit(folder)
            if why:
                out[folder] = why
            elif folder.resolve() not in {known.resolve() for known in fit}:
                fit[folder] = identity
    result, damaged = _readable(fit)
    kept = {fit[folder]: folder for folder in result.folders}
    twice = {
        folder: f"it is the same run as {kept[identity]}"
        for folder, identity in fit.items()
        if identity in kept and folder not in result.folders
    }
    out |= twice | damaged
    if not result.folders:
        some = [f"{path}: {why}" for path, why in out.items()][:MOST]
        more = [f"and {len(out) - MOST} more"] if len(out) > MOST else []
        raise UserError("there is nothing to report: " + "; ".join([*some, *more]))
    return Gathered(result, tuple(LeftOut(path, why) for path, why in out.items()))


def candidates(path: Path) -> Iterator[Path]:
    """Folders that look like a run, finished or not."""
    found = {file.parent for name in ("done", "metrics.jsonl") for file in path.rglob(name) if file.is_file()}
    yield from sorted(found)


def begun(folder: Path) -> tuple[float, str]:
    """What runs are put in the order of their beginning by."""
    config = folder / "config.toml"
    return (config.stat().st_mtime if config.is_file() else 0.0), str(folder)


def _unfit(folder: Path) -> tuple[str, str]:
    """Why a folder is no finished run, or nothing; and what tells it from other runs."""
    if not (folder / "config.toml").is_file():
        return "it has no config.toml", ""
    if not (folder / "done").is_file():
        owner = owner_of(folder)
        return ("it is not finished" if owner is None else f"it is not finished ({owner} is at it)"), ""
    try:
        identity = json.dumps(read_config(folder), sort_keys=True, default=str)
    except UserError as error:
        return str(error), ""
    if not list((folder / "adapters").glob("*.jsonl")):
        return "it has no scores", ""
    return "", identity


def _readable(fit: Mapping[Path, str]) -> tuple[Result, dict[Path, str]]:
    """The result of those that can be read, each once, and why others cannot."""
    damaged = {folder: why for folder in fit if (why := _damage(folder))}
    first = {fit[folder]: folder for folder in reversed(list(fit)) if folder not in damaged}
    return collect(list(first.values())[::-1]), damaged


def _damage(folder: Path) -> str:
    run, damaged = RunFolder(folder), list[Damaged]()
    attempt(run.ending, damaged)
    attempt(run.history, damaged)
    run.scores(damaged)
    return str(damaged[0]) if damaged else ""
