"""What a served client has learnt, on disk: a version is a file that is there whole or not at all.

The folder holds ``service.json`` (whose it is), ``versions/NUMBER.safetensors`` (how it was then) and ``answers.sqlite``
(what was answered, by sample id). Version 0 is the artefact itself and needs no file. No image is ever written.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedshift.core.tree import Tree, to
from fedshift.errors import UserError
from fedshift.runs.artefact import difference, overlaid
from fedshift.runs.known import Known
from fedshift.serve.guards import Levels
from fedshift.serve.service import Condition, Service
from fedshift.store.files import Damaged
from fedshift.store.trees import facts_of, load, save

STOPPED = "stopped"  # the reason of a version that a server wrote when it ended in order
WHOSE = "service.json"


@dataclass(frozen=True)
class Version:
    """A line of the history."""

    number: int
    time: float  # seconds since 1970
    why: str
    seen: int
    learnt: int
    mode: str

    def to_json(self) -> dict[str, Any]:
        """As people are told."""
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.time))
        return {"version": self.number, "time": when, "why": self.why, "seen": self.seen, "learnt": self.learnt,
                "mode": self.mode}  # fmt: skip


@dataclass(frozen=True)
class History:
    """The versions of one service in a folder."""

    folder: Path
    service: Service
    keep: int = 20

    def claim(self) -> None:
        """Make the folder this service's, or refuse one that is another's."""
        origin = self.service.artefact.config.get("origin", {})
        files = self.service.artefact.config.get("files", {})
        mine = {"client": self.service.name, "adapter": self.service.label, "origin": origin, "files": files}
        text = json.dumps(mine, indent=1, sort_keys=True, default=str) + "\n"
        path = self.folder / WHOSE
        if not path.is_file():
            (self.folder / "versions").mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{WHOSE}.{os.getpid()}")
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
        elif path.read_text(encoding="utf-8") != text:
            raise UserError(
                f"{self.folder} holds what another artefact or adapter has learnt; choose another folder with --state"
            )

    def versions(self) -> list[Version]:
        """Oldest first; a file that is no version is passed over."""
        found = [Version(0, 0.0, "deployed", 0, 0, "adapting")]
        for number, path in self._files().items():
            with contextlib.suppress(Damaged):
                found.append(_version(number, facts_of(path)))
        return found

    def save(self, number: int, condition: Condition, why: str) -> Version:
        """Write a version, and forget some of the old ones (:func:`kept`)."""
        deployed = self.service.deployed
        trees: dict[str, Tree] = {"tree": difference(condition.tree, deployed), "levels": _tree_of(condition.levels)}
        if condition.good is not condition.tree:
            trees["good"] = difference(condition.good, deployed)
        if condition.judge.known is not None and self.service.artefact.known is None:
            trees["known"] = {"known": condition.judge.known.tensors()}
        facts = {
            "time": time.time(), "why": why, "mode": condition.mode, "fitted": condition.fitted, "seen": condition.seen,
            "learnt": condition.learnt, "falls": condition.falls, "quiet": condition.quiet,
        }  # fmt: skip
        save(self._path(number), trees, facts)
        files = self._files()
        for old in set(files) - kept(files, self.keep):
            files[old].unlink(missing_ok=True)
        return _version(number, facts)

    def load(self, number: int) -> Condition:
        """How the client was at a version."""
        if number == 0:
            return self.service.begin()
        path = self._path(number)
        if not path.is_file():
            there = ", ".join(map(str, [0, *self._files()]))
            raise UserError(f"there is no version {number}; there are: {there}")
        trees, stored = load(path)
        facts: Mapping[str, Any] = stored
        service = self.service
        known = Known.from_tensors(trees["known"]["known"]) if "known" in trees else service.artefact.known
        device = service.artefact.compute.device
        tree = overlaid(service.deployed, to(trees["tree"], device))
        levels = trees["levels"]["levels"]
        return Condition(
            tree=tree,
            good=overlaid(service.deployed, to(trees["good"], device)) if "good" in trees else tree,
            judge=service.judge(known),
            levels=Levels(levels["sums"].numpy(), levels["on"].numpy().astype(bool)),
            mode=facts["mode"],
            fitted=facts["fitted"],
            seen=facts["seen"],
            learnt=facts["learnt"],
            falls=facts["falls"],
            quiet=facts["quiet"],
        )

    def numbers(self) -> set[int]:
        """Of the versions that have a file."""
        return set(self._files())

    def _files(self) -> dict[int, Path]:
        files = (self.folder / "versions").glob("[0-9]*.safetensors")
        return dict(sorted((int(path.stem), path) for path in files))

    def _path(self, number: int) -> Path:
        return self.folder / "versions" / f"{number:08d}.safetensors"


def kept(numbers: Iterable[int], keep: int) -> set[int]:
    """Which of these versions to keep: the newest, and older ones ever further apart.

    >>> sorted(kept(range(1, 101), 8))
    [32, 48, 64, 72, 80, 88, 92, 93, 94, 95, 96, 97, 98, 99, 100]
    """
    newest = max(numbers, default=0)

    def stays(number: int) -> bool:
        octave = ((newest - number) // keep).bit_length()  # 0 for the newest, then twice as old each time
        return octave == 0 or number % 2 ** (octave + 1) == 0

    return {number for number in numbers if stays(number)}


def _version(number: int, facts: Mapping[str, Any]) -> Version:
    return Version(number, facts["time"], facts["why"], facts["seen"], facts["learnt"], facts["mode"])


def _tree_of(levels: Levels) -> Tree:
    sums, on = levels.sums.astype(np.float64), levels.on.astype(np.uint8)
    return {"levels": {"sums": torch.from_numpy(sums), "on": torch.from_numpy(on)}}
