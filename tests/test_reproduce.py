"""The papers' tables within a budget of time: what is finished counts, what is not is listed."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks import ours, reproduce
from docs.builder import results, summaries
from docs.builder.ours import our_summary
from docs.builder.summaries import as_json, commit, take

from fedshift import Experiment
from fedshift.results.beside import titles_of
from fedshift.results.result import Row
from fedshift.runs.run import run
from fedshift.store.found import read_config
from tests.runs.test_run import tiny

TABLES = {table.name: table for page in results.PAGES for table in page.tables}


def test_a_tables_own_rows_come_first_and_its_summary_lists_them_as_the_paper_does() -> None:
    table = TABLES["brfl-0.1"]
    experiment = reproduce.experiment_of(table, [0, 1, 2], ["rounds=3"])
    assert [method.title for method in experiment.method][:2] == ["two heads", "FedAvg + FT"]
    assert (experiment.seeds, experiment.rounds, experiment.partition.options()["alpha"]) == ([0, 1, 2], 3, 0.1)
    assert (experiment.sweep, experiment.baselines, experiment.evaluate.artefacts) == ({}, False, False)
    assert len(list(experiment.variants())) == 1


def test_what_is_finished_counts_and_the_rest_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tiny(method=[{"name": "fedavg", "label": "A"}, {"name": "fedprox", "label": "B"}], seeds=[3])
    run(whole.changed({"method": [{"name": "fedavg", "label": "A"}]}), tmp_path / "runs", engine="sequential")
    table = results.Table("brfl-0.1", "brfl", "a table", 1, ("partition.alpha=0.1",))
    summary = results.summary_of(
        table, reproduce.finished(tmp_path / "runs"), whole, seconds=12.3, ended="the time was over"
    )
    assert summary["not-run"] == ["B"]
    assert list(summary["rows"]) == ["A"]
    assert (summary["seeds"], summary["seconds"], summary["ended"]) == ([3], 12, "the time was over")
    assert summary["command"] == "fedshift run brfl -c partition.alpha=0.1 -c 'seeds=[3]'"
    assert json.loads(as_json(summary)) == summary
    assert "| A | " in results.as_markdown(summary)
    nothing = results.summary_of(table, [], whole, seconds=1.0)
    assert (nothing["rows"], nothing["not-run"]) == ({}, ["A", "B"])
    # taken into the repository: only tables that it knows, and only if they have rows
    source, kept = tmp_path / "out", tmp_path / "kept"
    source.mkdir()
    kept.mkdir()
    monkeypatch.setattr(summaries, "KEPT", kept)
    (source / "brfl-0.1.json").write_text(as_json(summary))
    (source / "brfl-1.0.json").write_text(as_json(nothing))
    (source / "other.json").write_text(as_json(summary))
    assert take(source, results.known()) == ["brfl-0.1"]
    assert [path.name for path in kept.iterdir()] == ["brfl-0.1.json"]
    # a commit that only the other machine had tells nobody anything
    (source / "brfl-0.1.json").write_text(as_json({**summary, "commit": "0123456"}))
    take(source, results.known())
    assert json.loads((kept / "brfl-0.1.json").read_text())["commit"] == commit()


def test_rows_of_ours_that_are_measured_later_stand_beside_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, kept = tmp_path / "out", tmp_path / "kept"
    source.mkdir()
    kept.mkdir()
    monkeypatch.setattr(summaries, "KEPT", kept)

    def taken(title: str, number: float, *, seeds: list[int], name: str = "ours-unseen-mnist") -> list[str]:
        rows = {title: {"original (unseen) (clients)": [number] * len(seeds)}}
        made = our_summary(
            "unseen-mnist", f"unseen-mnist --only {title}", seeds=seeds, rounds=2, seconds=1.0, ended="", rows=rows
        )
        (source / f"{name}.json").write_text(as_json(made))
        return take(source, results.known())

    assert taken("A", 1.0, seeds=[1, 2]) == taken("B", 2.0, seeds=[1, 2]) == ["ours-unseen-mnist"]
    found = summaries.kept("ours-unseen-mnist")
    assert found is not None
    assert found["rows"] == {title: {"original (unseen)": [n, n]} for title, n in (("A", 1.0), ("B", 2.0))}
    assert [made["command"][-1] for made in found["made"]] == ["A", "B"]
    taken("A", 3.0, seeds=[1, 2])  # once more
    found = summaries.kept("ours-unseen-mnist")
    assert found is not None
    assert found["rows"]["A"] == {"original (unseen)": [3.0, 3.0]}
    assert [made["command"][-1] for made in found["made"]] == ["B", "A"]
    taken("C", 4.0, seeds=[9])  # of other seeds: not to be mixed
    found = summaries.kept("ours-unseen-mnist")
    assert found is not None
    assert list(found["rows"]) == ["C"]
    assert "trial-unseen-mnist" not in taken("D", 5.0, seeds=[1], name="trial-unseen-mnist")  # tuned, or shortened


def published(table: results.Table) -> dict[tuple[str, str], float]:
    """The paper's numbers in a preset, by row and column as summaries name them."""
    found = {}
    for point, variant in Experiment.load(table.preset, table.changes).variants():
        where = f", {' '.join(str(value) for value in point.values())}" if point else ""
        pairs = [(method.title, adapter) for method in variant.method for adapter in method.adapters]
        titles = titles_of([Row(method, adapter.title, ()) for method, adapter in pairs])
        whole = variant.model_dump(by_alias=True)
        tuned = {**whole, "split": {**whole["split"], "tune": True}}  # what papers say of validation images
        for method, adapter in pairs:
            for number in (n for key, n in adapter.published(tuned).items() if key == "original"):
                found[row_of(titles[method, adapter.title]), f"val{where}"] = number
            for key, number in adapter.published(whole).items():
                column = key.replace("after-local/", "after local ").replace("/unseen", " (unseen)") + where
                found[row_of(titles[method, adapter.title]), column] = number
    return found


def row_of(title: str) -> str:
    """Rows of an ablation have a number, whatever they were called later."""
    return title.split()[0] if title[0].isdigit() else title


@pytest.mark.parametrize("name", sorted(name for name in TABLES if (results.KEPT / f"{name}.json").exists()))
def test_the_papers_numbers_in_summaries_are_those_of_the_presets(name: str) -> None:
    """To the last digit, also in summaries that are older than the preset."""
    summary, theirs = summaries.kept(name), published(TABLES[name])
    assert summary is not None
    told = {
        (row_of(title), column): number["paper"]
        for title, cells in summary["rows"].items()
        for column, number in cells.items()
        if "paper" in number
    }
    assert told == {place: theirs.get(place) for place in told}


def test_the_time_of_an_interrupted_table_is_that_of_all_its_sittings(tmp_path: Path) -> None:
    runs = tmp_path / "runs" / "brfl-0.1"
    runs.mkdir(parents=True)
    asked = argparse.Namespace(seeds=[0], change=[], out=tmp_path)
    for seconds, whole in ((60.0, 60), (120.0, 120)):  # two looks of the first sitting
        summary = reproduce.written(TABLES["brfl-0.1"], asked, runs, 0.0, reproduce.Ended(seconds, "still running"))
        assert summary["seconds"] == whole
    before = reproduce.spent_before(runs)
    assert reproduce.written(TABLES["brfl-0.1"], asked, runs, before, reproduce.Ended(30.0))["seconds"] == 150
    assert reproduce.spent_before(runs.with_name("brfl-1.0")) == 0.0


def test_a_part_of_ours_is_on_disk_before_it_is_over_and_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever lends a machine for ten minutes ends everything then."""
    asked: list[list[str]] = []
    found = {"ours / ours": {"original (unseen) (clients)": [50.0]}}

    def interrupted(seconds: float, command: list[str], log: Path, look: Callable[[reproduce.Ended], object]) -> Any:
        asked.append(command)
        assert log.parent == tmp_path / "runs"
        assert seconds == 90.0
        look(reproduce.Ended(60.0, reproduce.RUNNING))
        raise KeyboardInterrupt

    monkeypatch.setattr(ours, "within", interrupted)
    monkeypatch.setattr(ours, "collect", lambda *_: found)
    monkeypatch.setenv("OUT", str(tmp_path))
    more = ["--seeds", "7", "--seconds", "90", "--runs", str(tmp_path / "runs")]
    monkeypatch.setattr(sys, "argv", ["ours.py", "unseen-digits", "--only", "ours", *more])
    for seconds in (60, 120):
        with pytest.raises(KeyboardInterrupt):
            ours.main()
        (made,) = json.loads((tmp_path / "ours-unseen-digits.json").read_text())["made"]
        assert (made["ended"], made["seconds"]) == (reproduce.RUNNING, seconds)
        assert made["command"] == "python benchmarks/ours.py unseen-digits --only ours --seeds 7"
    assert asked[0] == asked[1]
    assert asked[0][asked[0].index("--into") + 1] == str(tmp_path / "runs" / "unseen-digits")


@pytest.mark.system
def test_a_table_ends_when_its_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduce, "PATIENCE", 1)
    looked: list[str] = []
    started = time.perf_counter()
    stubborn = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
    ended = reproduce.within(
        1.0, [sys.executable, "-c", stubborn], tmp_path / "log", lambda ended: looked.append(ended.how)
    )
    assert time.perf_counter() - started < 20
    assert (ended.how, looked) == ("the time was over", ["still running"])
    failed = reproduce.within(30.0, [sys.executable, "-c", "raise SystemExit('no data')"], tmp_path / "log", print)
    assert failed.how == "failed: no data"
    assert reproduce.within(30.0, [sys.executable, "-c", ""], tmp_path / "log", print).how == ""


def test_runs_of_other_settings_in_the_same_folder_do_not_count(tmp_path: Path) -> None:
    """Whoever changes his mind between two sittings must not average both."""
    two = tiny(method=[{"name": "fedavg", "label": "A"}], seeds=[3, 4])
    run(two, tmp_path, engine="sequential")
    assert len(reproduce.finished(tmp_path)) == 2
    run(two.changed({"rounds": two.rounds + 1, "seeds": [3]}), tmp_path, engine="sequential")
    (left,) = reproduce.finished(tmp_path)
    assert read_config(left)["rounds"] == two.rounds + 1


def test_a_clock_that_was_killed_as_it_was_written_stands_at_nothing(tmp_path: Path) -> None:
    reproduce.clock_of(tmp_path / "brfl-0.1").write_text("")
    assert reproduce.spent_before(tmp_path / "brfl-0.1") == 0.0
