"""Commands in processes of their own, without seconds of imports for each: forks of one that has everything imported.

They are real processes, with numbers that can be killed. What an interpreter does when it starts (paths, encodings,
``python -m``) is not theirs: whoever tests that starts one.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[1]
IMPORTED = ("runs.run", "runs.estimate", "results.pages.report", "results.plots.pictures", "results.plots.task")
LONGEST = 300  # seconds until a command is taken for dead, and is


def become(words: Sequence[str], place: Path, before: Callable[[], object] = lambda: None) -> NoReturn:
    """Be ``fedshift`` with these words, here and now, and end as interpreters do; what is printed goes to files."""
    from fedshift.cli import main

    code = 1
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs tests in the background ignores it
    try:
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(place / name, os.O_WRONLY | os.O_CREAT), stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        signal.alarm(LONGEST)
        sys.argv = ["fedshift", *words]
        before()
        main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    # not os._exit: what libraries clean up when an interpreter ends (semaphores of worker pools) must be seen to be clean
    sys.exit(code)


class Forked:
    """A command under way, as :class:`subprocess.Popen` would have it."""

    def __init__(self, place: Path) -> None:
        self._place = place
        until = time.monotonic() + LONGEST
        while not (place / "pid").exists():
            assert time.monotonic() < until, "nobody answers"
            time.sleep(0.002)
        self.pid = int((place / "pid").read_text())

    @property
    def out(self) -> str:
        """What it has printed so far."""
        return (self._place / "out").read_text(errors="replace")

    @property
    def err(self) -> str:
        """What it has complained of so far."""
        return (self._place / "err").read_text(errors="replace")

    def poll(self) -> int | None:
        """How it ended, if it has; a signal's number is negative."""
        return int((self._place / "code").read_text()) if (self._place / "code").exists() else None

    def wait(self, seconds: float = LONGEST) -> int:
        """How it ended."""
        until = time.monotonic() + seconds
        while (code := self.poll()) is None:
            assert time.monotonic() < until, f"it has not ended after {seconds} s: {self.err[-2000:]}"
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        """To the process, if it is there."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def end(self) -> None:
        """It is gone after this, and whoever it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()


class Forks:
    """Starts commands."""

    def __init__(self, server: subprocess.Popen[str], folder: Path) -> None:
        self._server, self._folder, self._count = server, folder, 0

    def start(self, *words: object, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> Forked:
        """A command, in a process group of its own."""
        self._count += 1
        place = self._folder / str(self._count)
        place.mkdir()
        order = {"words": list(map(str, words)), "place": str(place), "cwd": str(cwd), "env": dict(env or {})}
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        return Forked(place)


@contextmanager
def forking(folder: Path) -> Iterator[Forks]:
    """A process that forks others for as long as this lasts."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    known = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen([sys.executable, "-m", "tests.forks"], stdin=subprocess.PIPE, text=True, env=known)
    try:
        yield Forks(server, folder)
    finally:
        server.stdin.close()  # type: ignore[union-attr]
        server.wait()


def _serve() -> None:
    import torch

    torch.set_num_threads(1)
    for module in IMPORTED:
        importlib.import_module(f"fedshift.{module}")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait
    for line in sys.stdin:
        if os.fork() == 0:
            _supervise(json.loads(line))


def _supervise(order: Mapping[str, Any]) -> NoReturn:
    """Wait for the command, and write down how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    place = Path(order["place"])
    number = os.fork()
    if number == 0:
        os.setpgid(0, 0)
        os.environ.update(order["env"])
        tempfile.tempdir = None  # it may be another one now
        os.chdir(order["cwd"])
        become(order["words"], place)
    _written(place / "pid", number)
    _, status = os.waitpid(number, 0)
    _written(place / "code", os.waitstatus_to_exitcode(status))
    os._exit(0)


def _written(path: Path, number: int) -> None:
    """All or nothing."""
    half = path.with_name(f".{path.name}")
    half.write_text(str(number))
    half.rename(path)


if __name__ == "__main__":
    _serve()
