"""Scores of predictions that are not numbers: marked, said in a note, and never the best; training that diverged is said."""

from __future__ import annotations

import html
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from fedshift import run
from fedshift.inspect.overhead import overhead
from fedshift.inspect.report import summary_table
from fedshift.results.collect import collect
from fedshift.results.plots.pictures import map_picture, result_picture
from fedshift.results.result import Result, Row
from fedshift.results.trouble import broken_predictions, diverged_training
from fedshift.store.folder import RunFolder
from fedshift.store.found import find_runs
from fedshift.store.lines import RoundLine
from fedshift.store.metric import Metric
from fedshift.store.rows import ScoreRow
from fedshift.store.summary import ClientScore, Summary, mean_over, summarise
from tests.conftest import unseal
from tests.input.program import fedshift, png
from tests.results.test_reports import cells, tented
from tests.runs.test_run import BOTH, SIZES, command, go, lines, tiny

ORIGINAL = Metric("global", "original")


def made(adapter: str, accuracy: float, broken: int = 0, **more: object) -> Row:
    own = {"a": ClientScore(100, round(accuracy), None if broken else 1.0, broken)}
    score = ScoreRow(ORIGINAL, summarise(own), "best-val", by_client=own)
    values = {(rule, ORIGINAL): [replace(score, selection=rule)] for rule in ("best-val", "last")}
    return Row("fedavg", adapter, (), (0,), values, **more)  # type: ignore[arg-type]


def shown(result: Result) -> list[str]:
    return [cell.markup for cell in result.table().columns[2].cells]


def test_a_broken_score_is_marked_and_never_the_best() -> None:
    assert shown(Result((made("none", 60), made("mine", 90, 9), made("tent", 70)), ())) == [
        "60.0",
        "90.0 !",
        "[bold]70.0[/bold]",
    ]
    assert shown(Result((made("none", 60), made("mine", 90, 9)), ())) == ["[bold]60.0[/bold]", "90.0 !"]
    assert shown(Result((made("none", 60, 1), made("mine", 90, 9)), ())) == ["60.0 !", "90.0 !"]
    rules = Result((made("mine", 90, 9),), ()).rules_table()
    assert [str(cell) for column in list(rules.columns)[2:] for cell in column.cells] == ["90.0 !"] * 2


def test_a_note_says_how_many_and_where() -> None:
    row = made("mine", 9, 90)
    assert list(broken_predictions(row)) == [
        "fedavg with adapter mine: 90 of 100 predictions on original are not numbers"
    ]
    assert list(broken_predictions(made("none", 9))) == []
    assert list(broken_predictions(replace(row, bound=True))) == []
    late = {key: scores for key, scores in row.values.items() if key[0] == "last"}
    assert list(broken_predictions(replace(row, adapter="none", values=late, point=(("lr", 9.0),)))) == [
        "fedavg, lr = 9.0: 90 of 100 predictions on original are not numbers after the last round"
    ]
    streams = {("best-val", Metric("global", name)): row.scores(ORIGINAL) for name in "abcde"}
    (many,) = broken_predictions(replace(row, values=streams))
    assert "90 of 100 predictions on a, 90 of 100 on b, 90 of 100 on c and 2 more are not numbers" in many


def test_a_broken_score_keeps_its_count_on_disk_and_others_their_bytes() -> None:
    own = {"a": ClientScore(10, 4, None, 3), "b": ClientScore(10, 4, 2.0)}
    row = ScoreRow(ORIGINAL, summarise(own), "last", by_client=own)
    stored = row.to_json()
    assert (stored["broken"], stored["by-client"]) == (3, {"a": [10, 4, None, 3], "b": [10, 4, 2.0]})
    assert ScoreRow.of(stored) == row
    assert "broken" not in replace(row, summary=Summary(1.0)).to_json()
    assert mean_over([row.summary, Summary(1.0), row.summary]).broken == 6


def test_training_that_diverged() -> None:
    one, two = (RoundLine(1, participants=2, diverged=names) for names in (("a",), ("a", "b")))
    fine = RoundLine(1, participants=2)
    assert list(diverged_training("x", [fine, fine, one])) == []
    assert list(diverged_training("x", [fine, one])) == []  # half is not more than half
    assert list(diverged_training("x", [fine, one, one])) == [
        "x: client 'a' diverged in more than half of its rounds (2 of 3), its updates were left out"
    ]
    assert list(diverged_training("x", [two, two])) == [
        "x: all clients diverged in 2 of 2 rounds (first in round 1): nothing was learnt there"
    ]
    sampled = diverged_training("x", [fine] * 5 + [one] * 3, participation=0.5)
    assert list(sampled) == [
        "x: client 'a' diverged in more than half of its rounds (3 of about 4), its updates were left out"
    ]


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """An adapter whose rate is far too high, in a family with one that works."""
    adapters = ["none", *(tented(rate, family="rates") for rate in (0.001, 1e30))]
    experiment = tiny(
        stream=BOTH, method=[{"name": "fedavg", "adapters": adapters}],
        evaluate={"every": 1, "adapted": True, "mean-of": ["original", "corrupted"]},
    )  # fmt: skip
    return go(experiment, tmp_path_factory.mktemp("broken"))


def test_an_adapter_that_breaks_is_named_everywhere(
    broken: Result, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder,) = broken.folders
    fine, bad, bound = broken.rows[1:]
    count = bad.broken("original/clients", "last")
    assert count > 0
    assert bad.broken("mean/clients", "last") == count + bad.broken("corrupted/clients", "last")
    assert [row.broken("original/clients", "last") for row in (broken.rows[0], fine, bound)] == [0, 0, 0]
    assert cells(broken, "original")[2].endswith(" !")
    assert "bold" not in cells(broken, "original")[2]
    (note,) = [note for note in broken.trouble if "are not numbers" in note]
    samples = sum(own.samples for own in bad.scores("original/clients")[0].by_client.values())
    assert note.startswith(
        f"fedavg with adapter lr 1e+30: {bad.broken('original/clients')} of {samples} predictions on original"
    )
    assert note in broken.notes
    printed = " ".join(command(monkeypatch, capsys, "show", folder).split())
    assert note in printed
    assert " !" in printed
    stored = {
        row.get("metric"): row for row in lines(folder / "adapters" / "lr 1e+30.jsonl") if row["selection"] == "last"
    }
    assert stored["global/original/clients"]["broken"] == count
    assert "broken" not in (folder / "adapters" / "lr 0.001.jsonl").read_text()
    assert any(
        row.get("broken") for row in json.loads(command(monkeypatch, capsys, "show", folder, "--format", "json"))
    )


def test_pages_and_join_name_it_too(
    broken: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder,) = broken.folders
    (note,) = [note for note in broken.trouble if "are not numbers" in note]
    command(monkeypatch, capsys, "report", folder, "--out", tmp_path / "page.html")
    assert html.escape(note) in (tmp_path / "page.html").read_text()
    (tmp_path / "new").mkdir()
    for number in range(40):
        (tmp_path / "new" / f"{number}.png").write_bytes(png(number))
    joining = ("join", folder, "--data", tmp_path / "new", "--out", tmp_path / "joined", "--adapter")
    said = fedshift(*map(str, (*joining, "lr 1e+30")))
    assert said.refused
    assert "with adapter 'lr 1e+30' gives no finite numbers" in said.err
    assert not (tmp_path / "joined").exists()
    assert fedshift(*map(str, (*joining, "lr 0.001"))).code == 0


def test_a_broken_member_is_left_out_of_a_bound(broken: Result) -> None:
    fine, _, bound = broken.rows[1:]
    assert bound.bound
    assert bound.scores("original/clients", "last")[0].by_client == fine.scores("original/clients", "last")[0].by_client


def test_a_broken_state_is_never_chosen(broken: Result) -> None:
    """Validation after the adapter's own adaptation was broken in every round: it has chosen none."""
    (folder,) = broken.folders
    adapted = [line for line in RunFolder(folder).history().adapted if line.label == "lr 1e+30"]
    assert adapted
    assert all(line.summary.broken for line in adapted)
    assert not (folder / "best" / "lr 1e+30.safetensors").exists()
    assert (folder / "best" / "lr 0.001.safetensors").exists()


def test_pictures_of_broken_scores(broken: Result, tmp_path: Path) -> None:
    result_picture(broken, tmp_path / "results.png", "last")
    rows = tuple(
        replace(
            row,
            values={k: [replace(s, adapter="t", options={"a": a, "b": b}) for s in v] for k, v in row.values.items()},
        )
        for row, (a, b) in zip(
            [made(str(k), 50 + k, broken=k % 2) for k in range(4)], [(0, 0), (0, 1), (1, 0), (1, 1)], strict=True
        )
    )  # fmt: skip
    map_picture(Result(rows, ()), tmp_path / "map.png")
    map_picture(Result(tuple(made_broken(row) for row in rows), ()), tmp_path / "none.png")
    for name in ("results", "map", "none"):
        with Image.open(tmp_path / f"{name}.png") as picture:
            assert picture.width > 100


def made_broken(row: Row) -> Row:
    values = {k: [replace(s, summary=replace(s.summary, broken=1)) for s in v] for k, v in row.values.items()}
    return replace(row, values=values)


# ---- training ------------------------------------------------------------------------------------------------------------
def test_a_diverging_run_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.warns(UserWarning, match="was left out of round 1"):
        result = go(tiny(rounds=3, train={"lr": 1e30, "batch-size": 16}), tmp_path)
    note, scores = result.trouble
    assert note == "fedavg seed 0: all clients diverged in 2 of 3 rounds (first in round 2): nothing was learnt there"
    assert scores == "fedavg: 35 of 44 predictions on original are not numbers"  # one client had a single step
    assert result.notes[:2] == (note, scores)
    said = " ".join(command(monkeypatch, capsys, "show", result.folders[0]).split())
    assert note in said
    assert scores in said
    done = json.loads((result.folders[0] / "done").read_text())
    assert done["best-round"] == -1  # no round had validation that could be chosen by
    unseal(result.folders[0])
    log = result.folders[0] / "metrics.jsonl"
    log.write_text(log.read_text().replace('"diverged"', '"left-out"'))  # as version 0.1 called it
    assert collect(find_runs(tmp_path)).trouble == (note, scores)


def test_inspect_notes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(UserWarning, match="was left out"):
        result = run(
            tiny(rounds=2, data={"size": 8}, train={"lr": 1e30, "batch-size": 16}), tmp_path, engine="sequential"
        )
    said = " ".join(command(monkeypatch, capsys, "inspect", result.folders[0], "--samples", 10).split())
    page = (result.folders[0] / "inspect" / "inspect.html").read_text()
    assert result.trouble
    for note in result.trouble:
        assert note in said
        assert html.escape(note, quote=True).replace("&#x27;", "&#39;") in page


def test_a_client_that_mostly_diverges_is_named(tmp_path: Path) -> None:
    (folder,) = go(tiny(rounds=3), tmp_path).folders
    unseal(folder)
    log = folder / "metrics.jsonl"
    kept = [json.loads(line) for line in log.read_text().splitlines()]
    log.write_text(
        "".join(
            json.dumps({**k, "diverged": ["east"]} if k.get("round", 0) > 1 and "bytes-up" in k else k) + "\n"
            for k in kept
        )
    )
    assert list(SIZES)[2] == "east"
    (note,) = [note for note in collect([folder]).trouble if "diverged" in note]
    assert (
        note
        == "fedavg seed 0: client 'east' diverged in more than half of its rounds (2 of 3), its updates were left out"
    )


def test_cost_to_target_never_counts_a_broken_round(tmp_path: Path) -> None:
    (folder,) = go(tiny(rounds=3), tmp_path).folders
    before = overhead(folder, 1.0)
    assert before.runs[0][2].rounds == 1
    unseal(folder)
    log = folder / "metrics.jsonl"
    kept = [json.loads(line) for line in log.read_text().splitlines()]
    wrong = [{k: {**v, "broken": 1} if isinstance(v, dict) else v for k, v in line.items()} for line in kept]
    log.write_text("".join(json.dumps(line) + "\n" for line in wrong))
    assert (overhead(folder, 1.0).runs[0][2].rounds, overhead(folder, 1.0).runs[0][2].best) == (None, None)
    assert "never" in printed(overhead(folder, 1.0).table())


def printed(table: object) -> str:
    text = io.StringIO()
    Console(file=text, width=200).print(table)
    return text.getvalue()


def test_inspect_marks_what_is_broken() -> None:
    row = {"name": "x", "model": "global", "seeds": [0], "pad": None, "pad-union": None, "risk": None}
    assert "50.0 !" in printed(summary_table([{**row, "accuracy": {"mean": 50.0, "std": 0.0}, "broken": 3}]))
    assert "!" not in printed(summary_table([{**row, "accuracy": {"mean": 50.0, "std": 0.0}}]))
