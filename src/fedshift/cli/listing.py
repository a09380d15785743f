"""What there is to choose from, and what is missing."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

import typer

from fedshift.cli.app import app
from fedshift.cli.printing import Format, console, wants_json
from fedshift.results.plain import Sheet


def _kinds(incomplete: str) -> list[str]:
    kinds = ("methods", "adapters", "models", "partitions", "streams", "presets", "pairs")
    return [kind for kind in kinds if kind.startswith(incomplete)]


@app.command(name="list")
def list_(
    what: Annotated[
        str,
        typer.Argument(help="methods, adapters, models, partitions, streams, presets or pairs", autocompletion=_kinds),
    ],
    format: Format = "table",
) -> None:
    """What there is to choose from."""
    from fedshift.catalogue import rows_of

    as_json, rows = wants_json(format), rows_of(what)
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = Sheet()
    for column in rows[0]:
        table.add_column(column, no_wrap=column == "name", overflow="fold")
    for row in rows:
        table.add_row(*(_plain(value) for value in row.values()))
    console().print(table)


@app.command()
def doctor() -> None:
    """Versions, device, threads, and what is missing with the command that installs it."""
    from fedshift.doctor import report

    screen = console()
    for line in report():
        screen.print(line)


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={item}" for key, item in value.items())
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return re.sub(r":\w+:`[~.]?(?:[\w.]+\.)?(\w+)`|``(.*?)``", lambda m: m[1] or m[2], text)  # words of docstrings
