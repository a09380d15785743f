"""Advice: what to deploy, by validation images alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedshift import Result, UserError
from fedshift.runs.setup import make_task, make_twin
from tests.runs.test_run import command
from tests.trust.worlds import go, harmful_adapters, skewed, skewed_pool

STREAMS = [
    {"name": "original", "kind": "original"},
    {"name": "corrupted", "kind": "corrupted", "severity": 3},
    {"name": "away", "kind": "out-of-client"},
    {"name": "both", "kind": "mixture", "of": ["original", "corrupted"]},
]
METHODS = [
    {"name": "fedavg", "adapters": ["none", "benign", "blind"]},
    {"name": "fedbn", "adapters": ["none", "benign"]},
]
PLAIN = {"train": 0.4, "val": 0.3, "test": 0.3, "stratify": False}  # a stratified split looks at all labels, before
UNSEEN = {**PLAIN, "unseen": ["east"]}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    with harmful_adapters():
        experiment = skewed(method=METHODS, baselines=True, stream=STREAMS, rounds=10, model=NORMED, split=PLAIN)
        return go(experiment, tmp_path_factory.mktemp("advice"))


NORMED = {"name": "mlp", "hidden": [16], "norm": True}


def told(result: Result) -> dict[str, Any]:
    """Everything but what a clock says."""
    found: dict[str, Any] = json.loads(result.advice().to_json())
    for candidate in [*found["candidates"], found["recommended"] or {}]:
        candidate.pop("cost", None)
    found["reasons"] = [reason for reason in found["reasons"] if not reason.startswith("Cost:")]
    return found


def test_none_is_recommended_where_adaptation_does_harm(result: Result) -> None:
    advice = result.advice()
    assert advice.chosen is not None
    assert advice.chosen.adapter == "none"
    harmful = [one for one in advice.candidates if one.adapter != "none"]
    assert len(harmful) == 3
    assert all(one.against for one in harmful)
    by_name = {(one.method, one.adapter): one for one in advice.candidates}
    assert "predicts one class" in by_name["fedavg", "benign"].against
    assert any("lowers balanced accuracy" in reason for reason in by_name["fedavg", "blind"].against)
    assert by_name["majority", "none"].against[0] == "it is the floor"


def test_it_says_why_whom_it_serves_worst_and_what_it_costs(result: Result) -> None:
    said = " ".join(result.advice().lines())
    for words in ("Deploy ", "Refused: ", "Worst served: client", "Cost: ", "original, corrupted, away, both"):
        assert words in said


def test_no_test_label_is_read(result: Result, tmp_path: Path) -> None:
    """All test labels permuted: the advice is the same, number by number."""
    experiment = skewed(method=METHODS, baselines=True, stream=STREAMS, rounds=10, model=NORMED, split=PLAIN)
    task = make_task(experiment, 0, skewed_pool())
    tests = torch.cat([client.test for client in task.clients])
    pool = skewed_pool()
    labels = pool.labels.clone()
    labels[tests] = labels[tests][torch.randperm(len(tests), generator=torch.Generator().manual_seed(0))]
    assert not torch.equal(labels, pool.labels)
    with harmful_adapters():
        other = go(experiment, tmp_path, data=replace(pool, labels=labels))
    assert other.accuracy("fedavg") != result.accuracy("fedavg")
    assert told(other) == told(result)


def test_no_test_label_of_an_unseen_client_is_read_either(tmp_path: Path) -> None:
    experiment = skewed(method=[{"name": "fedavg", "adapters": ["none", "t3a"]}], split=UNSEEN)
    pool = skewed_pool()
    task = make_task(experiment, 0, pool)
    labels = pool.labels.clone()
    labels[task.unseen[0].test] = labels[task.unseen[0].test].roll(7)
    one = go(experiment, tmp_path / "one", data=pool)
    other = go(experiment, tmp_path / "other", data=replace(pool, labels=labels))
    assert told(one) == told(other)
    assert "original (unseen)" in one.advice().streams
    (score,) = next(scores for metric, scores in one.rows[0].twins.items() if metric.population == "unseen")
    assert set(score.measured) == {"north", "south", "west"}  # the clients that trained stand for it


def test_twins_hold_validation_images_only() -> None:
    experiment = skewed(stream=[*STREAMS, {"name": "home", "kind": "left-out"}], split=UNSEEN)
    pool = skewed_pool()
    task, twin = make_task(experiment, 0, pool), make_twin(experiment, 0, pool)
    assert list(twin.streams) == list(task.streams)
    validation = torch.cat([task.ids[client.val] for client in task.clients])
    for name in ("original", "corrupted", "away", "home"):
        stream = twin.streams[name]
        shown = torch.cat([stream.ids[index] for index in stream.index.values()])
        assert torch.isin(shown, validation).all(), name
    for mine, theirs in zip(task.clients, twin.clients, strict=True):
        assert torch.equal(mine.train, theirs.train)
        assert torch.equal(mine.val, theirs.test)
    assert not twin.unseen


def test_a_useful_adapter_is_recommended(tmp_path: Path) -> None:
    """Low contrast, which new statistics of normalisation undo; and the same where it is noise."""
    experiment = skewed(
        method=[{"name": "fedavg", "adapters": ["none", "bn"]}], rounds=12, model=NORMED,
        split={"train": 0.5, "val": 0.3, "test": 0.2},
        stream=[{"name": "pale", "kind": "corrupted", "names": ["contrast"], "severity": 5}],
    )  # fmt: skip
    advice = go(experiment, tmp_path / "hard", data=skewed_pool(clear=30)).advice()
    assert advice.chosen is not None
    assert advice.chosen.adapter == "bn"
    assert any(reason.startswith("Its adapter gains +") for reason in advice.reasons)
    easy = go(experiment, tmp_path / "easy", data=skewed_pool(clear=45)).advice()
    assert easy.chosen is not None
    assert easy.chosen.adapter == "none"
    assert any(reason.startswith("No adapter: what one gains is noise") for reason in easy.reasons)


def test_where_nothing_differs_it_cannot_tell(tmp_path: Path) -> None:
    methods = [{"name": "fedavg"}, {"name": "fedprox", "mu": 1e-9}]
    advice = go(skewed(method=methods), tmp_path).advice()
    assert any(reason.startswith("Cannot tell it from") for reason in advice.reasons)


def test_without_validation_images_there_is_no_advice(tmp_path: Path) -> None:
    found = go(skewed(split={"train": 0.7, "val": 0.0, "test": 0.3}), tmp_path)
    with pytest.raises(UserError, match="there is nothing to advise by"):
        found.advice()


def test_the_command(result: Result, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder = result.folders[0].parents[1]
    said = command(monkeypatch, capsys, "advise", folder)
    assert "Deploy finetune with no adapter." in said
    assert "predicts one class" in said
    as_json = json.loads(command(monkeypatch, capsys, "advise", folder, "--format", "json"))
    assert as_json["recommended"]["adapter"] == "none"
    by_loss = json.loads(command(monkeypatch, capsys, "advise", folder, "--format", "json", "--metric", "loss"))
    levels = [one["level"] for one in by_loss["candidates"]]
    assert levels == sorted(levels)  # less is better


def test_what_diverged_is_never_recommended(tmp_path: Path) -> None:
    """An adapter can hide that a model answers with one class."""
    methods = [{"name": "fedavg", "adapters": ["none", "bn", "tent"]}]
    advice = go(skewed(method=methods, model=NORMED, train={"lr": 1e9, "batch-size": 16}), tmp_path).advice()
    assert advice.chosen is None
    assert all("training diverged" in candidate.against for candidate in advice.candidates)
    assert advice.lines()[0] == "Nothing here can be recommended."
