"""Ours beside the paper's: the same numbers as the rows have, who is first, and whether that is noise."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, stdev

import pytest

from fedshift.results.beside import Comparison, compared
from fedshift.results.collect import collect
from fedshift.results.result import Result
from fedshift.results.stats import paired_difference
from fedshift.store.found import find_runs
from tests.runs.test_run import command, go, tiny

STREAMS = [{"name": "original", "kind": "original"}, {"name": "corrupted", "kind": "corrupted"}]
METHODS = [
    {"name": "local", "label": "Local"},
    {
        "name": "fedavg",
        "label": "FedAvg",
        "adapters": [
            {"name": "none", "paper": {"original": 81.0, "corrupted": 50.0, "mean": 65.5}},
            {"name": "tent", "label": "TENT", "params": "all", "paper": {"mean": 70.25}},
        ],
    },
    {"name": "majority", "label": "Majority", "adapters": [{"name": "none", "paper": {"mean": 10.0}}]},
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("beside")
    mean = {"every": 0, "mean-of": ["original", "corrupted"]}
    go(tiny(method=METHODS, seeds=[0, 1], stream=STREAMS, evaluate=mean), out)
    return out


@pytest.fixture(scope="module")
def result(runs: Path) -> Result:
    return collect(find_runs(runs))


def test_numbers_are_those_of_the_rows(result: Result) -> None:
    table = compared(result)
    assert set(table.columns) == {"original", "corrupted", "mean"}
    assert set(table.rows) == {"Local", "FedAvg", "TENT", "Majority"}
    for row in result.rows:
        cells = table.rows[row.method if row.adapter == "none" else row.adapter]
        for column, number in cells.items():
            seeds = [score.summary.client_mean for score in row.scores(f"{column}/clients")]
            assert number.seeds == tuple(seeds)
            assert number.mean == pytest.approx(fmean(seeds))  # type: ignore[type-var]
            assert number.std == pytest.approx(stdev(seeds))  # type: ignore[type-var]
            assert number.paper == row.paper(f"{column}/clients")
    clients = next(row for row in result.rows if row.method == "Local").by_client("original/clients").values()
    assert table.rows["Local"]["original"].error == pytest.approx(stdev(clients) / len(clients) ** 0.5)


def test_rows_are_ranked_by_the_papers_mean_and_told_apart_in_pairs(result: Result) -> None:
    table = compared(result)
    assert {title: number.mean for title, number in table.headline.items()} == {
        title: cells["mean"].mean for title, cells in table.rows.items()
    }
    assert table.first == max(table.headline, key=lambda title: table.headline[title].mean)
    assert table.first_in_paper == "TENT"
    rows = {row.method if row.adapter == "none" else row.adapter: row for row in result.rows}

    def by_client(title: str) -> list[dict[str, float]]:
        parts = [rows[title].accuracies(f"{stream}/clients") for stream in ("original", "corrupted")]
        return [{c: (one[c] + other[c]) / 2 for c in one} for one, other in zip(*parts, strict=True)]

    for title, found in table.differences.items():
        expected = paired_difference(by_client(table.first), by_client(title), seed=0)
        assert (found["mean"], found["noise"]) == (round(expected.mean, 2), expected.noise)
    assert set(table.tied) == {title for title, found in table.differences.items() if found["low"] <= 0}
    first, second = table.sentences()
    assert first.startswith(f"First here: {table.first} with ")
    assert "the paper's first of these rows: TENT with 70.2" in first
    assert second.startswith(f"It is above {3 - len(table.tied)} of 3 other rows by more than noise")


def test_one_seed_says_that_it_cannot_tell_how_seeds_differ(result: Result, tmp_path: Path) -> None:
    told = "Of one seed, noise is how clients differ; seeds may differ more."
    assert told not in " ".join(compared(result).sentences())
    mean = {"every": 0, "mean-of": ["original", "corrupted"]}
    one = go(tiny(method=METHODS, seeds=[0], stream=STREAMS, evaluate=mean), tmp_path)
    assert compared(one).sentences()[1].endswith(told)


def test_an_upper_bound_is_shown_and_not_ranked(tmp_path: Path) -> None:
    paper = {"original": 90.0}
    plain = [{"name": "none", "paper": paper, "aside": True}]
    methods = [{"name": "centralised", "label": "Centralised", "adapters": plain}, *METHODS]
    table = compared(go(tiny(method=methods), tmp_path))
    assert table.rows["Centralised"]["original"].paper == 90.0
    assert "Centralised" not in table.headline
    assert "Centralised" not in " ".join(table.sentences())


def test_it_is_kept_as_json_and_read_back(result: Result) -> None:
    table = compared(result)
    kept = json.loads(json.dumps(table.to_json()))
    again = Comparison.of_json(kept)
    assert again.to_json() == table.to_json()
    assert (again.first, again.tied) == (table.first, table.tied)


def test_the_points_of_a_sweep_are_columns_of_one_row(tmp_path: Path) -> None:
    paper = {"train.lr=0.1": {"original": 50.0}, "train.lr=0.2": {"original": 70.0}}
    methods = [{"name": "fedavg", "adapters": [{"name": "none", "paper": paper}]}, {"name": "local"}]
    found = go(tiny(method=methods, sweep={"train.lr": [0.1, 0.2]}), tmp_path)
    table = compared(found)
    assert table.columns == ("original, 0.1", "original, 0.2")
    assert table.headline["fedavg"].paper == 60.0
    assert table.headline["fedavg"].mean == pytest.approx(fmean(n.mean for n in table.rows["fedavg"].values()))


def test_without_published_numbers_nothing_is_said(tmp_path: Path) -> None:
    table = compared(go(tiny(), tmp_path))
    assert table.sentences() == []
    assert table.sentences(always=True) == [f"First here: fedavg with {table.headline['fedavg'].mean:.1f}."]


def test_a_command_says_who_is_first(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "the paper's first of these rows: TENT with 70.2" in command(monkeypatch, capsys, "show", runs)
