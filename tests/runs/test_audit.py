"""Splits one can audit, as a user meets them: fedshift data, files of one's own, runs that say how they were split."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image

from fedshift import Experiment, run
from fedshift.results.plots import task as plots
from fedshift.runs.open import open_run
from fedshift.runs.setup import make_task
from tests.conftest import edit
from tests.runs.test_run import POOL, command, go, tiny


def lesions(root: Path) -> Path:
    """Two hospitals, two classes, twenty patients of three images each, and a CSV file that says so."""
    lines = ["file_name,patient_id,sex"]
    for number in range(60):
        patient = number // 3
        path = root / ("berlin", "lima")[patient % 2] / ("nevus", "melanoma")[patient // 2 % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (4 * number, number, 90)).save(path)
        lines.append(f"{number}.png,P{patient},{'fm'[patient % 2]}")
    (root / "metadata.csv").write_text("\n".join(lines))
    return root


def test_fedshift_data_can_be_audited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(lesions(tmp_path / "lesions"))
    said = command(monkeypatch, capsys, "data", source, "--out", str(tmp_path / "out"))
    assert "2 classes: melanoma, nevus" in said
    assert "20 groups (column patient_id), none in two parts" in said
    page = (tmp_path / "out/task.html").read_text()
    assert "20 groups (column patient_id), none in two parts" in page
    assert "from left to right: melanoma, nevus" in page
    assert "cannot be tested" not in said  # five patients of each class and hospital, split class by class
    with (tmp_path / "out/split.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 60
    assert {line["part"] for line in lines} == {"train", "val", "test"}
    assert {line["streams"] for line in lines if line["part"] == "test"} == {"original; corrupted"}
    assert lines[0]["image"] == "berlin/melanoma/18.png"
    alone = tmp_path / "deep" / "who.csv"
    command(monkeypatch, capsys, "data", source, "--out", str(alone))
    assert alone.read_text() == (tmp_path / "out/split.csv").read_text()
    assert [path.name for path in alone.parent.iterdir()] == ["who.csv"]
    monkeypatch.chdir(tmp_path)
    counts = json.loads(command(monkeypatch, capsys, "data", source, "--format", "json"))
    assert not (tmp_path / "runs").exists()
    assert counts["groups"] == {"column": "patient_id", "count": 20, "in-two-parts": 0}
    sizes = {
        name: len([x for x in lines if (x["client"], x["part"]) == ("berlin", name)])
        for name in ("train", "val", "test")
    }
    assert {name: part["images"] for name, part in counts["clients"]["berlin"]["parts"].items()} == sizes


def test_the_picture_names_classes_and_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(plots, "save", lambda figure, _: drawn.append(figure))
    task = make_task(Experiment.of_data(str(lesions(tmp_path / "lesions"))), 0)
    plots.task_picture(task, tmp_path / "task.png")
    (figure,) = drawn
    bars, *pictures = figure.axes[-3:]  # the last client's
    assert [tick.get_text() for tick in bars.get_xticklabels()] == ["melanoma", "nevus"]
    for stream, panel in zip(task.streams, pictures, strict=True):
        shown = task.samples(task.clients[-1], stream)
        classes = [task.classes[label] for label in shown.labels[shown.index[:8]].tolist()]
        assert [text.get_text() for text in panel.texts] == classes
    assert "20 groups (column patient_id), none in two parts" in figure.get_suptitle()


def test_files_of_one_s_own_are_split_class_by_class(tmp_path: Path) -> None:
    source = lesions(tmp_path / "lesions")
    data = f'[data]\nsource = "folder:{source}"\nattributes = ["sex"]\n'
    files = {
        "own": data,
        "otherwise": f"{data}[split]\nstratify = false\n",
        "of-a-preset": f'extends = "default"\n{data}[split]\nunseen = 0.0\n',
        "of-mine": 'extends = "own.toml"\n[split]\ntrain = 0.5\nval = 0.2\ntest = 0.3\n',
    }
    for name, text in files.items():
        (tmp_path / f"{name}.toml").write_text(text)
    made = {name: Experiment.load(str(tmp_path / f"{name}.toml")) for name in files}
    found = {name: experiment.split.get("stratify") for name, experiment in made.items()}
    assert found == {"own": True, "otherwise": False, "of-a-preset": None, "of-mine": True}
    assert Experiment.of_data(str(source)).split["stratify"] is True
    assert Experiment.load(str(tmp_path / "own.toml"), ["split.stratify=false"]).split["stratify"] is False
    tasks = {name: make_task(experiment, 0) for name, experiment in made.items()}
    for task in tasks.values():
        assert set(task.attribute("sex", task.samples(task.clients[0], "test"))) <= {"f", "m"}
    swept = Experiment.load(str(tmp_path / "own.toml"), ['sweep={"train.lr"=[0.1,0.2]}'])
    assert [variant.data.attributes for _, variant in swept.variants()] == [["sex"], ["sex"]]


def test_a_run_without_a_word_on_stratifying_was_not_stratified(tmp_path: Path) -> None:
    """As all were before there was such a word; a pool of one's own is stratified now, and that is written down."""
    (new,) = go(tiny(rounds=0), tmp_path).folders
    (old,) = go(tiny(rounds=0, split={"stratify": False}), tmp_path).folders
    assert open_run(new).experiment.split == {"stratify": True}
    text = (old / "config.toml").read_text()
    assert "stratify = false" in text
    edit(old / "config.toml", "stratify = false", "")
    for folder in (new, old):
        opened = open_run(folder)
        assert opened.job(data=POOL).task.hash == opened.config["task-hash"]


def test_one_is_told_of_unused_groups_before_training(tmp_path: Path) -> None:
    source = lesions(tmp_path / "lesions")
    text = (source / "metadata.csv").read_text()
    (source / "metadata.csv").write_text(text.replace("patient_id", "record"))
    (tmp_path / "mine.toml").write_text(f'[data]\nsource = "folder:{source}"\n')
    experiment = Experiment.load(str(tmp_path / "mine.toml"), ["rounds=0", "baselines=false", "seeds=[0,1]"])
    with pytest.warns(UserWarning, match=r'set group = "record" in \[data\] columns') as told:
        run(experiment, tmp_path, engine="sequential")
    assert len([w for w in told if "looks like" in str(w.message)]) == 1  # once, not for every seed
