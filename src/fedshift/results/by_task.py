"""Which rows were tested on the same images: only these are ever compared with each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedshift.results.result import Row


def task_of(row: Row) -> tuple[str, ...]:
    """The hashes of the task under each of a row's seeds; nothing if it does not know."""
    for scores in row.values.values():
        hashes = tuple(score.task_hash for score in scores)
        if all(hashes):
            return hashes
    return ()


def tasks_of(rows: Sequence[Row]) -> tuple[list[str], list[int]]:
    """A hash of every task, and which of them each row was tested on.

    Rows that share a seed's task are of one, also if some of them have more seeds. A bound, which may not know, is of its
    method's.
    """
    tasks: list[dict[str, None]] = []  # the hashes of each, the first seen first
    found: dict[object, int] = {}
    for row in rows:
        hashes = task_of(row)
        if not hashes:
            continue
        number = next((n for n, known in enumerate(tasks) if not known.keys().isdisjoint(hashes)), len(tasks))
        tasks += [{}] if number == len(tasks) else []
        tasks[number] |= dict.fromkeys(hashes)
        found.setdefault((row.method, row.point), number)
    return [next(iter(known)) for known in tasks], [found.get((row.method, row.point), 0) for row in rows]
