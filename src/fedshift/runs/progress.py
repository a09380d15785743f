"""What a person sees while an experiment runs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Protocol

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from fedshift.results.plain import Screen, plain


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

    def round(self, run: str, number: int, loss: float, best: float) -> None:
        """Not shown."""

    def note(self, text: str) -> None:
        """A warning."""
        warnings.warn(text, stacklevel=3)

    def close(self) -> None:
        """Nothing to do."""


class Terminal:
    """A bar over all rounds of the experiment with the time that is left; plain lines where there is no terminal."""

    def __init__(self, console: Screen) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TextColumn("rounds"),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[detail]}", style="dim", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("preparing", total=None, detail="")
        self._bar.start()

    def doing(self, what: str) -> None:
        """Shown beside the bar."""
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
        self._bar.update(self._task, total=total)

    def begin(self, run: str, done: int, rounds: int) -> None:
        """The bar carries the run's name."""
        if done or not self._console.is_terminal:
            self._console.print(f"{run}: " + (f"going on after round {done}" if done else "training"), style="dim")
        self._bar.update(self._task, description=plain(run), advance=done, detail="")

    def skip(self, run: str, rounds: int) -> None:
        """Said, because it explains the speed."""
        self._console.print(f"{run}: finished before, not run again", style="dim")
        self._bar.update(self._task, advance=rounds)

    def round(self, run: str, number: int, loss: float, best: float) -> None:
        """Loss and the best validation score so far."""
        chosen = f", best val {best:.1f}" if math.isfinite(best) else ""
        self._bar.update(self._task, description=plain(run), advance=1, detail=f"loss {loss:.3f}{chosen}")

    def note(self, text: str) -> None:
        """Stays on the screen."""
        self._console.print(Text.assemble(("note:", "yellow"), f" {plain(text)}"))

    def close(self) -> None:
        """The bar goes; what was printed stays."""
        self._bar.stop()
