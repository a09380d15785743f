"""What a person sees in a notebook while an experiment runs: one bar that moves, without widgets or JavaScript."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from html import escape
from typing import Any

from fedshift.runs.pace import Pace, clock_text
from fedshift.runs.progress import Reporter, Silent

PAUSE = 0.2  # seconds between two pictures of the bar


def usual() -> Reporter:
    """Who is told where nobody else is: a bar in a notebook, and nobody elsewhere.

    >>> type(usual()).__name__
    'Silent'
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return Notebook() if hasattr(shell, "kernel") else Silent()


class Notebook(Silent):
    """A bar over all rounds, with the time that is left; in the end a line on what was run."""

    def __init__(self) -> None:
        from IPython import display

        show: Any = display.display
        self._shown = show({"text/html": "", "text/plain": ""}, raw=True, display_id=True)
        self._plan, self._what, self._detail = "", "preparing", ""
        self._pace = Pace()
        self._began = self._drawn = time.monotonic()

    def doing(self, what: str) -> None:
        """Shown beneath the bar."""
        self._what, self._detail = what, ""
        self._draw()

    def plan(self, runs: Sequence[tuple[str, int, int]], engine: str, device: str) -> None:
        """The bar's length is known."""
        methods = list(dict.fromkeys(method for method, _, _ in runs))
        self._pace.total = sum(rounds for _, _, rounds in runs)
        self._plan = f"{len(runs)} runs ({', '.join(methods)}), {self._pace.total} rounds, engine {engine} on {device}"
        self._draw(now=True)

    def begin(self, run: str, done: int, rounds: int) -> None:
        """A run starts, or goes on."""
        self._what, self._detail = run, ""
        self._pace.begin(done)
        self._draw()

    def skip(self, run: str, rounds: int) -> None:
        """A run was finished before."""
        self._pace.before(rounds)
        self._draw()

    def moved(self, run: str, share: float, training: bool) -> None:
        """The bar moves inside a round, or it is said how far an adapter is."""
        if training:
            self._pace.moved(run, share)
        else:
            self._detail = f": {share:.0%}"
        self._draw()

    def round(self, run: str, number: int, loss: float, best: float) -> None:
        """The bar moves."""
        chosen = f", best val {best:.1f}" if math.isfinite(best) else ""
        self._what, self._detail = f"{run}: loss {loss:.3f}{chosen}", ""
        self._pace.round(run)
        self._draw()

    def close(self) -> None:
        """The bar goes; what was run stays."""
        seconds = time.monotonic() - self._began
        self._update(f"<div>{escape(self._plan)}: {clock_text(seconds)}</div>", f"{self._plan}: {clock_text(seconds)}")

    def _draw(self, now: bool = False) -> None:
        if not now and time.monotonic() - self._drawn < PAUSE:
            return
        self._drawn = time.monotonic()
        done, total, left = self._pace.done, self._pace.total, self._pace.left()
        clock = f"{int(done)} of {total} rounds" + (f", {clock_text(left)} left" if left is not None else "")
        bar = f'<progress value="{done:.4g}" max="{max(total, 1)}" style="width: 20em"></progress>'
        what = f"{self._what}{self._detail}"
        self._update(f"<div>{bar} {clock}<br>{escape(what)}</div>", f"{clock}: {what}")

    def _update(self, html: str, text: str) -> None:
        data: dict[str, Any] = {"text/html": html, "text/plain": text}
        if self._shown is not None:
            self._shown.update(data, raw=True)
