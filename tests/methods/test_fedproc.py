"""FedProc: prototypes sample by sample, the first round, classes that are missing, and what travels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedshift.core import rng
from fedshift.core.arch import Arch
from fedshift.core.context import Context
from fedshift.core.grad import gradient
from fedshift.core.registry import METHODS
from fedshift.core.tree import Tensors, drop, float_bytes, pick
from fedshift.data.task import Client, Task
from fedshift.methods.fedavg import FedAvg
from fedshift.methods.fedproc import FedProc, prototype_losses
from fedshift.store.state import State
from fedshift.store.trees import load, save
from tests.conftest import refusal
from tests.methods.federations import (
    AWKWARD,
    CLASSES,
    DOUBLE,
    HEAD,
    PLAIN,
    TRAIN,
    Awkward,
    Plain,
    equal,
    equal_trees,
    far,
    federation,
    make_task,
    module_of,
    ran,
    run,
    server_context,
    watching,
)

ARCHS: dict[str, tuple[Arch, type[nn.Module]]] = {"awkward": (AWKWARD, Awkward), "plain": (PLAIN, Plain)}
SIZED = make_task((5, 9, 12), unseen=2)
ROUNDS = 3


def slow_contrast(z: list[float], label: int, prototypes: Mapping[int, list[float]]) -> float:
    """One sample, with numbers."""
    if label not in prototypes:
        return 0.0

    def dot(a: list[float], b: list[float]) -> float:
        return sum(x * y for x, y in zip(a, b, strict=True)) / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))

    return -math.log(
        math.exp(dot(z, prototypes[label])) / sum(math.exp(dot(z, other)) for other in prototypes.values())
    )


def class_means(features: Tensor, labels: Tensor) -> dict[int, tuple[Tensor, int]]:
    """Mean feature and count of each class that is there, sample by sample."""
    groups: dict[int, list[Tensor]] = {}
    for feature, label in zip(features, labels.tolist(), strict=True):
        groups.setdefault(label, []).append(feature)
    return {label: (torch.stack(rows).sum(0) / len(rows), len(rows)) for label, rows in groups.items()}


def own_means(arch: Arch, model: Tensors, client: Client, task: Task = SIZED) -> dict[int, tuple[Tensor, int]]:
    features = arch.encode(model, task.images[client.train].double() / 255)[0]
    return class_means(features, task.labels[client.train])


def without(task: Task, client: int, label: int) -> Task:
    """The task in which this client has no image of this class."""
    clients = list(task.clients)
    own = clients[client].train
    clients[client] = replace(clients[client], train=own[task.labels[own] != label])
    return replace(task, clients=tuple(clients))


# ---- the loss -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("missing", [(), (1,), (0, 2)])
def test_the_contrast_is_the_definition_sample_by_sample(missing: tuple[int, ...]) -> None:
    features = rng.normal(1, torch.arange(7), (4,)).double()
    prototypes = rng.normal(2, torch.arange(3), (4,)).double()
    prototypes[list(missing)] = 0
    labels = torch.tensor([0, 1, 2, 2, 1, 0, 0])
    found = prototype_losses(features, labels, prototypes)
    present = {c: prototypes[c].tolist() for c in range(3) if c not in missing}
    expected = [slow_contrast(z, label, present) for z, label in zip(features.tolist(), labels.tolist(), strict=True)]
    assert found.tolist() == pytest.approx(expected, abs=1e-12)


def test_lengths_do_not_matter_and_directions_do() -> None:
    features, prototypes = (rng.normal(seed, torch.arange(5), (4,)).double() for seed in (1, 2))
    labels = torch.arange(5)
    found = prototype_losses(features, labels, prototypes)
    lengths = torch.tensor([0.1, 1.0, 3.0, 50.0, 7.0], dtype=torch.float64)[:, None]
    assert torch.allclose(prototype_losses(features * lengths, labels, prototypes / lengths), found, rtol=1e-12)
    assert float((prototype_losses(-features, labels, prototypes) - found).abs().max()) > 0.1
    alike = prototype_losses(features, labels, prototypes[:1].expand(5, 4))
    assert torch.allclose(alike.exp(), torch.full((5,), 5.0, dtype=torch.float64))


def test_no_prototypes_have_no_loss_and_no_slope() -> None:
    features = {"z": rng.normal(1, torch.arange(4), (3,)).double()}
    labels = torch.tensor([0, 1, 2, 0])
    grads, value, _ = gradient(
        lambda t: (prototype_losses(t["z"], labels, torch.zeros(3, 3).double()).sum(), None), features
    )
    assert float(value) == 0
    assert equal(grads, {"z": torch.zeros(4, 3, dtype=torch.float64)})


# ---- against torch ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ARCHS)
def test_rounds_are_torchs(name: str) -> None:
    """Every sample's loss by itself, prototypes kept in dictionaries, averages in loops."""
    arch, kind = ARCHS[name]
    watched, steps = watching(FedProc)
    fed, watch = federation(watched, SIZED, replace(TRAIN, local_epochs=2), arch, rounds=ROUNDS, full=4)
    state = fed.start()
    common: dict[int, list[float]] = {}
    for number in range(ROUNDS):
        received = state.server["model"]
        steps.clear()
        state, _ = fed.step(state)
        sums: dict[int, Tensor] = {}
        counts: dict[int, int] = {}
        for client in SIZED.clients:
            table = {c: torch.tensor(row, dtype=torch.float64) for c, row in common.items()}
            module = module_of(received, kind)
            body, head = module, module.out
            optimiser = torch.optim.SGD(module.parameters(), TRAIN.lr)
            for before, batch, phase in steps:
                if int(before["now"]["samples"]) != len(client.train):
                    continue
                module.train(phase.batch_stats)
                optimiser.zero_grad()
                body.out = nn.Identity()
                features = body((batch["x"] - 0.5) / 0.5)
                body.out = head
                total = torch.zeros((), dtype=torch.float64)
                share = number / 4 if number else 1.0  # nobody has a prototype in round 0
                for z, label in zip(features, batch["y"].tolist(), strict=True):
                    total = total - share * head(z).softmax(0)[label].log()
                    if not number:
                        continue
                    dots = {c: z @ row / (z.norm() * row.norm()) for c, row in table.items()}
                    total = total - (1 - share) * (dots[label].exp() / sum(d.exp() for d in dots.values())).log()
                (total / len(features)).backward()
                optimiser.step()
            after = dict(module.state_dict())
            assert far(watch.replies[number][client.name].up["model"], after) < 1e-10
            for c, (mean, count) in own_means(arch, after, client).items():
                sums[c] = sums.get(c, torch.zeros_like(mean)) + count * mean
                counts[c] = counts.get(c, 0) + count
        common = {c: (sums[c] / counts[c]).tolist() for c in sums}
        assert set(common) == set(range(CLASSES))
        expected = torch.tensor([common[c] for c in range(CLASSES)], dtype=torch.float64)
        assert torch.allclose(state.server["prototypes"]["global"], expected, rtol=0, atol=1e-10)


def test_where_the_loss_has_gradients() -> None:
    """The contrast alone moves the encoder; cross-entropy alone is FedAvg's."""
    watched, steps = watching(FedProc)
    run(federation(watched, SIZED)[0], 2)
    state, batch, phase = steps[-1]
    for alpha, touched in ((0.0, set(AWKWARD.parameters) - HEAD), (1.0, set(AWKWARD.parameters))):
        method = FedProc(AWKWARD, TRAIN, alpha=alpha)
        rest = drop(state["model"], AWKWARD.parameters)
        live = pick(state["model"], AWKWARD.parameters)
        grads, _, _ = gradient(lambda t, m=method, r=rest: m.loss(state, {**r, **t}, batch, phase), live)  # type: ignore[misc]
        assert {entry for entry, grad in grads.items() if float(grad.abs().max()) > 0} == touched


# ---- limits and rounds --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ARCHS)
def test_a_share_of_one_is_fedavg(name: str) -> None:
    train = replace(TRAIN, momentum=0.9)
    arch = ARCHS[name][0]
    found = ran("fedproc", SIZED, train, arch, alpha=1.0).server["model"]
    plain = ran("fedavg", SIZED, train, arch).server["model"]
    assert far(found, plain) < 1e-14
    assert far(found, ran("fedproc", SIZED, train, arch).server["model"]) > 1e-3


@pytest.mark.parametrize("options", [{}, {"alpha": 0.0}])
def test_round_0_is_fedavgs(options: dict[str, Any]) -> None:
    """Nobody has a prototype yet, whatever the share is later."""
    fed, watch = federation("fedproc", SIZED, **options)
    plain, other = federation("fedavg", SIZED)
    run(fed, 2)
    run(plain, 2)
    for client in "abc":
        first, second = (replies[client].up["model"] for replies in watch.replies)
        assert equal(first, other.replies[0][client].up["model"])
        assert far(second, other.replies[1][client].up["model"]) > 1e-5


def test_the_share_rises_with_the_rounds_until_there_is_cross_entropy_alone() -> None:
    assert METHODS["fedproc"].options == {"alpha": None, "full": 100}
    watched, steps = watching(FedProc)
    fed, _ = federation(watched, SIZED, rounds=6, full=4)
    run(fed)
    method = fed.setup.method
    seen = []
    for state, batch, phase in steps:
        if int(state["now"]["round"]) == 0:
            continue
        value, _ = method.loss(state, state["model"], batch, phase)
        plain, _ = FedAvg(AWKWARD, TRAIN).loss(state, state["model"], batch, phase)
        features = method.outputs(state["model"], batch, phase).features
        contrast = prototype_losses(features, batch["y"], state["prototypes"]["global"]).mean()
        seen.append(round(float((value - contrast) / (plain - contrast)), 6))
    assert sorted(set(seen)) == [0.25, 0.5, 0.75, 1.0]


def test_clients_look_at_their_classes_after_training() -> None:
    method = FedProc(AWKWARD, TRAIN)
    names = [[phase.name for phase in method.phases(Context(number, 3, 2))] for number in range(3)]
    assert names == [["train", "prototypes"]] * 3
    for phase in method.phases(Context(0, 3, 2)):
        assert (phase.kind == "fold") == (phase.name != "train")
        assert (phase.inputs, phase.batch_stats) == (("x", True) if phase.name == "train" else ("features", False))


def test_features_come_closer_to_their_prototype() -> None:
    fed, _ = federation("fedproc", SIZED, replace(TRAIN, local_epochs=10), PLAIN, alpha=0.0, rounds=5)
    values = []
    state = fed.start()
    for _ in range(5):
        state, _ = fed.step(state)
        x, y = SIZED.images[:26].double() / 255, SIZED.labels[:26]
        features = PLAIN.encode(state.server["model"], x)[0]
        values.append(float(prototype_losses(features, y, state.server["prototypes"]["global"]).mean()))
    assert values[-1] < values[0]


# ---- classes that are missing -------------------------------------------------------------------------------------------
def test_a_class_counts_where_it_is() -> None:
    task = without(without(SIZED, 0, 1), 2, 1)
    fed, watch = federation("fedproc", task)
    state, _ = run(fed, 1)
    own = {client: watch.replies[0][client].up["own"] for client in "abc"}
    for name in "ac":
        assert float(own[name]["count"][1]) == 0
        assert not bool(own[name]["mean"][1].any())
    assert torch.allclose(state.server["prototypes"]["global"][1], own["b"]["mean"][1], rtol=0, atol=1e-14)
    labels = task.labels[task.clients[1].train]
    assert own["b"]["count"].tolist() == [int((labels == c).sum()) for c in range(CLASSES)]


def test_a_class_nobody_has_this_round_keeps_its_prototype_and_one_nobody_has_has_none() -> None:
    method = FedProc(PLAIN, TRAIN)
    model = {n: leaf.double() for n, leaf in PLAIN.init(0).items()}
    size = PLAIN.feature_size
    old = rng.normal(1, torch.arange(CLASSES), (size,)).double()
    old[2] = 0
    server = {"model": model, "prototypes": {"global": old}}
    means = rng.normal(2, torch.arange(2), (CLASSES, size)).double()
    counts = torch.tensor([[3.0, 0.0, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    ups = {c: {"model": model, "own": {"mean": means[i], "count": counts[i]}} for i, c in enumerate("ab")}
    after = method.aggregate(server, ups, server_context([1.0, 1.0]))[0]["prototypes"]["global"]
    assert torch.allclose(after[0], 0.75 * means[0, 0] + 0.25 * means[1, 0], rtol=0, atol=1e-15)
    assert torch.equal(after[1], old[1])
    assert not bool(after[2].any())


def test_a_client_with_one_class_or_one_image_is_an_ordinary_client() -> None:
    single = without(without(make_task((12, 9, 1)), 0, 1), 0, 2)
    assert len(single.clients[0].train) >= 2
    for arch, _ in ARCHS.values():
        state, reports = run(federation("fedproc", single, arch=arch)[0])
        assert all(report.diverged == () for report in reports)
        assert all(bool(leaf.isfinite().all()) for leaf in state.server["model"].values())


# ---- what travels and what is served ------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ARCHS)
def test_the_model_and_the_prototypes_travel(name: str) -> None:
    arch = ARCHS[name][0]
    fed, watch = federation("fedproc", SIZED, arch=arch)
    state, reports = run(fed)
    model = sum(leaf.numel() for leaf in state.server["model"].values() if leaf.is_floating_point())
    table = CLASSES * arch.feature_size
    for downs, replies in zip(watch.downs, watch.replies, strict=True):
        for client in "abc":
            assert set(downs[client]) == {"model", "prototypes"}
            assert set(replies[client].up) == {"model", "own"}
            assert float_bytes(downs[client]) == 8 * (model + table)
            assert float_bytes(replies[client].up) == 8 * (model + table + CLASSES)
            assert replies[client].local == {}
    assert [report.bytes_down for report in reports] == [3 * 8 * (model + table)] * ROUNDS


def test_everybody_serves_with_the_global_model() -> None:
    fed, _ = federation("fedproc", SIZED)
    state, _ = run(fed)
    served = {**fed.deploy(state).trained(), **fed.unseen(fed.deploy(state))}
    assert set(served) == {"a", "b", "c", "new0", "new1"}
    for tree in served.values():
        assert equal_trees(tree, {"model": state.server["model"]})
    unseen = replace(fed.context(state.round), stage="unseen")
    assert set(fed.setup.method.broadcast(state.server, "new0", unseen)) == {"model"}


def test_prototypes_survive_a_checkpoint(tmp_path: Any) -> None:
    fed, _ = federation("fedproc", SIZED, participation=0.6, rounds=5)
    whole, _ = run(fed)
    half, _ = run(fed, 2)
    save(tmp_path / "state", half.trees(), {})
    state = State.of(load(tmp_path / "state")[0], 2, DOUBLE.device)
    for _ in range(3):
        state, _ = fed.step(state)
    assert equal_trees(state.server, whole.server)


@pytest.mark.parametrize("alpha", [-0.1, 1.5])
def test_settings_that_cannot_be_meant(alpha: float) -> None:
    expected = f"method 'fedproc': alpha must lie in [0, 1], not {alpha}"
    assert refusal(METHODS, "method", "fedproc", {"alpha": alpha}, arch=PLAIN, train=TRAIN) == expected
