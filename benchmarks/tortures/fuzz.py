"""Inputs that Hypothesis makes, by the hundred: the tests of ``tests/input/test_fuzz.py`` with a larger budget."""

from __future__ import annotations

import os

import pytest
from tests.input.fuzzing import BUDGET, ENDED

from benchmarks.tortures.world import Tally

KINDS = {"table": 160, "text": 80, "picture": 100, "parquet": 80, "file": 100}  # inputs of each


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
        os.environ[BUDGET] = str(KINDS[kind])
        quiet = ["-q", "--no-header", "--no-summary", "-p", "no:cacheprovider", "--tier", "grid"]
        pytest.main([*quiet, "tests/input/test_fuzz.py", "-k", f"test_any_{kind}"], plugins=[Failures(tally)])
        tally.count(f"inputs ({kind})", KINDS[kind])
    tally.count("commands", sum(ENDED.values()))
    for code, times in sorted(ENDED.items()):
        tally.count(f"with exit code {code}", times)
    return tally
