"""Home-or-away, prior-em and views: their limits, chunks of any size, and what they gain and never lose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedshift
from fedshift import Experiment, UserError
from fedshift.adapters.t3a import PrototypeClassifier
from fedshift.blocks import augmix
from fedshift.blocks.calibration import SLOT, Calibration, entry_name
from fedshift.blocks.mean_views import DRAWS, looks, with_views
from fedshift.core.adapter import Adapter
from fedshift.core.registry import ADAPTERS
from fedshift.core.tree import Tree, pick
from fedshift.data.streams import Setting
from fedshift.data.task import Samples
from fedshift.engines.base import Compute
from fedshift.engines.reference import predictions
from fedshift.engines.shipping import dumps, loads
from fedshift.experiment.schema import MethodSpec
from fedshift.runs.deployment import Snapshot
from fedshift.runs.open import open_run
from fedshift.runs.setup import make_setup
from fedshift.store.rows import ScoreRow
from fedshift.systems.fedthe.adapter import HeadEnsemble
from fedshift.systems.fedthe.method import FedTHE
from fedshift.systems.ours.home_or_away import HomeOrAway
from fedshift.systems.ours.prior_em import PriorEM
from tests.conftest import ragged_task, tiny_arch, tiny_train
from tests.trust.worlds import skewed, skewed_pool

METHOD = FedTHE(arch=tiny_arch(), train=tiny_train())
DOUBLE = Compute(dtype=torch.float64)


def samples(count: int = 150) -> Samples:
    random = torch.Generator().manual_seed(5)
    images = torch.randint(0, 256, (count, 3, 8, 8), dtype=torch.uint8, generator=random)
    return Samples(images, torch.zeros(count, dtype=torch.int64), torch.arange(count) * 3, torch.arange(count))


def tree() -> Tree:
    model, other = (METHOD.arch.init(seed) for seed in (0, 1))
    size = METHOD.arch.feature_size
    told = replace(
        Calibration.none(4),
        fit=torch.tensor([4.0, 0.2, -0.1, 0.0, 0.1]),
        labels=torch.tensor([30.0, 20.0, 20.0, 30.0]),
        skill=torch.tensor([0.1, 1.0, 3.0]),
    )
    return {
        "model": {name: leaf.double() for name, leaf in model.items()},
        "generic": {name: leaf.double() for name, leaf in pick(other, METHOD.arch.head).items()},
        "descriptors": {name: torch.rand(size).double() for name in ("global", "local")},
        SLOT: {entry_name("common", "", name): leaf.double() for name, leaf in told.tensors().items()},
    }


def make(cls: type[Adapter], **options: Any) -> Any:
    return cls(arch=METHOD.arch, predict_with=METHOD.predict, **options)


def logits(adapter: Adapter, deployed: Tree, chunk: int, some: Samples | None = None) -> Tensor:
    """Of a stream that arrives in chunks."""
    shown = predictions(adapter, deployed, some or samples(), Setting(chunk=chunk), 0, DOUBLE)
    return torch.cat([output.logits for output, _, _ in shown])


def home(deployed: Tree, adapter: HomeOrAway, labels: list[int]) -> Tree:
    return {**deployed, **adapter.prepare(deployed, [{"y": torch.tensor(labels)}])}


VIEWED: Mapping[str, Any] = {
    "none": make(with_views(ADAPTERS["none"].make), views=3),
    "t3a": make(with_views(PrototypeClassifier), views=2),
    "the": make(with_views(HeadEnsemble), views=2, flip=False),
    "home-or-away": make(with_views(HomeOrAway), views=2),
    "prior-em": make(with_views(PriorEM), views=2),
}
PLAIN: Mapping[str, Any] = {
    "home-or-away": make(HomeOrAway),
    "prior-em": make(PriorEM, guard=False),
    "prior-em online": make(PriorEM, guard=False, mode="online", memory=40),
}


@pytest.mark.parametrize("name", [*PLAIN, *(f"{name} + views" for name in VIEWED)])
def test_chunks_of_any_size_agree(name: str) -> None:
    adapter = PLAIN[name] if name in PLAIN else VIEWED[name.removesuffix(" + views")]
    deployed = tree()
    if isinstance(adapter, HomeOrAway):
        deployed = home(deployed, adapter, [0, 0, 1])
    whole = logits(adapter, deployed, 0)
    for size in (1, 7, 64):
        assert torch.allclose(logits(adapter, deployed, size), whole, atol=1e-9)


def test_without_views_it_is_the_mean_of_one() -> None:
    x, state = torch.rand(5, 3, 8, 8).double(), tree()
    numbers = torch.rand(5, 3, augmix.NUMBERS)
    output, _ = VIEWED["none"].predict(state, x, {DRAWS: numbers})
    views = augmix.views(x, numbers)
    every = torch.stack([METHOD.predict(state, x).logits, *(METHOD.predict(state, v).logits for v in views.unbind(1))])
    assert torch.allclose(output.logits.exp(), every.softmax(2).mean(0))


def test_both_heads_are_means_over_views() -> None:
    x, state = torch.rand(5, 3, 8, 8).double(), tree()
    numbers = torch.rand(5, 2, augmix.NUMBERS)
    adapter = make(with_views(HeadEnsemble), views=2, e=1.0)
    output, _ = adapter.predict(adapter.init(state), x, {DRAWS: numbers})
    shown = [x, *augmix.views(x, numbers).unbind(1)]
    heads = [METHOD.arch.classify(state["generic"], METHOD.predict(state, v).features).softmax(1) for v in shown]
    assert torch.allclose(output.logits.softmax(1), torch.stack(heads).mean(0))


def test_an_adapter_of_batches_has_no_views() -> None:
    spec = MethodSpec(name="fedavg", adapters=[{"name": "tent", "params": "all", "views": 4}])
    with pytest.raises(UserError, match="adapter 'tent' has no option 'views'"):
        make_setup(Experiment(), spec, ragged_task())
    own = MethodSpec(name="fedavg", adapters=[{"name": "memo", "views": 4}])
    make_setup(Experiment(), own, ragged_task())  # its views are its own


def test_an_adapter_with_views_travels() -> None:
    again = loads(dumps(VIEWED["t3a"]))
    assert (again.views, again.keep, looks(again)) == (2, 50, "2 views")
    assert torch.allclose(logits(again, tree(), 0), logits(VIEWED["t3a"], tree(), 0))


def test_certain_of_away_it_is_the_global_head_and_certain_of_home_the_personal_one() -> None:
    state = tree()
    state = {slot: leaves for slot, leaves in state.items() if slot != SLOT}  # probabilities as they are
    x = torch.rand(6, 3, 8, 8).double()
    output = METHOD.predict(state, x)
    away = make(HomeOrAway, start=0.0, rate=0.0, least=0.0)
    generic = METHOD.arch.classify(state["generic"], output.features)
    found, _ = away.predict(away.init(home(state, away, [0, 1])), x, {})
    assert torch.allclose(found.logits, generic.log_softmax(1))
    at_home = make(HomeOrAway, start=1.0, rate=0.0, least=0.0, own=1.0)
    found, _ = at_home.predict(at_home.init(home(state, at_home, [0, 1])), x, {})
    assert torch.allclose(found.logits, output.logits.log_softmax(1))


def test_a_client_without_labels_is_away() -> None:
    state, adapter = tree(), make(HomeOrAway)
    found, after = adapter.predict(adapter.init(state), torch.rand(6, 3, 8, 8).double(), {})
    assert found.aux["home"].tolist() == [0] * 6
    assert float(after["home"]["weight"]) == 0


def test_the_weight_follows_samples_of_the_clients_own_class() -> None:
    """The global head is made to answer with one class; a client of that class is at home."""
    state, adapter = tree(), make(HomeOrAway)
    sure = {name: leaf * 0 for name, leaf in state["generic"].items()}
    bias = next(name for name in sure if name.endswith("bias"))
    sure[bias] = torch.tensor([9.0, 0, 0, 0]).double()
    for labels, expected in (([0] * 50, 1), ([1] * 50, 0)):
        _, after = adapter.predict(adapter.init(home({**state, "generic": sure}, adapter, labels)), *_images(100))
        assert abs(float(after["home"]["weight"]) - expected) < 0.1


def _images(count: int) -> tuple[Tensor, dict[str, Tensor]]:
    return torch.rand(count, 3, 8, 8).double(), {}


def test_online_looks_back_only() -> None:
    adapter, deployed = PLAIN["prior-em online"], tree()
    some = samples()
    early = logits(adapter, deployed, 0, replace(some, index=some.index[:90]))
    assert torch.allclose(logits(adapter, deployed, 0)[:90], early)
    transductive = logits(PLAIN["prior-em"], deployed, 0, replace(some, index=some.index[:90]))
    assert not torch.allclose(transductive, early)


def test_the_first_block_online_is_answered_as_it_is() -> None:
    x = samples().images[:16].double() / 255
    plain = (4 * METHOD.predict(tree(), x).logits).log_softmax(1)
    assert torch.allclose(logits(PLAIN["prior-em online"], tree(), 0)[:16], plain)


def test_a_stream_without_images_fits() -> None:
    adapter = PLAIN["prior-em"]
    state = adapter.fit(adapter.init(tree()), torch.zeros(0, 3, 8, 8).double(), {})
    assert float(state["classes"]["strength"]) == 0


# ---- in a run -------------------------------------------------------------------------------------------------------------
TRAIN = {"lr": 0.05, "batch-size": 20, "weights": "uniform", "weight-decay": 5e-4}
DIGITS = {"source": "embedded:digits", "size": 16, "limit": 3000}


WHOLE_TENT = {
    "name": "tent", "label": "tent", "params": "all", "batch-size": 0, "optimiser": "sgd", "lr": 0.05,
    "predict-when": "after",
}  # fmt: skip
Scores = Mapping[str, list[ScoreRow]]


def scores(out: Path, **changes: Any) -> Scores:
    """Of one method after its last round."""
    settings = {
        "name": "ours", "baselines": False, "data": DIGITS, "model": {"name": "cnn", "norm": True}, "train": TRAIN,
        "evaluate": {"every": 0},
    }  # fmt: skip
    fedshift.run(Experiment.parse({**settings, **changes}), out, engine="sequential")
    return open_run(run_folder(out)).folder.scores()


def run_folder(out: Path) -> Path:
    return next(out.rglob("done")).parent


def means(scores: Scores, adapter: str, measure: str) -> dict[tuple[str, str], float]:
    """By population and stream."""
    rows = [row for row in scores[adapter] if row.selection == "last"]
    found = {(row.metric.population, row.metric.stream): row.summary_of(measure).client_mean for row in rows}
    return {key: value for key, value in found.items() if value is not None}


@pytest.fixture(scope="module")
def two_digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Scores, Path]:
    """Clients of two digits each; half of them come later, without labels."""
    out = tmp_path_factory.mktemp("two-digits")

    found = scores(
        out,
        rounds=20,
        partition={"kind": "pathological", "clients": 30},
        split={"train": 0.8, "val": 0.2, "test": 0.0, "unseen": 0.5},
        method=[{"name": "fedavg", "adapters": [
            "none", "prior-em", {"name": "prior-em", "label": "online", "mode": "online"}, WHOLE_TENT,
        ]}],
    )  # fmt: skip
    return found, out


def test_unseen_clients_of_two_digits_gain_far_more_than_by_tent(two_digits: tuple[Scores, Path]) -> None:
    rows = [means(two_digits[0], name, "accuracy") for name in ("none", "prior-em", "online", "tent")]
    none, ours, online, tent = (row["unseen", "original"] for row in rows)
    assert ours > none + 15
    assert ours > tent + 10
    assert none < online <= ours + 2


def test_what_was_measured_travels(two_digits: tuple[Scores, Path]) -> None:
    """Into the artefact, to a client that joins, and into the count of bytes."""
    found, out = two_digits
    assert found["prior-em"][0].given_bytes == 15 * 8 * (8 * 11 * 12 + 100 + 3)
    folder = next(path.parent for path in out.rglob("artefacts/*/config.toml"))
    skill = fedshift.load(folder).deployed[SLOT][entry_name("common", "", "skill")]
    assert float(skill[2]) == 15
    assert torch.equal(Snapshot.load(run_folder(out)).server[SLOT]["common: skill"], skill)


STREAMS = [{"name": "original", "kind": "original"}, {"name": "corrupted", "kind": "corrupted", "severity": 5}]
FLOWERS = [f"flower-{k}" for k in range(4)]
WORLDS: dict[str, dict[str, Any]] = {
    # nobody's classes have shifted; images have
    "alike": {
        "rounds": 10, "partition": {"kind": "by-domain"}, "stream": STREAMS,
        "split": {"train": 0.6, "val": 0.2, "test": 0.2, "train-limit": 80, "unseen": ["flower"]},
    },
    # few classes a client, and images that differ too, under a model that has learnt next to nothing
    "weak": {
        "rounds": 4, "stream": STREAMS,
        "partition": {"kind": "by-domain", "clients-per-domain": 4, "inside": "dirichlet", "alpha": 0.3},
        "split": {"train": 0.6, "val": 0.2, "test": 0.2, "train-limit": 40, "unseen": FLOWERS},
    },
}  # fmt: skip


@pytest.mark.grid
@pytest.mark.parametrize("world", WORLDS)
def test_it_does_no_harm(world: str, tmp_path: Path) -> None:
    """Balanced accuracy is at most half a point below that of doing nothing, where estimates alone would cost many."""
    adapters = ["none", "prior-em", {"name": "prior-em", "label": "unguarded", "guard": False}]
    found = scores(tmp_path, **WORLDS[world], method=[{"name": "fedavg", "adapters": adapters}])
    plain, ours, unguarded = (means(found, name, "balanced-accuracy") for name in ("none", "prior-em", "unguarded"))
    assert set(plain) == {(who, stream) for who in ("clients", "unseen") for stream in ("original", "corrupted")}
    for column, value in plain.items():
        assert ours[column] >= value - 0.5, column
    assert min(unguarded[column] - value for column, value in plain.items()) < -2


def test_it_does_not_collapse_where_tent_and_fedtta_do(tmp_path: Path) -> None:
    """70 % of the images are of one class, and the model is weak."""
    harmful = {
        "fedavg": {**WHOLE_TENT, "label": "harmful", "lr": 0.5},
        "fedtta": {"name": "fedtta", "label": "harmful"},
    }
    methods = [{"name": name, "adapters": ["none", "prior-em", other]} for name, other in harmful.items()]
    fedshift.run(skewed(method=methods), tmp_path, engine="sequential", data=skewed_pool(clear=25.0))
    folders = [path.parent for path in tmp_path.rglob("done")]
    assert len(folders) == 2
    for folder in folders:
        found = open_run(folder).folder.scores()
        plain, ours, other = (
            means(found, name, "balanced-accuracy")["clients", "original"] for name in ("none", "prior-em", "harmful")
        )
        assert other < plain - 5
        assert ours >= plain - 0.5


def test_ours_is_home_or_away_with_labels_and_prior_em_without() -> None:
    ours = make(ADAPTERS["ours"].make)
    deployed = tree()
    assert torch.equal(logits(ours, deployed, 0), logits(make(PriorEM), deployed, 0))
    at_home = home(deployed, ours, [0, 0, 1])
    assert torch.equal(logits(ours, at_home, 0), logits(make(HomeOrAway), at_home, 0))


def test_ours_looks_at_views_once() -> None:
    deployed = tree()
    ours, finder = (make(with_views(cls), views=2) for cls in (ADAPTERS["ours"].make, PriorEM))
    assert torch.allclose(logits(ours, deployed, 0), logits(finder, deployed, 0))
