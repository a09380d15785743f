"""What a table came to: whether the paper's first row is first here too, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from docs.builder.cells import shown
from fedshift.results.beside import Comparison

HEADS = ("as in the paper?", "what was found (the paper's number)", "how sure")
MEANING = (
    "*Yes*: the row that is first in the paper is first here too, among the rows that were run and that the paper has. "
    "*No*: another one is. *Not surely*: it cannot be told apart from one of them, or what would tell was not kept. Two "
    "rows are told apart if 95 % of resampled clients and seeds agree which is above (a paired bootstrap, one pair at a "
    "time); with one seed that is clients alone. *Earlier code*: run before changes that stand above the table; it waits "
    "to be run again."
)


class Verdict(NamedTuple):
    """The cells below ``HEADS``."""

    held: str
    found: str
    sure: str


def verdict(summary: Mapping[str, Any] | None, row: str, rounds: int) -> Verdict:
    """Of a summary; ``row`` is the system's own, ``rounds`` are the paper's.

    >>> headline = {"A": {"mean": 70.0, "paper": 60.0}, "B": {"mean": 65.0, "paper": 50.0}}
    >>> facts = {"columns": [], "rows": {}, "headline": headline, "seeds": [0], "not-run": [], "rounds": 30}
    >>> verdict(facts, "A", rounds=100)
    Verdict(held='yes, not surely', found='A is first: 70.0 (60.00)', sure='1 seed; 30 of 100 rounds; differences not kept')
    """
    if summary is None:
        return Verdict("not run", "", "")
    table = Comparison.of_json(summary)
    return Verdict(_held(table), _found(table, row), _sure(table, summary, rounds))


def _held(table: Comparison) -> str:
    """Empty where no published number stands beside a row."""
    theirs = table.first_in_paper
    if not theirs:
        return ""
    published = [title for title, number in table.headline.items() if number.paper is not None]
    first = max(published, key=lambda title: table.headline[title].mean) == theirs
    rivals = set(published) - {theirs} if first else {theirs}
    surely = bool(table.differences) and not rivals & set(table.tied)
    return ("yes" if first else "no") + ("" if surely else ", not surely")


def _found(table: Comparison, row: str) -> str:
    """Who is first, and what the paper's first and the system's own row have where they are not."""
    said = [f"{table.first} is first: {shown(table.headline[table.first])}"]
    others = dict.fromkeys(title for title in (table.first_in_paper, row) if title in table.headline)
    return "; ".join([*said, *(f"{title}: {shown(table.headline[title])}" for title in others if title != table.first)])


def _sure(table: Comparison, summary: Mapping[str, Any], rounds: int) -> str:
    many, missing = len(summary["seeds"]), len(summary["not-run"])
    said = [f"{many} seed{'s' if many > 1 else ''}"]
    said += [f"{len(table.rows)} of {len(table.rows) + missing} rows"] if missing else []
    said += [f"{summary['rounds']} of {rounds} rounds"] if summary["rounds"] < rounds else []
    if not table.differences:
        said.append("differences not kept")
    elif table.tied:
        said.append(f"not told apart: {', '.join(table.tied)}")
    else:
        said.append("told apart from all others")
    return "; ".join([*said, *(["earlier code"] if summary.get("before") else [])])
