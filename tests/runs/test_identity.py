"""What a run is: a method whose numbers have changed since has other runs, and its old ones are named as such."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedshift.errors import UserError
from fedshift.runs.identity import revision_of
from fedshift.runs.open import open_run
from fedshift.runs.run import run
from fedshift.runs.setup import make_setup, make_task
from fedshift.store.found import read_config
from tests.inspect.conftest import digits
from tests.runs.test_run import tiny


@pytest.mark.parametrize(
    ("method", "train", "revision"),
    [("fedavg", {}, 0), ("fedavg", {"lr-decay": 0.9}, 1), ("fedproc", {}, 1), ("afl", {"lr-decay": 0.9}, 2)],
)
def test_a_revision_counts_what_changed(method: str, train: dict[str, Any], revision: int) -> None:
    """Of the method itself, and of whatever adapts at a rate that decays."""
    experiment = tiny(method=[{"name": method}], train={"lr": 0.1, **train})
    assert revision_of(make_setup(experiment, experiment.method[0], make_task(experiment, 0))) == revision


def test_a_run_of_another_revision_is_shown_but_not_gone_on_with(tmp_path: Path) -> None:
    experiments = [digits(method=[{"name": name}], rounds=1) for name in ("fedavg", "fedproc")]
    plain, changed = (run(one, tmp_path, engine="sequential").folders[0] for one in experiments)
    assert "revision" not in read_config(plain)  # as it always was: its hash is what it was
    assert read_config(changed)["revision"] == 1
    assert open_run(changed).job().seed == 0
    opened = open_run(changed)
    opened.config.pop("revision")  # as of before
    with pytest.raises(
        UserError, match="made by another version of fedshift, whose numbers this one cannot make again"
    ):
        opened.job()
