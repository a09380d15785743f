"""A cluster: clients' work on all its CPUs or GPUs, by Ray's actors. One machine without a cluster is one, too.

``RAY_ADDRESS`` names a cluster that is there; otherwise one is started here for as long as the engine lives. An actor holds
a CPU and runs the sequential engine, or holds a GPU and runs the vmapped one. The task lies in Ray's object store, which
fetches it once for a node and lets all of its actors map the images. The work of an actor that is lost, with its node or
alone, is done by another; whoever joins the cluster is used from the next round on.
"""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fedshift.core.adapter import Adapter
from fedshift.core.method import Method
from fedshift.core.tree import Tree
from fedshift.data.task import Task
from fedshift.engines import shipping
from fedshift.engines.base import Compute, Reply, Score
from fedshift.engines.cores import usable_cores
from fedshift.engines.dealing import PIECES_PER_WORKER, apart, common_of, pieces_of
from fedshift.engines.pulse import beat
from fedshift.engines.ray_worker import Answer, Known, Shipped, Worker, arrays_of, boxed, versions
from fedshift.engines.schedule import Plan
from fedshift.engines.scratch import Scratch
from fedshift.engines.stopping import stop_now, unbroken
from fedshift.errors import UserError

PATIENCE = 120.0  # seconds without a worker
PAUSE = 0.5  # seconds after which a request to end is heard
SEATS = 2  # pieces that a worker is given at once, so that it need not wait for the next one
LIVES = 3  # workers that a piece of work may take with it, before it is its own fault


@contextmanager
def _same_handler(number: int) -> Iterator[None]:
    """Whoever was told of a signal still is: Ray puts a handler of its own in its place, which ends the program."""
    before = signal.getsignal(number)
    try:
        yield
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(number, before)


class Ray:
    """Workers of a cluster."""

    def __init__(self, compute: Compute | None = None, workers: int | None = None) -> None:
        try:
            import ray
        except ImportError:
            raise UserError('engine ray needs Ray: pip install "fedshift[ray]"') from None
        self._ray: Any = ray
        self.compute = compute or Compute()
        self._scratch: Scratch | None = None
        if not ray.is_initialized():
            self._start(workers)
        self._most = workers
        self._idle: list[Any] = []  # an actor for each of its seats that is free
        # actors that have not answered yet and how many of their seats are free then, by what they will answer
        self._starting: dict[Any, tuple[Any, int]] = {}
        self._known = Known()
        self._said: set[str] = set()

    @property
    def _kind(self) -> str:
        """What a worker holds."""
        return "GPU" if self.compute.device.type == "cuda" else "CPU"

    @property
    def workers(self) -> int:
        """How many the cluster has room for now."""
        room = int(self._ray.cluster_resources().get(self._kind, 0))
        return room if self._most is None else min(room, self._most)

    def train(
        self, method: Method, downs: Mapping[str, Tree], locals: Mapping[str, Tree], task: Task, plan: Plan
    ) -> dict[str, Reply]:
        """The local work of every client in ``downs``."""
        if not downs:
            return {}
        names = list(downs)
        how, where = self._ship(method), self._ship_task(task)
        common = common_of([downs[name] for name in names])
        shared = self._ray.put(arrays_of(common))

        def send(actor: Any, piece: list[str]) -> Any:
            own = {name: arrays_of(apart(downs[name], common)) for name in piece}
            kept = {name: arrays_of(locals.get(name, {})) for name in piece}
            return actor.train.remote(how.key, how.ref, where.key, where.ref, shared, own, kept, plan)

        found: dict[str, Reply] = {}
        for replies in self._run(send, self._dealt(names, [len(task.client(name).train) for name in names])):
            for group in replies:
                found |= group.opened(self.compute.device)
        return {name: found[name] for name in names}

    def evaluate(
        self, adapter: Adapter, deployed: Mapping[str, Tree], task: Task, parts: Sequence[str], seed: int
    ) -> dict[tuple[str, str], Score]:
        """Scores by (client, part)."""
        if not deployed:
            return {}
        names = list(deployed)
        how, where = self._ship(adapter), self._ship_task(task)
        common = common_of(list(deployed.values()))
        shared = self._ray.put(arrays_of(common))

        def send(actor: Any, piece: list[str]) -> Any:
            own = {name: arrays_of(apart(deployed[name], common)) for name in piece}
            return actor.evaluate.remote(how.key, how.ref, where.key, where.ref, shared, own, list(parts), seed)

        sizes = [sum(len(task.samples(task.client(name), part)) for part in parts) for name in names]
        found: dict[tuple[str, str], Score] = {}
        for scores in self._run(send, self._dealt(names, sizes)):
            found |= scores
        return {(name, part): found[name, part] for name in names for part in parts}

    def close(self) -> None:
        """Let the workers go, and the cluster if it was started here."""
        if self._ray.is_initialized():
            for actor in {*self._idle, *self._expected()}:
                self._ray.kill(actor)
            if self._scratch is not None:
                self._ray.shutdown()
        self._idle, self._starting, self._known = [], {}, Known()
        if self._scratch is not None:
            self._scratch.close()

    # ---- the cluster -----------------------------------------------------------------------------------------------------
    def _start(self, workers: int | None) -> None:
        """Join the cluster that is named, or start one here, whose files are gone with it."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody is told that we are here
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # by default everybody else on the machine goes first
        quiet = {"logging_level": "ERROR", "log_to_driver": False}
        with _same_handler(signal.SIGTERM):
            self._init(workers, quiet)

    def _init(self, workers: int | None, quiet: Mapping[str, Any]) -> None:
        try:
            if os.environ.get("RAY_ADDRESS"):
                self._ray.init(**quiet)
                return
            self._scratch = Scratch()
            own = {"include_dashboard": False, "_temp_dir": str(self._scratch.path)}
            self._ray.init(num_cpus=workers or usable_cores(), **own, **quiet)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise UserError(f"Ray's cluster cannot be reached or started: {str(error).splitlines()[0]}") from None

    def _fill(self, busy: Iterable[Any] = ()) -> None:
        """Ask for as many workers as there is room for."""
        cuda = self.compute.device.type == "cuda"
        remote = self._ray.remote(num_cpus=0 if cuda else 1, num_gpus=1 if cuda else 0, max_restarts=0)(Worker)
        seats = 1 if cuda else SEATS  # a GPU's piece is as large as all others': the first to come must not take two
        for _ in range(self.workers - len({*busy, *self._idle, *self._expected()})):
            actor = remote.options(runtime_env={"env_vars": {"PYTHONSAFEPATH": "1"}}).remote(self.compute)
            self._starting[actor.ready.remote()] = (actor, seats)

    def _expected(self) -> list[Any]:
        return [actor for actor, _ in self._starting.values()]

    def _dealt(self, names: Sequence[str], sizes: Sequence[int]) -> list[list[str]]:
        """A GPU takes as many clients at once as it gets; cores take turns."""
        each = 1 if self.compute.device.type == "cuda" else PIECES_PER_WORKER
        return pieces_of(names, sizes, max(1, self.workers) * each)

    # ---- work ------------------------------------------------------------------------------------------------------------
    @unbroken()
    def _run(self, send: Callable[[Any, list[str]], Any], pieces: Sequence[list[str]]) -> list[Any]:
        """What came of every piece, in their order, whoever did it."""
        waiting, running, done = deque(range(len(pieces))), dict[Any, tuple[Any, int]](), dict[int, Any]()
        taken: Counter[int] = Counter()
        try:
            self._fill()
            while len(done) < len(pieces):
                while waiting and self._idle:
                    loads = Counter(actor for actor, _ in running.values())
                    number, actor = waiting.popleft(), min(self._idle, key=lambda free: loads[free])
                    self._idle.remove(actor)
                    running[send(actor, pieces[number])] = (actor, number)
                for ref in self._next([*running, *self._starting], bool(running)):
                    if ref in self._starting:
                        self._greet(ref)
                        continue
                    actor, number = running.pop(ref)
                    try:
                        answer: Answer = self._ray.get(ref)
                        done[number] = answer.found
                        beat(answer.samples)
                        self._pass_on(answer.warned)
                        self._idle.append(actor)
                    except self._ray.exceptions.RayTaskError as error:  # what the work itself says
                        self._idle.append(actor)
                        raise (error.cause if isinstance(error.cause, Exception) else error) from None
                    except self._ray.exceptions.RayError:
                        taken[number] += 1
                        self._lose(actor, pieces[number], taken[number])
                        waiting.appendleft(number)
                        self._fill(other for other, _ in running.values())
        finally:
            busy = {actor for actor, _ in running.values()}
            for actor in busy:  # somebody stops the program, or something is wrong: nobody waits
                self._ray.kill(actor)
            self._idle = [actor for actor in self._idle if actor not in busy]
            self._starting = {ref: (actor, free) for ref, (actor, free) in self._starting.items() if actor not in busy}
        return [done[number] for number in range(len(pieces))]

    def _next(self, refs: list[Any], busy: bool) -> list[Any]:
        if not refs:
            raise UserError(f"Ray's cluster has no {self._kind} for a worker; let a node join that has one")
        ready, waited = list[Any](), 0.0
        while not ready and waited < PATIENCE:
            ready, _ = self._ray.wait(refs, timeout=PAUSE)
            waited += PAUSE
            stop_now()
        if not ready and not busy:
            raise UserError(f"Ray's cluster gave no worker within {PATIENCE:.0f} s; is somebody else using it?")
        return ready

    def _greet(self, ref: Any) -> None:
        actor, free = self._starting.pop(ref)
        try:
            found = self._ray.get(ref)
        except self._ray.exceptions.RayError as error:  # its node went before it came, unless it cannot be made at all
            if getattr(error, "actor_init_failed", False):
                reason = str(error).strip().splitlines()[-1]
                raise UserError(f"a worker of Ray's cluster cannot start: {reason}") from None
            return
        if found != versions():
            theirs = found if isinstance(found, str) else "another version of fedshift"  # before 0.2 none was told
            self._ray.kill(actor)
            raise UserError(f"a node of Ray's cluster has {theirs}, and here is {versions()}: install the same on all")
        self._idle += [actor] * free

    def _pass_on(self, warned: Sequence[str]) -> None:
        """What workers warn of, once, whoever of them says it."""
        for text in warned:
            if text not in self._said:
                self._said.add(text)
                warnings.warn(text, stacklevel=5)

    def _lose(self, actor: Any, piece: Sequence[str], times: int) -> None:
        self._ray.kill(actor)  # it may only be out of reach, and its answer must not come twice
        seats = Counter(other for other in self._idle if other != actor)
        self._idle = []  # a node takes all of its workers with it: the others say first that they are still there
        self._starting |= {other.ready.remote(): (other, free) for other, free in seats.items()}
        if times >= LIVES:
            raise UserError(
                f"{times} workers were lost with the work of {', '.join(piece[:3])}; most likely it needs more memory"
            )
        warnings.warn(f"a worker of Ray's cluster was lost; its clients ({len(piece)}) are done again", stacklevel=4)

    # ---- what travels ----------------------------------------------------------------------------------------------------
    def _ship(self, thing: Method | Adapter) -> Shipped:
        def sent() -> tuple[object, Shipped]:  # with the thing itself: as long as it is there its id is nobody else's
            try:
                return thing, Shipped.of(self._ray.put(shipping.dumps(thing)))
            except shipping.CANNOT_TRAVEL as error:
                raise UserError(
                    f"{type(thing).__name__} cannot be sent to other processes ({error}); use --engine sequential"
                ) from None

        found: Shipped = self._known.thing(id(thing), sent)[1]
        return found

    def _ship_task(self, task: Task) -> Shipped:
        found: Shipped = self._known.task(id(task), lambda: (task, Shipped.of(self._ray.put(boxed(task)))))[1]
        return found
