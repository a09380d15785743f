"""Every preset: it parses, names its data, builds its task on small files of the layout it asks for, and runs."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fedshift.data.concept import rotate
from fedshift.data.sources import load
from fedshift.data.task import Task
from fedshift.errors import UserError
from fedshift.experiment.files import PRESETS, presets
from fedshift.experiment.schema import Experiment
from fedshift.models.resnet import ResNet18
from fedshift.runs.run import run
from fedshift.runs.setup import make_setup, make_task, with_baselines
from fedshift.store.cache import cache_folder
from tests.presets_data import write_all

PROTOCOLS = {"B1", "B2", "B3", "I1", "I2", "I3", "I4", "I5", "C1", "C2"}
PROTOCOLS |= {"T1", "T2", "T3", "T4", "T5", "T6", "T7", "D1", "D2", "D3"}
NAMES = [name for name in presets() if name not in ("default", "private")]  # of a paper's protocol


# the headline table of each system
HEADLINES = ("brfl", "digits-covariate", "pacs-feature", "new-clients", "office-personal")


def one_of_each_system(names: Sequence[str]) -> list[Any]:
    """Presets as parameters: the headline of each system, the others in the grid."""
    return [name if name in HEADLINES else pytest.param(name, marks=pytest.mark.grid) for name in names]


def two_layouts(names: Sequence[str]) -> list[Any]:
    """Presets as parameters where each takes seconds: label skew and domains, the others in the grid."""
    kept = ("brfl", "digits-covariate")
    return [name if name in kept else pytest.param(name, marks=pytest.mark.grid) for name in names]


# FedCiR's figures with many clients
SKEWED = [n for n in NAMES if n.startswith(("fedcir-clients", "fedcir-dirichlet", "fedcir-participation"))]

# clients that train and unseen clients, at full scale on the generated files
POPULATIONS = {
    **dict.fromkeys([n for n in NAMES if n.startswith("brfl")], (20, 0)),
    "ours": (20, 0),
    "brfl-100": (100, 0),
    "attribute": (20, 0),
    **dict.fromkeys([n for n in NAMES if n.startswith("digits")], (5, 0)),
    "digits-domain": (4, 1),
    "digits-heterogeneity": (4, 16),
    **dict.fromkeys([n for n in NAMES if n.startswith("office")], (4, 0)),
    "office-domain": (3, 1),
    "office-unseen": (3, 1),
    **dict.fromkeys([n for n in NAMES if n.startswith("domainnet")], (6, 0)),
    "domainnet-domain": (5, 1),
    "domainnet-unseen": (5, 1),
    **dict.fromkeys([n for n in NAMES if n.startswith(("pacs", "fdse", "fedcir"))], (4, 0)),
    "pacs-unseen": (3, 1),
    "fdse-ablation-domainnet": (6, 0),
    "camelyon17-feature": (5, 0),
    "iwildcam-feature": (10, 0),
    "pacs-label-skew": (50, 0),
    "domainnet-label-skew": (50, 0),
    **dict.fromkeys([n for n in NAMES if n.startswith("fedcir") and n.endswith("domainnet")], (6, 0)),
    **dict.fromkeys(SKEWED, (50, 0)),
    **dict.fromkeys([n for n in NAMES if n.startswith("new-clients")], (50, 50)),
    "test-size-sweep": (50, 50),
    "fedtta-curves": (50, 50),
    "mixed-models": (50, 50),
    "writers": (25, 25),
    "writers-femnist": (5, 5),
    "label-shift-sweep": (50, 50),
    "rotations": (25, 25),
}
SMALL_POPULATIONS = {
    **POPULATIONS,
    **dict.fromkeys([n for n in NAMES if n.startswith("new-clients")], (20, 20)),
    "test-size-sweep": (20, 20),
    "fedtta-curves": (20, 20),
    "mixed-models": (20, 20),
    "label-shift-sweep": (20, 20),
    "pacs-label-skew": (8, 0),
    "domainnet-label-skew": (12, 0),
    **{name: (12 if name.endswith("domainnet") else 8, 0) for name in SKEWED},
}
# FedICON's tables and figures; those in the first line have all rows of a table
TABLES = ["digits-covariate", "digits-domain", "office-covariate", "office-domain", "domainnet-covariate", "attribute"]
FEDICON = [*TABLES, "domainnet-domain", "digits-ablation", "digits-scaling", "digits-local-epochs"]
HUB = {
    "cifar10-train": "uoft-cs/cifar10",
    "cifar100": "uoft-cs/cifar100",
    "mnist": "ylecun/mnist",
    "femnist": "flwrlabs/femnist",
    "fashion_mnist": "zalando-datasets/fashion_mnist",
    "pacs": "flwrlabs/pacs",
    "digits": "flwrlabs/usps",
    "domainnet10": "wltjr1007/DomainNet",
    "camelyon17": "wltjr1007/Camelyon17-WILDS",
}
REAL = os.environ.get("FEDSHIFT_DATA")  # before the fixture below puts generated files in its place

# a few hundred images cannot be shared by fifty clients as thousands can
FEW = {
    "pacs-label-skew": ["partition.min-size=2"],
    "domainnet-label-skew": ["partition.min-size=2"],
    **{name: ["partition.min-size=2"] for name in SKEWED},
    **{
        name: ["partition.min-size=2", 'sweep={"partition.clients"=[10,20,50]}']
        for name in SKEWED
        if name.startswith("fedcir-clients")
    },
    "label-shift-sweep": ["partition.min-size=1"],
    "digits-scaling": ['sweep={"partition.clients-per-domain"=[1,2,4]}'],
}


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Files of every layout in a folder that is $FEDSHIFT_DATA for these tests."""
    root = tmp_path_factory.mktemp("data")
    write_all(root)
    torch.manual_seed(2024)  # not the start of any run
    save_file(ResNet18().make((3, 32, 32), classes=1000).state_dict(), root / "resnet18-imagenet.safetensors")
    before = os.environ.get("FEDSHIFT_DATA")
    os.environ["FEDSHIFT_DATA"] = str(root)
    yield root
    if before is None:
        del os.environ["FEDSHIFT_DATA"]
    else:
        os.environ["FEDSHIFT_DATA"] = before


def _full(name: str, *changes: str) -> Experiment:
    """The preset as it is published, on images small enough for a test."""
    plain = Experiment.load(name)
    side = {"alexnet": 64}.get(plain.models[0].name, 32)
    smaller = [f"data.size={side}"] if (plain.data.size or 0) > side else []
    return Experiment.load(name, [*smaller, *FEW.get(name, []), *changes])


def _small(name: str, *changes: str) -> Experiment:
    """FedAvg alone at small scale, one step of four images a round."""
    method = "fedmd" if len(Experiment.load(name).models) > 1 else "fedavg"  # which cannot mix networks
    quick = ["rounds=2", "baselines=false", f'method=[{{name="{method}"}}]', "evaluate.every=0"]
    steps = ["train.local-steps=1", "train.batch-size=4"]
    if name == "office-personal":  # one is enough for the scores after local training
        steps.append("evaluate.after-local=true")
    return Experiment.load(name, ["scale=small", *quick, *steps, *FEW.get(name, []), "sweep={}", *changes])


def _id(title: str) -> str:
    found = re.match(r"([BICTD]\d): \w", title)
    assert found, title
    return found[1]


# ---- what is written down ----------------------------------------------------------------------------------------------


def test_every_protocol_has_a_preset() -> None:
    titles = {name: Experiment.load(name).title for name in NAMES}
    assert {_id(title) for title in titles.values()} == PROTOCOLS
    assert len(set(titles.values())) == len(titles)
    for name, title in titles.items():
        assert (PRESETS / f"{name}.toml").read_text().startswith(f"# {_id(title)}: "), name


def test_the_tables_above_know_every_preset() -> None:
    assert set(POPULATIONS) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_small_scale_is_smaller(name: str) -> None:
    full, small = Experiment.load(name), Experiment.load(name, ["scale=small"])
    assert (full.scale, small.scale) == ("full", "small")
    assert small.rounds < full.rounds
    assert len(small.seeds) == 1 < 3 <= len(full.seeds)
    assert 1 <= len(list(small.variants())) <= max(2, len(list(full.variants())))
    assert len(small.method) <= len(full.method)
    assert {m.name for m in small.method} <= {m.name for m in full.method} | {"finetune"}
    assert {m.name for m in full.method} & {"fedavg", "fedthe", "fdse", "fedcir", "fedmd"}
    work = [e.train.get("local-steps", 0) + e.train.get("local-epochs", 0) for e in (small, full)]
    images = [(e.data.limit or 1e9, e.data.size or 1e9, e.split.get("train-limit") or 1e9) for e in (small, full)]
    assert work[0] < work[1] or images[0] < images[1]


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_says_what_it_needs(name: str) -> None:
    spec = Experiment.load(name).data
    assert len(spec.needs) > 60
    assert "\n" not in spec.needs
    assert "split" in spec.needs  # whether the file's own is used
    assert "$FEDSHIFT_DATA" in spec.source
    for word, hub in HUB.items():
        if re.search(rf"FEDSHIFT_DATA/{word}\b", spec.source):
            assert hub in spec.needs, word
    if name in ("rotations", "writers"):  # their default is a file of ours, so they name what the hub has instead
        assert "ylecun/mnist" in spec.needs or "writers-femnist" in spec.needs


@pytest.mark.parametrize("name", NAMES)
def test_own_split_is_used_where_the_preset_says_so(name: str) -> None:
    experiment = Experiment.load(name)
    used = experiment.split.get("from-file", False) or experiment.partition.kind == "dirichlet-new"
    assert used == bool(re.search(r"own (train and test )?split is used", experiment.data.needs))


# ---- tasks at full scale -----------------------------------------------------------------------------------------------


def _check(task: Task, experiment: Experiment, clients: int, unseen: int) -> None:
    assert len(task.clients) == clients
    # of a hundred images dealt by Dirichlet some new clients get nothing, and are left out
    fewest = unseen // 2 if experiment.partition.kind == "dirichlet-new" else unseen
    assert fewest <= len(task.unseen) <= unseen
    assert list(task.streams) == [stream.name for stream in experiment.stream]
    owned = [getattr(c, part) for c in (*task.clients, *task.unseen) for part in ("train", "val", "test")]
    together = torch.cat(owned)
    assert len(together) == len(together.unique())  # nobody owns an image twice, nor together with somebody else
    assert all(len(client.train) for client in task.clients)
    for stream in task.streams.values():
        assert set(stream.index) == {client.name for client in (*task.clients, *task.unseen)}
        assert sum(len(index) for index in stream.index.values()) > 0
    if experiment.split["val"]:
        assert sum(len(client.val) for client in task.clients) > 0


@pytest.mark.parametrize("name", two_layouts(NAMES))
def test_full_scale_builds_and_every_method_fits(name: str, data: Path) -> None:
    experiment = _full(name)
    task = make_task(experiment, seed=0)
    _check(task, experiment, *POPULATIONS[name])
    networks = ['model.size="tiny"'] if name == "pacs-vit" else []
    light = _full(name, *networks)
    for spec in light.method:
        setup = make_setup(light, spec, task)
        assert setup.method.arch.classes == len(task.classes)


@pytest.mark.parametrize("name", presets())
def test_splits_stay_as_they_were_published(name: str, data: Path) -> None:
    """The hashes of the first tasks, with one plain stream: a split that changes silently is another benchmark."""
    plain = ['stream=[{name="original",kind="original"}]', "evaluate.mean-of=[]"]
    experiment = _full(name, *plain) if name in NAMES else Experiment.load(name, plain)
    published = json.loads((Path(__file__).parent / "preset_hashes.json").read_text())
    variant = next(experiment.variants())[1]
    assert make_task(variant, seed=0).hash == published[name]
    settings = variant.model_dump(by_alias=True)  # what decides which run it is
    assert not {"stratify", "missing-group"} & set(settings["split"])
    assert "attributes" not in settings["data"]


@pytest.mark.grid
@pytest.mark.parametrize("name", [n for n in NAMES if Experiment.load(n).sweep])
def test_every_point_of_a_sweep_is_a_task(name: str, data: Path) -> None:
    tasks = {}
    for point, variant in _full(name, "data.size=32").variants():
        tasks[str(point)] = make_task(variant, seed=0)
    data_changes = any(key.startswith(("partition", "split")) for key in Experiment.load(name).sweep)
    assert len({task.hash for task in tasks.values()}) == (len(tasks) if data_changes else 1)


@pytest.mark.grid
@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("brfl") or n in FEDICON])
def test_every_method_of_the_small_scale_fits(name: str, data: Path) -> None:
    experiment = Experiment.load(name, ["scale=small"])
    task = make_task(next(experiment.variants())[1], seed=0)
    for spec in experiment.method:
        assert make_setup(experiment, spec, task).spec is spec
    tuned = [a for m in experiment.method for a in m.adapters if a.name in ("memo", "the-plus", "lp-ft")]
    assert all(adapter.options()["views"] <= 4 for adapter in tuned)
    assert not any(adapter.paper for method in experiment.method for adapter in method.adapters)


# ---- runs at small scale -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", two_layouts(NAMES))
def test_two_rounds_of_fedavg(name: str, data: Path, tmp_path: Path) -> None:
    experiment = _small(name)
    clients, unseen = SMALL_POPULATIONS[name]
    task = make_task(experiment, seed=0)
    _check(task, experiment, clients, unseen)
    result = run(experiment, tmp_path, engine="sequential", device="cpu")
    (row,) = result.rows
    kind = "personal" if row.method == "fedmd" else "global"
    assert (row.method, row.adapter) == (experiment.method[0].name, "none")
    unseen = [c.name for c in task.unseen]
    for stream in task.streams.values():
        scored = [name for name, index in stream.index.items() if len(index)]
        for population, count in (
            ("clients", len(set(scored) - set(unseen))),
            ("unseen", len(set(scored) & set(unseen))),
        ):
            if population == "unseen" and not unseen:
                continue
            (numbers,) = row.scores(f"{kind}/{stream.name}/{population}", "last")
            summary = numbers.summary
            assert summary.clients == count
            if count:
                assert 0 <= summary.worst10 <= summary.client_mean <= 100  # type: ignore[operator]
                assert 0 <= summary.pooled <= 100  # type: ignore[operator]
                assert math.isfinite(summary.loss)  # type: ignore[arg-type]
    assert row.scores("after-local/original/clients", "last") or name != "office-personal"
    lines = [line for line in (result.folders[0] / "metrics.jsonl").read_text().splitlines() if "train/loss" in line]
    assert len(lines) == 2


@pytest.mark.grid
@pytest.mark.parametrize("name", ["new-clients-mnist", pytest.param("mixed-models", marks=pytest.mark.grid)])
def test_every_row_of_fedttas_tables_runs(name: str, data: Path, tmp_path: Path) -> None:
    """All methods and adapters with the settings that are written down, in steps of four images."""
    short = ["rounds=2", "evaluate.every=0", "train.local-steps=1", "train.batch-size=4", "sweep={}", "seeds=[0]"]
    experiment = Experiment.load(name, [*short, *FEW.get(name, []), "partition.clients=6"])
    result = run(experiment, tmp_path, engine="sequential", device="cpu")
    wanted = {(method.title, adapter.title) for method in experiment.method for adapter in method.adapters}
    assert {(row.method, row.adapter) for row in result.rows} == wanted
    assert len(wanted) >= (14 if name == "new-clients-mnist" else 6)
    for row in result.rows:
        unseen = (found for (rule, m), found in row.values.items() if (rule, m.population) == ("best-val", "unseen"))
        (numbers,) = next(unseen)
        assert 0 <= numbers.summary.client_mean <= 100, (row.method, row.adapter)
        assert numbers.summary.clients == len(make_task(experiment, 0).unseen)


# ---- the paper's numbers beside ours -----------------------------------------------------------------------------------

BRFL = [name for name in NAMES if name.startswith("brfl")]
FIVE = ["original", "corrupted", "out-of-client", "natural", "mixture"]


def _published(name: str) -> dict[tuple[str, str, str], dict[str, float]]:
    """The numbers of every row, by the sweep's point."""
    return {
        (str(point), method.title, adapter.title): adapter.published(variant.model_dump(by_alias=True))
        for point, variant in Experiment.load(name).variants()
        for method in variant.method
        for adapter in method.adapters
    }


def _leaves(paper: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in paper.items():
        yield from _leaves(value) if isinstance(value, dict) else [(key, value)]


@pytest.mark.parametrize("name", BRFL)
def test_published_numbers_belong_to_streams(name: str) -> None:
    experiment = Experiment.load(name)
    known = {*(stream.name for stream in experiment.stream), "mean"}
    numbers = [leaf for m in experiment.method for a in m.adapters for leaf in _leaves(a.paper)]
    assert numbers
    assert {key for key, _ in numbers} <= known
    assert all(5 < value < 95 for _, value in numbers)
    by_row = _published(name)
    for point, variant in experiment.variants():
        assert any(found for (at, _, _), found in by_row.items() if at == str(point)), point
        for (at, _, _), found in by_row.items():
            if at == str(point) and "mean" in found:
                parts = [found[stream] for stream in variant.evaluate.mean_of]
                assert found["mean"] == pytest.approx(sum(parts) / len(parts), abs=0.035)  # the paper's own rounding
    if name != "brfl":
        assert '\nextends = "brfl"\n' in (PRESETS / f"{name}.toml").read_text()
    assert experiment.notes


def test_brfl_is_the_whole_of_table_1() -> None:
    experiment = Experiment.load("brfl")
    assert [spec.name for spec in with_baselines(experiment)] == [
        "majority",
        *(spec.name for spec in experiment.method),
    ]
    by_row = _published("brfl").items()
    rows = {key[1:]: found for key, found in by_row if found and key[0] == "{'partition.alpha': 0.1}"}
    assert len(rows) == 14
    assert rows["two heads", "FedTHE"] == {
        **dict(zip(FIVE, (89.58, 81.62, 57.12, 80.88, 72.07), strict=True)),
        "mean": 76.25,
        "corrupted-out-of-client": 44.68,
    }
    assert "corrupted" not in rows["FedAvg", "none"]  # cannot be read in the paper
    full = [found for found in rows.values() if set(FIVE) <= set(found)]
    assert len(full) == 12
    assert all("mean" in found for found in full)
    at_one = {k[1:]: v for k, v in _published("brfl-dirichlet").items() if k[0] == "{'partition.alpha': 1.0}"}
    assert at_one["FedAvg + FT", "none"]["original"] == 78.21
    at_ten = {k[1:]: v for k, v in _published("brfl-dirichlet").items() if k[0] == "{'partition.alpha': 10.0}"}
    assert at_ten["kNN-Per", "none"] == {}  # Table 4 has no such row
    assert sum(bool(found) for found in at_ten.values()) == 13


def test_the_ablation_has_every_row_of_tables_3_and_13() -> None:
    chosen = Experiment.load("brfl-ablation")
    rows = {adapter.title: adapter for method in chosen.method for adapter in method.adapters}
    assert sorted(int(title.split()[0]) for title in rows) == list(range(1, 17))
    settings, other = ({"partition": {"alpha": alpha}} for alpha in (0.1, 1.0))
    assert all(set(adapter.published(settings)) == {*FIVE, "mean"} for adapter in rows.values())
    assert not any(adapter.published(other) for adapter in rows.values())  # the table is that of Dir(0.1)


@pytest.mark.parametrize("name", ["brfl-fixed-e", "brfl-fixed-e-models"])
def test_fixed_weights_are_one_family(name: str) -> None:
    first = Experiment.load(name).method[0]
    family = [adapter for adapter in first.adapters if adapter.family == "fixed e"]
    assert [adapter.options() for adapter in family] == [{"e": k / 10} for k in range(11)]


def test_alpha_and_beta_are_a_grid_of_one_training() -> None:
    (method,) = Experiment.load("brfl-alpha-beta").method
    grid = [(adapter.options()["alpha"], adapter.options()["beta"]) for adapter in method.adapters]
    assert grid == [(a, b) for a in (0.05, 0.1, 0.2) for b in (0.1, 0.2, 0.3, 0.4, 0.5)]
    assert [bool(adapter.paper) for adapter in method.adapters] == [point == (0.1, 0.3) for point in grid]


@pytest.mark.parametrize("name", TABLES)
def test_fedicon_s_tables_have_their_rows(name: str) -> None:
    experiment = Experiment.load(name)
    assert [spec.name for spec in with_baselines(experiment)] == [
        "majority",
        *(spec.name for spec in experiment.method),
    ]
    known = {stream.name for stream in experiment.stream}
    numbers = [leaf for m in experiment.method for a in m.adapters for leaf in _leaves(a.paper)]
    assert {key for key, _ in numbers} <= known
    assert all(10 < value < 95 for _, value in numbers)
    columns = {"original", "shifted"} if name == "attribute" else known - {"original"}
    by_row = _published(name)
    for point, variant in experiment.variants():
        rows = {key[1:]: found for key, found in by_row.items() if key[0] == str(point)}
        plain = [(label, "none") for label in ("Local", "FedAvg", "FedAvg-FT", "FedProx", "FedRep", "FedBN")]
        normed = "FedAvg" if variant.models[0].name == "resnet18" else "FedAvg with BatchNorm"
        adapted = [("FedAvg", "T3A"), (normed, "Tent"), (normed, "EATA"), ("FedICON", "FedICON")]
        if name == "attribute":  # what it calls FedTHE comes from FedTHE's paper, and is FedTHE+ in one half
            adapted.append(("two heads", "FedTHE+" if point == {"partition.alpha": 0.1} else "FedTHE"))
        else:
            adapted.append(("two heads", "FedTHE"))
        for row in (*plain, *adapted):
            # digits in fonts are not SynthDigits, so nothing was published on them
            assert set(rows[row]) == (set() if point == {"split.unseen": "synfont"} else columns), (point, row)
        assert {("FedICON", "none"), ("FedICON-us", "none"), ("FedICON-us", "FedICON-us")} <= set(rows)
    assert experiment.notes
    assert experiment.train["weights"] == "size"


def test_fedicon_s_means_are_those_of_its_table_9() -> None:
    rows = ["Local", "FedAvg", "FedAvg-FT", "FedICON", "FedICON-us"]
    for name, numbers in {
        "digits-covariate": (34.00, 55.04, 54.55, 62.23, 61.60),
        "office-covariate": (58.07, 57.55, 60.45, 64.96, 63.79),
    }.items():
        found = {key[1:]: value for key, value in _published(name).items()}
        for row, number in zip(rows, numbers, strict=True):
            assert found[row, row if row.startswith("FedICON") else "none"] == {"corrupted": number}
    domains = [found for (_, *row), found in _published("digits-domain").items() if row == ["FedICON", "FedICON"]]
    assert [found.get("left-out") for found in domains] == [89.75, 30.22, 74.14, None, 36.03]


def test_fedicon_s_ablation_has_every_variant_of_table_8() -> None:
    experiment = Experiment.load("digits-ablation")
    rows = {a.title: (m, a) for m in experiment.method for a in m.adapters}
    numbers = [("no part", 34.00), ("L", 48.60), ("G", 55.04), ("T", 39.92)]
    numbers += [("L + G", 59.39), ("G + T", 59.54), ("L + T", 49.67), ("L + G + T", 62.23)]
    assert {title: adapter.paper for title, (_, adapter) in rows.items()} == {t: {"corrupted": v} for t, v in numbers}
    for title, (method, adapter) in rows.items():
        parts = set(title.split(" + "))
        shared = method.name == "fedavg" or (method.name == "fedicon" and method.options().get("share", True))
        assert (method.name == "fedicon", shared, adapter.name == "fedicon") == tuple(p in parts for p in "LGT")


@pytest.mark.parametrize("scale", ["full", "small"])
def test_digits_are_not_mirrored(scale: str) -> None:
    for name in (n for n in FEDICON if n.startswith("digits")):
        methods = Experiment.load(name, [f"scale={scale}"]).method
        found = [m.options() for m in methods if m.name == "fedicon"]
        found += [a.options() for m in methods for a in m.adapters if a.name == "fedicon"]
        assert found, name
        assert not any(options.get("flip", True) for options in found), name


# ---- other layouts -----------------------------------------------------------------------------------------------------

LAYOUTS = {
    "brfl": [
        "data.source=parquet:$FEDSHIFT_DATA/cifar10",
        "stream.natural.source=folder:$FEDSHIFT_DATA/cifar10.1",
        "stream.natural-without-frog.source=folder:$FEDSHIFT_DATA/cifar10.1",
    ],
    "attribute": [
        "stream.shifted.source=folder:$FEDSHIFT_DATA/cifar10.1",
        "stream.shifted-without-frog.source=folder:$FEDSHIFT_DATA/cifar10.1",
    ],
    "label-shift-sweep": ["data.source=parquet:$FEDSHIFT_DATA/cifar10"],
    "pacs-feature": ["data.source=parquet:$FEDSHIFT_DATA/pacs"],
    "domainnet-feature": ["data.source=parquet:$FEDSHIFT_DATA/domainnet10.parquet"],
    "rotations": ["data.source=parquet:$FEDSHIFT_DATA/mnist", "data.limit=300"],
    "new-clients-mnist": ["data.source=parquet:$FEDSHIFT_DATA/writers.parquet"],
    "office-covariate": ["split.from-file=false"],
    "digits-covariate": ["data.source=parquet:$FEDSHIFT_DATA/digits*.parquet", "data.columns={}"],
    "camelyon17-feature": ['data.columns={client="center"}'],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_the_preset_says_also_works(name: str, data: Path) -> None:
    experiment = _full(name, *LAYOUTS[name])
    _check(make_task(experiment, seed=0), experiment, *POPULATIONS[name])


def test_both_layouts_of_cifar10_have_the_same_classes(data: Path) -> None:
    sources = ["parquet:$FEDSHIFT_DATA/cifar10-t*.parquet", "parquet:$FEDSHIFT_DATA/cifar10"]
    a, b = (load(source, None, None, 3, cache_folder()) for source in sources)
    assert a.classes == b.classes
    assert a.splits is not None
    assert b.splits is not None
    assert a.splits.bincount().tolist() == b.splits.bincount().tolist() == [300, 0, 100]


# ---- what makes each protocol what it is -------------------------------------------------------------------------------


def _task(name: str, *changes: str) -> Task:
    return make_task(_full(name, *changes), seed=0)


@pytest.mark.parametrize(("name", "part"), [("digits-covariate", "val"), ("camelyon17-feature", "test")])
def test_photographs_and_slides_stay_on_one_side(name: str, part: str, data: Path) -> None:
    spec = _full(name).data
    groups = load(spec.source, spec.columns, spec.size, 3, cache_folder()).groups
    assert groups is not None
    shared = 0
    for client in _task(name).clients:
        train, other = set(groups[client.train].tolist()), set(groups[getattr(client, part)].tolist())
        assert not train & other
        shared += len(client.train) - len(train)
    assert shared > 0  # several images of one photograph do exist


def test_brfl_streams(data: Path) -> None:
    task = _task("brfl")
    assert {len(c.train) + len(c.val) + len(c.test) for c in task.clients} == {20}
    frog = task.classes.index("frog")
    natural, without = task.streams["natural"], task.streams["natural-without-frog"]
    for client in task.clients:
        labels = natural.labels[natural.index[client.name]]
        assert sorted(without.index[client.name].tolist()) == sorted(
            natural.index[client.name][labels != frog].tolist()
        )
        # the natural set follows the client's own training labels
        own = task.labels[client.train]
        assert set(labels.tolist()) <= set(own.tolist())
        others = task.streams["out-of-client"].index[client.name]
        assert len(others) == len(client.test)
        assert not set(others.tolist()) & set(torch.cat([client.train, client.val, client.test]).tolist())
    assert len(task.streams["mixture"].labels) % 4 == 0


def test_severities_show_the_same_images(data: Path) -> None:
    task = _task("brfl-severity")
    streams = [task.streams[f"severity-{s}"] for s in range(1, 6)]
    first = streams[0]
    assert first.images is not None
    for stream in streams[1:]:
        assert stream.images is not None
        assert torch.equal(stream.ids, first.ids)
        assert all(torch.equal(stream.index[name], first.index[name]) for name in first.index)
        assert not torch.equal(stream.images, first.images)


def test_every_severity_has_a_mixture(data: Path) -> None:
    task = _task("brfl-severity")
    clean, noisy = task.streams["severity-1"], task.streams["severity-5"]
    assert clean.images is not None
    assert noisy.images is not None
    for severity, stream in ((1, clean), (5, noisy)):
        mixture = task.streams[f"mixture-{severity}"]
        assert mixture.images is not None
        assert stream.images is not None
        pictures = {picture.numpy().tobytes() for picture in mixture.images}
        mixed_in = sum(picture.numpy().tobytes() in pictures for picture in stream.images)
        assert mixed_in == len(mixture.images) // 4


def test_smaller_test_sets_are_the_beginnings_of_larger_ones(data: Path) -> None:
    task = _task("brfl-test-size")
    for stream in FIVE:
        for client in task.clients:
            whole = task.streams[stream].index[client.name].tolist()
            for percent in (75, 50):
                part = task.streams[f"{stream}-{percent}"].index[client.name].tolist()
                assert part == whole[: max(1, round(percent / 100 * len(whole)))] if whole else not part


def test_smaller_training_sets_are_parts_of_larger_ones(data: Path) -> None:
    fractions = (1.0, 0.75, 0.5, 0.001)
    tasks = [_task("brfl-train-size", f"split.train-fraction={fraction}") for fraction in fractions]
    assert len({task.hash for task in tasks}) == len(tasks)
    whole = tasks[0]
    for fraction, task in zip(fractions, tasks, strict=True):
        for client, original in zip(task.clients, whole.clients, strict=True):
            assert len(client.train) == max(1, round(fraction * len(original.train)))
            assert torch.equal(client.val, original.val)
            assert torch.equal(client.test, original.test)
    for larger, smaller in pairwise(tasks):
        for a, b in zip(larger.clients, smaller.clients, strict=True):
            assert set(b.train.tolist()) <= set(a.train.tolist())


@pytest.mark.parametrize("name", ["digits-domain", "office-domain", "domainnet-domain"])
def test_everybody_is_tested_on_the_left_out_domain(name: str, data: Path) -> None:
    for point, variant in _full(name).variants():
        task = make_task(variant, seed=0)
        (target,) = task.unseen
        assert target.name == point["split.unseen"]
        stream = task.streams["left-out"]
        for client in (*task.clients, target):
            assert sorted(stream.index[client.name].tolist()) == sorted(target.test.tolist())


def test_four_clients_of_one_domain_are_tested_on_the_others(data: Path) -> None:
    trained = []
    for _, variant in _full("digits-heterogeneity").variants():
        task = make_task(variant, seed=0)
        (domain,) = {client.name.rpartition("-")[0] for client in task.clients}
        others = [client.name.rpartition("-")[0] for client in task.unseen]
        assert len(task.clients) == 4
        assert sorted(others.count(other) for other in set(others)) == [4, 4, 4, 4]
        assert domain not in others
        trained.append(domain)
    assert sorted(trained) == ["mnist", "mnist_m", "svhn", "synfont", "usps"]


@pytest.mark.parametrize("name", ["office-unseen", "pacs-unseen", "domainnet-unseen"])
def test_a_tenth_of_the_target_domain(name: str, data: Path) -> None:
    task = _task(name)
    (target,) = task.unseen
    whole, tenth = (task.streams[stream].index[target.name] for stream in ("original", "tenth"))
    assert len(whole) == len(target.test)
    assert len(tenth) == round(0.1 * len(whole))
    assert set(tenth.tolist()) <= set(whole.tolist())


def test_smaller_test_sets_are_parts_of_larger_ones(data: Path) -> None:
    task = _task("test-size-sweep", "partition.clients=10")
    for client in task.unseen:
        parts = [set(task.streams[f"{10 * k}-percent"].index[client.name].tolist()) for k in range(1, 11)]
        assert [len(part) for part in parts] == [round(k / 10 * len(client.test)) for k in range(1, 11)]
        assert all(a <= b for a, b in pairwise(parts))


def test_new_clients_have_at_most_two_classes(data: Path) -> None:
    for name in ("new-clients", "new-clients-mnist", "new-clients-fashion"):
        task = _task(name)
        for client in (*task.clients, *task.unseen):
            assert 1 <= len(task.labels[torch.cat([client.train, client.val, client.test])].unique()) <= 2


def test_superclass_clients_see_five_fine_classes(data: Path) -> None:
    task = _task("new-clients-cifar100")
    assert len(task.classes) == 100
    for client in (*task.clients, *task.unseen):
        fine = task.labels[torch.cat([client.train, client.val, client.test])].unique()
        assert 1 <= len(fine) <= 5
        assert len({int(label) % 20 for label in fine}) == 1


def test_new_clients_of_the_label_shift_come_from_the_test_set(data: Path) -> None:
    spec = _full("label-shift-sweep").data
    splits = load(spec.source, None, spec.size, 3, cache_folder()).splits
    assert splits is not None
    task = _task("label-shift-sweep")
    assert {int(splits[i]) for c in task.unseen for i in c.test} == {2}
    assert {int(splits[i]) for c in task.clients for i in torch.cat([c.train, c.val])} == {0}


def test_rotations_have_other_angles_for_new_clients(data: Path) -> None:
    task = _task("rotations")
    angles = task.provenance["angles"]
    assert {angles[c.name] for c in task.clients} == {0, 30, 60}
    assert {angles[c.name] for c in task.unseen} == {15, 45}
    assert {len(c.test) for c in task.unseen} == {20}
    assert {(len(c.train), len(c.val)) for c in task.clients} == {(17, 3)}
    upright = _task("rotations", "rotation={}")
    for client, plain in zip((*task.clients, *task.unseen), (*upright.clients, *upright.unseen), strict=True):
        own = torch.cat([client.train, client.val, client.test])
        assert torch.equal(own, torch.cat([plain.train, plain.val, plain.test]))
        assert torch.equal(task.images[own], rotate(upright.images[own], angles[client.name], "bicubic"))


def test_the_public_tenth_belongs_to_nobody(data: Path) -> None:
    task = _task("mixed-models")
    assert task.public is not None
    assert len(task.public) == 40
    owned = torch.cat([torch.cat([c.train, c.val, c.test]) for c in (*task.clients, *task.unseen)])
    assert not torch.isin(owned, task.public).any()


def test_pretrained_weights_are_used_and_asked_for(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = _full("domainnet-covariate")
    task = make_task(experiment, seed=0)
    start = make_setup(experiment, experiment.method[0], task).method.arch.init(0)
    saved = ResNet18(weights=str(data / "resnet18-imagenet.safetensors")).make((3, 32, 32), 10).state_dict()
    assert torch.equal(start["body.conv1.weight"], saved["body.conv1.weight"])
    scratch = _full("domainnet-covariate", "model.weights=")
    assert not torch.equal(
        make_setup(scratch, scratch.method[0], task).method.arch.init(0)["body.conv1.weight"],
        saved["body.conv1.weight"],
    )
    monkeypatch.setenv("FEDSHIFT_DATA", str(data / "nowhere"))
    with pytest.raises(UserError, match="there is no weights file"):
        make_setup(experiment, experiment.method[0], task)


def test_missing_data_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FEDSHIFT_DATA", raising=False)
    with pytest.raises(UserError, match="FEDSHIFT_DATA, which is not set"):
        make_task(Experiment.load("brfl"), seed=0)
    monkeypatch.setenv("FEDSHIFT_DATA", str(tmp_path))
    with pytest.raises(UserError, match="no Parquet file matches"):
        make_task(Experiment.load("brfl"), seed=0)


# ---- the real files, where they are --------------------------------------------------------------------------------------

needs_real = pytest.mark.skipif(REAL is None, reason="needs the real files: set FEDSHIFT_DATA to their folder")
AT_HAND = {  # what the files of ../shared/data hold, as clients and unseen clients
    **{name: POPULATIONS[name] for name in NAMES if name.startswith(("brfl", "digits", "office", "pacs"))},
    **{name: POPULATIONS[name] for name in ("attribute", "new-clients", "new-clients-fashion", "label-shift-sweep")},
    **{name: POPULATIONS[name] for name in ("test-size-sweep", "fedtta-curves", "rotations", "mixed-models")},
    "writers": (120, 120),
}
AT_HAND.pop("brfl-imagenet32")


def _real(monkeypatch: pytest.MonkeyPatch, name: str) -> tuple[Experiment, Task]:
    assert REAL is not None
    monkeypatch.setenv("FEDSHIFT_DATA", REAL)
    plain = Experiment.load(name)
    experiment = Experiment.load(name, ["data.size=32"] if (plain.data.size or 0) > 32 else [])
    return experiment, make_task(experiment, seed=0)


@pytest.mark.grid
@needs_real
@pytest.mark.parametrize("name", AT_HAND)
def test_real_task(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment, task = _real(monkeypatch, name)
    _check(task, experiment, *AT_HAND[name])


@pytest.mark.grid
@needs_real
def test_real_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    _, brfl = _real(monkeypatch, "brfl")
    assert {(len(c.train), len(c.val), len(c.test)) for c in brfl.clients} == {
        (1800, 600, 600)
    }  # 3,000 images, as in the paper
    natural = {name: len(index) for name, index in brfl.streams["natural"].index.items()}
    assert 1900 <= sum(natural.values()) <= 2000  # what the rounding leaves over is dropped
    assert {name: len(index) for name, index in brfl.streams["mixture"].index.items()} == {
        name: 4 * count for name, count in natural.items()
    }
    _, digits = _real(monkeypatch, "digits-covariate")
    assert {len(client.train) for client in digits.clients} == {743}  # synfont too, though it has fewer to draw from
    assert {c.name: len(c.test) for c in digits.clients} == {
        **dict.fromkeys(["mnist", "mnist_m", "svhn"], 2000),
        "usps": 2007,
        "synfont": 1000,
    }
    _, office = _real(monkeypatch, "office-covariate")
    assert {c.name: len(c.test) for c in office.clients} == {"amazon": 192, "caltech10": 225, "dslr": 31, "webcam": 58}


def leaves(paper: dict[str, Any]) -> set[str]:
    """The keys of published numbers, under whatever conditions."""
    return {k for key, value in paper.items() for k in (leaves(value) if isinstance(value, dict) else {key})}


@pytest.mark.parametrize("name", presets())
def test_published_numbers_belong_to_a_column(name: str) -> None:
    """A misspelt stream would never show its number."""
    experiment = Experiment.load(name)
    streams = [stream.name for stream in experiment.stream] + (["mean"] if experiment.evaluate.mean_of else [])
    known = {*streams, *(f"{s}/{who}" for s in streams for who in ("clients", "unseen"))}
    known |= {f"after-local/{s}" for s in streams} if experiment.evaluate.after_local else set()
    for method in experiment.method:
        for adapter in method.adapters:
            assert leaves(adapter.paper) <= known, (method.title, adapter.title)


# ---- the paper's own settings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FEDICON, "digits-heterogeneity"])
def test_one_override_restores_fedicons_rate_everywhere(name: str) -> None:
    """And one temperature for both of its losses."""
    experiment = Experiment.load(name, ["scale=paper"])
    ours = Experiment.load(name)
    assert (experiment.rounds, len(experiment.method)) == (ours.rounds, len(ours.method))
    for method in experiment.method:
        assert {**experiment.train, **method.train}["lr"] == 0.01, method.title
        if method.name == "fedicon":
            assert method.options()["head-lr"] == 0.01
            adapted = [a.options() for a in method.adapters if a.name == "fedicon"]
            assert all(options["lr"] == 0.01 for options in adapted)
            assert {method.options()["temperature"], *(o["temperature"] for o in adapted)} == {0.1}


def test_a_preset_without_other_settings_of_the_paper_says_so() -> None:
    with pytest.raises(UserError, match=r"^brfl has no \[paper\] table"):
        Experiment.load("brfl", ["scale=paper"])


def test_brfl_has_both_halves_of_table_1() -> None:
    """Both halves, each with the paper's numbers of all rows beside it."""
    points = dict(enumerate(point for point, _ in Experiment.load("brfl").variants()))
    assert points == {0: {"partition.alpha": 0.1}, 1: {"partition.alpha": 1.0}}
    published = _published("brfl")
    for point in points.values():
        assert sum(bool(found) for key, found in published.items() if key[0] == str(point)) == 14  # all but Local
    rest = [n for n in BRFL if n not in ("brfl", "brfl-dirichlet")]
    for name in rest:
        sweep = Experiment.load(name).sweep
        own = (PRESETS / f"{name}.toml").read_text()
        assert "partition.alpha" not in sweep or '"partition.alpha" =' in own, name
