"""Pages for people: the report."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from fedshift.cli.app import app
from fedshift.cli.printing import console


@app.command()
def report(
    paths: Annotated[list[Path], typer.Argument(metavar="RUNS...", help="Run folders, or any folders above some.")],
    out: Annotated[
        Path | None, typer.Option(help="The file to write; default report.html in the folder, or here for several.")
    ] = None,
    title: Annotated[str, typer.Option(help="What the page is called; default: the folders' names.")] = "",
    pictures: Annotated[
        bool, typer.Option("--pictures/--no-pictures", help="Whether the page may show images of the data.")
    ] = True,
    open_it: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """One page with everything these runs tell: a file that needs nothing else, to read, send and print."""
    from fedshift.results.pages.report import write_report

    target = out or (paths[0] / "report.html" if len(paths) == 1 else Path("report.html"))
    page = write_report(paths, target, title=title, pictures=pictures)
    screen = console()
    for one in page.left_out:
        screen.print(f"note: {one}", style="yellow", soft_wrap=True)
    screen.print(f"Report: {target}", soft_wrap=True)
    if open_it:
        webbrowser.open(target.resolve().as_uri())
