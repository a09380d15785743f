"""Runs killed at every thing they do to files, and at random moments; resumed until they end, and compared bit by bit."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

from benchmarks.tortures.world import (
    Tally,
    command,
    contents,
    differences,
    fork,
    killed_at,
    outcome,
    prepare,
    run_words,
)

SETTINGS = {
    "rounds": "6", "checkpoint-every": "2", "evaluate.every": "1", "evaluate.adapted": "true", "participation": "0.7",
    "model.norm": "true", "method": '[{name="fedbn", adapters=["none", "bn"]}, {name="scaffold"}]',
}  # fmt: skip
ENGINES = ("sequential", "vmapped")


def torture(base: Path, kills: int, seed: int) -> Tally:
    """So many kills, in runs that are killed once or several times each."""
    prepare(base)
    tally, chance = Tally(), random.Random(seed)
    whole = {}
    for engine in ENGINES:
        ended = command(*run_words(base / engine, SETTINGS, "--engine", engine))
        assert ended.code == 0, ended.err
        whole[engine] = contents(base / engine)
    operation, number = 1 + chance.randrange(3), 0
    while tally.counts.get("kills", 0) < kills:
        engine, out = ENGINES[number % len(ENGINES)], base / f"killed-{number}"
        words = run_words(out, SETTINGS, "--engine", engine)
        number += 1
        times = chance.choice((1, 1, 2, 3))
        for turn in range(times):
            more = ["--resume"] if turn else []
            if chance.random() < 0.7:
                ended = command(
                    *words, *more, before=killed_at(out, operation if not turn else 1 + chance.randrange(60))
                )
                operation += 3
            else:
                process, said = fork([*words, *more])
                time.sleep(chance.uniform(0.02, 1.5))
                os.kill(process, signal.SIGKILL)
                ended = outcome(process, said)
            if ended.code == 0:  # it was faster
                operation = 1 + chance.randrange(3)
                break
            if ended.code != -signal.SIGKILL:
                tally.fail(f"run {number}: exit code {ended.code}: {ended.err.strip()[-300:]}")
            tally.count("kills")
        ended = command(*words, "--resume")
        tally.count("runs")
        if ended.code or ended.wrong():
            tally.fail(f"run {number}: {ended.code} {ended.err.strip()[-300:]}")
            continue
        changed = list(differences(whole[engine], contents(out)))  # temporary files and checkpoints too many are new
        if changed:
            tally.fail(f"run {number} on {engine}: {changed[:4]}")
        else:
            tally.count("bit-identical")
    return tally
