"""The pages of ``docs/results``: tables made of run summaries (``docs/results/*.json``), and the words around them.

A summary is written by ``benchmarks/reproduce.py`` from run folders, a page from summaries and from its text in
``docs/builder/text/``: nobody types a number of a table.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from fedshift import Experiment, __version__
from fedshift.results.beside import Comparison, Number, compared, titles_of
from fedshift.results.collect import collect
from fedshift.results.result import Row
from fedshift.store.folder import read_config

HERE = Path(__file__).parent
KEPT = HERE.parent / "results"
TEXTS = HERE / "text"
HEADLINE = "as the paper scores it"
UNSEEN = "original (unseen)"
OURS = "ours / ours"  # the row of our method with our adapter


@dataclass(frozen=True)
class Table:
    """A paper's table as we run it."""

    name: str
    preset: str
    title: str
    turn: int  # the smaller, the sooner: how much the table tells for its time
    changes: tuple[str, ...] = ()
    order: tuple[str, ...] = ()  # the methods that are run first
    aside: tuple[str, ...] = ()  # rows that are shown and not ranked: an upper bound
    shortened: str = ""  # what the paper has more of, beside rounds
    ours: tuple[str, str] = ("", "")  # what measures ours on it in ``benchmarks/ours.py``, and the column that counts

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
              ("two heads, balanced", "two heads")),
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
              ("Centralised",), "Images of 64 pixels; the paper's have 128."),
        Table("office-feature", "office-feature", "Table 1, office objects", 10, ("data.size=64", "evaluate.every=50"), CIR,
              ("Centralised",), "Images of 64 pixels; the paper's have 128.",
              ("office-feature", "original")),
    )),
    Page("fedtta", "FedTTA", "FedTTA++", (
        Table("new-clients-mnist", "new-clients-mnist", "Table 1, MNIST", 4,
              ("data.source=parquet:$FEDSHIFT_DATA/writers.parquet", "evaluate.every=20"), TTA, (),
              "27,501 of the 70,000 digits, 275 a client instead of 700.", ("unseen-mnist", UNSEEN)),
        Table("new-clients-fashion", "new-clients-fashion", "Table 1, Fashion-MNIST", 14, ("evaluate.every=30",), TTA, (),
              "12,000 of the 70,000 images, 120 a client instead of 700.", ("unseen-fashion", UNSEEN)),
        Table("new-clients", "new-clients", "Table 1, CIFAR-10", 15, ("evaluate.every=100",), TTA,
              ours=("unseen-cifar", UNSEEN)),
        Table("label-shift-sweep", "label-shift-sweep", "Table 2, CIFAR-10, other label shifts", 17,
              ("evaluate.every=100",), TTA),
        Table("mixed-models", "mixed-models", "Figure 5, networks of three sizes", 18, ("sweep={}", "evaluate.every=100"),
              ("HeteroFedTTA",)),
    )),
    Page("fdse", "FDSE", "FDSE", (
        Table("office-personal", "office-personal", "Table 1, office objects", 5,
              ("data.size=128", "rounds=200", "evaluate.after-local=true"), (*ERASE, "Ditto", "FedAvg-FT"), (),
              SMALLER),
        Table("office-activation", "office-personal", "With and without ReLU, office objects, on validation images", 6,
              ("data.size=128", "rounds=200", "evaluate.after-local=true", "split.tune=true",
               'method=[{name="fdse",label="FDSE",lam=0.05,tau=0.5,beta=0.05},'
               '{name="fdse",label="FDSE with ReLU",lam=0.05,tau=0.5,beta=0.05,activation=true}]'), (), (),
              f"{SMALLER} Validation images take the place of all test images."),
        Table("pacs-personal", "pacs-personal", "Table 1, PACS", 12,
              ("data.size=128", "rounds=200", "evaluate.after-local=true"), (*ERASE, "Ditto", "FedAvg-FT"), (),
              SMALLER, ("pacs-personal", "original")),
        Table("office-unseen", "office-unseen", "Table 2, office objects, an unseen domain", 13,
              ("data.size=128", "rounds=100"), ERASE, (), SMALLER, ("office-unseen", UNSEEN)),
        Table("pacs-unseen", "pacs-unseen", "PACS, an unseen domain (not in the paper)", 16,
              ("data.size=128", "rounds=100"), ERASE, (), SMALLER),
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
    comparison = Comparison((), {}, {}) if found is None else compared(found, rule, table.aside)
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


def our_summary(
    part: str,
    told: str,
    *,
    seeds: Sequence[int],
    rounds: int,
    seconds: float,
    rows: Mapping[str, Mapping[str, Sequence[float]]],
) -> dict[str, Any]:
    """What is kept of a part of ``benchmarks/ours.py``: every seed's number, at the last round."""
    return {
        "part": part,
        "command": f"python benchmarks/ours.py {told}",
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "device": device(),
        "seconds": round(seconds),
        "seeds": list(seeds),
        "rounds": rounds,
        "rows": {name: {c.removesuffix(" (clients)"): list(v) for c, v in own.items()} for name, own in rows.items()},
    }


def commit() -> str:
    """Of the code that is here; empty where there is no repository."""
    try:
        told = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return told.stdout.strip()


def has(name: str) -> bool:
    """Whether the repository here has a commit; another machine may have made one of its own for its copy."""
    try:
        told = subprocess.run(
            ["git", "cat-file", "-e", f"{name}^{{commit}}"], capture_output=True, cwd=HERE, check=False
        )
    except OSError:
        return bool(name)  # nobody can tell
    return told.returncode == 0


def device() -> str:
    """What it was run on."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def kept(name: str) -> dict[str, Any] | None:
    """The summary of a table, or None if it was never run."""
    path = KEPT / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def as_json(summary: Mapping[str, Any]) -> str:
    """A summary as text, a row of numbers in a line."""
    lines = []
    for key, value in summary.items():
        if isinstance(value, Mapping) and value:
            inner = ",\n".join(f"  {json.dumps(name)}: {json.dumps(own)}" for name, own in value.items())
            lines.append(f" {json.dumps(key)}: {{\n{inner}\n }}")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def take(source: Path) -> list[str]:
    """Put the summaries of a folder into the repository, those with rows; their names."""
    tables = [table for page in PAGES for table in page.tables]
    known = {table.name for table in tables} | {f"ours-{table.ours[0]}" for table in tables if table.ours[0]}
    taken = []
    for path in sorted(source.glob("*.json")):
        summary = json.loads(path.read_text(encoding="utf-8"))
        if path.stem in known and summary["rows"]:
            summary["commit"] = summary["commit"] if has(summary["commit"]) else commit()
            (KEPT / path.name).write_text(as_json(summary), encoding="utf-8")
            taken.append(path.stem)
    return taken


# ---- from summaries to pages ---------------------------------------------------------------------------------------------
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


def as_markdown(summary: Mapping[str, Any]) -> str:
    """A summary as a table, and who is first below it."""
    table = Comparison.of_json(summary)
    columns = list(table.columns)
    best = {c: max((own[c].mean for own in table.rows.values() if c in own), default=0.0) for c in columns}
    errors = any(number.error is not None for number in table.headline.values())
    extra = [*([] if ranked_by(table) else [HEADLINE]), *(["± over clients"] if errors else [])]
    lines = [["", *columns, *extra], ["---"] * (1 + len(columns) + len(extra))]
    for title, cells in table.rows.items():
        own = [shown(cells.get(c), c in cells and cells[c].mean == best[c]) for c in columns]
        first = table.headline.get(title)
        error = "" if first is None or first.error is None else f"{first.error:.1f}"
        told = [*([] if ranked_by(table) else [shown(first, title == table.first)]), *([error] if errors else [])]
        lines.append([title, *own, *told])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def ranked_by(table: Comparison) -> str:
    """The column that is the headline of all rows; empty if there is none."""
    return next((c for c in table.columns if all(table.rows[t].get(c) == n for t, n in table.headline.items())), "")


def shortened(table: Table, summary: Mapping[str, Any]) -> str:
    """What the paper has more of: rounds, and what the table says."""
    whole = Experiment.load(table.preset).rounds
    fewer = f"{summary['rounds']} of the paper's {whole} rounds. " if summary["rounds"] < whole else ""
    return f"{fewer}{table.shortened}".strip()


def ours_beside(table: Table) -> list[str]:
    """What ours has on a table's protocol, and what was run beside it: other seeds, and another round, than the table's."""
    summary = kept(f"ours-{table.ours[0]}")
    if summary is None:
        return []
    columns = list(dict.fromkeys(column for cells in summary["rows"].values() for column in cells))
    best = {c: max(fmean(cells[c]) for cells in summary["rows"].values() if c in cells) for c in columns}
    lines = [["", *columns], ["---"] * (1 + len(columns))]
    for title, cells in summary["rows"].items():
        numbers = {c: Number(fmean(v), stdev(v) if len(v) > 1 else 0.0, seeds=tuple(v)) for c, v in cells.items()}
        lines.append([title, *(shown(numbers.get(c), c in numbers and numbers[c].mean == best[c]) for c in columns)])
    seeds = ", ".join(map(str, summary["seeds"]))
    facts = f"{summary['rounds']} rounds, {summary['device']}, {summary['seconds']} s"
    made = f"{summary['date']}, commit {summary['commit']}"
    return [
        f"[Ours](ours.md), method / adapter, on seeds {seeds} and at the last round, so not to be ranked in the table "
        f"above. `{summary['command']}`: {facts} ({made}).",
        "\n".join("| " + " | ".join(line) + " |" for line in lines),
    ]


def our_number(table: Table) -> str:
    """The mean over seeds of ours in the column that counts; empty where it was not measured."""
    part, column = table.ours
    summary = kept(f"ours-{part}")
    values = summary["rows"].get(OURS, {}).get(column, ()) if summary else ()
    return f"{fmean(values):.1f}" if values else ""


def section(table: Table) -> str:
    """One table of a page: the command, the time, the numbers, what they say; or that it was not run."""
    summary = kept(table.name)
    parts = [f"## {table.title}"]
    if summary is None:
        parts.append(f"Not run. `fedshift run {table.command([])}`")
        return "\n\n".join([*parts, *ours_beside(table)])
    many = len(summary["seeds"])
    facts = f"{summary['rounds']} rounds, {many} seed{'s' if many > 1 else ''}, {summary['device']}"
    rows = ", then ".join(["these rows" if summary["not-run"] else "all rows", *filter(None, [summary.get("ended")])])
    took = f", {summary['seconds']} s for {rows}" if summary.get("seconds") else ""
    made = f"{summary['date']}{', commit ' + summary['commit'] if summary.get('commit') else ''}"
    parts.append(f"`{summary['command']}`: {facts}{took} ({made}).")
    parts += [text] if (text := " ".join(filter(None, [summary.get("before"), shortened(table, summary)]))) else []
    parts.append(as_markdown(summary))
    by = ranked_by(Comparison.of_json(summary))
    how = f"Ranked by {by}." if by else "Ranked as the paper scores each row."
    parts += [" ".join([how, *summary["said"]])] if summary["said"] else []
    if summary["not-run"]:
        parts.append(f"Not run: {', '.join(summary['not-run'])}.")
    return "\n\n".join([*parts, *ours_beside(table)])


def page_text(page: Page) -> str:
    """A whole page: its introduction, its tables, and the words on why we differ."""
    before, _, after = (TEXTS / f"{page.name}.txt").read_text(encoding="utf-8").partition("<!-- tables -->\n")
    told = "<!-- made by `python docs/generate.py --results` from docs/results/*.json and docs/builder/text: edit those -->"
    how = (
        "Ours, the deviation over seeds behind ±, the paper's number in brackets. Rows are ranked by the client mean as "
        "the paper scores each of them; *± over clients* is its standard error over clients."
    )
    made = "\n\n".join(section(table) for table in page.tables)
    return "\n\n".join([told, before.strip(), how, made, after.strip()]).strip() + "\n"


def glance() -> str:
    """All five at one glance."""
    head = [
        "",
        "table",
        "first here",
        "the paper's first of them",
        "the system's headline (paper)",
        "told apart from the others",
        "run",
        "`ours`",
    ]
    lines = [head, ["---"] * len(head)]
    for page in PAGES:
        for table in page.tables:
            summary = kept(table.name)
            where = f"[{page.title}]({page.name}.md)"
            if summary is None:
                lines.append([where, table.title, "not run", "", "", "", "", our_number(table)])
                continue
            found = Comparison.of_json(summary)
            own = found.headline.get(page.system)
            tied = f"not from {', '.join(found.tied)}" if found.tied else "yes" if found.differences else ""
            many, rows = len(summary["seeds"]), len(summary["rows"])
            part = f"{rows} of {rows + len(summary['not-run'])} rows, " if summary["not-run"] else ""
            earlier = ", earlier" if summary.get("before") else ""
            run = f"{part}{many} seed{'s' if many > 1 else ''}, {summary['date']}{earlier}"
            lines.append(
                [where, table.title, found.first, found.first_in_paper, shown(own), tied, run, our_number(table)]
            )
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return (
        "<!-- made by `python docs/generate.py --results`: edit docs/builder/results.py -->\n\n# What we measured\n\n"
        "The tables of five papers: `benchmarks/reproduce.py` runs them and writes the JSON files beside these pages. "
        "Misses stand beside hits, and what was not run is listed. *First here* is the first of the rows that were run. "
        "*Told apart* means by more than clients and seeds differ; with one seed that is clients alone. *Earlier* runs "
        "were made by hand, before changes that their page names, and wait to be run again. [`ours`](ours.md), our method "
        "with our adapter, is of other seeds and of the last round: its own page and those of the systems say what it is "
        "above.\n\n" + table + "\n"
    )


def pages() -> dict[Path, str]:
    """Every generated page and its text."""
    made = {KEPT / f"{page.name}.md": page_text(page) for page in PAGES}
    return {**made, KEPT / "README.md": glance()}
