"""How the program ends: a user's mistake is one sentence, and a request to stop is heard."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from rich.text import Text

from fedshift.errors import UserError
from fedshift.results.plain import Screen, plain


class Stopped(BaseException):
    """Somebody wants the program to end. Not a KeyboardInterrupt: typer keeps those to itself."""

    def __init__(self, number: int) -> None:
        self.code = 128 + number  # as shells say it


@contextmanager
def _stoppable() -> Iterator[None]:
    """A request to end (SIGTERM) is handled like Ctrl-C: what was begun is put away. A second one ends at once."""
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}

    def stop(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise Stopped(number)

    # one that somebody chose stays (nohup ignores signals), and only this thread may choose
    chosen = threading.current_thread() is not threading.main_thread()
    mine = {} if chosen else {n: old for n, old in handlers.items() if signal.getsignal(n) is old}
    for number in mine:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, old in mine.items():
            signal.signal(number, old)


def guarded(command: Callable[[], Any]) -> NoReturn:
    """Carry out a command and end the program with the exit code it deserves."""
    try:
        with _stoppable():
            command()
    except UserError as error:
        said = plain(str(error), lines=False)
        Screen(stderr=True, soft_wrap=True).print(Text.assemble(("error:", "bold red"), f" {said}"))
        sys.exit(2)
    except Stopped as stopped:
        Screen(stderr=True).print("stopped; add --resume to go on from the last checkpoint")
        sys.exit(stopped.code)
    sys.exit(0)
