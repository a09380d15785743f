"""The run folders below a path, and what they say they are.

A folder is a run if it has settings or rounds; it is finished when it has ``done``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedshift.errors import UserError
from fedshift.store import seal
from fedshift.store.files import parsed
from fedshift.store.folder import CONFIG, DONE, METRICS, RunFolder
from fedshift.store.lock import check_free
from fedshift.store.plans import in_order


def read_config(folder: Path) -> dict[str, Any]:
    """The settings in a run folder."""
    path = folder / CONFIG
    if not (path.exists() or (folder / METRICS).exists() or (folder / DONE).exists()):
        raise UserError(f"{folder} is not a run folder: it has no {CONFIG}")
    config = seal.read_toml(path, must=RunFolder(folder).strict)
    return parsed(path, lambda: _checked(config))


def _checked(config: dict[str, Any]) -> dict[str, Any]:
    """What everybody counts on."""
    title_of(config).strip()
    tables = [config.get(key, {}) for key in ("evaluate", "sweep-point")]
    if type(config["seed"]) is not int or not all(isinstance(table, dict) for table in tables):
        raise ValueError("it has another shape")
    return config


def title_of(config: Mapping[str, Any]) -> str:
    """What people call the method of a run.

    >>> title_of({"method": {"name": "finetune", "label": "FedAvg-FT"}})
    'FedAvg-FT'
    """
    title: str = config["method"].get("label") or config["method"]["name"]
    return title


def find_runs(path: Path) -> list[Path]:
    """The finished runs in a folder (a run itself, or any above some), as they were planned; they may be damaged."""
    if not path.exists():
        raise UserError(f"there is no folder {path}")
    ended = (done.parent for done in path.rglob(DONE))
    found = [run for run in ended if (run / CONFIG).exists() or (run / METRICS).exists()]
    if not found:
        unfinished = next(path.rglob(METRICS), None)
        if unfinished is not None:
            check_free(unfinished.parent)
        hint = "; there is an unfinished one, go on with fedshift run ... --resume" if unfinished else ""
        raise UserError(f"{path} holds no finished run{hint}")
    return in_order(sorted(sorted(found), key=lambda run: _begun(run).stat().st_mtime))


def _begun(run: Path) -> Path:
    return run / CONFIG if (run / CONFIG).exists() else run / DONE
