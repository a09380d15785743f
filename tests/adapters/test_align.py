"""Alignment to a new domain, FDSE's and FedBN's, against loops in plain torch: what moves, and what must not to the bit."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedshift.core.adapter import Adapter
from fedshift.core.arch import Arch
from fedshift.core.batching import batch_sizes
from fedshift.core.method import Train
from fedshift.core.registry import ADAPTERS, METHODS
from fedshift.core.tree import Tensors, Tree
from fedshift.data import sources
from fedshift.data.partition import ByDomain
from fedshift.data.task import Client, Splitting, Task, build
from fedshift.engines.base import Compute
from fedshift.engines.sequential import Sequential
from fedshift.engines.vmapped import Vmapped
from fedshift.errors import UserError
from fedshift.experiment.schema import AdapterSpec, MethodSpec
from fedshift.methods.fedbn import FedBN
from fedshift.models.cnn import CNN
from fedshift.runs.session import Session
from fedshift.runs.setup import Setup
from fedshift.systems.fdse import eraser as erasure
from fedshift.systems.fdse.method import FDSE
from tests.adapters.test_adapters import TASK as LONG
from tests.adapters.test_adapters import gap, images_of, normalised, recording, stream
from tests.adapters.test_adapters import trained as network
from tests.conftest import refusal, tiny_arch, tiny_train
from tests.methods.federations import DOUBLE, far, federation, make_task, run
from tests.systems.test_fdse import ARCH, BLOCKS, COUNTERS, HOME, LEARNT, OUTER, OWN, TRAIN, Net

SIZES = {23: [8, 8, 7], 17: [8, 9], 16: [8, 8], 5: [5], 2: [2]}


def images(count: int, seed: int = 0) -> Tensor:
    """Another domain than the one trained on: darker, and in patches."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 1, 2, 2, generator=generator, dtype=torch.float64)
    fine = torch.rand(count, 1, 4, 4, generator=generator, dtype=torch.float64)
    return 0.5 * coarse.repeat_interleave(2, 2).repeat_interleave(2, 3) + 0.1 * fine


@cache
def trained() -> tuple[Session, dict[str, Tree], dict[str, Tree]]:
    """A tiny federation after three rounds: what its clients and what unseen clients serve with."""
    fed, _ = federation(FDSE, make_task((6, 9, 12), unseen=2), TRAIN, ARCH, 3, lam=0.5)
    state, _ = run(fed)
    return fed, fed.deploy(state).trained(), fed.unseen(fed.deploy(state))


def unseen_model() -> Tree:
    return copy.deepcopy(trained()[2]["new0"])


def on(method: Any, name: str = "fdse-align", **options: Any) -> Adapter:
    made: Adapter = ADAPTERS[name].make(arch=method.arch, predict_with=method.predict, **options)
    return made


def align(**options: Any) -> Adapter:
    return on(trained()[0].setup.method, **{"batch_size": 8, **options})


def fitted(adapter: Adapter, tree: Tree, x: Tensor) -> Tensors:
    with torch.no_grad():  # as engines call it
        state = adapter.fit(adapter.init(tree), x, {})
    assert set(state) == set(tree)
    assert state["model"].keys() == tree["model"].keys()
    assert not any(leaf.requires_grad for leaf in state["model"].values())
    assert all(state["model"][n].dtype == t.dtype for n, t in tree["model"].items())
    return state["model"]


def moved(before: Tensors, after: Tensors) -> set[str]:
    return {name for name, leaf in before.items() if not torch.equal(leaf, after[name])}


def in_torch(model: Tensors, x: Tensor, sizes: Sequence[int], lr: float, epochs: int, beta: float) -> tuple[Net, float]:
    """Algorithm 3 with a module and an optimiser, and the last value of what it lowers."""
    net = Net().double().eval()
    net.load(model)
    for leaf in net.parameters():
        leaf.requires_grad_(False)
    live = [leaf for b in net.blocks.values() for part in (b.dse, b.dse_norm) for leaf in part.parameters()]
    for b in net.blocks.values():
        b.dse_norm.train()
    for leaf in live:
        leaf.requires_grad_(True)
    optimiser = torch.optim.SGD(live, lr)
    tracked: dict[str, tuple[Tensor, Tensor]] = {}
    value = float("nan")
    for _ in range(epochs):
        for batch in x.split(list(sizes)):
            net((batch - 0.5) / 0.5)
            loss = torch.zeros((), dtype=torch.float64)
            weights = torch.softmax(beta * torch.arange(1, 3, dtype=torch.float64), 0)
            for name, weight in zip(BLOCKS, weights, strict=True):
                b = net.blocks[name]
                now = b.both.mean((0, 2, 3)), b.both.var((0, 2, 3))
                if name in tracked:
                    now = tuple(0.9 * o.detach() + 0.1 * n for o, n in zip(tracked[name], now, strict=True))
                tracked[name] = now
                mean = ((now[0] - b.dfe_norm.running_mean) ** 2).mean()
                loss = loss + weight * (mean + (now[1].mean() - b.dfe_norm.running_var.mean()) ** 2)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            value = float(loss.detach())
    return net.eval(), value


# ---- fdse-align: what it does --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize(("lr", "epochs", "beta"), [(0.01, 1, 0.001), (0.1, 5, 0.7)])
def test_it_is_sgd_on_the_distance_of_statistics(count: int, lr: float, epochs: int, beta: float) -> None:
    tree, x = unseen_model(), images(count)
    assert batch_sizes(count, 8) == SIZES[count]
    adapter = align(lr=lr, epochs=epochs, beta=beta)
    after = fitted(adapter, tree, x)
    net, _ = in_torch(tree["model"], x, SIZES[count], lr, epochs, beta)
    expected = net.tensors()
    assert far({name: after[name] for name in expected}, expected) < 1e-7
    with torch.no_grad():
        output, state = adapter.predict({"model": after}, x, {})
        assert gap(output.logits, net((x - 0.5) / 0.5)) < 1e-6
        assert gap(output.logits[:1], adapter.predict({"model": after}, x[:1], {})[0].logits) < 1e-12
    assert moved(after, state["model"]) == set()  # it learns before it predicts


def test_the_defaults_are_those_of_the_specification() -> None:
    assert ADAPTERS["fdse-align"].options == {"lr": 0.01, "epochs": 5, "batch-size": 50, "beta": 0.001}
    assert (align().fits, align().batch) == (True, None)


def test_everything_shared_stays_to_the_bit_and_every_eraser_moves() -> None:
    tree, x = unseen_model(), images(23)
    after = fitted(align(lr=0.1), tree, x)
    assert moved(tree["model"], after) == OWN | HOME
    assert not (LEARNT | OUTER | COUNTERS) & moved(tree["model"], after)


def test_what_a_client_that_trained_serves_with_can_be_aligned_too() -> None:
    _, deployed, _ = trained()
    tracking = {f"{b}.{name}" for b in BLOCKS for name in (*erasure.TRACKED, "tracked_steps")}
    for tree in deployed.values():
        assert moved(tree["model"], fitted(align(lr=0.1), tree, images(23))) - tracking == OWN | HOME
        assert moved(tree["model"], fitted(align(epochs=0), tree, images(23))) <= tracking  # read by nobody


def test_without_a_rate_only_inner_statistics_move() -> None:
    tree, x = unseen_model(), images(23)
    after = fitted(align(lr=0.0, epochs=2), tree, x)
    assert moved(tree["model"], after) == HOME
    assert all(int(after[n]) == int(tree["model"][n]) + 6 for n in HOME if n.endswith("num_batches_tracked"))


def test_no_epochs_change_nothing() -> None:
    tree = unseen_model()
    assert moved(tree["model"], fitted(align(epochs=0), tree, images(23))) == set()


def test_nothing_it_is_given_is_changed() -> None:
    tree, x = unseen_model(), images(23)
    kept, pixels = copy.deepcopy(tree), x.clone()
    fitted(align(lr=0.1), tree, x)
    assert moved(kept["model"], tree["model"]) == set()
    assert torch.equal(x, pixels)


def test_other_slots_are_left_alone() -> None:
    rich = {**unseen_model(), "descriptors": {"global": torch.ones(3)}}
    with torch.no_grad():
        state = align().fit(rich, images(23), {})
    assert state["descriptors"] is rich["descriptors"]


@pytest.mark.parametrize("name", ["fdse-align", "fedbn-align"])
@pytest.mark.parametrize("count", [0, 1])
def test_one_image_or_none_is_predicted_as_it_is(name: str, count: int) -> None:
    fed, _, _ = trained()
    tree, x = unseen_model(), images(count)
    adapter = on(fed.setup.method, name)
    after = fitted(adapter, tree, x)
    assert moved(tree["model"], after) == set()
    with torch.no_grad():
        output, _ = adapter.predict({"model": after}, x, {})
    assert torch.equal(output.logits, fed.setup.method.arch(tree["model"], x).logits)


@pytest.mark.parametrize("name", ["fdse-align", "fedbn-align"])
def test_a_stream_of_one_image_or_none_can_be_scored(name: str) -> None:
    fed, _, unseen = trained()
    nothing = torch.zeros(0, dtype=torch.int64)
    clients = (Client("new0", nothing, nothing, torch.tensor([3])), Client("new1", nothing, nothing, nothing))
    task = replace(fed.task, unseen=clients)
    scores = Sequential(DOUBLE).evaluate(on(fed.setup.method, name), unseen, task, ["test"], 0)
    assert [score.samples for score in scores.values()] == [1, 0]
    assert all(score.loss == score.loss for score in scores.values())


def streamed(task: Task, adapter: Adapter, tree: Tree) -> tuple[Tensor, Tree]:
    observed, record = recording(adapter)
    Sequential(DOUBLE).evaluate(observed, {"new0": tree}, task, ["test"], seed=0)
    return record.logits, record.states[-1]


@pytest.mark.parametrize("name", ["fdse-align", "fedbn-align"])
def test_labels_are_not_looked_at(name: str) -> None:
    adapter = on(trained()[0].setup.method, name, batch_size=2)
    assert list(inspect.signature(adapter.fit).parameters) == ["state", "x", "draws"]
    assert adapter.draws() == {}
    task = make_task((6, 9, 12), unseen=2)
    lies = replace(task, labels=(task.labels + 1) % 3)
    (a, before), (b, after) = (streamed(t, adapter, unseen_model()) for t in (task, lies))
    assert torch.equal(a, b)
    assert moved(before["model"], after["model"]) == set()
    assert moved(unseen_model()["model"], after["model"]) != set()


@pytest.mark.parametrize("name", ["fdse-align", "fedbn-align"])
def test_engines_agree(name: str) -> None:
    fed, _, unseen = trained()
    adapter = on(fed.setup.method, name, batch_size=2)
    a, b = (engine.evaluate(adapter, unseen, fed.task, ["test"], 0) for engine in (Sequential(DOUBLE), Vmapped(DOUBLE)))
    plain = Sequential(DOUBLE).evaluate(fed.setup.plain["net"], unseen, fed.task, ["test"], 0)
    for key, score in a.items():
        assert (score.samples, score.correct) == (b[key].samples, b[key].correct)
        assert score.loss == pytest.approx(b[key].loss, abs=1e-10)
        assert score.loss != plain[key].loss


def test_a_network_without_erasers_is_refused_in_a_sentence() -> None:
    method = METHODS["fedbn"].make(arch=tiny_arch(norm=True), train=tiny_train())
    setup = Setup(MethodSpec(name="fedbn"), {"cnn": method}, method.train)
    with pytest.raises(UserError) as said:
        setup.adapter(AdapterSpec(name="fdse-align"), method)
    assert str(said.value).startswith("adapter 'fdse-align' needs domain-shift erasers")
    assert "\n" not in str(said.value)
    assert isinstance(setup.adapter(AdapterSpec(name="fedbn-align"), method), ADAPTERS["fedbn-align"].make)


def test_fedbn_align_refuses_a_network_without_batch_norm_in_a_sentence() -> None:
    method = METHODS["fedavg"].make(arch=tiny_arch(), train=tiny_train())
    setup = Setup(MethodSpec(name="fedavg"), {"cnn": method}, method.train)
    with pytest.raises(UserError, match=r"^adapter 'fedbn-align' needs BatchNorm layers .* does not have$"):
        setup.adapter(AdapterSpec(name="fedbn-align"), method)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fdse-align", {"lr": -1.0}),
        ("fdse-align", {"epochs": -1}),
        ("fdse-align", {"batch_size": 1}),
        ("fdse-align", {"batch_size": 0}),
        ("fedbn-align", {"passes": -1}),
        ("fedbn-align", {"batch_size": 1}),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(name: str, options: dict[str, Any]) -> None:
    sentence = refusal(ADAPTERS, "adapter", name, options, arch=trained()[0].setup.method.arch, predict_with=None)
    assert f"{next(iter(options)).replace('_', '-')} must" in sentence
    assert sentence.startswith(f"adapter {name!r}: ")
    assert "\n" not in sentence


# ---- fedbn-align ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("size", "sizes"), [(16, [16, 16, 13]), (44, [45]), (45, [45]), (11, [11] * 3 + [12]), (50, [45])]
)
@pytest.mark.parametrize("passes", [0, 1, 5])
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_fedbn_align_is_passes_in_training_mode(kind: str, passes: int, size: int, sizes: list[int]) -> None:
    arch, module, tree = network(kind)
    adapter = on(FedBN(arch=arch, train=tiny_train()), "fedbn-align", passes=passes, batch_size=size)
    found = stream(adapter, tree)
    x = images_of(LONG.clients[0])
    assert len(x) == sum(sizes)
    module = copy.deepcopy(module).train()
    with torch.no_grad():
        for _ in range(passes):
            for batch in x.split(sizes):
                module(normalised(batch))
        assert gap(found.logits, module.eval()(normalised(x))) < 1e-12
    after = found.states[-1]["model"]
    for name, leaf in module.state_dict().items():
        assert torch.allclose(after[name].double(), leaf.double(), atol=1e-12), name
    statistics = {n for n in arch.buffers if n in arch.norm}
    assert moved(tree["model"], after) == (statistics if passes else set())


def test_fedbn_aligns_with_one_pass_by_default() -> None:
    assert ADAPTERS["fedbn-align"].options == {"passes": 1, "batch-size": 50}
    adapter = on(FedBN(arch=tiny_arch(norm=True), train=tiny_train()), "fedbn-align")
    assert (adapter.fits, adapter.batch) == (True, None)


# ---- on real images ------------------------------------------------------------------------------------------------------
@cache
def digits() -> tuple[Session, dict[str, Tree]]:
    """A small CNN with erasers after a few rounds on three kinds of digits, and what a fourth kind starts from."""
    pool = sources.load("embedded:digits", size=16).only(("pen", "paper", "font", "flower"))
    task = build(pool, ByDomain(), Splitting(unseen="flower"), {})
    backbone = Arch.of(lambda: CNN(width=8, hidden=32, norm=True).make(task.shape, 10), task.shape, "cnn")
    train = Train(lr=0.1, batch_size=50, local_epochs=1, weight_decay=1e-3, clip=10.0)
    method = FDSE(arch=FDSE.build(backbone, {}), train=train)
    setup = Setup(MethodSpec(name="fdse"), {"cnn": method}, train)
    fed = Session(setup, task, Sequential(Compute()), Compute(), seed=0, rounds=8)
    state = fed.start()
    for _ in range(8):
        state, _ = fed.step(state)
    return fed, fed.unseen(fed.deploy(state))


def target() -> Tensor:
    fed, _ = digits()
    (client,) = fed.task.unseen
    return fed.task.images[client.test].float() / 255


def distance(model: Tensors, x: Tensor, batch_statistics: bool) -> float:
    """How far what enters the outer normalisations is from what they expect, over all images at once."""
    method = digits()[0].setup.method
    assert isinstance(method, FDSE)
    inner = (*erasure.OWN, *erasure.AT_HOME) if batch_statistics else (*erasure.TRACKED, "tracked_steps")
    fresh = {**model, **erasure.fresh_tracking(model, method.blocks)}
    with torch.no_grad():
        seen = method.arch(fresh, x, erasure.entries(method.blocks, inner)).buffers
        return float(erasure.inconsistency(seen, model, method.blocks, 0.001))


@pytest.mark.grid
def test_the_distance_falls_on_a_domain_left_out() -> None:
    fed, unseen = digits()
    tree, x = unseen["flower"], target()
    before, refreshed, after = (
        fitted(on(fed.setup.method, **options), tree, x) for options in ({"epochs": 0}, {"lr": 0.0}, {"lr": 0.01})
    )
    # when it predicts, with running statistics in the inner normalisation
    assert distance(after, x, False) < 0.1 * distance(before, x, False)
    # while it adapts, with each batch's own, which takes most of the distance away and is all that lr = 0 does
    assert distance(before, x, True) < 0.1 * distance(before, x, False)
    assert distance(refreshed, x, True) == pytest.approx(distance(before, x, True), rel=1e-4)
    fast, long = (fitted(on(fed.setup.method, **options), tree, x) for options in ({"lr": 1.0}, {"epochs": 20}))
    falling = [distance(model, x, True) for model in (refreshed, after, long, fast)]
    assert falling == sorted(falling, reverse=True)
    assert falling[1] < 0.999 * falling[0]
    assert falling[3] < 0.9 * falling[0]
    assert distance(fast, x, False) < 0.99 * distance(refreshed, x, False)


def test_shared_tensors_stay_to_the_bit_on_real_images_in_single_precision() -> None:
    fed, unseen = digits()
    tree = unseen["flower"]
    method = fed.setup.method
    assert isinstance(method, FDSE)
    free = erasure.entries(method.blocks, (*erasure.OWN, *erasure.STATISTICS))
    assert moved(tree["model"], fitted(on(method), tree, target())) == free


def test_training_teaches_something_and_alignment_does_not_undo_it() -> None:
    fed, unseen = digits()
    plain = fed.evaluate(fed.setup.plain, unseen, ["test"])["flower", "test"]
    made = fed.setup.adapter(AdapterSpec(name="fdse-align"), fed.setup.method)
    aligned = fed.evaluate({"cnn": made}, unseen, ["test"])["flower", "test"]
    assert aligned.accuracy > 0.2  # a tenth is chance
    assert aligned.accuracy > plain.accuracy - 0.03


# ---- with other adapters -------------------------------------------------------------------------------------------------
def test_fedicons_adapter_works_on_erasers_and_keeps_the_head() -> None:
    fed, unseen = digits()
    method, tree = fed.setup.method, unseen["flower"]
    adapter = ADAPTERS["fedicon"].make(arch=method.arch, predict_with=method.predict, flip=False)
    observed, record = recording(adapter)
    score = fed.evaluate({"cnn": observed}, unseen, ["test"])["flower", "test"]
    assert score.samples == len(target())
    assert score.loss == score.loss
    changed = moved(tree["model"], record.states[-1]["model"])
    assert not changed & method.arch.head
    assert changed == set(method.arch.parameters) - method.arch.head


@pytest.mark.parametrize("name", ["none", "bn", "tent", "t3a", "memo", "fedbn-align", "fdse-align"])
def test_other_adapters_run_on_erasers(name: str) -> None:
    fed, deployed, unseen = trained()
    made = fed.setup.adapter(AdapterSpec(name=name), fed.setup.method)
    before = copy.deepcopy({**deployed, **unseen})
    for engine in (Sequential(DOUBLE), Vmapped(DOUBLE)):
        scores = engine.evaluate(made, {**deployed, **unseen}, fed.task, ["test"], 0)
        assert len(scores) == 5
        assert all(score.samples in (2, 4) and score.loss == score.loss for score in scores.values())
    for client, tree in before.items():
        assert moved(tree["model"], {**deployed, **unseen}[client]["model"]) == set()


def test_the_layers_between_are_what_the_names_say() -> None:
    """The reference's BatchNorm layers are on maps also where the network's are on numbers: the same function."""
    x = images(9)
    method = trained()[0].setup.method
    net = Net().double().eval()
    net.load(unseen_model()["model"])
    assert all(isinstance(b.dfe_norm, nn.BatchNorm2d) for b in net.blocks.values())
    with torch.no_grad():
        assert gap(net((x - 0.5) / 0.5), method.arch(unseen_model()["model"], x).logits) < 1e-12
