"""What ours has on the protocols of the papers' tables: summaries of ``benchmarks/ours.py``, shown below these tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from statistics import fmean, stdev
from typing import Any

from docs.builder.cells import as_table, shown
from docs.builder.summaries import commit, device, kept
from fedshift.results.beside import Number

OURS = "ours / ours"  # the row of our method with our adapter


def our_summary(
    part: str,
    told: str,
    *,
    seeds: Sequence[int],
    rounds: int,
    seconds: float,
    ended: str,
    rows: Mapping[str, Mapping[str, Sequence[float]]],
) -> dict[str, Any]:
    """What is kept of a part of ``benchmarks/ours.py``: every seed's number, at the last round."""
    return {
        "part": part,
        "seeds": list(seeds),
        "rounds": rounds,
        "made": [
            {
                "command": f"python benchmarks/ours.py {told}",
                "date": datetime.now(UTC).date().isoformat(),
                "commit": commit(),
                "device": device(),
                "seconds": round(seconds),
                "ended": ended,
                "rows": list(rows),
            }
        ],
        "rows": {name: {c.removesuffix(" (clients)"): list(v) for c, v in own.items()} for name, own in rows.items()},
    }


def ours_beside(part: str) -> list[str]:
    """What ours has on a table's protocol, and what was run beside it: other seeds, and another round, than the table's."""
    summary = kept(f"ours-{part}")
    if summary is None:
        return []
    columns = list(dict.fromkeys(column for cells in summary["rows"].values() for column in cells))
    best = {c: max(fmean(cells[c]) for cells in summary["rows"].values() if c in cells) for c in columns}
    lines = [["", *columns]]
    for title, cells in summary["rows"].items():
        numbers = {c: Number(fmean(v), stdev(v) if len(v) > 1 else 0.0, seeds=tuple(v)) for c, v in cells.items()}
        lines.append([title, *(shown(numbers.get(c), c in numbers and numbers[c].mean == best[c]) for c in columns)])
    seeds = ", ".join(map(str, summary["seeds"]))
    made = "; ".join(map(command_told, summary["made"]))
    return [
        f"[Ours](ours.md), method / adapter, on seeds {seeds} and at the last of {summary['rounds']} rounds, so not to be "
        f"ranked in the table above. {made}.",
        as_table(lines),
    ]


def command_told(made: Mapping[str, Any]) -> str:
    """Where, when and in which time a command was run.

    >>> made = {"command": "python a.py", "device": "CPU", "seconds": 3, "ended": "", "date": "2026-11-18", "commit": "c0"}
    >>> command_told(made)
    '`python a.py`: CPU, 3 s (2026-11-18, commit c0)'
    """
    facts = ", ".join(filter(None, [made["device"], f"{made['seconds']} s", made["ended"]]))
    return f"`{made['command']}`: {facts} ({made['date']}, commit {made['commit']})"


def our_number(part: str, column: str) -> str:
    """The mean over seeds of ours in the column that counts; empty where no summary is kept."""
    summary = kept(f"ours-{part}")
    values = summary["rows"].get(OURS, {}).get(column, ()) if summary else ()
    return f"{fmean(values):.1f}" if values else ""
