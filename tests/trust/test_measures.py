"""Measures of a run: of every row, stream and client, exact; and the one that the round is chosen by."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from sklearn import metrics as sk

from fedshift import Result, UserError
from fedshift.measures.measurement import MEASURES
from fedshift.results.collect import collect
from fedshift.results.subgroups import subgroups
from fedshift.store.folder import RunFolder
from fedshift.store.found import read_config
from fedshift.store.metric import Metric
from fedshift.store.predictions import predictions_file, read_predictions
from fedshift.store.progress import Reached
from tests.trust.worlds import SITES, go, skewed, skewed_pool

STREAMS = [{"name": "original", "kind": "original"}, {"name": "corrupted", "kind": "corrupted"}]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    methods = [{"name": "fedavg", "adapters": ["none", "t3a"]}]
    evaluate = {"every": 1, "mean-of": ["original", "corrupted"]}
    return go(skewed(method=methods, stream=STREAMS, evaluate=evaluate), tmp_path_factory.mktemp("measures"))


def test_every_row_stream_and_client_has_every_measure_and_they_are_scikit_learns(result: Result) -> None:
    folder = result.folders[0]
    for row in result.rows:
        for part in read_predictions(folder, row.adapter):
            (score,) = row.scores(part.metric)
            some, own = part.predictions, score.measured[part.client]
            y, p = some.labels, some.predicted
            assert set(some.labels) == {0, 1, 2}
            expected = {
                "accuracy": sk.accuracy_score(y, p),
                "balanced-accuracy": sk.balanced_accuracy_score(y, p),
                "macro-f1": sk.f1_score(y, p, average="macro"),
                "auroc": sk.roc_auc_score(
                    y, some.probabilities / some.probabilities.sum(1, keepdims=True), multi_class="ovr"
                ),
                "auprc": np.mean([sk.average_precision_score(y == k, some.log_probabilities[:, k]) for k in range(3)]),
                "top-share": np.bincount(p).max() / len(p),
            }
            for name, value in expected.items():
                assert own.value(name) == pytest.approx(100 * value, abs=1e-4), (row.adapter, part.metric, name)
            assert own.value("accuracy") == pytest.approx(score.by_client[part.client].accuracy)
            assert own.value("loss") == pytest.approx(score.by_client[part.client].loss / len(y), abs=1e-4)  # type: ignore[operator]
            np.testing.assert_allclose(own.confusion.recall(), sk.recall_score(y, p, average=None))
        assert {metric.stream for rule, metric in row.values if rule == "best-val"} == {"original", "corrupted", "mean"}


def test_rows_have_client_means_pooled_and_mean_of_streams(result: Result) -> None:
    (row, _) = result.rows
    for name, measure in MEASURES.items():
        metric = Metric("global", "original", name=name)
        (by_client,) = row.accuracies(metric)
        mean = row.number(metric)
        assert mean is not None
        assert mean[0] == pytest.approx(np.mean(list(by_client.values())))
        worst = row.number(metric, part="worst10")
        assert worst is not None
        assert worst[0] == pytest.approx((min if measure.higher else max)(by_client.values()))
        both = [row.number(metric._replace(stream=stream)) for stream in ("original", "corrupted")]
        over = row.number(metric._replace(stream="mean"))
        assert over is not None
        assert over[0] == pytest.approx(np.mean([number[0] for number in both if number]))
    parts = [part for part in read_predictions(result.folders[0], "none") if part.metric.stream == "original"]
    y = np.concatenate([part.predictions.labels for part in parts])
    p = np.concatenate([part.predictions.predicted for part in parts])
    pooled = row.number("original/clients/balanced-accuracy", part="pooled")
    assert pooled is not None
    assert pooled[0] == pytest.approx(100 * sk.balanced_accuracy_score(y, p))


def test_they_are_on_disk_and_in_json(result: Result) -> None:
    again = collect(result.folders)
    assert again.rows[0].values == result.rows[0].values
    first = next(row for row in again.as_dicts() if row["selection"] == "best-val")
    assert set(first["measures"]) == set(MEASURES) - {"accuracy"}
    assert set(first["by-class"]) == {"0", "1", "2"}
    json.dumps(again.as_dicts(), allow_nan=False)


def test_recall_of_every_class_is_a_table(result: Result) -> None:
    table = result.classes_table()
    assert table is not None
    assert [str(column.header) for column in table.columns][-3:] == ["0", "1", "2"]


def test_the_headline_is_what_was_asked_for(tmp_path: Path) -> None:
    found = go(skewed(evaluate={"every": 1, "metric": "balanced-accuracy"}), tmp_path)
    assert found.measure == "balanced-accuracy"
    assert "Balanced accuracy in %" in str(found.table().title)
    assert "best pooled validation balanced accuracy" in str(found.table().title)
    (row,) = found.rows
    level = row.number("original/clients/balanced-accuracy")
    assert level is not None
    assert f"{level[0]:.1f}" in [str(cell) for column in found.table().columns for cell in column.cells]


@pytest.mark.parametrize("measure", ["accuracy", "balanced-accuracy", "macro-f1", "auroc", "loss"])
def test_the_round_is_chosen_by_the_headline(measure: str, tmp_path: Path) -> None:
    found = go(skewed(rounds=8, evaluate={"every": 1, "metric": measure}, train={"lr": 0.3, "batch-size": 8}), tmp_path)
    folder = RunFolder(found.folders[0])
    lines = folder.history().evaluations
    metric = Metric("global", "val", name=measure)
    sign = 1 if MEASURES[measure].higher else -1
    reached = {line.round: (sign * line.scores[metric].pooled, -(line.scores[metric].loss or 0)) for line in lines}  # type: ignore[operator]
    done = json.loads((folder.path / "done").read_text())
    assert done["best-round"] == max(reached, key=lambda number: reached[number])
    config = read_config(folder.path)
    assert config["evaluate"].get("metric", "accuracy") == measure
    assert ("metric" in config["evaluate"]) == (measure != "accuracy")  # older runs keep their names


def test_ties_go_to_the_lower_loss() -> None:
    assert Reached(80.0, 0.4).beats(Reached(80.0, 0.5))
    assert not Reached(80.0, 0.5).beats(Reached(80.0, 0.5))
    assert not Reached(79.9, 0.1).beats(Reached(80.0, 0.5))


def test_predictions_are_optional_and_can_be_asked_for_later(tmp_path: Path) -> None:
    without = go(skewed(evaluate={"every": 1, "predictions": False}), tmp_path)
    path = predictions_file(without.folders[0], "none")
    assert not path.is_file()
    with pytest.raises(UserError, match=r"keeps no predictions of adapter 'none': repeat .* evaluate.predictions=true"):
        read_predictions(without.folders[0], "none")
    later = go(skewed(evaluate={"every": 1, "predictions": True}), tmp_path)
    assert later.folders == without.folders
    assert path.is_file()
    assert len(read_predictions(later.folders[0], "none")) == len(SITES)


def test_subgroups_of_clients(result: Result) -> None:
    found = subgroups(result.folders, "client", "balanced-accuracy", draws=20)
    assert {one.value for one in found} == set(SITES)
    one = next(one for one in found if (one.adapter, one.metric.stream, one.value) == ("none", "original", "west"))
    expected = result.rows[0].scores("original/clients")[0].measured["west"].value("balanced-accuracy")
    assert one.found.value == pytest.approx(expected)
    with pytest.raises(UserError, match="there is no column 'sex' beside the predictions; there are: client"):
        subgroups(result.folders, "sex", "accuracy", draws=2)


def test_subgroups_of_a_column_resample_patients(tmp_path: Path) -> None:
    """Ten images a patient, a scanner that makes two of three classes hard to tell."""
    pool = skewed_pool(each=100)
    rows = [
        {
            "image": png(image),
            "label": str(label),
            "site": SITES[k // 100],
            "patient_id": f"p{k // 10}",
            "scanner": "old" if k % 20 < 10 else "new",
        }
        for k, (image, label) in enumerate(zip(pool.images, pool.labels.tolist(), strict=True))
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "scans.parquet")
    data = {
        "source": f"parquet:{tmp_path / 'scans.parquet'}", "columns": {"client": "site"}, "attributes": ["scanner"],
        "size": 8,
    }  # fmt: skip
    found = go(skewed(data=data), tmp_path / "runs", data=None)
    parts = subgroups(found.folders, "scanner", "accuracy", draws=30)
    assert [one.value for one in parts] == ["new", "old"]
    kept = read_predictions(found.folders[0], "none")
    assert sum(one.found.samples for one in parts) == sum(len(part.ids) for part in kept)
    assert sum(one.found.groups for one in parts) == len({group for part in kept for group in part.groups.tolist()})
    assert all(one.found.groups <= one.found.samples / 5 for one in parts)  # patients, not images
    assert all(one.found.low < one.found.high for one in parts)  # type: ignore[operator]


def png(image: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image.movedim(0, -1).numpy()).save(buffer, "PNG")
    return buffer.getvalue()
