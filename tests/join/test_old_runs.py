"""Runs and artefacts of version 0.1 (``tests/data_old``) are read: the same tables, answers and models as then."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import fedshift
from fedshift import Experiment, cli
from fedshift.join import join
from fedshift.join.images import read_images
from fedshift.runs.deployment import Snapshot
from fedshift.runs.open import open_run

OLD = Path(__file__).parent.parent / "data_old"
METHODS = {"fedbn": "personal", "fedavg": "global"}
ADAPTERS = ("none", "tent")
PAIRS = [(method, adapter) for method in METHODS for adapter in ADAPTERS]
CHANGES = [
    *("name=run-0.1", "rounds=2", "baselines=false", "data.size=8", 'data.domains=["pen","paper","china"]'),
    *("data.limit=600", 'split.unseen=["paper"]', 'model={name="mlp",hidden=[8],norm=true}'),
    *('precision="float32"', 'stream=[{name="original",kind="original"}]'),  # then the default precision
    "train={lr=0.1,batch-size=16,local-epochs=4,momentum=0.9}",
    'method=[{name="fedbn",adapters=["none","tent"]},{name="fedavg",adapters=["none","tent"]}]',
]  # of the default experiment: see README.md there


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A copy that may be written to."""
    return Path(shutil.copytree(OLD / "run-0.1", tmp_path / "run-0.1"))


def folder_of(runs: Path, method: str) -> Path:
    (found,) = (runs / method).iterdir()
    return found


def stored(runs: Path, method: str, adapter: str) -> list[dict[str, Any]]:
    """An adapter's scores as they were written then."""
    lines = (folder_of(runs, method) / "adapters" / f"{adapter}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def answered(method: str, adapter: str) -> tuple[list[str], list[float]]:
    """Labels and confidences that ``fedshift join`` gave then."""
    with open(folder_of(OLD / "run-0.1", method) / "joined" / f"paper-{adapter}" / "predictions.csv") as file:
        rows = list(csv.DictReader(file))
    assert len({row["label"] for row in rows}) > 2, "with one answer to everything this would show nothing"
    return [row["label"] for row in rows], [float(row["confidence"]) for row in rows]


def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    monkeypatch.setattr("sys.argv", ["fedshift", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    assert ended.value.code == 0, said.err
    return said.out


def test_it_is_an_old_one() -> None:
    for method in METHODS:
        run = folder_of(OLD / "run-0.1", method)
        assert (run / "welcome.safetensors").is_file()
        assert not (run / "snapshot.safetensors").exists()
        assert '"left-out"' in (run / "metrics.jsonl").read_text()
        for adapter in ADAPTERS:
            assert (run / "joined" / f"paper-{adapter}" / "config.toml").read_text().startswith("format = 1\n")


# ---- show -----------------------------------------------------------------------------------------------------------------
def test_show_prints_its_scores(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = json.loads(command(monkeypatch, capsys, "show", runs, "--format", "json"))
    then = ("metric", "selection", "round", "avg", "all", "worst", "loss")
    keys = ("metric", "selection", "round", "client-mean", "pooled", "worst-10", "loss")
    for method, adapter in PAIRS:
        own = [row for row in shown if (row["method"], row["adapter"]) == (method, adapter)]
        own = [row for row in own if row["client-mean"] is not None and row["selection"] in ("last", "best-val")]
        expected = stored(runs, method, adapter)
        assert {row["metric"].split("/")[2] for row in expected} == {"clients", "unseen"}
        listed = [[row[key] for key in keys] for row in own]
        assert sorted(listed, key=str) == sorted(([row[key] for key in then] for row in expected), key=str)
        costs = json.loads((folder_of(runs, method) / "costs.json").read_text())
        assert all(row["parameters"] == costs["parameters"] for row in own)
    table = command(monkeypatch, capsys, "show", runs)
    for method, adapter in PAIRS:
        (row,) = (
            row
            for row in stored(runs, method, adapter)
            if row["selection"] == "best-val" and row["metric"].endswith("/unseen")
        )
        lines = [line.split() for line in table.splitlines() if method in line.split() and adapter in line.split()]
        assert f"{row['avg']:.1f}" in lines[0]


# ---- join -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("method", "adapter"), PAIRS)
def test_an_unseen_client_joins_as_it_did_then(
    method: str,
    adapter: str,
    runs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    arguments = ("--method", method, "--data", OLD / "paper", "--adapter", adapter, "--out", out)
    said = command(monkeypatch, capsys, "join", runs, *arguments)
    assert f"paper joined {method}, seed 0 (round 2, the best on validation), with adapter {adapter}" in said
    labels, confidences = answered(method, adapter)
    with open(out / "predictions.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["label"] for row in rows] == labels
    assert [float(row["confidence"]) for row in rows] == pytest.approx(confidences, abs=1e-5)


def test_its_snapshot_is_that_of_the_last_phases_with_what_clients_gave() -> None:
    opened = open_run(folder_of(OLD / "run-0.1", "fedbn"))
    snapshot = opened.snapshot("tent")
    assert (snapshot.ctx.round, snapshot.ctx.rounds, snapshot.ctx.clients, snapshot.ctx.stage) == (2, 2, 2, "final")
    assert (snapshot.seed, snapshot.shape, snapshot.classes) == (0, (3, 8, 8), tuple("0123456789"))
    assert set(snapshot.server) == {"model", "gifts"}
    assert set(snapshot.server["gifts"]) == opened.setup.method.private(snapshot.ctx)


# ---- inspect --------------------------------------------------------------------------------------------------------------
def test_inspect_makes_its_task_and_models_again(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command(monkeypatch, capsys, "inspect", runs, "--samples", 20, "--out", tmp_path / "look")
    found = {run["method"]: run for run in json.loads((tmp_path / "look" / "inspect.json").read_text())["runs"]}
    assert set(found) == set(METHODS)
    for method, kind in METHODS.items():
        look = found[method]
        assert (look["model"], look["round"], look["unseen"]) == (kind, 2, ["paper"])
        for population in ("clients", "unseen"):
            (row,) = (
                row
                for row in stored(runs, method, "none")
                if row["selection"] == "best-val" and row["metric"] == f"{kind}/original/{population}"
            )
            assert look["task-hash"] == row["task-hash"]
            for client, (samples, correct, loss) in row["by-client"].items():
                table = look["confusion"][client]
                assert (sum(map(sum, table)), sum(table[i][i] for i in range(10))) == (samples, correct)
                if population == "clients":
                    assert look["risk"]["by-client"][client] == pytest.approx(loss / samples, abs=1e-5)


# ---- run ------------------------------------------------------------------------------------------------------------------
def test_the_same_experiment_finds_it_finished_and_adds_what_is_new(runs: Path, tmp_path: Path) -> None:
    old = {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()}
    then = Experiment.load(OLD / "default.toml", CHANGES)
    then = then.model_copy(update={"split": {key: value for key, value in then.split.items() if key != "stratify"}})
    result = fedshift.run(then, runs.parent, engine="sequential")
    assert sorted(result.folders) == sorted(folder_of(runs, method) for method in METHODS)
    served = {"artefacts/complete", *(f"artefacts/{client}/config.toml" for client in ("pen", "china", "paper"))}
    served |= {f"artefacts/{client}/model.safetensors" for client in ("pen", "china", "paper")}
    served |= {f"artefacts/{client}/known.safetensors" for client in ("pen", "china")}  # who has images of its own
    added = {folder / name for folder in result.folders for name in ("snapshot.safetensors", *served)}
    added |= {runs / "plan.json"} | {folder_of(runs, method) / f"twins/{adapter}.jsonl" for method, adapter in PAIRS}
    now = {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()}
    assert {path: data for path, data in now.items() if path not in added} == old
    assert set(now) == set(old) | added
    for method, adapter in PAIRS:
        run = folder_of(runs, method)
        then, again = Snapshot.load(folder_of(OLD / "run-0.1", method)), Snapshot.load(run)
        assert (then.ctx, then.task_hash, then.networks) == (again.ctx, again.task_hash, again.networks)
        joined = join(run, OLD / "paper", adapter, tmp_path / f"{method}-{adapter}")
        assert [item.label for item in joined.predictions] == answered(method, adapter)[0]


# ---- artefacts ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("method", "adapter"), PAIRS)
def test_an_artefact_of_format_1_gives_the_logits_it_gave_then(method: str, adapter: str) -> None:
    folder = folder_of(OLD / "run-0.1", method) / "joined" / f"paper-{adapter}"
    artefact = fedshift.load(folder)
    pixels = read_images(OLD / "paper", (3, 8, 8), artefact.classes).pixels
    x = pixels / 255
    logits = artefact(x)
    expected = torch.tensor(json.loads((OLD / "artefacts.json").read_text())[f"{method}/paper-{adapter}"])
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    module = artefact.module()
    torch.testing.assert_close(module(pixels.movedim(1, -1)), logits)
    torch.testing.assert_close(module.network(artefact.method.arch.normalise(x)), logits)
    if adapter == "none":  # tent answers with the statistics of its batch, and goes on
        labels, confidences = answered(method, adapter)
        chances, codes = logits.double().softmax(1).max(1)
        assert [artefact.classes[i] for i in codes.tolist()] == labels
        assert chances.tolist() == pytest.approx(confidences, abs=1e-5)
    else:
        plain = fedshift.load(folder.with_name("paper-none"))
        moved = {
            name for name, leaf in artefact.state["model"].items() if not torch.equal(leaf, plain.state["model"][name])
        }
        assert moved == {"body.2.weight", "body.2.bias"}
