"""One small experiment on the embedded digits, which all tests here only read."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedshift import Experiment, run


def digits(**changes: object) -> Experiment:
    settings: dict[str, object] = {
        "name": "digits", "rounds": 2, "baselines": False, "data": {"size": 8, "limit": 700, "seed": 0},
        "model": {"name": "mlp", "hidden": [12]}, "train": {"lr": 0.1, "batch-size": 16, "momentum": 0.9},
        "evaluate": {"every": 1, "oracle": True},
    }  # fmt: skip
    return Experiment.parse({**settings, **changes})


METHODS = [{"name": "fedavg"}, {"name": "fedthe", "adapters": ["none", "the"]}, {"name": "local"}]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three methods, fedavg under two seeds."""
    out = tmp_path_factory.mktemp("runs")
    run(digits(method=METHODS), out, engine="sequential")
    run(digits(method=METHODS[:1], seeds=[1]), out, engine="sequential")
    return out / "digits"


@pytest.fixture(scope="session")
def fedavg(runs: Path) -> Path:
    """The folder of fedavg's first seed."""
    return next((runs / "fedavg").glob("0-*"))
