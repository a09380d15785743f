"""What commands share: the screen and what is printed on it. Text is given as it is: the screen has no markup."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from fedshift.errors import UserError
from fedshift.results.plain import Screen

if TYPE_CHECKING:
    from fedshift.results.advice import Advice
    from fedshift.results.result import Result

Change = Annotated[
    list[str] | None,
    typer.Option("--set", "-c", help="Override a key, for instance -c rounds=50 -c method.fedprox.mu=0.1."),
]
Clients = Annotated[bool, typer.Option("--clients", help="A column for every client, where they are few.")]
Format = Annotated[str, typer.Option("--format", help="table or json")]


def print_result(screen: Screen, result: Result, rule: str, rules: bool, clients: bool = False) -> None:
    """The table, who is first here and in the paper, the other measures, the costs, what adapters tell, the notes."""
    from fedshift.results.beside import compared

    screen.print(result.clients(rule) if clients else result.table(rule))
    for sentence in compared(result, rule).sentences():
        screen.print(sentence, soft_wrap=True)
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
        screen.print(f"- {note}")


def print_advice(screen: Screen, advised: Mapping[str, Advice | UserError], compared: bool = False) -> None:
    """What to deploy, in bold, and why, task by task; all that was ``compared``, if that is asked for."""
    for name, advice in advised.items():
        title = f"{name}: " if name else ""
        if isinstance(advice, UserError):
            screen.print(f"{title}{advice}", soft_wrap=True)
            continue
        if compared:
            screen.print(advice.table())
        head, *reasons = advice.lines()
        screen.print(f"{title}{head}", style="bold", soft_wrap=True)
        for reason in reasons:
            screen.print(f"- {reason}", soft_wrap=True)


def advised(result: Result, measure: str = "") -> dict[str, Advice | UserError]:
    """Advice on every task by its name, or why there is none; raises if there is none at all."""
    found = {name: _attempted(part, measure) for name, part in result.by_task().items()}
    first = next(iter(found.values()))
    if isinstance(first, UserError) and all(isinstance(one, UserError) for one in found.values()):
        raise first
    return found


def advice_json(advised: Mapping[str, Advice | UserError]) -> str:
    """Advice for programs: that on one task as it is, that on several by their names."""
    told = {name: {"error": str(a)} if isinstance(a, UserError) else a.to_dict() for name, a in advised.items()}
    return json.dumps(told.get("", {"tasks": told}), indent=1)


def _attempted(part: Result, measure: str) -> Advice | UserError:
    try:
        return part.advice(measure)
    except UserError as error:
        return error


def wants_json(format: str) -> bool:
    """Whether ``--format`` says JSON; anything but that and a table is refused."""
    if format not in ("table", "json"):
        raise UserError(f"--format must be table or json, not {format!r}")
    return format == "json"


def console() -> Screen:
    """Where a command prints."""
    screen = Screen()
    # piped output keeps whole rows instead of wrapping them at a width nobody chose
    return screen if screen.is_terminal else Screen(width=240)
