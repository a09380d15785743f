"""How the program ends: what is wrong is one sentence, and a request to stop is heard."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from rich.text import Text

from fedshift.engines.stopping import Stopped, heard
from fedshift.errors import HostError, UserError
from fedshift.results.plain import Screen, plain

AGAIN = 0.05  # seconds after which a request that was thrown away comes again


@contextmanager
def _stoppable() -> Iterator[None]:
    """A request to end (SIGTERM) is handled like Ctrl-C: what was begun is put away. A second one ends at once.

    Whatever leaves the command after that, the request is why: it may have come inside a library, which made an error of
    its own of it. Where Python throws errors away (``__del__``, callbacks of weak references), it comes again soon.
    """
    if threading.current_thread() is not threading.main_thread():  # only that one may choose handlers
        yield
        return
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    # one that somebody chose stays: nohup ignores signals
    mine = {n: old for n, old in handlers.items() if signal.getsignal(n) is old}
    with heard() as requests:

        def stop(number: int, _: object) -> None:
            signal.signal(number, signal.SIG_DFL)
            requests.ask(number)

        def thrown_away(what: sys.UnraisableHookArgs) -> None:
            if isinstance(what.exc_value, Stopped):
                signal.signal(requests.came[0], stop)
                later = threading.Timer(AGAIN, again)
                later.daemon = True
                later.start()
            else:
                others(what)

        def again() -> None:
            if signal.getsignal(requests.came[0]) is stop:  # it is not over meanwhile
                _interrupt(requests.came[0])

        others, sys.unraisablehook = sys.unraisablehook, thrown_away
        for number in mine:
            signal.signal(number, stop)
        try:
            yield
        except SystemExit as ended:  # how typer ends, and how it hears of some errors
            if ended.code:
                requests.heed()
            raise
        except Exception:
            requests.heed()
            raise
        finally:
            for number, old in mine.items():
                signal.signal(number, old)
            sys.unraisablehook = others


def _interrupt(number: int) -> None:
    """A signal to the main thread, also while it waits for something: one that came to another thread would not wake it."""
    if hasattr(signal, "pthread_kill") and (main := threading.main_thread().ident) is not None:
        signal.pthread_kill(main, number)
    else:
        signal.raise_signal(number)


def guarded(command: Callable[[], Any]) -> NoReturn:
    """Carry out a command and end the program with the exit code it deserves."""
    _speak_anything()
    code: Any = 0
    try:
        with _stoppable():
            command()
    except SystemExit as ended:  # how typer ends
        code = ended.code
    except UserError as error:
        code = _refuse(error)
    except Stopped as stopped:
        _say(f"stopped{_next(sys.argv[1:])}")
        code = stopped.code
    except UnicodeEncodeError as error:
        code = _refuse(HostError(f"{error.object!r} cannot be written in this locale: set PYTHONUTF8=1"))
    except MemoryError:
        code = _refuse(HostError("there is not enough memory"))
    except OSError as error:
        # who printed may have thrown away what could not be written: one more line tells whose fault it was
        code = _refuse(HostError.of(error)) if _flushed("" if error.filename else "\n") else 1
    sys.exit(code if _flushed() else code or 1)


def _next(words: Sequence[str]) -> str:
    """What to type to go on, for commands that can.

    >>> _next(["run", "mine.toml", "--restart", "-c", "rounds=5"])
    '; go on from the last checkpoint with: fedshift run mine.toml -c rounds=5 --resume'
    >>> _next(["tune", "mine.toml"]), _next(["show", "runs"])
    ('; the same command goes on: fedshift tune mine.toml', '')
    """
    again = [word for word in words if word not in ("--restart", "--resume")]
    if list(words[:1]) == ["run"] or list(words[:2]) == ["deploy", "run"]:
        return f"; go on from the last checkpoint with: {shlex.join(['fedshift', *again, '--resume'])}"
    return f"; the same command goes on: {shlex.join(['fedshift', *words])}" if list(words[:1]) == ["tune"] else ""


def _refuse(error: UserError) -> int:
    _say(Text.assemble(("error:", "bold red"), f" {plain(str(error), lines=False)}"))
    return error.exit_code


def _say(text: str | Text) -> None:
    with contextlib.suppress(OSError):  # then there is nobody to tell
        Screen(stderr=True, soft_wrap=True).print(text)


def _speak_anything() -> None:
    """Where the locale has no UTF-8, what it has no letters for is spelt out, instead of ending the program."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _flushed(more: str = "") -> bool:
    """Whether all output could be written, and some more; if not, that is said once, and the rest is dropped."""
    try:
        sys.stdout.write(more)
        sys.stdout.flush()
    except OSError as error:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # who closes a pipe has seen enough
            _refuse(HostError.of(error, "the output"))
        return False
    return True
