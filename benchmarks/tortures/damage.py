"""Every file of a finished and of an interrupted run damaged in every way, then commands that read it or mend it."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors import SafetensorError

from benchmarks.tortures.world import (
    Outcome,
    Tally,
    command,
    content_of,
    contents,
    differences,
    killed_at,
    prepare,
    run_words,
)
from fedshift.store.files import Damaged

SETTINGS = {
    "rounds": "3", "checkpoint-every": "1", "evaluate.every": "1", "evaluate.adapted": "true", "evaluate.features": "5",
    "evaluate.predictions": "true", "notes": '["a note"]', "model.norm": "true",
    "method": '[{name="fedbn", adapters=["none", "bn"]}, {name="fedavg"}]',
}  # fmt: skip
LOST = ("metrics.jsonl", "best", "ckpt")  # how files begin that cannot be made again
ABSENT = ("holds no finished run", "interrupted after", "no features were saved")  # what is said where a file is gone
LATE = Path(".ckpt-000003")  # what a run is about to write when it is killed: it has a checkpoint then, and best states


def _flipped(content: bytes, chance: random.Random, part: int) -> bytes:
    """One bit somewhere in this third is another one."""
    place = chance.randrange(len(content) * part // 3, max(len(content) * (part + 1) // 3, 1))
    return content[:place] + bytes([content[place] ^ (1 << chance.randrange(8))]) + content[place + 1 :]


def ways(content: bytes, chance: random.Random) -> dict[str, bytes]:
    """What may have become of a file's content."""
    lines = content.splitlines(keepends=True)
    middle = len(lines) // 2
    return {
        "emptied": b"",
        "halved": content[: len(content) // 2],
        "cut at a line": content[: content[: len(content) * 2 // 3].rfind(b"\n") + 1],
        "short of a byte": content[:-1],
        "with a byte more": content + b"\0",
        "twice": content * 2,
        "without a line": b"".join(lines[:middle] + lines[middle + 1 :]),
        "with a line twice": b"".join(lines[: middle + 1] + lines[middle:]),
        "with other ends of lines": content.replace(b"\n", b"\r\n"),
        "garbled": chance.randbytes(len(content)),
        "garbled at the end": content[: len(content) // 2] + chance.randbytes(len(content) - len(content) // 2),
        "zeroed": bytes(len(content)),
        "zeroed at the end": content[: len(content) // 2] + bytes(len(content) - len(content) // 2),
        **{f"a bit flipped in part {part + 1}": _flipped(content, chance, part) for part in range(3)},
        "a table": b'{"a": {"b": [1, null]}}\n',
        "a list": b"[1, 2]\n",
        "other settings": b"seed = 'x'\nmethod = 3\n",
    }


def _as_folder(target: Path) -> None:
    target.unlink()
    target.mkdir()


def _as_pipe(target: Path) -> None:
    target.unlink()
    os.mkfifo(target)


def _as_link(target: Path) -> None:
    target.unlink()
    target.symlink_to(target.name)


def _as_device(target: Path) -> None:
    target.unlink()
    target.symlink_to("/dev/zero")


KINDS: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "a folder": _as_folder,
    "a pipe": _as_pipe,
    "a link to itself": _as_link,
    "a link to a device": _as_device,
}


class World:
    """A finished experiment of two runs, one that was killed half-way, and a client that wants to join."""

    def __init__(self, base: Path) -> None:
        self.base, self.copy = base, base / "copy"
        prepare(base)
        for name in ("finished", "interrupted", "never"):
            words = run_words(base / name, SETTINGS, "--engine", "sequential")
            killed = name == "interrupted"
            ended = command(*words, before=killed_at(LATE, 1) if killed else lambda: None)
            assert (ended.code < 0) if killed else (ended.code == 0), ended.err
        found = {path.name for path in self.run("interrupted").rglob("*")}
        assert {"ckpt-000002.safetensors", "best.safetensors", "bn.safetensors", ".lock"} <= found, found
        (base / "client").mkdir()
        for k in range(4):
            Image.fromarray(torch.randint(0, 255, (8, 8), dtype=torch.uint8).numpy()).save(base / "client" / f"{k}.png")

    def run(self, kind: str) -> Path:
        """The run whose files are damaged."""
        (found,) = (self.base / kind / "small" / "fedbn").iterdir()
        return found

    def files(self, kind: str) -> list[Path]:
        """All of them, and the plan beside the runs."""
        own = (path for path in self.run(kind).rglob("*") if path.is_file())
        return [self.base / kind / "small" / "plan.json", *sorted(own)]

    def readers(self) -> list[list[Any]]:
        """Commands that read a finished run."""
        run, client = self.copy / self.run("finished").relative_to(self.base / "finished"), self.base / "client"
        return [
            ["advise", self.copy],
            ["cost-to-target", self.copy, "--target", "5"],
            ["join", run, "--data", client],
            ["join", self.copy, "--method", "fedbn", "--data", client, "--adapter", "bn"],
            ["report", self.copy],
            ["export", run, "--client", "north", "--adapter", "bn"],
            ["export", run, "--unseen"],
            ["show", run, "--by", "client"],
            ["compare", self.copy, self.base / "never"],
            ["inspect", run, "--samples", "3"],
            ["show", self.copy, "--format", "json"],
            ["show", run, "--picture", "tsne"],
            ["report", run],
        ]


def damages(files: list[Path], chance: random.Random) -> Iterator[tuple[Path, str, Callable[[Path], object]]]:
    """Every file with every way to damage it; no two of them come to the same."""
    for path in files:
        content = path.read_bytes()
        seen = {content}
        for way, changed in ways(content, chance).items() if content else ():
            if changed not in seen:
                seen.add(changed)
                yield path, way, _writer(changed)
        for way, damage in KINDS.items():
            yield path, way, damage


def _writer(content: bytes) -> Callable[[Path], object]:
    return lambda target: target.write_bytes(content)


def torture(base: Path, part: int = 1, of: int = 1, seed: int = 0, step: int = 1, only: str = "") -> Tally:
    """Every ``step``-th trial of one part of several, each on a copy of its own."""
    world, tally = World(base), Tally()
    whole = contents(world.base / "never")
    readers = cycle(world.readers())
    for kind in ("finished", "interrupted"):
        before = contents(world.base / kind)
        for number, (path, way, damage) in enumerate(damages(world.files(kind), random.Random(seed))):
            turn = next(readers)
            if number % of != part - 1 or (number // of) % step or only not in f"{kind} {path.name} {way}":
                continue
            shutil.rmtree(world.copy, ignore_errors=True)
            shutil.copytree(world.base / kind, world.copy)
            name = path.relative_to(world.base / kind)
            target = world.copy / name
            damage(target)
            tally.count("damaged files")
            trial = f"{kind}, {path.relative_to(world.base / kind / 'small')} {way}"
            mending = run_words(world.copy, SETTINGS, "--engine", "sequential")
            reading = ["show", world.copy] if number % 2 or kind == "interrupted" else turn
            for words in (reading, mending, [*mending, "--resume"]):
                ended = command(*words)
                several = kind == "finished" and words == ["show", world.copy]
                _judge(tally, f"{trial}, {words[0]}", ended, target, several)
                if not ended.code and words is mending:
                    break
            lost = path.relative_to(world.run(kind).parents[1]).as_posix().split("/", 2)[-1].startswith(LOST)
            _ended(tally, trial, world.copy, target, lost, before, whole)
            tally.progress("damaged files", 100)
    return tally


def _judge(tally: Tally, trial: str, ended: Outcome, target: Path, of_several: bool) -> None:
    """0, or one sentence that names the file; and a table of several runs is printed whatever is wrong with one."""
    tally.count("commands")
    wrong = ended.wrong()
    if wrong:
        tally.fail(f"{trial}: {wrong}")
    elif ended.code:
        tally.count("refusals")
        expected = (*ABSENT, str(target.parent), target.name)
        if not any(words in ended.err for words in expected):
            tally.fail(f"{trial}: the file is not named: {ended.err.strip()}")
        if of_several:
            tally.fail(f"{trial}: one damaged run hides the others: {ended.err.strip()}")


def _ended(
    tally: Tally, trial: str, copy: Path, target: Path, lost: bool, before: dict[str, Any], whole: dict[str, Any]
) -> None:
    """At the end everything is what it would be without damage.

    Or the damaged file lies there, because it cannot be made again or is no file, and every other one is what it was or
    what it becomes.
    """
    name, rest = str(target.relative_to(copy)), contents(copy, target)
    missed = [one for one in differences(_but(whole, name), rest) if not _beside(one)]
    if not missed and _sound(target, whole.get(name)):
        tally.count("made again")
        return
    tally.count("named and left")
    if not lost and target.is_file():
        tally.fail(f"{trial}: not what it was: {[name, *missed][:4]}")
    for key in dict.fromkeys([*_but(before, name), *rest]):
        if _beside(f"/{key}"):
            continue
        if key not in rest:
            tally.fail(f"{trial}: {key} is gone")
        elif all(key not in one or [*differences(one[key], rest[key])] for one in (before, whole)):
            tally.fail(f"{trial}: {key} has changed")


def _sound(target: Path, expected: Any) -> bool:
    """Whether a file is what it would be without damage; that may be that it is not there."""
    if not target.is_file():
        return expected is None and not target.is_symlink() and not target.exists()
    try:
        return expected is not None and not [*differences(expected, content_of(target))]
    except (Damaged, LookupError, OSError, ValueError, SafetensorError):
        return False


def _but(files: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in files.items() if key != name}


def _beside(change: str) -> bool:
    """What commands write into a folder of runs beside the runs, and what a killed one had begun to write."""
    return bool(re.search(r"/(joined|exported|inspect|tsne|radar|results|task|report|\.lock)|/\.[^/]+\.\d+", change))
