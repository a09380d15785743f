"""Adapters against plain torch: what they predict, what they move, and what they never touch."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedshift.adapters.tent import Tent
from fedshift.core.adapter import Adapter
from fedshift.core.arch import Arch
from fedshift.core.compatibility import missing_for_method, missing_for_pair
from fedshift.core.context import Context
from fedshift.core.registry import ADAPTERS, METHODS, with_options
from fedshift.core.tree import Tree
from fedshift.data.partition import ByDomain
from fedshift.data.pool import Pool
from fedshift.data.streams import Corrupted, Original
from fedshift.data.task import Client, Task, build
from fedshift.engines import reference as work
from fedshift.engines.base import Compute
from fedshift.engines.sequential import Sequential
from fedshift.experiment.schema import AdapterSpec, Experiment, MethodSpec
from fedshift.methods.fedavg import FedAvg
from fedshift.models.cnn import CNN
from fedshift.models.mlp import MLP
from fedshift.runs.session import Session
from fedshift.runs.setup import Setup, make_setup, make_task
from tests.conftest import refusal, tiny_arch, tiny_train

DOUBLE = Compute(dtype=torch.float64)
SHAPE, CLASSES, STREAM = (3, 8, 8), 4, 45
MODELS = {"mlp": MLP(hidden=(6,), norm=True), "cnn": CNN(width=2, hidden=6, norm=True), "plain": MLP(hidden=(6,))}


def long_task(tests: Sequence[int] = (STREAM, STREAM)) -> Task:
    """Two clients with streams long enough for several batches."""
    generator = torch.Generator().manual_seed(1)
    train, val = 20, 3
    total = len(tests) * (train + val) + sum(tests)
    images = torch.randint(0, 256, (total, *SHAPE), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, CLASSES, (total,), generator=generator)
    parts = torch.arange(total).split([size for test in tests for size in (train, val, test)])
    clients = tuple(Client(f"client-{i}", *parts[3 * i : 3 * i + 3]) for i in range(len(tests)))
    return Task(images, labels, torch.arange(total), tuple("abcd"), clients, public=torch.arange(6), hash="long")


TASK = long_task()


def trained(model: str, seed: int = 3) -> tuple[Arch, nn.Module, Tree]:
    """A network whose BatchNorm has a past, once as a module and once as a deployed tree."""
    torch.manual_seed(seed)
    module = MODELS[model].make(SHAPE, CLASSES).double()
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.running_mean.normal_(0, 0.3)
            layer.running_var.uniform_(0.5, 2)
            layer.num_batches_tracked.fill_(11)
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias, 0, 0.3)
    arch = Arch.of(lambda: MODELS[model].make(SHAPE, CLASSES), SHAPE, model)
    return arch, module, {"model": {name: leaf.detach().clone() for name, leaf in module.state_dict().items()}}


def adapter_on(arch: Arch, name: str, **options: object) -> Adapter:
    method = FedAvg(arch=arch, train=tiny_train())
    kebab = {key.replace("_", "-"): value for key, value in options.items()}
    made: Adapter = with_options(ADAPTERS[name].make, name, kebab, arch=arch, predict_with=method.predict)
    return made


def images_of(client: Client, task: Task = TASK) -> Tensor:
    return task.images[client.test].double() / 255


def normalised(x: Tensor) -> Tensor:
    return (x - 0.5) / 0.5


class Record:
    """What an adapter answered, and where it stood after each chunk."""

    def __init__(self) -> None:
        self.chunks: list[Tensor] = []
        self.states: list[Tree] = []

    @property
    def logits(self) -> Tensor:
        return torch.cat(self.chunks)


def recording(adapter: Adapter) -> tuple[Adapter, Record]:
    """The same adapter, observed."""
    record = Record()

    class Observed(type(adapter)):  # type: ignore[misc]
        def predict(self, *arguments: Any) -> Any:
            output, state = super().predict(*arguments)
            record.chunks.append(output.logits.detach())
            record.states.append(state)
            return output, state

    observed = copy.copy(adapter)
    object.__setattr__(observed, "__class__", Observed)
    return observed, record


def stream(adapter: Adapter, deployed: Tree, parts: Sequence[str] = ("test",), task: Task = TASK) -> Record:
    """Run along the first client's streams as a benchmark does."""
    observed, record = recording(adapter)
    Sequential(DOUBLE).evaluate(observed, {task.clients[0].name: deployed}, task, parts, seed=0)
    return record


def gap(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).detach().abs().max())


# ---- none ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model", MODELS)
def test_none_is_the_plain_forward_pass(model: str) -> None:
    arch, module, deployed = trained(model)
    x = images_of(TASK.clients[0])
    found = stream(adapter_on(arch, "none"), deployed)
    assert torch.equal(found.logits, arch(deployed["model"], x).logits)
    with torch.no_grad():
        assert gap(found.logits, module.eval()(normalised(x))) < 1e-12
    assert found.states[-1] is deployed


def test_scores_count_what_was_predicted() -> None:
    arch, module, deployed = trained("mlp")
    adapter = adapter_on(arch, "none")
    scores = Sequential(DOUBLE).evaluate(adapter, {"client-1": deployed}, TASK, ["test", "val"], seed=0)
    assert list(scores) == [("client-1", "test"), ("client-1", "val")]
    for part, index in (("test", TASK.clients[1].test), ("val", TASK.clients[1].val)):
        with torch.no_grad():
            log_p = module.eval()(normalised(TASK.images[index].double() / 255)).log_softmax(1)
        labels = TASK.labels[index]
        score = scores["client-1", part]
        assert score.samples == len(index)
        assert score.correct == int((log_p.argmax(1) == labels).sum())
        assert score.loss == pytest.approx(-float(log_p[torch.arange(len(index)), labels].sum()), abs=1e-9)


# ---- what every adapter promises ----------------------------------------------------------------------------------------
@cache
def federated(method_name: str, tests: tuple[int, ...] = (STREAM, STREAM)) -> tuple[Session, dict[str, Tree]]:
    """A method after one round, and what its clients serve with."""
    cls = METHODS[method_name].make
    method = cls(arch=cls.build(tiny_arch("mlp", norm=True), {}), train=tiny_train())
    setup = Setup(MethodSpec(name=method_name), {"net": method}, method.train)
    federation = Session(setup, long_task(tests), Sequential(DOUBLE), DOUBLE, seed=2, rounds=1)
    state, _ = federation.step(federation.start())
    return federation, federation.deploy(state).trained()


def partner(adapter_name: str) -> str:
    """A method that provides what the adapter requires."""
    for method_name, entry in METHODS.items():
        cls = entry.make
        arch = cls.build(tiny_arch("mlp", norm=True), {})
        if missing_for_method(method_name, cls.requires, arch):
            continue
        method = cls(arch=arch, train=tiny_train())
        adapter = ADAPTERS[adapter_name].make(arch=method.arch, predict_with=method.predict)
        if missing_for_pair(method_name, method.provides, adapter_name, adapter) is None:
            return method_name
    raise AssertionError(f"no method provides what adapter {adapter_name} requires")


def run_on(federation: Session, deployed: dict[str, Tree], name: str) -> Record:
    observed, record = recording(federation.setup.adapter(AdapterSpec(name=name), federation.setup.method))
    federation.evaluate({"net": observed}, deployed, ["test"])
    return record


@pytest.mark.parametrize("name", ADAPTERS)
def test_the_deployed_weights_are_never_touched(name: str) -> None:
    federation, deployed = federated(partner(name))
    before = copy.deepcopy(deployed)
    images = federation.task.images.clone()
    found = run_on(federation, deployed, name)
    assert len(found.logits) == 2 * STREAM
    assert torch.equal(images, federation.task.images)
    assert list(deployed) == list(before)
    for client, tree in before.items():
        assert {slot: list(leaves) for slot, leaves in deployed[client].items()} == {
            slot: list(leaves) for slot, leaves in tree.items()
        }
        for slot, leaves in tree.items():
            for entry, leaf in leaves.items():
                assert torch.equal(deployed[client][slot][entry], leaf), f"{slot}/{entry}"
    again = run_on(federation, deployed, name)  # and nothing else remembers the first time either
    assert torch.equal(again.logits, found.logits)


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_single_sample_is_servable(name: str) -> None:
    federation, deployed = federated(partner(name), (1, 2))
    found = run_on(federation, deployed, name)
    assert [chunk.shape for chunk in found.chunks[:1]] == [(1, CLASSES)]
    assert found.logits.shape == (3, CLASSES)
    assert bool(found.logits.isfinite().all())


@pytest.mark.parametrize("name", ADAPTERS)
def test_chunk_size_never_changes_a_per_sample_adapters_answers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    federation, deployed = federated(partner(name))
    if federation.setup.adapter(AdapterSpec(name=name), federation.setup.method).batch is not None:
        assert run_on(federation, deployed, name).chunks[0].shape[0] > 1  # it really needs samples together
        return
    answers = {}
    for size in (1, 7, 32, 10_000):
        monkeypatch.setattr(work, "EVALUATION_CHUNK", size)
        answers[size] = run_on(federation, deployed, name)
        assert max(len(chunk) for chunk in answers[size].chunks) == min(size, STREAM)
    for found in answers.values():
        assert gap(found.logits, answers[1].logits) < 1e-10
        assert torch.equal(found.logits.argmax(1), answers[1].logits.argmax(1))


@pytest.mark.parametrize(("count", "batch", "sizes"), [
    (45, 16, [16, 16, 13]), (33, 16, [16, 17]), (17, 16, [17]), (16, 16, [16]), (1, 16, [1]), (0, 16, []),
    (45, 1 << 62, [45]), (3, 1, [1, 1, 1]),
])  # fmt: skip
def test_how_a_stream_is_cut_for_adapters_that_need_batches(count: int, batch: int, sizes: list[int]) -> None:
    index = torch.arange(100, 100 + count)
    parts = work.chunks(index, batch)
    assert [len(part) for part in parts] == sizes
    assert torch.equal(torch.cat([*parts, torch.zeros(0, dtype=torch.int64)]), index)


def test_a_client_without_test_data_has_an_empty_score() -> None:
    arch, _, deployed = trained("mlp")
    task = long_task((0, 5))
    for name in ADAPTERS:
        if ADAPTERS[name].make.requires <= set(deployed):
            scores = Sequential(DOUBLE).evaluate(adapter_on(arch, name), {"client-0": deployed}, task, ["test"], seed=0)
            assert (scores["client-0", "test"].samples, scores["client-0", "test"].correct) == (0, 0)


# ---- bn -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_bn_with_batch_statistics_is_a_module_in_train_mode(model: str) -> None:
    arch, module, deployed = trained(model)
    found = stream(adapter_on(arch, "bn", batch_size=16), deployed)
    batches = images_of(TASK.clients[0]).split(16)
    assert [len(chunk) for chunk in found.chunks] == [16, 16, 13]
    for x, logits in zip(batches, found.chunks, strict=True):
        with torch.no_grad():
            assert gap(logits, module.train()(normalised(x))) < 1e-12
    with torch.no_grad():
        plain = module.eval()(normalised(images_of(TASK.clients[0])))
    assert gap(found.logits, plain) > 1e-2  # the running statistics would have said something else
    for name, leaf in found.states[-1]["model"].items():
        assert torch.equal(leaf, deployed["model"][name])


@pytest.mark.parametrize("passes", [0, 2])
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_bn_refresh_moves_running_statistics_as_torch_does(model: str, passes: int) -> None:
    arch, module, deployed = trained(model)
    found = stream(adapter_on(arch, "bn", batch_size=16, mode="refresh", passes=passes), deployed)
    batches = images_of(TASK.clients[0]).split(16)
    with torch.no_grad():
        for _ in range(passes):
            for x in batches:
                module.train()(normalised(x))
        for x, logits, state in zip(batches, found.chunks, found.states, strict=True):
            module.train()(normalised(x))
            assert gap(logits, module.eval()(normalised(x))) < 1e-12
            for name, leaf in module.state_dict().items():
                assert leaf.dtype == state["model"][name].dtype
                assert gap(leaf.double(), state["model"][name].double()) < 1e-12, name
    moved = {name for name, leaf in deployed["model"].items() if not torch.equal(leaf, found.states[-1]["model"][name])}
    assert moved == {name for name in arch.norm if name in arch.buffers}


@pytest.mark.parametrize("options", [{"mode": "batch"}, {"mode": "refresh"}, {"mode": "refresh", "passes": 1}])
def test_bn_predicts_a_lone_sample_with_the_running_statistics(options: dict[str, object]) -> None:
    arch, module, deployed = trained("mlp")
    task = long_task((1, 1))
    found = stream(adapter_on(arch, "bn", **options), deployed, task=task)
    with torch.no_grad():
        assert gap(found.logits, module.eval()(normalised(images_of(task.clients[0], task)))) < 1e-12


# ---- tent ---------------------------------------------------------------------------------------------------------------
def tent_reference(
    module: nn.Module,
    batches: Sequence[Tensor],
    make: Any,
    params: str,
    when: str = "before",
    steps: int = 1,
    scale: float = 1.0,
    clip: float | None = None,
) -> Iterator[Tensor]:
    """Tent as its paper says it, with modules and ``torch.optim``."""
    norms = [layer for layer in module.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    if params == "bn-affine":
        module.train().requires_grad_(False)
        moving = [leaf.requires_grad_() for layer in norms for leaf in (layer.weight, layer.bias)]
        for layer in norms:
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = None
    else:
        moving = list(module.eval().parameters())
    optimiser = make(moving)
    for x in batches:
        for _ in range(steps):
            logits = module(normalised(x))
            p = logits.softmax(1)
            loss = scale * -(p * p.log()).sum(1).mean()
            optimiser.zero_grad()
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(moving, clip)
            optimiser.step()
        if when == "after":
            logits = module(normalised(x))
        yield logits.detach()


OPTIMISERS = {
    "adam": ({"optimiser": "adam", "lr": 0.01}, lambda p: torch.optim.Adam(p, lr=0.01)),
    "sgd": ({"optimiser": "sgd", "lr": 0.1}, lambda p: torch.optim.SGD(p, lr=0.1)),
    "sgd with everything": (
        {"optimiser": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    ),
    "adam with decay": (
        {"optimiser": "adam", "lr": 0.02, "weight_decay": 0.1},
        lambda p: torch.optim.Adam(p, lr=0.02, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("params", ["bn-affine", "all"])
@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_tent_equals_the_reference(model: str, optimiser: str, params: str, when: str, steps: int) -> None:
    arch, module, deployed = trained(model)
    options, make = OPTIMISERS[optimiser]
    adapter = adapter_on(arch, "tent", batch_size=16, params=params, predict_when=when, steps=steps, **options)
    found = stream(adapter, deployed)
    batches = images_of(TASK.clients[0]).split(16)
    expected = torch.cat(list(tent_reference(module, batches, make, params, when, steps)))
    assert gap(found.logits, expected) < 1e-6
    after = dict(module.named_parameters())
    for name in arch.parameters:  # the weights at the end of the stream agree too
        assert gap(found.states[-1]["model"][name], after[name].detach()) < 1e-6, name


def test_tent_of_fedtta_with_bits_and_clipping_on_the_whole_stream() -> None:
    arch, module, deployed = trained("plain")
    options = {"params": "all", "predict_when": "after", "bits": True, "clip": 0.05, "batch_size": 0}
    found = stream(adapter_on(arch, "tent", optimiser="sgd", lr=0.5, weight_decay=1e-4, **options), deployed)
    whole = [images_of(TASK.clients[0])]
    assert [len(chunk) for chunk in found.chunks] == [STREAM]

    def make(p: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(p, lr=0.5, weight_decay=1e-4)

    bits = 1 / float(torch.tensor(2.0, dtype=torch.float64).log())
    (expected,) = tent_reference(copy.deepcopy(module), whole, make, "all", "after", 1, bits, 0.05)
    assert gap(found.logits, expected) < 1e-6
    (unclipped,) = tent_reference(copy.deepcopy(module), whole, make, "all", "after", 1, bits)
    assert gap(found.logits, unclipped) > 1e-4  # clipping was at work
    free = stream(
        adapter_on(arch, "tent", optimiser="sgd", lr=0.5, weight_decay=1e-4, **{**options, "clip": None}), deployed
    )
    assert gap(free.logits, unclipped) < 1e-6


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_tent_moves_the_affine_part_of_batch_norm_and_nothing_else(model: str) -> None:
    arch, module, deployed = trained(model)
    last = stream(adapter_on(arch, "tent", batch_size=16, lr=0.01), deployed).states[-1]["model"]
    moved = {name for name, leaf in deployed["model"].items() if not torch.equal(leaf, last[name])}
    layers = {n for n, layer in module.named_modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)}
    assert layers
    assert moved == {f"{layer}.{entry}" for layer in layers for entry in ("weight", "bias")}
    everything = stream(adapter_on(arch, "tent", batch_size=16, lr=0.01, params="all"), deployed).states[-1]["model"]
    moved = {name for name, leaf in deployed["model"].items() if not torch.equal(leaf, everything[name])}
    assert moved == set(arch.parameters)


def test_tent_that_takes_no_step_is_bn() -> None:
    arch, _, deployed = trained("cnn")
    frozen = stream(adapter_on(arch, "tent", batch_size=16, lr=0.0), deployed)
    assert torch.equal(frozen.logits, stream(adapter_on(arch, "bn", batch_size=16), deployed).logits)
    first = stream(
        adapter_on(arch, "tent", batch_size=0, lr=0.3), deployed
    )  # its only answer is given before its only step
    assert torch.equal(first.logits, stream(adapter_on(arch, "bn", batch_size=STREAM), deployed).logits)
    still = stream(adapter_on(arch, "tent", batch_size=16, lr=0.0, params="all"), deployed)
    assert gap(still.logits, stream(adapter_on(arch, "none"), deployed).logits) < 1e-12


@pytest.mark.parametrize("params", ["bn-affine", "all"])
def test_tents_entropy_falls(params: str) -> None:
    arch, _, deployed = trained("mlp")
    x = images_of(TASK.clients[0])
    entropies = []
    for steps in range(1, 9):
        adapter = adapter_on(
            arch, "tent", batch_size=0, lr=0.05, optimiser="sgd", params=params, predict_when="after", steps=steps
        )
        p = adapter.predict(adapter.init(deployed), x, {})[0].logits.softmax(1)
        entropies.append(float(-(p * p.log()).sum(1).mean()))
    assert all(b < a for a, b in itertools.pairwise(entropies)), entropies


def test_tents_state_is_carried_along_the_stream() -> None:
    arch, _, deployed = trained("mlp")
    adapter = adapter_on(arch, "tent", batch_size=15, lr=0.05)
    along = stream(adapter, deployed)
    x = images_of(TASK.clients[0]).split(15)
    alone = adapter.predict(adapter.init(deployed), x[1], {})[0].logits
    assert gap(along.chunks[1], alone) > 1e-3
    state = adapter.init(deployed)
    for part, logits in zip(x, along.chunks, strict=True):
        output, state = adapter.predict(state, part, {})
        assert torch.equal(output.logits, logits)


def test_state_is_reset_between_streams_and_between_clients() -> None:
    arch, _, deployed = trained("mlp")
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (200, *SHAPE), dtype=torch.uint8, generator=generator)
    pool = Pool(images, torch.arange(200) % 4, tuple("abcd"), domains=torch.arange(200) // 100, domain_names=("x", "y"))
    task = build(pool, ByDomain(), streams={"first": Original(), "second": Corrupted()})
    moving = {"tent": "body.2.weight", "bn": "body.2.running_mean"}
    for options in ({"name": "tent", "lr": 0.05}, {"name": "bn", "mode": "refresh"}):
        adapter = adapter_on(arch, batch_size=8, **options)  # type: ignore[arg-type]
        observed, both = recording(adapter)
        Sequential(DOUBLE).evaluate(observed, {"x": deployed, "y": deployed}, task, ["first", "second"], seed=0)
        parts = []
        for client in ("x", "y"):
            for part in ("first", "second"):
                observed, alone = recording(adapter)
                Sequential(DOUBLE).evaluate(observed, {client: deployed}, task, [part], seed=0)
                name = moving[str(options["name"])]  # there was something to reset
                assert gap(alone.states[-1]["model"][name], deployed["model"][name]) > 1e-3
                parts.append(alone.logits)
        assert torch.equal(both.logits, torch.cat(parts))


def test_streams_may_carry_state_on_or_drop_it_after_every_chunk() -> None:
    """What a stream's own setting asks for: once more over all, on from the stream before, anew for what arrives."""
    arch, _, deployed = trained("mlp")
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (100, *SHAPE), dtype=torch.uint8, generator=generator)
    pool = Pool(
        images, torch.arange(100) % 4, tuple("abcd"), domains=torch.zeros(100, dtype=torch.int64), domain_names=("x",)
    )
    streams = {
        "first": Original(),
        "on": Corrupted(reset="never"),
        "anew": Original(reset="chunk", chunk=5),
        "twice": Original(passes=2),
    }
    task = build(pool, ByDomain(), streams=streams)
    adapter = adapter_on(arch, "tent", batch_size=10, lr=0.05)

    def shown(part: str) -> Tensor:
        rows = task.samples(task.clients[0], part)
        return rows.images[rows.index].double() / 255

    def along(state: Tree, x: Tensor) -> tuple[Tensor, Tree]:
        answers = []
        for chunk in x.split(10):
            output, state = adapter.predict(state, chunk, {})
            answers.append(output.logits.detach())
        return torch.cat(answers), state

    fresh = adapter.init(deployed)
    first, state = along(fresh, shown("first"))
    carried, _ = along(state, shown("on"))
    found = stream(adapter, deployed, ("first", "on"), task)
    assert torch.equal(found.logits, torch.cat([first, carried]))
    alone = stream(adapter, deployed, ("on",), task)  # there is nothing before it to carry on
    assert torch.equal(alone.logits, along(fresh, shown("on"))[0])
    lone = stream(adapter, deployed, ("anew",), task)
    assert [len(chunk) for chunk in lone.chunks] == [5] * 4
    expected = [adapter.predict(fresh, chunk, {})[0].logits.detach() for chunk in shown("anew").split(5)]
    assert torch.equal(lone.logits, torch.cat(expected))
    once, state = along(fresh, shown("twice"))
    again, _ = along(state, shown("twice"))
    observed, both = recording(adapter)
    score = Sequential(DOUBLE).evaluate(observed, {"x": deployed}, task, ["twice"], seed=0)["x", "twice"]
    assert torch.equal(both.logits, torch.cat([once, again]))
    rows = task.samples(task.clients[0], "twice")
    labels = rows.labels[rows.index]
    assert (score.samples, score.correct) == (
        len(labels),
        int((again.argmax(1) == labels).sum()),
    )  # the last pass counts
    assert score.loss == pytest.approx(float(nn.functional.cross_entropy(again, labels, reduction="sum")))


# ---- settings -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "options", "sentence"), [
    ("bn", {"batch_size": 0}, "adapter 'bn': batch-size must be positive"),
    ("bn", {"passes": -1}, "adapter 'bn': .*passes not negative"),
    ("bn", {"mode": "both"}, "mode = 'both' is not valid"),
    ("tent", {"steps": 0}, "adapter 'tent': .*steps must be positive"),
    ("tent", {"batch_size": -1}, "adapter 'tent': batch-size must not be negative"),
    ("tent", {"optimiser": "rmsprop"}, "adapter 'tent': optimiser must be one of sgd, adam, not 'rmsprop'"),
    ("tent", {"params": "some"}, "params = 'some' is not valid"),
    ("tent", {"learning_rate": 0.1}, "has no option 'learning-rate'"),
    ("none", {"lr": 0.1}, "has no option 'lr'; it has: no options"),
])  # fmt: skip
def test_settings_that_cannot_be_meant(name: str, options: dict[str, object], sentence: str) -> None:
    assert re.search(
        sentence, refusal(ADAPTERS, "adapter", name, options, arch=tiny_arch("mlp", norm=True), predict_with=None)
    )


def test_only_tents_affine_variant_needs_batch_norm() -> None:
    arch = tiny_arch("mlp")
    for name, options, valid in (
        ("none", {}, True),
        ("bn", {}, False),
        ("tent", {}, False),
        ("tent", {"params": "all"}, True),
    ):
        reason = missing_for_pair("fedavg", FedAvg.provides, name, adapter_on(arch, name, **options))
        assert (reason is None) == valid
        if reason:
            assert reason == f"adapter {name!r} needs BatchNorm layers (for instance [model] norm = true), " + (
                "which model 'mlp' does not have"
            )
    needy = replace(adapter_on(arch, "none"))
    object.__setattr__(needy, "requires", frozenset({"model", "personal-head"}))
    sentence = "adapter 'none' needs personal-head, which method 'fedavg' does not deploy"
    assert missing_for_pair("fedavg", FedAvg.provides, "none", needy) == sentence


def test_tent_at_the_methods_own_rate() -> None:
    """With the decay of the round that trained the model: a run of any length is adapted at the rate it was trained with."""
    experiment = Experiment.parse(
        {"rounds": 20, "train": {"lr": 0.4, "lr-decay": 0.5}, "model": {"name": "mlp"}, "data": {"size": 8}}
    )
    setup = make_setup(experiment, experiment.method[0], make_task(experiment, 0))
    for options, rates in (({"train-lr": True}, (0.4, 0.1)), ({"lr": 0.03}, (0.03, 0.03))):
        spec = AdapterSpec.model_validate({"name": "tent", "params": "all", **options})
        found = [setup.adapter(spec, setup.method, Context(number, 20, 5)) for number in (1, 3)]
        assert [adapter.lr for adapter in found if isinstance(adapter, Tent)] == pytest.approx(rates)
