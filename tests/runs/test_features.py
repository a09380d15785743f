"""Features saved with a run, t-SNE of them, and radars of accuracies by client."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors import safe_open

from fedshift import Experiment, UserError, cli
from fedshift.core.arch import Arch
from fedshift.core.tree import Tensors
from fedshift.data.task import Task
from fedshift.experiment.schema import MethodSpec
from fedshift.results.plots.pictures import draw, radar_numbers, radar_picture, tsne_picture
from fedshift.results.plots.tsne import embedded
from fedshift.results.result import Result, Row
from fedshift.runs import evaluate as scoring
from fedshift.runs.features import stream_of
from fedshift.runs.progress import Silent
from fedshift.runs.setup import make_setup, make_task
from fedshift.store.features import Features, positions_of
from fedshift.store.folder import FEATURES
from fedshift.store.metric import Metric
from fedshift.store.rows import ScoreRow
from fedshift.store.summary import ClientScore, Summary
from fedshift.store.trees import load
from tests.conftest import ragged_task
from tests.runs.test_run import POOL, SIZES, command, go, tiny

STREAMS = [{"name": "corrupted", "kind": "corrupted"}, {"name": "original", "kind": "original"}]


def with_features(count: int, **changes: object) -> Experiment:
    return tiny(**{"evaluate": {"every": 1, "features": count}, "stream": STREAMS, **changes})


def network(experiment: Experiment, task: Task) -> Arch:
    return make_setup(experiment, MethodSpec(name="fedavg"), task).method.arch


def direct(
    arch: Arch, model: Tensors, task: Task, client: str, stream: str, count: int, seed: int = 0
) -> Mapping[str, Any]:
    """A forward pass by hand."""
    samples = task.samples(task.client(client), stream)
    index = samples.index[positions_of(len(samples), count, seed, client)]
    output = arch(model, samples.images[index].float() / 255)
    answers = output.logits.argmax(1)
    return {"features": output.features, "labels": samples.labels[index], "predictions": answers}


def image_size(path: Path) -> tuple[int, int]:
    with Image.open(path) as picture:
        assert len(picture.convert("RGB").getcolors(1 << 24) or []) > 20  # not an empty sheet
        return picture.size


def error_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What a refused command says: one sentence."""
    monkeypatch.setattr(sys, "argv", ["fedshift", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said
    return said


# ---- the file ------------------------------------------------------------------------------------------------------------
def test_the_file_is_what_a_forward_pass_of_the_best_model_gives(tmp_path: Path) -> None:
    experiment = with_features(6, split={"unseen": ["south"]}, rounds=3, seeds=[2])
    (folder,) = go(experiment, tmp_path).folders
    task = make_task(experiment, 2, POOL)
    trees, facts = load(folder / "best.safetensors")
    with safe_open(folder / FEATURES, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        metadata = json.loads(file.metadata()["fedshift"])
    clients = ["east", "north", "west", "south"]
    assert metadata == {
        "clients": clients, "unseen": ["south"], "classes": list(task.classes), "round": facts["round"], "seed": 2,
        "task-hash": task.hash, "stream": "original", "at-most": 6, "seal": metadata["seal"],
    }  # fmt: skip
    sizes = [min(6, len(task.samples(task.client(name), "original"))) for name in clients]
    assert tensors["client"].tolist() == [k for k, size in enumerate(sizes) for _ in range(size)]
    assert tensors["features"].shape == (sum(sizes), 4)
    assert tensors["features"].dtype == torch.float32
    arch = network(experiment, task)
    for k, name in enumerate(clients):
        wanted = direct(arch, trees["server"]["model"], task, name, "original", 6, seed=2)
        own = tensors["client"] == k
        torch.testing.assert_close(tensors["features"][own], wanted["features"])
        assert torch.equal(tensors["labels"][own], wanted["labels"])
        assert torch.equal(tensors["predictions"][own], wanted["predictions"])
        samples = task.samples(task.client(name), "original")
        assert torch.equal(samples.labels[samples.index[tensors["positions"][own]]], tensors["labels"][own])
    made = Features.load(folder / FEATURES)
    assert torch.equal(made.features, tensors["features"])
    assert (made.clients, made.unseen, made.round) == (tuple(clients), ("south",), facts["round"])


def test_every_client_serves_with_its_own_model(tmp_path: Path) -> None:
    experiment = with_features(5, method=[{"name": "local"}])
    (folder,) = go(experiment, tmp_path).folders
    task = make_task(experiment, 0, POOL)
    trees, _ = load(folder / "best.safetensors")
    made = Features.load(folder / FEATURES)
    arch = network(experiment, task)
    for k, name in enumerate(made.clients):
        model = {**trees["server"].get("model", {}), **trees[f"client {name}"]["model"]}
        wanted = direct(arch, model, task, name, "original", 5)
        torch.testing.assert_close(made.features[made.client == k], wanted["features"])


def test_more_than_there_are_is_all_there_are(tmp_path: Path) -> None:
    experiment = with_features(1000)
    result = go(experiment, tmp_path)
    made = Features.load(result.folders[0] / FEATURES)
    task = make_task(experiment, 0, POOL)
    assert len(made.labels) == sum(len(client.test) for client in task.clients)
    # all images of the stream: the predictions are those that were scored
    right = {
        name: int((made.predictions == made.labels)[made.client == k].sum()) for k, name in enumerate(made.clients)
    }
    scored = result.rows[0].scores("global/original/clients")[0].by_client
    assert right == {name: own.correct for name, own in scored.items()}


def test_positions_are_a_function_of_the_seed() -> None:
    few, more = positions_of(50, 10, 0, "a"), positions_of(50, 20, 0, "a")
    assert torch.equal(few, positions_of(50, 10, 0, "a"))
    assert set(few.tolist()) < set(more.tolist())
    assert few.tolist() == sorted(set(few.tolist()))
    assert few.tolist() != positions_of(50, 10, 1, "a").tolist()
    assert few.tolist() != positions_of(50, 10, 0, "b").tolist()
    assert positions_of(0, 10, 0, "a").tolist() == []


def test_which_stream() -> None:
    task = make_task(with_features(1), 0, POOL)
    assert list(task.streams) == ["corrupted", "original"]
    assert stream_of(task) == "original"
    assert stream_of(make_task(tiny(stream=STREAMS[:1]), 0, POOL)) == "corrupted"
    assert stream_of(ragged_task()) == "test"


def test_methods_and_machines_save_the_same_images(tmp_path: Path) -> None:
    methods = [{"name": "fedavg"}, {"name": "ditto"}]
    first = go(with_features(7, method=methods), tmp_path / "a")
    again = go(with_features(7, method=methods), tmp_path / "b")
    assert len(first.folders) == 2
    for one, other in zip(first.folders, again.folders, strict=True):
        assert (one / FEATURES).read_bytes() == (other / FEATURES).read_bytes()
    fedavg, ditto = (Features.load(folder / FEATURES) for folder in first.folders)
    assert torch.equal(fedavg.positions, ditto.positions)
    assert torch.equal(fedavg.labels, ditto.labels)
    assert not torch.equal(fedavg.features, ditto.features)


# ---- when it is made -----------------------------------------------------------------------------------------------------
def test_nothing_is_saved_unless_it_is_asked_for_and_the_run_stays_the_same(tmp_path: Path) -> None:
    plain = go(tiny(stream=STREAMS, evaluate={"every": 1}), tmp_path)
    (folder,) = plain.folders
    assert not (folder / FEATURES).exists()
    before = {path.name: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    later = go(with_features(5), tmp_path)
    assert later.folders == (folder,)  # not trained again
    after = {path.name: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    assert {name for name, time in after.items() if before.get(name) != time} == {FEATURES}
    direct_run = go(with_features(5), tmp_path / "direct")
    assert (folder / FEATURES).read_bytes() == (direct_run.folders[0] / FEATURES).read_bytes()
    assert "features" not in (folder / "config.toml").read_text()


def test_made_once_and_again_for_another_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = scoring.save_features

    def counted(*arguments: Any) -> None:
        calls.append(arguments[0].experiment.evaluate.features)
        real(*arguments)

    monkeypatch.setattr(scoring, "save_features", counted)
    (folder,) = go(with_features(5), tmp_path).folders
    file = folder / FEATURES
    whole = file.read_bytes()
    go(with_features(5), tmp_path, resume=True)
    go(with_features(0), tmp_path)
    assert calls == [5]
    assert file.read_bytes() == whole
    go(with_features(3), tmp_path)
    assert calls == [5, 3]
    assert len(Features.load(file).labels) == 3 * len(SIZES)
    # a file that is cut off, or one that is gone, is made again
    file.write_bytes(whole[:100])
    with pytest.raises(
        UserError, match=r"features.safetensors is damaged \(.*\); repeat its fedshift run to make it again"
    ):
        Features.load(file)
    go(with_features(5), tmp_path, resume=True)
    assert file.read_bytes() == whole
    file.unlink()
    go(with_features(5), tmp_path, resume=True)
    assert file.read_bytes() == whole
    assert calls == [5, 3, 5, 5]
    assert not list(folder.glob(".*"))  # no temporary files


def test_a_run_that_begins_again_loses_its_features(tmp_path: Path) -> None:
    (folder,) = go(with_features(5), tmp_path).folders
    (folder / "done").unlink()
    go(tiny(stream=STREAMS, evaluate={"every": 1}), tmp_path, restart=True)
    assert (folder / "done").exists()
    assert not (folder / FEATURES).exists()


def test_every_point_of_a_sweep_has_features(tmp_path: Path) -> None:
    result = go(with_features(4, rounds=1, sweep={"train.lr": [0.1, 0.2]}), tmp_path)
    assert [Features.load(folder / FEATURES).wanted.at_most for folder in result.folders] == [4, 4]


def test_networks_of_different_width_are_named(tmp_path: Path) -> None:
    class Listening(Silent):
        def __init__(self) -> None:
            self.heard: list[str] = []

        def note(self, text: str) -> None:
            self.heard.append(text)

    say = Listening()
    models = [{"name": "mlp", "hidden": [4]}, {"name": "mlp", "hidden": [6]}]
    (folder,) = go(with_features(4, model=models, method=[{"name": "local"}]), tmp_path, reporter=say).folders
    assert "local seed 0: no features are saved, because networks give 4 and 6 features" in say.heard
    assert not (folder / FEATURES).exists()


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(UserError, match=r"evaluate\.features: input should be greater than or equal to 0, not -1"):
        with_features(-1)


# ---- t-SNE ---------------------------------------------------------------------------------------------------------------
def test_tsne_is_deterministic_and_tells_groups_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    groups = torch.arange(60) % 3
    features = torch.randn(60, 5, generator=generator) + 30 * torch.eye(5)[groups]
    placed = embedded(features, 0)
    assert placed.shape == (60, 2)
    assert torch.equal(placed, embedded(features, 0))
    apart = torch.cdist(placed, placed)
    apart.fill_diagonal_(float("inf"))
    assert torch.equal(groups[apart.argmin(1)], groups)


@pytest.mark.parametrize("rows", [4, 5, 10])
def test_tsne_of_few_and_narrow_features(rows: int) -> None:
    for width in (1, 2, 7):
        features = torch.arange(float(rows * width)).reshape(rows, width).sin()
        assert embedded(features, 0).isfinite().all()
        assert embedded(features, 0).shape == (rows, 2)
    assert torch.equal(embedded(torch.ones(rows, 3), 0), torch.zeros(rows, 2))  # a dead network


def test_what_tsne_cannot_place() -> None:
    with pytest.raises(UserError, match="at least 4 images, not 3"):
        embedded(torch.eye(3), 0)
    with pytest.raises(UserError, match="the training of this run has diverged"):
        embedded(torch.full((9, 2), float("nan")), 0)


def test_the_picture_of_features_and_its_coordinates(tmp_path: Path) -> None:
    (folder,) = go(with_features(8, split={"unseen": ["south"]}), tmp_path).folders
    tsne_picture(folder, tmp_path / "a.png")
    width, height = image_size(tmp_path / "a.png")
    assert width > 600
    assert height > 500
    made, placed = Features.load(folder / FEATURES), json.loads((tmp_path / "a.json").read_text())
    expected = embedded(made.features, 0)
    assert torch.equal(torch.tensor([placed["x"], placed["y"]]).T, expected)
    assert placed["label"] == made.labels.tolist()
    assert placed["prediction"] == made.predictions.tolist()
    assert placed["client"] == made.client.tolist()
    assert (placed["clients"], placed["unseen"]) == (list(made.clients), ["south"])
    assert (placed["round"], placed["seed"], placed["stream"]) == (made.round, 0, "original")


# ---- radars --------------------------------------------------------------------------------------------------------------
def test_the_numbers_of_a_radar_are_the_scores(tmp_path: Path) -> None:
    tent = {"name": "tent", "params": "all", "label": "tent"}
    methods = [{"name": "fedavg", "adapters": ["none", tent]}, {"name": "ditto"}]
    result = go(tiny(stream=STREAMS, method=methods, seeds=[0, 1]), tmp_path)
    radar_picture(result, tmp_path / "radar.png")
    assert image_size(tmp_path / "radar.png")[0] > 800
    stored = json.loads((tmp_path / "radar.json").read_text())
    assert stored["selection"] == "best-val"
    assert list(stored["metrics"]) == ["corrupted/clients", "original/clients"]
    for metric, rows in stored["metrics"].items():
        assert [(row["method"], row["adapter"]) for row in rows] == [
            ("fedavg", "none"), ("fedavg", "tent"), ("ditto", "none"),
        ]  # fmt: skip
        for row, found in zip(rows, result.rows, strict=True):
            kind = "personal" if row["method"] == "ditto" else "global"
            seeds = [score.by_client for score in found.scores(f"{kind}/{metric}")]
            assert len(seeds) == 2
            assert set(row["accuracy"]) == set(SIZES)
            for name, number in row["accuracy"].items():
                assert number == pytest.approx(
                    statistics.mean(100 * own[name].correct / own[name].samples for own in seeds)
                )
            average = found.number(f"{kind}/{metric}")
            assert average is not None
            assert statistics.mean(row["accuracy"].values()) == pytest.approx(average[0])


def made_up(counts: Mapping[str, list[float]], methods: int = 1, adapters: int = 1) -> Result:
    by_client = {name: ClientScore(int(n), int(right), loss) for name, (n, right, loss) in counts.items()}
    metrics = [Metric("global", stream) for stream in ("original", "corrupted")]
    values = {("best-val", m): [ScoreRow(m, Summary(client_mean=50.0), by_client=by_client)] for m in metrics}
    pairs = [(f"method {m}", f"adapter {a}") for m in range(methods) for a in range(adapters)]
    return Result(tuple(Row(method, adapter, (), (0,), values) for method, adapter in pairs), ())


def test_a_radar_needs_three_clients(tmp_path: Path) -> None:
    two = made_up({"a": [10, 5, 1.0], "b": [10, 6, 1.0], "empty": [0, 0, 0.0]})
    with pytest.raises(UserError, match="a radar needs at least 3 clients tested on one stream; these runs have 2"):
        radar_picture(two, tmp_path / "radar.png")
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="no accuracies by client under selection rule 'oracle'"):
        radar_numbers(two, "oracle")
    three = made_up({"a": [10, 5, 1.0], "b": [10, 6, 1.0], "c": [10, 10, 0.0]})
    assert radar_numbers(three)[Metric("", "original")] == {0: {"a": 50.0, "b": 60.0, "c": 100.0}}


@pytest.mark.parametrize("shape", [(14, 1), (7, 2), (3, 5)])
def test_no_two_lines_of_a_radar_look_alike(shape: tuple[int, int]) -> None:
    from fedshift.results.plots.pictures import _looks

    result = made_up({name: [10, 5, 1.0] for name in "abcd"}, *shape)
    looks = _looks(result.rows)
    assert len(looks) == shape[0] * shape[1]
    assert len({(look["color"], look["marker"], look["linestyle"]) for look in looks.values()}) == len(looks)


@pytest.mark.parametrize("right", [0, 5, 10])
def test_radars_of_equal_clients_can_be_drawn(right: int, tmp_path: Path) -> None:
    radar_picture(made_up({name: [10, right, 1.0] for name in "abc"}), tmp_path / "radar.png")
    assert image_size(tmp_path / "radar.png")[0] > 500


# ---- on the command line --------------------------------------------------------------------------------------------------
def test_show_draws_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = go(with_features(5, method=[{"name": "fedavg"}, {"name": "ditto"}]), tmp_path)
    said = command(monkeypatch, capsys, "show", tmp_path, "--picture", "radar", "--picture", "tsne")
    drawn = [tmp_path / "radar.png", *(folder / "tsne.png" for folder in result.folders)]
    for path in drawn:
        assert image_size(path)[0] > 500
        assert path.with_suffix(".json").is_file()
        assert str(path) in said
    assert "Accuracy in %" not in said
    command(monkeypatch, capsys, "show", tmp_path, "--picture", "results")
    assert (tmp_path / "results.png").is_file()
    assert "there is no picture 'pie'; there are: results, densities, map, radar, privacy, tsne" in error_of(
        monkeypatch, capsys, "show", tmp_path, "--picture", "pie"
    )


def test_a_run_without_features_says_how_to_get_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = go(tiny(rounds=1), tmp_path)
    said = error_of(monkeypatch, capsys, "show", tmp_path, "--picture", "tsne")
    assert said.endswith("no features were saved with these runs; run it with -c evaluate.features=200")
    with pytest.raises(UserError, match=r"run it with -c evaluate\.features=200"):
        draw("tsne", result, tmp_path)
