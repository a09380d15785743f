"""What a federation's run tells: a line for everything, on the screen and in a file beside the runs."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self


class Log:
    """A reporter of plain lines."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed with the log)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def doing(self, what: str) -> None:
        """Something that takes a moment has begun."""
        self.note(what)

    def plan(self, runs: Sequence[tuple[str, int, int]], engine: str, device: str) -> None:
        """Not told: a federation has one run."""

    def begin(self, run: str, done: int, rounds: int) -> None:
        """A run starts, or goes on after ``done`` rounds."""
        self.note(f"{run}: " + (f"goes on after round {done} of {rounds}" if done else f"{rounds} rounds"))

    def skip(self, run: str, rounds: int) -> None:
        """A run was finished before."""
        self.note(f"{run}: all {rounds} rounds are done already")

    def moved(self, run: str, share: float, training: bool) -> None:
        """Not told: parties are elsewhere."""

    def round(self, run: str, number: int, loss: float, best: float) -> None:
        """A round has ended."""
        self.note(f"{run}: round {number}" + (f", training loss {loss:.4f}" if math.isfinite(loss) else ""))

    def note(self, text: str) -> None:
        """Something a person should know."""
        line = f"{time.strftime('%H:%M:%S')} {text}"
        print(line, flush=True)
        if not self._file.closed:
            self._file.write(line + "\n")
            self._file.flush()

    def close(self) -> None:
        """Nothing more will come."""
        self._file.close()
