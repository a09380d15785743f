"""One client that is being served: its condition in memory, its versions on disk, its queue, its counts.

The condition is changed by one thread alone, in which predictions and an operator's wishes come one after the other. Trees
are never changed in place, so another thread writes versions meanwhile and nobody waits for the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from fedshift.errors import UserError
from fedshift.serve import service as heart
from fedshift.serve.batching import Batcher
from fedshift.serve.bodies import Refused, Sent
from fedshift.serve.history import STOPPED, History, Version
from fedshift.serve.numbers import Numbers
from fedshift.serve.records import Record
from fedshift.serve.records import opened as opened_records
from fedshift.serve.service import Answered, Condition, Service
from fedshift.serve.telling import told, total
from fedshift.store.files import Damaged
from fedshift.store.lock import Occupied, RunLock, owner_of

Result = TypeVar("Result")
log = logging.getLogger("fedshift.serve")
QUEUED, MOST, FEWEST = 256 << 20, 4096, 256  # bytes of images that may wait for the model, and how many
WAITING = 100_000  # answers that are remembered in memory while the disk takes none


@dataclass(frozen=True)
class Keeping:
    """When what was learnt is written down."""

    images: int = 1000
    seconds: float = 5.0
    versions: int = 20
    deadline: float = 0.05  # seconds that a request waits for company, where an adapter wants several images together


class Host:
    """See the module. ``open`` before, ``close`` after."""

    def __init__(self, service: Service, folder: Path, keeping: Keeping) -> None:
        self.service, self.keeping, self.numbers = service, keeping, Numbers()
        self.history = History(folder, service, keeping.versions)
        self.condition: Condition = service.begin()
        self.versions: list[Version] = []
        self._lock = RunLock(folder)
        self._model = ThreadPoolExecutor(1, f"model-{service.name}")
        self._disk = ThreadPoolExecutor(1, f"disk-{service.name}")
        most = max(QUEUED // math.prod(service.artefact.method.arch.input_shape), FEWEST)
        self._batcher = Batcher(self._answer, self._model, service.together, keeping.deadline, most=min(most, MOST))
        self._saved: Condition = self.condition
        self._saved_at = time.monotonic()
        self._saving: Future[Version | None] | None = None
        self._failed = False  # the last version could not be written
        self._unwritten: deque[Record] = deque(maxlen=WAITING)  # of the thread for the model
        self._waiting: deque[Record] = deque(maxlen=WAITING)  # of the thread for the disk
        self._batches = 0
        self._tasks: list[asyncio.Task[None]] = []

    # ---- life ----------------------------------------------------------------------------------------------------------
    def open(self, fit_on: Callable[[Service], tuple[torch.Tensor, torch.Tensor]] | None = None) -> None:
        """Take the folder, and go on from its last version; a new service first looks at the images it was given."""
        folder = self.history.folder
        try:
            self._lock.__enter__()
        except Occupied:
            raise UserError(f"{folder} is in use by {owner_of(folder) or 'another process'}") from None
        try:
            self._begin(fit_on)
        except BaseException:
            self._lock.__exit__(None, None, None)
            raise

    def _begin(self, fit_on: Callable[[Service], tuple[torch.Tensor, torch.Tensor]] | None) -> None:
        said = self.history.claim()
        damaged: list[Damaged] = []
        self.versions = self.history.versions(damaged)
        last = self._restored(damaged)
        self.records, more = opened_records(self.history.folder)
        if not more and self.records.last < last.answers:  # SQLite passes over a damaged end of its file without a word
            gone = last.answers - self.records.last
            more = [f"{gone} answers are gone from {self.history.folder}: labels will not find them"]
        for line in (*said, *more, *map(str, damaged)):
            self._say(line)
        if last.number:
            self._say(f"goes on from version {last.number}, after {last.seen} images")
        if damaged and last.number < self.history.next - 1:
            self._say(f"what was learnt after version {last.number} is lost, if no copy of a later version is put back")
        elif last.number and last.why != STOPPED:
            self._say(
                f"the server before was killed: what was learnt after version {last.number} is lost, at most "
                f"{self.keeping.images} images or {self.keeping.seconds:g} seconds and what was under way"
            )
        if not last.number and not self.condition.fitted and fit_on is not None:
            pixels, ids = fit_on(self.service)
            self.condition = heart.fitted(self.service, self.condition, pixels, ids)
            self._say(f"adapter {self.service.label} has adapted to {len(pixels)} images of --fit-on")
            self._write(self.condition, "fitted", [])
        if not self.condition.fitted:
            self._say(
                f"adapter {self.service.label} looks at a set first: it will adapt after "
                f"{self.service.settings.fit_after} images, or at once with --fit-on FOLDER"
            )
        if self.service.artefact.known is None:
            self._say("the artefact knows nothing of its client's images: the first 400 will be taken for ordinary")
        self._saved = self.condition

    def _restored(self, damaged: list[Damaged]) -> Version:
        """The last version that can be read, and the condition it holds; those that cannot are no versions."""
        while True:
            try:
                self.condition = self.history.load(self.versions[-1].number)  # version 0 needs no file
                return self.versions[-1]
            except Damaged as error:
                damaged.append(error)
                self.versions = self.versions[:-1]

    def start(self) -> None:
        """Begin to answer; in an event loop."""
        self._tasks = [asyncio.create_task(self._batcher.run()), asyncio.create_task(self._clock())]

    def stop(self) -> None:
        """Answer no more."""
        for task in self._tasks:
            task.cancel()

    def close(self) -> None:
        """Write down what was learnt, and let go of the folder."""
        self._model.shutdown()
        self._disk.shutdown()
        try:
            self._write(self.condition, STOPPED, self._handed_over())
            self.records.close()
        finally:
            self._lock.__exit__(None, None, None)

    # ---- answers -------------------------------------------------------------------------------------------------------
    async def predict(self, sent: Sent) -> dict[str, Any]:
        """Answers to the images of a request."""
        return await self._batcher.ask(sent, len(sent.names))

    def _answer(self, requests: list[Sent]) -> list[dict[str, Any]]:
        pixels = torch.cat([request.pixels for request in requests])
        ids = torch.cat([request.ids for request in requests])
        names = [name for request in requests for name in request.names]
        pieces, after = heart.answered(self.service, self.condition, pixels, ids)
        self.condition = after
        every: list[dict[str, Any]] = []
        for piece in pieces:
            every += self._told(piece, names[len(every) :], self._batches)
            self._batches += 1
        for piece in pieces:
            for event in piece.events:
                self._say(event)
                if event.startswith("alarm: "):
                    self.numbers.alarms[event.removeprefix("alarm: ").partition(",")[0]] += 1
        self._keep()
        about = {
            "client": self.service.name,
            "adapter": self.service.label,
            "mode": after.mode,
            "version": self.versions[-1].number,
            "alarms": list(pieces[-1].alarms),
        }
        answers, start = [], 0
        for request in requests:
            answers.append({**about, "answers": every[start : start + len(request.names)]})
            start += len(request.names)
        return answers

    def _told(self, piece: Answered, names: Sequence[str], batch: int) -> list[dict[str, Any]]:
        """A piece's answers as people read them; they are counted and remembered too."""
        classes, known = self.service.classes, self.condition.judge.familiarity is not None
        codes, answers = piece.codes, told(piece, names, batch, classes, known)
        self._unwritten += map(Record, names[: len(answers)], *codes)
        self.numbers.answers(
            codes.served,
            total(one["confidence"] for one in answers),
            sum(one["unknown"] for one in answers),
            sum(map(int.__ne__, codes.adapted, codes.frozen)),
            len(answers) if piece.did in ("fell back", "doubted") else 0,
            {name: total(values.tolist()) for name, values in piece.telemetry.items()},
        )
        return answers

    # ---- what an operator may do ----------------------------------------------------------------------------------------
    async def reset(self) -> Version:
        """Begin again as deployed."""
        return await self._changed(lambda: heart.reset(self.service, self.condition), "reset")

    async def freeze(self) -> Version:
        """Learn nothing more."""
        return await self._changed(lambda: heart.frozen(self.condition), "frozen")

    async def resume(self) -> Version:
        """Adapt again."""
        return await self._changed(lambda: heart.resumed(self.condition), "resumed")

    async def rollback(self, number: int) -> Version:
        """Go back to a version."""

        def back() -> Condition:
            try:
                return heart.restored(self.condition, self.history.load(number))
            except UserError as error:
                raise Refused(404, str(error)) from None

        return await self._changed(back, f"rolled back to {number}")

    async def feedback(self, truth: Mapping[str, str]) -> dict[str, Any]:
        """Labels that came later, by sample id."""
        codes = {name: code for code, name in enumerate(self.service.classes)}
        wrong = [label for label in truth.values() if label not in codes]
        if wrong:
            raise Refused(400, f"there is no class {wrong[0]!r}; there are: {', '.join(self.service.classes)}")

        def noted(waiting: list[Record]) -> dict[str, Any]:
            try:
                self._remember(waiting)
                missing = self.records.label({name: codes[label] for name, label in truth.items()})
                accuracy = self.records.accuracies(self.service.classes)
            except UserError as error:
                self._say(f"labels could not be noted: {error}")
                raise Refused(503, "answers cannot be looked up now; the log of the server says why") from None
            if len(missing) == len(truth):
                raise Refused(404, "no image with such an id was answered here")
            return {"noted": len(truth) - len(missing), "missing": missing, "accuracy": accuracy}

        def handed() -> Future[dict[str, Any]]:  # from thread to thread: whoever asked may go in between
            return self._disk.submit(noted, self._handed_over())

        return await asyncio.wrap_future(await asyncio.get_running_loop().run_in_executor(self._model, handed))

    async def accuracies(self) -> dict[str, Any]:
        """Running accuracies of labels that came later; none while the answers cannot be read."""

        def counted() -> dict[str, Any]:
            try:
                return self.records.accuracies(self.service.classes)
            except UserError as error:
                self._say(str(error))
                return {}

        return await asyncio.get_running_loop().run_in_executor(self._disk, counted)

    # ---- versions ------------------------------------------------------------------------------------------------------
    async def _changed(self, change: Callable[[], Condition], why: str) -> Version:
        """Carry out a wish between two predictions, and write the version at once."""

        def carried_out() -> Future[Version | None]:
            self.condition = change()
            self._say(why)
            self._saved, self._saved_at = self.condition, time.monotonic()
            return self._disk.submit(self._write, self.condition, why, self._handed_over())

        written = await asyncio.get_running_loop().run_in_executor(self._model, carried_out)
        version = await asyncio.wrap_future(written)
        if version is None:
            raise Refused(503, "it is done, but not written down yet: the log of the server says why")
        return version

    def _keep(self) -> None:
        """Write a version if it is time, in the thread for the disk; one at a time."""
        condition, now = self.condition, time.monotonic()
        due = condition.seen - self._saved.seen >= self.keeping.images or now - self._saved_at >= self.keeping.seconds
        new = condition is not self._saved or self._failed
        if not new or not due or (self._saving is not None and not self._saving.done()):
            return
        self._saved, self._saved_at = condition, now
        self._saving = self._disk.submit(self._write, condition, "kept", self._handed_over())

    def _handed_over(self) -> list[Record]:
        handed, self._unwritten = self._unwritten, deque(maxlen=WAITING)
        return list(handed)

    def _write(self, condition: Condition, why: str, records: list[Record]) -> Version | None:
        """A version, and the answers since the last one; what could not be written is tried again."""
        version = None
        try:
            version = self.history.save(self.history.next, condition, why, self.records.last)
            there = self.history.numbers()
            self.versions = [one for one in (*self.versions, version) if one.number in there or not one.number]
        except (OSError, UserError) as error:
            self._say(f"version {self.versions[-1].number + 1} could not be written: {error}")
        self._failed = version is None
        try:
            self._remember(records)
        except UserError as error:
            self._failed = True
            self._say(f"{len(self._waiting)} answers could not be written: {error}")
        return version

    def _remember(self, records: list[Record]) -> None:
        """Write answers; where that is not possible the newest of them wait for the next time."""
        self._waiting.extend(records)
        self.records.add(self._waiting)
        self._waiting.clear()

    async def _clock(self) -> None:
        """What was learnt is written in time even if no more images come."""
        while True:
            await asyncio.sleep(min(1.0, self.keeping.seconds))
            with contextlib.suppress(RuntimeError):  # the pool is closed at the end
                await asyncio.get_running_loop().run_in_executor(self._model, self._keep)

    def _say(self, line: str) -> None:
        self.numbers.say(line)
        log.warning("%s: %s", self.service.name, line)
