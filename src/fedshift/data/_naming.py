"""How tables name pictures: by a path, or by a name alone, with or without its suffix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from fedshift.errors import UserError


def positions(names: Sequence[str]) -> dict[str, list[int]]:
    """The pictures behind every way of naming one: its path below the folder or its name alone, with or without suffix.

    >>> positions(["day/1.png"])
    {'day/1.png': [0], 'day/1': [0], '1.png': [0], '1': [0]}
    """
    found: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        path = PurePosixPath(name)
        for called in dict.fromkeys((name, path.with_suffix("").as_posix(), path.name, path.stem)):
            found.setdefault(called, []).append(i)
    return found


def plain(cell: str) -> str:
    """A path as it is looked for, however it was written.

    >>> plain(r" .\\day\\1.png")
    'day/1.png'
    """
    return cell.strip().replace("\\", "/").removeprefix("./")


def meant(cell: str, names: Sequence[str], found: Mapping[str, Sequence[int]], where: str) -> int | None:
    """The picture that a cell names; None if there is none, and a sentence if there are several."""
    hits = found.get(cell, ())
    exact = [i for i in hits if names[i] == cell]
    if len(exact or hits) > 1:
        several = " and ".join(names[i] for i in hits[:2])
        raise UserError(f'"{cell}" in "{where}" may be {several}: write the path below the folder')
    return next(iter(exact or hits), None)
