"""Every number of ``inspect.json`` against what it is said to be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedshift import Experiment, Task, UserError, run
from fedshift.core.arch import Output
from fedshift.core.tree import Tensors
from fedshift.inspect import inspect, looking
from fedshift.inspect.looking import Wish
from fedshift.inspect.pad import distances
from fedshift.inspect.report import as_dict, looks_at
from fedshift.inspect.risk import average_risk, confusion, local_risk
from fedshift.results.plots.tsne import embedded
from fedshift.runs.setup import make_setup, make_task
from fedshift.store.features import positions_of
from fedshift.store.folder import RunFolder
from fedshift.store.found import find_runs
from fedshift.store.trees import load, save
from tests.inspect.conftest import digits
from tests.runs.test_run import POOL, refuse


def direct(experiment: Experiment, task: Task, model: Tensors, client: str) -> tuple[Output, torch.Tensor]:
    """A forward pass of all test images by hand, and their labels."""
    arch = make_setup(experiment, experiment.method[0], task).method.arch
    samples = task.samples(task.client(client), "original")
    return arch(model, samples.images[samples.index].float() / 255), samples.labels[samples.index]


def numbers_of(path: Path, **wish: Any) -> dict[str, dict[str, Any]]:
    """The numbers of runs by method, without pictures."""
    return {look.name: as_dict(look) for look in looks_at(find_runs(path), Wish(**wish))}


# ---- pure parts ----------------------------------------------------------------------------------------------------------
def test_local_risk_is_cross_entropy() -> None:
    logits, labels = torch.randn(20, 5, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 5
    risk = local_risk(logits, labels)
    assert risk == pytest.approx(float(-logits.log_softmax(1)[torch.arange(20), labels].mean()), rel=1e-6)
    assert local_risk(logits[:0], labels[:0]) is None
    assert local_risk(logits.log(), labels) is None  # of negative numbers
    assert average_risk({"a": 1.0, "b": None}) is None


def test_confusion_counts_every_image_once() -> None:
    labels, answers = torch.tensor([0, 0, 1, 2, 2, 2]), torch.tensor([0, 2, 1, 2, 2, 3])
    found = confusion(labels, answers, classes=3, outputs=4)
    assert found.tolist() == [[1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 2, 1]]
    assert torch.equal(found.sum(1), labels.bincount())
    assert torch.equal(found.sum(0), answers.bincount())


# ---- one run -------------------------------------------------------------------------------------------------------------
def test_the_numbers_are_those_of_a_forward_pass(fedavg: Path, tmp_path: Path) -> None:
    found = inspect(fedavg, tmp_path / "out", samples=15)
    stored = json.loads((tmp_path / "out" / "inspect.json").read_text(), parse_constant=refuse)
    assert stored == json.loads(json.dumps(found))
    (numbers,) = stored["runs"]
    experiment = digits()
    task = make_task(experiment, 0)
    trees, facts = load(fedavg / "best.safetensors")
    assert (numbers["round"], numbers["task-hash"], numbers["stream"]) == (facts["round"], task.hash, "original")
    assert (numbers["model"], numbers["classes"]) == ("global", list(task.classes))
    assert numbers["clients"] == [client.name for client in task.clients]
    scores = {row.selection: row for row in RunFolder(fedavg).scores()["none"] if row.metric.stream == "original"}
    chosen = {}
    for name, (count, correct, loss, _) in scores["best-val"].by_client.items():
        output, labels = direct(experiment, task, trees["server"]["model"], name)
        assert numbers["risk"]["by-client"][name] == pytest.approx(float(F.cross_entropy(output.logits, labels)), 1e-5)
        assert numbers["risk"]["by-client"][name] == pytest.approx(loss / count, abs=1e-4)
        matrix = torch.tensor(numbers["confusion"][name])
        assert torch.equal(matrix.sum(1), labels.bincount(minlength=10))
        assert torch.equal(matrix, confusion(labels, output.logits.argmax(1), 10))
        assert (int(matrix.sum()), int(matrix.diagonal().sum())) == (count, correct)
        assert numbers["accuracy"]["by-client"][name] == pytest.approx(100 * correct / count)
        chosen[name] = output.features[positions_of(len(labels), 15, 0, name)]
    risks = numbers["risk"]["by-client"].values()
    assert numbers["risk"]["mean"] == pytest.approx(sum(risks) / len(risks))
    assert numbers["accuracy"]["mean"] == pytest.approx(scores["best-val"].summary.client_mean)
    assert numbers["pad"] == json.loads(json.dumps(distances(chosen, list(chosen)).as_dict()))
    placed = embedded(torch.cat(list(chosen.values())), 0)
    assert torch.allclose(torch.tensor([numbers["tsne"]["x"], numbers["tsne"]["y"]]).T, placed, atol=1e-3)
    assert numbers["tsne"]["client"] == [k for k, rows in enumerate(chosen.values()) for _ in rows]


def test_the_chosen_state_is_looked_at(tmp_path: Path) -> None:
    (out,) = run(digits(rounds=3, train={"lr": 3.0, "batch-size": 16}), tmp_path, engine="sequential").folders
    rounds = {rule: numbers_of(out, select=rule)["fedavg"]["round"] for rule in ("best-val", "last")}
    assert rounds == {"best-val": load(out / "best.safetensors")[1]["round"], "last": 3}
    assert rounds["best-val"] != 3
    (out / "best.safetensors").unlink()  # what cannot be made again is never replaced by another state
    with pytest.raises(UserError, match=r"best\.safetensors is missing; put it back from a copy"):
        numbers_of(out)


def test_without_validation_it_is_the_last_state(tmp_path: Path) -> None:
    (out,) = run(digits(rounds=2, split={"train": 0.8, "val": 0.0, "test": 0.2}), tmp_path, engine="sequential").folders
    assert not (out / "best.safetensors").exists()
    assert numbers_of(out)["fedavg"]["round"] == 2


def test_which_model(runs: Path) -> None:
    deployed, shared = (numbers_of(runs, samples=10, model=model) for model in ("deployed", "global"))
    assert {name: found["model"] for name, found in deployed.items()} == {
        "fedavg": "global", "fedthe": "personal", "local": "personal",
    }  # fmt: skip
    assert shared["fedthe"]["model"] == "global"
    assert shared["local"]["model"] == "personal"
    assert shared["local"]["notes"] == ["local has no global model; these are its clients' own"]
    assert deployed["local"]["notes"] == []
    for key in ("pad", "risk", "confusion"):
        assert shared["fedavg"][key] == deployed["fedavg"][key]
        assert shared["local"][key] == deployed["local"][key]
    assert shared["fedthe"]["risk"] != deployed["fedthe"]["risk"]
    # clients of a method without a global model differ in the model, too
    assert deployed["local"]["pad"]["mean"] > deployed["fedavg"]["pad"]["mean"]
    trees, _ = load(next((runs / "fedthe").glob("0-*")) / "best.safetensors")
    task = make_task(digits(), 0)
    for name, risk in shared["fedthe"]["risk"]["by-client"].items():
        output, labels = direct(digits(), task, trees["server"]["model"], name)
        assert risk == pytest.approx(float(F.cross_entropy(output.logits, labels)), 1e-5)


def test_an_unseen_client_is_shown_and_is_in_no_mean(tmp_path: Path) -> None:
    (out,) = run(digits(rounds=1, split={"unseen": ["font"]}), tmp_path, engine="sequential").folders
    numbers = numbers_of(out, samples=10)["fedavg"]
    assert numbers["unseen"] == ["font"]
    assert numbers["clients"][-1] == "font"
    assert set(numbers["confusion"]) == set(numbers["pad"]["pairs"]) == set(numbers["clients"])
    assert "font" not in numbers["risk"]["by-client"]
    others = [numbers["pad"]["union"][name] for name in numbers["clients"][:-1]]
    assert numbers["pad"]["mean-union"] == pytest.approx(sum(others) / len(others))


def test_of_many_clients_some_are_compared(fedavg: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "MOST_CLIENTS", 2)
    monkeypatch.setattr(looking, "MOST_POINTS", 12)
    (found,) = looks_at([fedavg], Wish(samples=10))
    numbers = as_dict(found)
    assert numbers["notes"] == ["2 of 5 clients are compared, spread evenly"]
    assert list(numbers["pad"]["pairs"]) == numbers["clients"]
    assert list(numbers["confusion"]) == list(numbers["risk"]["by-client"])
    assert len(numbers["clients"]) == 2
    assert len(numbers["risk"]["by-client"]) == 5
    assert found.features().client.tolist() == [0] * 6 + [1] * 6


def test_a_run_that_diverged_has_numbers_where_there_are_some(fedavg: Path, tmp_path: Path) -> None:
    folder = tmp_path / "fedavg" / fedavg.name
    shutil.copytree(fedavg, folder)
    trees, facts = load(folder / "best.safetensors")
    model = {name: leaf * float("nan") for name, leaf in trees["server"]["model"].items()}
    save(folder / "best.safetensors", {**trees, "server": {**trees["server"], "model": model}}, facts)
    (numbers,) = inspect(folder, tmp_path / "out")["runs"]
    assert (numbers["pad"], numbers["tsne"], numbers["risk"]["mean"]) == (None, None, None)
    broken, why = numbers["notes"]
    assert why == "no distances and no t-SNE, because features are not finite: it diverged"
    samples, said = broken.split(" of ")
    assert said == f"{samples} predictions on original are not numbers: they count as wrong"
    assert sum(map(sum, numbers["confusion"]["pen"])) == 0  # nothing was taken for anything
    assert set(numbers["accuracy"]["by-client"].values()) == {0.0}
    made = {path.name for path in (tmp_path / "out").iterdir()}
    assert made == {"inspect.html", "inspect.json", "risk.png", "confusion.png"}


def test_networks_of_different_width_are_not_compared(tmp_path: Path) -> None:
    models = [{"name": "mlp", "hidden": [4]}, {"name": "mlp", "hidden": [6]}]
    (out,) = run(digits(rounds=1, model=models, method=[{"name": "local"}]), tmp_path, engine="sequential").folders
    numbers = numbers_of(out, model="global")["local"]
    assert numbers["pad"] is None
    assert numbers["notes"][-1] == "no distances and no t-SNE, because networks give 4 and 6 features"
    assert numbers["risk"]["mean"] > 0


def test_ones_own_network_and_data_are_given_again(tmp_path: Path) -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(192, 5), nn.ReLU(), nn.Linear(5, 3))

    (out,) = run(digits(rounds=1), tmp_path, engine="sequential", data=POOL, network=network).folders
    (numbers,) = inspect(out, tmp_path / "out", samples=5, data=POOL, network=network)["runs"]
    assert set(numbers["clients"]) == {"north", "south", "east", "west"}


def test_a_stochastic_encoder_is_compared_by_the_layer_that_others_have_and_risked_by_its_draws(tmp_path: Path) -> None:
    experiment = digits(method=[{"name": "fedcir", "class-samples": 20}])
    (out,) = run(experiment, tmp_path, engine="sequential").folders
    numbers = numbers_of(out, samples=12)["fedcir"]
    task = make_task(experiment, 0)
    method = make_setup(experiment, experiment.method[0], task).method
    model = load(out / "best.safetensors")[0]["server"]["model"]
    means = {}
    for client in task.clients:
        samples = task.samples(client, "original")
        x, labels = samples.images[samples.index].float() / 255, samples.labels[samples.index]
        drawn = method.predict({"model": model}, x).logits  # the mean probability of twenty draws
        assert numbers["risk"]["by-client"][client.name] == pytest.approx(float(F.cross_entropy(drawn, labels)), 1e-5)
        body = method.arch.encode(model, x)[1]["body"]  # one layer before the means
        assert not torch.equal(body, method.arch.encode(model, x)[0])
        means[client.name] = body[positions_of(len(labels), 12, 0, client.name)]
    assert numbers["pad"] == json.loads(json.dumps(distances(means, list(means)).as_dict()))


def test_hardly_measured_distances_are_mentioned(fedavg: Path, tmp_path: Path) -> None:
    (found,) = looks_at([fedavg], Wish(samples=4))  # of clients that have more
    assert found.notes == ()
    (out,) = run(digits(rounds=1, data={"size": 8, "limit": 150}), tmp_path, engine="sequential").folders
    (found,) = looks_at([out], Wish())
    few = [name for name, counts in found.confusions.items() if int(counts.sum()) < 10]
    assert few
    assert found.notes == (
        f"{len(few)} clients have fewer than 10 test images, and distances that are hardly measured",
    )


def test_where_only_unseen_clients_are_tested_the_means_are_theirs(tmp_path: Path) -> None:
    split = {"train": 0.85, "val": 0.15, "test": 0.0, "unseen": ["font", "pen"]}
    (out,) = run(digits(rounds=1, split=split), tmp_path, engine="sequential").folders
    numbers = numbers_of(out, samples=10)["fedavg"]
    assert set(numbers["risk"]["by-client"]) == set(numbers["accuracy"]["by-client"]) == {"font", "pen"}
    assert numbers["pad"]["mean"] == numbers["pad"]["pairs"]["pen"][numbers["clients"].index("font")]
