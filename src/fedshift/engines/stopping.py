"""Requests to end the program, and the places where they must wait.

Python raises what a signal's handler raises between any two instructions. Inside a library's locks and queues that leaves
a lock held, or held by nobody, and the program hangs or ends with an error that is not the user's. Whoever calls such a
library does it ``unbroken()`` and asks ``stop_now()`` where nothing is half done.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_WAITING: ContextVar[list[int] | None] = ContextVar("waiting", default=None)


class Stopped(BaseException):
    """Somebody wants the program to end. Not a KeyboardInterrupt: typer keeps those to itself."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.code = 128 + number  # as shells say it


def asked(number: int) -> None:
    """A signal of this number has come: end here and now, or where :func:`unbroken` says so.

    >>> asked(2)
    Traceback (most recent call last):
    ...
    fedshift.engines.stopping.Stopped: 2
    """
    waiting = _WAITING.get()
    if waiting is None:
        raise Stopped(number)
    waiting.append(number)


def stop_now() -> None:
    """Inside :func:`unbroken`, where nothing is half done: end, if somebody has asked for it."""
    waiting = _WAITING.get()
    if waiting:
        raise Stopped(waiting[0])


@contextmanager
def unbroken() -> Iterator[None]:
    """Requests to end wait until this is over, or until :func:`stop_now`.

    >>> with unbroken():
    ...     asked(15)
    ...     print("done")
    Traceback (most recent call last):
    ...
    fedshift.engines.stopping.Stopped: 15
    """
    if _WAITING.get() is not None:
        yield
        return
    token = _WAITING.set([])
    try:
        yield
        stop_now()
    finally:
        _WAITING.reset(token)
