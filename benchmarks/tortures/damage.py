"""Every file of a finished and of an interrupted run damaged in every way, then commands that read it or mend it."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from benchmarks.tortures.world import Outcome, Tally, command, contents, differences, killed_at, prepare, run_words

SETTINGS = {
    "rounds": "3", "checkpoint-every": "1", "evaluate.adapted": "true", "evaluate.features": "5",
    "evaluate.predictions": "true", "notes": '["a note"]', "model.norm": "true",
    "method": '[{name="fedbn", adapters=["none", "bn"]}, {name="fedavg"}]',
}  # fmt: skip
LOST = ("metrics.jsonl", "best", "ckpt")  # how files begin that cannot be made again
LATE = 60  # the operation on files at which a run is killed: it has a checkpoint then, and a best state


def _flipped(content: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(content))
    return content[:place] + bytes([content[place] ^ (1 << chance.randrange(8))]) + content[place + 1 :]


def ways(content: bytes, chance: random.Random) -> dict[str, bytes]:
    """What may have become of a file."""
    return {
        "emptied": b"",
        "halved": content[: len(content) // 2],
        "cut at a line": content[: content[: len(content) * 2 // 3].rfind(b"\n") + 1],
        "garbled": chance.randbytes(len(content)),
        "zeroed": bytes(len(content)),
        "a bit flipped": _flipped(content, chance),
        "a table": b'{"a": {"b": [1, null]}}\n',
        "a list": b"[1, 2]\n",
        "other settings": b"seed = 'x'\nmethod = 3\n",
    }


class World:
    """A finished experiment of two runs, one that was killed half-way, and a client that wants to join."""

    def __init__(self, base: Path) -> None:
        self.base, self.copy = base, base / "copy"
        prepare(base)
        for name in ("finished", "interrupted", "never"):
            words = run_words(base / name, SETTINGS, "--engine", "sequential")
            killed = name == "interrupted"
            ended = command(*words, before=killed_at(base / name, LATE) if killed else lambda: None)
            assert (ended.code < 0) if killed else (ended.code == 0), ended.err
        assert [*(base / "interrupted").rglob("ckpt-*")], "it was killed too early"
        (base / "client").mkdir()
        for k in range(4):
            Image.fromarray(torch.randint(0, 255, (8, 8), dtype=torch.uint8).numpy()).save(base / "client" / f"{k}.png")

    def run(self, kind: str) -> Path:
        """The run whose files are damaged."""
        (found,) = (self.base / kind / "small" / "fedbn").iterdir()
        return found

    def readers(self) -> list[list[Any]]:
        """Commands that read a finished run."""
        run, client = self.copy / self.run("finished").relative_to(self.base / "finished"), self.base / "client"
        return [
            ["advise", self.copy],
            ["cost-to-target", self.copy, "--target", "5"],
            ["join", run, "--data", client],
            ["join", self.copy, "--method", "fedbn", "--data", client, "--adapter", "bn"],
            ["export", run, "--client", "north", "--adapter", "bn"],
            ["export", run, "--unseen"],
            ["show", run, "--by", "client"],
            ["inspect", run, "--samples", "3"],
            ["show", self.copy, "--format", "json"],
            ["show", run, "--picture", "tsne"],
        ]


def damages(folder: Path, chance: random.Random) -> Iterator[tuple[Path, str, Callable[[Path], object]]]:
    """Every file of a run with every way to damage it."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"):
        content = path.read_bytes()
        for way, changed in ways(content, chance).items() if content else ():
            if changed != content:
                yield path.relative_to(folder), way, _writer(changed)
        yield path.relative_to(folder), "deleted", Path.unlink
        yield path.relative_to(folder), "a folder", _as_folder


def _writer(content: bytes) -> Callable[[Path], object]:
    return lambda target: target.write_bytes(content)


def _as_folder(target: Path) -> None:
    target.unlink()
    target.mkdir()


def torture(base: Path, part: int = 1, of: int = 1, seed: int = 0, step: int = 1) -> Tally:
    """Every ``step``-th trial of one part of several, each on a copy of its own."""
    world, tally = World(base), Tally()
    whole = contents(world.run("never"))
    readers = cycle(world.readers())
    for kind in ("finished", "interrupted"):
        before = contents(world.run(kind))
        for number, (name, way, damage) in enumerate(damages(world.run(kind), random.Random(seed))):
            turn = next(readers)
            if number % of != part - 1 or (number // of) % step:
                continue
            shutil.rmtree(world.copy, ignore_errors=True)
            shutil.copytree(world.base / kind, world.copy)
            target = world.copy / world.run(kind).relative_to(world.base / kind) / name
            damage(target)
            tally.count("damaged files")
            mending = run_words(world.copy, SETTINGS, "--engine", "sequential")
            reading = ["show", world.copy] if number % 2 or kind == "interrupted" else turn
            for words in (reading, mending, [*mending, "--resume"]):
                ended = command(*words)
                several = kind == "finished" and words == ["show", world.copy]
                _judge(tally, f"{kind}, {name} {way}, {words[0]}", ended, target, several)
                if not ended.code and words is mending:
                    break
            _nothing_lost(tally, f"{kind}, {name} {way}", target, name, before, whole)
    return tally


def _judge(tally: Tally, trial: str, ended: Outcome, target: Path, of_several: bool) -> None:
    """0, or one sentence that names the file; and a table of several runs is printed whatever is wrong with one."""
    tally.count("commands")
    wrong = ended.wrong()
    if wrong:
        tally.fail(f"{trial}: {wrong}")
    elif ended.code:
        tally.count("refusals")
        expected = ("holds no finished run", "interrupted after", str(target.parent), target.name)
        if not any(words in ended.err for words in expected):
            tally.fail(f"{trial}: the file is not named: {ended.err.strip()}")
        if of_several:
            tally.fail(f"{trial}: one damaged run hides the others: {ended.err.strip()}")


def _nothing_lost(
    tally: Tally, trial: str, target: Path, name: Path, before: dict[str, Any], whole: dict[str, Any]
) -> None:
    """At the end the run is what it would be without damage; or the damaged file lies there, and all others are the same."""
    folder = target.parents[len(name.parts) - 1]
    lost = str(name).startswith(LOST) or target.is_dir()
    if not lost:
        found = [one for one in differences(whole, contents(folder)) if not _beside(one)]
        tally.count("made again")
        if found:
            tally.fail(f"{trial}: not what it was: {found[:4]}")
        return
    tally.count("named and left")
    found = [one for one in differences(_but(before, name), _but(contents(folder, target), name)) if not _beside(one)]
    if found and [
        one for one in differences(_but(whole, name), _but(contents(folder, target), name)) if not _beside(one)
    ]:
        tally.fail(f"{trial}: others have changed: {found[:4]}")


def _but(files: dict[str, Any], name: Path) -> dict[str, Any]:
    return {key: value for key, value in files.items() if key != str(name)}


def _beside(change: str) -> bool:
    """What other commands write into a run folder."""
    return change.startswith(("/joined", "/exported", "/inspect", "/tsne", "/.lock"))
