"""An unseen client arrives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedshift.cli.app import app
from fedshift.cli.printing import Format, console, wants_json
from fedshift.results.plain import Screen

if TYPE_CHECKING:
    from fedshift.join import Joined


@app.command()
def join(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or a folder above some.")],
    data: Annotated[
        Path, typer.Option(help="Images without labels: a folder, one picture, Parquet; class folders are labels.")
    ],
    adapter: Annotated[str | None, typer.Option(help="An adapter of the run by its label, or any by its name.")] = None,
    out: Annotated[Path | None, typer.Option(help="A new folder; default RUN/joined/DATA-ADAPTER.")] = None,
    method: Annotated[str | None, typer.Option(help="Which method, if RUN holds several.")] = None,
    seed: Annotated[int | None, typer.Option(help="Which seed, if RUN holds several.")] = None,
    network: Annotated[
        str | None, typer.Option("--network", "--model", help="Which network, if the run mixes several.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    strict: Annotated[bool, typer.Option("--strict", help="An image that cannot be read is an error.")] = False,
    format: Format = "table",
) -> None:
    """Give an unseen client a model of its own and predictions, from its unlabelled images."""
    from fedshift.join import join as join_run

    as_json = wants_json(format)
    screen = console()
    with Screen(stderr=True).status("joining"):
        joined = join_run(
            path, data, adapter, out, method=method, seed=seed, model=network, device=device, strict=strict
        )
    if as_json:
        print(json.dumps({**joined.as_dict(), "files": [str(file) for file in joined.files]}, indent=1))
        return
    print_joined(screen, joined)


def print_joined(screen: Screen, joined: Joined) -> None:
    """Who joined what, how many images of which class, and how right where labels are known."""
    from fedshift.join.report import classes_table, headline, lines, summary

    screen.print(headline(joined), style="bold", soft_wrap=True)
    screen.print(summary(joined))
    if joined.report is not None:
        screen.print(classes_table(joined.report))
    for line in lines(joined):
        screen.print(line, soft_wrap=True)
