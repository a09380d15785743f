"""Orders for processes that make runs at the same time: a folder of them, from which each takes one after the other.

What takes long to send is who has which images, and the images. Runs have them in common: they are written once, and a
process that has read them keeps them for its next order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedshift.core.adapter import Adapter
from fedshift.core.registry import ADAPTERS, Entry
from fedshift.data.task import Task
from fedshift.engines import shipping
from fedshift.engines.auto import engine_for
from fedshift.engines.base import Compute
from fedshift.engines.torch_flags import steady
from fedshift.errors import UserError
from fedshift.runs.code import code_digest, tell_digest
from fedshift.runs.finish import finish
from fedshift.runs.plan import Job, Twin
from fedshift.runs.progress import Reporter

WAITING, DATA = "orders", "data"

Data = tuple[Task, Twin]  # of a run; those of one variant and seed have the same


@dataclass(frozen=True)
class Order:
    """What one process is to do at a time."""

    jobs: tuple[Job, ...]
    engine: str
    compute: Compute
    resume: bool
    # a script's own are not known in another process, nor is their source, of which scores hold the digest
    adapters: tuple[tuple[Entry[type[Adapter]], str], ...]

    @staticmethod
    def of(jobs: Sequence[Job], engine: str, compute: Compute, resume: bool) -> Order:
        """To finish these runs together."""
        names = {spec.name for job in jobs for spec in job.setup.spec.adapters}
        adapters = [(ADAPTERS[name], code_digest(ADAPTERS[name].make)) for name in sorted(names)]
        return Order(tuple(jobs), engine, compute, resume, tuple(adapters))

    @property
    def title(self) -> str:
        """What people call it."""
        return ", ".join(dict.fromkeys(job.title for job in self.jobs))

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


class Orders:
    """Those of one caller: a few are ahead of the processes that look for one, and data go when no order needs them."""

    def __init__(self, base: Path, orders: Sequence[Order]) -> None:
        self._base, self._orders = base, {f"{number:06}": order for number, order in enumerate(orders)}
        self._left = deque(self._orders)
        self._data: dict[int, tuple[str, int]] = {}  # by identity: the file, and the place there
        self._needs: dict[str, set[str]] = {}  # by order: files
        for name in (WAITING, DATA):
            (base / name).mkdir()

    def title(self, name: str) -> str:
        """What people call the order in this file."""
        return self._orders[name].title

    def taken(self, own: Path) -> list[str]:
        """Those that a process has taken into its folder, and has not done."""
        return [path.name for path in own.iterdir() if path.name in self._orders]

    def offer(self, most: int) -> bool:
        """Let so many wait, as long as there are more, and remove data that nobody needs; whether any wait."""
        while self._left and len(waiting(self._base)) < most:
            self._write(self._left.popleft())
        ahead = waiting(self._base)  # looked at first: one that is taken meanwhile is seen twice, not missed
        unfinished = {*ahead, *(path.name for path in self._base.glob("*/*"))}
        needed = {file for name in unfinished for file in self._needs.get(name, ())}
        for file in {file for file, _ in self._data.values()} - needed:
            (self._base / DATA / file).unlink()
        self._data = {one: where for one, where in self._data.items() if where[0] in needed}
        return bool(ahead)

    def _write(self, name: str) -> None:
        order = self._orders[name]
        try:
            for place, job in enumerate(order.jobs):
                data: Data = (job.task, job.twin)
                if not all(id(one) in self._data for one in data):
                    file = f"{name}-{place}"
                    (self._base / DATA / file).write_bytes(shipping.dumps(data))
                    self._data |= {id(one): (file, k) for k, one in enumerate(data)}
            sent = shipping.dumps(order, self._data)
        except shipping.CANNOT_TRAVEL as error:
            raise UserError(
                f"{order.title} cannot be sent to another process ({error}); run it without --jobs"
            ) from None
        self._needs[name] = {self._data[id(one)][0] for job in order.jobs for one in (job.task, job.twin)}
        half = self._base / name
        half.write_bytes(sent)
        half.rename(self._base / WAITING / name)


def waiting(base: Path) -> list[str]:
    """The orders that nobody has taken, the first one first."""
    return sorted(path.name for path in (base / WAITING).iterdir())


def take(base: Path, own: Path) -> Path | None:
    """Move the first order that waits into the folder ``own``, whoever else looks for one; None if there is none."""
    for name in waiting(base):
        try:
            return (base / WAITING / name).rename(own / name)
        except FileNotFoundError:  # somebody was faster
            continue
    return None


def read_order(base: Path, path: Path, kept: Mapping[str, Data]) -> tuple[Order, dict[str, Data]]:
    """An order, and the data of its runs by file, as far as they are not among those that were ``kept``."""
    data: dict[str, Data] = {}

    def known(key: tuple[str, int]) -> Any:
        name, place = key
        if name not in data:
            data[name] = kept[name] if name in kept else shipping.loads((base / DATA / name).read_bytes())
        return data[name][place]

    return shipping.loads(path.read_bytes(), known), data
