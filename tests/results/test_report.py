"""The report: its numbers are those of the files, what is not there is not shown, and names stay names."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shutil
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedshift import UserError
from fedshift.measures.exact import ece, reliability
from fedshift.measures.predictions import Predictions
from fedshift.results.gather import gather
from fedshift.results.pages import report
from fedshift.results.pages.report import page_data, report_page, write_report
from fedshift.results.result import Result, Row
from fedshift.results.sections.clients import clients
from fedshift.results.sections.scores import standings
from fedshift.results.sections.views import Views
from fedshift.results.trouble import alarms
from fedshift.store.found import find_runs
from fedshift.store.metric import Metric
from fedshift.store.rows import ScoreRow
from fedshift.store.summary import ClientScore, summarise
from tests.runs.test_run import command, go, lines, tiny

STREAMS = [{"name": "original", "kind": "original"}, {"name": "bad", "kind": "corrupted", "severity": 3}]
METHODS = [
    {"name": "fedavg", "adapters": ["none", {"name": "tent", "label": "tent", "params": "all", "lr": 0.1}]},
    {"name": "fedthe", "adapters": ["the"]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    go(tiny(stream=STREAMS, method=METHODS, seeds=[0, 1], split={"unseen": ["south"]}), out)
    return out / "tiny"


@pytest.fixture(scope="module")
def data(folder: Path) -> dict[str, Any]:
    return page_data(gather([folder]).result)


def stored(folder: Path) -> dict[tuple[str, str, str, str], list[dict[str, Any]]]:
    """Score lines of all seeds by method, adapter, rule and column, read with nothing but json."""
    found: dict[tuple[str, str, str, str], list[dict[str, Any]]] = {}
    for path in sorted(folder.rglob("adapters/*.jsonl")):
        for line in lines(path):
            column = line["metric"].partition("/")[2]
            found.setdefault((path.parents[2].name, path.stem, line["selection"], column), []).append(line)
    return found


# ---- numbers -----------------------------------------------------------------------------------------------------------
def test_every_number_of_the_table_is_that_of_the_files(folder: Path, data: dict[str, Any]) -> None:
    views, compared = data["views"], 0
    columns = {"original": "original/clients", "bad": "bad/clients",
               "original (unseen)": "original/unseen", "bad (unseen)": "bad/unseen"}  # fmt: skip
    assert {column["title"] for column in views["columns"]} == set(columns)
    keys = {"client_mean": "client-mean", "pooled": "pooled", "worst10": "worst-10"}
    for (method, adapter, rule, column), scores in stored(folder).items():
        (row,) = [k for k, r in enumerate(views["rows"]) if (r["method"], r["adapter"]) == (method, adapter)]
        (place,) = [k for k, c in enumerate(views["columns"]) if columns[c["title"]] == column]
        for measure in (one["key"] for one in views["measures"]):
            for part, key in keys.items():
                numbers = [(s if measure == "accuracy" else s["measures"].get(measure, {})).get(key) for s in scores]
                cell = data["table"]["cells"][f"{rule}/{measure}/{part}"][row][place]
                if any(number is None for number in numbers):
                    assert cell is None
                    continue
                digits = 3 if measure == "loss" else 1
                mean, spread = statistics.fmean(numbers), statistics.stdev(numbers)
                assert cell[0] == pytest.approx(mean, abs=1e-5)
                assert cell[1] == f"{mean:.{digits}f}" + (f" ±{spread:.{digits}f}" if spread else "")
                compared += 1
    assert compared > 300


def test_clients_classes_and_telemetry_are_those_of_the_files(folder: Path, data: dict[str, Any]) -> None:
    views, found = data["views"], stored(folder)
    fedthe = next(k for k, row in enumerate(views["rows"]) if row["method"] == "fedthe")
    scores = found["fedthe", "the", "best-val", "original/clients"]
    names = data["clients"]["names"][0]
    accuracy = {n: statistics.fmean(100 * s["by-client"][n][1] / s["by-client"][n][0] for s in scores) for n in names}
    assert data["clients"]["values"]["best-val/accuracy"][0][fedthe] == [round(accuracy[n], 5) for n in names]
    worst = data["clients"]["worst"]["best-val/accuracy"][0][fedthe]
    assert [name for name, *_ in worst] == sorted(names, key=lambda name: accuracy[name])[:3]
    counts = np.zeros((len(data["classes"]["names"]),) * 2, int)
    for score in scores:
        cells = score["whole"]["confusion"]
        for label, taken, count in zip(cells[::3], cells[1::3], cells[2::3], strict=True):
            counts[label, taken] += count
    assert data["classes"]["found"]["best-val"][0][fedthe]["counts"] == counts.tolist()
    (told,) = data["telemetry"]
    means = [score["telemetry"]["e"]["mean"] for score in scores]
    assert told["found"]["best-val"][0]["text"].startswith(f"{statistics.fmean(means):.3f}")


def test_curves_are_means_over_seeds_with_their_deviation(folder: Path, data: dict[str, Any]) -> None:
    (curve,) = [curve for curve in data["curves"] if curve["title"] == "Training loss"]
    (line,) = [line for line in curve["series"] if line["name"] == "fedavg"]
    runs = [
        [row["train/loss"] for row in lines(path) if "train/loss" in row]
        for path in folder.glob("fedavg/*/metrics.jsonl")
    ]
    assert line["x"] == [1, 2]
    for k in (0, 1):
        mean, deviation = statistics.fmean(run[k] for run in runs), statistics.stdev(run[k] for run in runs)
        assert line["y"][k] == pytest.approx(mean, abs=1e-5)
        assert line["high"][k] - line["low"][k] == pytest.approx(2 * deviation, abs=3e-5)


def test_calibration_bins_sum_to_the_calibration_error() -> None:
    draws = np.random.default_rng(0)
    logits = draws.normal(size=(500, 4)) * 3
    some = Predictions(logits - np.log(np.exp(logits).sum(1, keepdims=True)), draws.integers(0, 4, 500))
    bins = reliability(some)
    assert sum(count for *_, count in bins) == 500
    assert sum(count * abs(sure - right) for sure, right, count in bins) / 500 == pytest.approx(ece(some))


# ---- what is more than noise ---------------------------------------------------------------------------------------------
def scored(method: str, accuracies: list[int]) -> Row:
    clients = {f"c{k}": ClientScore(100, value, 1.0) for k, value in enumerate(accuracies)}
    score = ScoreRow(Metric("global", "s"), summarise(clients), "best-val", task_hash="t", by_client=clients)
    return Row(method, "none", (), (0,), {("best-val", score.metric): [score]})


def test_only_differences_that_are_more_than_noise_are_marked() -> None:
    clear = Views(
        Result((scored("a", [50, 60, 70, 80]), scored("b", [61, 70, 80, 91]), scored("c", [40, 51, 60, 70])), ())
    )
    assert standings(clear, 0, "best-val", "accuracy") == {1: "best", 0: "second"}
    close = Views(
        Result((scored("a", [50, 60, 70, 80]), scored("b", [52, 59, 71, 79]), scored("c", [10, 10, 10, 10])), ())
    )
    assert standings(close, 0, "best-val", "accuracy") == {0: "tied", 1: "tied"}
    assert standings(Views(Result((scored("a", [50, 60]),), ())), 0, "best-val", "accuracy") == {}
    lonely = [scored("a", [33]), scored("b", [61]), scored("c", [59])]  # 33 beside 61 is no tie
    assert standings(Views(Result((*lonely,), ())), 0, "best-val", "accuracy") == {}
    assert list(alarms(lonely, "accuracy")) == [
        "s: one client and one seed, so that no row can be told from another there"
    ]
    assert list(alarms(lonely[:1], "accuracy")) == []


def test_rows_of_different_tasks_are_never_compared() -> None:
    one, other = scored("a", [50, 60, 70]), scored("b", [80, 90, 95])
    moved = {
        key: [ScoreRow.of({**score.to_json(), "task-hash": "u"}) for score in own] for key, own in other.values.items()
    }
    views = Views(Result((one, Row("b", "none", (), (0,), moved)), ()))
    assert len(views.tasks) == 2
    assert standings(views, 0, "best-val", "accuracy") == {}
    assert "2 tasks" in report.warnings(views)[0]


# ---- what is left out ----------------------------------------------------------------------------------------------------
def test_truncated_unfinished_foreign_and_doubled_folders_are_named(folder: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(folder, runs)
    cut, short, unfinished, bare = find_runs(runs)[:4]
    scores = next((cut / "adapters").glob("*.jsonl"))
    scores.write_text(scores.read_text()[:-40])
    history = (short / "metrics.jsonl").read_text().splitlines(keepends=True)
    (short / "metrics.jsonl").write_text(history[0])
    (unfinished / "done").unlink()
    (bare / "config.toml").unlink()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "done").write_text("yes")
    (tmp_path / "foreign" / "config.toml").write_text('colour = "red"')
    whole = folder / unfinished.relative_to(runs)
    for name in ("a", "b"):
        shutil.copytree(whole, tmp_path / "copies" / name)
    page = write_report([runs, tmp_path / "foreign", tmp_path / "copies"], tmp_path / "page.html")
    why = {one.path: one.why for one in page.left_out}
    assert "damaged" in why.pop(cut)
    assert "metrics.jsonl is damaged (it has 1 of " in why.pop(short)
    assert why.pop(unfinished) == "it is not finished"
    assert why.pop(bare) == "it has no config.toml"
    assert "config.toml is damaged (it has no 'method')" in why.pop(tmp_path / "foreign")
    assert why == {tmp_path / "copies" / "b": f"it is the same run as {tmp_path / 'copies' / 'a'}"}
    text = html.unescape((tmp_path / "page.html").read_text())
    assert all(str(one) in text for one in page.left_out)
    with pytest.raises(UserError, match="nothing to report"):
        write_report([tmp_path / "foreign"], tmp_path / "none.html")
    with pytest.raises(UserError, match="there is no folder"):
        write_report([tmp_path / "nowhere"], tmp_path / "none.html")
    assert not (tmp_path / "none.html").exists()


def test_nothing_is_shown_for_what_runs_do_not_have(tmp_path: Path) -> None:
    result = go(tiny(evaluate={"every": 1, "advice": False, "predictions": False}), tmp_path)
    page = report_page(result)
    assert set(page.sections) == {"deploy", "table", "curves", "clients", "classes", "costs", "made"}
    for missing in ("calibration", "robustness", "telemetry", "features"):
        assert f'id="{missing}"' not in page.html
    assert "no run was scored on validation images" in page.html


def test_what_was_inspected_is_shown(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "runs")
    places = {"stream": "original", "classes": ["a", "b"], "clients": ["x"], "unseen": [], "x": [0.0, 1.0], "y": [1.0, 0.5],
              "label": [0, 1], "prediction": [1, 1], "client": [0, 0]}  # fmt: skip
    row = {"name": "fedavg", "model": "global", "pad": {"mean": 1.25, "std": 0.0}, "risk": None, "accuracy": None}
    (tmp_path / "runs" / "inspect").mkdir()
    (tmp_path / "runs" / "inspect" / "inspect.json").write_text(
        json.dumps({"runs": [{"name": "fedavg", "tsne": places}], "methods": [row]})
    )
    found = page_data(gather([tmp_path / "runs"]).result)["features"]
    assert found["maps"][0]["label"] == [0, 1]
    assert found["rows"] == [["fedavg", "global", "1.25", "–", "–", "–"]]


# ---- the file ------------------------------------------------------------------------------------------------------------
def test_one_file_that_needs_nothing_else(folder: Path) -> None:
    page = report_page(gather([folder]).result, title="<b>Mine</b> & yours").html
    assert len(page.encode()) < 10_000_000
    assert page.count("plotly.js v") == 1
    scripts = re.findall(r"<script>(.*?)</script>", page, re.S)
    assert len(scripts) == 2
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    allowed = html.unescape(policy.group(1))
    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in allowed
    assert "default-src 'none'" in allowed
    assert "unsafe-inline" not in allowed.split("script-src")[1].split(";")[0]
    assert "unsafe-eval" not in allowed
    outside = re.sub(r"<script.*?</script>", "", page, flags=re.S)
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", outside)
    assert "<b>Mine</b>" not in page
    json.loads(re.search(r'type="application/json">(.*?)</script>', page, re.S).group(1))  # type: ignore[union-attr]


def test_the_command_writes_it_and_so_does_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = command(monkeypatch, capsys, "report", folder, "--out", tmp_path / "deep" / "page.html", "--no-pictures")
    assert str(tmp_path / "deep" / "page.html") in said
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
    said = command(monkeypatch, capsys, "run", *small, "--out", tmp_path, "--engine", "sequential")
    assert "Everything on one page" in said
    written = (tmp_path / "default" / "report.html").read_text()
    assert "Four digit domains" in written
    assert 'class="task"' in written
    monkeypatch.setattr("fedshift.cli.run.find_spec", lambda _: None)
    (tmp_path / "default" / "report.html").unlink()
    said = command(monkeypatch, capsys, "run", *small, "--out", tmp_path, "--engine", "sequential")
    assert 'pip install "fedshift[report]"' in said
    assert not (tmp_path / "default" / "report.html").exists()


def test_ten_thousand_clients_stay_small() -> None:
    rows = tuple(scored(f"m{k}", list(range(50, 90)) * 250) for k in range(8))
    found = clients(Views(Result(rows, ())))
    assert found is not None
    assert found["all"] == [10_000]
    assert len(report.as_json(found)) < 1_000_000
