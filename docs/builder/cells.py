"""Numbers and tables as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from fedshift.results.beside import Number


def as_table(lines: Sequence[Sequence[str]]) -> str:
    """A head and rows of cells, each in one line.

    >>> print(as_table([["", "a"], ["row", "1"]]))
    |  | a |
    | --- | --- |
    | row | 1 |
    """
    head, *rows = lines
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("\n", " ") for cell in line) + " |" for line in lines)


def shown(number: Number | None, bold: bool = False) -> str:
    """A cell: ours, its deviation over seeds, the paper's in brackets.

    >>> shown(Number(71.25, 0.5, paper=72.9, seeds=(71.0, 71.5)), bold=True), shown(None)
    ('**71.2** ±0.5 (72.90)', '')
    """
    if number is None:
        return ""
    ours = f"**{number.mean:.1f}**" if bold else f"{number.mean:.1f}"
    spread = f" ±{number.std:.1f}" if number.std or len(number.seeds) > 1 else ""
    return f"{ours}{spread}{'' if number.paper is None else f' ({number.paper:.2f})'}"
