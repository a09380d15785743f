"""What a person sees of a search: one bar over all its trials, and which of them is at it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from fedshift.runs.progress import Reporter


class Search:
    """A reporter of many plans as one: the first says how long it will take, and the bar stays to the end."""

    def __init__(self, reporter: Reporter, methods: Sequence[str], trials: int) -> None:
        self._say, self._methods, self._trials = reporter, methods, trials
        self._note = cache(reporter.note)  # what is true of all trials is said once
        self._runs = self._begun = 0

    def doing(self, what: str) -> None:
        """Passed on."""
        self._say.doing(what)

    def plan(self, runs: Sequence[tuple[str, int, int]], engine: str, device: str) -> None:
        """The first plan stands for those to come: trials differ in no number of rounds."""
        if self._runs:
            return
        seeds = {seed: rounds for _, seed, rounds in runs}
        whole = [(name, *run) for name in self._methods for _ in range(self._trials) for run in seeds.items()]
        self._runs = len(whole)
        self._say.plan(whole, engine, device)

    def begin(self, run: str, done: int, rounds: int) -> None:
        """With its number."""
        self._begun += 1
        self._say.begin(f"{run} ({self._begun} of {self._runs})", done, rounds)

    def skip(self, run: str, rounds: int) -> None:
        """A run of an earlier search."""
        self._begun += 1
        self._say.skip(f"{run} ({self._begun} of {self._runs})", rounds)

    def moved(self, run: str, share: float, training: bool) -> None:
        """With its number."""
        self._say.moved(f"{run} ({self._begun} of {self._runs})", share, training)

    def round(self, run: str, number: int, loss: float, best: float) -> None:
        """With its number."""
        self._say.round(f"{run} ({self._begun} of {self._runs})", number, loss, best)

    def note(self, text: str) -> None:
        """Once."""
        self._note(text)

    def close(self) -> None:
        """The bar stays: there may be another trial."""
