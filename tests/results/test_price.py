"""The picture of what privacy costs."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from fedshift.errors import UserError
from fedshift.experiment.schema import Experiment
from fedshift.results.plots.price import price_picture
from fedshift.runs.run import run

TABLE = {
    "rounds": 1,
    "baselines": False,
    "data": {"size": 8, "channels": 1, "domains": ["pen"]},
    "partition": {"kind": "iid", "clients": 4},
    "model": {"name": "mlp", "hidden": []},
    "train": {"weights": "uniform"},
    "evaluate": {"every": 0, "advice": False, "artefacts": False},
}


def test_accuracy_against_epsilon_and_bytes(tmp_path: Path) -> None:
    rows = [
        {"name": "fedavg", "label": "open"},
        {"name": "fedavg", "label": "noisy", "privacy": {"clip": 1.0, "noise": 2.0}},
        {"name": "fedavg", "label": "small", "privacy": {"compress": "int8"}},
    ]
    result = run(Experiment(**TABLE, method=rows), out=tmp_path, engine="sequential")
    costs = {row.method: row.cost for row in result.rows}
    assert costs["noisy"]["epsilon"] > 0
    assert "epsilon" not in costs["open"]
    weights = 65 * 10  # 64 pixels and a bias for each of ten classes
    assert costs["open"]["bytes-up"] == 4 * weights
    assert costs["small"]["bytes-up"] == weights + 4  # a byte for each, and one scale
    price_picture(result, tmp_path / "privacy.png")
    with Image.open(tmp_path / "privacy.png") as picture:
        assert min(picture.size) > 300
    plain = run(Experiment(**TABLE, method=rows[:1]), out=tmp_path, engine="sequential")
    with pytest.raises(UserError, match="no epsilon"):
        price_picture(plain, tmp_path / "nothing.png")


def test_noise_that_nobody_was_drawn_for_is_in_the_picture(tmp_path: Path) -> None:
    """A run of few clients and rounds may end so: its price is epsilon, and no byte went up."""
    privacy = {"clip": 1.0, "noise": 2.0, "sampling": "poisson"}
    rows = [{"name": "fedavg", "privacy": privacy}]
    result = run(Experiment(**TABLE, participation=1e-9, method=rows), out=tmp_path, engine="sequential")
    (row,) = result.rows
    assert row.cost["epsilon"] > 0 == row.cost["bytes-up"]
    price_picture(result, tmp_path / "privacy.png")
    assert (tmp_path / "privacy.png").is_file()
