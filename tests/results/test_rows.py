"""Typed scores: nothing is lost on the way to disk and back, to JSON or to a data frame, and old files are still read."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedshift import UserError
from fedshift.results.collect import collect
from fedshift.results.result import Result, Row
from fedshift.results.stats import paired_difference, standard_error
from fedshift.store.folder import RunFolder
from fedshift.store.lines import History
from fedshift.store.metric import Metric
from fedshift.store.rows import ScoreRow, Told
from fedshift.store.summary import ClientScore, Summary
from tests.conftest import unseal
from tests.results.test_reports import MEAN, THREE, tented
from tests.runs.test_run import command, go, lines, refuse, tiny


# ---- metrics -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model", ["global", "personal", "after-local", ""])
@pytest.mark.parametrize("stream", ["original", "val", "mean", "out-of-client", "global", "of/two parts"])
@pytest.mark.parametrize("population", ["clients", "unseen"])
@pytest.mark.parametrize("name", ["accuracy", "f1"])
def test_a_metric_is_read_back_from_its_text(model: str, stream: str, population: str, name: str) -> None:
    metric = Metric(model, stream, population, name)
    assert Metric.parse(str(metric)) == metric
    assert Metric.parse(metric) is metric


def test_the_text_of_a_metric_is_that_of_old_files() -> None:
    assert str(Metric("global", "original", "clients")) == "global/original/clients"
    assert Metric.parse("after-local/mean/unseen") == ("after-local", "mean", "unseen", "accuracy")
    for text in ("", "clients", "original", "a/b/c"):
        with pytest.raises(ValueError, match="is no metric"):
            Metric.parse(text)


# ---- rows ----------------------------------------------------------------------------------------------------------------
FULL = ScoreRow(
    metric=Metric("personal", "original", "unseen"), summary=Summary(70.0, 60.0, 2.5, 50.0, None, 3), selection="last",
    round=7, label="mild", adapter="tent", options={"lr": 0.1}, code="abc", given_bytes=12,
    by_client={"a": ClientScore(10, 7, 3.25), "b": ClientScore(0, 0, None)}, telemetry={"e": Told(0.5, (1, 2))},
    setting={"order": "shuffled"}, seed=4, task_hash="feed", fedshift="0.1.0", paper=71.5, paper_validation=80.0,
    family="rates", of_streams=("x", "y"), unknown={"of-tomorrow": [1]},
)  # fmt: skip


def test_a_row_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    bare = ScoreRow(Metric("global", "original"), Summary(), "best-val", label="mild")
    folder.write_scores("mild", [FULL, bare])
    assert folder.scores() == {"mild": [FULL, bare]}
    stored = lines(tmp_path / "adapters" / "mild.jsonl")
    assert stored[0]["by-client"] == {"a": [10, 7, 3.25], "b": [0, 0, None]}
    assert (stored[0]["label"], stored[0]["adapter"], stored[0]["of-tomorrow"]) == ("mild", "tent", [1])
    assert stored[1]["client-mean"] is None  # a number that is missing is said to be
    assert not {"paper", "paper-validation", "family", "of", "telemetry", "by-client"} & set(stored[1])


def as_of_version_0_1(line: dict[str, Any]) -> dict[str, Any]:
    old = {"client-mean": "avg", "pooled": "all", "worst-10": "worst", "given-bytes": "published-bytes"}
    old["diverged"] = "left-out"
    renamed = {old.get(key, key): value for key, value in line.items() if key != "label"}
    return {k: as_of_version_0_1(v) if isinstance(v, dict) and "clients" in v else v for k, v in renamed.items()}


def accuracy_alone(line: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in line.items() if k not in ("measures", "classes", "whole", "measured")}


def test_a_run_of_version_0_1_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    adapters = ["none", tented(0.1, family="rates", paper={"original": 12.5}), tented(0.5, family="rates")]
    experiment = tiny(
        stream=THREE, split={"unseen": ["south"]}, evaluate=MEAN, method=[{"name": "fedavg", "adapters": adapters}]
    )
    new = go(experiment, tmp_path / "new")
    for path in [*(new.folders[0] / "adapters").glob("*.jsonl")]:  # that version had accuracy alone
        path.write_text("".join(json.dumps(accuracy_alone(line)) + "\n" for line in lines(path)))
    shutil.rmtree(new.folders[0] / "twins")
    unseal(new.folders[0])
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    (folder,) = (RunFolder(tmp_path / "old" / path.relative_to(tmp_path / "new")) for path in new.folders)
    files = [folder.path / "metrics.jsonl", *(folder.path / "adapters").glob("*.jsonl")]
    for path in files:
        old = [as_of_version_0_1(line) for line in lines(path)]
        path.write_text("".join(json.dumps(line) + "\n" for line in old))
        assert "client-mean" not in path.read_text()
    assert '"avg"' in files[0].read_text()
    assert '"left-out"' in files[0].read_text()
    assert folder.scores() == RunFolder(new.folders[0]).scores()  # the label is the file's name
    assert folder.history() == RunFolder(new.folders[0]).history()
    assert collect([folder.path]).rows == collect(new.folders).rows
    shown = [command(monkeypatch, capsys, "show", tmp_path / name) for name in ("old", "new")]
    assert shown[0] == shown[1]
    before = [path.read_text() for path in files]
    go(experiment, tmp_path / "old")  # finished: scores of that version are scores
    assert [path.read_text() for path in files] == before


def test_lines_are_told_apart_by_what_they_are() -> None:
    history = History.of(
        [
            {"round": 1, "bytes-up": 4, "bytes-down": 8, "left-out": ["a"], "server/loss": 0.5, "train/loss": None},
            {"round": 1, "global/val/clients": {"client-mean": 50.0, "clients": 2}, "seconds": 0.1},
            {"round": 1, "adapter": "mild", "val": {"pooled": 40.0}},
            {"round": 2, "bytes-up": 4, "bytes-down": 8, "diverged": ["b"]},
        ]
    )
    assert [line.diverged for line in history.rounds] == [("a",), ("b",)]
    assert history.rounds[0].server == {"loss": 0.5}
    assert history.evaluations[0].scores == {Metric("global", "val"): Summary(client_mean=50.0, clients=2)}
    assert (history.adapted[0].label, history.adapted[0].summary.pooled) == ("mild", 40.0)
    assert history.validated
    assert not History.of([{"round": 1, "global/val/clients": {"client-mean": None}}]).validated


# ---- plain rows ----------------------------------------------------------------------------------------------------------
def test_two_labels_of_one_adapter_stay_two_in_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mild, strong = tented(0.0, label="mild"), tented(3.0, label="strong")
    result = go(tiny(method=[{"name": "fedavg", "adapters": ["none", mild, strong]}], seeds=[0, 1]), tmp_path)
    shown = json.loads(command(monkeypatch, capsys, "show", tmp_path, "--format", "json"), parse_constant=refuse)
    for rows in (result.as_dicts(), shown):
        names = {"none": "none", "mild": "tent", "strong": "tent"}
        assert {row["adapter"]: row["adapter-name"] for row in rows} == names
        assert {row["adapter"]: row["options"].get("lr") for row in rows} == {"none": None, "mild": 0.0, "strong": 3.0}
        keys = [(row["adapter"], row["selection"], row["metric"], row["seed"]) for row in rows]
        assert len(set(keys)) == len(keys)
        for row in rows:
            assert row["metric"] == f"{row['model']}/{row['stream']}/{row['population']}"
            found = next(own for own in result.rows if own.adapter == row["adapter"])
            score = found.scores(row["metric"], row["selection"])[found.seeds.index(row["seed"])]
            assert row["client-mean"] == score.summary.client_mean
    for label in ("mild", "strong"):
        stored = lines(result.folders[0] / "adapters" / f"{label}.jsonl")
        assert {(row["label"], row["adapter"]) for row in stored} == {(label, "tent")}


def test_no_column_hides_another() -> None:
    point = (("model", "[mlp, cnn]"), ("stream", "[]"), ("rounds", 3), ("paper", "x"), ("train.lr", 0.1))
    row = Row("fedavg", "mild", point, (4,), {("last", FULL.metric): [FULL]}, {"bytes-up": 3.0, "parameters": 9.0})
    other = replace(row, adapter="none", values={("last", FULL.metric): [replace(FULL, paper=None, label="none")]})
    one, two = Result((row, other), ()).as_dicts()
    assert (one["model"], one["stream"], one["paper"]) == ("personal", "original", 71.5)
    assert (one["sweep.model"], one["sweep.stream"], one["sweep.paper"]) == ("[mlp, cnn]", "[]", "x")
    assert (one["rounds"], one["round"], one["train.lr"], one["bytes-up"]) == (3, 7, 0.1, 3.0)
    assert two["sweep.paper"] == "x"  # a column is called the same in all rows
    assert "of-tomorrow" not in one
    clash = replace(row, cost={"pooled": 1.0})
    with pytest.raises(AssertionError, match="share a name"):
        Result((clash,), ()).as_dicts()


# ---- noise ---------------------------------------------------------------------------------------------------------------
def accuracies(*seeds: list[float]) -> list[dict[str, float]]:
    return [{f"c{k}": value for k, value in enumerate(own)} for own in seeds]


def test_a_difference_that_every_client_has_is_no_noise() -> None:
    low = accuracies([10.0, 50.0, 90.0, 30.0], [12.0, 48.0, 88.0, 33.0])
    high = [{name: value + 2 for name, value in own.items()} for own in low]
    found = paired_difference(high, low, seed=0)
    assert (found.mean, found.low, found.high, found.noise) == (
        2.0,
        2.0,
        2.0,
        False,
    )  # clients differ, the gap does not
    back = paired_difference(low, high, seed=0)
    assert (back.mean, back.noise) == (-2.0, False)
    assert paired_difference(low, low, seed=0).noise


def test_a_difference_of_one_client_is_noise() -> None:
    low = accuracies([10.0, 50.0, 90.0, 30.0])
    one = accuracies([30.0, 50.0, 90.0, 30.0])
    found = paired_difference(one, low, seed=0)
    assert (found.mean, found.noise) == (5.0, True)
    assert found.low <= 0 < found.mean < found.high
    assert paired_difference(one, low, seed=0) == found
    assert paired_difference(accuracies([9.0]), accuracies([1.0]), seed=0).noise  # one number is no evidence


def test_the_interval_is_that_of_a_bootstrap_by_hand() -> None:
    gaps = [4.0, -1.0, 2.0, 0.5, 3.0, -2.0, 1.0, 2.5, 0.0, 1.5]
    found = paired_difference(accuracies(gaps), accuracies([0.0] * 10), seed=1, samples=20000)
    error = standard_error(gaps)
    assert error is not None
    assert found.mean == pytest.approx(1.15)
    # of means of ten draws: normal enough, with the deviation that divides by n and not n - 1
    assert found.high - found.low == pytest.approx(2 * 1.96 * error * math.sqrt(9 / 10), rel=0.05)


def test_seeds_that_do_not_have_every_client() -> None:
    a, b = [{"a": 3.0, "b": 5.0}, {"a": 4.0}], [{"a": 1.0, "b": 1.0}, {"a": 3.0}]
    found = paired_difference(a, b, seed=0)
    assert found.mean == (3.0 + 1.0) / 2  # means over clients, then over seeds
    assert 1.0 <= found.low <= found.high <= 4.0


@pytest.mark.parametrize(
    ("a", "b"),
    [([{"a": 1.0}], []), ([{"a": 1.0}], [{"b": 1.0}]), ([], []), ([{}], [{}])],
)
def test_only_pairs_are_compared(a: list[dict[str, float]], b: list[dict[str, float]]) -> None:
    with pytest.raises(UserError, match="compare"):
        paired_difference(a, b, seed=0)


def test_rows_give_the_pairs(tmp_path: Path) -> None:
    result = go(tiny(method=[{"name": "fedavg"}, {"name": "local"}], seeds=[0, 1]), tmp_path)
    one, other = (row.accuracies("original/clients") for row in result.rows)
    found = paired_difference(one, other, seed=0)
    assert found.mean == pytest.approx(result.accuracy("fedavg") - result.accuracy("local"))
