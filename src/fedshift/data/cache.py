"""The cache: decoded images and made tasks, which may be of patients. Only their user may look into it.

Every entry is a folder that is there whole or not at all. It is filled under another name, and what a process leaves
behind that was killed meanwhile is removed by the next one.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedshift.data._own_folders import OWNER, claimed, removed, sweep
from fedshift.errors import HostError

SOURCES, TASKS = "sources", "tasks"
_FACTS = {SOURCES: "meta.json", TASKS: "task.json"}  # what tells an entry from other folders, and says what it is
_HALF = ".making-"
_PRIVATE = 0o700
_DAY = 86400.0


@contextmanager
def making(entry: Path) -> Iterator[Path]:
    """A folder to fill, which takes the entry's place when all is well; otherwise nothing is left of it.

    If another process has made the same entry meanwhile, that one stays.
    """
    try:
        _make_private(entry.parent)
        sweep(entry.parent, _HALF)
        half, lock = claimed(entry.parent, _HALF)
        try:
            yield half
            with suppress(OSError):  # somebody was faster
                os.replace(half, entry)
                (entry / OWNER).unlink()
        finally:
            removed(half, lock)
    except OSError as error:
        hint = "set FEDSHIFT_CACHE to another folder, or make room with fedshift cache clear"
        raise HostError.of(error, f"the cache {entry.parent}", hint) from None


def used(entry: Path) -> None:
    """Note that an entry was of use today."""
    with suppress(OSError):
        os.utime(entry)


def _make_private(folder: Path) -> None:
    """Make a folder of the cache, and close it to others: it may be older than this rule, or than the user's mask."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=_PRIVATE, exist_ok=True)
    if folder.stat().st_mode & 0o077:
        folder.chmod(_PRIVATE)


@dataclass(frozen=True)
class Entry:
    """What lies in the cache."""

    path: Path
    kind: str  # sources: decoded images; tasks: who has which, and shifted images
    source: str  # what it was made of, as it was asked for first
    what: str  # in a few words
    bytes: int
    used: float  # when it was last of use, in seconds since 1970

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "kind": self.kind,
            "source": self.source,
            "what": self.what,
            "bytes": self.bytes,
            "used": time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(self.used)),
            "path": str(self.path),
        }


def entries(cache: Path) -> list[Entry]:
    """What lies in a cache, the last used first; folders that are no entries are left alone.

    >>> import tempfile
    >>> entries(Path(tempfile.mkdtemp()))
    []
    """
    found = [_entry(path, kind) for kind, name in _FACTS.items() for path in (cache / kind).glob(f"*/{name}")]
    return sorted((entry for entry in found if entry is not None), key=lambda entry: -entry.used)


def clear(cache: Path, unused_days: float = 0.0) -> list[Entry]:
    """Remove all entries, or those that were of no use for so many days, and what killed processes left; the entries.

    >>> import tempfile
    >>> clear(Path(tempfile.mkdtemp()))
    []
    """
    latest = time.time() - unused_days * _DAY
    gone = [entry for entry in entries(cache) if entry.used <= latest]
    try:
        for entry in gone:
            shutil.rmtree(entry.path)
        for kind in _FACTS:
            sweep(cache / kind, _HALF)
            for half in (cache / kind).glob(".*"):  # of earlier versions, which had no locks
                if not half.name.startswith(_HALF) and half.stat().st_mtime < time.time() - _DAY:
                    shutil.rmtree(half)
    except OSError as error:
        raise HostError.of(error) from None
    return gone


def _entry(facts: Path, kind: str) -> Entry | None:
    path = facts.parent
    if path.name.startswith(".") or path.is_symlink():
        return None
    try:
        size = sum(file.stat().st_size for file in path.iterdir())
        last = path.stat().st_mtime
        told = json.loads(facts.read_text(encoding="utf-8"))
        source, what = _said(told, kind)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        source, what, size, last = "", "damaged", 0, 0.0
    return Entry(path, kind, source, what, size, last)


def _said(told: Any, kind: str) -> tuple[str, str]:
    """The source and a few words."""
    made = told["provenance"]
    if kind == SOURCES:
        return str(told.get("source", "")), f"{made['images']:,} images, {str(made['conversion']).partition(',')[0]}"
    counts = made["counts"]
    streams = ", ".join(stream["name"] for stream in told["streams"] if stream["shifted"])
    shifted = f", shifted images of {streams}" if streams else ""
    return str(made["source"].get("source", "")), f"{counts['clients']} clients, {counts['unseen']} unseen{shifted}"
