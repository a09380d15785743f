"""Requests that wait for a model are answered together; none waits for company longer than a deadline."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Generic, TypeVar

from fedshift.serve.bodies import Refused

TURNS = 3  # of the event loop from a socket that can be read to a request that is in the queue
Item = TypeVar("Item")
Answer = TypeVar("Answer")


@dataclass(frozen=True, eq=False)
class _Waiting(Generic[Item, Answer]):
    item: Item
    count: int
    arrived: float
    answer: asyncio.Future[Answer]


class Batcher(Generic[Item, Answer]):
    """One model's queue: ``work`` answers some requests together, in the order of their arrival, in another thread.

    ``together`` is how many images the model would like to see at once; None if it does not care, and then what has
    arrived while it was busy is taken together. ``most`` images may wait.
    """

    def __init__(
        self,
        work: Callable[[list[Item]], list[Answer]],
        pool: Executor,
        together: int | None,
        deadline: float,
        at_once: int = 256,
        most: int = 4096,
    ) -> None:
        self._work, self._pool = work, pool
        self._together, self._deadline, self._at_once, self._most = together, deadline, at_once, most
        self._queue: deque[_Waiting[Item, Answer]] = deque()
        self._count = 0
        self._arrival = asyncio.Event()

    async def ask(self, item: Item, count: int) -> Answer:
        """The answer to one request of so many images."""
        if self._count and self._count + count > self._most:
            raise Refused(503, "too many images are waiting; try again in a moment")
        waiting: _Waiting[Item, Answer] = _Waiting(
            item, count, time.monotonic(), asyncio.get_running_loop().create_future()
        )
        self._queue.append(waiting)
        self._count += count
        self._arrival.set()
        return await waiting.answer

    async def run(self) -> None:
        """Answer requests for ever."""
        loop = asyncio.get_running_loop()
        while True:
            await self._company()
            taken = self._take()
            try:
                answers = await loop.run_in_executor(self._pool, self._work, [one.item for one in taken])
            except Exception as error:
                for one in taken:
                    if not one.answer.done():
                        one.answer.set_exception(error)
                continue
            for one, answer in zip(taken, answers, strict=True):
                if not one.answer.done():  # whoever asked may have gone
                    one.answer.set_result(answer)

    async def _company(self) -> None:
        """Until there is something to do, and where images are wanted together, until there are enough or it is time."""
        while not self._queue:
            self._arrival.clear()
            await self._arrival.wait()
        if self._together is None:
            await self._arrived()
            return
        end = self._queue[0].arrived + self._deadline
        while self._count < self._together and (left := end - time.monotonic()) > 0:
            self._arrival.clear()
            try:
                await asyncio.wait_for(self._arrival.wait(), left)
            except TimeoutError:
                return

    async def _arrived(self) -> None:
        """Whatever has reached this machine comes along: the model is asked when the loop has nothing left to read."""
        count = -1
        while count < self._count < self._at_once:
            count = self._count
            for _ in range(TURNS):
                await asyncio.sleep(0)

    def _take(self) -> list[_Waiting[Item, Answer]]:
        """Whole requests, as many as fit; one that is larger than that comes alone."""
        limit = self._at_once if self._together is None else self._together
        taken, count = [self._queue.popleft()], 0
        count = taken[0].count
        while self._queue and count + self._queue[0].count <= limit:
            taken.append(self._queue.popleft())
            count += taken[-1].count
        self._count -= count
        return taken
