"""Look at a task before training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedshift.cli.app import app, presets
from fedshift.cli.printing import Format, console, wants_json


@app.command()
def data(
    what: Annotated[
        str,
        typer.Argument(
            metavar="PATH|PRESET",
            help="A preset, a TOML file, a Parquet or CSV file, or a folder.",
            autocompletion=presets,
        ),
    ],
    change: Annotated[list[str] | None, typer.Option("--set", "-c", help="Override a key, as in fedshift run.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="A folder for task.html, task.png and split.csv, default runs/NAME; or a .csv file for that list alone."
        ),
    ] = None,
    format: Format = "table",
) -> None:
    """What is in a task: clients, sizes, classes, groups, examples of every stream; a table, a page, a picture, a list."""
    from fedshift.data.audit import counted, write_list
    from fedshift.experiment.schema import Experiment
    from fedshift.results.pages.task import task_lines, task_page, task_table
    from fedshift.results.plots.task import task_picture
    from fedshift.runs.setup import make_task

    screen = console()
    as_json = wants_json(format)
    chosen = Experiment.of_data(what, change or [])
    with screen.status("making the task"):
        first = next(chosen.variants())[1]
        task = make_task(first, first.seeds[0])
    folder = out or Path("runs") / chosen.name
    written = [out] if out is not None and out.suffix.lower() == ".csv" else []
    if written:
        write_list(task, written[0])
    elif out is not None or not as_json:
        written = [folder / name for name in ("task.html", "task.png", "split.csv")]
        task_page(task, written[0], chosen.title or chosen.name, chosen.data.needs)
        task_picture(task, written[1])
        write_list(task, written[2])
    if as_json:
        print(json.dumps(counted(task), indent=1))
        return
    screen.print(task_table(task))
    for line in task_lines(task):
        screen.print(line)
    screen.print(f"Written: {', '.join(map(str, written))}", soft_wrap=True)
