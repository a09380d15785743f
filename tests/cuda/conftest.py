"""Tests that only a GPU can run. ``make gpu`` runs them: no CI has one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test of this folder waits for a GPU; the hook is shown those of other folders too."""
    if torch.cuda.is_available():
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a GPU that torch can use: make gpu"))
