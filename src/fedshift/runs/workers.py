"""Several runs at the same time, each group of them in a process of its own.

One run leaves most of a GPU idle while it launches small kernels, and a core while it waits; several fill them. A process
is given runs by value (methods of a script or a notebook included), writes into their folders as ever, and says what it
does into a file that the caller reads. One that dies takes nobody with it, and what it had done stays resumable.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedshift.core.adapter import Adapter
from fedshift.core.registry import ADAPTERS, Entry
from fedshift.engines import shipping
from fedshift.engines.auto import engine_for
from fedshift.engines.base import Compute
from fedshift.engines.parallel import ended_by
from fedshift.engines.scratch import Scratch
from fedshift.engines.torch_flags import steady
from fedshift.errors import HostError, UserError
from fedshift.runs.code import code_digest, tell_digest
from fedshift.runs.finish import finish
from fedshift.runs.plan import Job
from fedshift.runs.progress import Reporter
from fedshift.store.folder import RunFolder

USERS, HOSTS = 2, 3  # exit codes of a process; Python itself ends with 1 after a traceback
LOOK = 0.2  # seconds between two looks at what processes say
PROCESS = Path(__file__).with_name("worker_process.py")


@dataclass(frozen=True)
class Order:
    """What one process is to do."""

    jobs: tuple[Job, ...]
    engine: str
    compute: Compute
    resume: bool
    # a script's own are not known in another process, nor is their source, of which scores hold the digest
    adapters: tuple[tuple[Entry[type[Adapter]], str], ...]

    def carry_out(self, say: Reporter) -> None:
        """Everything its runs lack."""
        for entry, digest in self.adapters:
            ADAPTERS.adopt(entry)
            tell_digest(entry.make, digest)
        first = self.jobs[0]
        with steady(self.compute.tf32):
            convolution = any(method.arch.has_convolution for method in first.setup.methods.values())
            _, engine = engine_for(self.engine, self.compute, convolution, len(first.task.clients))
            try:
                finish(self.jobs, engine, self.compute, self.resume, say)
            finally:
                engine.close()


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

    def __init__(self, order: Order, folder: Path) -> None:
        self.name = ", ".join(dict.fromkeys(job.title for job in order.jobs))
        self._said, self._errors, self._read = folder / "said", folder / "errors", 0
        (folder / "order").write_bytes(_pickled(order, self.name))
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
        lines = self._errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        if not code:
            return None
        if code < 0 or not lines:
            return UserError(f"{self.name}: its process {ended_by(code)}")
        reason = lines[-1].strip()
        kinds = {USERS: UserError(reason), HOSTS: HostError(reason)}
        return kinds.get(code, UserError(f"{self.name}: {reason}"))

    def close(self) -> None:
        """It ends now, if it has not."""
        self.process.kill()
        self.process.communicate()


def side_by_side(
    groups: Sequence[Sequence[Job]], processes: int, engine: str, compute: Compute, resume: bool, say: Reporter
) -> None:
    """Finish groups of runs, so many at once; those that can are finished before anything wrong with another is raised."""
    waiting, failures = deque(groups), list[UserError]()
    with Scratch() as base:
        seats: list[Seat] = []
        try:
            while waiting or seats:
                while waiting and len(seats) < processes:
                    jobs = tuple(waiting.popleft())
                    names = {spec.name for job in jobs for spec in job.setup.spec.adapters}
                    adapters = [(ADAPTERS[name], code_digest(ADAPTERS[name].make)) for name in sorted(names)]
                    order = Order(jobs, engine, compute, resume, tuple(adapters))
                    folder = base / str(len(waiting))
                    folder.mkdir()
                    seats.append(Seat(order, folder))
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


def _pickled(order: Order, name: str) -> bytes:
    try:
        return shipping.dumps(order)
    except shipping.CANNOT_TRAVEL as error:
        raise UserError(f"{name} cannot be sent to another process ({error}); run it without --jobs") from None


def main(folder: Path) -> None:
    """What a process does: its order, told into a file; one sentence and an exit code of its own for what is known."""
    order: Order = shipping.loads((folder / "order").read_bytes())
    (folder / "order").unlink()
    try:
        order.carry_out(Relay(folder / "said"))
    except UserError as error:
        print(error, file=sys.stderr)
        raise SystemExit(HOSTS if isinstance(error, HostError) else USERS) from None
    except OSError as error:
        print(HostError.of(error), file=sys.stderr)
        raise SystemExit(HOSTS) from None
