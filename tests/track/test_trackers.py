"""Trackers against their real offline stores: what is read back is what is on disk."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from fedshift import UserError
from fedshift.runs.tracking import numbers_of
from fedshift.track import MLflow, TensorBoard, WandB, tracker_of
from tests.runs.test_run import command, go, lines, tiny


class Kept:
    """A tracker that keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []

    def begin(self, run: str, settings: Mapping[str, Any]) -> None:
        self.said.append(("begin", run, dict(settings)))

    def log(self, run: str, step: int, numbers: Mapping[str, float]) -> None:
        self.said.append(("log", run, step, dict(numbers)))

    def end(self, run: str, numbers: Mapping[str, float]) -> None:
        self.said.append(("end", run, dict(numbers)))

    def close(self) -> None:
        self.said.append(("close",))


def losses(folder: Path) -> list[float]:
    return [line["train/loss"] for line in lines(folder / "metrics.jsonl") if "train/loss" in line]


def score(folder: Path) -> float:
    rows = lines(folder / "adapters" / "none.jsonl")
    return next(
        row["client-mean"] for row in rows if row["selection"] == "last" and row["metric"].endswith("original/clients")
    )


NAME = "scores/last/none/global/original/clients/accuracy"


def test_a_tracker_is_told_everything_that_is_on_disk(tmp_path: Path) -> None:
    kept = Kept()
    (folder,) = go(tiny(), tmp_path, trackers=[kept]).folders
    words = [said[0] for said in kept.said]
    assert (words[0], words[-2:]) == ("begin", ["end", "close"])
    run = str(folder.relative_to(folder.parents[1]))
    assert {said[1] for said in kept.said[:-1]} == {run}
    assert kept.said[0][2]["train.lr"] == 0.1
    told = [(step, numbers) for _, _, step, numbers in kept.said[1:-2]]
    assert told == [(line["round"], numbers_of(line)) for line in lines(folder / "metrics.jsonl")]
    assert kept.said[-2][2][NAME] == score(folder)
    again = Kept()
    go(tiny(), tmp_path, trackers=[again])  # nothing is run again, and all is told again
    assert [said[0] for said in again.said] == words


@pytest.mark.system
def test_runs_in_other_processes_are_told_too(tmp_path: Path) -> None:
    kept = Kept()
    result = go(tiny(seeds=[0, 1]), tmp_path, trackers=[kept], processes=2)
    assert {said[1] for said in kept.said if said[0] == "end"} == {
        str(folder.relative_to(folder.parents[1])) for folder in result.folders
    }


def test_a_tracker_that_fails_ends_no_training(tmp_path: Path) -> None:
    class Full(Kept):
        def log(self, run: str, step: int, numbers: Mapping[str, float]) -> None:
            raise OSError("no space left")

    kept = Kept()
    with pytest.warns(UserWarning, match="Full is told nothing more: OSError: no space left"):
        go(tiny(), tmp_path, trackers=[Full(), kept])
    assert kept.said[-1] == ("close",)


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="no tensorboard: pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder,) = go(tiny(), tmp_path, trackers=[TensorBoard(tmp_path / "board")]).folders
    stored = EventAccumulator(str(tmp_path / "board" / folder.relative_to(folder.parents[1])))
    stored.Reload()
    assert [event.value for event in stored.Scalars("train/loss")] == pytest.approx(losses(folder), rel=1e-6)
    assert [event.step for event in stored.Scalars("train/loss")] == [1, 2]
    assert stored.Scalars(NAME)[0].value == pytest.approx(score(folder), rel=1e-6)


@pytest.mark.system
def test_mlflow(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="no mlflow: pip install mlflow-skinny")
    from mlflow.tracking import MlflowClient

    uri = f"file:{tmp_path / 'mlruns'}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (folder,) = go(tiny(), tmp_path, trackers=[MLflow(uri)]).folders
        client = MlflowClient(tracking_uri=uri)
        experiment = client.get_experiment_by_name("fedshift")
        assert experiment is not None
        (run,) = client.search_runs([experiment.experiment_id])
        history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in history] == list(enumerate(losses(folder), 1))
    assert run.data.metrics[NAME] == score(folder)
    assert run.data.params["train.lr"] == "0.1"
    assert run.info.status == "FINISHED"
    assert run.info.run_name == str(folder.relative_to(folder.parents[1]))


def records(content: bytes) -> Iterator[bytes]:
    """Of a file as W&B writes it: LevelDB's log of 32 KiB blocks, after seven bytes that belong to the first."""
    assert content.startswith(b":W&B")
    at, parts = 7, b""
    while at + 7 <= len(content):
        left = 0x8000 - at % 0x8000
        if left < 7:  # no room for a head: the block is padded
            at += left
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last of several
            yield parts
            parts = b""


@pytest.mark.system
def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="no wandb: pip install wandb")
    from wandb.proto import wandb_internal_pb2

    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "own"))
    (folder,) = go(tiny(), tmp_path, trackers=[WandB("mine", tmp_path / "store")]).folders
    (file,) = (tmp_path / "store").rglob("*.wandb")

    def stored() -> list[Any]:
        return [wandb_internal_pb2.Record.FromString(record) for record in records(file.read_bytes())]

    until = time.monotonic() + 20
    while not any(record.HasField("exit") for record in stored()):  # W&B writes in a process of its own
        assert time.monotonic() < until
        time.sleep(0.05)
    found, summary, project = [], {}, ""
    for record in stored():
        project = record.run.project or project
        row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        found += [row] if "train/loss" in row else []
        summary |= {"/".join(u.nested_key) or u.key: json.loads(u.value_json) for u in record.summary.update}
    assert project == "mine"
    assert [row["train/loss"] for row in found] == losses(folder)
    assert [row["round"] for row in found] == [1, 2]
    assert summary[NAME] == score(folder)


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard", reason="no tensorboard: pip install tensorboard")
    small = [
        "-c",
        "rounds=1",
        "-c",
        "baselines=false",
        "-c",
        "data.size=8",
        "-c",
        "model.name=mlp",
        "-c",
        "method=[{name='fedavg'}]",
    ]
    board = f"tensorboard:{tmp_path / 'board'}"
    command(monkeypatch, capsys, "run", *small, "--out", tmp_path, "--engine", "sequential", "--track", board)
    assert list((tmp_path / "board" / "fedavg").rglob("events.*"))
    with pytest.raises(UserError, match="there is no tracker 'paper'"):
        tracker_of("paper")


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r'pip install "fedshift\[wandb\]"'):
        WandB()
