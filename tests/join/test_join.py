"""An unseen client joins a trained run: the same answers as the run's own scores, files whole or not at all."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import shutil
import sys
import tomllib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor, nn

import fedshift
from fedshift import Experiment, UserError, cli
from fedshift.core import rng
from fedshift.core.method import Method
from fedshift.core.registry import METHODS
from fedshift.core.tree import Tree
from fedshift.data.task import Task
from fedshift.engines.base import Compute
from fedshift.engines.reference import predictions
from fedshift.engines.sequential import Sequential
from fedshift.join import Joined, join, load
from fedshift.join.classification import classification
from fedshift.join.images import read_images
from fedshift.join.joining import Prediction
from fedshift.join.report import classes_table, summary
from fedshift.runs.open import choose_adapter
from fedshift.runs.session import Session
from fedshift.runs.setup import make_setup, make_task
from fedshift.store.folder import RunFolder
from fedshift.store.metric import Metric
from tests.conftest import edit, some_of

UNSEEN = "font"
TENT = {"name": "tent", "lr": 0.01, "batch-size": 16}
ADAPTERS: dict[str, list[Any]] = {
    "fedavg": ["none", TENT, {"name": "tent", "label": "strong", "lr": 0.1}, "t3a"],
    "fedbn": ["none", {"name": "fedbn-align", "passes": 2}, "bn"],
    "fedrep": ["none", "tent"],
    "fedthe": ["none", "the"],
    "fedicon": ["none", {"name": "fedicon", "lr": 0.05, "flip": False}],
    "fdse": ["none", {"name": "fdse-align", "epochs": 2, "lr": 0.1}],
    "fedtta": ["none", "fedtta", {"name": "fedtta", "label": "++", "steps": 5, "patience": 5}],
    "heterofedtta": ["none", "fedtta"],
}
MEASURED = Metric("", "original", "unseen")
GIVE_NOTHING = {"local", "lg-fedavg"}


def experiment(**changes: object) -> Experiment:
    settings: dict[str, object] = {
        "name": "tiny", "rounds": 2, "baselines": False, "data": {"size": 8, "limit": 240},
        "split": {"unseen": [UNSEEN], "public": 0.1}, "model": {"name": "mlp", "hidden": [12], "norm": True},
        "train": {"lr": 0.1, "batch-size": 16, "momentum": 0.9}, "evaluate": {"every": 0},
        "method": [{"name": name, "adapters": ADAPTERS.get(name, ["none"])} for name in METHODS],
    }  # fmt: skip
    return Experiment.parse({**settings, **changes})


@dataclass(frozen=True)
class World:
    """Every method trained once, and the images of a client none of them has seen, in the order of its stream."""

    experiment: Experiment
    task: Task
    runs: Path
    flat: Path
    labelled: Path

    def folder(self, method: str) -> Path:
        (found,) = (self.runs / "tiny" / method).iterdir()
        return found

    @property
    def truth(self) -> list[str]:
        return [self.task.classes[i] for i in self.task.labels[self.index].tolist()]

    @property
    def index(self) -> Tensor:
        return self.task.streams["original"].index[UNSEEN]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("join")
    chosen = experiment()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fedfa is fedavg on this network, local has nothing to give to unseen clients
        fedshift.run(chosen, root / "runs", engine="sequential")
    task = make_task(chosen, 0)
    made = World(chosen, task, root / "runs", root / "flat" / UNSEEN, root / "labelled" / UNSEEN)
    pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in task.images[made.index]]
    made.flat.mkdir(parents=True)
    for i, (picture, label) in enumerate(zip(pictures, made.truth, strict=True)):
        (made.labelled / label).mkdir(parents=True, exist_ok=True)
        picture.save(made.flat / f"{i:04}.png")
        picture.save(made.labelled / label / f"{i:04}.png")
    return made


@pytest.fixture
def a_few(world: World, tmp_path: Path) -> Path:
    """Five images without labels."""
    folder = tmp_path / "few"
    folder.mkdir()
    for path in sorted(world.flat.iterdir())[:5]:
        shutil.copy(path, folder)
    return folder


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def labels(joined: Joined) -> list[str]:
    return [item.label for item in joined.predictions]


def scored(folder: Path, adapter: str) -> list[Any]:
    """What the run says about its unseen client: samples, right answers, loss."""
    found = RunFolder(folder).scores()[adapter]
    (row,) = (row for row in found if row.selection == "best-val" and row.metric.column == MEASURED)
    return list(row.by_client[UNSEEN][:3])


def same(one: Tree, other: Tree) -> bool:
    """The same slots, names and numbers."""
    names = [{slot: set(leaves) for slot, leaves in tree.items()} for tree in (one, other)]
    assert names[0] == names[1]
    return all(torch.equal(leaf, other[slot][name]) for slot, leaves in one.items() for name, leaf in leaves.items())


def content(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def refused(*arguments: Any, **how: Any) -> str:
    """The one sentence."""
    with pytest.raises(UserError) as said:
        join(*arguments, **how)
    text = str(said.value)
    assert text
    assert "\n" not in text
    return text


# ---- the same answers as the run's own scores ---------------------------------------------------------------------------
@pytest.mark.grid
@pytest.mark.parametrize("name", some_of(sorted(METHODS)))
def test_every_method_serves_an_unseen_client_as_its_run_did_or_refuses(
    name: str, world: World, tmp_path: Path
) -> None:
    folder, out = world.folder(name), tmp_path / "out"
    offers = any(row.metric.population == "unseen" for row in RunFolder(folder).scores()["none"])
    assert offers == (name not in GIVE_NOTHING)
    if not offers:
        said = refused(folder, world.flat, out=out)
        assert said == f"'{name}' has nothing to give to an unseen client: its clients share no whole model"
        assert not out.exists()
        return
    joined = join(folder, world.flat, "none", out)
    samples, correct, _ = scored(folder, "none")
    assert len(joined.predictions) == samples
    assert sum(map(str.__eq__, labels(joined), world.truth)) == correct
    artefact = load(out)
    pixels = read_images(world.flat, (3, 8, 8), artefact.classes).pixels
    assert list(artefact.predict(pixels).labels) == labels(joined)
    assert torch.equal(artefact(pixels / 255), artefact(pixels))
    if type(artefact.method).predict is Method.predict:
        module = artefact.module()
        module.network.load_state_dict(load_file(out / "model.safetensors"), strict=True)
        with torch.no_grad():
            torch.testing.assert_close(module(pixels.movedim(1, -1)), artefact(pixels), atol=1e-5, rtol=1e-5)
    else:  # several models, or draws: one network alone would answer something else
        assert name in {"fedcir", "fedsr", "knn-per", "majority", "pfl-ensemble"}
        with pytest.raises(UserError, match=r"more than one pass of its network .* use the artefact itself"):
            artefact.module()


CASES = [(method, index) for method, adapters in ADAPTERS.items() for index in range(len(adapters))]


@pytest.mark.parametrize(("method", "index"), CASES, ids=[f"{method}-{index}" for method, index in CASES])
def test_every_answer_is_that_of_the_session(method: str, index: int, world: World, tmp_path: Path) -> None:
    (spec,) = (spec for spec in world.experiment.method if spec.name == method)
    adapter = spec.adapters[index]
    setup, compute = make_setup(world.experiment, spec, world.task), Compute()
    session = Session(setup, world.task, Sequential(compute), compute, 0, world.experiment.rounds)
    state = RunFolder(world.folder(method)).best(compute.device)
    deployed = session.unseen(session.deploy(state))[UNSEEN]
    client = world.task.client(UNSEEN)
    samples, setting = world.task.samples(client, "original"), world.task.setting("original")
    shown = list(
        predictions(
            setup.adapter(adapter, setup.method), deployed, samples, setting, rng.seed_of(0, "adapter"), compute
        )
    )
    chances, codes = torch.cat([output.logits for output, _, _ in shown]).double().softmax(1).max(1)
    joined = join(world.folder(method), world.flat, adapter.title, tmp_path / "out")
    assert labels(joined) == [world.task.classes[i] for i in codes.tolist()]
    assert [item.confidence for item in joined.predictions] == chances.tolist()
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert set(saved) == {*setup.method.arch.parameters, *setup.method.arch.buffers}
    assert all(torch.equal(leaf, deployed["model"][name]) for name, leaf in saved.items())
    artefact = load(tmp_path / "out")
    assert same(artefact.deployed, deployed)
    assert same(artefact.state, shown[-1][2])
    going_on, state = artefact.adapter(adapter.title)
    assert type(going_on) is type(setup.adapter(adapter, setup.method))
    assert same(state, shown[-1][2])
    samples_, correct, _ = scored(world.folder(method), adapter.title)
    assert (len(joined.predictions), sum(map(str.__eq__, labels(joined), world.truth))) == (samples_, correct)


@pytest.mark.parametrize("adapter", ["fedbn-align passes=2", "bn"])
def test_adapters_that_move_weights_save_what_they_moved(adapter: str, world: World, tmp_path: Path) -> None:
    for name in ("none", adapter):
        join(world.folder("fedbn"), world.flat, name, tmp_path / name)
    plain, moved = (load(tmp_path / name) for name in ("none", adapter))
    assert same(plain.deployed, moved.deployed)
    assert same(plain.state, plain.deployed)
    before, after = plain.state["model"], moved.state["model"]
    differ = {name for name, leaf in before.items() if not torch.equal(leaf, after[name])}
    statistics = {name for name in before if "running" in name or "tracked" in name}
    assert differ == (statistics if adapter.startswith("fedbn") else set())
    assert set(moved.adapters[adapter].tensors.get("model", {})) == differ


def test_the_round_is_the_one_chosen_by_validation(world: World, tmp_path: Path) -> None:
    chosen = experiment(
        rounds=4, method=[{"name": "fedrep"}], name="rough", evaluate={"every": 1},
        train={"lr": 1.0, "batch-size": 16, "momentum": 0.9},
    )  # fmt: skip
    (folder,) = fedshift.run(chosen, tmp_path, engine="sequential").folders
    best = json.loads((folder / "done").read_text())["best-round"]
    assert best < 4
    joined = join(folder, world.flat)
    assert joined.round == best
    assert sum(map(str.__eq__, labels(joined), world.truth)) == scored(folder, "none")[1]


def test_an_adapter_joins_at_the_round_that_was_best_after_its_own_adaptation(world: World, tmp_path: Path) -> None:
    method = {"name": "fedtta", "inner-lr": 0.5, "loss-lr": 0.1, "adapters": ["none", "fedtta"]}
    chosen = experiment(
        rounds=6,
        method=[method],
        name="own",
        evaluate={"every": 1, "adapted": True},
        train={"lr": 0.5, "batch-size": 16},
    )
    (folder,) = fedshift.run(chosen, tmp_path, engine="sequential").folders
    found = {title: lines[0].round for title, lines in RunFolder(folder).scores().items()
             for lines in [[line for line in lines if line.selection == "best-val"]]}  # fmt: skip
    assert found["none"] != found["fedtta"]
    for title, best in found.items():
        joined = join(folder, world.flat, title)
        assert (joined.adapter, joined.round) == (title, best)
        assert sum(map(str.__eq__, labels(joined), world.truth)) == scored(folder, title)[1]
    unasked = join(folder, world.flat, out=tmp_path / "unasked")
    assert (unasked.adapter, unasked.round) == ("fedtta", found["fedtta"])


def test_unseen_clients_of_a_mixed_run_choose_their_network(world: World, tmp_path: Path) -> None:
    models = [{"name": "mlp", "hidden": [6]}, {"name": "mlp", "label": "big", "hidden": [9]}]
    mixed = experiment(
        model=models, split={"unseen": ["pen", UNSEEN], "public": 0.1}, method=[{"name": "fedmd"}], name="mixed"
    )
    (folder,) = fedshift.run(mixed, tmp_path, engine="sequential").folders
    task = make_task(mixed, 0)
    names = [client.name for client in task.unseen]
    assert set(names) == {"pen", UNSEEN}
    for name, network in zip(names, ("mlp", "big"), strict=True):
        source = tmp_path / name
        source.mkdir()
        index = task.streams["original"].index[name]
        for i, image in enumerate(task.images[index]):
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(source / f"{i:04}.png")
        joined = join(folder, source, model=network)
        (row,) = (row for row in RunFolder(folder).scores()["none"]
                  if row.selection == "best-val" and row.metric.column == MEASURED)  # fmt: skip
        truth = [task.classes[i] for i in task.labels[index].tolist()]
        assert row.by_client[name][:2] == (len(truth), sum(map(str.__eq__, labels(joined), truth)))
        assert load(joined.files[0].parent).method.arch.feature_size == {"mlp": 6, "big": 9}[network]
    assert joined.networks == ("mlp", "big")
    assert refused(folder, source, model="cnn", out=tmp_path / "x").endswith("it has: mlp, big")


def test_a_run_needs_neither_its_data_nor_its_clients(world: World, a_few: Path, tmp_path: Path) -> None:
    """FedRep's and FedTHE's unseen clients get what the others gave after phases that need the clients' data."""
    for method in ("fedrep", "fedthe"):
        moved = tmp_path / method
        moved.mkdir()
        for name in ("config.toml", "snapshot.safetensors", "done", "metrics.jsonl"):
            shutil.copy(world.folder(method) / name, moved)
        edit(moved / "config.toml", 'source = "embedded:digits"', 'source = "parquet:/nowhere/*.parquet"')
        there = join(world.folder(method), a_few, "none", tmp_path / f"{method}-a")
        assert join(moved, a_few, "none").predictions == there.predictions


# ---- what is written ----------------------------------------------------------------------------------------------------
def test_the_folder_of_an_unseen_client(world: World, a_few: Path) -> None:
    run = world.folder("fedavg")
    joined = join(run, a_few, "strong")
    folder = run / "joined" / "few-strong"
    assert [path.relative_to(folder).as_posix() for path in joined.files] == [
        "config.toml", "model.safetensors", "predictions.csv", "report.json", "adapters/strong.safetensors"
    ]  # fmt: skip
    assert set(content(folder)) == {path.relative_to(folder).as_posix() for path in joined.files}
    assert [path.name for path in folder.parent.iterdir() if path.name.startswith(".")] == []
    listed = rows(folder / "predictions.csv")
    assert [row["file"] for row in listed] == [f"{i:04}.png" for i in range(5)]
    assert [row["label"] for row in listed] == labels(joined)
    assert [float(row["confidence"]) for row in listed] == [round(p.confidence, 6) for p in joined.predictions]
    assert list(listed[0]) == ["file", "label", "confidence", *world.task.classes]
    for row in listed:
        chances = {name: float(row[name]) for name in world.task.classes}
        assert sum(chances.values()) == pytest.approx(1, abs=1e-7)
        assert max(chances, key=lambda name: chances[name]) == row["label"]
        assert max(chances.values()) == pytest.approx(float(row["confidence"]), abs=1e-6)
    config = tomllib.loads((folder / "config.toml").read_text())
    assert config["classes"] == list(world.task.classes)
    assert config["input"] | {"scale": ""} == {
        "channels": 3, "height": 8, "width": 8, "mean": [0.5], "std": [0.5], "scale": ""
    }  # fmt: skip
    assert config["network"] == {"name": "mlp", "hidden": [12], "norm": True}
    assert config["method"] == {"name": "fedavg"}
    (adapter,) = config["adapter"]
    assert (adapter["name"], adapter["label"], adapter["lr"], adapter["batch-size"]) == ("tent", "strong", 0.1, 32)
    assert (config["format"], config["client"], config["using"]) == (2, "few", "strong")
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in content(folder).items()}
    assert config["files"] == {name: digests[name] for name in ("model.safetensors", "adapters/strong.safetensors")}
    assert config["origin"]["task-hash"] == world.task.hash
    assert config["origin"]["run"] == str(run.resolve())
    assert (config["origin"]["seed"], config["origin"]["selection"]) == (0, "best-val")
    assert config["versions"]["fedshift"] == fedshift.__version__
    assert "accuracy" not in config
    assert json.loads((run / "done").read_text())["seed"] == 0  # the run itself is as it was


def test_an_artefact_is_a_function_and_its_network_a_module(world: World, a_few: Path, tmp_path: Path) -> None:
    joined = join(world.folder("fedthe"), a_few, "none", tmp_path / "out")
    artefact = load(tmp_path / "out")
    pixels = read_images(a_few, (3, 8, 8), artefact.classes).pixels
    x = pixels / 255
    assert artefact(x).double().softmax(1).amax(1).tolist() == [item.confidence for item in joined.predictions]
    assert artefact(x).double().softmax(1).tolist() == [list(item.probabilities) for item in joined.predictions]
    module = artefact.module()
    assert not module.training
    torch.testing.assert_close(module(pixels.movedim(1, -1)), artefact(x))


def test_nothing_is_written_over(world: World, a_few: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    join(world.folder("fedavg"), a_few, out=out)
    before = content(out)
    said = refused(world.folder("fedavg"), a_few, out=out)
    assert said == f"{out} is there already; choose another folder with --out, or remove it"
    assert content(out) == before
    (tmp_path / "file").write_text("local")
    assert "cannot be written" in refused(world.folder("fedavg"), a_few, out=tmp_path / "file" / "out")
    assert (tmp_path / "file").read_text() == "local"


def test_a_failure_while_writing_leaves_nothing(
    world: World, a_few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedshift.runs.new_folder.os.fsync", broken)
    said = refused(world.folder("fedavg"), a_few, out=tmp_path / "new" / "out")
    assert "No space left on device" in said
    assert not (tmp_path / "new").exists()


def test_the_same_call_writes_the_same_bytes(world: World, a_few: Path, tmp_path: Path) -> None:
    for name in "ab":
        join(world.folder("fedicon"), a_few, "fedicon", tmp_path / name)
    assert content(tmp_path / "a") == content(tmp_path / "b")


# ---- images -------------------------------------------------------------------------------------------------------------
def test_labels_are_compared_with_and_change_nothing(world: World, tmp_path: Path) -> None:
    folder = world.folder("fedavg")
    joined = join(folder, world.labelled, out=tmp_path / "none")
    samples, correct, _ = scored(folder, "none")
    assert joined.accuracy == correct / samples
    assert tomllib.loads((tmp_path / "none" / "config.toml").read_text())["accuracy"] == correct / samples
    assert [item.file for item in joined.predictions] == sorted(
        f"{label}/{i:04}.png" for i, label in enumerate(world.truth)
    )
    plain = join(folder, world.flat, out=tmp_path / "flat")
    assert plain.accuracy is None
    flat = {item.file: item.label for item in plain.predictions}
    assert {item.file.split("/")[1]: item.label for item in joined.predictions} == flat


def test_the_report_is_that_of_scikit_learn(world: World, tmp_path: Path) -> None:
    from sklearn.metrics import classification_report

    joined = join(world.folder("fedavg"), world.labelled, out=tmp_path / "out")
    truth = [item.file.split("/")[0] for item in joined.predictions]
    expected = classification_report(truth, labels(joined), output_dict=True, zero_division=0)
    found = json.loads((tmp_path / "out" / "report.json").read_text())["classification"]
    assert found == joined.report
    assert {**found["classes"], **{key: value for key, value in found.items() if key != "classes"}} == expected
    assert found["accuracy"] == joined.accuracy
    plain = join(world.folder("fedavg"), world.flat, out=tmp_path / "flat")
    assert plain.report is None
    assert "classification" not in json.loads((tmp_path / "flat" / "report.json").read_text())


def test_a_class_may_be_called_like_a_column_or_an_average(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).integers(0, 256, (60, 8, 8, 3), dtype=np.uint8)
    names = ["label", "macro avg", "[red]x"]
    pool = fedshift.from_arrays(numbers, [names[i % 3] for i in range(60)], domains=["ab"[i % 2] for i in range(60)])
    chosen = experiment(data={}, split={}, method=[{"name": "fedavg"}], rounds=1)
    (folder,) = fedshift.run(chosen, tmp_path, engine="sequential", data=pool).folders
    for i in range(6):
        (tmp_path / "new" / names[i % 3]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(numbers[i]).save(tmp_path / "new" / names[i % 3] / f"{i}.png")
    joined = join(folder, tmp_path / "new")
    assert joined.report is not None
    assert set(joined.report["classes"]) <= set(names)
    assert sum(own["support"] for own in joined.report["classes"].values()) == 6
    listed = rows(joined.files[0].parent / "predictions.csv")
    assert set(listed[0]) == {"file", "label", "confidence", "label (class)", "macro avg", "[red]x"}
    assert all(row["label"] in names for row in listed)
    text = io.StringIO()
    Console(file=text, width=100).print(classes_table(joined.report))
    Console(file=text, width=100).print(summary(joined))
    assert text.getvalue().count("[red]x") >= 1


def test_class_folders_are_not_shown_class_by_class(world: World, tmp_path: Path) -> None:
    """Tent would see batches of one class, and the order would tell the labels: other folders, the same answers."""
    renamed = tmp_path / UNSEEN
    turned = dict(zip(world.task.classes, reversed(world.task.classes), strict=True))
    for path in world.labelled.rglob("*.png"):
        target = renamed / turned[path.parent.name] / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    one, other = (join(world.folder("fedavg"), source, "strong", tmp_path / str(i))
                  for i, source in enumerate((world.labelled, renamed)))  # fmt: skip
    answers = [{Path(p.file).name: (p.label, p.confidence) for p in joined.predictions} for joined in (one, other)]
    assert answers[0] == answers[1]
    assert one.accuracy != other.accuracy


def test_rows_of_a_labelled_table_are_not_shown_in_their_order(world: World, tmp_path: Path) -> None:
    """A table sorted by class would show an adapter one class after the other."""
    files = sorted(world.labelled.rglob("*.png"))
    answers = []
    for number, order in enumerate((files, files[::-1])):
        rows = [{"image": {"bytes": path.read_bytes(), "path": path.name}, "label": path.parent.name} for path in order]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{number}.parquet")
        joined = join(world.folder("fedavg"), tmp_path / f"{number}.parquet", "strong", tmp_path / str(number))
        answers.append({item.file: (item.label, item.confidence) for item in joined.predictions})
    assert answers[0] == answers[1]


def test_a_method_with_an_adapter_of_its_own_adapts_without_being_asked(world: World, tmp_path: Path) -> None:
    for name in ("fedtta", "heterofedtta"):
        joined = join(world.folder(name), world.flat, out=tmp_path / name)
        asked = join(world.folder(name), world.flat, "fedtta", tmp_path / f"{name} asked")
        assert (joined.adapter, joined.predictions) == ("fedtta", asked.predictions)
        plain = join(world.folder(name), world.flat, "none", tmp_path / f"{name} none")
        assert plain.predictions != joined.predictions


@pytest.mark.parametrize("method", ["fedtta", "heterofedtta"])
def test_the_learnt_loss_needs_one_image_only(method: str, world: World, a_few: Path, tmp_path: Path) -> None:
    joined = join(world.folder(method), sorted(a_few.iterdir())[0], "fedtta", tmp_path / "out")
    assert len(joined.predictions) == 1
    assert 0 < joined.predictions[0].confidence <= 1


@pytest.mark.parametrize(
    "adapter", ["none", "tent lr=0.01 batch-size=16", "t3a", "bn", "memo", "fedicon", "fedbn-align"]
)
def test_one_image_is_enough(adapter: str, world: World, a_few: Path, tmp_path: Path) -> None:
    picture = sorted(a_few.iterdir())[0]
    joined = join(world.folder("fedavg"), picture, adapter, tmp_path / "out")
    assert (joined.client, len(joined.predictions), joined.predictions[0].file) == ("0000", 1, "0000.png")
    assert joined.predictions[0].label in world.task.classes
    assert 0 < joined.predictions[0].confidence <= 1


def test_other_sizes_and_colours_are_converted_and_counted(world: World, a_few: Path, tmp_path: Path) -> None:
    paths = sorted(a_few.iterdir())
    with Image.open(paths[0]) as opened:
        opened.resize((30, 20)).save(paths[0])
    with Image.open(paths[1]) as opened:
        opened.convert("L").save(paths[1])
    joined = join(world.folder("fedavg"), a_few, out=tmp_path / "out")
    assert joined.notes == ("1 of 5 images were resized to 8x8", "1 of 5 images were converted to colour")
    config = tomllib.loads((tmp_path / "out" / "config.toml").read_text())
    assert (config["images"], config["resized"], config["converted"]) == (5, 1, 1)


def test_files_that_are_no_pictures_are_named(world: World, a_few: Path, tmp_path: Path) -> None:
    """A folder of which half is left out in silence would look like a whole one."""
    (a_few / "scan.xcf").touch()
    (a_few / ".hidden").touch()
    joined = join(world.folder("fedavg"), a_few, out=tmp_path / "one")
    kinds = "no picture (bmp, dcm, dicom, ima, jpeg, jpg, png, tif, tiff, webp)"
    assert joined.notes == (f"1 file was left out, because it is {kinds}: scan.xcf",)
    for name in "abc":
        (a_few / f"{name}.txt").touch()
    joined = join(world.folder("fedavg"), a_few, out=tmp_path / "four")
    assert joined.notes == (f"4 files were left out, because they are {kinds}: a.txt, b.txt, c.txt, ...",)
    assert len(joined.predictions) == 5


def test_runs_on_images_that_are_grey_and_not_square(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).integers(0, 256, (60, 1, 4, 6), dtype=np.uint8)
    pool = fedshift.from_arrays(numbers, ["ab"[i % 2] for i in range(60)], domains=["xyz"[i % 3] for i in range(60)])
    chosen = experiment(
        data={"channels": 1}, split={}, method=[{"name": "fedavg"}], model={"name": "mlp", "hidden": [3]}, rounds=1
    )
    (folder,) = fedshift.run(chosen, tmp_path, engine="sequential", data=pool).folders
    source = tmp_path / "new"
    source.mkdir()
    Image.fromarray(numbers[0, 0]).save(source / "same.png")
    Image.new("RGB", (4, 6)).save(source / "turned.png")
    images = read_images(source, (1, 4, 6), ("a", "b"))
    assert torch.equal(images.pixels[0], torch.from_numpy(numbers[0]))
    assert (images.resized, images.converted) == (1, 1)
    assert len(join(folder, source).predictions) == 2


def parquet(path: Path, source: Path, **columns: list[Any]) -> Path:
    pictures = [{"bytes": file.read_bytes(), "path": file.name} for file in sorted(source.iterdir())]
    pq.write_table(pa.table({"image": pictures, **columns}), path)
    return path


def test_parquet_with_and_without_labels(world: World, a_few: Path, tmp_path: Path) -> None:
    run, count = world.folder("fedavg"), 5
    pictures = join(run, a_few, out=tmp_path / "a")
    truth = world.truth[:count]
    plain = join(run, parquet(tmp_path / "plain.parquet", a_few), out=tmp_path / "b")
    assert plain.predictions == pictures.predictions
    assert plain.accuracy is None
    known = join(run, parquet(tmp_path / "known.parquet", a_few, label=[int(t) for t in truth]), out=tmp_path / "c")
    assert known.predictions == pictures.predictions
    assert known.accuracy == sum(map(str.__eq__, labels(known), truth)) / count
    unknown = join(run, parquet(tmp_path / "unknown.parquet", a_few, label=[-1] * count), out=tmp_path / "d")
    assert unknown.accuracy is None
    (tmp_path / "tables").mkdir()
    pq.write_table(
        pa.table({"img": [file.read_bytes() for file in sorted(a_few.iterdir())]}), tmp_path / "tables" / "x.parquet"
    )
    bare = join(run, tmp_path / "tables", out=tmp_path / "e")
    assert [item.file for item in bare.predictions] == [f"x.parquet#{i}" for i in range(count)]
    assert labels(bare) == labels(pictures)


def test_parquet_in_the_runs_own_columns(tmp_path: Path, world: World, a_few: Path) -> None:
    table = parquet(tmp_path / "x.parquet", a_few)
    pq.write_table(pq.read_table(table).rename_columns(["scan"]), table)
    assert len(read_images(table, (3, 8, 8), ("0",), {"image": "scan", "label": "finding"}).names) == 5
    with pytest.raises(UserError, match="no column of pictures that is known by name: scan"):
        read_images(table, (3, 8, 8), ("0",))


# ---- images that cannot be read ------------------------------------------------------------------------------------------
def test_a_broken_image_is_named_and_skipped(world: World, a_few: Path, tmp_path: Path) -> None:
    run = world.folder("fedavg")
    whole = join(run, a_few, out=tmp_path / "whole")
    (a_few / "0001.png").write_bytes(b"no picture")
    cut = a_few / "0003.png"
    cut.write_bytes(cut.read_bytes()[:60])
    joined = join(run, a_few, out=tmp_path / "out")
    kept = tuple(item for item in whole.predictions if item.file not in ("0001.png", "0003.png"))
    assert [item.file for item in joined.predictions] == [item.file for item in kept]
    assert [item.label for item in joined.predictions] == [item.label for item in kept]
    for one, other in zip(joined.predictions, kept, strict=True):
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-6)
    assert [file for file, _ in joined.skipped] == ["0001.png", "0003.png"]
    assert joined.notes[0].startswith(
        "2 of 5 images cannot be read and were skipped: 0001.png (its format is not known), 0003.png ("
    )
    said = json.loads((tmp_path / "out" / "report.json").read_text())
    assert said["skipped"][0] == {"file": "0001.png", "why": "its format is not known"}
    assert (said["images"], len(rows(tmp_path / "out" / "predictions.csv"))) == (3, 3)
    config = tomllib.loads((tmp_path / "out" / "config.toml").read_text())
    assert (config["images"], config["skipped"]) == (3, 2)
    strict = refused(run, a_few, out=tmp_path / "strict", strict=True)
    assert strict == "the image in 0001.png cannot be decoded: its format is not known"
    assert not (tmp_path / "strict").exists()


def test_nothing_but_broken_images_is_an_error(world: World, a_few: Path, tmp_path: Path) -> None:
    for path in a_few.iterdir():
        path.write_bytes(b"no picture")
    said = refused(world.folder("fedavg"), a_few, out=tmp_path / "out")
    assert said.startswith("none of the 5 images can be read: the image in 0000.png cannot be decoded")
    one = refused(world.folder("fedavg"), a_few / "0002.png", out=tmp_path / "out")
    assert one == "the image in 0002.png cannot be decoded: its format is not known"
    assert not (tmp_path / "out").exists()


def test_a_row_without_a_picture_is_skipped_with_its_label(world: World, a_few: Path, tmp_path: Path) -> None:
    files = sorted(a_few.iterdir())
    pictures = [None if i == 2 else {"bytes": file.read_bytes(), "path": file.name} for i, file in enumerate(files)]
    truth = [int(label) for label in world.truth[:5]]
    pq.write_table(pa.table({"image": pictures, "label": truth}), tmp_path / "x.parquet")
    joined = join(world.folder("fedavg"), tmp_path / "x.parquet", out=tmp_path / "out")
    assert [file for file, _ in joined.skipped] == ["x.parquet#2"]
    left = [str(label) for i, label in enumerate(truth) if i != 2]
    assert joined.right == tuple(map(str.__eq__, labels(joined), left))


# ---- what cannot be done ------------------------------------------------------------------------------------------------
def bad_data(root: Path, source: Path) -> Iterator[tuple[str, Path, str]]:
    """What is wrong, where it lies, and what is said."""
    pictures = sorted(source.iterdir())
    yield "missing", root / "missing", "there is no file or folder"
    empty = root / "empty"
    empty.mkdir()
    (empty / "notes.txt").write_text("no picture")
    yield "empty", empty, "there are no pictures in"
    broken = root / "broken"
    shutil.copytree(source, broken)
    (broken / "0003.png").write_bytes(b"no picture")
    yield "undecodable", broken, "0003.png cannot be decoded: its format is not known"
    cut = root / "cut"
    shutil.copytree(source, cut)
    (cut / "0004.png").write_bytes(pictures[4].read_bytes()[:60])
    yield "cut off", cut, "0004.png cannot be decoded"
    strange = root / "strange"
    for label in ("3", "cat"):
        (strange / label).mkdir(parents=True)
        shutil.copy(pictures[0], strange / label)
    yield "strange label", strange, "the label 'cat' of cat/0000.png is none of the run's classes (0, 1, 2,"
    mixed = root / "mixed"
    shutil.copytree(source, mixed / "3")
    shutil.copy(pictures[0], mixed)
    yield "mixed depths", mixed, "some lie in both"
    deep = root / "deep"
    shutil.copytree(source, deep / "a" / "3")
    yield "too deep", deep, "a/3/0000.png lie deeper"
    yield "strange number", parquet(root / "a.parquet", source, label=[1, 2, 3, 4, 99]), "the label '99' of 0004.png is"
    yield "some labels", parquet(root / "b.parquet", source, label=[1, 2, None, 4, 5]), "0002.png has no label"
    yield "odd labels", parquet(root / "c.parquet", source, label=[0.5] * 5), "must be a string or an integer"
    none = pa.table({"image": pa.array([], pa.struct([("bytes", pa.binary()), ("path", pa.string())]))})
    pq.write_table(none, root / "d.parquet")
    yield "no rows", root / "d.parquet", "d.parquet holds no images"
    (root / "e.parquet").write_bytes(b"no table")
    yield "no table", root / "e.parquet", "cannot be read as Parquet"
    (root / "f.csv").write_text("a,b")
    yield "no paths", root / "f.csv", "f.csv has no column of pictures that is known by name: a, b"
    (root / "f.txt").write_text("a,b")
    yield "no picture", root / "f.txt", "neither a folder nor a picture"


def test_bad_data_get_one_sentence_and_nothing_is_written(world: World, a_few: Path, tmp_path: Path) -> None:
    root = tmp_path / "bad"
    root.mkdir()
    for what, path, said in bad_data(root, a_few):
        assert said in refused(world.folder("fedavg"), path, out=tmp_path / "new" / "out", strict=True), what
        assert not (tmp_path / "new").exists(), what


def test_a_run_is_chosen_by_method_and_seed(world: World, a_few: Path, tmp_path: Path) -> None:
    two = experiment(seeds=[0, 1], rounds=1, method=[{"name": "fedavg", "label": "plain"}], name="two")
    folders = fedshift.run(two, tmp_path, engine="sequential").folders
    said = refused(tmp_path / "two", a_few)
    assert said.startswith(f"{tmp_path / 'two'} holds 2 finished runs, and one is wanted: add --method and --seed")
    assert all(f"plain/{folder.name}" in said for folder in folders)
    assert join(tmp_path, a_few, seed=1).run == folders[1]
    assert "no finished run of method 'fancy'; it has: two/plain/" in refused(tmp_path, a_few, method="fancy")
    assert "no finished run of method 'plain' and seed 7" in refused(tmp_path, a_few, method="plain", seed=7)
    shutil.rmtree(folders[1])
    assert join(tmp_path, a_few).run == folders[0]


def test_unfinished_old_and_damaged_runs_are_refused(world: World, a_few: Path, tmp_path: Path) -> None:
    def copy(name: str, *without: str) -> Path:
        ignored = shutil.ignore_patterns("joined", *without)
        return Path(shutil.copytree(world.folder("fedavg"), tmp_path / name, ignore=ignored))

    assert "is not finished: go on with fedshift run ... --resume" in refused(copy("unfinished", "done"), a_few)
    assert "has no snapshot.safetensors" in refused(copy("old", "snapshot.safetensors"), a_few)
    damaged = copy("damaged")
    (damaged / "snapshot.safetensors").write_bytes(b"x" * 100)
    assert "is damaged" in refused(damaged, a_few)
    other = copy("other")
    edit(other / "config.toml", "hidden = [12]", "hidden = [13]")
    assert "was trained with another network than its config.toml makes now" in refused(other, a_few)
    assert "there is no folder" in refused(tmp_path / "nowhere", a_few)
    assert "is not a run folder" in refused(sorted(a_few.iterdir())[0], a_few)
    assert "holds no finished run" in refused(a_few, a_few)


def test_a_run_of_an_older_version_is_completed_without_training(world: World, a_few: Path, tmp_path: Path) -> None:
    chosen = experiment(rounds=1, method=[{"name": "fedrep"}], name="older")
    (folder,) = fedshift.run(chosen, tmp_path, engine="sequential").folders
    kept = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    (folder / "snapshot.safetensors").unlink()
    assert "repeat its fedshift run to add it" in refused(folder, a_few)
    fedshift.run(chosen, tmp_path, engine="sequential")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == kept
    assert len(join(folder, a_few).predictions) == 5


def test_adapters_by_label_name_and_default(world: World, a_few: Path, tmp_path: Path) -> None:
    run = world.folder("fedavg")
    assert join(run, a_few, out=tmp_path / "a").adapter == "none"
    assert join(run, a_few, "strong", tmp_path / "b").adapter == "strong"
    joined = join(run, a_few, "memo", tmp_path / "c")  # the run was never scored with it
    assert joined.adapter == "memo"
    assert joined.scored == ("none", "strong", "t3a", "tent lr=0.01 batch-size=16")
    assert "choose one by its label: 'strong', 'tent lr=0.01 batch-size=16'" in refused(run, a_few, "tent")
    assert refused(run, a_few, "tend") == "there is no adapter 'tend'; did you mean 'tent'?"
    assert "adapter 'the' needs feature descriptors, a global head" in refused(run, a_few, "the")
    with pytest.raises(UserError, match="choose an adapter with --adapter: none, or strong, t3a"):
        choose_adapter({name: choose_adapter({}, "t3a") for name in ("strong", "t3a")}, None)


# ---- a user's own parts -------------------------------------------------------------------------------------------------
class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(192, 5), nn.Linear(5, 11)  # one output more than there are classes

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.first(x.flatten(1)).tanh())
        return logits


def test_runs_on_ones_own_network_join_in_python(world: World, a_few: Path, tmp_path: Path) -> None:
    chosen = experiment(rounds=1, method=[{"name": "fedavg"}], name="own")
    (folder,) = fedshift.run(chosen, tmp_path, engine="sequential", network=Own).folders
    assert "if it is your own, join in Python" in refused(folder, a_few)
    joined = join(folder, a_few, network=Own)
    artefact = load(joined.files[0].parent, network=Own)
    assert isinstance(artefact.module().network, Own)
    assert joined.classes == (*world.task.classes, "10")  # the network's output beyond the classes has its number
    assert len(joined.predictions) == 5


def test_a_lost_weights_file_matters_only_where_unseen_clients_train(world: World, a_few: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from fedshift.models.mlp import MLP

    torch.manual_seed(0)
    weights = tmp_path / "start.safetensors"
    save_file(MLP(hidden=(4,)).make((3, 8, 8), 10).state_dict(), weights)
    model = {"name": "mlp", "hidden": [4], "weights": str(weights)}
    methods = [{"name": "fedavg"}, {"name": "fedmd"}]
    folders = fedshift.run(experiment(rounds=1, model=model, method=methods), tmp_path, engine="sequential").folders
    with_file = join(folders[0], a_few, out=tmp_path / "a")
    assert join(folders[1], a_few, out=tmp_path / "b").predictions
    weights.unlink()
    assert join(folders[0], a_few, out=tmp_path / "c").predictions == with_file.predictions
    assert f"starts from the weights file {weights}, which is not there" in refused(folders[1], a_few)
    assert load(tmp_path / "c").state["model"].keys() == load(tmp_path / "a").state["model"].keys()


# ---- the command --------------------------------------------------------------------------------------------------------
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object
) -> tuple[int, str, str]:
    """A command's exit code, what it prints and what it complains about."""
    monkeypatch.setattr("sys.argv", ["fedshift", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, " ".join(said.err.split())


def test_the_command_says_what_it_did(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments: Sequence[object] = (world.runs, "--method", "fedbn", "--data", world.labelled, "--out", out)
    code, said, _ = command(monkeypatch, capsys, "join", *arguments)
    assert code == 0
    samples, correct, _ = scored(world.folder("fedbn"), "none")
    listed = rows(out / "predictions.csv")
    assert f"{UNSEEN} joined fedbn, seed 0" in said
    assert f"Accuracy: {100 * correct / samples:.1f} %." in said
    assert "Adapters this run was scored with: none, bn, fedbn-align passes=2" in said
    assert f"Files in {out}: config.toml, model.safetensors, predictions.csv, report.json, adapters/none.safe" in said
    first, compared = said.split("Compared with the labels")
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in first.splitlines() if line.startswith("│")]
    counts = {row[0]: int(row[1]) for row in cells}
    assert "macro avg" in compared
    assert counts.pop("all") == samples
    assert counts == {label: [row["label"] for row in listed].count(label) for label in counts}
    code, _, complaint = command(monkeypatch, capsys, "join", *arguments)
    assert code == 2
    assert complaint == f"error: {out} is there already; choose another folder with --out, or remove it"


def test_the_command_gives_json_and_skips_what_it_cannot_read(
    world: World, a_few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (a_few / "[red]bad.png").write_bytes(b"no picture")
    arguments: Sequence[object] = (world.folder("fedavg"), "--data", a_few)
    code, said, _ = command(monkeypatch, capsys, "join", *arguments, "--out", tmp_path / "a", "--format", "json")
    assert code == 0
    found = json.loads(said)
    assert (found["images"], found["adapter"], len(found["skipped"])) == (5, "none", 1)
    assert str(tmp_path / "a" / "predictions.csv") in found["files"]
    del found["files"]
    assert found == json.loads((tmp_path / "a" / "report.json").read_text())
    code, said, _ = command(monkeypatch, capsys, "join", *arguments, "--out", tmp_path / "b")
    assert code == 0
    assert "1 of 6 images cannot be read and was skipped: [red]bad.png (its format is not known)." in said
    code, said, complaint = command(monkeypatch, capsys, "join", *arguments, "--out", tmp_path / "c", "--strict")
    assert (code, said) == (2, "")
    assert complaint == "error: the image in [red]bad.png cannot be decoded: its format is not known"


def test_the_command_refuses_with_exit_code_two(
    world: World, a_few: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong: Mapping[str, Sequence[object]] = {
        "has nothing to give": (world.folder("local"), "--data", a_few),
        "nothing to give": (world.folder("lg-fedavg"), "--data", a_few),
        "finished runs, and one is wanted": (world.runs, "--data", a_few),
        "there is no file or folder": (world.folder("fedavg"), "--data", a_few / "missing"),
        "there is no adapter 'nothing'": (world.folder("fedavg"), "--data", a_few, "--adapter", "nothing"),
        "there is no device 'toaster'": (world.folder("fedavg"), "--data", a_few, "--device", "toaster"),
    }
    before = sorted(world.runs.rglob("*"))
    for part, arguments in wrong.items():
        code, _, complaint = command(monkeypatch, capsys, "join", *arguments)
        assert code == 2
        assert part in complaint
    assert sorted(world.runs.rglob("*")) == before


def test_many_classes_are_summed_up(tmp_path: Path) -> None:
    answers = tuple(Prediction(f"{i}.png", f"class {i % 40}", 0.5) for i in range(60))
    joined = Joined("c", tmp_path, "m", 0, 1, "mlp", "none", ("none",), ("mlp",), answers, None, (), ())
    text = io.StringIO()
    Console(file=text, width=100).print(summary(joined))
    assert "10 more classes" in text.getvalue()
    assert "0.500" in text.getvalue()
    codes = torch.arange(60) % 40
    Console(file=text, width=100).print(classes_table(classification(codes, codes, [f"class {i}" for i in range(40)])))
    assert "10 smaller classes: see report.json" in text.getvalue()


def test_a_run_whose_uploads_were_hidden_is_joined_without_what_hid_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever joins trains nobody: sums among parties, and a budget of epsilon, are no business of his."""
    made = experiment(
        rounds=1,
        train={"lr": 0.1, "weights": "uniform"},
        model={"name": "mlp", "hidden": [12]},
        method=[{"name": "fedavg"}],
        privacy={"clip": 1.0, "noise": 4.0, "epsilon": 2.0, "secure": True},
    )
    folder = fedshift.run(made, out=tmp_path, engine="sequential").folders[0]
    monkeypatch.setitem(sys.modules, "opacus.accountants", None)
    monkeypatch.setattr("fedshift.runs.private.find_spec", lambda _: None)
    (tmp_path / "images").mkdir()
    Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(tmp_path / "images" / "one.png")
    assert len(join(folder, tmp_path / "images").predictions) == 1
