"""A floor and an alarm: what accuracy hides is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from fedshift import Result
from fedshift.join import join
from fedshift.results.tables import COLLAPSED
from fedshift.runs.open import open_run
from tests.trust.worlds import SITES, go, harmful_adapters, skewed, skewed_pool

METHODS = [{"name": "fedavg", "adapters": ["none", "benign", "blind"]}]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    with harmful_adapters():
        return go(skewed(method=METHODS, baselines=True, rounds=10), tmp_path_factory.mktemp("alarms"))


def cells(result: Result, adapter: str) -> list[str]:
    number = next(k for k, row in enumerate(result.rows) if (row.method, row.adapter) == ("fedavg", adapter))
    return [list(column.cells)[number].markup for column in result.table().columns]


def test_a_constant_classifier_is_marked_named_and_never_the_best(result: Result) -> None:
    assert any(cell.endswith(f" {COLLAPSED}") for cell in cells(result, "benign"))
    assert not any(cell.endswith(f" {COLLAPSED}") for cell in cells(result, "none"))
    assert not any("[bold]" in cell for cell in cells(result, "benign"))
    (said,) = [note for note in result.trouble if "collapsed" in note]
    assert said.startswith(
        "fedavg with adapter benign has collapsed on original (all clients): 100 % of the predictions"
    )
    assert "'0'" in said
    assert "mean recall of classes is 33.3 %" in said


def test_adaptation_that_lowers_balanced_accuracy_on_validation_is_said(result: Result) -> None:
    said = [note for note in result.trouble if "adaptation lowers balanced accuracy on validation images" in note]
    assert [note.split(":")[0] for note in said] == ["fedavg with adapter benign", "fedavg with adapter blind"]


def test_rows_that_cannot_be_told_apart_are_said(result: Result) -> None:
    assert any("cannot be told from" in note and "the difference is noise" in note for note in result.trouble)


def test_the_floor_answers_with_the_own_majority(result: Result) -> None:
    floor = next(row for row in result.rows if row.method == "majority")
    (score,) = floor.scores("original/clients")
    assert set(score.measured) == set(SITES)
    for own in score.measured.values():
        assert own.confusion.top_share == 1
        assert own.confusion.top_class == 0  # 70 % of everybody's images
        assert own.value("balanced-accuracy") == pytest.approx(100 / 3)
        assert own.value("auroc") == pytest.approx(50)
    assert floor.cost["bytes-up"] == floor.cost["bytes-down"] == 0
    assert not any("majority has collapsed" in note for note in result.trouble)


def test_the_floor_of_unseen_clients_is_everybodys_majority(tmp_path: Path) -> None:
    split = {"train": 0.4, "val": 0.3, "test": 0.3, "unseen": ["east"]}
    found = go(skewed(method=[{"name": "majority"}], split=split), tmp_path)
    (row,) = found.rows
    (score,) = row.scores("original/unseen")
    assert score.measured["east"].confusion.top_class == 0
    deployment = open_run(found.folders[0]).deployment()
    pool = skewed_pool()
    assert torch.equal(deployment.server["counts"]["all"].argmax(), pool.labels.bincount().argmax())


def test_a_loss_that_grew_is_said(tmp_path: Path) -> None:
    wild = go(skewed(train={"lr": 1000.0, "batch-size": 16}), tmp_path / "wild")
    assert any("training has diverged, try a lower [train] lr" in note for note in wild.trouble), wild.trouble
    calm = go(skewed(), tmp_path / "calm")
    assert not any("diverged" in note for note in calm.trouble)


@pytest.mark.parametrize("labelled", [False, True])
def test_join_says_so_too(result: Result, labelled: bool, tmp_path: Path) -> None:
    pool = skewed_pool(seed=0, each=10)
    for k, (image, label) in enumerate(zip(pool.images, pool.labels.tolist(), strict=True)):
        path = tmp_path / "clinic" / (str(label) if labelled else "") / f"{k}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.movedim(0, -1).numpy()).save(path)
    folder = next(path for path in result.folders if path.parent.name == "fedavg")
    with harmful_adapters():
        notes = join(folder, tmp_path / "clinic", "benign", tmp_path / "out").notes
        fine = join(folder, tmp_path / "clinic", "none", tmp_path / "fine").notes
    (said,) = [note for note in notes if "100 % of the predictions are '0'" in note]
    assert ("mean recall of classes is 33.3 %" if labelled else "unless nearly all images are") in said
    assert "compare with --adapter none" in said
    assert not any("of the predictions are" in note for note in fine)
