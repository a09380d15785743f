"""kNN-Per against brute force, and fine-tuning with a rotation head against torch and against plain fine-tuning."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedshift.core import rng
from fedshift.core.arch import Arch
from fedshift.core.method import Train
from fedshift.core.registry import METHODS
from fedshift.core.tree import Tree
from fedshift.data.task import Client, Task
from fedshift.engines.base import Compute
from fedshift.engines.sequential import Sequential
from fedshift.engines.vmapped import Vmapped
from fedshift.errors import UserError
from fedshift.experiment.schema import AdapterSpec, MethodSpec
from fedshift.methods.finetune_rotation import RotationFineTune
from fedshift.methods.knn_per import KNNPer
from fedshift.runs.session import Session
from fedshift.runs.setup import Setup
from fedshift.store.state import State
from tests.methods.federations import (
    AWKWARD,
    CLASSES,
    DOUBLE,
    PLAIN,
    SHAPE,
    TRAIN,
    Awkward,
    Plain,
    copied,
    equal,
    equal_trees,
    far,
    federation,
    ran,
    run,
    watching,
)
from tests.systems.test_fedthe import trained

ARCHS = {"awkward": AWKWARD, "plain": PLAIN}
ROTATION = {"rotation.weight", "rotation.bias"}
NETWORK = set(AWKWARD.parameters) | set(AWKWARD.buffers)


def make_task(train: tuple[int, ...] = (5, 9, 12), val: int = 15, test: int = 10, unseen: int = 2) -> Task:
    """Images whose mean says something about their label, in splits that do not overlap."""
    sizes = [size for own in train for size in (own, val, test)] + [test] * unseen
    ids = torch.arange(sum(sizes))
    labels = rng.integers(2, ids, CLASSES)
    noise = rng.integers(1, ids, 160, SHAPE)
    images = (noise + 30 * labels[:, None, None, None]).to(torch.uint8)
    parts = ids.split(sizes)
    clients = tuple(
        Client(name, *parts[3 * i : 3 * i + 3]) for i, name in zip(range(len(train)), "abcdef", strict=False)
    )
    none = ids[:0]
    others = tuple(Client(f"new{i}", none, none, part) for i, part in enumerate(parts[3 * len(train) :]))
    return Task(images, labels, ids, tuple(map(str, range(CLASSES))), clients, others)


TASK = make_task()


def pixels(index: Tensor, task: Task = TASK) -> Tensor:
    return task.images[index].double() / 255


# ---- kNN-Per ------------------------------------------------------------------------------------------------------------
def votes(features: Tensor, stored: Tensor, labels: Tensor, neighbours: int, bandwidth: float) -> np.ndarray:
    """The memory's opinion, with a sort and two loops."""
    answers = np.zeros((len(features), CLASSES))
    for n, z in enumerate(features.tolist()):
        distances = sorted(
            (sum((a - b) ** 2 for a, b in zip(z, memory, strict=True)), label)
            for memory, label in zip(stored.tolist(), labels.tolist(), strict=True)
        )
        for distance, label in distances[:neighbours]:
            answers[n, label] += math.exp(-distance / (len(z) * bandwidth))
        answers[n] /= answers[n].sum()
    return answers


@pytest.mark.parametrize(("neighbours", "bandwidth"), [(10, 1.0), (1, 1.0), (3, 0.01), (100, 5.0)])
@pytest.mark.parametrize("lam", [0.0, 0.37, 1.0])
def test_the_prediction_is_the_mixture_of_the_model_and_a_brute_force_vote(
    neighbours: int, bandwidth: float, lam: float
) -> None:
    method = KNNPer(arch=AWKWARD, train=TRAIN, neighbours=neighbours, bandwidth=bandwidth)
    fed, _ = federation("knn-per", TASK, neighbours=neighbours, bandwidth=bandwidth)
    state, _ = run(fed)
    tree = fed.deploy(state).trained()["c"]
    tree = {**tree, "memory": {**tree["memory"], "lam": torch.tensor(lam, dtype=torch.float64)}}
    x = pixels(TASK.clients[2].test)
    with torch.no_grad():
        plain = AWKWARD(state.server["model"], x)
        output = method.predict(tree, x)
    vote = votes(plain.features, tree["memory"]["features"], tree["memory"]["labels"], neighbours, bandwidth)
    expected = (1 - lam) * plain.logits.softmax(1).numpy() + lam * vote
    assert np.abs(output.logits.exp().numpy() - expected).max() < 1e-9
    assert np.abs(output.logits.exp().sum(1).numpy() - 1).max() < 1e-9
    assert bool(output.logits.isfinite().all())  # also where nobody votes for a class
    assert torch.equal(output.features, plain.features)


@pytest.mark.parametrize("recipe", [{}, {"local_steps": 2}, {"last_batch": "wrap"}, {"augment": "shift-flip"}])
@pytest.mark.parametrize("arch", ARCHS)
def test_the_memory_holds_each_training_sample_once_seen_by_the_final_extractor(
    arch: str, recipe: dict[str, Any]
) -> None:
    fed, watch = federation("knn-per", TASK, arch=ARCHS[arch], train=replace(TRAIN, **recipe))
    state, _ = run(fed)
    assert state.locals == {}
    for client in TASK.clients:
        memory = fed.deploy(state).trained()[client.name]["memory"]
        assert memory["features"].shape == (len(client.train), ARCHS[arch].feature_size)
        with torch.no_grad():
            expected = ARCHS[arch].encode(state.server["model"], pixels(client.train))[0]
        found = sorted(zip(memory["features"].tolist(), memory["labels"].tolist(), strict=True))
        wanted = sorted(zip(expected.tolist(), TASK.labels[client.train].tolist(), strict=True))
        assert np.abs(np.array([row for row, _ in found]) - np.array([row for row, _ in wanted])).max() < 1e-12
        assert [label for _, label in found] == [label for _, label in wanted]
    assert {slot for reply in watch.replies[0].values() for slot in reply.up} == {"model"}


def best_by_hand(tree: Tree, arch: Arch, client: Client, task: Task) -> tuple[float, list[int]]:
    """The smallest of the weights 0, 0.01, ..., 1 with the most right answers on validation images."""
    with torch.no_grad():
        plain = arch(tree["model"], pixels(client.val, task))
    vote = votes(plain.features, tree["memory"]["features"], tree["memory"]["labels"], 10, 1.0)
    p, labels = plain.logits.softmax(1).numpy(), task.labels[client.val].numpy()
    hits = [int((((1 - i / 100) * p + i / 100 * vote).argmax(1) == labels).sum()) for i in range(101)]
    return hits.index(max(hits)) / 100, hits


@pytest.mark.parametrize("rounds", [1, 6])
@pytest.mark.parametrize("arch", ARCHS)
def test_the_weight_is_the_smallest_of_the_best_on_validation_data(arch: str, rounds: int) -> None:
    task = make_task((20, 30, 12, 8), val=25)
    fed, _ = federation("knn-per", task, train=replace(TRAIN, lr=0.2), arch=ARCHS[arch], rounds=rounds)
    state, _ = run(fed)
    deployed = fed.deploy(state).trained()
    chosen = []
    for client in task.clients:
        lam, hits = best_by_hand(deployed[client.name], ARCHS[arch], client, task)
        assert float(deployed[client.name]["memory"]["lam"]) == pytest.approx(lam, abs=1e-12)
        chosen.append((lam, len(set(hits))))
    assert any(lam > 0 for lam, _ in chosen)  # some memory was worth something
    assert any(kinds > 1 for _, kinds in chosen)
    stacked, _ = federation("knn-per", task, train=replace(TRAIN, lr=0.2), arch=ARCHS[arch], rounds=rounds)
    stacked.engine = Vmapped(DOUBLE)
    for name, tree in stacked.deploy(state).trained().items():
        assert torch.equal(tree["memory"]["lam"], deployed[name]["memory"]["lam"])
        assert far(tree["memory"], deployed[name]["memory"]) < 1e-12


def test_where_all_weights_are_as_good_as_each_other_the_model_speaks_alone() -> None:
    with pytest.raises(UserError, match="validation images, but no client has any"):
        federation("knn-per", make_task(val=0))
    one_class = make_task()
    level = replace(one_class, labels=torch.zeros_like(one_class.labels))
    fed, _ = federation("knn-per", level, train=replace(TRAIN, lr=0.5), rounds=5)
    state, _ = run(fed)
    assert all(float(tree["memory"]["lam"]) == 0 for tree in fed.deploy(state).trained().values())


@pytest.mark.parametrize("arch", ARCHS)
def test_without_weight_it_is_fedavg(arch: str) -> None:
    fed, watch = federation("knn-per", TASK, arch=ARCHS[arch])
    state, reports = run(fed)
    theirs, other = run(federation("fedavg", TASK, arch=ARCHS[arch])[0])
    assert equal(state.server["model"], theirs.server["model"])
    assert [(r.bytes_up, r.bytes_down, r.loss) for r in reports] == [(r.bytes_up, r.bytes_down, r.loss) for r in other]
    assert all(reply.local == {} for replies in watch.replies for reply in replies.values())
    method = fed.setup.method
    for client in TASK.clients:
        tree = fed.deploy(state).trained()[client.name]
        silent = {**tree, "memory": {**tree["memory"], "lam": torch.zeros((), dtype=torch.float64)}}
        x = pixels(client.test)
        expected = ARCHS[arch](theirs.server["model"], x).logits
        found = method.predict(silent, x).logits
        assert torch.equal(found.argmax(1), expected.argmax(1))
        assert float((found - expected.log_softmax(1)).abs().max()) < 1e-12


def test_unseen_clients_have_no_memory() -> None:
    fed, _ = federation("knn-per", TASK)
    state, _ = run(fed)
    deployment = fed.deploy(state)
    unseen = fed.unseen(deployment)
    assert deployment.given_bytes == 0
    for client in TASK.unseen:
        tree = unseen[client.name]
        assert tree["memory"]["features"].shape == (0, AWKWARD.feature_size)
        assert float(tree["memory"]["lam"]) == 0
        x = pixels(client.test)
        assert torch.equal(fed.setup.method.predict(tree, x).logits, AWKWARD(state.server["model"], x).logits)
    scores = fed.evaluate(
        {AWKWARD.name: fed.setup.adapter(AdapterSpec(name="none"), fed.setup.method)}, unseen, ["test"]
    )
    assert all(score.samples == 10 for score in scores.values())


def test_far_memories_and_sure_models_give_numbers() -> None:
    method = KNNPer(arch=PLAIN, train=TRAIN, bandwidth=1e-6)
    model = {name: 1e3 * leaf for name, leaf in PLAIN.init(0).items()}
    memory = {"features": 100 * torch.rand(7, 5), "labels": torch.arange(7) % CLASSES, "lam": torch.tensor(0.5)}
    for lam in (0.0, 0.5, 1.0):
        tree: Tree = {"model": model, "memory": {**memory, "lam": torch.tensor(lam)}}
        assert bool(method.predict(tree, torch.rand(9, *SHAPE)).logits.isfinite().all())


def test_deployed_is_a_pure_function_of_the_state() -> None:
    for name in ("knn-per", "finetune-rotation"):
        fed, _ = federation(name, TASK)
        state, _ = run(fed, 2)
        before = copied(state.server)
        first = fed.deploy(state).trained()
        assert all(equal_trees(fed.deploy(state).trained()[client], tree) for client, tree in first.items())
        assert equal_trees(state.server, before)
        assert equal_trees(fed.step(state)[0].server, ran(name, TASK).server)


@pytest.mark.parametrize("options", [{"neighbours": 0}, {"bandwidth": 0.0}, {"bandwidth": -1.0}])
def test_settings_that_cannot_be_meant_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="must be positive"):
        KNNPer(arch=PLAIN, train=TRAIN, **options)


# ---- rotation -----------------------------------------------------------------------------------------------------------
ONE_STEP = Train(lr=0.05, batch_size=4, local_steps=1)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_head_of_zeros_changes_nothing_in_the_first_step(arch: str) -> None:
    """It pulls at no feature: after one step the weights are plain fine-tuning's, bit by bit; after two they are not."""
    for steps in (1, 2):
        train = replace(ONE_STEP, local_steps=steps)
        ends = []
        for name in ("finetune", "finetune-rotation"):
            fed, _ = federation(name, TASK, train=train, arch=ARCHS[arch], rounds=1)
            state, _ = run(fed)
            ends.append((state, fed.deploy(state).trained()))
        assert equal(ends[0][0].server["model"], ends[1][0].server["model"])  # nor does the head travel in any round
        for client in TASK.clients:
            plain, rotating = (end[1][client.name]["model"] for end in ends)
            weights = [{n: tensors[n] for n in ARCHS[arch].parameters} for tensors in (plain, rotating)]
            assert equal(*weights) is (steps == 1)
            if steps == 2:
                assert far(*weights) > 1e-6
            head = ends[1][1][client.name]["rotation"]
            assert set(head) == ROTATION
            assert float(head["rotation.weight"].abs().max()) > 1e-6  # it learns from the first step on


@pytest.mark.parametrize("kind", [Awkward, Plain])
def test_the_personal_phase_trains_both_tasks_as_torch_does(kind: type[nn.Module]) -> None:
    arch = AWKWARD if kind is Awkward else PLAIN
    train = Train(lr=0.1, batch_size=4, local_epochs=2, momentum=0.9, weight_decay=0.01)
    watched, steps = watching(RotationFineTune)
    fed, _ = federation(watched, TASK, train=train, arch=arch, rounds=1)
    state, _ = run(fed)
    assert all("turn" not in batch and phase.name == "train" for _, batch, phase in steps)
    steps.clear()
    deployed = fed.deploy(state).trained()
    for client in TASK.clients:
        own = [(batch, phase) for before, batch, phase in steps if int(before["now"]["samples"]) == len(client.train)]
        assert {phase.name for _, phase in own} == {"finetune"}
        module = kind().double()
        module.load_state_dict({name: leaf.clone() for name, leaf in state.server["model"].items()})
        head = nn.Linear(arch.feature_size, 4).double()
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        seen: list[Tensor] = []
        module.out.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0]))
        optimiser = torch.optim.SGD([*module.parameters(), *head.parameters()], 0.1, momentum=0.9, weight_decay=0.01)
        turns = []
        for batch, phase in own:
            module.train(phase.batch_stats)
            turns += batch["turn"].tolist()
            turned = torch.stack(
                [torch.rot90(x, int(k), (1, 2)) for x, k in zip(batch["x"], batch["turn"], strict=True)]
            )
            optimiser.zero_grad()
            loss = F.cross_entropy(module((batch["x"] - 0.5) / 0.5), batch["y"])
            module((turned - 0.5) / 0.5)
            (loss + F.cross_entropy(head(seen[-1]), batch["turn"])).backward()
            optimiser.step()
        tree = deployed[client.name]
        assert far(tree["model"], dict(module.state_dict())) < 1e-12
        expected = {f"rotation.{name}": leaf.detach() for name, leaf in head.state_dict().items()}
        assert far(tree["rotation"], expected) < 1e-12
        assert set(turns) <= {0, 1, 2, 3}
        assert len(set(turns)) > 2


def test_the_rotation_head_never_travels() -> None:
    fed, watch = federation("finetune-rotation", TASK)
    state, reports = run(fed)
    _, other = run(federation("fedavg", TASK)[0])
    assert [(r.bytes_up, r.bytes_down) for r in reports] == [(r.bytes_up, r.bytes_down) for r in other]
    deployed = fed.deploy(state).trained()
    messages = [tree for down in watch.downs for tree in down.values()]
    messages += [reply.up for replies in watch.replies for reply in replies.values()]
    for tree in messages:
        assert {slot: set(leaves) for slot, leaves in tree.items()} in ({"model": NETWORK}, {})
    assert set(state.server) == {"model"}
    assert equal(state.server["model"], ran("fedavg", TASK).server["model"])
    for tree in deployed.values():
        assert set(tree) == set(RotationFineTune.provides) == {"model", "global", "rotation"}
        assert set(tree["model"]) == NETWORK
        assert equal(tree["global"], state.server["model"])
    names = {client: tree["rotation"]["rotation.bias"] for client, tree in deployed.items()}
    assert far({"b": names["a"]}, {"b": names["b"]}) > 1e-6  # everybody has one of their own


def test_unseen_clients_have_an_untrained_rotation_head_and_the_global_model() -> None:
    fed, _ = federation("finetune-rotation", TASK)
    state, _ = run(fed)
    deployment = fed.deploy(state)
    unseen = fed.unseen(deployment)
    assert deployment.given_bytes == 0
    for tree in unseen.values():
        assert equal(tree["model"], state.server["model"])
        assert set(tree["rotation"]) == ROTATION
        assert all(float(leaf.abs().max()) == 0 for leaf in tree["rotation"].values())
        assert tree["rotation"]["rotation.weight"].shape == (4, AWKWARD.feature_size)


def test_test_time_training_can_follow() -> None:
    fed, _ = federation("finetune-rotation", TASK)
    state, _ = run(fed)
    adapter = fed.setup.adapter(AdapterSpec(name="ttt", lr=0.1, copies=8), fed.setup.method)
    deployed = {**fed.deploy(state).trained(), **fed.unseen(fed.deploy(state))}
    scores = fed.evaluate({AWKWARD.name: adapter}, deployed, ["test"])
    assert {score.samples for score in scores.values()} == {10}
    plain = fed.setup.adapter(AdapterSpec(name="none"), fed.setup.method)
    before = fed.evaluate({AWKWARD.name: plain}, deployed, ["test"])
    assert any(abs(scores[key].loss - before[key].loss) > 1e-6 for key in scores)


def test_images_that_are_not_square_are_refused() -> None:
    wide = Arch.of(lambda: nn.Sequential(nn.Flatten(), nn.Linear(24, CLASSES)), (1, 4, 6))
    with pytest.raises(UserError, match="square, not 6x4"):
        RotationFineTune.build(wide, {})
    assert RotationFineTune.build(PLAIN, {}) is PLAIN
    assert METHODS["finetune"].make.build(wide, {}) is wide


@pytest.mark.grid
def test_real_digits_teach_the_head_which_way_is_up() -> None:
    """Twenty personal epochs on a trained network: images that were not trained on are put upright better than by chance."""
    made = trained("finetune-rotation", rounds=8)
    method = replace(made.method, epochs=20)
    setup = Setup(MethodSpec(name="finetune-rotation"), {"cnn": method}, method.train)
    compute = Compute()
    fed = Session(setup, made.task, Sequential(compute), compute, seed=0, rounds=8)
    start = {"model": next(iter(made.deployed.values()))["global"]}
    right = count = 0
    for name, tree in fed.deploy(State(8, start)).trained().items():
        x = made.task.images[made.task.client(name).test].float() / 255
        for turn in range(4):
            with torch.no_grad():
                features = method.arch.encode(tree["model"], torch.rot90(x, turn, (2, 3)))[0]
            logits = features @ tree["rotation"]["rotation.weight"].T + tree["rotation"]["rotation.bias"]
            right += int((logits.argmax(1) == turn).sum())
            count += len(x)
    assert right / count > 0.4  # chance is a quarter
