"""How it was made: settings, versions, hashes, machines, how long, and the task's picture."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedshift.results.collect import names_of
from fedshift.results.sections.views import Views
from fedshift.store.files import attempt
from fedshift.store.folder import RunFolder
from fedshift.store.found import read_config
from fedshift.store.toml import toml_text

PICTURE = "task.png"
PNG = b"\x89PNG\r\n"
MOST_PICTURE = 3_000_000  # bytes
OWN = ("seed", "task-hash", "networks", "sweep-point")  # of one run: never shared


def origin(views: Views, pictures: bool) -> dict[str, Any]:
    """Everything a reader needs to believe the numbers, or to make them again."""
    folders = views.result.folders
    configs = [read_config(folder) for folder in folders]
    names = names_of(folders)
    facts = [facts_of(folder) for folder in folders]
    return {
        "runs": [
            {
                "name": names[folder],
                "folder": str(folder),
                "seed": config.get("seed"),
                "task": config.get("task-hash", ""),
                "rounds": fact.get("rounds", config.get("rounds")),
                "chosen": fact.get("best-round"),
                "seconds": fact.get("seconds"),
                "duration": duration(fact["seconds"]) if isinstance(fact.get("seconds"), int | float) else "",
                "made": _made(fact),
            }
            for folder, config, fact in zip(folders, configs, facts, strict=True)
        ],
        "duration": duration(sum(fact.get("seconds") or 0 for fact in facts)),
        "versions": sorted({_versions(fact) for fact in facts if fact}),
        "machines": sorted({_made(fact) for fact in facts if fact}),
        "settings": toml_text({key: value for key, value in shared(configs).items() if key not in OWN}),
        "picture": _picture(folders) if pictures else "",
    }


def duration(seconds: float) -> str:
    """How long, as people say it.

    >>> duration(0.4), duration(75), duration(7500), duration(200_000)
    ('0.4 s', '1 min 15 s', '2 h 5 min', '2 d 7 h')
    """
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    sizes = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
    size, large, step, small = next(entry for entry in sizes if seconds >= entry[0])
    return f"{int(seconds // size)} {large} {int(seconds % size // step)} {small}"


def shared(configs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Settings that all of these have alike, table by table.

    >>> shared([{"rounds": 5, "train": {"lr": 0.1, "mu": 1}}, {"rounds": 5, "train": {"lr": 0.2, "mu": 1}}])
    {'rounds': 5, 'train': {'mu': 1}}
    """
    first, *others = configs
    made: dict[str, Any] = {}
    for key, value in first.items():
        if not all(key in other for other in others):
            continue
        values = [other[key] for other in others]
        if all(isinstance(one, Mapping) for one in (value, *values)):
            inner = shared([value, *values])
            if inner:
                made[key] = inner
        elif all(other == value for other in values):
            made[key] = value
    return made


def facts_of(folder: Path) -> dict[str, Any]:
    """What ``done`` says; nothing where a run has not ended, or what it says is damaged."""
    return attempt(RunFolder(folder).ending, []) or {}


def _made(fact: Mapping[str, Any]) -> str:
    parts = [
        f"engine {fact['engine']}" if fact.get("engine") else "",
        fact.get("device", ""),
        fact.get("precision", ""),
    ]
    return ", ".join(part for part in parts if part)


def _versions(fact: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {fact[key]}" for key in ("fedshift", "torch", "python") if fact.get(key))


def _picture(folders: Sequence[Path]) -> str:
    """The task's picture that ``fedshift run`` and ``fedshift data`` draw beside the runs, in base64."""
    for path in dict.fromkeys(above / PICTURE for folder in folders for above in list(folder.parents)[:2]):
        if path.is_file() and not path.is_symlink() and path.stat().st_size <= MOST_PICTURE:
            content = path.read_bytes()
            if content.startswith(PNG):  # nothing else of a foreign folder belongs on a page that people send around
                return base64.b64encode(content).decode()
    return ""
