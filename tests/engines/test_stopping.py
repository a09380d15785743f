"""A request to end is heard wherever it comes: in a library's locks, in errors made of it, where errors are thrown away."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from fedshift.cli.guard import guarded
from fedshift.engines import parallel, stopping
from fedshift.engines.pulse import Counts
from fedshift.engines.stopping import Stopped, heard, stop_now, unbroken
from fedshift.errors import UserError
from fedshift.runs.run import run
from tests.runs.test_run import tiny


def ask() -> None:
    """Somebody's ``kill``, in the middle of things."""
    assert callable(signal.getsignal(signal.SIGTERM))  # or it would be the end of the tests
    signal.raise_signal(signal.SIGTERM)


def turned_into_another() -> None:
    """As torch does inside its constructors, where it looks for a shape."""
    try:
        ask()
    except BaseException:
        raise ValueError("could not determine the shape") from None


def turned_into_a_refusal() -> None:
    try:
        ask()
    except BaseException:
        raise UserError("file is damaged") from None


def released_twice() -> None:
    """As threading.Condition does if it is broken off between giving its lock back and taking it again."""
    try:
        ask()
    finally:
        raise RuntimeError("release unlocked lock")


def ended_by_typer() -> None:
    try:
        ask()
    except BaseException:
        raise SystemExit(1) from None


class Closing:
    """What it raises when it is collected is thrown away."""

    def __del__(self) -> None:
        ask()


def thrown_away() -> None:
    gone = Closing()
    del gone
    threading.Event().wait(20)  # in the main thread, which only a signal of its own wakes
    raise AssertionError("nobody was woken")


def later() -> None:
    with unbroken():
        ask()
        turned_into = ["whole"]
    raise AssertionError(turned_into)


def broken_later() -> None:
    with contextlib.suppress(UserError), unbroken():
        ask()
        raise UserError("a worker is gone")
    raise AssertionError("it was caught with the error")


def swallowed() -> None:
    with contextlib.suppress(BaseException):
        ask()
    stop_now()  # the next round
    raise AssertionError("it was forgotten")


COMMANDS = (
    ask, turned_into_another, turned_into_a_refusal, released_twice, ended_by_typer, thrown_away, later, broken_later,
    swallowed,
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_whatever_becomes_of_a_request_it_ends_the_program(
    command: Callable[[], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["fedshift", "run", "mine.toml"])
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        guarded(command)
    assert ended.value.code == 128 + signal.SIGTERM
    said = " ".join(capsys.readouterr().err.split())
    assert said == "stopped; go on from the last checkpoint with: fedshift run mine.toml --resume"
    assert signal.getsignal(signal.SIGTERM) is before


def test_errors_of_nobody_who_asked_stay() -> None:
    with pytest.raises(ZeroDivisionError):
        guarded(lambda: 1 / 0)


def test_a_request_waits_for_the_outer_end() -> None:
    done = []

    with heard() as requests:

        @unbroken()
        def outer() -> None:
            with unbroken():
                requests.ask(15)
            done.append("inner")
            stop_now()
            done.append("never")

        with pytest.raises(Stopped, match="15"):
            outer()
    assert done == ["inner"]
    stop_now()  # nobody asks any more


def test_no_line_of_ours_loses_a_request() -> None:
    """A signal at every line of what makes requests wait, one command for each line."""
    lines, at = 0, 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if frame.f_code.co_filename == stopping.__file__ and event == "line":
            lines += 1
            if lines == at:
                ask()
        return trace

    def command() -> None:
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            with unbroken():
                pass
        finally:
            sys.settrace(before)

    while lines >= at:  # as long as there is such a line
        lines, at = 0, at + 1
        with pytest.raises(SystemExit) as ended:
            guarded(command)
        assert ended.value.code == (128 + signal.SIGTERM if lines >= at else 0), at
    assert at > 10


def test_ctrl_c_waits_in_a_script_too() -> None:
    done = []

    @unbroken()
    def interrupted(times: int) -> None:
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
        done.append(times)

    with pytest.raises(KeyboardInterrupt):
        interrupted(1)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        interrupted(2)  # somebody means it
    assert done == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_round_does_not_begin_after_a_request_that_was_swallowed(tmp_path: Path) -> None:
    with heard() as requests:
        with contextlib.suppress(Stopped):
            requests.ask(15)
        with pytest.raises(Stopped):
            run(tiny(), tmp_path, engine="sequential")
    assert not list(tmp_path.rglob("done"))


def test_no_request_breaks_into_the_queues_of_a_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All pieces are in the queue, whole, before the request is heard; then workers end at once."""
    put, ends = [], []

    def submit(function: Callable[..., Any], *job: Any) -> Future[Any]:
        requests.ask(signal.SIGINT)
        put.append(job)
        return Future()

    pool = SimpleNamespace(submit=submit, shutdown=lambda **how: ends.append(how))
    monkeypatch.setattr(parallel, "get_reusable_executor", lambda **_: pool)
    engine = parallel.Parallel(workers=1)
    try:
        with heard() as requests, pytest.raises(Stopped):
            engine._run(print, [(1,), (2,)], Counts(tmp_path / "beats", 2))
    finally:
        engine.close()
    assert put == [(1,), (2,)]
    assert ends == [{"kill_workers": True}]
