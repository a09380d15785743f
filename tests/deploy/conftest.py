"""Shared by the tests of federations."""

from __future__ import annotations

import pytest

from fedshift.store.costs import Costs


@pytest.fixture
def uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    """FLOPs are not counted: other tests do that, and here it would take a third of the time."""
    monkeypatch.setattr("fedshift.runs.finish.count", lambda *_: Costs(parameters=0.0))
