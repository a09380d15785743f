"""A client's model for use elsewhere: the run's own answers, from raw pixels, in every format."""

from __future__ import annotations

import json
import tomllib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import fedshift
from fedshift import Experiment, UserError, cli
from fedshift.core.registry import MODELS, with_options
from fedshift.core.tree import Tree
from fedshift.data.task import Task
from fedshift.export import export
from fedshift.export.exporting import FORMATS
from fedshift.export.network_files import NETWORK_FILES
from fedshift.join import join
from fedshift.runs.setup import make_task
from fedshift.store.folder import RunFolder
from tests.conftest import edit

METHODS: list[dict[str, Any]] = [
    {"name": "fedbn", "adapters": ["none", {"name": "tent", "lr": 0.01, "batch-size": 16}, "t3a", "eata"]},
    {"name": "ditto"},
    {"name": "fedmd"},
    {"name": "knn-per"},
    {"name": "pfl-ensemble"},
    {"name": "fedcir"},
    {"name": "odpfl-hn"},
    {"name": "local"},
]


def experiment(**changes: object) -> Experiment:
    settings: dict[str, object] = {
        "name": "tiny", "rounds": 2, "baselines": False, "data": {"size": 8, "limit": 240},
        "split": {"unseen": ["font"], "public": 0.1}, "model": {"name": "mlp", "hidden": [12], "norm": True},
        "train": {"lr": 0.1, "batch-size": 16, "momentum": 0.9}, "evaluate": {"every": 0}, "method": METHODS,
    }  # fmt: skip
    return Experiment.parse({**settings, **changes})


def trained(chosen: Experiment, out: Path, **how: Any) -> list[Path]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # local has nothing to give to unseen clients
        return fedshift.run(chosen, out, engine="sequential", **how).folders


@dataclass(frozen=True)
class World:
    """Some methods trained once."""

    task: Task
    runs: Path

    def folder(self, method: str) -> Path:
        (found,) = (self.runs / "tiny" / method).iterdir()
        return found

    def images(self, client: str) -> Tensor:
        """A client's test images: uint8 [n, 3, 8, 8]."""
        return self.task.images[self.task.streams["original"].index[client]]

    def labels(self, client: str) -> Tensor:
        return self.task.labels[self.task.streams["original"].index[client]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("export")
    trained(experiment(), root)
    return World(make_task(experiment(), 0), root)


def same(one: Tree, other: Tree) -> bool:
    names = [{slot: set(leaves) for slot, leaves in tree.items()} for tree in (one, other)]
    assert names[0] == names[1]
    return all(torch.equal(leaf, other[slot][name]) for slot, leaves in one.items() for name, leaf in leaves.items())


def refused(*arguments: Any, **how: Any) -> str:
    with pytest.raises(UserError) as said:
        export(*arguments, **how)
    text = str(said.value)
    assert "\n" not in text
    return text


def noise(count: int, side: int) -> np.ndarray:
    """Raw pictures as arrays."""
    return np.random.default_rng(count).integers(0, 256, (count, side, side, 3), dtype=np.uint8)


# ---- the same answers as the run's own -----------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["fedbn", "ditto", "knn-per"])
@pytest.mark.parametrize("client", ["paper", "pen", "font"])
def test_an_exported_client_answers_as_it_did_in_the_run(
    method: str, client: str, world: World, tmp_path: Path
) -> None:
    exported = export(world.folder(method), client, out=tmp_path / "out")
    served = fedshift.load(tmp_path / "out")
    assert exported.folder == tmp_path / "out"
    answers = served.predict(world.images(client))
    rows = [row for row in RunFolder(world.folder(method)).scores()["none"]
            if row.selection == "best-val" and row.metric.stream == "original" and client in row.by_client]  # fmt: skip
    (score,) = (row.by_client[client] for row in rows)
    loss = nn.functional.cross_entropy(answers.logits, world.labels(client), reduction="sum")
    assert (answers.codes == world.labels(client)).sum() == score.correct
    assert float(loss) == pytest.approx(score.loss, abs=1e-3)
    assert served.config["client"] == client
    assert served.config["unseen"] == (client == "font")


def test_personal_models_are_personal(world: World, tmp_path: Path) -> None:
    for method in ("fedbn", "ditto"):
        models = [export(world.folder(method), client, out=tmp_path / method / client).artefact.deployed["model"]
                  for client in ("paper", "pen")]  # fmt: skip
        assert any(not torch.equal(leaf, models[1][name]) for name, leaf in models[0].items())


def test_what_a_run_did_not_write_is_made_from_its_data(world: World, tmp_path: Path) -> None:
    """EATA's importance of weights is made of training images, Ditto's model is its second phase's."""
    methods = [one for one in METHODS if one["name"] in ("fedbn", "ditto")]
    folders = trained(experiment(method=methods, evaluate={"every": 0, "artefacts": False}), tmp_path)
    for folder in folders:
        assert not (folder / "artefacts").exists()
        for client in ("paper", "font"):
            made = export(folder, client).folder
            written = world.folder(folder.parent.name) / "artefacts" / client
            files = [path.relative_to(written) for path in written.rglob("*.safetensors")]
            assert files
            assert all((made / name).read_bytes() == (written / name).read_bytes() for name in files)
            configs = [tomllib.loads((place / "config.toml").read_text()) for place in (made, written)]
            for config in configs:
                config.get("adapter", []).sort(key=lambda entry: entry["label"])
            assert configs[0] == configs[1]
    edit(folders[0] / "config.toml", "embedded:digits", "parquet:/nowhere/*.parquet")
    assert "cannot be made again" in refused(folders[0], "paper", out=tmp_path / "gone")


@pytest.mark.parametrize("method", ["fedbn", "ditto", "knn-per"])
def test_any_unseen_client_gets_what_the_runs_unseen_client_got(method: str, world: World, tmp_path: Path) -> None:
    exported = export(world.folder(method), unseen=True, out=tmp_path / "out")
    own = fedshift.load(world.folder(method) / "artefacts" / "font")
    assert same(fedshift.load(tmp_path / "out").deployed, own.deployed)
    assert (exported.artefact.config["client"], exported.artefact.config["unseen"]) == ("unseen", True)
    assert set(exported.artefact.adapters) == set(own.adapters)
    assert all(part.spec == own.adapters[label].spec for label, part in exported.artefact.adapters.items())
    origin = ("seed", "round", "selection", "task-hash", "run")
    assert [exported.artefact.config["origin"][key] for key in origin] == [own.config["origin"][key] for key in origin]


def test_unseen_clients_of_a_mixed_run_choose_their_network(tmp_path: Path) -> None:
    models = [{"name": "mlp", "hidden": [6]}, {"name": "mlp", "label": "big", "hidden": [9]}]
    (folder,) = trained(experiment(model=models, method=[{"name": "fedmd"}], rounds=1), tmp_path)
    for network, size in (("mlp", 6), ("big", 9)):
        exported = export(folder, unseen=True, model=network, format="safetensors", out=tmp_path / network)
        assert exported.artefact.method.arch.feature_size == size
    owners = {export(folder, name).artefact.method.arch.feature_size for name in ("paper", "pen", "china", "flower")}
    assert owners == {6, 9}
    assert "has no network 'cnn'; it has: mlp, big" in refused(folder, unseen=True, model="cnn")


def test_an_adapter_is_exported_at_the_round_it_chose(world: World, tmp_path: Path) -> None:
    method = {"name": "fedtta", "inner-lr": 0.5, "loss-lr": 0.1, "adapters": ["none", "fedtta"]}
    chosen = experiment(rounds=6, method=[method], evaluate={"every": 1, "adapted": True},
                        train={"lr": 0.5, "batch-size": 16})  # fmt: skip
    (folder,) = trained(chosen, tmp_path)
    found = {title: next(line.round for line in lines if line.selection == "best-val")
             for title, lines in RunFolder(folder).scores().items()}  # fmt: skip
    assert found["none"] != found["fedtta"]
    plain, own = export(folder, "paper").artefact, export(folder, "paper", adapter="fedtta").artefact
    assert [one.config["origin"]["round"] for one in (plain, own)] == [found["none"], found["fedtta"]]
    assert (list(plain.adapters), list(own.adapters)) == ([], ["fedtta"])
    assert export(folder, unseen=True, adapter="fedtta").artefact.config["origin"]["round"] == found["fedtta"]


# ---- networks ------------------------------------------------------------------------------------------------------------
NETWORKS: Mapping[str, dict[str, Any]] = {
    "cnn": {"name": "cnn", "norm": True},
    "resnet18": {"name": "resnet18"},
    "vit": {"name": "vit", "size": "tiny"},
}


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """FedBN's client of each network, at 16 pixels, with a normalisation for every channel."""
    root = tmp_path_factory.mktemp("networks")
    found = {}
    for name, model in NETWORKS.items():
        chosen = experiment(
            name=name, rounds=1, model=model, method=[{"name": "fedbn"}], split={}, train={"lr": 0.05, "batch-size": 32},
            data={"size": 16, "limit": 80, "domains": ["paper", "pen"], "mean": [0.4, 0.5, 0.6], "std": [0.2, 0.25, 0.3]},
        )  # fmt: skip
        (folder,) = trained(chosen, root)
        found[name] = export(folder, "paper").folder
    return found


@pytest.mark.parametrize("name", ["cnn", *(pytest.param(n, marks=pytest.mark.grid) for n in NETWORKS if n != "cnn")])
def test_onnx_gives_our_answers_to_raw_pixels(name: str, artefacts: Mapping[str, Path], tmp_path: Path) -> None:
    exported = export(artefacts[name], format="onnx", out=tmp_path / "out")
    served = fedshift.load(artefacts[name])
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx")
    for count in (1, 2, 7):
        images = noise(count, 16)
        probabilities, logits = session.run(["probabilities", "logits"], {"images": images})
        answers = served.predict(images)
        np.testing.assert_allclose(probabilities, answers.probabilities, atol=1e-5, rtol=0)
        np.testing.assert_allclose(logits, answers.logits, atol=1e-5, rtol=1e-5)
    assert exported.apart is not None
    assert exported.apart < 1e-5
    assert exported.files == (tmp_path / "out" / "model.onnx",)


def test_an_onnx_file_says_what_it_is_and_nothing_of_this_machine(
    artefacts: Mapping[str, Path], tmp_path: Path
) -> None:
    export(artefacts["cnn"], format="onnx", out=tmp_path / "out")
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx")
    (images,) = session.get_inputs()
    assert (images.name, images.type, images.shape) == ("images", "tensor(uint8)", ["batch", 16, 16, 3])
    assert [(one.name, one.shape) for one in session.get_outputs()] == [
        ("probabilities", ["batch", 10]), ("logits", ["batch", 10])
    ]  # fmt: skip
    facts = session.get_modelmeta().custom_metadata_map
    assert json.loads(facts["classes"]) == [str(digit) for digit in range(10)]
    assert (json.loads(facts["mean"]), json.loads(facts["std"])) == ([0.4, 0.5, 0.6], [0.2, 0.25, 0.3])
    assert facts["input"] == "images, uint8 [batch, 16, 16, 3] (height, width, channels), 0 to 255"
    assert facts["outputs"] == "probabilities and logits, float32 [batch, 10], in the order of the classes"
    assert (facts["client"], json.loads(facts["method"])["name"]) == ("paper", "fedbn")
    assert json.loads(facts["network"]) == {"name": "cnn", "norm": True}
    content = (tmp_path / "out" / "model.onnx").read_bytes()
    for path in (Path(fedshift.__file__).parent, Path(torch.__file__).parent, tmp_path):
        assert str(path).encode() not in content


@pytest.mark.parametrize("name", ["cnn", "resnet18"])
def test_torch_export_gives_our_answers_to_raw_pixels(name: str, artefacts: Mapping[str, Path], tmp_path: Path) -> None:
    export(artefacts[name], format="torch-export", out=tmp_path / "out")
    facts = {"fedshift.json": ""}
    program = torch.export.load(tmp_path / "out" / "model.pt2", extra_files=facts).module()
    served = fedshift.load(artefacts[name])
    for count in (1, 6):
        found = program(torch.from_numpy(noise(count, 16)))
        answers = served.predict(noise(count, 16))
        torch.testing.assert_close(found["probabilities"].double(), answers.probabilities, atol=1e-5, rtol=0)
        torch.testing.assert_close(found["logits"], answers.logits, atol=1e-5, rtol=1e-5)
    assert json.loads(json.loads(facts["fedshift.json"])["classes"]) == list(served.classes)


@pytest.mark.parametrize("name", list(NETWORKS))
def test_safetensors_and_its_header_are_enough_for_our_answers(
    name: str, artefacts: Mapping[str, Path], tmp_path: Path
) -> None:
    """The network is made by its name, the normalisation is in the file."""
    export(artefacts[name], format="safetensors", out=tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        facts = file.metadata()
    words = json.loads(facts["network"])
    options = {key: value for key, value in words.items() if key != "name"}
    network = with_options(MODELS[words["name"]].make, "model", options).make((3, 16, 16), 10).eval()
    own = {key.removeprefix("network."): leaf for key, leaf in tensors.items() if key.startswith("network.")}
    network.load_state_dict(own, strict=True)
    x = (torch.from_numpy(noise(5, 16)).movedim(-1, 1) / 255 - tensors["mean"]) / tensors["std"]
    served = fedshift.load(artefacts[name])
    with torch.no_grad():
        torch.testing.assert_close(network(x), served(noise(5, 16)), atol=1e-5, rtol=1e-5)
    module = served.module()
    module.load_state_dict({key: torch.zeros_like(leaf) for key, leaf in tensors.items()})
    module.load_state_dict(tensors, strict=True)
    with torch.no_grad():
        torch.testing.assert_close(module(torch.from_numpy(noise(5, 16))), served(noise(5, 16)), atol=1e-5, rtol=1e-5)


def test_a_run_in_double_precision_is_exported_in_single(tmp_path: Path) -> None:
    chosen = experiment(rounds=1, precision="float64", method=[{"name": "fedbn"}])
    (folder,) = trained(chosen, tmp_path)
    served = fedshift.load(folder / "artefacts" / "paper")
    assert served.module().mean.dtype == served.predict(noise(2, 8)).logits.dtype == torch.float64
    for format in NETWORK_FILES:
        assert (export(folder, "paper", format=format).apart or 0) < 1e-5
    session = onnxruntime.InferenceSession(folder / "exported" / "paper-onnx" / "model.onnx")
    (found,) = session.run(["probabilities"], {"images": noise(3, 8)})
    np.testing.assert_allclose(found, served.predict(noise(3, 8)).probabilities, atol=1e-5, rtol=0)


def test_a_module_refuses_images_that_it_would_misread(world: World) -> None:
    module = fedshift.load(world.folder("fedbn") / "artefacts" / "paper").module()
    for images in (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.zeros(2, 8, 8, 3)):
        with pytest.raises(UserError, match=r"must be uint8 \[n, 8, 8, 3\] \(height, width, channels\), not"):
            module(images)


# ---- raw images, and going on adapting -----------------------------------------------------------------------------------
def test_raw_images_of_every_kind_get_the_same_answer(world: World, tmp_path: Path) -> None:
    served = fedshift.load(world.folder("fedbn") / "artefacts" / "paper")
    array = world.images("paper")[:3].movedim(1, -1).numpy()
    expected = served(array)
    pictures = [Image.fromarray(one) for one in array]
    for i, picture in enumerate(pictures):
        picture.save(tmp_path / f"{i}.png")
    paths = [tmp_path / f"{i}.png" for i in range(3)]
    kinds: Sequence[Any] = (
        list(array), pictures, paths, [str(path) for path in paths], torch.from_numpy(array).movedim(-1, 1),
        [array[0], pictures[1], paths[2]], torch.from_numpy(array).movedim(-1, 1) / 255,
    )  # fmt: skip
    for images in kinds:
        torch.testing.assert_close(served(images), expected, atol=0, rtol=0)
    for one in (array[0], pictures[0], paths[0]):
        torch.testing.assert_close(served(one), expected[:1])
    grey = np.asarray(pictures[0].convert("L"))
    assert torch.equal(served(grey), served(grey[:, :, None]))
    assert torch.equal(served(grey), served(pictures[0].convert("L")))
    alpha = np.dstack([array[0], np.full((8, 8), 255, dtype=np.uint8)])
    assert torch.equal(served(alpha), served(array[0]))


def test_other_sizes_are_resized_as_join_does(world: World, tmp_path: Path) -> None:
    pictures = [Image.fromarray(noise(1, 30)[0]), Image.fromarray(noise(2, 5)[1]).resize((20, 9))]
    (tmp_path / "new").mkdir()
    for i, picture in enumerate(pictures):
        picture.save(tmp_path / "new" / f"{i}.png")
    joined = join(world.folder("fedbn"), tmp_path / "new", "none", tmp_path / "joined")
    served = fedshift.load(joined.files[0].parent)
    for images in (pictures, [np.asarray(picture) for picture in pictures]):
        assert served.predict(images).probabilities.tolist() == [
            list(item.probabilities) for item in joined.predictions
        ]


def test_what_is_no_image_is_refused_in_a_sentence(world: World, tmp_path: Path) -> None:
    served = fedshift.load(world.folder("fedbn") / "artefacts" / "paper")
    (tmp_path / "bad.png").write_bytes(b"no picture")
    wrong: Sequence[tuple[Any, str]] = (
        (np.zeros((2, 8, 8, 3)), r"an array of images must be uint8 \[n, height, width, channels\], not float64"),
        (np.zeros((2, 3, 8, 8), dtype=np.uint8), r"not uint8 \[2, 3, 8, 8\]"),
        (torch.zeros(8, 8, dtype=torch.uint8), r"a tensor of images must be uint8 \[n, channels, height, width\]"),
        (torch.zeros(2, 8, 8, 3), r"floats in \[0, 1\] must be \[n, 3, 8, 8\], not \[2, 8, 8, 3\]"),
        (tmp_path / "bad.png", "cannot be decoded"),
        (tmp_path / "missing.png", "cannot be decoded"),
        ([], "there are no images"),
        (3, "images must be arrays, tensors, Pillow's images or paths, not int"),
    )
    for images, said in wrong:
        with pytest.raises(UserError, match=said):
            served.predict(images)


@pytest.mark.parametrize("adapter", ["tent lr=0.01 batch-size=16", "t3a", "memo"])
def test_adapting_answers_as_join_did_and_goes_on(adapter: str, world: World, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    images = world.images("font").movedim(1, -1).numpy()
    for i, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / "new" / f"{i:04}.png")
    joined = join(world.folder("fedbn"), tmp_path / "new", adapter, tmp_path / "joined")
    served = fedshift.load(world.folder("fedbn") / "artefacts" / "font")
    answers, after = served.adapt(images, adapter)
    assert answers.probabilities.tolist() == [list(item.probabilities) for item in joined.predictions]
    left = fedshift.load(joined.files[0].parent)
    assert same(after.state, left.state)
    assert (after.using, served.using) == (adapter, "")
    assert same(served.state, served.deployed)  # the artefact itself is as it was
    again = [one.adapt(images[:20]) for one in (after, left)]
    assert torch.equal(again[0][0].logits, again[1][0].logits)
    again[0][1].save(tmp_path / "kept")
    kept = fedshift.load(tmp_path / "kept")
    assert kept.using == adapter
    assert same(kept.state, again[0][1].state)
    assert torch.equal(kept.adapt(images)[0].logits, again[1][1].adapt(images)[0].logits)
    if again[0][1].adapters[adapter].tensors:
        with pytest.raises(UserError, match=f"has adapted with '{adapter}': load it anew to adapt with 'bn'"):
            kept.adapt(images, "bn")


def test_who_adapts_must_be_said_where_there_are_several(world: World, tmp_path: Path) -> None:
    served = fedshift.load(world.folder("fedbn") / "artefacts" / "paper")
    with pytest.raises(UserError, match=r"say which adapter to adapt with; this artefact has: tent lr=0\.01"):
        served.adapt(noise(3, 8))
    alone = export(world.folder("fedbn"), "paper", adapter="tent", out=tmp_path / "out")
    assert list(fedshift.load(tmp_path / "out").adapters) == ["tent lr=0.01 batch-size=16"]
    assert alone.artefact.adapt(noise(3, 8))[1].using == "tent lr=0.01 batch-size=16"
    without = export(world.folder("fedbn"), "paper", adapter="none", out=tmp_path / "none")
    assert not without.artefact.adapters
    with pytest.raises(UserError, match="any of fedshift list adapters"):
        without.artefact.adapt(noise(3, 8))


# ---- an artefact's folder ------------------------------------------------------------------------------------------------
def test_a_client_that_has_joined_is_exported_from_its_folder(world: World, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    for i, image in enumerate(world.images("font")[:5].movedim(1, -1).numpy()):
        Image.fromarray(image).save(tmp_path / "new" / f"{i}.png")
    plain, moved = (join(world.folder("fedbn"), tmp_path / "new", name, tmp_path / name) for name in ("none", "tent"))
    exported = export(plain.files[0].parent, format="onnx")
    assert exported.folder == plain.files[0].parent.with_name("new-onnx")
    session = onnxruntime.InferenceSession(exported.files[0])
    (found,) = session.run(["probabilities"], {"images": world.images("font")[:5].movedim(1, -1).numpy()})
    np.testing.assert_allclose(found, [item.probabilities for item in plain.predictions], atol=1e-5, rtol=0)
    assert str(tmp_path).encode() not in exported.files[0].read_bytes()
    said = refused(moved.files[0].parent, format="onnx", out=tmp_path / "out")
    assert said.startswith("adapter 'tent' answers with more than the network")
    assert not (tmp_path / "out").exists()
    before = export(moved.files[0].parent, format="onnx", adapter="none", out=tmp_path / "before")
    assert same({"model": before.artefact.state["model"]}, {"model": exported.artefact.state["model"]})
    copied = export(moved.files[0].parent, out=tmp_path / "copied")
    assert same(fedshift.load(tmp_path / "copied").state, fedshift.load(moved.files[0].parent).state)
    assert copied.artefact.using == moved.adapter
    assert "is the artefact of 'new' already" in refused(moved.files[0].parent, "paper")
    assert "the artefact has no adapter 't3a' but none, tent" in refused(moved.files[0].parent, adapter="t3a")


# ---- refusals ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("format", list(NETWORK_FILES))
@pytest.mark.parametrize("method", ["knn-per", "pfl-ensemble", "fedcir"])
def test_what_one_network_cannot_answer_is_refused(method: str, format: str, world: World, tmp_path: Path) -> None:
    said = refused(world.folder(method), "paper", format=format, out=tmp_path / "new" / "out")
    assert said == (
        f"'{method}' answers with more than one pass of its network (several models, a memory or draws), which no network "
        "alone can: use the artefact itself (--format artefact, fedshift.load)"
    )
    assert not (tmp_path / "new").exists()
    served = export(world.folder(method), "paper", out=tmp_path / "artefact").artefact
    assert served.predict(noise(2, 8)).probabilities.sum(1).tolist() == pytest.approx([1, 1])


def test_an_adapter_is_refused_in_a_network_file(world: World, tmp_path: Path) -> None:
    said = refused(world.folder("fedbn"), "paper", format="onnx", adapter="t3a", out=tmp_path / "out")
    assert said == (
        "adapter 't3a' answers with more than the network, which no network file can: use --format artefact, or "
        "--adapter none for the model without adaptation"
    )
    assert not (tmp_path / "out").exists()
    assert export(world.folder("fedbn"), "paper", format="safetensors", adapter="none", out=tmp_path / "none").files


def test_what_is_missing_or_wrong_gets_one_sentence(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = world.folder("fedbn")
    assert refused(run, "peper").endswith("has no client 'peper'; it has: pen, paper, china, flower, font")
    whose = "say whose model: --unseen, or --client with one of pen, paper, china, flower, font"
    assert refused(run) == refused(run, "paper", unseen=True) == whose
    several = refused(world.runs, "paper")
    assert f"holds {len(METHODS)} finished runs, and one is wanted: add --method and --seed" in several
    assert all(f"tiny/{spec['name']}/" in several for spec in METHODS)
    formats = "artefact, onnx, torch-export, safetensors"
    assert refused(run, "paper", format="pickle") == f"there is no format 'pickle'; there are: {formats}"
    assert refused(run, "paper", adapter="tend") == "there is no adapter 'tend'; did you mean 'tent'?"
    assert "the run was not scored with adapter 'memo' but with none, eata, t3a, tent" in refused(
        run, "paper", adapter="memo"
    )
    assert refused(world.folder("local"), unseen=True).startswith("'local' has nothing to give to an unseen client")
    assert "its own images: use fedshift join --data" in refused(world.folder("odpfl-hn"), unseen=True)
    (tmp_path / "there").mkdir()
    assert "is there already" in refused(run, "paper", out=tmp_path / "there")
    monkeypatch.setattr("fedshift.export.network_files.find_spec", lambda name: None if "onnx" in name else name)
    said = refused(run, "paper", format="onnx", out=tmp_path / "out")
    assert said == (
        'onnx, onnxscript and onnxruntime must be installed to write model.onnx: pip install "fedshift[export]"'
    )
    assert not (tmp_path / "out").exists()
    assert FORMATS == ("artefact", "onnx", "torch-export", "safetensors")


class Moody(nn.Module):
    """A network whose way depends on the pixels: nothing can be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(192, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        logits: Tensor = self.last(x if float(x.amax()) < 1e9 else -x)
        return logits


def test_a_network_that_cannot_be_traced_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder,) = trained(experiment(rounds=1, method=[{"name": "fedavg"}]), tmp_path, network=Moody)
    for format in ("onnx", "torch-export"):
        said = refused(folder, "paper", format=format, network=Moody, out=tmp_path / "out")
        assert said.startswith(f"this network cannot be written as {NETWORK_FILES[format].name} (")
        assert said.endswith("; use --format artefact")
        assert not (tmp_path / "out").exists()
    assert capfd.readouterr() == ("", "")  # exporters are talkative
    exported = export(folder, "paper", format="safetensors", network=Moody, out=tmp_path / "out")
    assert set(load_file(exported.files[0])) == {"mean", "std", "network.last.weight", "network.last.bias"}


def test_who_names_a_file_gets_a_file(world: World, tmp_path: Path) -> None:
    run, wish = world.folder("fedbn"), tmp_path / "deep" / "lima.onnx"
    exported = export(run, "paper", format="onnx", out=wish)
    assert exported.files == (wish,)
    assert [path.name for path in wish.parent.iterdir()] == ["lima.onnx"]
    in_folder = export(run, "paper", format="onnx", out=tmp_path / "folder").files[0]
    assert wish.read_bytes() == in_folder.read_bytes()
    assert "is there already" in refused(run, "paper", format="onnx", out=wish)
    assert export(run, "paper", format="onnx", out=tmp_path / "LIMA.ONNX").files == (tmp_path / "LIMA.ONNX",)
    other = tmp_path / "other.onnx"
    said = refused(run, "paper", format="safetensors", out=other)
    assert said == f"--out {other} looks like a file, and --format safetensors writes files that end in .safetensors"
    assert refused(run, "paper", out=other).endswith("and --format artefact writes a folder")
    assert not other.exists()
    assert export(run, "paper", format="safetensors", out=tmp_path / "v1.2").folder == tmp_path / "v1.2"


def test_a_file_with_other_answers_is_never_left_behind(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(images: Tensor) -> dict[str, Tensor]:
        return {name: torch.full((len(images), 10), 0.1) for name in ("probabilities", "logits")}

    monkeypatch.setattr(
        "fedshift.export.exporting.NETWORK_FILES",
        {"onnx": replace(NETWORK_FILES["safetensors"], name="model.onnx", read=lambda *_: wrong)},
    )
    said = refused(world.folder("fedbn"), "paper", format="onnx", out=tmp_path / "new" / "out")
    assert said.startswith("model.onnx would give other answers than fedshift (probabilities 0.")
    assert not (tmp_path / "new").exists()


# ---- the command ---------------------------------------------------------------------------------------------------------
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object
) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["fedshift", "export", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, " ".join(said.err.split())


def test_the_command_says_how_to_use_what_it_wrote(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (world.runs, "--method", "fedbn", "--client", "paper")
    code, said, _ = command(monkeypatch, capsys, *arguments, "--format", "onnx", "--out", tmp_path / "onnx")
    assert code == 0
    assert said.startswith("The model of paper with fedbn, seed 0 (round 2, the best on validation), as onnx\n")
    assert (
        "In: images, uint8 [batch, 8, 8, 3] (height, width, channels), 0 to 255; the normalisation is inside." in said
    )
    assert "Out: probabilities and logits, float32 [batch, 10], in the order of the classes." in said
    assert (
        f'onnxruntime.InferenceSession("{tmp_path}/onnx/model.onnx").run(["probabilities"], {{"images": images}})'
        in said
    )
    assert "torchvision" not in said
    code, said, _ = command(monkeypatch, capsys, *arguments, "--out", tmp_path / "artefact")
    assert code == 0
    assert f"Or let it adapt: fedshift.load('{tmp_path}/artefact').adapt(images, NAME), NAME: tent" in said
    assert f"Files in {tmp_path / 'artefact'}: config.toml, model.safetensors, adapters/eata.safetensors" in said
    code, said, complaint = command(monkeypatch, capsys, *arguments, "--format", "onnx", "--adapter", "tent")
    assert (code, said) == (2, "")
    assert complaint.startswith("error: adapter 'tent' answers with more than the network")
    code, said, _ = command(
        monkeypatch, capsys, world.runs, "--method", "fedbn", "--unseen", "--out", tmp_path / "unseen"
    )
    assert code == 0
    assert said.startswith("The model of any unseen client with fedbn, seed 0")
