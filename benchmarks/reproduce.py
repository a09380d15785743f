"""The papers' tables at full scale: what ``docs/results`` is made of.

    python benchmarks/reproduce.py --list
    python benchmarks/reproduce.py brfl --seeds 0 1 2 --minutes 5 --out DIR        one system, or tables by name
    python benchmarks/reproduce.py --minutes 15 --out DIR                          all, the most telling first
    python benchmarks/reproduce.py brfl -c scale=small -c rounds=2 --seeds 0 --device cpu

Seeds of a row are stacked. A table that does not fit into the time is ended where it is: the rows that are finished count,
the others are listed as not run, and with ``--runs`` the same command goes on with them. ``DIR/NAME.json`` is the summary of
a table, written every minute, and the only file of a table in DIR; ``python docs/generate.py --results DIR`` takes them into
the repository. Rows run in order of value: the paper's own first.
Images come from ``$FEDSHIFT_DATA``; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs.builder.results import PAGES, Table, summary_of
from docs.builder.summaries import as_json

from fedshift import Experiment, run
from fedshift.runs.progress import Silent
from fedshift.store.plans import planned

LIGHT = ("evaluate.artefacts=false", "evaluate.predictions=false", "evaluate.advice=false", "baselines=false")
GRACE = 10  # seconds that a table needs at least, or it is not begun
PATIENCE = 8  # seconds until a process that was asked to end is made to
LOOK = 60  # seconds after which the summary of a table that still runs is written anew
TAIL = 20  # lines of the log of one that failed
RUNNING = "still running"


def experiment_of(table: Table, seeds: Sequence[int], changes: Sequence[str]) -> Experiment:
    """A table's experiment, its own rows first, without what only a deployment needs."""
    chosen = Experiment.load(table.preset, [*LIGHT, *table.changes, f"seeds={list(seeds)}", *changes])
    order = {title: number for number, title in enumerate(table.order)}
    methods = sorted(chosen.method, key=lambda method: order.get(method.title, len(order)))
    return chosen.model_copy(update={"method": methods, "name": table.name})


class Log(Silent):
    """One line for what a log should have."""

    def note(self, text: str) -> None:
        """Into the log."""
        print(text, flush=True)


def work(table: Table, seeds: Sequence[int], changes: Sequence[str], runs: Path, device: str, jobs: int | None) -> None:
    """In a process of its own, which may be ended at any time: what is finished is on disk."""
    run(experiment_of(table, seeds, changes), runs, device=device, processes=jobs, resume=True, reporter=Log())


@dataclass(frozen=True)
class Ended:
    """How a table's process ended."""

    seconds: float
    how: str = ""  # empty: it is whole


def within(seconds: float, command: Sequence[str], log: Path, look: Callable[[Ended], object]) -> Ended:
    """Run a command with its children for so long at most; every minute somebody looks at what there is."""
    started = time.perf_counter()
    spent = 0.0
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
        try:
            while spent < seconds:
                try:
                    code = process.wait(timeout=min(LOOK, seconds - spent))
                    how = "" if code == 0 else _failure(log.read_text(errors="replace").splitlines())
                    return Ended(time.perf_counter() - started, how)
                except subprocess.TimeoutExpired:
                    spent = time.perf_counter() - started
                    look(Ended(spent, RUNNING))
        finally:  # also if this process is asked to end: nobody trains on unseen
            _end(process)
    return Ended(time.perf_counter() - started, "the time was over")


def _end(process: subprocess.Popen[bytes]) -> None:
    """A command and its children; first as a user would, so that it can tidy up behind itself."""
    for blow in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is not None:
            return
        try:
            os.killpg(process.pid, blow)
            process.wait(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            continue


def _failure(lines: Sequence[str]) -> str:
    """The end of the log is shown: the log itself stays on its machine."""
    print("\n".join(lines[-TAIL:]), flush=True)
    return "failed: " + " ".join(lines[-3:])


def finished(runs: Path) -> list[Path]:
    """The folders of runs that are whole, and that the last plan has: others were made with other settings."""
    whole = sorted(path.parent for path in runs.rglob("done"))
    return [path for path in whole if str(path.relative_to(path.parents[1])) in planned(path)]


def clock_of(runs: Path) -> Path:
    """Where the seconds that a table's runs have cost are kept: beside their folder, which belongs to the runs."""
    return runs.with_name(f"{runs.name}.seconds")


def spent_before(runs: Path) -> float:
    """Seconds that the runs of a table cost before they were interrupted, 0 for new ones."""
    clock = clock_of(runs)
    return float(clock.read_text() or 0.0) if clock.exists() else 0.0  # empty if it was killed as it wrote


def written(table: Table, asked: argparse.Namespace, runs: Path, before: float, ended: Ended) -> dict[str, Any]:
    """A table's summary, into its file; the time is that of all sittings, and is kept beside the runs for the next one."""
    wanted = experiment_of(table, asked.seeds, asked.change)
    seconds = before + ended.seconds
    clock_of(runs).write_text(f"{seconds:.0f}")
    summary = summary_of(table, finished(runs), wanted, seconds=seconds, changes=asked.change, ended=ended.how)
    (asked.out / f"{table.name}.json").write_text(as_json(summary), encoding="utf-8")
    return summary


def main() -> None:
    """Table after table, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tables = {table.name: table for page in PAGES for table in page.tables}
    systems = {page.name: [table.name for table in page.tables] for page in PAGES}
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"{', '.join(systems)}, or names of --list")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, default=15.0, help="for all of them together")
    parser.add_argument("--most", type=float, help="minutes for one table at most")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or "reproduced"))
    parser.add_argument("--runs", type=Path, help="where run folders go; left out: a temporary folder")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, help="rows at a time; left out: as many as fill a GPU")
    parser.add_argument("-c", dest="change", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--list", action="store_true", help="the tables, in the order in which they are run")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)  # a table's own process
    asked = parser.parse_args()
    unknown = [name for name in asked.tables if name not in tables and name not in systems]
    if unknown:
        parser.error(f"there is no table {unknown[0]!r}; there are: {', '.join([*systems, *tables])}")
    chosen = [own for name in asked.tables or systems for own in systems.get(name, [name])]
    chosen = sorted(dict.fromkeys(chosen), key=lambda name: tables[name].turn)
    if asked.list:
        for name in chosen:
            shown = tables[name]
            print(f"{shown.turn:3d}  {name:24s} {shown.title}: fedshift run {shown.command([])}")
        return
    runs = asked.runs or Path(tempfile.mkdtemp())
    if asked.work:
        work(tables[chosen[0]], asked.seeds, asked.change, runs, asked.device, asked.jobs)
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    deadline = time.perf_counter() + 60 * asked.minutes
    for name in chosen:
        left = deadline - time.perf_counter()
        if left < GRACE:
            print(f"{name}: not run, the time was over", flush=True)
            continue
        own = ["--work", name, "--runs", str(runs / name), "--device", asked.device, "--seeds", *map(str, asked.seeds)]
        own += [part for change in asked.change for part in ("-c", change)]
        own += [] if asked.jobs is None else ["--jobs", str(asked.jobs)]
        (runs / name).mkdir(parents=True, exist_ok=True)
        most = min(left, 60 * asked.most) if asked.most else left
        look = partial(written, tables[name], asked, runs / name, spent_before(runs / name))
        ended = within(most, [sys.executable, __file__, *own], runs / f"{name}.log", look)
        summary = look(ended)
        missing = f", not run: {', '.join(summary['not-run'])}" if summary["not-run"] else ""
        print(f"{name}: {ended.seconds:.0f} s{ended.how and ', ' + ended.how}{missing}", flush=True)
        for sentence in summary["said"]:
            print(f"  {sentence}", flush=True)


if __name__ == "__main__":
    main()
