"""All CPU cores: worker processes over clients, one torch thread each.

Messages are safetensors files in shared memory (``/dev/shm`` where there is room, the temporary folder otherwise): a
model that goes to every client is written once for all. The task's images are
written there once and mapped by every worker. Methods and adapters travel by value, so a class defined in a notebook
or in a script without a main guard works; one that cannot be shipped falls back to the sequential engine, which is
said.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from loky import get_reusable_executor
from loky.backend import resource_tracker
from loky.backend.context import LokyContext
from loky.process_executor import BrokenProcessPool, TerminatedWorkerError

from fedshift.core.adapter import Adapter
from fedshift.core.method import Method
from fedshift.core.tree import Tree
from fedshift.data.task import Task
from fedshift.engines import shipping
from fedshift.engines.base import Compute, Reply, Score
from fedshift.engines.cores import usable_cores
from fedshift.engines.dealing import PIECES_PER_WORKER, apart, common_of, joined, pieces_of
from fedshift.engines.pulse import PAUSE, Counts, counted
from fedshift.engines.schedule import Plan
from fedshift.engines.scratch import Scratch, roomy_memory
from fedshift.engines.sequential import Sequential
from fedshift.engines.stopping import stop_now, unbroken
from fedshift.errors import UserError
from fedshift.store.trees import load, write

T = TypeVar("T")
CONTEXT = LokyContext()  # by its name it would be joblib's copy of loky, once scikit-learn has been imported


class Parallel:
    """The sequential loop on several processes at once."""

    def __init__(self, compute: Compute | None = None, workers: int | None = None) -> None:
        self.compute = compute or Compute()
        if self.compute.device.type != "cpu":
            raise UserError("the parallel engine works on CPU cores; use engine vmapped on a GPU")
        self.workers = workers or usable_cores()
        self._scratch = Scratch(roomy_memory())
        self._shipped: dict[int, tuple[object, str | None]] = {}
        self._fresh: set[str | None] = set()  # shipped since the last task

    def train(
        self, method: Method, downs: Mapping[str, Tree], locals: Mapping[str, Tree], task: Task, plan: Plan
    ) -> dict[str, Reply]:
        """The local work of every client in ``downs``."""
        shipped = self._ship(method)
        if shipped is None:
            return Sequential(self.compute).train(method, downs, locals, task, plan)
        where = self._ship_task(task)
        names = list(downs)
        pieces = pieces_of(names, [len(task.client(name).train) for name in names], self.workers * PIECES_PER_WORKER)
        common = common_of([downs[name] for name in names])
        inbox, beats = self._file(), self._file()
        write(inbox, {"common": common}, seal=False)
        jobs: list[tuple[Any, ...]] = []
        for piece in pieces:
            letter = self._file()
            own = {f"down {name}": apart(downs[name], common) for name in piece}
            write(letter, {**own, **{f"local {name}": locals.get(name, {}) for name in piece}}, seal=False)
            told = (str(beats), len(jobs))
            jobs.append((shipped, where, str(inbox), str(letter), piece, plan, self.compute, str(self._file()), told))
        replies: dict[str, Reply] = {}
        for answer in self._run(_train_piece, jobs, Counts(beats, len(jobs))):
            replies |= _read_replies(answer)
        for file in (inbox, beats):
            file.unlink()
        return {name: replies[name] for name in names}

    def evaluate(
        self, adapter: Adapter, deployed: Mapping[str, Tree], task: Task, parts: Sequence[str], seed: int
    ) -> dict[tuple[str, str], Score]:
        """Scores by (client, part)."""
        shipped = self._ship(adapter)
        if shipped is None:
            return Sequential(self.compute).evaluate(adapter, deployed, task, parts, seed)
        where = self._ship_task(task)
        names = list(deployed)
        sizes = [sum(len(task.samples(task.client(name), part)) for part in parts) for name in names]
        common = common_of(list(deployed.values()))
        inbox, beats = self._file(), self._file()
        write(inbox, {"common": common}, seal=False)
        jobs: list[tuple[Any, ...]] = []
        for piece in pieces_of(names, sizes, self.workers * PIECES_PER_WORKER):
            letter = self._file()
            write(letter, {name: apart(deployed[name], common) for name in piece}, seal=False)
            told = (str(beats), len(jobs))
            jobs.append((shipped, where, str(inbox), str(letter), piece, list(parts), seed, self.compute, told))
        scores: dict[tuple[str, str], Score] = {}
        for part in self._run(_evaluate_piece, jobs, Counts(beats, len(jobs))):
            scores |= part
        for file in (inbox, beats):
            file.unlink()
        return {(name, part): scores[name, part] for name in names for part in parts}

    def close(self) -> None:
        """Remove the shared files; the worker processes are shared by all engines and end when idle."""
        self._scratch.close()

    @unbroken()
    def _run(self, function: Callable[..., T], jobs: Sequence[tuple[Any, ...]], counts: Counts) -> list[T]:
        environment = shipping.environment()
        with _set(environment):  # loky has helpers beside its workers, which take the environment as it is
            resource_tracker.ensure_running()
            if sys.platform != "win32":
                from multiprocessing.resource_tracker import ensure_running

                ensure_running()
        pool = get_reusable_executor(
            max_workers=self.workers,
            context=CONTEXT,
            timeout=120,
            initializer=START,
            initargs=(os.getpid(), shipping.search_path()),
            env=environment,
        )
        try:
            return self._awaited([pool.submit(function, *job) for job in jobs], counts)
        except (TerminatedWorkerError, BrokenProcessPool) as error:
            number = re.search(r"\(-(\d+)\)", str(error))  # loky gives exit codes in its sentence alone
            raise UserError(
                f"a worker process {ended_by(-int(number[1]) if number else 1)}; use --engine sequential or fewer workers"
            ) from None
        except BaseException as error:
            if not isinstance(error, Exception):  # somebody stops the program: nobody waits for work under way
                pool.shutdown(kill_workers=True)
            raise

    @staticmethod
    def _awaited(futures: Sequence[Future[T]], counts: Counts) -> list[T]:
        """What came of them, the first failure at once; meanwhile it is passed on how far they are."""
        waiting: Sequence[Future[T]] | set[Future[T]] = futures
        while waiting:
            done, waiting = wait(waiting, PAUSE, FIRST_COMPLETED)
            stop_now()
            counts.pass_on()
            for future in done:
                future.result()
        return [future.result() for future in futures]

    def _file(self) -> Path:
        return self._scratch.path / uuid.uuid4().hex

    def _ship(self, thing: Method | Adapter) -> str | None:
        """Where workers find the object, or None if it cannot leave this process."""
        if id(thing) not in self._shipped:
            path = self._file()
            try:
                path.write_bytes(shipping.dumps(thing))
                self._shipped[id(thing)] = (thing, str(path))
                self._fresh.add(str(path))
            except shipping.CANNOT_TRAVEL as error:
                warnings.warn(
                    f"{type(thing).__name__} cannot be sent to worker processes ({error}); working sequentially instead",
                    stacklevel=3,
                )
                self._shipped[id(thing)] = (thing, None)
        return self._shipped[id(thing)][1]

    def _forget(self) -> None:
        """Remove what was shipped for earlier runs. Two tasks stay: Centralised trains on one and tests on another."""
        folders = [path for _, path in self._shipped.values() if path is not None and Path(path).is_dir()]
        if len(folders) < 2:
            return
        for _, path in self._shipped.values():
            if path is not None and path not in self._fresh:
                shutil.rmtree(path) if Path(path).is_dir() else Path(path).unlink()
        self._shipped = {key: kept for key, kept in self._shipped.items() if kept[1] in self._fresh}
        self._fresh = set()

    def _ship_task(self, task: Task) -> str:
        """Write images as arrays that workers map, and the rest of the task beside them."""
        if id(task) not in self._shipped:
            self._forget()
            folder = self._file()
            folder.mkdir()
            np.save(folder / "images.npy", task.images.numpy())
            shifted = {name: stream for name, stream in task.streams.items() if stream.images is not None}
            for number, stream in enumerate(shifted.values()):
                np.save(folder / f"{number}.npy", cast(torch.Tensor, stream.images).numpy())
            bare = {name: replace(stream, images=None) for name, stream in task.streams.items()}
            rest = replace(task, images=torch.zeros(0), streams=bare)
            (folder / "rest").write_bytes(shipping.dumps((rest, list(shifted))))
            self._shipped[id(task)] = (task, str(folder))
        return cast(str, self._shipped[id(task)][1])


def ended_by(code: int) -> str:
    """How a process ended, from its exit code.

    >>> ended_by(-9)
    'was ended by signal 9 (SIGKILL), most likely for want of memory'
    >>> ended_by(1)
    'ended with exit code 1'
    """
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
    return f"was ended by signal {-code} ({name}){', most likely for want of memory' if name == 'SIGKILL' else ''}"


@contextmanager
def _set(variables: Mapping[str, str]) -> Iterator[None]:
    """Variables of the environment, for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _read_replies(path: str) -> dict[str, Reply]:
    trees, facts = load(Path(path))
    Path(path).unlink()
    rows = cast(list[tuple[str, float, int, bool]], facts["rows"])
    return {
        name: Reply(trees[f"up {name}"], trees[f"local {name}"], float(loss), steps, finite)
        for name, loss, steps, finite in rows
    }


# ---- in the worker -------------------------------------------------------------------------------------------------------
def _starter() -> Callable[[int, list[str]], None]:
    """What a worker does first. A function inside another travels by value: importing this module takes seconds, and
    a parent may die in them.
    """

    def start(parent: int, path: list[str]) -> None:
        import os
        import signal
        import sys
        import threading
        import time

        def follow() -> None:  # not by the system's signal: it comes when the thread ends that started us
            while os.getppid() == parent:
                time.sleep(0.5)
            os._exit(1)

        threading.Thread(target=follow, daemon=True).start()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches everybody; the parent says what becomes of it
        sys.path[:] = path
        import torch

        torch.set_num_threads(1)
        torch.set_num_interop_threads(1)

    return start


START = _starter()  # one for all: who asks for another gets new processes


@lru_cache(maxsize=8)
def _thing(path: str) -> Any:
    return shipping.loads(Path(path).read_bytes())


@lru_cache(maxsize=2)
def _task(folder: str) -> Task:
    rest, shifted = shipping.loads((Path(folder) / "rest").read_bytes())
    streams = dict(rest.streams)
    for number, name in enumerate(shifted):
        streams[name] = replace(streams[name], images=_mapped(Path(folder) / f"{number}.npy"))
    task: Task = replace(rest, images=_mapped(Path(folder) / "images.npy"), streams=streams)
    return task


def _mapped(path: Path) -> torch.Tensor:
    return torch.from_numpy(np.load(path, mmap_mode="c"))


def _train_piece(
    shipped: str,
    where: str,
    inbox: str,
    letter: str,
    piece: list[str],
    plan: Plan,
    compute: Compute,
    answer: str,
    told: tuple[str, int],
) -> str:
    common = load(Path(inbox))[0]["common"]
    trees = load(Path(letter))[0]
    Path(letter).unlink()
    downs = {name: joined(trees[f"down {name}"], common) for name in piece}
    locals = {name: trees[f"local {name}"] for name in piece}
    with counted(*told):
        replies = Sequential(compute).train(_thing(shipped), downs, locals, _task(where), plan)
    rows = [[name, repr(reply.loss), reply.steps, reply.finite] for name, reply in replies.items()]
    ups = {f"up {name}": reply.up for name, reply in replies.items()}
    kept = {f"local {name}": reply.local for name, reply in replies.items()}
    write(Path(answer), {**ups, **kept}, {"rows": rows}, seal=False)
    return answer


def _evaluate_piece(
    shipped: str,
    where: str,
    inbox: str,
    letter: str,
    piece: list[str],
    parts: list[str],
    seed: int,
    compute: Compute,
    told: tuple[str, int],
) -> dict[tuple[str, str], Score]:
    common = load(Path(inbox))[0]["common"]
    trees = load(Path(letter))[0]
    Path(letter).unlink()
    deployed = {name: joined(trees[name], common) for name in piece}
    with counted(*told):
        return Sequential(compute).evaluate(_thing(shipped), deployed, _task(where), parts, seed)
