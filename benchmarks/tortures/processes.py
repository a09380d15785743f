"""Two processes in one run folder, and children whose parent is killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.tortures.world import Tally, command, contents, differences, fork, outcome, prepare, run_words

LONG = {"rounds": "400", "checkpoint-every": "1", "evaluate.every": "4"}
ORPHANS = {"rounds": "100000", "checkpoint-every": "1", "evaluate.every": "0", "model.name": "cnn", "model.width": "2",
           "method": '[{name="fedavg"}, {name="fedprox"}]'}  # fmt: skip
SHORT = {**ORPHANS, "rounds": "2"}
MARK = "FEDSHIFT_TORTURE"


def doubles(base: Path, times: int, seed: int) -> Tally:
    """A second process that wants the folder of a running one: it is refused by name, and the first one's run is whole."""
    prepare(base)
    tally, chance = Tally(), random.Random(seed)
    ended = command(*run_words(base / "whole", LONG, "--engine", "sequential"))
    assert ended.code == 0, ended.err
    whole = contents(base / "whole")
    for number in range(times):
        out = base / f"double-{number}"
        words = run_words(out, LONG, "--engine", "sequential")
        first, said = fork(words)
        while not [*out.rglob("ckpt-00000[1-9]*")]:
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.5))
        for more in ([], ["--resume"], ["--restart"]):
            second = command(*words, *more)
            tally.count("doubled starts")
            running = not [*out.rglob("done")]
            if running and (second.code != 2 or second.wrong() or f"process {first} on" not in second.err):
                tally.fail(f"start {number} {more}: {second.code} {second.err.strip()[-300:]}")
        ended = outcome(first, said)
        if ended.code or ended.wrong():
            tally.fail(f"start {number}: the first one: {ended.code} {ended.err.strip()[-300:]}")
        changed = list(differences(whole, contents(out)))
        if changed:
            tally.fail(f"start {number}: {changed[:4]}")
        else:
            tally.count("runs bit-identical")
    return tally


def orphans(base: Path, times: int, seed: int) -> Tally:
    """A parent of worker processes is killed: they end with it, write nothing more, and the next start sweeps up."""
    prepare(base)
    tally, chance = Tally(), random.Random(seed)
    (base / "tmp").mkdir()
    for number in range(times):
        out = base / f"orphan-{number}"
        way = [["--jobs", "2", "--engine", "sequential"], ["--engine", "parallel"]][number % 2]
        environment = {**os.environ, MARK: str(out), "TMPDIR": str(base / "tmp"), "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-m", "fedshift.cli", *run_words(out, ORPHANS, *way)]
        parent = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not [*out.rglob("ckpt-00000[1-9]*")] and parent.poll() is None:
            time.sleep(0.05)
        time.sleep(chance.uniform(0, 0.5))
        children = len(_family(out)) - 1
        parent.send_signal(chance.choice((signal.SIGKILL, signal.SIGTERM)))
        parent.wait()
        tally.count("orphanings")
        tally.count("children", children)
        until = time.monotonic() + 10
        while _family(out) and time.monotonic() < until:
            time.sleep(0.05)
        if left := _family(out):
            tally.fail(f"orphaning {number}: still alive: {left}")
        before = _written(out)
        time.sleep(0.5)
        if _written(out) != before:
            tally.fail(f"orphaning {number}: somebody still writes")
        scratch = [path for path in _scratch(base / "tmp") if f"-{parent.pid}-" in path.name]
        ended = command(*run_words(out, SHORT, "--engine", "sequential"))  # other rounds: another run, which sweeps
        if ended.code or ended.wrong():
            tally.fail(f"orphaning {number}: the next start: {ended.err.strip()[-300:]}")
        if [path for path in scratch if path.exists() and path.parent == Path("/dev/shm")]:
            tally.fail(f"orphaning {number}: memory is still taken: {scratch}")
    return tally


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
