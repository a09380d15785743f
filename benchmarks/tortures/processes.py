"""Two processes in one run folder, and children whose parent is killed."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from tests.forks import LONGEST

from benchmarks.tortures.world import Tally, command, contents, differences, fork, outcome, prepare, run_words

LONG = {"rounds": "300", "checkpoint-every": "1", "evaluate.every": "4"}
MOST = 7  # second starts beside one first
OPTIONS = ([], ["--resume"], ["--restart"])
ORPHANS = {"rounds": "80", "checkpoint-every": "1", "evaluate.every": "0", "model.name": "cnn", "model.width": "2",
           "model.hidden": "4", "method": '[{name="fedavg"}, {name="fedprox"}]'}  # fmt: skip
WAYS = (["--jobs", "2", "--engine", "sequential"], ["--engine", "parallel"])
MARK = "FEDSHIFT_TORTURE"


def doubles(base: Path, times: int, seed: int) -> Tally:
    """A second process that wants the folder of a running one: it is refused by name, and the first one's run is whole."""
    prepare(base)
    tally, chance = Tally(), random.Random(seed)
    ended = command(*run_words(base / "whole", LONG, "--engine", "sequential"))
    assert ended.code == 0, ended.err
    whole, number = contents(base / "whole"), 0
    while tally.counts.get("doubled starts", 0) < times:
        number += 1
        out = base / f"double-{number}"
        words = run_words(out, LONG, "--engine", "sequential")
        first, said = fork(words)
        while not [*out.rglob("ckpt-00000[1-9]*")]:
            time.sleep(0.01)
        for k in range(MOST):
            time.sleep(chance.uniform(0, 0.1))
            more = OPTIONS[(number + k) % len(OPTIONS)]
            second = command(*words, *more)
            if [*out.rglob("done")]:  # the first was faster: this was no second
                break
            tally.count("doubled starts")
            if second.code != 2 or second.wrong() or f"process {first} on" not in second.err:
                tally.fail(f"start {number} {more}: {second.code} {second.err.strip()[-300:]}")
        ended = outcome(first, said)
        tally.count("runs")
        if ended.code or ended.wrong():
            tally.fail(f"start {number}: the first one: {ended.code} {ended.err.strip()[-300:]}")
        changed = list(differences(whole, contents(out)))
        if changed:
            tally.fail(f"start {number}: {changed[:4]}")
        else:
            tally.count("bit-identical")
    return tally


def orphans(base: Path, times: int, seed: int) -> Tally:
    """A parent of worker processes is killed: they end with it and write nothing more; the next start sweeps and goes on."""
    prepare(base)
    tally, chance = Tally(), random.Random(seed)
    (base / "tmp").mkdir()
    ended = command(*run_words(base / "whole", ORPHANS, "--engine", "sequential"))
    assert ended.code == 0, ended.err
    whole, number = _but_engine(contents(base / "whole")), 0
    while tally.counts.get("orphanings", 0) < times:
        number += 1
        out = base / f"orphan-{number}"
        marked = partial(_marked, out, base / "tmp")
        parent, said = fork(run_words(out, ORPHANS, *WAYS[number % 2]), marked)
        until = time.monotonic() + LONGEST
        while not ([*out.rglob("ckpt-00000[1-9]*")] and _family(out)):
            assert time.monotonic() < until, f"orphaning {number}: it never began"
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 0.3))
        children = len(_family(out))
        how = chance.choice((signal.SIGKILL, signal.SIGTERM))
        os.kill(parent, how)
        ended = outcome(parent, said)
        if ended.code == 0:  # it was faster
            continue
        tally.count("orphanings")
        tally.count("children", children)
        if ended.code != (-how if how == signal.SIGKILL else 128 + how):
            tally.fail(f"orphaning {number}: exit code {ended.code} after signal {how}: {ended.err.strip()[-300:]}")
        until = time.monotonic() + 10
        while _family(out) and time.monotonic() < until:
            time.sleep(0.02)
        if left := _family(out):
            tally.fail(f"orphaning {number}: still alive: {left}")
        before = _written(out)
        time.sleep(0.5)
        if _written(out) != before:
            tally.fail(f"orphaning {number}: somebody still writes")
        scratch = [path for path in _scratch(base / "tmp") if path.name.startswith(f"fedshift-{parent}-")]
        ended = command(*run_words(out, ORPHANS, "--engine", "sequential", "--resume"), before=marked)
        if ended.code or ended.wrong():
            tally.fail(f"orphaning {number}: the next start: {ended.err.strip()[-300:]}")
        tally.count("folders left and swept", len(scratch))
        if [path for path in scratch if path.exists()]:
            tally.fail(f"orphaning {number}: memory is still taken: {scratch}")
        changed = list(differences(whole, _but_engine(contents(out))))
        if changed:
            tally.fail(f"orphaning {number}: {changed[:4]}")
        else:
            tally.count("bit-identical")
    return tally


def _marked(out: Path, temporary: Path) -> None:
    """Whoever is started from here on is known by its environment."""
    os.environ.update({MARK: str(out), "TMPDIR": str(temporary)})
    tempfile.tempdir = None


def _but_engine(files: dict[str, Any]) -> dict[str, Any]:
    """Who trained a run is in its ending and its checkpoints; what was trained is the same on these engines."""
    facts = ("made-by", "engine")

    def without(content: Any) -> Any:
        if isinstance(content, dict):
            return {key: without(value) for key, value in content.items() if key not in facts}
        return tuple(map(without, content)) if isinstance(content, tuple) else content

    return {name: without(content) for name, content in files.items()}


def _family(out: Path) -> list[int]:
    """Processes whose environment has our mark, without those that have ended and wait to be noticed."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={out}".encode() in (folder / "environ").read_bytes() and (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def _scratch(temporary: Path) -> list[Path]:
    return [*Path("/dev/shm").glob("fedshift-*"), *temporary.glob("fedshift-*")]


def _written(out: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
