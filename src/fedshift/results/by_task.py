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
    method's; what nobody knows is beside all others, in a task without a hash.
    """
    own = [_hashes(row) for row in rows]
    tasks: list[list[str]] = []
    for hashes in filter(None, own):
        same = [task for task in tasks if not set(task).isdisjoint(hashes)]
        whole = list(dict.fromkeys([*(name for task in same for name in task), *hashes]))
        at = tasks.index(same[0]) if same else len(tasks)
        tasks = [*tasks[:at], whole, *(task for task in tasks[at:] if task not in same)]
    number = {name: n for n, task in enumerate(tasks) for name in task}
    of_method = {(row.method, row.point): number[hashes[0]] for row, hashes in zip(rows, own, strict=True) if hashes}
    unknown = len(tasks)
    found = [
        number[hashes[0]] if hashes else of_method.get((row.method, row.point), unknown)
        for row, hashes in zip(rows, own, strict=True)
    ]
    names = [task[0] for task in tasks]
    return [*names, ""] if unknown in found else names, found


def _hashes(row: Row) -> list[str]:
    """Those of its seeds that are known."""
    found = ([score.task_hash for score in scores if score.task_hash] for scores in row.values.values())
    return next(filter(None, found), [])
