"""What was answered, by sample id, until somebody knows the truth; labels that come later give running accuracies."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedshift.errors import HostError, UserError
from fedshift.measures.confusion import Confusion
from fedshift.measures.predictions import NOTHING
from fedshift.store.files import Damaged, check_file

ANSWERS = "answers.sqlite"
MOST = 1_000_000  # answers that are remembered
CACHE = 256  # KiB of the file that are held in memory
WHO = ("served", "adapted", "frozen")
BESIDE = ("", "-wal", "-shm")  # files that SQLite keeps together
DAMAGE = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)  # all else is the system's
REMEDY = "it is given another name, and answers are remembered anew"


class Record(NamedTuple):
    """One answer: classes by number."""

    name: str
    served: int
    adapted: int
    frozen: int


class Records:
    """A file of answers. One thread at a time; ``last`` is the number of the newest, and only grows.

    >>> records = Records(None)
    >>> records.add([Record("a", 1, 1, 0), Record("b", 0, 0, 0)])
    >>> records.label({"a": 1, "b": 0, "c": 0})
    ['c']
    >>> records.accuracies(("cat", "dog"))["frozen"]["accuracy"]
    0.5
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / ANSWERS
        if self._path is not None:
            _check(self._path)
        with self._used():
            self._file = sqlite3.connect(self._path or ":memory:", check_same_thread=False)
        try:
            with self._used():
                self._prepare()
        except UserError:
            self._file.close()
            raise

    def _prepare(self) -> None:
        self._file.execute("PRAGMA journal_mode=WAL")
        self._file.execute(f"PRAGMA cache_size=-{CACHE}")
        self._file.execute(
            "CREATE TABLE IF NOT EXISTS answers (number INTEGER PRIMARY KEY, name TEXT UNIQUE, served INTEGER, "
            "adapted INTEGER, frozen INTEGER, label INTEGER)"
        )
        self._file.commit()
        self._file.execute("SELECT number, name, served, adapted, frozen, label FROM answers LIMIT 0")
        (found,) = self._file.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise Damaged(self._path or Path(ANSWERS), " ".join(found.split()), REMEDY)
        self.last = self._newest()

    def _newest(self) -> int:
        return int(self._file.execute("SELECT COALESCE(MAX(number), 0) FROM answers").fetchone()[0])

    def add(self, records: Iterable[Record]) -> None:
        """Remember answers; a later one to the same id takes its place."""
        with self._used(), self._file:
            self._file.executemany(
                "INSERT OR REPLACE INTO answers (name, served, adapted, frozen) VALUES (?, ?, ?, ?)", records
            )
            self.last = self._newest()
            self._file.execute("DELETE FROM answers WHERE number <= ?", (self.last - MOST,))

    def label(self, truth: Mapping[str, int]) -> list[str]:
        """Note what some samples really were; the ids of those that nobody has asked about."""
        missing = []
        with self._used(), self._file:
            for name, code in truth.items():
                found = self._file.execute("UPDATE answers SET label = ? WHERE name = ?", (code, name)).rowcount
                missing += [] if found else [name]
        return missing

    def accuracies(self, classes: Sequence[str]) -> dict[str, Any]:
        """Of what was served, of the adapter's answers and of the frozen model's: accuracy, balanced, and by class."""
        with self._used():
            return {who: _measured(self._confusion(who, len(classes)), classes) for who in WHO}

    def close(self) -> None:
        """Let go of the file."""
        with self._used():
            self._file.close()

    def _confusion(self, who: str, classes: int) -> Confusion:
        rows = self._file.execute(
            f"SELECT label, {who}, COUNT(*) FROM answers WHERE label BETWEEN 0 AND ?1 AND {who} <= ?1 "
            f"GROUP BY label, {who}",
            (classes - 1,),
        )
        return Confusion(classes, tuple((label, max(code, NOTHING), count) for label, code, count in rows.fetchall()))

    @contextlib.contextmanager
    def _used(self) -> Iterator[None]:
        """What SQLite says, as a sentence: the file is damaged, or the system says no."""
        try:
            yield
        except sqlite3.Error as error:
            path, code = self._path or Path(ANSWERS), getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in DAMAGE:
                raise Damaged(path, str(error), REMEDY) from None
            raise HostError(f"{path} cannot be used ({error})") from None


def _check(path: Path) -> None:
    """Refuse what is no file, and one that was emptied: SQLite would begin anew in it without a word."""
    for one in (path.with_name(path.name + end) for end in BESIDE):
        if os.path.lexists(one):
            check_file(one, REMEDY)
    if path.is_file() and not path.stat().st_size:
        raise Damaged(path, "it is empty", REMEDY)


def opened(folder: Path) -> tuple[Records, list[str]]:
    """The answers of a folder, and what is to be said: a damaged file is set aside, so that nothing of it is lost."""
    try:
        return Records(folder), []
    except Damaged as error:
        names = (f"damaged-{number}-{ANSWERS}" for number in itertools.count(1))
        aside = next(name for name in names if not any(os.path.lexists(folder / f"{name}{end}") for end in BESIDE))
        for end in BESIDE:
            if os.path.lexists(folder / f"{ANSWERS}{end}"):
                (folder / f"{ANSWERS}{end}").rename(folder / f"{aside}{end}")
        why = f"{error.path} is damaged ({error.why}): {ANSWERS} is called {aside} from now on"
        return Records(folder), [f"{why}, and labels find no answer that was given before"]


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
