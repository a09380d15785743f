"""How far an experiment is, and how long it will still take."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """Rounds that are done, parts of rounds included, and the time they took.

    What was done before (finished runs, rounds before an interruption) counts as done, but says nothing about speed.

    The clock starts with the first batch: before it processes are started and memory is taken, once.

    >>> clock = iter([0.0, 10.0, 20.0])
    >>> pace = Pace(lambda: next(clock))
    >>> pace.total = 5
    >>> pace.begin(1)
    >>> pace.moved("a", 0.25)
    >>> pace.moved("a", 0.5)
    >>> pace.done, pace.left()
    (1.5, 140.0)
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = 0
        self._clock = clock
        self._began: float | None = None
        self._rounds = 0
        self._before = 0.0  # done without having been seen to take time
        self._moving = False
        self._shares: dict[str, float] = {}  # of the rounds that are under way, by run

    @property
    def done(self) -> float:
        """Rounds."""
        return min(self._rounds + sum(self._shares.values()), max(self.total, self._rounds))

    def begin(self, done: int = 0) -> None:
        """A run begins, or goes on after so many rounds."""
        self._began = self._clock() if self._began is None else self._began
        self.before(done)

    def before(self, rounds: int) -> None:
        """So many rounds are done, and were so before."""
        self._rounds += rounds
        self._before += rounds

    def round(self, run: str) -> None:
        """A run has ended a round."""
        self._rounds += 1
        self._shares.pop(run, None)

    def moved(self, run: str, share: float) -> None:
        """A run is so far in its round."""
        self._shares[run] = max(share, self._shares.get(run, 0.0))
        if not self._moving and self._rounds <= self._before and share <= 0.5:
            self._began, self._before = self._clock(), self._before + share
        self._moving = True

    def left(self) -> float | None:
        """Seconds until the last round; None before anything has moved."""
        made = self.done - self._before
        if self._began is None or made <= 0:
            return None
        return (self._clock() - self._began) / made * max(self.total - self.done, 0.0)


def clock_text(seconds: float | None) -> str:
    """Hours, minutes and seconds, for a person.

    >>> clock_text(83.2), clock_text(7265), clock_text(None)
    ('1:23', '2:01:05', '-:--')
    """
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
