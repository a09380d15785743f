"""Rows, rates and published numbers of the presets against the papers' tables."""

from __future__ import annotations

from typing import Any

import pytest

from fedshift import Experiment
from fedshift.experiment.files import presets
from fedshift.experiment.schema import MethodSpec

# ---- FedCiR --------------------------------------------------------------------------------------------------------------
C1 = {
    "domainnet-feature": (78.07, 60.03, 59.96, 61.61, 63.74, 63.02, 64.78, 63.95, 65.18),
    "pacs-feature": (81.34, 52.61, 55.14, 55.16, 56.01, 55.18, 57.59, 57.83, 58.81),
    "office-feature": (81.49, 62.73, 64.37, 63.58, 62.80, 62.95, 63.45, 65.81, 66.14),
    "camelyon17-feature": (94.94, 79.88, 79.95, 80.02, 79.52, 80.21, 80.33, 80.38, 80.45),
    "iwildcam-feature": (87.59, 85.26, 84.75, 85.19, 84.81, 85.27, 86.14, 85.60, 86.23),
}
C1_ROWS = ("Centralised", "FedAvg", "FedProx", "FedProc", "FedGen", "FedSR", "FedReg", "FedAlign", "FedCiR")
ALIGN = {"domainnet-feature": 1e-6, "iwildcam-feature": 1e-6}  # 5e-7 on the others
STOCHASTIC = {"FedSR", "FedReg", "FedAlign", "FedCiR"}
TRAIN = {"lr": 0.01, "momentum": 0.9, "weight-decay": 5e-4, "batch-size": 32, "local-steps": 20, "weights": "uniform"}


def rows_of(experiment: Experiment) -> dict[str, MethodSpec]:
    return {method.title: method for method in experiment.method}


@pytest.mark.parametrize("name", C1)
def test_fedcirs_table_1(name: str) -> None:
    experiment = Experiment.load(name)
    rows = rows_of(experiment)
    assert tuple(rows)[:9] == C1_ROWS
    assert set(rows) - set(C1_ROWS) <= {"FedCiR-5e-6"}
    for title, number in zip(C1_ROWS, C1[name], strict=True):
        plain, *others = rows[title].adapters
        assert (plain.name, plain.paper) == ("none", {"original": number}), title
        assert plain.aside == (title == "Centralised"), title
        assert [other.name for other in others] == (["deterministic"] if title in STOCHASTIC else []), title
    align = ALIGN.get(name, 5e-7)
    assert {title: rows[title].options() for title in ("FedReg", "FedAlign", "FedCiR")} == {
        "FedReg": {"reg": 0.5, "align": 0.0},
        "FedAlign": {"reg": 0.0, "align": align},
        "FedCiR": {"reg": 0.5, "align": align},
    }
    assert {key: experiment.train[key] for key in TRAIN} == TRAIN
    assert (experiment.rounds, [model.name for model in experiment.models]) == (300, ["resnet18"])
    assert all(not method.train for method in experiment.method)


def test_fedcirs_table_2() -> None:
    experiment = Experiment.load("fedcir-lambda")
    cells = {tuple(map(float, m.options().values())): m.adapters[0].paper["original"] for m in experiment.method}
    assert cells == {
        (0.0, 5e-6): 63.53, (0.1, 5e-6): 67.73, (0.3, 5e-6): 65.98, (0.5, 5e-6): 67.58, (1.0, 5e-6): 67.53,
        (0.5, 0.0): 63.83, (0.5, 1e-6): 64.43, (0.5, 1e-5): 67.47, (0.5, 5e-5): 67.39,
    }  # fmt: skip
    assert experiment.train["local-steps"] == 100


@pytest.mark.parametrize("data", ["pacs", "domainnet"])
@pytest.mark.parametrize("study", ["clients", "dirichlet", "participation", "local-steps", "overhead"])
def test_fedcirs_studies_have_their_parents_weights(study: str, data: str) -> None:
    parent = rows_of(Experiment.load(f"{data}-feature"))
    rows = rows_of(Experiment.load(f"fedcir-{study}" + ("" if data == "pacs" else f"-{data}")))
    assert list(rows) == ["FedAvg", "FedProx", "FedProc", "FedGen", "FedSR", "FedCiR"]
    assert {title: row.options() for title, row in rows.items()} == {title: parent[title].options() for title in rows}


# ---- FedTTA --------------------------------------------------------------------------------------------------------------
T1 = {
    "FedAvg": (94.69, 62.81, 63.62, 23.32, 86.99),
    "FedProx": (95.77, 62.74, 64.99, 23.37, 87.10),
    "SCAFFOLD": (97.26, 66.52, 67.10, 25.53, 87.28),
    "AFL": (96.01, 62.05, 64.91, 22.74, 87.33),
    "FedGMA": (95.35, 61.91, 64.80, 23.07, 86.63),
    "FedADG": (95.93, 63.58, 65.49, 23.62, 87.96),
    "FedSR": (93.08, 53.56, 64.28, 21.31, 77.91),
    "PFL-Sampled": (9.43, 9.02, 1.81, 0.76, 13.00),
    "PFL-Ensemble": (44.82, 30.84, 46.96, 5.94, 50.16),
    "ODPFL-HN": (95.67, 58.39, 65.47, 27.20, 85.27),
    "TENT": (98.51, 74.46, 58.31, 32.11, 94.98),
    "FedTTA": (98.47, 79.80, 69.05, 35.53, 93.26),
    "FedTTA-Prox": (98.64, 81.41, 69.85, 36.52, 94.60),
    "FedTTA++": (98.66, 83.31, 62.00, 42.95, 96.48),
}
COLUMNS = ("new-clients-mnist", "new-clients", "writers-femnist", "new-clients-cifar100", "new-clients-fashion")
ROUNDS = (200, 1000, 200, 1500, 300)
RATES: dict[str, tuple[dict[str, float], ...]] = {  # lr is [train]'s
    "FedAvg": tuple({"lr": lr} for lr in (0.1, 0.1, 0.1, 0.1, 0.3)),
    "FedProx": tuple({"lr": lr, "mu": 0.001} for lr in (0.3, 0.1, 0.3, 0.1, 0.3)),
    "SCAFFOLD": ({"lr": 0.1, "server-lr": 1.5},) * 5,
    "AFL": tuple(
        {"lr": lr, "gamma-lambda": gamma}
        for lr, gamma in ((0.3, 0.001), (0.1, 0.3), (0.1, 0.5), (0.1, 0.3), (0.3, 0.001))
    ),
    "FedGMA": tuple(
        {"lr": lr, "server-lr": server, "threshold": 0.1}
        for lr, server in ((0.3, 1.0), (0.1, 1.5), (0.3, 1.0), (0.1, 1.5), (0.3, 1.5))
    ),
    "FedADG": tuple({"lr": lr} for lr in (0.3, 0.1, 0.3, 0.1, 0.3)),
    "FedSR": tuple({"lr": lr} for lr in (0.3, 0.05, 0.3, 0.1, 0.3)),
    "PFL-Sampled": tuple({"lr": lr} for lr in (0.1, 0.1, 0.1, 0.1, 0.3)),
    "PFL-Ensemble": tuple({"lr": lr} for lr in (0.1, 0.1, 0.1, 0.1, 0.3)),
    "ODPFL-HN": (
        {"lr": 0.3, "encoder-lr": 0.5, "hyper-lr": 0.5},
        {"lr": 0.05, "encoder-lr": 0.1, "hyper-lr": 0.5},
        {"lr": 0.01, "encoder-lr": 0.1, "hyper-lr": 0.5},
        {},  # the paper has "xx"
        {"lr": 0.1, "encoder-lr": 0.5, "hyper-lr": 0.5},
    ),
    "FedTTA": tuple(
        {"inner-lr": inner, "lr": lr, "loss-lr": loss}
        for inner, lr, loss in (
            (0.5, 0.3, 0.01), (0.5, 0.05, 0.005), (0.3, 0.1, 0.003), (0.5, 0.1, 0.001), (0.05, 0.1, 0.001),
        )
    ),
    "FedTTA-Prox": tuple(
        {"inner-lr": inner, "lr": lr, "loss-lr": loss, "mu": mu}
        for inner, lr, loss, mu in (
            (0.5, 0.3, 0.001, 0.01), (0.3, 0.1, 0.003, 0.001), (0.3, 0.1, 0.003, 0.001), (0.5, 0.1, 0.001, 0.01),
            (0.05, 0.1, 0.001, 0.001),
        )
    ),
}  # fmt: skip
PATIENCE = (1, 1, 5, 5, 5)


@pytest.mark.parametrize("name", COLUMNS)
def test_fedttas_table_1(name: str) -> None:
    column, experiment = COLUMNS.index(name), Experiment.load(name)
    assert experiment.rounds == ROUNDS[column]
    published: dict[str, Any] = {}
    for method in experiment.method:
        for adapter in method.adapters:
            if adapter.paper:
                published[method.title if adapter.name == "none" else adapter.title] = adapter.paper["original/unseen"]
    assert published == {title: numbers[column] for title, numbers in T1.items()}
    rows = rows_of(experiment)
    for title, by_column in RATES.items():
        found = {**rows[title].options(), "lr": {**experiment.train, **rows[title].train}["lr"]}
        assert {key: found.get(key) for key in by_column[column]} == by_column[column], title
    adapters = {a.title: a.options() for a in rows["FedTTA-Prox"].adapters}
    assert adapters["FedTTA++"] == {"steps": 50, "patience": PATIENCE[column]}
    assert adapters["FedTTA-Prox"] == {}


T2 = {  # accuracy of new clients by the alpha of their classes
    "TENT": (91.48, 88.81, 85.40, 84.23, 74.37, 71.30),
    "FedTTA": (89.24, 87.15, 84.76, 83.34, 76.24, 74.49),
    "FedTTA-Prox": (90.82, 88.43, 85.97, 84.40, 76.95, 74.93),
    "FedTTA++": (94.49, 90.01, 87.70, 85.86, 76.98, 73.20),
    "FedAvg": (68.34,) * 6,
}
VALIDATION = {  # of those who train, by column of table 1
    "FedTTA++": (98.94, 85.82, 83.78, 48.59, 96.04),
    "FedAvg": (95.06, 66.93, 83.98, 31.10, 90.32),
}


def published_by(experiment: Experiment) -> dict[str, dict[str, float]]:
    settings = experiment.model_dump(by_alias=True)
    return {
        method.title if adapter.name == "none" else adapter.title: adapter.published(settings)
        for method in experiment.method
        for adapter in method.adapters
        if adapter.paper
    }


def test_fedttas_table_2() -> None:
    points = [variant for _, variant in Experiment.load("label-shift-sweep").variants()]
    assert [variant.partition.options()["new-alpha"] for variant in points] == [0.01, 0.03, 0.05, 0.1, 0.3, 0.5]
    columns = [published_by(variant) for variant in points]
    for title, numbers in T2.items():
        assert tuple(column[title]["original/unseen"] for column in columns) == numbers


@pytest.mark.parametrize("name", COLUMNS)
def test_fedttas_validation_accuracies(name: str) -> None:
    found = published_by(Experiment.load(name, ["split.tune=true"]))
    for title, numbers in VALIDATION.items():
        assert found[title]["original"] == numbers[COLUMNS.index(name)]


@pytest.mark.parametrize(
    "name", [*COLUMNS, "writers", "label-shift-sweep", "test-size-sweep", "rotations", "mixed-models"]
)
def test_all_of_fedttas_presets_train_alike(name: str) -> None:
    experiment = Experiment.load(name)
    expected = {
        "batch-size": 64, "local-steps": 20, "weight-decay": 1e-4, "clip": 10.0, "lr-decay": 0.998995, "last-batch": "wrap"
    }  # fmt: skip
    assert {key: experiment.train.get(key) for key in expected} == expected
    assert experiment.evaluate.adapted
    tents = [a.options() for m in experiment.method for a in m.adapters if a.name == "tent"]
    assert tents
    for options in tents:  # at the method's own rate, whatever the number of rounds
        assert options["train-lr"] is True
        assert "lr" not in options


# ---- where papers and their code were read again -------------------------------------------------------------------------
def test_settings_that_were_read_again_in_the_papers_and_their_code() -> None:
    assert Experiment.load("new-clients-fashion").partition.options()["distinct"] is False
    assert Experiment.load("new-clients").partition.options().get("distinct", True) is True
    cifar100, rotations = Experiment.load("new-clients-cifar100"), Experiment.load("rotations")
    assert (cifar100.data.mean, cifar100.data.std) == ([0.5071, 0.4867, 0.4408], [0.2675, 0.2565, 0.2761])
    assert (rotations.data.mean, rotations.data.std) == ([0.0], [1.0])
    assert rotations.rotation["resample"] == "bicubic"
    assert rows_of(Experiment.load("writers-femnist"))["FedADG"].model == {"hidden": 512}
    assert [point for point, _ in Experiment.load("brfl").variants()] == [
        {"partition.alpha": 0.1},
        {"partition.alpha": 1.0},
    ]


@pytest.mark.parametrize("data", ["digits", "office", "domainnet"])
def test_fedicon_us_adapts_under_domain_shift_as_under_covariate_shift(data: str) -> None:
    rates = []
    for shift in ("covariate", "domain"):
        adapters = rows_of(Experiment.load(f"{data}-{shift}"))["FedICON-us"].adapters
        rates += [adapter.options()["lr"] for adapter in adapters if adapter.name == "fedicon"]
    assert rates == [0.001, 0.001]


FDSE_TABLES = [name for name in presets() if name.startswith("fdse-") or name.endswith(("-personal", "-unseen"))]


@pytest.mark.parametrize("name", [*FDSE_TABLES, "domainnet-resnet50", "pacs-vit"])
def test_fdses_presets_say_which_activation_stands_beside_the_published_number(name: str) -> None:
    experiment = Experiment.load(name)
    assert sum("activation" in note and "ReLU" in note for note in experiment.notes) == 1
    published = [m for m in experiment.method if m.name == "fdse" and any(a.paper for a in m.adapters)]
    assert not any(method.options().get("activation") for method in published)
    if name.endswith(("-personal", "-unseen")):
        assert rows_of(experiment)["FDSE with ReLU"].options()["activation"] is True


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("new-clients-mnist", ("two shards of one class",)),
        ("new-clients-fashion", ("two shards of one class", "not normalised")),
        ("new-clients-cifar100", ("own mean and deviation",)),
        ("rotations", ("bicubic", "not normalised")),
        ("writers-femnist", ("FedADG", "512 features")),
        ("mixed-models", ("32, 64 and 128", "momentum")),
        ("brfl-severity", ("Glass blur copies", "Zoom blur", "severities 1 and 2")),
        ("brfl", ("Glass blur copies", "training labels")),
    ],
)
def test_a_table_says_what_it_takes_from_the_authors_code(name: str, words: tuple[str, ...]) -> None:
    notes = " ".join(Experiment.load(name).notes)
    assert [word for word in words if word not in notes] == []
