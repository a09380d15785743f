"""What a person sees while an experiment runs."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from typing import Any, Protocol

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from fedshift.results.plain import Screen, plain
from fedshift.runs.pace import Pace, clock_text


class Reporter(Protocol):
    """Told what happens; decides what to show."""

    def doing(self, what: str) -> None:
        """Something that takes a moment has begun."""

    def plan(self, runs: Sequence[tuple[str, int, int]], engine: str, device: str) -> None:
        """(method, seed, rounds) of everything that will be run."""

    def begin(self, run: str, done: int, rounds: int) -> None:
        """A run starts, or goes on after ``done`` rounds."""

    def skip(self, run: str, rounds: int) -> None:
        """A run was finished before."""

    def moved(self, run: str, share: float, training: bool) -> None:
        """So much of a round (``training``), or of what is being scored, is done."""

    def round(self, run: str, number: int, loss: float, best: float) -> None:
        """A round has ended."""

    def note(self, text: str) -> None:
        """Something a person should know."""

    def close(self) -> None:
        """Nothing more will come."""


class Silent:
    """Shows nothing but notes, as warnings."""

    def doing(self, what: str) -> None:
        """Not shown."""

    def plan(self, runs: Sequence[tuple[str, int, int]], engine: str, device: str) -> None:
        """Not shown."""

    def begin(self, run: str, done: int, rounds: int) -> None:
        """Not shown."""

    def skip(self, run: str, rounds: int) -> None:
        """Not shown."""

    def moved(self, run: str, share: float, training: bool) -> None:
        """Not shown."""

    def round(self, run: str, number: int, loss: float, best: float) -> None:
        """Not shown."""

    def note(self, text: str) -> None:
        """A warning."""
        warnings.warn(text, stacklevel=3)

    def close(self) -> None:
        """Nothing to do."""


class Terminal:
    """A bar over all rounds of the experiment with the time that is left; plain lines where there is no terminal.

    It moves inside rounds, and says how far adapters are while they are scored.
    """

    def __init__(self, console: Screen) -> None:
        self._console = console
        self._pace = Pace()
        self._doing, self._since = "", 0.0  # what is scored, and since when
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TextColumn("rounds"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}", markup=False),
            TextColumn("{task.fields[detail]}", style="dim", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("preparing", total=None, detail="", left="")
        self._bar.start()

    def doing(self, what: str) -> None:
        """Shown beside the bar."""
        self._doing, self._since = what, time.monotonic()
        self._bar.update(self._task, detail=plain(what))

    def plan(self, runs: Sequence[tuple[str, int, int]], engine: str, device: str) -> None:
        """One line, then the bar's length is known."""
        total = sum(rounds for _, _, rounds in runs)
        methods = list(dict.fromkeys(method for method, _, _ in runs))
        seeds = {seed for _, seed, _ in runs}
        self._console.print(
            f"{len(runs)} runs: {len(methods)} methods ({', '.join(methods)}), "
            f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''}, {total} rounds; engine {engine} on {device}"
        )
        self._pace.total = total
        self._bar.update(self._task, total=total)

    def begin(self, run: str, done: int, rounds: int) -> None:
        """The bar carries the run's name."""
        if done or not self._console.is_terminal:
            self._console.print(f"{run}: " + (f"going on after round {done}" if done else "training"), style="dim")
        self._pace.begin(done)
        self._draw(description=plain(run), detail="")

    def skip(self, run: str, rounds: int) -> None:
        """Said, because it explains the speed."""
        self._console.print(f"{run}: finished before, not run again", style="dim")
        self._pace.before(rounds)
        self._draw()

    def moved(self, run: str, share: float, training: bool) -> None:
        """The bar moves inside a round; what is scored is said with its own time."""
        if training:
            self._pace.moved(run, share)
            self._draw()
        elif self._doing:
            seconds = (time.monotonic() - self._since) * (1 - share) / share if share else None
            self._draw(detail=plain(f"{self._doing}: {share:.0%}, {clock_text(seconds)} left"))

    def round(self, run: str, number: int, loss: float, best: float) -> None:
        """Loss and the best validation score so far."""
        chosen = f", best val {best:.1f}" if math.isfinite(best) else ""
        self._pace.round(run)
        self._doing = ""
        self._draw(description=plain(run), detail=f"loss {loss:.3f}{chosen}")

    def note(self, text: str) -> None:
        """Stays on the screen."""
        self._console.print(Text.assemble(("note:", "yellow"), f" {plain(text)}"))

    def close(self) -> None:
        """The bar goes; what was printed stays."""
        self._bar.stop()

    def _draw(self, **changes: Any) -> None:
        left = f"{clock_text(self._pace.left())} left"
        self._bar.update(self._task, completed=self._pace.done, left=left, **changes)
