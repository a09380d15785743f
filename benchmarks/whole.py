"""Where the time of a whole ``fedshift run`` goes: starting, training, scoring, advice, pictures and the page.

    python -m benchmarks.whole default
    python -m benchmarks.whole brfl -c partition.alpha=0.1 -c 'sweep={}' -c 'seeds=[0]' --jobs 6

Every kind of work is summed over runs. Runs that are made at a time do theirs side by side, so that the sum is more than
the seconds on the clock, which stand below it; what they do last, counting costs, is then told too short. Folders of runs
are made anew and removed again.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer

from fedshift import Experiment
from fedshift.cli.printing import advised
from fedshift.errors import UserError
from fedshift.results.pages.report import report_page
from fedshift.results.plain import Screen, Sheet
from fedshift.results.plots.pictures import result_picture
from fedshift.results.plots.task import task_picture
from fedshift.runs.progress import Silent
from fedshift.runs.run import carry_out, plan

LAST = "counting costs"  # of a run, which nobody says has ended: whatever is said next, it has
AROUND = "starting, ending"  # processes, and what is between runs
FEW = 0.005  # a share of the whole, below which work is not told by name


class Clock(Silent):
    """What is done from one word to the next, run by run."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._now: dict[str, tuple[str, float]] = {}  # by run: what it does, and since when

    def begin(self, run: str, done: int, rounds: int) -> None:
        self._turn(run, "training")

    def round(self, run: str, number: int, loss: float, best: float) -> None:
        self._turn(run, "training")

    def doing(self, what: str) -> None:
        run, _, work = what.rpartition(": ")
        self._turn(run, re.sub(r"models of round \d+", "models of a round, what adapters measure", work))

    def note(self, text: str) -> None:
        """Not shown: this is about time."""

    def close(self) -> None:
        for run in list(self._now):
            self._turn(run, AROUND)

    def _turn(self, run: str, work: str) -> None:
        run, now = re.sub(r" \(\d+ rounds and .*\)$", "", run), time.perf_counter()
        for other in [other for other, (last, _) in self._now.items() if last == LAST and other != run]:
            last, since = self._now.pop(other)
            self.seconds[last] += now - since
        before, since = self._now.get(run, (work, now))
        self.seconds[before] += now - since
        self._now[run] = (work, now)


@contextmanager
def timed(clock: Clock, work: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    clock.seconds[work] += time.perf_counter() - began


def main(
    preset: str,
    change: Annotated[list[str] | None, typer.Option("-c", help="Override a key, as in fedshift run.")] = None,
    device: str = "auto",
    engine: str = "auto",
    jobs: int | None = None,
) -> None:
    began, clock, experiment = time.perf_counter(), Clock(), Experiment.load(preset, overrides=change or [])
    with tempfile.TemporaryDirectory() as folder:
        with timed(clock, "data and plan"):
            planned = plan(experiment, Path(folder), reporter=Silent())
        result = carry_out(planned, device=device, engine=engine, processes=jobs, reporter=clock)
        with timed(clock, "advice"), suppress(UserError):  # there may be nothing to advise by
            advised(result)
        with timed(clock, "pictures"):
            result_picture(result, Path(folder, "results.png"))
            task_picture(planned[0].task, Path(folder, "task.png"))
        with timed(clock, "the page"):
            report_page(result, title=preset).write(Path(folder, "report.html"))
    spent, whole = time.perf_counter() - began, sum(clock.seconds.values())
    table = Sheet(title=f"{preset}: where the time goes", caption=f"{spent:.1f} s on the clock", title_justify="left")
    for head in ("work", "s", "%"):
        table.add_column(head, justify="left" if head == "work" else "right")
    small = 0.0
    for work, seconds in sorted(clock.seconds.items(), key=lambda item: -item[1]):
        if seconds < FEW * whole:
            small += seconds
        else:
            table.add_row(work, f"{seconds:.1f}", f"{100 * seconds / whole:.0f}")
    table.add_row("all others", f"{small:.1f}", f"{100 * small / whole:.0f}")
    Screen().print(table)


if __name__ == "__main__":
    typer.run(main)
