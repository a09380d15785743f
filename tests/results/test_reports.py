"""What stands beside the scores: published numbers, notes, means over streams, bounds, what adapters tell."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from fedshift import Experiment, UserError
from fedshift.engines.base import Density, Score
from fedshift.results.collect import collect
from fedshift.results.plots.pictures import density_picture, map_picture, option_map, result_picture
from fedshift.results.result import Result, Row
from fedshift.runs.evaluate import Served, _row, _telemetry
from fedshift.runs.setup import make_task
from fedshift.store.found import find_runs
from fedshift.store.metric import Metric
from fedshift.store.rows import ScoreRow, Told
from fedshift.store.summary import Summary, mean_over, summarise
from tests.runs.test_run import POOL, command, go, lines, refuse, tiny

THREE = [
    {"name": "original", "kind": "original"},
    {"name": "corrupted", "kind": "corrupted"},
    {"name": "out-of-client", "kind": "out-of-client"},
]
TENT = {"name": "tent", "params": "all", "batch-size": 8, "predict-when": "after"}


def tented(lr: float, **more: object) -> dict[str, object]:
    return {**TENT, "lr": lr, "label": f"lr {lr}", **more}


def cells(result: Result, column: str) -> list[str]:
    (found,) = [c for c in result.table("last").columns if str(c.header).startswith(f"{column}\n")]
    return [cell.markup for cell in found.cells]


def mtimes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_nothing_is_said_of_validation_where_there_is_none(tmp_path: Path) -> None:
    chosen = go(tiny(), tmp_path / "with")
    last = go(tiny(split={"train": 0.8, "val": 0.0, "test": 0.2}), tmp_path / "without")
    assert "best pooled validation accuracy" in str(chosen.table().title)
    assert "after the last round" in str(last.table().title)


# ---- published numbers ---------------------------------------------------------------------------------------------------
def with_paper(paper: dict[str, object], **changes: object) -> Experiment:
    return tiny(stream=THREE, method=[{"name": "fedavg", "adapters": [{"name": "none", "paper": paper}]}], **changes)


def test_published_numbers_are_stored_and_shown(tmp_path: Path) -> None:
    result = go(with_paper({"original": 89.58, "elsewhere": 3.0}), tmp_path)
    stored = lines(result.folders[0] / "adapters" / "none.jsonl")
    assert {row["metric"]: row.get("paper") for row in stored} == {
        "global/original/clients": 89.58,
        "global/corrupted/clients": None,
        "global/out-of-client/clients": None,
    }
    (cell,), (other,) = cells(result, "original"), cells(result, "corrupted")
    assert cell == f"{result.accuracy('fedavg', rule='last'):.1f}[dim] (89.58)[/dim]"
    assert "(" not in other
    heads = [str(column.header) for column in result.table("last").columns]
    assert "original\nmean (paper)" in heads
    assert "corrupted\nmean" in heads
    dicts = [row for row in result.as_dicts() if row["metric"] == "global/original/clients"]
    assert {row["selection"]: row.get("paper") for row in dicts} == {"last": 89.58, "best-val": 89.58, "oracle": None}


def test_published_numbers_change_without_a_new_score(tmp_path: Path) -> None:
    (folder,) = go(with_paper({"original": 1.0}), tmp_path).folders
    before = mtimes(folder)
    assert go(with_paper({"original": 1.0}), tmp_path).folders == (folder,)
    assert mtimes(folder) == before  # nothing was written
    plain = lines(folder / "adapters" / "none.jsonl")
    again = go(with_paper({"corrupted": 2.0}), tmp_path)
    assert again.folders == (folder,)
    changed = {name for name, time in mtimes(folder).items() if before.get(name) != time}
    assert changed == {"none.jsonl"}
    row = again.rows[0]
    assert (row.paper("global/original/clients"), row.paper("global/corrupted/clients")) == (None, 2.0)
    marks = ("paper", "seal")
    unlabelled = [{k: v for k, v in r.items() if k not in marks} for r in lines(folder / "adapters" / "none.jsonl")]
    assert unlabelled == [{k: v for k, v in r.items() if k not in marks} for r in plain]


def test_numbers_of_unseen_clients_are_named_by_their_population(tmp_path: Path) -> None:
    paper = {"original": 1.0, "original/unseen": 2.0}
    result = go(with_paper(paper, split={"unseen": ["south"]}), tmp_path)
    row = result.rows[0]
    assert row.paper("global/original/clients") == 1.0
    assert row.paper("global/original/unseen") == 2.0


def test_every_point_of_a_sweep_has_its_own_numbers(tmp_path: Path) -> None:
    paper = {"train.lr=0.1": {"original": 1.0}, "train.lr=0.2": {"original": 2.0}}
    result = go(with_paper(paper, rounds=1, sweep={"train.lr": [0.1, 0.2, 0.3]}), tmp_path)
    assert [row.paper("global/original/clients") for row in result.rows] == [1.0, 2.0, None]


# ---- the mean over streams -----------------------------------------------------------------------------------------------
MEAN = {"every": 1, "oracle": True, "mean-of": ["original", "out-of-client"]}


def test_the_mean_over_streams_is_a_metric_of_its_own(tmp_path: Path) -> None:
    methods = [{"name": "fedavg", "adapters": [{"name": "none", "paper": {"mean": 70.0}}, tented(0.1)]}]
    result = go(tiny(stream=THREE, method=methods, evaluate=MEAN, seeds=[0, 1]), tmp_path)
    for row in result.rows:
        for rule in ("last", "best-val"):
            for seed in (0, 1):
                streams = ("original", "out-of-client")
                parts = [row.scores(f"global/{s}/clients", rule)[seed].summary.to_json() for s in streams]
                mean = row.scores("global/mean/clients", rule)[seed]
                numbers = mean.summary.to_json()
                for part in ("client-mean", "pooled", "worst-10", "loss"):
                    assert numbers[part] == pytest.approx(statistics.mean(p[part] for p in parts)), (rule, part)
                assert numbers["std"] == pytest.approx(statistics.stdev(p["client-mean"] for p in parts))
                assert (numbers["clients"], mean.of_streams) == (4, streams)
                assert mean.seed == seed
    assert [row.paper("global/mean/clients") for row in result.rows] == [70.0, None]
    assert str(result.metrics()[-1]) == "mean/clients"
    assert result.accuracy("fedavg", stream="mean") == result.rows[0].number("global/mean/clients")[0]  # type: ignore[index]
    assert cells(result, "mean")[0].endswith("[dim] (70.00)[/dim]")
    oracle = result.rows[0].number("global/mean/clients", "oracle")
    last = result.rows[0].number("global/mean/clients", "last")
    assert oracle is not None
    assert last is not None
    assert oracle[0] >= last[0]


def test_a_mean_can_be_asked_for_later(tmp_path: Path) -> None:
    plain = go(tiny(stream=THREE, evaluate={"every": 1}), tmp_path)
    (folder,) = plain.folders
    before = mtimes(folder)
    later = go(tiny(stream=THREE, evaluate={"every": 1, "mean-of": ["original", "corrupted"]}), tmp_path)
    assert later.folders == (folder,)  # it decides nothing about the training
    assert {name for name, time in mtimes(folder).items() if before[name] != time} == {"none.jsonl"}
    direct = go(tiny(stream=THREE, evaluate={"every": 1, "mean-of": ["original", "corrupted"]}), tmp_path / "direct")
    assert lines(folder / "adapters" / "none.jsonl") == lines(direct.folders[0] / "adapters" / "none.jsonl")
    again = go(tiny(stream=THREE, evaluate={"every": 1}), tmp_path)
    assert again.rows[0].values.keys() == plain.rows[0].values.keys()


def test_a_stream_without_a_number_leaves_the_mean_without_one() -> None:
    good = summarise({"a": Score(10, 9, 1.0)})
    assert mean_over([good, good]).client_mean == pytest.approx(90.0)
    for bad in (summarise({}), replace(good, client_mean=None)):
        mean = mean_over([good, bad])
        assert (mean.client_mean, mean.std) == (None, None)
    lossless = mean_over([good, replace(good, loss=None)])
    assert (lossless.client_mean, lossless.loss) == (pytest.approx(90.0), None)


def test_means_over_streams_of_an_own_task(tmp_path: Path) -> None:
    task = make_task(tiny(stream=THREE), 0, POOL)
    local = replace(task, streams={name: task.streams[name] for name in ("original", "out-of-client")})
    with pytest.raises(UserError, match="the task has no stream 'corrupted'; it has: original, out-of-client"):
        go(tiny(stream=THREE, evaluate={"mean-of": ["original", "corrupted"]}), tmp_path, data=local)
    with pytest.raises(UserError, match="a stream cannot be called 'mean'"):
        go(tiny(), tmp_path, data=replace(task, streams={"mean": task.streams["original"]}))


# ---- bounds --------------------------------------------------------------------------------------------------------------
def test_the_best_of_a_family_for_each_client(tmp_path: Path) -> None:
    rates = (0.0, 0.3, 3.0)
    adapters = [*(tented(rate, family="rates") for rate in rates), tented(0.1), {"name": "none", "family": "alone"}]
    experiment = tiny(stream=THREE, method=[{"name": "fedavg", "adapters": adapters}], evaluate=MEAN, seeds=[0, 1])
    result = go(experiment, tmp_path)
    assert [row.adapter for row in result.rows] == [
        "lr 0.0", "lr 0.3", "lr 3.0", "lr 0.1", "none", "rates, best per client (uses labels)",
    ]  # fmt: skip
    assert [row.bound for row in result.rows] == [False] * 5 + [True]
    family, bound = result.rows[:3], result.rows[-1]
    differ = False
    for rule in ("last", "best-val"):
        for seed in (0, 1):
            averages = []
            for stream in ("original", "corrupted", "out-of-client"):
                key = (rule, Metric("global", stream))
                each = [row.values[key][seed].by_client for row in family]
                best = {c: max(counts[c].correct / counts[c].samples for counts in each) for c in each[0]}
                reached = bound.values[key][seed].summary
                assert reached.client_mean == pytest.approx(100 * statistics.mean(best.values()))
                assert reached.worst10 == pytest.approx(100 * min(best.values()))
                single = max(row.values[key][seed].summary.client_mean or 0 for row in family)
                assert reached.client_mean is not None
                assert reached.client_mean >= single - 1e-9
                differ |= reached.client_mean > single + 1e-9
                averages.append(reached.client_mean)
            mean = bound.scores("global/mean/clients", rule)[seed].summary.client_mean
            assert mean == pytest.approx((averages[0] + averages[2]) / 2)
    assert differ  # no single rate is the best for everybody
    assert not list(tmp_path.rglob("*best per client*"))  # never stored as if it were an adapter
    # an oracle is never the best row, and what is best does not depend on it
    for column in ("original", "corrupted", "out-of-client", "mean"):
        found = cells(result, column)
        assert "bold" not in found[-1]
        assert any("bold" in cell for cell in found[:-1])
    assert {row["adapter"] for row in result.as_dicts() if row.get("bound")} == {bound.adapter}
    shown = collect(find_runs(tmp_path))
    assert next(row for row in shown.rows if row.bound).values == bound.values
    json.loads(json.dumps(shown.as_dicts()), parse_constant=refuse)
    result_picture(result, tmp_path / "bound.png", "last")


def test_a_family_of_those_that_were_asked_for(tmp_path: Path) -> None:
    def rows(*rates: float) -> list[str]:
        adapters = [tented(rate, family="rates") for rate in rates]
        return [row.adapter for row in go(tiny(method=[{"name": "fedavg", "adapters": adapters}]), tmp_path).rows]

    assert rows(0.0, 0.3)[-1].startswith("rates, best")
    assert rows(0.0) == ["lr 0.0"]  # one alone is no family, though another one's scores are there


# ---- what adapters tell --------------------------------------------------------------------------------------------------
def score(samples: int, bins: dict[int, int], total: float, name: str = "e") -> Score:
    counts = tuple(bins.get(place, 0) for place in range(20))
    return Score(samples, 1, 1.0, {name: Density(total, counts)})


def test_densities_are_added_up_over_clients() -> None:
    scores = {
        ("a", "s"): score(3, {0: 1, 19: 2}, 2.0),
        ("b", "s"): score(1, {19: 1}, 1.0),
        ("a", "t"): score(1, {3: 1}, 0.2),
    }
    row = _row(Served("personal", "clients", {}), "s", scores)
    assert row.telemetry == {"e": Told(0.75, (1, *[0] * 18, 3))}
    silent = _row(Served("personal", "clients", {}), "s", {("a", "s"): Score(1, 1, 1.0)})
    assert "telemetry" not in silent.to_json()
    assert _telemetry([score(2, {1: 2}, 0.1), Score(4, 1, 1.0)])["e"].counts[1] == 2


def told(stream: str, counts: list[int], mean: float) -> ScoreRow:
    summary = Summary(50.0, 50.0, 1.0, 40.0, 1.0, clients=4)
    return ScoreRow(Metric("personal", stream), summary, "best-val", telemetry={"e": Told(mean, tuple(counts))})


def made_up() -> Result:
    low, high = [10, *[1] * 18, 0], [0, *[1] * 18, 10]
    plain = replace(told("mean", low, 0.2), telemetry={})
    rows = [
        told("original", low, 0.2),
        told("original", low, 0.3),
        *[told("out-of-client", high, 0.8)] * 2,
        *[plain] * 2,
    ]
    values = {("best-val", row.metric): [other for other in rows if other.metric == row.metric] for row in rows}
    cost = {"bytes-up": 1.0, "bytes-down": 1.0, "seconds-per-round": 1.0}
    silent = {key: [replace(row, telemetry={}) for row in found] for key, found in values.items()}
    whole = (Row("fedthe", "the", (), (0, 1), values, cost), Row("fedavg", "none", (), (0, 1), silent, cost))
    return Result(whole, ())


def test_the_table_and_the_picture_of_what_adapters_tell(tmp_path: Path) -> None:
    result = made_up()
    table = result.telemetry_table()
    assert table is not None
    assert [str(column.header) for column in table.columns] == [
        "method",
        "adapter",
        "name",
        "original",
        "out-of-client",
    ]
    assert [[str(cell) for cell in column.cells] for column in table.columns] == [
        ["fedthe"], ["the"], ["e"], ["0.250 ±0.071"], ["0.800"],
    ]  # fmt: skip
    density_picture(result, tmp_path / "densities.png")
    with Image.open(tmp_path / "densities.png") as picture:
        assert 300 <= picture.width <= 3000
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 20  # type: ignore[arg-type]
    silent = Result(result.rows[1:], ())
    assert silent.telemetry_table() is None
    assert result.telemetry_table("last") is None
    with pytest.raises(UserError, match="no adapter of these runs tells anything to draw"):
        density_picture(silent, tmp_path / "none.png")


# ---- notes, and all of it on the command line -----------------------------------------------------------------------------
FILE = """
name = "noted"
rounds = 1
baselines = false
notes = ["Their [bold] split differs."]
[data]
size = 8
[model]
name = "mlp"
hidden = [4]
[evaluate]
every = 0
mean-of = ["original", "corrupted"]
[[stream]]
name = "original"
kind = "original"
[[stream]]
name = "corrupted"
kind = "corrupted"
[[method]]
name = "fedthe"
adapters = [
  { name = "the", e = 0.0, label = "e = 0", family = "fixed e" },
  { name = "the", e = 1.0, label = "e = 1", family = "fixed e", paper = { original = 64.25, mean = 60.0 } },
]
"""


def test_run_and_show_print_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "noted.toml").write_text(FILE)
    run = ["run", tmp_path / "noted.toml", "--out", tmp_path / "runs", "--engine", "sequential"]
    said = command(monkeypatch, capsys, *run)
    shown = command(monkeypatch, capsys, "show", tmp_path / "runs")
    for text in (said, shown):
        for words in (
            "mean (paper)", "(64.25)", "(60.00)", "fixed e, best per client (uses labels)", "What adapters tell", "mean",
            "- Their [bold] split differs.",
        ):  # fmt: skip
            assert words in text, words
    assert "densities.png" in said
    assert (tmp_path / "runs" / "noted" / "densities.png").stat().st_size > 1000
    (folder,) = find_runs(tmp_path / "runs")
    assert (folder / "notes.txt").read_text() == "Their [bold] split differs.\n"
    assert "notes" not in (folder / "config.toml").read_text()
    assert "mean-of" not in (folder / "config.toml").read_text()
    rows = json.loads(
        command(monkeypatch, capsys, "show", tmp_path / "runs", "--format", "json"), parse_constant=refuse
    )
    assert {row["paper"] for row in rows if "paper" in row} == {64.25, 60.0}
    assert {tuple(row["telemetry"]) for row in rows if "telemetry" in row} == {("e",)}
    # the note goes when it is taken out, and the run is not run again
    again = command(monkeypatch, capsys, *run, "-c", "notes=[]")
    assert "finished before" in again
    assert "split differs" not in again
    assert not (folder / "notes.txt").exists()


def test_a_map_over_two_options(tmp_path: Path) -> None:
    adapters = [{"name": "the", "alpha": a, "beta": b} for a in (0.1, 0.2) for b in (0.1, 0.3, 0.5)]
    result = go(tiny(method=[{"name": "fedthe", "adapters": [*adapters, "none"]}]), tmp_path)
    found = option_map(result)
    assert found is not None
    assert found[:2] == ("alpha", "beta")
    assert len(found[2]) == 6
    map_picture(result, tmp_path / "map.png")
    assert (tmp_path / "map.png").stat().st_size > 1000
    plain = go(tiny(method=[{"name": "fedthe", "adapters": adapters[:-1]}]), tmp_path)
    assert option_map(plain) is None  # a cell is missing
    with pytest.raises(UserError, match="every combination"):
        map_picture(plain, tmp_path / "none.png")
