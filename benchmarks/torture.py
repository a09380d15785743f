"""Torture: what becomes of runs when everything goes wrong, counted.

    python -m benchmarks.torture kills                 # killed at file operations and at random moments, then resumed
    python -m benchmarks.torture doubles               # a second process in the folder of a running one
    python -m benchmarks.torture orphans               # the parent of worker processes killed
    python -m benchmarks.torture damage --part 1/4     # every file of a run damaged in every way, then commands
    python -m benchmarks.torture fuzz table text       # inputs that Hypothesis makes: also picture, parquet, file

Each part ends with a line of figures, and with exit code 1 if anything was lost or anybody saw a traceback.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

app = typer.Typer(help="What becomes of runs when everything goes wrong.", pretty_exceptions_enable=False)


@app.callback()
def parts() -> None:
    """Each part is a command."""


@app.command()
def damage(
    part: Annotated[str, typer.Option(help="K/N: the K-th of N parts of all trials.")] = "1/1",
    seed: Annotated[int, typer.Option(help="Of garbled bytes and flipped bits.")] = 0,
    step: Annotated[int, typer.Option(help="Only every so-manieth trial.")] = 1,
) -> None:
    """Every file of a run damaged in every way, then commands that read it or mend it."""
    from benchmarks.tortures.damage import torture

    own, parts = map(int, part.split("/"))
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torture-") as base:
        torture(Path(base), own, parts, seed, step).report("damage", started)


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
    torch.set_num_threads(1)
    app()
