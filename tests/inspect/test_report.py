"""The page, the pictures, and what happens when something is wrong."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest
from matplotlib.lines import Line2D
from PIL import Image
from rich.table import Table

from fedshift import Experiment, UserError, run
from fedshift.inspect import inspect
from fedshift.inspect.report import READ, steps_table
from fedshift.inspect.report import SECTIONS as EVERY
from fedshift.results.plots import clouds
from fedshift.results.plots.clouds import few
from fedshift.store.folder import RunFolder
from fedshift.store.metric import Metric
from fedshift.store.trees import load, save
from tests.conftest import edit
from tests.experiment.test_bad_input import parquet
from tests.inspect.conftest import digits
from tests.runs.test_features import error_of
from tests.runs.test_run import POOL, command

SECTIONS = {key: title for key, title in EVERY.items() if key != "curve"}  # which is drawn where it is asked for


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def made(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of all runs."""
    out = tmp_path_factory.mktemp("page")
    inspect(runs, out, samples=10)
    return out


def test_the_page_shows_every_section_and_needs_nothing_else(made: Path) -> None:
    page = (made / "inspect.html").read_text()
    for key, title in SECTIONS.items():
        assert f'<section id="{key}">' in page
        assert title in page
        assert READ[key].split(":")[0] in page
    sources = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert len(sources) == len(SECTIONS)
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    for key, source in zip(SECTIONS, sources, strict=True):
        picture = base64.b64decode(source.partition(",")[2])
        assert picture == (made / f"{key}.png").read_bytes()
        with Image.open(io.BytesIO(picture)) as image:
            assert min(image.size) > 200
            assert len(image.convert("RGB").getcolors(1 << 24) or []) > 20  # not an empty sheet


def test_the_page_has_the_numbers_of_the_file(made: Path) -> None:
    page, numbers = (made / "inspect.html").read_text(), json.loads((made / "inspect.json").read_text())
    assert [row["name"] for row in numbers["methods"]] == ["fedavg", "fedthe", "local"]
    assert [len(row["seeds"]) for row in numbers["methods"]] == [2, 1, 1]
    for row in numbers["methods"]:
        own = [found for found in numbers["runs"] if found["name"] == row["name"]]
        for key, values in {
            "pad": [found["pad"]["mean"] for found in own],
            "pad-union": [found["pad"]["mean-union"] for found in own],
            "risk": [found["risk"]["mean"] for found in own],
            "accuracy": [found["accuracy"]["mean"] for found in own],
        }.items():
            assert row[key]["mean"] == pytest.approx(statistics.fmean(values))
            assert row[key]["std"] == pytest.approx(statistics.stdev(values) if len(values) > 1 else 0)
        assert f"{row['risk']['mean']:.3f}" in page
        assert f"{row['accuracy']['mean']:.1f}" in page
    assert [found["tsne"] is not None for found in numbers["runs"]].count(True) == 3  # one seed of each is drawn
    assert "fedthe, local serve with models of their own" in page


def test_weights_of_the_heads_are_those_that_were_stored(runs: Path, made: Path) -> None:
    numbers = json.loads((made / "inspect.json").read_text())
    told = {found["method"]: found["telemetry"] for found in numbers["runs"]}
    assert (told["fedavg"], told["local"]) == ({}, {})
    scores = RunFolder(next((runs / "fedthe").glob("0-*"))).scores()["the"]
    (stored,) = [row for row in scores if row.selection == "best-val"]
    assert told["fedthe"] == {"the": {"personal/original/clients": stored.to_json()["telemetry"]}}
    assert f"{stored.telemetry['e'].mean:.3f}" in (made / "inspect.html").read_text()


def test_the_same_again_and_nothing_stale(runs: Path, fedavg: Path, tmp_path: Path) -> None:
    inspect(runs / "fedthe", tmp_path, samples=5)
    first = (tmp_path / "inspect.json").read_bytes()
    assert (tmp_path / "weights.png").is_file()
    inspect(runs / "fedthe", tmp_path, samples=5)
    assert (tmp_path / "inspect.json").read_bytes() == first
    inspect(fedavg, tmp_path, samples=5)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"inspect.html", "inspect.json", "pad.png", "risk.png", "confusion.png", "tsne.png"}


def test_the_command(fedavg: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    before = content(fedavg)
    said = command(monkeypatch, capsys, "inspect", fedavg, "--samples", 10, "--select", "last")
    folder = fedavg / "inspect"
    after = content(fedavg)
    numbers = json.loads((folder / "inspect.json").read_text())
    shutil.rmtree(folder)
    assert {name for name in after if name not in before} == {
        f"inspect/{name}"
        for name in ("inspect.html", "inspect.json", "pad.png", "risk.png", "confusion.png", "tsne.png")
    }
    assert {name: after[name] for name in before} == before
    assert f"{numbers['methods'][0]['pad']['mean']:.2f}" in said
    assert str(folder / "inspect.html") in said
    assert numbers["selection"] == "last"


# ---- what is wrong --------------------------
def copy_of(fedavg: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "fedavg" / fedavg.name
    shutil.copytree(fedavg, folder)
    return folder


def without(name: str) -> object:
    def change(folder: Path) -> None:
        for path in folder.glob(name):
            path.unlink()

    return change


def rewritten(old: str, new: str) -> object:
    return lambda folder: edit(folder / "config.toml", old, new)


BROKEN = {
    "unfinished": (without("done"), "holds no finished run; there is an unfinished one"),
    "no settings": (without("config.toml"), "config.toml"),
    "settings of something else": (rewritten("task-hash", "hash"), "is not a run's: it has no 'task-hash'"),
    "not TOML": (rewritten("seed = ", "seed = = "), "config.toml is damaged (it is no TOML: "),
    "another version": (rewritten("format = ", "format = 9"), "another version of fedshift"),
    "data that are gone": (rewritten("embedded:digits", "folder:/nowhere"), "cannot be made again: "),
    "other data": (rewritten("limit = 700", "limit = 650"), "are not there any more: its settings give task"),
    "another network": (rewritten("hidden = [12]", "hidden = [13]"), "trained another network"),
    "an unknown method": (rewritten('name = "fedavg"', 'name = "fedmine"'), "fedmine"),
    "no state": (without("*.safetensors"), "best.safetensors is missing; put it back from a copy"),
    "a damaged state": (lambda folder: (folder / "best.safetensors").write_bytes(b"no"), "is damaged"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_run_gets_one_sentence(
    name: str, fedavg: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    change, sentence = BROKEN[name]
    folder = copy_of(fedavg, tmp_path)
    change(folder)  # type: ignore[operator]
    before = content(tmp_path)
    assert sentence in error_of(monkeypatch, capsys, "inspect", folder)
    assert content(tmp_path) == before
    assert not (folder / "inspect").exists()


MISTAKES = {
    "no such folder": (["{nowhere}"], "there is no folder"),
    "a folder without runs": (["{empty}"], "holds no finished run"),
    "a file": (["{file}"], "holds no finished run"),
    "too few samples": (["{run}", "--samples", "1"], "--samples must be at least 2, not 1"),
    "no such rule": (["{run}", "--select", "oracle"], "--select must be best-val or last, not 'oracle'"),
    "no such model": (["{run}", "--model", "local"], "--model must be deployed or global, not 'local'"),
    "no such device": (["{run}", "--device", "tpu"], "tpu"),
    "out is a file": (["{run}", "--out", "{file}"], "cannot be written; choose another folder with --out"),
    "out is below a file": (["{run}", "--out", "{file}/deep"], "cannot be written; choose another folder with --out"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_one_sentence(
    name: str, fedavg: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, sentence = MISTAKES[name]
    places = {"nowhere": tmp_path / "nowhere", "empty": tmp_path / "empty", "file": tmp_path / "file", "run": fedavg}
    places["empty"].mkdir()
    places["file"].write_text("")
    before = content(tmp_path), content(fedavg)
    assert sentence in error_of(monkeypatch, capsys, "inspect", *(text.format(**places) for text in arguments))
    assert (content(tmp_path), content(fedavg)) == before


def test_data_that_were_removed_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = parquet(tmp_path / "x.parquet", rows=60)
    experiment = digits(rounds=1, data={"source": f"parquet:{file}"}, evaluate={"every": 1})
    (folder,) = run(experiment, tmp_path / "runs", engine="sequential").folders
    inspect(folder, tmp_path / "out", samples=4)
    file.unlink()
    said = error_of(monkeypatch, capsys, "inspect", folder)
    assert "cannot be made again" in said
    assert "x.parquet" in said
    assert not (folder / "inspect").exists()


def test_data_given_in_python_are_missed(tmp_path: Path) -> None:
    (folder,) = run(Experiment(rounds=1, baselines=False, model={"name": "mlp"}), tmp_path, data=POOL).folders  # type: ignore[arg-type]
    with pytest.raises(UserError, match="are not there any more"):
        inspect(folder)


def test_without_validation_the_page_does_not_speak_of_it(fedavg: Path, tmp_path: Path) -> None:
    split = {"train": 0.8, "val": 0.0, "test": 0.2}
    (out,) = run(digits(rounds=1, split=split), tmp_path, engine="sequential").folders
    for folder, words in ((out, "the state after the last round"), (fedavg, "best pooled validation accuracy")):
        found = inspect(folder, tmp_path / folder.name, samples=5)
        assert words in found["models-of"]
        assert words in (tmp_path / folder.name / "inspect.html").read_text()


@pytest.mark.grid
def test_markers_are_domains_where_clients_share_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A panel with more clients than another: one legend has to fit both."""
    legends: list[list[str]] = []

    def spy(handles: Sequence[Line2D], names: Sequence[str]) -> tuple[list[Line2D], list[str]]:
        legends.append([f"{name} {handle.get_marker()}" for handle, name in zip(handles, names, strict=True)])
        return few(handles, names)

    monkeypatch.setattr(clouds, "few", spy)
    for clients in (5, 15):
        partition = {"kind": "by-domain", "clients": clients, "inside": "dirichlet", "alpha": 5.0}
        run(digits(rounds=1, partition=partition), tmp_path, engine="sequential")
    inspect(tmp_path / "digits", samples=5)
    _, markers = legends
    assert len(markers) == 5
    assert len({line.split()[-1] for line in markers}) == 5
    assert not any("-" in line for line in markers)


def _cells(table: Table | None) -> list[str]:
    """The only row of a table."""
    assert table is not None
    return [str(next(iter(column.cells))) for column in table.columns]


@pytest.mark.grid
@pytest.mark.parametrize("adapted", [False, True])
def test_adaptation_is_followed_step_by_step(adapted: bool, tmp_path: Path) -> None:
    """With the settings and from the state that the run's own row has."""
    adapters = ["none", {"name": "fedtta", "lr": 2.0, "batch-size": 8}]
    experiment = digits(
        rounds=6, split={"unseen": ["font", "pen"]}, evaluate={"every": 1, "adapted": adapted},
        method=[{"name": "fedtta", "adapters": adapters}],
    )  # fmt: skip
    (out,) = run(experiment, tmp_path, engine="sequential").folders
    (numbers,) = inspect(out, tmp_path / "page", samples=5, steps=3)["runs"]
    curve, scores = numbers["curve"], RunFolder(out).scores()
    title = next(name for name in scores if name != "none")
    (row,) = (
        r for r in scores[title] if r.selection == "best-val" and r.metric.column == Metric("", "original", "unseen")
    )
    assert (curve["adapter"], curve["round"], curve["clients"]) == (title, row.round, 2)
    assert [sorted(point) for point in curve["points"]] == [["accuracy", "entropy", "loss"]] * 4
    assert 100 * curve["points"][1]["accuracy"] == pytest.approx(row.summary.client_mean)
    assert (tmp_path / "page" / "curve.png").is_file()
    assert EVERY["curve"] in (tmp_path / "page" / "inspect.html").read_text()
    sure = min((1, 2, 3), key=lambda step: curve["points"][step]["entropy"])
    cells = [f"{100 * curve['points'][step]['accuracy']:.1f}" for step in (0, 1, sure, 3)]
    cells[2] += f" ({sure})"
    assert _cells(steps_table([numbers])) == [f"fedtta, {title}, seed 0", str(row.round), *cells]
    plain = inspect(out, tmp_path / "other", samples=5)["runs"]
    assert plain[0]["curve"] is None
    assert steps_table(plain) is None


@pytest.mark.grid
def test_steps_of_a_run_that_diverged_or_learnt_no_loss(fedavg: Path, tmp_path: Path) -> None:
    (numbers,) = inspect(fedavg, tmp_path / "plain", samples=5, steps=2)["runs"]
    assert "no steps are followed: none of its adapters works with a learnt loss" in numbers["notes"]
    experiment = digits(rounds=1, method=[{"name": "fedtta", "adapters": ["none", "fedtta"]}])
    (out,) = run(experiment, tmp_path, engine="sequential").folders
    trees, facts = load(out / "best.safetensors")
    broken = {name: leaf * float("nan") for name, leaf in trees["server"]["model"].items()}
    save(out / "best.safetensors", {**trees, "server": {**trees["server"], "model": broken}}, facts)
    (numbers,) = inspect(out, tmp_path / "page", steps=2)["runs"]
    assert {point["entropy"] for point in numbers["curve"]["points"]} == {None}
    assert _cells(steps_table([numbers]))[-2] == "-"
