"""Inputs that Hypothesis makes, by the hundred: the tests of ``tests/input/test_fuzz.py`` with a larger budget."""

from __future__ import annotations

import os

import pytest
from tests.input.fuzzing import BUDGET, ENDED

from benchmarks.tortures.world import Tally

KINDS = {"table": 160, "text": 80, "picture": 100, "parquet": 80, "file": 100}  # inputs of each
COMMANDS = {"table": 2}  # that are tried on an input; one, if nothing is said


class Failures:
    """A plug-in of pytest that keeps what went wrong."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """After each step of a test."""
        if report.failed:
            self._tally.fail(report.longreprtext)


def torture(kinds: list[str]) -> Tally:
    """Try inputs of some kinds."""
    tally = Tally()
    for kind in kinds:
        os.environ[BUDGET], before = str(KINDS[kind]), sum(ENDED.values())
        quiet = ["-q", "--no-header", "--no-summary", "-p", "no:cacheprovider", "--tier", "long"]
        ended = pytest.main([*quiet, "tests/input/test_fuzz.py", "-k", f"test_any_{kind}"], plugins=[Failures(tally)])
        tried = (sum(ENDED.values()) - before) // COMMANDS.get(kind, 1)  # counted where it happens
        tally.count("inputs", tried)
        tally.count(f"of them {kind}", tried)
        if ended not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            tally.fail(f"{kind}: pytest ended with {ended}")
    tally.count("commands", sum(ENDED.values()))
    for code, times in sorted(ENDED.items()):
        tally.count(f"with exit code {code}", times)
    return tally
