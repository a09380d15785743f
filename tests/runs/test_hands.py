"""What people reach for in Python and in notebooks: files and keywords, one sentence, progress, tables, data frames."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import fedshift
from fedshift import Experiment, UserError
from fedshift.cli import app
from fedshift.measures.measurement import Measurement
from fedshift.results.plain import Screen
from fedshift.runs.notebook import Notebook, usual
from fedshift.runs.progress import Silent, Terminal
from fedshift.store.folder import RunFolder
from fedshift.store.metric import Metric

SMALL: dict[str, Any] = {
    "rounds": 2,
    "baselines": False,
    "data": {"size": 8},
    "model": {"name": "mlp", "hidden": [8]},
    "split": {"train-limit": 20, "unseen": ["font"]},
    "evaluate": {"advice": False},
    "method": [{"name": "fedavg", "adapters": ["none", "t3a"]}],
}
TOML = """
rounds = 9
baselines = false
data = { size = 8, source = "embedded:digits" }
model = { name = "mlp", hidden = [8] }
split = { train-limit = 20 }
evaluate = { advice = false }
train = { lr = 0.1, momentum = 0.9 }
"""


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> fedshift.Result:
    return fedshift.run(Experiment(**SMALL, seeds=[0, 1]), out=tmp_path_factory.mktemp("runs"))


# ---- files and keywords ---------------------------------------------------------------------------------------------
def test_run_takes_a_file_and_changes(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(TOML, encoding="utf-8")
    result = fedshift.run(tmp_path / "mine.toml", tmp_path, rounds=1, train={"lr": 0.2}, checkpoint_every=5)
    config = fedshift.open_run(result.folders[0]).config
    assert (config["rounds"], config["train"]["lr"], config["train"]["momentum"]) == (1, 0.2, 0.9)
    assert result.folders[0].parts[-3] == "mine"


def test_changes_of_an_experiment_are_those_of_a_file_that_extends_it() -> None:
    changed = Experiment(**SMALL).changed({"train": {"lr": 0.3}, "data": {"channels": 1}, "checkpoint_every": 3})
    assert (changed.train, changed.data.size, changed.data.channels, changed.checkpoint_every) == ({"lr": 0.3}, 8, 1, 3)
    assert not changed.evaluate.advice  # what no dump has is kept
    swept = Experiment(**SMALL, sweep={"train.lr": [0.1, 0.2]})
    assert swept.changed({"rounds": 1}).sweep == {"train.lr": [0.1, 0.2]}
    assert swept.changed({"train": {"lr": 0.3}}).sweep == {}


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: Experiment(ruonds=3), "unknown key 'ruonds'; did you mean 'rounds'?"),
        (lambda: Experiment(data={"sorce": "x"}), "unknown key 'data.sorce'; did you mean 'source'?"),
        (lambda: Experiment(rounds=-1), "rounds: input should be greater than or equal to 0, not -1"),
        (lambda: Experiment(**SMALL).changed({"seed": [1]}), "unknown key 'seed'; did you mean 'seeds'?"),
        (lambda: fedshift.run("brfl", ruonds=3), "brfl: unknown key 'ruonds'; did you mean 'rounds'?"),
        (lambda: fedshift.run("brlf"), "there is neither a file nor a preset 'brlf'; did you mean 'brfl'?"),
    ],
)
def test_a_wrong_key_is_one_sentence(call: Any, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        call()
    said = str(caught.value)
    assert said.endswith(sentence)
    assert caught.value._render_traceback_() == [f"error: {said}"]  # what a notebook shows


# ---- numbers --------------------------------------------------------------------------------------------------------
def lines(result: fedshift.Result) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(seed, adapter, line) of the files."""
    for folder in result.folders:
        seed = int(folder.name.split("-")[0])
        for path in sorted((folder / "adapters").glob("*.jsonl")):
            yield from ((seed, path.stem, json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines())


def test_a_data_frame_has_every_number_of_the_files(result: fedshift.Result) -> None:
    pytest.importorskip("pandas")
    frame = result.to_pandas()
    keys = ["adapter", "selection", "model", "stream", "population", "seed", "metric", "part", "client"]
    assert set(frame.method) == {"fedavg"}
    found = {tuple(None if value != value else value for value in row): v for *row, v in frame[[*keys, "value"]].values}
    assert len(found) == len(frame)  # no row is there twice
    expected = {}
    for seed, adapter, line in lines(result):
        metric = Metric.parse(line["metric"])
        where = (adapter, line["selection"], metric.model, metric.stream, metric.population, seed)
        for measure, summary in {"accuracy": line, **line["measures"]}.items():
            for part in ("client-mean", "pooled", "std", "worst-10"):
                if summary[part] is not None:
                    expected[(*where, measure, part, None)] = summary[part]
        for client, (samples, correct, *_) in line["by-client"].items():
            expected[(*where, "accuracy", "client", client)] = 100 * correct / samples
        for client, stored in line["measured"].items():
            own = Measurement.of_json(stored, len(line["classes"]))
            for measure in line["measures"]:
                if (value := own.value(measure)) is not None:
                    expected[(*where, measure, "client", client)] = value
    assert found.keys() == expected.keys()
    assert all(found[key] == pytest.approx(value, abs=1e-9) for key, value in expected.items())


def test_every_client_has_a_column(result: fedshift.Result) -> None:
    table = result.clients()
    heads = [str(column.header) for column in table.columns]
    assert heads == ["method", "adapter", "stream", "mean", "pen", "paper", "china", "flower", "font"]
    cells = {head: [str(cell) for cell in column.cells] for head, column in zip(heads, table.columns, strict=True)}
    assert cells["stream"] == ["original", "original (unseen)"] * 2
    assert cells["font"][0] == "-"
    by_client = result.rows[0].by_client("original/clients")
    assert cells["pen"][0].startswith(f"{by_client['pen']:.1f}")


def test_many_clients_are_refused_in_a_sentence(tmp_path: Path) -> None:
    many = {**SMALL, "split": {"train-limit": 5}, "partition": {"kind": "iid", "clients": 13}, "rounds": 1}
    result = fedshift.run(Experiment(**many), out=tmp_path)
    with pytest.raises(UserError, match="there are 13 clients, and a table has room for 12"):
        result.clients()


def test_the_command_line_has_clients_too(result: fedshift.Result) -> None:
    said = CliRunner().invoke(app, ["show", str(result.folders[0].parents[1]), "--clients"]).output
    assert "of every client" in said
    assert "china" in said


def test_a_result_shows_itself(result: fedshift.Result) -> None:
    assert repr(result) == "<Result: 2 rows, streams original, seeds 0, 1>"
    page = result._repr_html_()
    mean, deviation = result.rows[0].number("original/clients") or (0.0, 0.0)
    assert f"{mean:.1f} ±{deviation:.1f}" in page
    assert "<script" not in page


def test_names_are_only_text_in_a_notebook(tmp_path: Path) -> None:
    method = {"name": "fedavg", "label": "<script>alert(1)</script>".replace("/", "")}
    result = fedshift.run(Experiment(**{**SMALL, "method": [method], "rounds": 1}), out=tmp_path)
    assert "<script>" not in result._repr_html_()
    assert "&lt;script&gt;" in result._repr_html_()


# ---- every site in turn ---------------------------------------------------------------------------------------------
def test_each_client_is_unseen_once(tmp_path: Path) -> None:
    three = {**SMALL, "data": {"size": 8, "domains": ["pen", "paper", "font"]}, "rounds": 1}
    each = Experiment(**{**three, "split": {"train-limit": 20, "unseen": "each"}})
    result = fedshift.run(each, out=tmp_path)
    points = [dict(row.point)["split.unseen"] for row in result.rows if row.adapter == "none"]
    assert points == ["pen", "paper", "font"]
    for row in result.rows:
        assert list(row.by_client("original/unseen")) == [dict(row.point)["split.unseen"]]
    named = Experiment(**{**three, "split": {"train-limit": 20, "unseen": "font"}})
    alone = fedshift.run(named, out=tmp_path / "named").rows[0]
    again = next(row for row in result.rows if dict(row.point)["split.unseen"] == "font" and row.adapter == "none")
    assert again.by_client("original/unseen") == alone.by_client("original/unseen")


def test_each_is_said_of_several_clients_only() -> None:
    from fedshift.runs.setup import make_task

    one = Experiment(data={"size": 8, "domains": ["pen"]}, split={"unseen": "each"})
    with pytest.raises(UserError, match="needs two clients or more, not 1"):
        fedshift.run(one)
    with pytest.raises(UserError, match="a task of your own is divided already"):
        fedshift.run(Experiment(split={"unseen": "each"}), data=make_task(Experiment(data={"size": 8}), 0))


# ---- progress -------------------------------------------------------------------------------------------------------
class Page:
    """Stands in for a notebook's page."""

    def __init__(self) -> None:
        self.shown: list[dict[str, str]] = []

    def update(self, data: dict[str, str], raw: bool) -> None:
        assert raw
        self.shown.append(data)


def test_a_notebook_has_a_bar(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("IPython")
    page = Page()
    monkeypatch.setattr("IPython.display.display", lambda *_, **__: page)
    monkeypatch.setattr("fedshift.runs.notebook.PAUSE", 0.0)
    fedshift.run(Experiment(**SMALL), out=tmp_path, reporter=Notebook())
    texts = [data["text/plain"] for data in page.shown]
    assert any("1 of 2 rounds" in text and "left" in text for text in texts)
    assert '<progress value="1" max="2"' in "".join(data["text/html"] for data in page.shown)
    assert texts[-1].startswith("1 runs (fedavg), 2 rounds, engine ")
    assert "<progress" not in page.shown[-1]["text/html"]


class Moves(Silent):
    """Remembers how far everything was."""

    def __init__(self) -> None:
        self.training: list[float] = []
        self.scoring: list[float] = []

    def moved(self, run: str, share: float, training: bool) -> None:
        assert run == "fedavg seed 0"
        (self.training if training else self.scoring).append(share)


@pytest.mark.parametrize("engine", ["sequential", "vmapped", pytest.param("parallel", marks=pytest.mark.system)])
def test_there_is_movement_inside_a_round_and_while_adapters_are_scored(
    engine: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("fedshift.engines.pulse.PAUSE", 0.0)
    moves = Moves()
    fedshift.run(Experiment(**SMALL, train={"batch-size": 5}), out=tmp_path, engine=engine, reporter=moves)
    first = moves.training[: moves.training.index(1.0) + 1]
    assert len(first) > 2
    assert first == sorted(first)
    assert moves.training.count(1.0) >= 2  # of two rounds
    assert any(0 < share < 1 for share in moves.scoring)


def test_the_time_left_is_known_after_the_first_batches() -> None:
    screen = Screen(file=io.StringIO(), force_terminal=True, width=120)
    bar = Terminal(screen)
    bar.plan([("fedavg", 0, 10)], "sequential", "cpu")
    bar.begin("fedavg seed 0", 2, 10)
    assert "-:-- left" in shown(bar)
    for share in (0.1, 0.2):
        bar.moved("fedavg seed 0", share, True)
    assert re.search(r" 2/10 rounds .* \d+:\d\d left", shown(bar))
    bar.round("fedavg seed 0", 3, 0.5, 80.0)
    assert "3/10" in shown(bar)
    bar.doing("fedavg seed 0: adapter tent")
    bar.moved("fedavg seed 0", 0.5, False)
    assert "fedavg seed 0: adapter tent: 50%, 0:00 left" in shown(bar)
    bar.close()


def shown(bar: Terminal) -> str:
    """The bar as it is on the screen."""
    screen = Screen(file=io.StringIO(), width=140)
    screen.print(bar._bar.get_renderable())
    return screen.file.getvalue()  # type: ignore[attr-defined]


def test_a_checkpoint_is_never_more_than_a_minute_old(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept: list[int] = []
    save = RunFolder.checkpoint
    monkeypatch.setattr(RunFolder, "checkpoint", lambda *given: (kept.append(given[1].round), save(*given)))
    rare = {**SMALL, "rounds": 3, "checkpoint-every": 100}
    fedshift.run(Experiment(**rare), out=tmp_path / "fast")
    assert kept == [0, 3]
    kept.clear()
    monkeypatch.setattr("fedshift.runs.train.OLDEST", 0.0)  # every round takes longer
    fedshift.run(Experiment(**rare), out=tmp_path / "slow")
    assert kept == [0, 1, 2, 3]


def test_scripts_stay_silent_and_notebooks_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(usual()) is Silent
    pytest.importorskip("IPython")
    monkeypatch.setattr("IPython.display.display", lambda *_, **__: Page())
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: SimpleNamespace(kernel=1))
    assert type(usual()) is Notebook


def test_a_table_can_be_printed(result: fedshift.Result) -> None:
    screen = Screen(width=100, record=True)
    screen.print(result.clients())
    assert "paper" in screen.export_text()
