"""The tables of ``docs/results/``, row by row: a method's page quotes those that are its own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import fedshift
from docs.builder.cells import as_table
from fedshift.experiment import files

RESULTS = Path(__file__).parents[1] / "results"


class Table(NamedTuple):
    """A table of a results page: where it stands, its head, its rows, and the presets its section ran."""

    page: str
    title: str
    heading: str
    head: list[str]
    rows: list[list[str]]
    presets: tuple[str, ...]

    @property
    def anchor(self) -> str:
        """Of the heading it stands under."""
        words = re.findall(r"[\w-]+", re.sub(r"[^\w\s-]", "", self.heading.lower()))
        return f"{self.page}#{'-'.join(words)}" if words else self.page


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _tables(page: Path) -> Iterator[Table]:
    text = page.read_text(encoding="utf-8")
    title, heading, ran = "", "", tuple[str, ...]()
    for part in re.split(r"(?m)^(?=#)", text):
        if not part:
            continue
        first, _, body = part.partition("\n")
        title, heading = (first.lstrip("# "), "") if first.startswith("# ") else (title, first.lstrip("# "))
        named = re.findall(r"fedshift run ([\w-]+)", body.replace("\n", " "))
        ran = tuple(name for name in named if name in files.presets()) or ran
        for block in re.findall(r"(?m)(?:^\|.*\n?)+", body):
            head, _, *rows = block.strip().split("\n")
            yield Table(page.name, title, heading, _cells(head), [_cells(row) for row in rows], ran)


TABLES = [
    table
    for page in sorted(RESULTS.glob("*.md"))
    if page.name not in ("index.md", "README.md")
    for table in _tables(page)
]


def _titles(preset: str) -> dict[str, tuple[str, str]]:
    """What rows of a preset are called, and the method and adapter behind each."""
    found = dict[str, tuple[str, str]]()
    for spec in fedshift.Experiment.load(preset).method:
        for adapter in spec.adapters:
            found.setdefault(adapter.title.lower(), (spec.name, adapter.name))
        found.setdefault(spec.title.lower(), (spec.name, spec.adapters[0].name))
    return found


TITLES: Mapping[str, Mapping[str, tuple[str, str]]] = {name: _titles(name) for name in files.presets()}


def behind(cell: str, presets: tuple[str, ...]) -> tuple[str, str] | None:
    """The method and the adapter of a row, by what it is called.

    >>> behind("FedTHE+", ("brfl",)), behind("FDSE, `fdse-align`", ("office-unseen",)), behind("round 25", ("brfl",))
    (('fedthe', 'the-plus'), ('fdse', 'fdse-align'), None)
    """
    plain = re.sub(r"^\d+ ", "", cell.replace("*", ""))
    name, _, more = plain.partition(",")
    spoken = re.search(r"`([\w-]+)`", more)
    for preset in presets:
        found = TITLES[preset].get(name.strip().lower())
        if found is not None:
            method, adapter = found
            return method, "none" if "not adapted" in more else spoken[1] if spoken else adapter
    return None


def quoted(kind: str, name: str) -> str:
    """The rows of a method or an adapter in all results pages, FedAvg's beside them; empty if there are none."""
    parts = []
    for table in TABLES:
        owners = [behind(row[0], table.presets) for row in table.rows]
        own = [owner is not None and owner[kind == "adapters"] == name for owner in owners]
        if not any(own) or (kind, name) in PLAIN:
            continue
        base = [owner == ("fedavg", "none") and name != "fedavg" for owner in owners]
        rows = [row for row, mine, other in zip(table.rows, own, base, strict=True) if mine or other]
        where = f"{table.title}{', ' + table.heading if table.heading else ''}"
        parts.append(f"[{where}](../results/{table.anchor}):\n\n{as_table([table.head, *rows])}")
    return "\n\n".join(parts)


PLAIN = {("adapters", "none")}  # every row without adaptation would be its


def link(preset: str) -> str:
    """Where the results of a preset are, as Markdown; empty if nobody measured it."""
    found = next((table for table in TABLES if preset in table.presets), None)
    return f"[{found.heading or 'what we measured'}]({found.anchor})" if found else ""
