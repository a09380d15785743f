"""What a person sees in a notebook while an experiment runs: one bar that moves, without widgets or JavaScript."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from html import escape
from typing import Any

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
        self._plan, self._what = "", "preparing"
        self._total, self._done, self._skipped = 0, 0, 0
        self._began = self._drawn = time.monotonic()

    def doing(self, what: str) -> None:
        """Shown beneath the bar."""
        self._what = what
        self._draw()

    def plan(self, runs: Sequence[tuple[str, int, int]], engine: str, device: str) -> None:
        """The bar's length is known."""
        methods = list(dict.fromkeys(method for method, _, _ in runs))
        self._total = sum(rounds for _, _, rounds in runs)
        self._plan = f"{len(runs)} runs ({', '.join(methods)}), {self._total} rounds, engine {engine} on {device}"
        self._draw(now=True)

    def begin(self, run: str, done: int, rounds: int) -> None:
        """A run starts, or goes on."""
        self._what = run
        self._done, self._skipped = self._done + done, self._skipped + done
        self._draw()

    def skip(self, run: str, rounds: int) -> None:
        """A run was finished before."""
        self._done, self._skipped = self._done + rounds, self._skipped + rounds
        self._draw()

    def round(self, run: str, number: int, loss: float, best: float) -> None:
        """The bar moves."""
        chosen = f", best val {best:.1f}" if math.isfinite(best) else ""
        self._what = f"{run}: loss {loss:.3f}{chosen}"
        self._done += 1
        self._draw()

    def close(self) -> None:
        """The bar goes; what was run stays."""
        seconds = time.monotonic() - self._began
        self._update(f"<div>{escape(self._plan)}: {_clock(seconds)}</div>", f"{self._plan}: {_clock(seconds)}")

    def _draw(self, now: bool = False) -> None:
        if not now and time.monotonic() - self._drawn < PAUSE:
            return
        self._drawn = time.monotonic()
        made = self._done - self._skipped
        left = (self._drawn - self._began) / made * (self._total - self._done) if made else None
        clock = f"{self._done} of {self._total} rounds" + (f", {_clock(left)} left" if left is not None else "")
        bar = f'<progress value="{self._done}" max="{max(self._total, 1)}" style="width: 20em"></progress>'
        self._update(f"<div>{bar} {clock}<br>{escape(self._what)}</div>", f"{clock}: {self._what}")

    def _update(self, html: str, text: str) -> None:
        data: dict[str, Any] = {"text/html": html, "text/plain": text}
        if self._shown is not None:
            self._shown.update(data, raw=True)


def _clock(seconds: float) -> str:
    """Minutes and seconds.

    >>> _clock(83.2)
    '1:23'
    """
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
