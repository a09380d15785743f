"""What is kept so that it need not be made again."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer

from fedshift.cli.app import app
from fedshift.cli.printing import Format, console, wants_json
from fedshift.results.plain import Sheet
from fedshift.store.cache import cache_folder

cache = typer.Typer(
    name="cache",
    help="The cache: decoded images, patients' among them, and made tasks. Show it, or clear it.",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(cache)


@cache.callback()
def usual(context: typer.Context) -> None:
    """Shown, if nothing else is asked for."""
    if context.invoked_subcommand is None:
        show()


@cache.command()
def show(format: Format = "table") -> None:
    """What lies in the cache, from what it was made, its size, and when it was last of use."""
    from fedshift.data.cache import entries

    found = entries(cache_folder())
    if wants_json(format):
        print(json.dumps([entry.as_dict() for entry in found], indent=1))
        return
    screen = console()
    if found:
        table = Sheet("kind", "made from", "what", "MB", "last used")
        for entry in found:
            day = time.strftime("%Y-%m-%d", time.localtime(entry.used)) if entry.used else "-"
            table.add_row(entry.kind, entry.source, entry.what, f"{entry.bytes / 1e6:,.1f}", day)
        screen.print(table)
    total = sum(entry.bytes for entry in found)
    screen.print(
        f"{cache_folder()}: {_counted(len(found))}, {total / 1e6:,.1f} MB. Images in it are those of your data: "
        "fedshift cache clear removes them.",
        soft_wrap=True,
    )


@cache.command()
def clear(
    unused_days: Annotated[
        float, typer.Option(help="Only what was of no use for so many days; 0: everything.", min=0.0)
    ] = 0.0,
) -> None:
    """Remove decoded images and made tasks; they are made again when they are needed. Runs and data stay."""
    from fedshift.data.cache import clear as remove

    gone = remove(cache_folder(), unused_days)
    size = sum(entry.bytes for entry in gone)
    console().print(f"removed {_counted(len(gone))}, {size / 1e6:,.1f} MB, from {cache_folder()}", soft_wrap=True)


def _counted(count: int) -> str:
    return f"{count} {'entry' if count == 1 else 'entries'}"
