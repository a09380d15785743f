"""The pages of ``docs/results``: tables made of run summaries (``docs/results/*.json``), and the words around them.

A summary is written by ``benchmarks/reproduce.py`` from run folders, a page from summaries and from its text in
``docs/builder/text/``: nobody types a number of a table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from docs.builder.cells import as_table, shown
from docs.builder.ours import our_number, ours_beside
from docs.builder.summaries import HERE, KEPT, commit, device, kept
from docs.builder.verdicts import HEADS, MEANING, Verdict, verdict
from fedshift import Experiment, __version__
from fedshift.results.beside import Comparison, compared, titles_of
from fedshift.results.collect import collect
from fedshift.results.result import Row
from fedshift.store.found import read_config

TEXTS = HERE / "text"
HEADLINE = "as the paper scores it"
UNSEEN = "original (unseen)"


@dataclass(frozen=True)
class Table:
    """A paper's table as we run it."""

    name: str
    preset: str
    title: str
    turn: int  # the smaller, the sooner: how much the table tells for its time
    changes: tuple[str, ...] = ()
    order: tuple[str, ...] = ()  # the methods that are run first
    shortened: str = ""  # what the paper has more of, beside rounds
    ours: tuple[str, str] = ("", "")  # what measures ours on it in ``benchmarks/ours.py``, and the column that counts
    row: str = ""  # the system's own row where it is not called as on the rest of the page

    def command(self, changes: Sequence[str]) -> str:
        """What ``fedshift run`` is given for it."""
        quoted = [f"'{change}'" if set(change) & set('[]{}" $*') else change for change in (*self.changes, *changes)]
        return " ".join([self.preset, *(f"-c {change}" for change in quoted)])


@dataclass(frozen=True)
class Page:
    """One system's page."""

    name: str
    title: str
    system: str  # the row that should be first
    tables: tuple[Table, ...]


THE = ("two heads", "FedAvg + FT", "FedRep", "FedRoD", "kNN-Per", "Ditto", "FedAvg", "FedAvg + FT + rotation")
ICON = ("FedICON", "FedAvg", "FedAvg-FT", "FedAvg with BatchNorm", "two heads", "FedRep", "FedBN")
CIR = ("FedCiR", "FedAvg", "FedReg", "FedAlign", "FedGen", "FedSR")
TTA = ("FedTTA-Prox", "FedAvg", "FedTTA", "SCAFFOLD")
ERASE = ("FDSE", "FDSE with ReLU", "FedBN", "FedAvg")
SMALLER = "Images of 128 pixels, which is what the files hold; the paper's have 256."
PAGES = (
    Page("brfl", "BRFL (FedTHE)", "FedTHE+", (
        Table("brfl-0.1", "brfl", "Table 1, Dir(0.1)", 2, ("partition.alpha=0.1", "evaluate.every=25"), THE,
              ours=("brfl-0.1", "mean")),
        Table("brfl-1.0", "brfl", "Table 1, Dir(1)", 11, ("partition.alpha=1.0", "evaluate.every=25"), THE,
              ours=("brfl-1.0", "mean")),
        Table("brfl-ablation", "brfl-ablation", "Table 3, the parts of FedTHE+, Dir(0.1)", 19, ("evaluate.every=25",),
              ("two heads, balanced", "two heads"), row="13 FedTHE+"),
    )),
    Page("fedicon", "FedICON", "FedICON", (
        Table("digits-covariate", "digits-covariate", "Table 1, digits, corrupted", 1, ("evaluate.every=25",), ICON,
              ours=("digits", "corrupted")),
        Table("office-covariate", "office-covariate", "Table 5, office objects, corrupted", 3, ("evaluate.every=25",), ICON,
              ours=("office-covariate", "corrupted")),
        Table("office-domain", "office-domain", "Table 2, office objects, a new domain", 7, ("evaluate.every=25",), ICON,
              ours=("office-domain", "left-out")),
        Table("digits-domain", "digits-domain", "Table 7, digits, a new domain", 8, ("evaluate.every=25",), ICON),
    )),
    Page("fedcir", "FedCiR", "FedCiR", (
        Table("pacs-feature", "pacs-feature", "Table 1, PACS", 9, ("data.size=64", "evaluate.every=50"), CIR,
              "Images of 64 pixels; the paper's have 128."),
        Table("office-feature", "office-feature", "Table 1, office objects", 10, ("data.size=64", "evaluate.every=50"), CIR,
              "Images of 64 pixels; the paper's have 128.",
              ("office-feature", "original")),
    )),
    Page("fedtta", "FedTTA", "FedTTA++", (
        Table("new-clients-mnist", "new-clients-mnist", "Table 1, MNIST", 4,
              ("data.source=parquet:$FEDSHIFT_DATA/writers.parquet", "evaluate.every=20"), TTA,
              "27,501 of the 70,000 digits, 275 a client instead of 700.", ("unseen-mnist", UNSEEN)),
        Table("new-clients-fashion", "new-clients-fashion", "Table 1, Fashion-MNIST", 14, ("evaluate.every=30",), TTA,
              "12,000 of the 70,000 images, 120 a client instead of 700.", ("unseen-fashion", UNSEEN)),
        Table("new-clients", "new-clients", "Table 1, CIFAR-10", 15, ("evaluate.every=100",), TTA,
              ours=("unseen-cifar", UNSEEN)),
        Table("label-shift-sweep", "label-shift-sweep", "Table 2, CIFAR-10, other label shifts", 17,
              ("evaluate.every=100",), TTA),
        Table("mixed-models", "mixed-models", "Figure 5, networks of three sizes", 18, ("sweep={}", "evaluate.every=100"),
              ("HeteroFedTTA",), row="HeteroFedTTA"),
    )),
    Page("fdse", "FDSE", "FDSE", (
        Table("office-personal", "office-personal", "Table 1, office objects", 5,
              ("data.size=128", "rounds=200", "evaluate.after-local=true"), (*ERASE, "Ditto", "FedAvg-FT"),
              SMALLER),
        Table("office-activation", "office-personal", "With and without ReLU, office objects, on validation images", 6,
              ("data.size=128", "rounds=200", "evaluate.after-local=true", "split.tune=true",
               'method=[{name="fdse",label="FDSE",lam=0.05,tau=0.5,beta=0.05},'
               '{name="fdse",label="FDSE with ReLU",lam=0.05,tau=0.5,beta=0.05,activation=true}]'), (),
              f"{SMALLER} Validation images take the place of all test images."),
        Table("pacs-personal", "pacs-personal", "Table 1, PACS", 12,
              ("data.size=128", "rounds=200", "evaluate.after-local=true"), (*ERASE, "Ditto", "FedAvg-FT"),
              SMALLER, ("pacs-personal", "original")),
        Table("office-unseen", "office-unseen", "Table 2, office objects, an unseen domain", 13,
              ("data.size=128", "rounds=100"), ERASE, SMALLER, ("office-unseen", UNSEEN), "FDSE, fdse-align"),
        Table("pacs-unseen", "pacs-unseen", "PACS, an unseen domain (not in the paper)", 16,
              ("data.size=128", "rounds=100"), ERASE, SMALLER, row="FDSE, fdse-align"),
    )),
)  # fmt: skip


# ---- from run folders to a summary ---------------------------------------------------------------------------------------
def summary_of(
    table: Table,
    folders: Sequence[Path],
    wanted: Experiment,
    *,
    seconds: float,
    changes: Sequence[str] = (),
    ended: str = "",
    rule: str = "best-val",
) -> dict[str, Any]:
    """What is kept of a table's runs: every number with its spread, and what was not run."""
    expected = titles_of([Row(m.title, a.title, ()) for m in wanted.method for a in m.adapters])
    listed = [method.title for method in Experiment.load(table.preset, table.changes).method]  # as the paper has them
    order = {pair: (listed.index(pair[0]) if pair[0] in listed else len(listed), n) for n, pair in enumerate(expected)}
    found = collect(folders) if folders else None
    if found is not None:
        rows = sorted(found.rows, key=lambda row: order.get((row.method, row.adapter), (len(listed), 0)))
        found = replace(found, rows=tuple(rows))
    comparison = Comparison((), {}, {}) if found is None else compared(found, rule)
    present = {(row.method, row.adapter) for row in found.rows} if found else set()
    seeds = sorted({read_config(path)["seed"] for path in folders}) or list(wanted.seeds)
    return {
        "table": table.name,
        "command": f"fedshift run {table.command([*changes, f'seeds={json.dumps(seeds)}'])}",
        "date": datetime.now(UTC).date().isoformat(),
        "version": __version__,
        "commit": commit(),
        "device": device(),
        "seconds": round(seconds),
        "seeds": seeds,
        "rounds": wanted.rounds,
        "rule": rule,
        "ended": ended,
        "not-run": [title for pair, title in expected.items() if pair not in present],
        "said": comparison.sentences(always=True),
        **comparison.to_json(),
    }


def known() -> set[str]:
    """The names of all summaries that a page shows."""
    tables = [table for page in PAGES for table in page.tables]
    return {table.name for table in tables} | {f"ours-{table.ours[0]}" for table in tables if table.ours[0]}


# ---- from summaries to pages ---------------------------------------------------------------------------------------------
def as_markdown(summary: Mapping[str, Any]) -> str:
    """A summary as a table, and who is first below it."""
    table = Comparison.of_json(summary)
    columns = list(table.columns)
    best = {c: max((own[c].mean for own in table.rows.values() if c in own), default=0.0) for c in columns}
    errors = any(number.error is not None for number in table.headline.values())
    extra = [*([] if ranked_by(table) else [HEADLINE]), *(["± over clients"] if errors else [])]
    lines = [["", *columns, *extra]]
    for title, cells in table.rows.items():
        own = [shown(cells.get(c), c in cells and cells[c].mean == best[c]) for c in columns]
        first = table.headline.get(title)
        error = "" if first is None or first.error is None else f"{first.error:.1f}"
        told = [*([] if ranked_by(table) else [shown(first, title == table.first)]), *([error] if errors else [])]
        lines.append([title, *own, *told])
    return as_table(lines)


def ranked_by(table: Comparison) -> str:
    """The column that is the headline of all rows; empty if there is none."""
    return next((c for c in table.columns if all(table.rows[t].get(c) == n for t, n in table.headline.items())), "")


def shortened(table: Table, summary: Mapping[str, Any]) -> str:
    """What the paper has more of: rounds, and what the table says."""
    whole = Experiment.load(table.preset).rounds
    fewer = f"{summary['rounds']} of the paper's {whole} rounds. " if summary["rounds"] < whole else ""
    return f"{fewer}{table.shortened}".strip()


def section(table: Table) -> str:
    """One table of a page: the command, the time, the numbers, what they say; or that it was not run."""
    summary = kept(table.name)
    parts = [f"## {table.title}"]
    if summary is None:
        parts.append(f"Not run. `fedshift run {table.command([])}`")
        return "\n\n".join([*parts, *ours_beside(table.ours[0])])
    many = len(summary["seeds"])
    facts = f"{summary['rounds']} rounds, {many} seed{'s' if many > 1 else ''}, {summary['device']}"
    rows = ", then ".join(["these rows" if summary["not-run"] else "all rows", *filter(None, [summary.get("ended")])])
    took = f", {summary['seconds']} s for {rows}" if summary.get("seconds") else ", time not kept"
    made = f"{summary['date']}{', commit ' + summary['commit'] if summary.get('commit') else ''}"
    parts.append(f"`{summary['command']}`: {facts}{took} ({made}).")
    earlier = f"Earlier code. {summary['before']}" if summary.get("before") else ""
    parts += [text] if (text := " ".join(filter(None, [earlier, shortened(table, summary)]))) else []
    parts.append(as_markdown(summary))
    by = ranked_by(Comparison.of_json(summary))
    how = f"Ranked by {by}." if by else "Ranked as the paper scores each row."
    said = Comparison.of_json(summary).sentences(always=True)
    parts += [" ".join([how, *said])] if said else []
    if summary["not-run"]:
        parts.append(f"Not run: {', '.join(summary['not-run'])}.")
    return "\n\n".join([*parts, *ours_beside(table.ours[0])])


def found(page: Page, table: Table) -> Verdict:
    """What a table of a page came to."""
    return verdict(kept(table.name), table.row or page.system, Experiment.load(table.preset).rounds)


def in_short(page: Page) -> str:
    """What a reader looks for first: was it reproduced, and how sure is that."""
    lines = [["", *HEADS], *([table.title, *found(page, table)] for table in page.tables)]
    return f"## In short\n\n{as_table(lines)}\n\n{MEANING}"


def why(page: Page) -> str:
    """The notes of the page's presets: what had to be decided, and where we depart from the paper or its code."""
    presets = list(dict.fromkeys(table.preset for table in page.tables))
    notes: dict[str, list[str]] = {}
    for preset in presets:
        for note in Experiment.load(preset).notes:
            notes.setdefault(note, []).append(preset)
    told = [f"- {note}{_holds(of, presets)}" for note, of in notes.items()]
    head = (
        "Where paper and code leave something open or contradict each other, and what else is not as in the paper. "
        "`fedshift run` prints the same below its table; in brackets the presets of which a sentence holds, if not of all."
    )
    return "\n".join([f"## Why we differ\n\n{head}\n", *told])


def _holds(of: Sequence[str], presets: Sequence[str]) -> str:
    others = [preset for preset in presets if preset not in of]
    few = of if len(of) <= len(others) else ["all but " + others[0], *others[1:]] if others else []
    return f" *({', '.join(few)})*" if few else ""


def page_text(page: Page) -> str:
    """A whole page: its introduction, what was found, its tables, and the words on why we differ."""
    before, _, after = (TEXTS / f"{page.name}.txt").read_text(encoding="utf-8").partition("<!-- tables -->\n")
    told = "<!-- made by `python docs/generate.py --results` from docs/results/*.json and docs/builder/text: edit those -->"
    how = (
        "In the tables below a cell is our number, ± its standard deviation over seeds where there are several, and the "
        "paper's number in brackets. Bold is the highest of a column. Rows are ranked by the mean over clients, in the "
        "column in which the paper scores them. *± over clients* is the standard error of that mean over clients."
    )
    made = "\n\n".join(section(table) for table in page.tables)
    title, _, before = before.strip().partition("\n\n")
    return "\n\n".join([title, told, in_short(page), before, how, made, why(page), after.strip()]).strip() + "\n"


def glance() -> str:
    """All five at one glance."""
    lines = [["", "table", *HEADS, "date", "ours"]]
    for page in PAGES:
        for table in page.tables:
            summary = kept(table.name)
            when = summary["date"] if summary else ""
            where = f"[{page.title}]({page.name}.md)"
            lines.append([where, table.title, *found(page, table), when, our_number(*table.ours)])
    return (
        "# All at one glance\n\n<!-- made by `python docs/generate.py --results`: edit docs/builder/results.py -->\n\n"
        "Tables of five papers, run with the presets of this package. Each page begins with what was reproduced and how "
        f"sure that is, then has the numbers, the command, the time it took, and why we differ.\n\n{MEANING}\n\n"
        "*Ours* is [our own method with our adapter](ours.md), under other seeds and at the last round, so not to be ranked "
        "beside the other numbers. Its cell is empty where no summary of it is kept.\n\n" + as_table(lines) + "\n\n"
        "To run tables again: `python benchmarks/reproduce.py --help`.\n"
    )


def pages() -> dict[Path, str]:
    """Every generated page and its text."""
    made = {KEPT / f"{page.name}.md": page_text(page) for page in PAGES}
    return {**made, KEPT / "README.md": glance()}
