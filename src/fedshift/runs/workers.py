"""Several runs at the same time, in as many processes, each of which does one group of them after the other.

One run leaves most of a GPU idle while it launches small kernels, and a core while it waits; several fill them. A process
is given runs by value (methods of a script or a notebook included), writes into their folders as ever, and says what it
does into a file that the caller reads. It takes the next ones when it is done: to start and to have the images ready takes
seconds. One that dies takes nobody with it, and what it had done stays resumable; another one goes on in its place.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import torch

from fedshift.engines import shipping
from fedshift.engines.base import Compute
from fedshift.engines.parallel import ended_by
from fedshift.engines.scratch import Scratch
from fedshift.errors import HostError, UserError
from fedshift.runs.orders import Data, Order, Orders, read_order, take, waiting
from fedshift.runs.plan import Job
from fedshift.runs.progress import Reporter
from fedshift.store.folder import RunFolder

USERS, HOSTS = 2, 3  # exit codes of a process; Python itself ends with 1 after a traceback
LOOK = 0.2  # seconds between two looks at what processes say
PROCESS = Path(__file__).with_name("worker_process.py")


class Relay:
    """A reporter that writes down what it is told, a line each, for the process that shows it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _say(self, word: str, *what: object) -> None:
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps([word, *what]) + "\n")

    def doing(self, what: str) -> None:
        """Passed on."""
        self._say("doing", what)

    def plan(self, runs: Sequence[tuple[str, int, int]], engine: str, device: str) -> None:
        """The caller has said it for all processes."""

    def begin(self, run: str, done: int, rounds: int) -> None:
        """Passed on."""
        self._say("begin", run, done, rounds)

    def skip(self, run: str, rounds: int) -> None:
        """Passed on."""
        self._say("skip", run, rounds)

    def moved(self, run: str, share: float, training: bool) -> None:
        """Passed on."""
        self._say("moved", run, share, training)

    def round(self, run: str, number: int, loss: float, best: float) -> None:
        """Passed on."""
        self._say("round", run, number, loss, best)

    def note(self, text: str) -> None:
        """Passed on."""
        self._say("note", text)

    def close(self) -> None:
        """Others may still speak."""


class Seat:
    """One process at work."""

    def __init__(self, folder: Path, orders: Orders) -> None:
        self._folder, self._orders, self._read = folder, orders, 0
        folder.mkdir()
        self._said, self._errors = folder / "said", folder / "errors"
        self._said.touch()
        with open(self._errors, "wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(PROCESS), str(folder)],
                env={**os.environ, **shipping.environment()},
                stdin=subprocess.PIPE,  # nothing is ever said in it: it closes when we end, and so does the other
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )

    def listen(self, say: Reporter) -> None:
        """Pass on what was said since the last time."""
        with open(self._said, encoding="utf-8") as file:
            file.seek(self._read)
            while (line := file.readline()).endswith("\n"):  # another half of a line will come
                word, *what = json.loads(line)
                getattr(say, word)(*what)
                self._read = file.tell()

    def failure(self) -> UserError | None:
        """One sentence on why it stopped, or nothing."""
        code = self.process.wait()
        if not code:
            return None
        if not self._orders.taken(self._folder):  # it had not even begun: the order it came for is not tried again
            take(self._folder.parent, self._folder)
        titles = [self._orders.title(name) for name in self._orders.taken(self._folder)]
        if not titles:  # it ended when all was done
            return None
        title = titles[0]
        lines = self._errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        if code < 0 or not lines:
            return UserError(f"{title}: its process {ended_by(code)}")
        reason = lines[-1].strip()
        kinds = {USERS: UserError(reason), HOSTS: HostError(reason)}
        return kinds.get(code, UserError(f"{title}: {reason}"))

    def close(self) -> None:
        """It ends now, if it has not."""
        self.process.kill()
        self.process.communicate()
        shutil.rmtree(self._folder, ignore_errors=True)


def side_by_side(
    groups: Sequence[Sequence[Job]], processes: int, engine: str, compute: Compute, resume: bool, say: Reporter
) -> None:
    """Finish groups of runs, so many at once; those that can are finished before anything wrong with another is raised."""
    most, failures, numbers = min(processes, len(groups)), list[UserError](), count()
    with Scratch() as base:
        orders = Orders(base, [Order.of(jobs, engine, compute, resume) for jobs in groups])
        seats: list[Seat] = []
        try:
            while orders.offer(most) or seats:
                while len(seats) < most and waiting(base):
                    seats.append(Seat(base / str(next(numbers)), orders))
                time.sleep(LOOK)
                ended = [seat for seat in seats if seat.process.poll() is not None]
                for seat in seats:
                    seat.listen(say)
                for seat in ended:
                    failure = seat.failure()
                    failures += [failure] if failure is not None else []
                    seat.close()
                seats = [seat for seat in seats if seat not in ended]
        finally:
            for seat in seats:
                seat.close()
            _date([job.folder for group in groups for job in group])
    if failures:
        kind = HostError if any(isinstance(failure, HostError) for failure in failures) else UserError
        raise kind("; ".join(dict.fromkeys(map(str, failures))))


def _date(folders: Sequence[RunFolder]) -> None:
    """Runs are listed in the order in which they began: here that of the plan, whichever process was first."""
    now = time.time_ns()
    for place, config in enumerate(folder.path / "config.toml" for folder in folders):
        if config.is_file():
            os.utime(config, ns=(now + 1000 * place, now + 1000 * place))


def main(folder: Path) -> None:
    """What a process does: orders, told into a file; one sentence and an exit code of its own for what is known."""
    say, data = Relay(folder / "said"), dict[str, Data]()
    try:
        while (path := take(folder.parent, folder)) is not None:
            order, data = read_order(folder.parent, path, data)
            order.carry_out(say)
            path.unlink()
            _let_go()
    except UserError as error:
        print(error, file=sys.stderr)
        raise SystemExit(HOSTS if isinstance(error, HostError) else USERS) from None
    except OSError as error:
        print(HostError.of(error), file=sys.stderr)
        raise SystemExit(HOSTS) from None


def _let_go() -> None:
    """What an order took of the GPU is there for others."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
