"""A few seconds of what ``benchmarks/serve.py soak`` does for an hour."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.serving.soaking import soaked

from tests.serve.conftest import World


@pytest.mark.system
def test_a_short_soak_loses_nothing(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of capacity, every kind of fault, SIGKILL and a restart; what was sent is answered, counted and remembered."""
    wrong = soaked(4.0, world.folders["fedbn"] / "artefacts", tmp_path / "state", "t3a", 4, 0.3)
    said = capsys.readouterr().out
    assert wrong == [], said
    assert ", 0 lost" in said
    assert "server 2: " in said
    log = (tmp_path / "state.log").read_text()
    assert "the server before was killed" in log
    assert "Traceback" not in log
