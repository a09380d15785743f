"""Streams side by side: the vmapped engine's scores are the sequential one's, whatever the lengths of the streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedshift.core import rng
from fedshift.core.adapter import Adapter
from fedshift.core.arch import Arch
from fedshift.core.registry import ADAPTERS
from fedshift.core.tree import Tree
from fedshift.data.streams import Setting, Stream
from fedshift.data.task import Client, Task
from fedshift.engines.base import Compute, Density, Score
from fedshift.engines.reference import pixels
from fedshift.engines.sequential import Sequential
from fedshift.engines.vmapped import Vmapped
from fedshift.engines.vmapped import streams as lanes
from fedshift.engines.vmapped.streams import LONGEST, Lane, evaluate_lanes, suited
from fedshift.methods.fedavg import FedAvg
from fedshift.systems.fedtta.learned_loss import SLOT, fresh
from tests.conftest import tiny_arch, tiny_train

SHAPE, CLASSES = (3, 8, 8), 4
LENGTHS = (33, 0, 1, 40, 17, 2, 75)
DOUBLE = Compute(dtype=torch.float64)
SETTINGS = {
    "plain": Setting("stored"),
    "arrivals": Setting("stored", chunk=13),
    "one by one": Setting("stored", chunk=1),
}
# name, options, network: every adapter that goes along a stream step by step
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "tent": ("tent", {"lr": 0.05, "batch_size": 16}, "cnn"),
    "tent after": ("tent", {"lr": 0.05, "batch_size": 16, "predict_when": "after", "steps": 2}, "mlp"),
    "tent all": ("tent", {"lr": 0.05, "batch_size": 8, "params": "all", "optimiser": "sgd", "momentum": 0.9}, "plain"),
    "tent whole": ("tent", {"lr": 0.05, "batch_size": 0, "clip": 0.1}, "mlp"),
    "bn": ("bn", {"batch_size": 16}, "cnn"),
    "bn refresh": ("bn", {"batch_size": 16, "mode": "refresh"}, "mlp"),
    "eata": ("eata", {"lr": 0.05, "batch_size": 16, "margin": 0.95, "redundancy": 0.95}, "mlp"),
    "eata none": ("eata", {"lr": 0.05, "batch_size": 16, "margin": 0.0}, "cnn"),
    "ttt": ("ttt", {"lr": 0.05, "copies": 4}, "mlp"),
    "ttt without norm": ("ttt", {"lr": 0.05, "copies": 4}, "plain"),
    "the in batches": ("the", {"batch_size": 16}, "cnn"),
    "the half in batches": ("the", {"batch_size": 32, "weighting": "half", "history": False}, "plain"),
}
ARCHS = {"cnn": tiny_arch("cnn", norm=True), "mlp": tiny_arch("mlp", norm=True), "plain": tiny_arch("mlp")}


def ragged(settings: Mapping[str, Setting], lengths: Sequence[int] = LENGTHS) -> Task:
    """Clients whose streams have these lengths."""
    total = sum(lengths) * len(settings)
    ids = torch.arange(total)
    images = rng.integers(1, ids, 256, SHAPE).to(torch.uint8)
    labels = rng.integers(2, ids, CLASSES)
    parts = iter(ids.split(list(lengths) * len(settings)))
    names = [f"client-{i}" for i in range(len(lengths))]
    streams = {
        part: Stream(part, "original", setting, None, labels, ids, {name: next(parts) for name in names})
        for part, setting in settings.items()
    }
    none = torch.zeros(0, dtype=torch.int64)
    return Task(
        images, labels, ids, tuple("abcd"), tuple(Client(name, none, none, none) for name in names), (), streams
    )


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def serving(arch: Arch, task: Task) -> dict[str, Tree]:
    """Every client with a model, heads, descriptors of its own."""
    trees: dict[str, Tree] = {}
    for i, client in enumerate(task.clients):
        model = {
            n: leaf.double() + 0.2 * normal(*leaf.shape, seed=i).abs() if leaf.is_floating_point() else leaf
            for n, leaf in arch.init(i).items()
        }
        trees[client.name] = {
            "model": model,
            "generic": {n: 3 * normal(*model[n].shape, seed=50 + i) for n in sorted(arch.head)},
            "descriptors": {part: normal(arch.feature_size, seed=60 + i + j) for j, part in enumerate(("global", "local"))},
            "rotation": {
                "rotation.weight": normal(4, arch.feature_size, seed=70 + i), "rotation.bias": normal(4, seed=80 + i),
            },
            "fisher": {n: normal(*model[n].shape, seed=90 + i).abs() for n in arch.parameters if n in arch.norm},
        }  # fmt: skip
    return trees


def on(arch: Arch, name: str, **options: Any) -> Adapter:
    return ADAPTERS[name].make(arch=arch, predict_with=FedAvg(arch=arch, train=tiny_train()).predict, **options)


def check(
    reference: Mapping[tuple[str, str], Score], found: Mapping[tuple[str, str], Score], relative: float | None = None
) -> None:
    assert list(reference) == list(found)
    for key, score in reference.items():
        other = found[key]
        assert (score.samples, score.correct) == (other.samples, other.correct), key
        assert score.loss == pytest.approx(other.loss, rel=relative, abs=1e-6), key
        assert set(score.telemetry) == set(other.telemetry), key
        for name, density in score.telemetry.items():
            assert density.counts == other.telemetry[name].counts, key
            assert density.total == pytest.approx(other.telemetry[name].total, abs=1e-6), key


@pytest.mark.parametrize("case", CASES)
def test_side_by_side_is_one_after_the_other(case: str) -> None:
    name, options, network = CASES[case]
    arch, task = ARCHS[network], ragged(SETTINGS)
    adapter, deployed = on(arch, name, **options), serving(arch, task)
    assert suited(adapter, SETTINGS["plain"])
    parts = ["plain", "arrivals"] if name in ("ttt", "eata", "the") else list(SETTINGS)
    reference = Sequential(DOUBLE).evaluate(adapter, deployed, task, parts, seed=3)
    check(reference, Vmapped(DOUBLE).evaluate(adapter, deployed, task, parts, seed=3))
    assert {score.samples for (_, part), score in reference.items() if part == "plain"} == set(LENGTHS)
    assert reference["client-1", "plain"] == Score(0, 0, 0.0)
    plain = Sequential(DOUBLE).evaluate(on(arch, "none"), deployed, task, ["plain"], seed=3)
    if case != "eata none":  # the adapter did something on the longest stream
        assert abs(plain["client-6", "plain"].loss - reference["client-6", "plain"].loss) > 1e-3


def test_who_looks_at_the_whole_stream_first_goes_alone() -> None:
    assert not suited(on(ARCHS["mlp"], "bn", passes=1), SETTINGS["plain"])


@pytest.mark.parametrize("case", ["tent", "ttt", "eata", "the in batches"])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_as_many_lanes_as_memory_likes(case: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    name, options, network = CASES[case]
    arch, task = ARCHS[network], ragged({"plain": Setting("stored")})
    adapter, deployed = on(arch, name, **options), serving(arch, task)
    reference = Sequential(DOUBLE).evaluate(adapter, deployed, task, ["plain"], seed=3)
    monkeypatch.setattr(lanes, "at_once", lambda *_: width)
    check(reference, Vmapped(DOUBLE).evaluate(adapter, deployed, task, ["plain"], seed=3))


def test_clients_that_cannot_be_stacked_have_lanes_of_their_own() -> None:
    """A memory of another size in the deployed tree (kNN-Per) is no obstacle."""
    arch, task = ARCHS["mlp"], ragged({"plain": Setting("stored")}, (20, 20, 9))
    deployed = {
        name: {**tree, "memory": {"features": torch.zeros(i % 2 + 1, 3)}}
        for i, (name, tree) in enumerate(serving(arch, task).items())
    }
    adapter = on(arch, "tent", lr=0.05, batch_size=8)
    reference = Sequential(DOUBLE).evaluate(adapter, deployed, task, ["plain"], seed=3)
    check(reference, Vmapped(DOUBLE).evaluate(adapter, deployed, task, ["plain"], seed=3))


def test_settings_that_lanes_do_not_know_go_one_after_the_other() -> None:
    settings = {
        "plain": Setting("stored"),
        "anew": Setting("stored", "chunk", 1, 10),
        "twice": Setting("stored", "stream", 2),
    }
    arch, task = ARCHS["mlp"], ragged(settings)
    adapter, deployed = on(arch, "tent", lr=0.05, batch_size=8), serving(arch, task)
    assert [suited(adapter, setting) for setting in settings.values()] == [True, False, False]
    for parts in (list(settings), ["twice", "plain"], ["plain", "twice", "anew"]):
        reference = Sequential(DOUBLE).evaluate(adapter, deployed, task, parts, seed=3)
        check(reference, Vmapped(DOUBLE).evaluate(adapter, deployed, task, parts, seed=3))


@pytest.mark.parametrize("case", ["tent", "ttt", "the in batches"])
def test_a_stream_that_goes_on_from_the_one_before_goes_on_in_every_engine(case: str) -> None:
    """``reset = "never"``: what the stream before left behind counts, though that one went side by side."""
    name, options, network = CASES[case]
    settings = {"first": Setting("stored"), "on": Setting("stored", "never"), "last": Setting("stored")}
    arch, task = ARCHS[network], ragged(settings, (20, 0, 35))
    adapter, deployed = on(arch, name, **options), serving(arch, task)
    reference = Sequential(DOUBLE).evaluate(adapter, deployed, task, list(settings), seed=3)
    alone = Sequential(DOUBLE).evaluate(adapter, deployed, task, ["on"], seed=3)
    assert abs(alone["client-2", "on"].loss - reference["client-2", "on"].loss) > 1e-6  # it does matter
    check(reference, Vmapped(DOUBLE).evaluate(adapter, deployed, task, list(settings), seed=3))


def test_an_adapter_that_fits_first_goes_on_from_the_stream_before_too() -> None:
    settings = {"first": Setting("stored"), "on": Setting("stored", "never")}
    arch, task = ARCHS["plain"], ragged(settings, (20, 0, 35))
    learned = fresh(torch.ones(1).double(), CLASSES)
    deployed = {name: {**tree, SLOT: learned} for name, tree in serving(arch, task).items()}
    adapter = on(arch, "fedtta", lr=0.5)
    reference = Sequential(DOUBLE).evaluate(adapter, deployed, task, list(settings), seed=3)
    check(reference, Vmapped(DOUBLE).evaluate(adapter, deployed, task, list(settings), seed=3))
    state = adapter.init(deployed["client-2"])
    for part in settings:
        samples = task.samples(task.client("client-2"), part)
        x = pixels(samples.images, samples.index, torch.double)
        state = adapter.fit(state, x, {})
    logits = adapter.predict(state, x, {})[0].logits
    expected = float(cross_entropy(logits, samples.labels[samples.index], reduction="sum"))
    assert reference["client-2", "on"].loss == pytest.approx(expected)
    alone = Sequential(DOUBLE).evaluate(adapter, deployed, task, ["on"], seed=3)
    assert abs(alone["client-2", "on"].loss - expected) > 1e-6


@pytest.mark.parametrize("options", [{"batch_size": 8}, {}])
def test_the_plus_variant_in_batches_can_be_served_by_every_engine(options: dict[str, Any]) -> None:
    """One weight for a batch, views for each of its samples."""
    arch, task = ARCHS["mlp"], ragged({"plain": Setting("stored")}, (9, 1, 4))
    adapter = on(arch, "the-plus", views=2, tune_steps=1, tune_lr=0.1, **options)
    deployed = serving(arch, task)
    reference = Sequential(DOUBLE).evaluate(adapter, deployed, task, ["plain"], seed=3)
    check(reference, Vmapped(DOUBLE).evaluate(adapter, deployed, task, ["plain"], seed=3))


@pytest.mark.parametrize("name", ["memo", "lp-ft", "t3a", "tsa", "none", "the", "blend"])
def test_adapters_that_need_no_company_are_the_sequential_engines(name: str) -> None:
    arch, task = ARCHS["mlp"], ragged({"plain": Setting("stored")}, (9, 0, 4))
    options = {"views": 2, "lr": 0.1} if name in ("memo", "lp-ft") else {}
    adapter = on(arch, name, **options)
    deployed = {c: {**tree, "global": tree["model"]} for c, tree in serving(arch, task).items()}
    assert not suited(adapter, Setting("stored"))
    reference = Sequential(DOUBLE).evaluate(adapter, deployed, task, ["plain"], seed=3)
    found = Vmapped(DOUBLE).evaluate(adapter, deployed, task, ["plain"], seed=3)
    assert found == reference


# ---- lanes themselves ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("length", [0, 1, 2, 63, 64, 65, 100, 127, 128, 200])
def test_pieces_are_the_stream_in_its_order(length: int) -> None:
    task = ragged({"plain": Setting("stored"), "arrivals": Setting("stored", chunk=13)}, (length,))
    for part in task.streams:
        rows = task.streams[part].index["client-0"]
        for case in ("ttt", "tent"):
            name, options, network = CASES[case]
            adapter = on(ARCHS[network], name, **options)
            lane = Lane.of(adapter, task, "client-0", part)
            pieces = lane.pieces
            assert torch.equal(torch.cat([*pieces, rows[:0]]), rows)
            assert all(len(piece) for piece in pieces)
            if name == "ttt":  # few sizes: a power of two each
                assert all(len(piece) & (len(piece) - 1) == 0 and len(piece) <= LONGEST for piece in pieces)
            if part == "arrivals":  # what arrives together is never torn apart for company, nor joined
                ends = torch.tensor([len(piece) for piece in pieces]).cumsum(0).tolist()
                assert set(range(13, length + 1, 13)) <= set(ends)


def test_nothing_to_do_is_done() -> None:
    arch, task = ARCHS["mlp"], ragged({"plain": Setting("stored")}, (0, 0))
    adapter, deployed = on(arch, "tent"), serving(arch, task)
    expected = {("client-0", "plain"): Score(0, 0, 0.0), ("client-1", "plain"): Score(0, 0, 0.0)}
    assert Vmapped(DOUBLE).evaluate(adapter, deployed, task, ["plain"], seed=0) == expected
    assert Vmapped(DOUBLE).evaluate(adapter, deployed, task, [], seed=0) == {}
    assert evaluate_lanes(adapter, deployed, [], 0, DOUBLE) == {}


@pytest.mark.parametrize("case", ["tent", "eata", "ttt", "bn refresh"])
def test_lanes_leave_deployed_models_and_images_alone(case: str) -> None:
    name, options, network = CASES[case]
    arch, task = ARCHS[network], ragged({"plain": Setting("stored")}, (20, 1, 9))
    adapter, deployed = on(arch, name, **options), serving(arch, task)
    before = {
        c: {s: {n: leaf.clone() for n, leaf in t.items()} for s, t in tree.items()} for c, tree in deployed.items()
    }
    images = task.images.clone()
    first = Vmapped(DOUBLE).evaluate(adapter, deployed, task, ["plain"], seed=3)
    for client, tree in before.items():
        for slot, leaves in tree.items():
            assert all(torch.equal(deployed[client][slot][entry], leaf) for entry, leaf in leaves.items())
    assert torch.equal(images, task.images)
    assert Vmapped(DOUBLE).evaluate(adapter, deployed, task, ["plain"], seed=3) == first


def test_streams_on_the_same_images_keep_their_own_labels_and_ids() -> None:
    task = ragged({"a": Setting("stored"), "b": Setting("stored")})
    first = task.streams["a"]
    other = replace(first, name="b", labels=(first.labels + 1) % CLASSES, ids=first.ids + 1000)
    task = replace(task, streams={"a": first, "b": other})
    adapter, deployed = on(ARCHS["plain"], "ttt", lr=0.05, copies=4), serving(ARCHS["plain"], task)
    reference = Sequential(DOUBLE).evaluate(adapter, deployed, task, ["a", "b"], seed=0)
    assert reference["client-0", "a"] != reference["client-0", "b"]
    check(reference, Vmapped(DOUBLE).evaluate(adapter, deployed, task, ["a", "b"], seed=0))


def test_what_is_not_finite_is_left_out_of_a_density() -> None:
    values = torch.tensor([0.25, float("nan"), float("inf"), 0.75])
    density = Density.of(values)
    assert (density.total, sum(density.counts)) == (1.0, 2)
