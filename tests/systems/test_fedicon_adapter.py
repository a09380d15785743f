"""FedICON's adapter against a loop with torch's SGD: what moves, what never does, when it predicts, and what it lowers."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedshift.blocks.losses import contrastive
from fedshift.blocks.views import contrastive_views
from fedshift.core.arch import Arch
from fedshift.core.method import Train
from fedshift.core.registry import ADAPTERS, METHODS
from fedshift.core.tree import Tensors, Tree
from fedshift.data import sources
from fedshift.data.partition import ByDomain
from fedshift.data.streams import Corrupted, Setting, Stream
from fedshift.data.task import Splitting, Task, build
from fedshift.engines.base import Compute
from fedshift.engines.reference import draws_of
from fedshift.engines.sequential import Sequential
from fedshift.engines.vmapped import Vmapped
from fedshift.experiment.schema import AdapterSpec, MethodSpec
from fedshift.methods.fedavg import FedAvg
from fedshift.models.cnn import CNN
from fedshift.runs.session import Session
from fedshift.runs.setup import Setup
from tests.adapters.test_adapters import MODELS, STREAM, TASK, Record, images_of, normalised, stream
from tests.adapters.test_adapters import trained as network
from tests.conftest import refusal, tiny_train

DOUBLE = Compute(dtype=torch.float64)
CLIENT = TASK.clients[0]
FAST: dict[str, Any] = {"lr": 0.05, "temperature": 0.3, "batch_size": 16}


def on(arch: Arch, **options: Any) -> Any:
    return ADAPTERS["fedicon"].make(arch=arch, predict_with=FedAvg(arch=arch, train=tiny_train()).predict, **options)


def along(adapter: Any, tree: Tree, task: Task = TASK) -> Record:
    """The first client's stream, as a benchmark goes along it."""
    return stream(adapter, tree, ["arriving" if task.streams else "test"], task)


def plain(arch: Arch, tree: Tree) -> Tensor:
    """What the model predicts as it is."""
    return arch(tree["model"], images_of(CLIENT)).logits


def views_of(adapter: Any, epoch: int = 0, index: Tensor = CLIENT.test, flip: bool = True) -> list[Tensor]:
    """The two views of every image in the stream (of the engine's seed 0)."""
    draws = draws_of(adapter, TASK.ids[index], 0, DOUBLE)
    x = TASK.images[index].double() / 255
    return [contrastive_views(x, draws["views"][:, epoch, i], flip) for i in range(2)]


def nt_xent(z: Tensor, temperature: float) -> Tensor:
    """Pair by pair."""
    z = z / z.norm(dim=1, keepdim=True).clamp(min=1e-12)  # behind a ReLU an image may have no features at all
    count = len(z)
    losses = []
    for i in range(count):
        twin = (i + count // 2) % count
        others = torch.stack([z[i] @ z[a] / temperature for a in range(count) if a != i])
        losses.append(others.logsumexp(0) - z[i] @ z[twin] / temperature)
    return torch.stack(losses).mean()


def with_torch(module: nn.Module, adapter: Any, sizes: list[int], online: bool) -> tuple[Tensor, nn.Module]:
    """The published algorithm with a module and an optimiser: predictions and the adapted module."""
    module = copy.deepcopy(module).eval()
    head, module.head = module.head, nn.Identity()
    optimiser = torch.optim.SGD(module.parameters(), adapter.lr)
    x = images_of(CLIENT)

    def step(rows: Tensor, epoch: int) -> None:
        views = [view[rows] for view in views_of(adapter, epoch, flip=adapter.flip)]
        optimiser.zero_grad()
        nt_xent(module(normalised(torch.cat(views))), adapter.temperature).backward()
        optimiser.step()

    answers = []
    parts = torch.arange(sum(sizes)).split(sizes)
    if online:
        for rows in parts:
            for epoch in range(adapter.epochs):
                step(rows, epoch)
            with torch.no_grad():
                answers.append(head(module(normalised(x[rows]))))
    else:
        for epoch in range(adapter.epochs):
            for rows in parts:
                step(rows, epoch)
        with torch.no_grad():
            answers.append(head(module(normalised(x))))
    module.head = head
    return torch.cat(answers), module


def far(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a.double() - b.double()).detach().abs().max())


def moved(before: Tensors, after: Tensors) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name, leaf in before.items() if not torch.equal(leaf, after[name])}


# ---- what it does -------------------------------------------------------------------------------------------------------
def test_the_network_has_a_head_of_that_name() -> None:
    for kind in MODELS:
        arch, module, _ = network(kind)
        assert arch.head == {f"head.{name}" for name, _ in module.head.named_parameters()}


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("mode", ["offline", "online"])
@pytest.mark.parametrize("kind", MODELS)
def test_it_is_torchs_sgd_on_pairs_of_views(kind: str, mode: str, epochs: int) -> None:
    arch, module, tree = network(kind)
    adapter = on(arch, mode=mode, epochs=epochs, flip=epochs == 1, **FAST)
    found = along(adapter, tree)
    expected, after = with_torch(module, adapter, [16, 16, 13], mode == "online")
    assert far(found.logits, expected) < 1e-9
    assert len(found.chunks) == (3 if mode == "online" else 1)
    for name, leaf in after.state_dict().items():
        assert far(found.states[-1]["model"][name], leaf) < 1e-9, name
    assert far(found.logits, plain(arch, tree)) > 1e-4


@pytest.mark.parametrize("mode", ["offline", "online"])
@pytest.mark.parametrize("kind", MODELS)
def test_no_rate_no_change(kind: str, mode: str) -> None:
    arch, _, tree = network(kind)
    found = along(on(arch, mode=mode, lr=0.0, epochs=2), tree)
    assert far(found.logits, plain(arch, tree)) < 1e-12
    assert moved(tree["model"], found.states[-1]["model"]) == set()


@pytest.mark.parametrize("mode", ["offline", "online"])
@pytest.mark.parametrize("kind", MODELS)
def test_encoder_parameters_move_and_neither_the_head_nor_any_buffer(kind: str, mode: str) -> None:
    arch, _, tree = network(kind)
    found = along(on(arch, mode=mode, **FAST), tree)
    for state in found.states:
        assert moved(tree["model"], state["model"]) == set(arch.parameters) - arch.head  # bitwise
        assert {slot: set(leaves) for slot, leaves in state.items()} == {"model": set(tree["model"])}


def test_all_that_else_is_deployed_is_left_alone() -> None:
    arch, _, tree = network("cnn")
    generic = {name: torch.ones_like(tree["model"][name]) for name in arch.head}
    rich = {**tree, "generic": generic, "descriptors": {"global": torch.ones(6), "local": torch.zeros(6)}}
    state = along(on(arch, **FAST), rich).states[-1]
    assert set(state) == set(rich)
    for slot in ("generic", "descriptors"):
        assert moved(rich[slot], state[slot]) == set()


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_nothing_it_is_given_is_changed(mode: str) -> None:
    arch, _, tree = network("cnn")
    before = copy.deepcopy(tree)
    adapter = on(arch, mode=mode, **FAST)
    x = images_of(CLIENT)
    draws = draws_of(adapter, TASK.ids[CLIENT.test], 0, DOUBLE)
    kept = x.clone(), {name: leaf.clone() for name, leaf in draws.items()}
    with torch.no_grad():
        state = adapter.fit(adapter.init(tree), x, draws)
        output, after = adapter.predict(state, x, draws)
    assert torch.equal(x, kept[0])
    assert all(torch.equal(draws[name], leaf) for name, leaf in kept[1].items())
    assert moved(before["model"], tree["model"]) == set()
    assert not output.logits.requires_grad
    assert not any(leaf.requires_grad for leaf in after["model"].values())
    assert moved(before["model"], after["model"]) != set()


# ---- when it predicts ---------------------------------------------------------------------------------------------------
def test_offline_looks_at_everything_first_and_then_predicts_in_chunks_of_any_size() -> None:
    arch, _, tree = network("cnn")
    adapter = on(arch, **FAST)
    assert (adapter.mode, adapter.fits, adapter.batch) == ("offline", True, None)
    found = along(adapter, tree)
    small = along(adapter, tree, _chunked(7))
    assert len(small.chunks) == 7
    assert far(small.logits, found.logits) < 1e-12
    assert all(moved(small.states[0]["model"], state["model"]) == set() for state in small.states)


def test_online_learns_from_a_batch_before_it_answers_and_knows_nothing_of_later_ones() -> None:
    arch, _, tree = network("cnn")
    adapter = on(arch, mode="online", **FAST)
    assert (adapter.fits, adapter.batch) == (False, 16)
    found = along(adapter, tree)
    for number in range(2):
        assert moved(found.states[number]["model"], found.states[number + 1]["model"]) != set()
    rows = CLIENT.test[16:32]
    expected = arch(found.states[1]["model"], TASK.images[rows].double() / 255).logits
    assert torch.equal(found.chunks[1], expected)  # after its own step
    changed = TASK.images.clone()
    changed[CLIENT.test[32:]] = 255 - changed[CLIENT.test[32:]]
    later = along(adapter, tree, replace(TASK, images=changed))
    for number in range(2):
        assert torch.equal(later.chunks[number], found.chunks[number])
    assert far(later.chunks[2], found.chunks[2]) > 1e-6
    offline = on(arch, **FAST)
    assert far(along(offline, tree, replace(TASK, images=changed)).logits[:16], along(offline, tree).logits[:16]) > 1e-6


@pytest.mark.parametrize("kind", MODELS)
def test_for_one_batch_online_is_offline(kind: str) -> None:
    arch, _, tree = network(kind)
    for epochs in (1, 3):
        whole = {**FAST, "batch_size": STREAM, "epochs": epochs}
        online, offline = (along(on(arch, mode=mode, **whole), tree) for mode in ("online", "offline"))
        assert torch.equal(online.logits, offline.logits)
        assert moved(online.states[-1]["model"], offline.states[-1]["model"]) == set()


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_a_last_image_that_is_alone_is_served(mode: str) -> None:
    """45 images in batches of 11: one is left over, and it has no other to be told from."""
    arch, _, tree = network("cnn")
    found = along(on(arch, mode=mode, **{**FAST, "batch_size": 11}), tree)
    assert len(found.logits) == STREAM
    assert bool(found.logits.isfinite().all())
    one = replace(TASK, clients=(replace(CLIENT, test=CLIENT.test[:1]), *TASK.clients[1:]))
    alone = along(on(arch, mode=mode, **FAST), tree, one)
    assert far(alone.logits, plain(arch, tree)[:1]) < 1e-12


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_a_stream_without_images_is_no_accident(mode: str) -> None:
    arch, _, tree = network("cnn")
    nothing = replace(TASK, clients=(replace(CLIENT, test=CLIENT.test[:0]), *TASK.clients[1:]))
    score = Sequential(DOUBLE).evaluate(on(arch, mode=mode), {CLIENT.name: tree}, nothing, ["test"], 0)
    assert score[CLIENT.name, "test"].samples == 0


def _chunked(size: int, reset: str = "stream") -> Task:
    """The same stream, of which this many images arrive at a time."""
    setting = Setting(chunk=size, reset=reset)  # type: ignore[arg-type]
    tests = {client.name: client.test for client in TASK.clients}
    shown = Stream("arriving", "original", setting, None, TASK.labels, TASK.ids, tests)
    return replace(TASK, streams={"arriving": shown})


def test_where_the_state_is_reset_with_every_arrival_each_is_a_set_of_its_own() -> None:
    arch, _, tree = network("cnn")
    adapter = on(arch, **FAST)
    found = along(adapter, tree, _chunked(15, reset="chunk"))
    for number in range(3):
        index = CLIENT.test[15 * number : 15 * number + 15]
        x, draws = TASK.images[index].double() / 255, draws_of(adapter, TASK.ids[index], 0, DOUBLE)
        with torch.no_grad():
            output, _ = adapter.predict(adapter.fit(adapter.init(tree), x, draws), x, draws)
        assert torch.equal(found.chunks[number], output.logits)


# ---- views --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["offline", "online"])
def test_views_are_a_matter_of_sample_ids_and_not_of_places(mode: str) -> None:
    """The same images in another order, as one batch: the same predictions for each, by whoever runs it."""
    arch, _, tree = network("cnn")
    adapter = on(arch, mode=mode, **{**FAST, "batch_size": STREAM})
    found = along(adapter, tree)
    assert torch.equal(along(adapter, tree).logits, found.logits)
    order = torch.randperm(STREAM, generator=torch.Generator().manual_seed(0))
    other = replace(TASK, clients=(replace(CLIENT, test=CLIENT.test[order]), *TASK.clients[1:]))
    assert far(along(adapter, tree, other).logits, found.logits[order]) < 1e-10
    renamed = replace(TASK, ids=TASK.ids + 1000)
    assert far(along(adapter, tree, renamed).logits, found.logits) > 1e-6


def test_every_epoch_has_views_of_its_own() -> None:
    arch, _, _ = network("cnn")
    adapter = on(arch, epochs=3)
    made = [view for epoch in range(3) for view in views_of(adapter, epoch)]
    assert min(far(a, b) for i, a in enumerate(made) for b in made[:i]) > 0.1


def test_flips_can_be_forbidden() -> None:
    arch, _, tree = network("cnn")
    with_flips, without = (along(on(arch, flip=flip, **FAST), tree) for flip in (True, False))
    assert far(with_flips.logits, without.logits) > 1e-6


# ---- engines, pairs, settings -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["offline", "online"])
@pytest.mark.parametrize("kind", MODELS)
def test_engines_agree(kind: str, mode: str) -> None:
    arch, _, tree = network(kind)
    adapter = on(arch, mode=mode, **FAST)
    trees = {client.name: tree for client in TASK.clients}
    a, b = (
        engine.evaluate(adapter, trees, TASK, ["test", "val"], 0) for engine in (Sequential(DOUBLE), Vmapped(DOUBLE))
    )
    assert a.keys() == b.keys()
    for key, score in a.items():
        assert (score.samples, score.correct) == (b[key].samples, b[key].correct)
        assert score.loss == pytest.approx(b[key].loss, abs=1e-9)


@cache
def federated(name: str, norm: bool) -> tuple[Session, dict[str, Tree]]:
    """A method after both of its stages, on random images."""
    cls = METHODS[name].make
    arch = Arch.of(lambda: CNN(width=2, hidden=6, norm=norm).make((3, 8, 8), 4), (3, 8, 8), "net")
    options = {"head_rounds": 2, "head_epochs": 1, "personal_epochs": 1} if name == "fedicon" else {}
    method = cls(arch=cls.build(arch, options), train=tiny_train(), **options)
    setup = Setup(MethodSpec(name=name), {"net": method}, method.train)
    fed = Session(setup, TASK, Sequential(DOUBLE), DOUBLE, seed=2, rounds=1)
    state = fed.start()
    for _ in range(1 + method.extra_rounds):
        state, _ = fed.step(state)
    return fed, fed.deploy(state).trained()


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("name", ["fedavg", "fedicon", "fedthe", "fedrep", "local"])
def test_it_works_on_any_method(name: str, norm: bool) -> None:
    fed, deployed = federated(name, norm)
    before = copy.deepcopy(deployed)
    for mode in ("offline", "online"):
        spec = AdapterSpec.model_validate({"name": "fedicon", "mode": mode, "lr": 0.01})
        scores = fed.evaluate({"net": fed.setup.adapter(spec, fed.setup.method)}, deployed, ["test"])
        assert all(score.samples == STREAM and score.loss == score.loss for score in scores.values())
        off = AdapterSpec.model_validate({"name": "fedicon", "mode": mode, "lr": 0.0})
        still = fed.evaluate({"net": fed.setup.adapter(off, fed.setup.method)}, deployed, ["test"])
        for key, score in fed.evaluate(fed.setup.plain, deployed, ["test"]).items():
            assert still[key].correct == score.correct
            assert still[key].loss == pytest.approx(score.loss, abs=1e-9)
            assert scores[key].loss != score.loss
    for client, tree in before.items():
        for slot, leaves in tree.items():
            assert moved(leaves, deployed[client][slot]) == set()


@pytest.mark.parametrize(
    ("adapter", "norm"), [("the", False), ("the", True), ("tent", True), ("t3a", False), ("bn", True)]
)
def test_other_adapters_work_on_its_training(adapter: str, norm: bool) -> None:
    fed, deployed = federated("fedicon", norm)
    made = fed.setup.adapter(AdapterSpec(name=adapter), fed.setup.method)
    scores = fed.evaluate({"net": made}, deployed, ["test"])
    assert all(score.samples == STREAM and score.loss == score.loss for score in scores.values())
    if adapter == "the":
        assert all(0 <= score.telemetry["e"].mean <= 1 for score in scores.values())


@pytest.mark.parametrize("options", [
    {"temperature": 0.0}, {"lr": -1.0}, {"epochs": 0}, {"batch_size": 1}, {"batch_size": 0},
])  # fmt: skip
def test_settings_that_cannot_be_meant_are_refused(options: dict[str, Any]) -> None:
    sentence = refusal(ADAPTERS, "adapter", "fedicon", options, arch=network("mlp")[0], predict_with=None)
    assert f"{next(iter(options)).replace('_', '-')} must" in sentence


def test_a_mode_nobody_knows_is_refused() -> None:
    sentence = refusal(ADAPTERS, "adapter", "fedicon", {"mode": "sideways"}, arch=network("mlp")[0], predict_with=None)
    assert sentence.startswith("adapter 'fedicon': mode = 'sideways' is not valid")


# ---- what it is for -----------------------------------------------------------------------------------------------------
@cache
def digits(name: str, norm: bool = False) -> tuple[Session, dict[str, Tree]]:
    """A small CNN after a few rounds on handwriting on two kinds of paper; the streams are corrupted."""
    pool = sources.load("embedded:digits", size=16).only(("pen", "paper"))
    task = build(pool, ByDomain(), Splitting(), {"noise": Corrupted()})
    cls = METHODS[name].make
    arch = Arch.of(lambda: CNN(width=8, hidden=32, norm=norm).make(task.shape, 10), task.shape, "cnn")
    train = Train(lr=0.01, batch_size=32, local_epochs=2, momentum=0.9)
    stages = {"head_rounds": 4, "head_epochs": 5, "personal_epochs": 2, "head_lr": 0.1, "flip": False}
    options: dict[str, Any] = stages if name == "fedicon" else {}
    method = cls(arch=cls.build(arch, options), train=train, **options)
    fed = Session(
        Setup(MethodSpec(name=name), {"cnn": method}, train), task, Sequential(Compute()), Compute(), seed=0, rounds=6
    )
    state = fed.start()
    for _ in range(6 + method.extra_rounds):
        state, _ = fed.step(state)
    return fed, fed.deploy(state).trained()


@pytest.mark.grid
@pytest.mark.parametrize("mode", ["offline", "online"])
@pytest.mark.parametrize(("name", "norm"), [("fedicon", False), ("fedicon", True), ("fedavg", False)])
def test_the_contrast_falls_on_real_images(name: str, norm: bool, mode: str) -> None:
    """On views it has never seen, so it is not the drawn ones that were learnt by heart."""
    fed, deployed = digits(name, norm)
    method = fed.setup.method
    adapter = ADAPTERS["fedicon"].make(
        arch=method.arch, predict_with=method.predict, flip=False, mode=mode, lr=1e-2, epochs=3, temperature=0.1
    )
    for client in fed.task.clients:
        samples = fed.task.samples(client, "noise")
        x = samples.images[samples.index].float() / 255
        draws, fresh = (draws_of(adapter, samples.ids[samples.index], seed, Compute()) for seed in (0, 99))

        def contrast(tree: Tree, x: Tensor = x, fresh: dict[str, Tensor] = fresh) -> float:
            losses = []
            with torch.no_grad():
                for epoch in range(3):
                    for rows in torch.arange(len(x)).split(32)[: len(x) // 32]:
                        views = [contrastive_views(x[rows], fresh["views"][rows, epoch, i], False) for i in range(2)]
                        z = method.predict(tree, torch.cat(views)).features
                        losses.append(float(contrastive(z, torch.arange(len(rows)).repeat(2), 0.1)))
            return sum(losses) / len(losses)

        state = adapter.init(deployed[client.name])
        before = contrast(state)
        with torch.no_grad():
            if adapter.fits:
                state = adapter.fit(state, x, draws)
            else:
                for rows in torch.arange(len(x)).split(32):
                    _, state = adapter.predict(state, x[rows], {"views": draws["views"][rows]})
        assert contrast(state) < before - 0.02, client.name


def test_the_two_stages_teach_something() -> None:
    fed, deployed = digits("fedicon", norm=True)
    scores = fed.evaluate(fed.setup.plain, deployed, ["val"])
    accuracy = sum(score.correct for score in scores.values()) / sum(score.samples for score in scores.values())
    assert accuracy > 0.5
