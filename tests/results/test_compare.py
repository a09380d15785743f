"""Two sets of runs side by side: what differs in settings, and paired differences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedshift import UserError
from fedshift.results.collect import collect
from fedshift.results.compare import compare
from fedshift.results.stats import paired_difference
from fedshift.store.found import find_runs
from tests.runs.test_run import command, go, tiny

METHODS = [
    {"name": "fedavg", "adapters": ["none", {"name": "tent", "label": "tent", "params": "all"}]},
    {"name": "fedprox"},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    out = tmp_path_factory.mktemp("runs")
    go(tiny(method=METHODS[:1], seeds=[0, 1]), out / "a")
    go(tiny(method=METHODS, seeds=[1, 0, 2], train={"lr": 0.5, "batch-size": 16, "momentum": 0.9}), out / "b")
    return out / "a", out / "b"


def test_pairs_are_clients_under_seeds_that_both_have(folders: tuple[Path, Path]) -> None:
    found = compare(*folders)
    assert [(one.key, one.first, one.second, one.methods) for one in found.settings] == [("train.lr", "0.1", "0.5", ())]
    first, second = (collect(find_runs(folder)) for folder in folders)
    for gap in found.gaps:
        rows = [
            next(r for r in side.rows if (r.method, r.adapter) == (gap.method, gap.adapter)) for side in (first, second)
        ]
        values = []
        for row in rows:
            by_seed = dict(zip(row.seeds, row.accuracies("original/clients"), strict=True))
            values.append([by_seed[seed] for seed in (0, 1)])
        assert gap.seeds == (0, 1)
        assert gap.difference == paired_difference(values[1], values[0], seed=0)
        assert gap.second - gap.first == pytest.approx(gap.difference.mean)
    assert {(gap.method, gap.adapter) for gap in found.gaps} == {("fedavg", "none"), ("fedavg", "tent")}
    assert "only the second has fedprox" in found.notes


def test_a_run_and_itself_differ_in_nothing(folders: tuple[Path, Path]) -> None:
    found = compare(folders[0], folders[0])
    assert found.settings == ()
    assert all(gap.difference is not None and gap.difference.mean == 0 and gap.difference.noise for gap in found.gaps)


def test_two_methods_alone_are_compared_whatever_they_are_called(folders: tuple[Path, Path]) -> None:
    found = compare(folders[0] / "tiny" / "fedavg", folders[1] / "tiny" / "fedprox")
    assert {gap.method for gap in found.gaps} == {"fedavg / fedprox"}
    assert "method.name" in {one.key for one in found.settings}


def test_other_tasks_and_other_seeds_are_said(folders: tuple[Path, Path], tmp_path: Path) -> None:
    go(tiny(method=METHODS[:1], seeds=[5], split={"train": 0.5, "val": 0.2, "test": 0.3}), tmp_path)
    found = compare(folders[0], tmp_path)
    assert all(gap.difference is None for gap in found.gaps)
    assert any("no seed in common" in note for note in found.notes)
    go(tiny(method=METHODS[:1], seeds=[0], split={"train": 0.5, "val": 0.2, "test": 0.3}), tmp_path / "other")
    found = compare(folders[0], tmp_path / "other")
    assert any("the tasks differ" in note for note in found.notes)


def test_the_command(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = command(monkeypatch, capsys, "compare", *folders)
    assert "train.lr" in said
    assert "second less first" in said
    told = json.loads(command(monkeypatch, capsys, "compare", *folders, "--metric", "loss", "--format", "json"))
    assert told["measure"] == "loss"
    assert told["gaps"]
    with pytest.raises(UserError, match="no measure"):
        compare(*folders, measure="beauty")
    with pytest.raises(UserError, match="no selection rule"):
        compare(*folders, rule="luck")
