"""Runs looked at together: the report, two of them side by side, and all while they go on."""

from __future__ import annotations

import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from fedshift.cli.app import app
from fedshift.cli.printing import Format, console, wants_json
from fedshift.engines.stopping import Stopped


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


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="A run folder, or any folder above some.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another one, or another version of it.")],
    metric: Annotated[str, typer.Option(help="Compare by this measure instead of the experiment's own.")] = "",
    select: Annotated[str, typer.Option(help="Selection rule: last, best-val or oracle.")] = "best-val",
    format: Format = "table",
) -> None:
    """What differs between two sets of runs: settings, and scores with intervals over clients and seeds that both have."""
    from fedshift.results.compare import compare as side_by_side

    as_json = wants_json(format)
    found = side_by_side(first, second, measure=metric, rule=select)
    if as_json:
        print(found.to_json())
        return
    screen = console()
    screen.print(f"First: {first}, second: {second}", soft_wrap=True)
    settings = found.settings_table()
    screen.print("Settings: all the same." if settings is None else settings)
    screen.print(found.table())
    for note in found.notes:
        screen.print(f"- {note}", soft_wrap=True)


@app.command()
def watch(
    path: Annotated[Path, typer.Argument(metavar="DIR", help="A folder runs are written into.")] = Path("runs"),
    port: Annotated[int, typer.Option(help="Where on this machine; 0 takes any that is free.")] = 8765,
    open_it: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """A live page on this machine while runs go on: progress, time left, curves, losses by client, failures. Read-only."""
    from fedshift.results.pages.live import Live

    with Live(path, port) as server, suppress(Stopped, KeyboardInterrupt):
        console().print(f"Watching {path}: {server.address} (Ctrl-C ends it; runs go on)", soft_wrap=True)
        if open_it:
            webbrowser.open(server.address)
        server.serve_forever()
