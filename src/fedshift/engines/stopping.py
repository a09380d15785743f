"""Requests to end the program, and the places where they must wait.

Python raises what a signal's handler raises between any two instructions. Inside a library's locks and queues that leaves
a lock held, or held by nobody, and the program hangs or ends with an error that is not the user's. Whoever calls such a
library does it ``unbroken()`` and asks ``stop_now()`` where nothing is half done. A library may also swallow what was
raised in it, so that rounds ask ``stop_now()``, too: a request is remembered until the program ends.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Stopped(BaseException):
    """Somebody wants the program to end. Not a KeyboardInterrupt: typer keeps those to itself."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.code = 128 + number  # as shells say it


class Requests:
    """What has been asked of a program, and whether it must wait."""

    def __init__(self, ends: Callable[[int], BaseException] = Stopped) -> None:
        self.came: list[int] = []  # numbers of signals
        self.held = False
        self._ends = ends

    def ask(self, number: int) -> None:
        """A signal of this number has come: end here and now, unless that must wait."""
        self.came.append(number)
        if not self.held:
            raise self._ends(number)

    def heed(self) -> None:
        """End, if anybody has asked for it."""
        if self.came:
            raise self._ends(self.came[0])


_REQUESTS: ContextVar[Requests | None] = ContextVar("requests", default=None)


@contextmanager
def heard() -> Iterator[Requests]:
    """Who handles a program's signals tells them to these requests.

    >>> with heard() as requests:
    ...     try:
    ...         requests.ask(15)
    ...     except BaseException:
    ...         print("swallowed")
    ...     stop_now()
    Traceback (most recent call last):
    ...
    fedshift.engines.stopping.Stopped: 15
    """
    requests = Requests()
    token = _REQUESTS.set(requests)
    try:
        yield requests
    finally:
        _REQUESTS.reset(token)


def stop_now() -> None:
    """Where nothing is half done: end, if somebody has asked for it."""
    requests = _REQUESTS.get()
    if requests is not None:
        requests.heed()


@contextmanager
def unbroken() -> Iterator[None]:
    """Requests to end wait until this is over, or until :func:`stop_now`.

    >>> with heard() as requests, unbroken():
    ...     requests.ask(15)
    ...     print("done")
    Traceback (most recent call last):
    ...
    fedshift.engines.stopping.Stopped: 15
    """
    requests = _REQUESTS.get()
    if requests is None:
        with _interrupts():
            yield
    elif requests.held:
        yield
    else:
        with _holding(requests):
            yield


@contextmanager
def _holding(requests: Requests) -> Iterator[None]:
    requests.held = True
    try:
        yield
    finally:
        requests.held = False  # first: what comes from here on is raised where it comes
        requests.heed()


@contextmanager
def _interrupts() -> Iterator[None]:
    """In a script or a notebook nobody handles signals but Python, whose Ctrl-C waits, too; a second one does not."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    requests = Requests(lambda _: KeyboardInterrupt())

    def wait(number: int, _: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        requests.ask(number)

    token = _REQUESTS.set(requests)
    try:
        signal.signal(signal.SIGINT, wait)
        with _holding(requests):
            yield
    finally:
        _REQUESTS.reset(token)  # first: what comes now interrupts what is here, and nothing later
        if signal.getsignal(signal.SIGINT) is wait:
            signal.signal(signal.SIGINT, signal.default_int_handler)
