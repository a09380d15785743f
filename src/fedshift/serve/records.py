"""What was answered, by sample id, until somebody knows the truth; labels that come later give running accuracies."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedshift.errors import UserError
from fedshift.measures.confusion import Confusion
from fedshift.measures.predictions import NOTHING

ANSWERS = "answers.sqlite"
MOST = 1_000_000  # answers that are remembered
CACHE = 256  # KiB of the file that are held in memory
WHO = ("served", "adapted", "frozen")


class Record(NamedTuple):
    """One answer: classes by number."""

    name: str
    served: int
    adapted: int
    frozen: int


class Records:
    """A file of answers. One thread at a time.

    >>> records = Records(None)
    >>> records.add([Record("a", 1, 1, 0), Record("b", 0, 0, 0)])
    >>> records.label({"a": 1, "b": 0, "c": 0})
    ['c']
    >>> records.accuracies(("cat", "dog"))["frozen"]["accuracy"]
    0.5
    """

    def __init__(self, folder: Path | None) -> None:
        try:
            self._file = sqlite3.connect(":memory:" if folder is None else folder / ANSWERS, check_same_thread=False)
            self._file.execute("PRAGMA journal_mode=WAL")
            self._file.execute(f"PRAGMA cache_size=-{CACHE}")
            self._file.execute(
                "CREATE TABLE IF NOT EXISTS answers (number INTEGER PRIMARY KEY, name TEXT UNIQUE, served INTEGER, "
                "adapted INTEGER, frozen INTEGER, label INTEGER)"
            )
            self._file.commit()
        except sqlite3.Error as error:
            raise UserError(f"{folder}/{ANSWERS} cannot be used ({error})") from None

    def add(self, records: Iterable[Record]) -> None:
        """Remember answers; a later one to the same id takes its place."""
        with self._file:
            self._file.executemany(
                "INSERT OR REPLACE INTO answers (name, served, adapted, frozen) VALUES (?, ?, ?, ?)", records
            )
            self._file.execute("DELETE FROM answers WHERE number <= (SELECT MAX(number) FROM answers) - ?", (MOST,))

    def label(self, truth: Mapping[str, int]) -> list[str]:
        """Note what some samples really were; the ids of those that nobody has asked about."""
        missing = []
        with self._file:
            for name, code in truth.items():
                found = self._file.execute("UPDATE answers SET label = ? WHERE name = ?", (code, name)).rowcount
                missing += [] if found else [name]
        return missing

    def accuracies(self, classes: Sequence[str]) -> dict[str, Any]:
        """Of what was served, of the adapter's answers and of the frozen model's: accuracy, balanced, and by class."""
        return {who: _measured(self._confusion(who, len(classes)), classes) for who in WHO}

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def _confusion(self, who: str, classes: int) -> Confusion:
        rows = self._file.execute(
            f"SELECT label, {who}, COUNT(*) FROM answers WHERE label IS NOT NULL GROUP BY label, {who}"
        )
        return Confusion(classes, tuple((label, max(code, NOTHING), count) for label, code, count in rows.fetchall()))


def _measured(count: Confusion, classes: Sequence[str]) -> dict[str, Any]:
    if not count.samples:
        return {"labelled": 0}
    recall = zip(classes, count.recall().tolist(), strict=True)
    return {
        "labelled": count.samples,
        "accuracy": count.accuracy,
        "balanced-accuracy": count.balanced_accuracy,
        "by-class": {name: value for name, value in recall if not math.isnan(value)},
    }
