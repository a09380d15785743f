"""What a served client has learnt, on disk: a version is a file that is there whole or not at all.

The folder holds ``service.json`` (whose it is), ``versions/NUMBER.safetensors`` (how it was then) and ``answers.sqlite``
(what was answered, by sample id). Version 0 is the artefact itself and needs no file. No image is ever written.

A version that is damaged is passed over and said so, never written over; one that another artefact or adapter has learnt
is refused.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from fedshift.core.tree import Tree, to
from fedshift.errors import UserError
from fedshift.runs.artefact import difference, overlaid
from fedshift.runs.known import Known
from fedshift.serve.guards import Levels
from fedshift.serve.service import Condition, Mode, Service
from fedshift.store.files import Damaged, attempt, parsed, read_text, sweep, write
from fedshift.store.seal import digest_of
from fedshift.store.trees import facts_of, load, save

STOPPED = "stopped"  # the reason of a version that a server wrote when it ended in order
WHOSE, VERSIONS = "service.json", "versions"
OWNER = "owner"  # what a version calls the digest of whose it is
REMEDY = "put it back from a copy; the newest version that is sound goes on without it"
ELSEWHERE = "choose another folder with --state"
RETRIED = "what was written before is whole, and it is tried again"
LATEST = 1e11  # seconds since 1970 that a calendar can show


@dataclass(frozen=True)
class Version:
    """A line of the history."""

    number: int
    time: float  # seconds since 1970
    why: str
    seen: int
    learnt: int
    mode: str
    answers: int = 0  # the number of the newest that was on disk before

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

    def claim(self) -> list[str]:
        """Make the folder this service's, or refuse one that is another's; what is to be said about that."""
        path, place = self.folder / WHOSE, self.folder / VERSIONS
        if os.path.lexists(place) and not place.is_dir():
            raise Damaged(place, "it is no folder", "move it away")
        place.mkdir(parents=True, exist_ok=True)
        for folder in (self.folder, place):
            sweep(folder)  # of a write that was killed
        said = []
        if os.path.lexists(path):
            try:
                self._check_claim(path)
                return []
            except Damaged as error:
                if path.is_dir() or not self._vouched():
                    raise
                said = [f"{path} was damaged ({error.why}) and is written again: versions say whose they are"]
        write(path, self._claim, ELSEWHERE)
        return said

    def versions(self, damaged: list[Damaged] | None = None) -> list[Version]:
        """Oldest first; a file that is no version is passed over, and put into ``damaged`` if that is given."""
        found = [Version(0, 0.0, "deployed", 0, 0, "adapting")]
        passed_over = [] if damaged is None else damaged
        for number, path in self._files().items():
            version = attempt(partial(self._version, number, path), passed_over)
            found += [] if version is None else [version]
        return found

    def save(self, number: int, condition: Condition, why: str, answers: int = 0) -> Version:
        """Write a version, and forget some of the old ones (:func:`kept`)."""
        deployed = self.service.deployed
        trees: dict[str, Tree] = {"tree": difference(condition.tree, deployed), "levels": _tree_of(condition.levels)}
        if condition.good is not condition.tree:
            trees["good"] = difference(condition.good, deployed)
        if condition.judge.known is not None and self.service.artefact.known is None:
            trees["known"] = {"known": condition.judge.known.tensors()}
        facts = {
            "time": time.time(), "why": why, "mode": condition.mode, "fitted": condition.fitted, "seen": condition.seen,
            "learnt": condition.learnt, "falls": condition.falls, "quiet": condition.quiet, OWNER: self._owner,
            "answers": answers,
        }  # fmt: skip
        save(self._path(number), trees, facts, RETRIED)
        files = self._files()
        for old in set(files) - kept(files, self.keep):
            if not files[old].is_dir():  # which nobody here has made
                files[old].unlink(missing_ok=True)
        return _version(number, facts)

    def load(self, number: int) -> Condition:
        """How the client was at a version."""
        if number == 0:
            return self.service.begin()
        path = self._path(number)
        if not os.path.lexists(path):
            there = ", ".join(map(str, [0, *self._files()]))
            raise UserError(f"there is no version {number}; there are: {there}")
        trees, facts = load(path, must=True, remedy=REMEDY)
        self._check_owner(path, facts)
        return parsed(path, lambda: self._condition(trees, facts), remedy=REMEDY)

    def numbers(self) -> set[int]:
        """Of the versions that have a file."""
        return set(self._files())

    @property
    def next(self) -> int:
        """A number that no file has, damaged ones included: nothing is written over."""
        return max(self.numbers(), default=0) + 1

    def _files(self) -> dict[int, Path]:
        files = ((path.stem, path) for path in (self.folder / VERSIONS).glob("*.safetensors"))
        own = ((int(name), path) for name, path in files if name.isdecimal() and name.isascii())
        return dict(sorted((number, path) for number, path in own if number and path == self._path(number)))

    def _path(self, number: int) -> Path:
        return self.folder / VERSIONS / f"{number:08d}.safetensors"

    # ---- whose it is ---------------------------------------------------------------------------------------------------
    @cached_property
    def _claim(self) -> str:
        """The client, the adapter, and where its artefact comes from, with digests of its files."""
        config = self.service.artefact.config
        origin, files = config.get("origin", {}), config.get("files", {})
        mine = {"client": self.service.name, "adapter": self.service.label, "origin": origin, "files": files}
        return json.dumps(mine, indent=1, sort_keys=True, default=str) + "\n"

    @cached_property
    def _owner(self) -> str:
        """The same in short: every version says it, because files are copied from folder to folder."""
        return digest_of(self._claim.encode())

    def _check_claim(self, path: Path) -> None:
        remedy = "put it back from a copy, or " + ELSEWHERE
        found = read_text(path, remedy)
        if found == self._claim:
            return
        if parsed(path, lambda: set(json.loads(found)), remedy=remedy) != set(json.loads(self._claim)):
            raise Damaged(path, "it has another shape", remedy)
        raise UserError(f"{self.folder} holds what another artefact or adapter has learnt; {ELSEWHERE}")

    def _vouched(self) -> bool:
        """Whether every version that can be read says that it is this service's."""
        facts = (attempt(partial(facts_of, path), []) for path in self._files().values())
        return all(one is None or one.get(OWNER) == self._owner for one in facts)

    def _check_owner(self, path: Path, facts: Mapping[str, Any]) -> None:
        if facts.get(OWNER, self._owner) != self._owner:  # older versions do not say it: their folder does
            raise UserError(f"{path} is what another artefact or adapter has learnt; move it away, or {ELSEWHERE}")

    # ---- what a version says -------------------------------------------------------------------------------------------
    def _version(self, number: int, path: Path) -> Version:
        facts = facts_of(path, REMEDY)
        self._check_owner(path, facts)
        return parsed(path, lambda: _version(number, facts), remedy=REMEDY)

    def _condition(self, trees: Mapping[str, Tree], facts: Mapping[str, Any]) -> Condition:
        service = self.service
        known = Known.from_tensors(trees["known"]["known"]) if "known" in trees else service.artefact.known
        judge = service.judge(known)
        stored = trees["levels"]["levels"]
        levels = Levels(stored["sums"].numpy(), stored["on"].numpy().astype(bool))
        wanted = judge.guards.start().sums.shape
        if not levels.sums.shape == levels.on.shape == wanted:
            raise ValueError(f"it has {len(levels.sums)} detectors, not {wanted[0]}")
        device = service.artefact.compute.device
        tree = overlaid(service.deployed, to(trees["tree"], device))
        return Condition(
            tree=tree,
            good=overlaid(service.deployed, to(trees["good"], device)) if "good" in trees else tree,
            judge=judge,
            levels=levels,
            mode=_checked(facts["mode"], facts["mode"] in get_args(Mode)),
            fitted=_checked(facts["fitted"], type(facts["fitted"]) is bool),
            seen=_count(facts["seen"]),
            learnt=_count(facts["learnt"]),
            falls=_count(facts["falls"]),
            quiet=_count(facts["quiet"]),
        )


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
    written, why, mode = facts["time"], facts["why"], facts["mode"]
    return Version(
        number,
        _checked(written, type(written) in (int, float) and 0 <= written < LATEST),
        _checked(why, isinstance(why, str)),
        _count(facts["seen"]),
        _count(facts["learnt"]),
        _checked(mode, mode in get_args(Mode)),
        _count(facts.get("answers", 0)),
    )


def _checked(value: Any, sound: bool) -> Any:
    if not sound:
        raise ValueError(f"it says {value!r} where that cannot be")
    return value


def _count(value: Any) -> int:
    return int(_checked(value, type(value) is int and value >= 0))


def _tree_of(levels: Levels) -> Tree:
    sums, on = levels.sums.astype(np.float64), levels.on.astype(np.uint8)
    return {"levels": {"sums": torch.from_numpy(sums), "on": torch.from_numpy(on)}}
