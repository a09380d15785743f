"""What commands share: the screen, its tables, and text that is only text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from fedshift.errors import UserError

if TYPE_CHECKING:
    from fedshift.results.advice import Advice
    from fedshift.results.result import Result

Format = Annotated[str, typer.Option("--format", help="table or json")]


def print_result(screen: Console, result: Result, rule: str, rules: bool) -> None:
    """The table, the other measures, the costs, what adapters tell, the three rules side by side, and the notes."""
    screen.print(result.table(rule))
    measures = result.measures_table(rule)
    if measures is not None:
        screen.print(measures)
    screen.print(result.costs_table())
    told = result.telemetry_table(rule)
    if told is not None:
        screen.print(told)
    if rules:
        screen.print(result.rules_table())
    if result.notes:
        screen.print("Notes:")
    for note in result.notes:
        screen.print(f"- {escaped(note)}", highlight=False)


def print_advice(screen: Console, advice: Advice) -> None:
    """What to deploy, in bold, and why."""
    head, *reasons = advice.lines()
    screen.print(f"[bold]{escaped(head)}[/]", highlight=False, soft_wrap=True)
    for reason in reasons:
        screen.print(f"- {escaped(reason)}", highlight=False, soft_wrap=True)


def wants_json(format: str) -> bool:
    """Whether ``--format`` says JSON; anything but that and a table is refused."""
    if format not in ("table", "json"):
        raise UserError(f"--format must be table or json, not {format!r}")
    return format == "json"


def console() -> Console:
    """Where a command prints."""
    screen = Console()
    # piped output keeps whole rows instead of wrapping them at a width nobody chose
    return screen if screen.is_terminal else Console(width=240)


def escaped(text: str) -> str:
    """Text in which brackets are brackets, no markup."""
    return escape(text)
