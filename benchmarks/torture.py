"""Torture: what becomes of runs when everything goes wrong, counted.

    python -m benchmarks.torture kills                 # killed at file operations and at random moments, then resumed
    python -m benchmarks.torture doubles               # a second process in the folder of a running one
    python -m benchmarks.torture orphans               # the parent of worker processes killed
    python -m benchmarks.torture damage --part 1/4     # every file of a run damaged in every way, then commands
    python -m benchmarks.torture fuzz table text       # inputs that Hypothesis makes: also picture, parquet, file

Each part ends with a line of figures, and with exit code 1 if anything was lost or anybody saw a traceback. Commands run
in forked processes that have everything imported, so that a trial takes a fraction of a second.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.tortures import damage as damaging
from benchmarks.tortures import kills as killing
from benchmarks.tortures import processes
from benchmarks.tortures.world import Tally

app = typer.Typer(help="What becomes of runs when everything goes wrong.", pretty_exceptions_enable=False)
Seed = Annotated[int, typer.Option(help="Of everything random.")]


def carried_out(part: str, torture: Callable[[Path], Tally]) -> None:
    """One part, in a folder that goes afterwards; the figures in a line."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torture-") as base:
        torture(Path(base)).report(part, started)


@app.command()
def kills(count: Annotated[int, typer.Option(help="So many.")] = 100, seed: Seed = 0) -> None:
    """Runs killed and resumed, compared bit by bit with runs that never were."""
    carried_out("kills", lambda base: killing.torture(base, count, seed))


@app.command()
def doubles(count: Annotated[int, typer.Option(help="So many.")] = 20, seed: Seed = 0) -> None:
    """A second process in the folder of a running one."""
    carried_out("doubles", lambda base: processes.doubles(base, count, seed))


@app.command()
def orphans(count: Annotated[int, typer.Option(help="So many.")] = 20, seed: Seed = 0) -> None:
    """The parent of worker processes killed."""
    carried_out("orphans", lambda base: processes.orphans(base, count, seed))


@app.command()
def damage(
    part: Annotated[str, typer.Option(help="K/N: the K-th of N parts of all trials.")] = "1/1",
    step: Annotated[int, typer.Option(help="Only every so-manieth trial.")] = 1,
    only: Annotated[str, typer.Option(help="Only trials whose name has this: interrupted, a file, a way.")] = "",
    seed: Seed = 0,
) -> None:
    """Every file of a run damaged in every way, then commands that read it or mend it."""
    own, parts = map(int, part.split("/"))
    carried_out("damage", lambda base: damaging.torture(base, own, parts, seed, step, only))


@app.command()
def fuzz(
    kinds: Annotated[
        list[str] | None, typer.Argument(help="table, text, picture, parquet, file; default: all.")
    ] = None,
) -> None:
    """Inputs that nobody would write: TOML, Parquet, images, files of a run."""
    from benchmarks.tortures.fuzz import KINDS, torture

    started = time.monotonic()
    torture(kinds or list(KINDS)).report("fuzz", started)


if __name__ == "__main__":
    app()
