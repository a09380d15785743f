"""How far work is, told from within: engines say after every batch how many samples it had, and who asked hears it.

Who listens is a matter of the context a call is made in, so that no engine, method or adapter has to pass it on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import numpy as np

PAUSE = 0.1  # seconds between two words to a person
_LISTENER: ContextVar[Callable[[int], None] | None] = ContextVar("listener", default=None)


def beat(samples: int) -> None:
    """So many samples were worked on since the last time."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(samples)


@contextmanager
def heard(listener: Callable[[int], None]) -> Iterator[None]:
    """Whatever is done meanwhile is heard by the listener.

    >>> said = []
    >>> with heard(said.append):
    ...     beat(32)
    >>> said
    [32]
    """
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


@contextmanager
def share_told(total: int, tell: Callable[[float], object]) -> Iterator[None]:
    """Tell the share of so many samples that is done, now and then, and at the end that all is.

    >>> with share_told(4, print):
    ...     beat(1)
    0.25
    1.0
    """
    done, told = 0, 0.0

    def listen(samples: int) -> None:
        nonlocal done, told
        done += samples
        if time.monotonic() - told >= PAUSE:
            told = time.monotonic()
            tell(min(done / max(total, 1), 1.0))

    with heard(listen):
        yield
    tell(1.0)


class Counts:
    """Numbers that worker processes write into a file, each in a place of its own, for the process that waits."""

    def __init__(self, path: Path, places: int) -> None:
        self._numbers = np.memmap(path, dtype=np.int64, mode="w+", shape=(max(places, 1),))
        self._told = 0

    def pass_on(self) -> None:
        """Beat for what was counted since the last time."""
        total = int(self._numbers.sum())
        beat(total - self._told)
        self._told = total


@contextmanager
def counted(path: str, place: int) -> Iterator[None]:
    """In a worker: what is done is added up in one place of a file of :class:`Counts`."""
    numbers = np.memmap(path, dtype=np.int64, mode="r+")

    def add(samples: int) -> None:
        numbers[place] += samples

    with heard(add):
        yield
