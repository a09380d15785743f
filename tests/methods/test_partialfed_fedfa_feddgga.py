"""PartialFed, FedFA and FedDG-GA: slow references in plain torch, limits, messages, unseen clients."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedshift.core.arch import Arch
from fedshift.core.context import ClientInfo, Context, Phase
from fedshift.core.method import Batch, Method
from fedshift.core.registry import METHODS, MODELS
from fedshift.core.tree import Tensors, Tree, drop, float_bytes, pick, weighted_mean
from fedshift.data.task import Task
from fedshift.engines.sequential import Sequential
from fedshift.engines.vmapped import Vmapped
from fedshift.errors import UserError
from fedshift.methods.fedavg import FedAvg
from fedshift.methods.fedbn import FedBN
from fedshift.methods.feddg_ga import FedDGGA
from fedshift.methods.fedfa import Augment, FedFA, inserted, stages
from fedshift.methods.partialfed import PartialFed
from fedshift.models.mlp import Headed
from fedshift.runs.session import Session
from fedshift.store.state import State
from tests.conftest import refusal, tiny_arch, tiny_train
from tests.methods.federations import (
    AWKWARD,
    CLASSES,
    CTX,
    DOUBLE,
    HEAD,
    NO_IDS,
    NORM,
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
    module_of,
    ran,
    run,
    server_context,
    torch_training,
    watching,
)
from tests.methods.test_knn_rotation import make_task
from tests.test_engines_agree import TASK as RAGGED
from tests.test_engines_agree import check_equal, federate

TASK = make_task()  # three clients of 5, 9 and 12 training and 15 validation images, two unseen ones
NAMES = [client.name for client in TASK.clients]
SIZES = [len(client.train) for client in TASK.clients]
KINDS: dict[str, tuple[Arch, type[nn.Module]]] = {"awkward": (AWKWARD, Awkward), "plain": (PLAIN, Plain)}
ENTRIES = {*AWKWARD.parameters, *AWKWARD.buffers}
MOMENTS = {"momentum": 0.9, "weight_decay": 0.1}


def staged(norm: bool = True) -> nn.Module:
    """Two stages, the second with pooling."""
    layers: list[nn.Module] = []
    for before, after in ((1, 3), (3, 4)):
        layers.append(nn.Conv2d(before, after, 3, padding=1, bias=not norm))
        layers += [nn.BatchNorm2d(after), nn.ReLU()] if norm else [nn.ReLU()]
    return Headed(nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten()), 16, CLASSES)


STAGED = {norm: Arch.of(lambda norm=norm: staged(norm), SHAPE, "staged") for norm in (True, False)}
LAYERS = {True: {"body.2_augment": 3, "body.6_augment": 4}, False: {"body.1_augment": 3, "body.4_augment": 4}}
CHANNELS = 7


def without_val(task: Task, *names: str) -> Task:
    """The task in which these clients have no validation images; all of them, if none is named."""
    none = torch.zeros(0, dtype=torch.int64)
    chosen = names or NAMES
    return replace(task, clients=tuple(replace(c, val=none) if c.name in chosen else c for c in task.clients))


def pixels(index: Tensor) -> Tensor:
    return TASK.images[index].double() / 255


def by_client(steps: list[tuple[Tree, Batch, Phase]]) -> dict[str, list[tuple[Tree, Batch, Phase]]]:
    """One round's steps of each client; the clients' sizes differ."""
    return {
        name: [step for step in steps if int(step[0]["now"]["samples"]) == size]
        for name, size in zip(NAMES, SIZES, strict=True)
    }


def mean_of(models: list[Tensors], weights: list[float]) -> Tensors:
    """The weighted mean, entry by entry; counters keep the largest value."""
    return {
        name: sum((w * m[name] for w, m in zip(weights, models, strict=True)), torch.zeros_like(leaf))
        if leaf.is_floating_point()
        else max(m[name] for m in models)
        for name, leaf in models[0].items()
    }


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, TRAIN.lr, **MOMENTS)


# ---- PartialFed, fix ----------------------------------------------------------------------------------------------------
class Parted(FedBN):
    """FedBN and FedPer at once: normalisation layers and head never travel."""

    def private(self, ctx: Context) -> frozenset[str]:
        return self.arch.norm | self.arch.head


@pytest.mark.parametrize("arch", KINDS)
def test_fixed_layers_are_as_if_they_never_travelled(arch: str) -> None:
    task, network = make_task(), KINDS[arch][0]
    fed, _ = federation("partialfed", task, replace(TRAIN, **MOMENTS), network, mode="fix")
    other, _ = federation(Parted, task, replace(TRAIN, **MOMENTS), network)
    state, expected = run(fed)[0], run(other)[0]
    own = network.norm | network.head
    assert own >= (NORM | HEAD if arch == "awkward" else HEAD)
    assert equal(drop(state.server["model"], own), drop(expected.server["model"], own))
    served, wanted = fed.deploy(state).trained(), other.deploy(expected).trained()
    for name in NAMES:
        assert equal(served[name]["model"], wanted[name]["model"])
        assert equal(state.locals[name]["kept"], expected.locals[name]["model"])
    assert far(served["a"]["model"], served["b"]["model"]) > 1e-3


def test_fixed_layers_travel_all_the_same_and_are_what_an_unseen_client_has() -> None:
    fed, watch = federation("partialfed", TASK, mode="fix")
    state, _ = run(fed)
    ups = [reply.up for reply in watch.replies[-1].values()]
    assert all(set(up) == {"model"} and set(up["model"]) == ENTRIES for up in ups)
    expected = mean_of([up["model"] for up in ups], [size / sum(SIZES) for size in SIZES])
    assert far(state.server["model"], expected) < 1e-12
    assert set(state.locals["a"]) == {"kept", "past"}
    deployment = fed.deploy(state)
    unseen = fed.unseen(deployment)
    assert set(unseen) == {"new0", "new1"}
    assert all(equal(tree["model"], state.server["model"]) for tree in unseen.values())
    assert far(deployment.trained()["a"]["model"], state.server["model"]) > 1e-3


@pytest.mark.parametrize("mode", ["fix", "adaptive"])
def test_who_has_never_trained_serves_with_what_it_receives_and_starts_from_it(mode: str) -> None:
    watched, steps = watching(PartialFed)
    fed, watch = federation(watched, TASK, rounds=4, participation=0.34, mode=mode)
    state, seen = fed.start(), set()
    for _ in range(4):
        served = fed.deploy(state).trained()
        assert all(equal(served[name]["model"], state.server["model"]) for name in set(NAMES) - seen)
        steps.clear()
        state, _ = fed.step(state)
        (name,) = watch.downs[-1]
        before, _, _ = next(step for step in steps if step[2].slot == "model")
        if name not in seen:
            assert equal(before["model"], watch.downs[-1][name]["model"])
            assert "policy" not in state.locals[name] or not state.locals[name]["policy"]["logits"].any()
        seen.add(name)
    assert len(seen) > 1  # somebody was late


# ---- PartialFed, adaptive -----------------------------------------------------------------------------------------------
def torch_policy(
    module: nn.Module, received: Tensors, local: Tensors, logits: Tensor, batches: list[Batch], heat: float
) -> Tensor:
    """Policy steps with torch's optimiser, layer by layer, with both straight-through gates."""
    leaf = logits.clone().requires_grad_()
    optimiser = torch.optim.Adam([leaf], 0.1)
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in received))
    module = copy.deepcopy(module).eval()
    for batch in batches:
        optimiser.zero_grad()
        noise = -torch.log(-torch.log(batch["gumbel"][0]))
        tensors: Tensors = {}
        for number, prefix in enumerate(modules):
            soft = torch.softmax((leaf[number] + noise[number]) / heat, 0)
            hard = torch.zeros(2, dtype=soft.dtype)
            hard[int(soft.argmax())] = 1
            gates = hard - soft.detach() + soft
            for name in (n for n in received if n.rpartition(".")[0] == prefix):
                if name in dict(module.named_parameters()):
                    tensors[name] = gates[0] * received[name] + gates[1] * local[name]
                else:  # torch differentiates nothing by running statistics
                    tensors[name] = (received, local)[int(soft.argmax())][name]
        F.cross_entropy(functional_call(module, tensors, ((batch["x"] - 0.5) / 0.5,)), batch["y"]).backward()
        optimiser.step()
    return leaf.detach()


@pytest.mark.parametrize("arch", KINDS)
def test_adaptive_rounds_are_those_of_plain_torch(arch: str) -> None:
    network, kind = KINDS[arch]
    watched, steps = watching(PartialFed)
    fed, _ = federation(watched, TASK, replace(TRAIN, **MOMENTS), network, rounds=4)
    state = fed.start()
    server = state.server["model"]
    prefixes = list(dict.fromkeys(name.rpartition(".")[0] for name in (*network.parameters, *network.buffers)))
    locals_ = dict.fromkeys(NAMES, server)
    policies = {name: torch.zeros(len(prefixes), 2, dtype=torch.float64) for name in NAMES}
    kept = []
    for heat in (5.0, 3.5, 2.0, 0.5):
        steps.clear()
        state, _ = fed.step(state)
        for name, own in by_client(steps).items():
            first, second = ([b for _, b, p in own if p.slot == slot] for slot in ("policy", "model"))
            assert len(first) == 5
            ordered = {n: server[n] for n in (*network.parameters, *network.buffers)}
            logits = torch_policy(module_of(server, kind), ordered, locals_[name], policies[name], first, heat)
            choice = {p: bool(logits[i, 1] > logits[i, 0] + 1e-9) for i, p in enumerate(prefixes)}  # not by rounding
            kept.append(sum(choice.values()))
            start = {n: (locals_[name] if choice[n.rpartition(".")[0]] else server)[n] for n in server}
            module = module_of(start, kind)
            torch_training(module, second, sgd)
            policies[name], locals_[name] = logits, dict(module.state_dict())
            assert far(state.locals[name]["kept"], locals_[name]) < 1e-9
            assert float((state.locals[name]["policy"]["logits"] - logits).abs().max()) < 1e-9
        server = mean_of(list(locals_.values()), [size / sum(SIZES) for size in SIZES])
        assert far(state.server["model"], server) < 1e-9
        for name, tree in fed.deploy(state).trained().items():
            wanted = policies[name][:, 1] > policies[name][:, 0] + 1e-9
            chosen = {p: bool(wanted[i]) for i, p in enumerate(prefixes)}
            expected = {n: (locals_[name] if chosen[n.rpartition(".")[0]] else server)[n] for n in server}
            assert far(tree["model"], expected) < 1e-9
            assert far(tree["global"], server) < 1e-9
    assert kept[:3] == [0, 0, 0]  # in the first round both are the same
    assert 0 < sum(kept) < 9 * len(prefixes)  # some layers were kept and some loaded


def test_a_layer_is_what_shares_a_module() -> None:
    method = PartialFed(arch=AWKWARD, train=TRAIN)
    assert set(method.layers) == ENTRIES
    groups = [{n for n, number in method.layers.items() if number == i} for i in range(5)]
    assert sorted(map(sorted, groups)) == sorted(
        map(
            sorted,
            [
                {"bn_not.weight"},
                {n for n in NORM if n.startswith("foo")},
                {"downsample.0.weight"},
                {n for n in NORM if n.startswith("downsample.1")},
                HEAD,
            ],
        )
    )


def test_the_policy_says_layer_by_layer_what_is_served_and_trained() -> None:
    method = PartialFed(arch=AWKWARD, train=TRAIN)
    received, kept = (to_double(AWKWARD.init(seed)) for seed in (1, 2))
    local = {"kept": kept, "past": {"known": torch.tensor(True)}}
    for chosen in ({"foo"}, {"out", "bn_not"}, set(), {"bn_not", "foo", "downsample.0", "downsample.1", "out"}):
        logits = torch.zeros(5, 2, dtype=torch.float64)
        for name, number in method.layers.items():
            logits[number, 1] = 0.1 if name.rpartition(".")[0] in chosen else 0.0  # a tie is global
        own = {**local, "policy": {"logits": logits}}
        expected = {n: (kept if n.rpartition(".")[0] in chosen else received)[n] for n in received}
        assert equal(method.deployed({"model": received}, own)["model"], expected)
        assert equal(method.begin({"model": received}, own)["model"], expected)


def to_double(tensors: Tensors) -> Tensors:
    return {name: leaf.double() if leaf.is_floating_point() else leaf for name, leaf in tensors.items()}


def test_the_policy_keeps_what_validation_images_like() -> None:
    """Two models that differ in their heads, one of which has learnt the opposite: the other one is chosen."""
    fed, _ = federation("fedavg", TASK, replace(TRAIN, local_epochs=20, lr=0.1))
    good = run(fed)[0].server["model"]
    bad = {name: -leaf if name in HEAD else leaf for name, leaf in good.items()}
    method = PartialFed(arch=AWKWARD, train=TRAIN)
    index = TASK.clients[0].val
    zero, one = (torch.tensor(value, dtype=torch.float64) for value in (0.0, 1.0))
    around = {"now": {"round": zero, "rounds": one, "decay": one}, "log": {"loss": zero, "steps": zero}}
    phase = method.phases(CTX)[0]
    assert phase.optim is not None
    for received, kept in ((bad, good), (good, bad)):
        policy = {"logits": torch.zeros(5, 2, dtype=torch.float64)}
        local = {"kept": kept, "past": {"known": torch.tensor(True)}, "policy": policy}
        state = {**method.begin({"model": received}, local), **around, "optim": phase.optim.memory(policy)}
        assert equal(state["model"], received)
        for step in range(30):
            draws = torch.rand(15, 5, 2, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            state = method.client_step(state, {"x": pixels(index), "y": TASK.labels[index], "gumbel": draws}, phase)
        assert equal(state["model"], good)
        moved = state["policy"]["logits"].any(1)
        assert [bool(moved[number]) for number in method.layers.values()] == [n in HEAD for n in method.layers]


def test_without_steps_of_the_policy_it_is_fedavg() -> None:
    fed, _ = federation("partialfed", TASK, policy_steps=0)
    state, _ = run(fed)
    assert equal(state.server["model"], ran("fedavg", TASK).server["model"])
    assert all(equal(tree["model"], state.server["model"]) for tree in fed.deploy(state).trained().values())


def test_without_a_rate_the_policy_moves_nothing_and_learns_from_validation_images_only() -> None:
    watched, steps = watching(PartialFed)
    fed, _ = federation(watched, TASK, policy_lr=0.0)
    state, _ = run(fed)
    assert equal(state.server["model"], ran("fedavg", TASK).server["model"])
    for name, own in by_client(steps).items():
        client = TASK.client(name)
        for slot, part in (("policy", client.val), ("model", client.train)):
            assert {i for _, b, p in own if p.slot == slot for i in b["index"].tolist()} <= set(part.tolist())
        assert {p.slot for _, _, p in own} == {"policy", "model"}


def test_a_step_of_the_policy_leaves_both_sources_alone() -> None:
    watched, steps = watching(PartialFed)
    run(federation(watched, TASK)[0])
    for (before, _, phase), (after, _, following) in pairwise(steps):
        if phase.slot == "policy":
            assert equal(before["global"], after["global"])
            assert equal(before["kept"], after["kept"])
            for name, leaf in after["model"].items():
                assert torch.equal(leaf, after["global"][name]) or torch.equal(leaf, after["kept"][name])
        assert following.batch_stats == (following.slot == "model")


def test_a_client_without_validation_images_loads_everything() -> None:
    fed, _ = federation("partialfed", without_val(TASK, "b"), rounds=4)
    state, _ = run(fed)
    assert not state.locals["b"]["policy"]["logits"].any()
    assert state.locals["a"]["policy"]["logits"].any()
    assert equal(fed.deploy(state).trained()["b"]["model"], state.server["model"])


@pytest.mark.parametrize("value", [0.0, 1 - 2.0**-24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_ends_of_the_uniform_numbers_do_no_harm(value: float, dtype: torch.dtype) -> None:
    method = PartialFed(arch=PLAIN, train=TRAIN)
    received, kept = ({n: t.to(dtype) for n, t in PLAIN.init(seed).items()} for seed in (1, 2))
    now = {"round": torch.zeros((), dtype=dtype), "rounds": torch.ones((), dtype=dtype)}
    logits = torch.zeros(2, 2, dtype=dtype, requires_grad=True)
    batch = {"x": torch.rand(3, *SHAPE, dtype=dtype), "y": torch.tensor([0, 1, 2])}
    batch["gumbel"] = torch.full((3, 2, 2), value, dtype=dtype)
    batch["gumbel"][:, :, 1] = 0.5
    state = {"now": now, "global": received, "kept": kept}
    loss, buffers = method.loss(state, {"logits": logits}, batch, method.phases(CTX)[0])
    loss.backward()
    assert buffers == {}
    assert bool(loss.isfinite())
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())


# ---- FedFA: the layer ---------------------------------------------------------------------------------------------------
def redrawn(x: Tensor, noise: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """Feature augmentation sample by sample and channel by channel, and the means over the batch of what it saw."""
    images, channels = x.shape[:2]
    mu, sigma = ([[x.new_zeros(())] * channels for _ in range(images)] for _ in range(2))
    for n in range(images):
        for c in range(channels):
            values = x[n, c].flatten()
            mu[n][c] = values.sum() / len(values)
            square = sum((value - mu[n][c]) ** 2 for value in values) / max(len(values) - 1, 1)
            sigma[n][c] = (square + 1e-6) ** 0.5
    rows = []
    for n in range(images):
        maps = []
        for c in range(channels):
            new = []
            for row, values in enumerate((mu, sigma)):
                center = sum(values[m][c] for m in range(images)) / images
                spread = sum((values[m][c] - center) ** 2 for m in range(images)) / max(images - 1, 1) + 1e-6
                new.append(values[n][c] + noise[n, row, c] * ((gamma[row, c] + 1) * spread) ** 0.5)
            maps.append(new[1] * (x[n, c] - mu[n][c]) / sigma[n][c] + new[0])
        rows.append(torch.stack(maps))
    means = [[sum(values[n][c] for n in range(images)) / images for c in range(channels)] for values in (mu, sigma)]
    return torch.stack(rows), torch.stack([torch.stack(row) for row in means]).detach()


def applied(x: Tensor, weight: Tensor, running: Tensor, train: bool = True) -> tuple[Tensor, Tensor]:
    """The layer's output and its running means."""
    layer = Augment(x.shape[1]).double().train(train)
    moved = running.clone()
    return functional_call(layer, {"weight": weight, "running": moved}, (x,)), moved


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("images", "side"), [(5, 3), (2, 2), (1, 3), (4, 1), (1, 1)])
def test_the_layer_is_a_double_loop(images: int, side: int) -> None:
    x, noise = rand(images, 3, side, side).requires_grad_(), rand(images, 2, 3, seed=1)
    gamma, running = rand(2, 3, seed=2).abs(), rand(2, 3, seed=3)
    found, moved = applied(x, (gamma + 1).sqrt() * noise, running)
    expected, means = redrawn(x, noise, gamma)
    assert float((found - expected).detach().abs().max()) < 1e-10
    assert float((moved - (0.99 * running + 0.01 * means)).abs().max()) < 1e-12
    slopes = [torch.autograd.grad((y * rand(*y.shape, seed=4)).sum(), x)[0] for y in (found, expected)]
    assert float((slopes[0] - slopes[1]).abs().max()) < 1e-8
    assert float((found - x).detach().abs().max()) > 1e-4


def test_the_layer_draws_the_styles_it_promises() -> None:
    """Over many draws the new means have the old ones' mean and (gamma + 1) times their variance in the batch."""
    x, gamma = rand(4, 2, 3, 3), torch.tensor([[0.5, 2.0], [0.0, 1.0]], dtype=torch.float64)
    noise = rand(20_000, 4, 2, 2, seed=5)
    layer = torch.func.vmap(lambda part: applied_purely(x, (gamma + 1).sqrt() * part))
    new = layer(noise)
    mean, spread = new.mean((3, 4)), x.mean((2, 3)).var(0)
    assert float((mean.mean(0) - x.mean((2, 3))).abs().max()) < 0.02
    assert float((mean.var(0) / ((gamma[0] + 1) * spread) - 1).abs().max()) < 0.05


def applied_purely(x: Tensor, noise: Tensor) -> Tensor:
    running = torch.zeros_like(noise[0])
    return functional_call(Augment(2).double().train(), {"weight": noise, "running": running}, (x,))


def test_the_layer_is_the_identity_at_rest_in_inference_and_when_the_coin_says_no() -> None:
    x, running, noise = rand(4, 3, 2, 2), rand(2, 3), rand(4, 2, 3)
    for weight, train in ((rand(2, 3).abs(), True), (torch.zeros_like(noise), True), (noise, False)):
        found, moved = applied(x, weight, running, train)
        assert torch.equal(found, x)
        assert torch.equal(moved, running)
    leaf = x.clone().requires_grad_()
    slope = torch.autograd.grad((applied(leaf, torch.zeros_like(noise), running)[0] * x).sum(), leaf)[0]
    assert torch.equal(slope, x)


# ---- FedFA: where the layers are ----------------------------------------------------------------------------------------
PLACES = {
    "alexnet": ({}, {"body.3": 64, "body.7": 192, "body.10": 384, "body.13": 256, "body.17": 256}),
    "cnn": ({"norm": True}, {"body.3": 32, "body.7": 64}),
    "lenet": ({}, {"body.2": 32, "body.5": 64}),
    "cct4": ({}, {"body.tokenizer.2": 64, "body.tokenizer.5": 128}),
    "resnet18": (
        {},
        {"body.maxpool": 64, "body.layer1": 64, "body.layer2": 128, "body.layer3": 256, "body.layer4": 512},
    ),
    "resnet20-gn": ({}, {"body.relu": 16, "body.layer1": 16, "body.layer2": 32, "body.layer3": 64}),
}


@pytest.mark.grid
@pytest.mark.parametrize("name", PLACES)
def test_in_inference_it_is_the_plain_network_and_all_entries_keep_their_names(name: str) -> None:
    options, places = PLACES[name]
    maker = MODELS[name].make(**options)
    backbone = Arch.of(lambda: maker.make((3, 64, 64), 5), (3, 64, 64), name, mean=(0.4,), std=(0.2,))
    arch = FedFA.build(backbone, {})
    layers = {f"{place}_augment": channels for place, channels in places.items()}
    assert FedFA(arch=arch).layers == layers
    added = {f"{layer}.{entry}" for layer in layers for entry in ("running", "weight")}
    assert arch.parameters == backbone.parameters
    assert set(arch.buffers) == set(backbone.buffers) | added
    assert (arch.norm, arch.head, arch.has_batch_norm) == (backbone.norm, backbone.head, backbone.has_batch_norm)
    assert (arch.name, arch.mean, arch.std, arch.is_random) == (backbone.name, backbone.mean, backbone.std, False)
    start = arch.init(3)
    assert equal(drop(start, added), backbone.init(3))
    x = torch.rand(3, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(arch(start, x).logits, backbone(backbone.init(3), x).logits)
        for batch_stats in (False, True):  # adapters that normalise with the batch's statistics meet no noise either
            found = FedFA(arch=arch).predict({"model": start}, x, batch_stats)
            expected = backbone(backbone.init(3), x, batch_stats)
            assert torch.equal(found.logits, expected.logits)
            assert equal(drop(found.buffers, added), expected.buffers)
            assert all(torch.equal(leaf, start[n]) for n, leaf in found.buffers.items() if n in added)


def test_stages_of_a_network_of_ones_own() -> None:
    relu = nn.ReLU()
    network = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), relu, nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 4, 1), relu,
        nn.AvgPool2d(2), nn.Dropout(0.0), nn.Flatten(), nn.Linear(16, 5), relu, nn.Linear(5, CLASSES),
    )  # fmt: skip
    before = copy.deepcopy(network.state_dict())
    assert stages(network, SHAPE) == {"1": 2, "6": 4}  # a convolution without activation is no stage
    arch = FedFA.build(Arch.of(network, SHAPE, head="11"), {})
    assert FedFA(arch=arch).layers == {"1_augment": 2, "6_augment": 4}
    assert arch.head == {"11.weight", "11.bias"}
    assert len(network) == 12  # the given network is left alone
    assert equal(dict(network.state_dict()), dict(before))
    many = nn.Sequential(*(layer for _ in range(7) for layer in (nn.Conv2d(1, 1, 1), nn.ReLU())), nn.Flatten())
    assert list(stages(many, SHAPE)) == ["1", "3", "5", "7", "9"]
    marked = inserted(many, {"1": nn.Identity()})
    assert list(dict(marked.named_children()))[:4] == ["0", "1", "1_augment", "2"]


@pytest.mark.parametrize("arch", KINDS)
def test_a_network_without_stages_is_trained_by_fedavg_and_a_warning_says_so(arch: str) -> None:
    network = KINDS[arch][0]
    assert FedFA.build(network, {}).layers(Augment) == ()
    with pytest.warns(UserWarning, match=r"no stages of feature maps: method 'fedfa' is fedavg"):
        fed, _ = federation("fedfa", TASK, arch=network)
    state, _ = run(fed)
    assert equal(state.server["model"], ran("fedavg", TASK, arch=network).server["model"])
    assert state.locals == {}


# ---- FedFA: rounds ------------------------------------------------------------------------------------------------------
def gamma_by_hand(running: list[Tensor], shared: str) -> Tensor:
    """Client-sharing weights with loops."""
    clients, channels = len(running), running[0].shape[1]
    result = torch.zeros(2, channels, dtype=torch.float64)
    for row in range(2):
        g = []
        for c in range(channels):
            values = [float(part[row, c]) for part in running]
            if shared == "scalar":
                values = [float(value) for part in running for value in part[row]]
            center = sum(values) / len(values)
            v = sum((value - center) ** 2 for value in values) / len(values) + 1e-6
            g.append(1 / (1 + 1 / v))
        assert len(values) == (clients if shared == "channel" else clients * channels)
        for c in range(channels):
            result[row, c] = channels * g[c] / sum(g)
    return result


@pytest.mark.parametrize("shared", ["channel", "scalar"])
@pytest.mark.parametrize("norm", [True, False])
def test_rounds_are_those_of_plain_torch(norm: bool, shared: str) -> None:
    watched, steps = watching(FedFA)
    train = replace(TRAIN, **MOMENTS, local_epochs=2)
    fed, _ = federation(watched, TASK, train, STAGED[norm], shared_variance=shared)
    first, second = LAYERS[norm]
    ends = [int(layer.partition(".")[2].partition("_")[0]) + 1 for layer in (first, second)]
    state = fed.start()
    extra = {f"{layer}.{entry}" for layer in (first, second) for entry in ("running", "weight")}
    server = drop(state.server["model"], extra)
    gammas = {layer: torch.ones(2, channels, dtype=torch.float64) for layer, channels in LAYERS[norm].items()}
    start = {n: torch.tensor([[0.0] * c, [1.0] * c], dtype=torch.float64) for n, c in LAYERS[norm].items()}
    runnings = {name: dict(start) for name in NAMES}
    tossed = []
    for _ in range(3):
        steps.clear()
        state, _ = fed.step(state)
        models = []
        for name, own in by_client(steps).items():
            module = staged(norm).double()
            module.load_state_dict({n: t.clone() for n, t in server.items()})
            module.train()
            optimiser = sgd(list(module.parameters()))
            for _, batch, _ in own:
                x, begin, used = (batch["x"] - 0.5) / 0.5, 0, 0
                for number, (layer, end) in enumerate(zip((first, second), ends, strict=True)):
                    x = module.body[begin:end](x)
                    channels = LAYERS[norm][layer]
                    on = float(batch["coin"][0, number]) < 0.5
                    tossed.append(on)
                    if on:
                        x, seen = redrawn(x, batch["noise"][:, :, used : used + channels], gammas[layer])
                        runnings[name][layer] = 0.99 * runnings[name][layer] + 0.01 * seen
                    begin, used = end, used + channels
                optimiser.zero_grad()
                F.cross_entropy(module.head(module.body[begin:](x)), batch["y"]).backward()
                optimiser.step()
            models.append(dict(module.state_dict()))
            wanted = {f"{layer}.running": runnings[name][layer] for layer in (first, second)}
            assert far(state.locals[name]["model"], wanted) < 1e-10
        server = mean_of(models, [size / sum(SIZES) for size in SIZES])
        gammas = {n: gamma_by_hand([runnings[k][n] for k in NAMES], shared) for n in gammas}
        assert far(drop(state.server["model"], extra), server) < 1e-8
        for layer, gamma in gammas.items():
            assert float((state.server["model"][f"{layer}.weight"] - gamma).abs().max()) < 1e-8
    assert 0.25 < sum(tossed) / len(tossed) < 0.75
    if shared == "channel":
        assert max(float((gamma - 1).abs().max()) for gamma in gammas.values()) > 0.01


def test_weights_are_shares_of_the_channels_by_how_much_clients_differ() -> None:
    method = FedFA(arch=FedFA.build(STAGED[True], {}))
    running = rand(6, 2, 4) * torch.tensor([0.1, 1.0, 2.0, 5.0], dtype=torch.float64)
    gamma = method.gamma(running)
    assert gamma.shape == (2, 4)
    assert float((gamma - gamma_by_hand(list(running), "channel")).abs().max()) < 1e-12
    assert torch.allclose(gamma.mean(1), torch.ones(2, dtype=torch.float64))
    assert bool((gamma > 0).all())
    assert bool((gamma[:, 1:] > gamma[:, :-1]).all())
    order = torch.tensor([2, 0, 3, 1])
    assert torch.allclose(method.gamma(running[:, :, order]), gamma[:, order])
    assert torch.allclose(method.gamma(running + 7), gamma)
    assert torch.allclose(method.gamma(running[torch.tensor([5, 1, 0, 2, 4, 3])]), gamma)
    ones = torch.ones(2, 4, dtype=torch.float64)
    assert torch.allclose(method.gamma(running[:1]), ones)  # one client differs from nobody
    assert torch.allclose(replace(method, shared_variance="scalar").gamma(running), ones, rtol=0, atol=1e-15)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("changes", [{}, {"momentum": 0.9}, {"batch_size": 1}, {"augment": "shift"}])
def test_without_probability_it_is_fedavg(norm: bool, changes: dict[str, Any]) -> None:
    train = replace(TRAIN, **changes)
    fed, _ = federation("fedfa", TASK, train, STAGED[norm], probability=0.0)
    state, _ = run(fed)
    expected = ran("fedavg", TASK, train, STAGED[norm])
    assert equal(pick(state.server["model"], expected.server["model"]), expected.server["model"])
    start = fed.start().server["model"]
    assert all(torch.equal(leaf, start[n]) for tree in state.locals.values() for n, leaf in tree["model"].items())
    other, _ = run(federation("fedfa", TASK, train, STAGED[norm])[0])
    single = norm and train.batch_size == 1  # one image alone is normalised as in inference, and not augmented
    assert (far(pick(other.server["model"], expected.server["model"]), expected.server["model"]) > 1e-5) != single
    assert all(bool(leaf.isfinite().all()) for leaf in other.server["model"].values())


def test_running_means_move_when_the_coin_says_yes_and_no_noise_stays_in_the_state() -> None:
    watched, steps = watching(FedFA)
    fed, _ = federation(watched, TASK, replace(TRAIN, local_epochs=4), STAGED[True])
    state, _ = run(fed)
    moved = {True: 0, False: 0}
    for own in by_client(steps).values():
        for (before, batch, _), (after, _, _) in pairwise(own):
            if float(before["now"]["round"]) != float(after["now"]["round"]):
                continue
            for number, layer in enumerate(LAYERS[True]):
                on = float(batch["coin"][0, number]) < 0.5
                same = torch.equal(before["model"][f"{layer}.running"], after["model"][f"{layer}.running"])
                assert same != on
                moved[on] += 1
                assert torch.equal(before["model"][f"{layer}.weight"], after["model"][f"{layer}.weight"])
    assert min(moved.values()) > 10
    for tree in (state.server, *state.locals.values(), *fed.deploy(state).trained().values()):
        for name, leaf in tree["model"].items():
            assert leaf.dim() == 2 or "_augment" not in name


def test_an_unseen_client_has_the_whole_global_model() -> None:
    fed, _ = federation("fedfa", TASK, arch=STAGED[True])
    state, _ = run(fed)
    arch = fed.setup.method.arch
    for tree in fed.unseen(fed.deploy(state)).values():
        assert set(tree["model"]) == {*arch.parameters, *arch.buffers}
        assert equal(tree["model"], state.server["model"])
    x = torch.rand(4, *SHAPE, dtype=torch.float64)
    served = [fed.setup.method.predict(tree, x).logits for tree in fed.deploy(state).trained().values()]
    assert all(torch.equal(logits, served[0]) for logits in served)  # nobody has a model of its own


# ---- FedDG-GA -----------------------------------------------------------------------------------------------------------
def metric_of(module: nn.Module, index: Tensor, metric: str) -> float:
    with torch.no_grad():
        logits = copy.deepcopy(module).eval()((pixels(index) - 0.5) / 0.5)
    if metric == "accuracy":
        right = [int(row.argmax()) == int(y) for row, y in zip(logits, TASK.labels[index], strict=True)]
        return sum(right) / len(right)
    return float(np.mean([-float(row.log_softmax(0)[y]) for row, y in zip(logits, TASK.labels[index], strict=True)]))


@pytest.mark.parametrize("participation", [1.0, 0.67])
@pytest.mark.parametrize("metric", ["accuracy", "loss"])
@pytest.mark.parametrize("arch", KINDS)
def test_generalisation_adjustment_is_that_of_plain_torch(arch: str, metric: str, participation: float) -> None:
    network, kind = KINDS[arch]
    watched, steps = watching(FedDGGA)
    rounds, step_size = 5, 0.8
    train = replace(TRAIN, **MOMENTS, local_epochs=3)
    options = {"metric": metric, "step_size": step_size}
    fed, watch = federation(watched, TASK, train, network, rounds, participation, **options)
    state = fed.start()
    server = state.server["model"]
    shares, last = dict.fromkeys(NAMES, 1 / 3), {}
    for number in range(rounds):
        steps.clear()
        state, _ = fed.step(state)
        present = list(watch.downs[-1])
        assert len(present) == (3 if participation == 1 else 2)
        models, gaps = [], []
        for name in present:
            client, module = TASK.client(name), module_of(server, kind)
            after = metric_of(module, client.val, metric)
            before = last.get(name, after)
            gaps.append(after - before)
            torch_training(module, [batch for _, batch, _ in by_client(steps)[name]], sgd)
            last[name] = metric_of(module, client.val, metric)
            models.append(dict(module.state_dict()))
            sent = watch.replies[-1][name].up["metric"]
            assert float(sent["after"]) == pytest.approx(after, abs=1e-9)
            assert float(sent["before"]) == pytest.approx(before, abs=1e-9)
        largest = max(map(abs, gaps)) or 1.0
        sign = -1 if metric == "accuracy" else 1
        for name, gap in zip(present, gaps, strict=True):
            moved = shares[name] + sign * step_size * (1 - number / rounds) / 3 * gap / largest
            shares[name] = min(max(moved, 0.0), 1.0)
        shares = {name: share / sum(shares.values()) for name, share in shares.items()}
        weights = [shares[name] / sum(shares[k] for k in present) for name in present]
        server = mean_of(models, weights)
        assert {name: float(leaf) for name, leaf in state.server["share"].items()} == pytest.approx(shares, abs=1e-9)
        assert far(state.server["model"], server) < 1e-9
    assert max(shares.values()) - min(shares.values()) > 0.05


def ups_of(gaps: list[float], values: list[float] | None = None) -> dict[str, Tree]:
    """Uploads with these gaps; the model of client k is the number ``values[k]``."""
    given = values or [0.0] * len(gaps)
    number = [torch.tensor(value, dtype=torch.float64) for value in (*gaps, *given)]
    zero = torch.zeros((), dtype=torch.float64)
    return {
        name: {"model": {"w": number[len(gaps) + k]}, "metric": {"after": number[k], "before": zero}}
        for k, name in zip(range(len(gaps)), "abcdefgh", strict=False)
    }


def adjusted(gaps: list[float], shares: list[float], values: list[float] | None = None, **options: Any) -> Tree:
    method = FedDGGA(arch=PLAIN, train=TRAIN, **options)
    share = {name: torch.tensor(v, dtype=torch.float64) for name, v in zip("abcdefgh", shares, strict=False)}
    ctx = server_context(torch.ones(len(gaps)), Context(1, 4, len(shares)))
    server = {"model": {"w": torch.zeros((), dtype=torch.float64)}, "share": share}
    return method.aggregate(server, ups_of(gaps, values), ctx)[0]


@pytest.mark.parametrize(("metric", "sign"), [("accuracy", -1), ("loss", 1)])
def test_whom_the_aggregated_model_serves_worse_counts_more(metric: str, sign: int) -> None:
    gaps = [sign * 0.5, 0.0, sign * -0.25]
    after = adjusted(gaps, [1 / 3] * 3, [1.0, 10.0, 100.0], metric=metric, step_size=0.4)
    step = 0.4 * 0.75 / 3
    raw = np.array([1 / 3 + step, 1 / 3, 1 / 3 - step / 2])
    assert [float(leaf) for leaf in after["share"].values()] == pytest.approx(list(raw / raw.sum()))
    assert float(after["model"]["w"]) == pytest.approx(float(raw @ [1.0, 10.0, 100.0] / raw.sum()))


def test_weights_stay_on_the_simplex() -> None:
    generator = torch.Generator().manual_seed(0)
    shares = [0.25] * 4
    smallest = 1.0
    for _ in range(50):
        gaps = torch.randn(4, generator=generator).tolist()
        present = adjusted(gaps, shares, step_size=1.0)["share"]
        shares = [float(leaf) for leaf in present.values()]
        assert sum(shares) == pytest.approx(1.0)
        assert min(shares) >= 0
        smallest = min(smallest, *shares)
    assert smallest == 0.0  # the clipping was needed
    alone = adjusted([-3.0], [0.2, 0.8], [7.0], step_size=1.0)  # one client of two took part
    assert float(alone["model"]["w"]) == pytest.approx(7.0)
    raw = [0.2 + 0.75 / 2, 0.8]
    assert [float(leaf) for leaf in alone["share"].values()] == pytest.approx([r / sum(raw) for r in raw])


def test_gaps_of_zero_and_clients_of_no_weight() -> None:
    assert [float(a) for a in adjusted([0.0, 0.0], [0.3, 0.7], step_size=1.0)["share"].values()] == [0.3, 0.7]
    after = adjusted([0.0, 0.0], [0.0, 0.0, 1.0], [2.0, 4.0])
    assert float(after["model"]["w"]) == 3.0  # only those who count for nothing came


@pytest.mark.parametrize("arch", KINDS)
def test_without_a_step_it_is_fedavg_with_uniform_weights(arch: str) -> None:
    network = KINDS[arch][0]
    found = ran("feddg-ga", TASK, arch=network, step_size=0.0)
    uniform = ran("fedavg", TASK, replace(TRAIN, weights="uniform"), network)
    assert far(found.server["model"], uniform.server["model"]) < 1e-12
    assert far(ran("feddg-ga", TASK, arch=network).server["model"], uniform.server["model"]) > 1e-8
    assert far(ran("fedavg", TASK, arch=network).server["model"], uniform.server["model"]) > 1e-8


def test_the_first_time_a_client_takes_part_its_gap_is_zero() -> None:
    fed, watch = federation("feddg-ga", TASK, rounds=4, participation=0.34)
    state = fed.start()
    seen: set[str] = set()
    for number in range(4):
        state, _ = fed.step(state)
        ((name, reply),) = watch.replies[-1].items()
        sent = reply.up["metric"]
        assert torch.equal(sent["after"], sent["before"]) or name in seen
        if number == 0:
            assert {float(leaf) for leaf in state.server["share"].values()} == {1 / 3}
        seen.add(name)
    assert len(seen) > 1


def test_a_client_without_validation_images_has_no_gap() -> None:
    fed, watch = federation("feddg-ga", without_val(TASK, "b"), rounds=3)
    state, reports = run(fed)
    assert all(float(v) == 0 for replies in watch.replies for v in replies["b"].up["metric"].values())
    assert all(report.diverged == () for report in reports)
    assert sum(map(float, state.server["share"].values())) == pytest.approx(1.0)


def test_a_look_changes_nothing_and_no_weight_is_trained_on_validation_images() -> None:
    watched, steps = watching(FedDGGA)
    fed, _ = federation(watched, TASK)
    run(fed, 1)
    train = {i for client in TASK.clients for i in client.train.tolist()}
    assert {i for _, batch, _ in steps for i in batch["index"].tolist()} <= train
    for state, _, _ in steps:
        assert float(state["seen"]["images"]) == 0  # counted after training
    first = [next(s for s, _, _ in steps if int(s["now"]["samples"]) == size) for size in SIZES]
    assert all(equal(state["model"], fed.start().server["model"]) for state in first)


# ---- all three ----------------------------------------------------------------------------------------------------------
VARIANTS: list[tuple[str, dict[str, Any], int, int]] = [  # beside the plain model: numbers down, numbers up
    ("partialfed", {"mode": "fix"}, 0, 0),
    ("partialfed", {"mode": "adaptive"}, 0, 0),
    ("fedfa", {}, 2 * CHANNELS, 2 * CHANNELS),
    ("fedfa", {"shared_variance": "scalar"}, 2 * CHANNELS, 2 * CHANNELS),
    ("feddg-ga", {}, 0, 2),
    ("feddg-ga", {"metric": "loss"}, 0, 2),
]


@pytest.mark.parametrize(("name", "options", "down", "up"), VARIANTS)
@pytest.mark.parametrize("norm", [True, False])
def test_what_travels(name: str, options: dict[str, Any], down: int, up: int, norm: bool) -> None:
    fed, watch = federation(name, TASK, arch=STAGED[norm], **options)
    _, reports = run(fed, 2)
    plain = float_bytes({"model": to_double(STAGED[norm].init(0))})
    for downs, replies, report in zip(watch.downs, watch.replies, reports, strict=True):
        assert {float_bytes(tree) for tree in downs.values()} == {plain + 8 * down}
        assert {float_bytes(reply.up) for reply in replies.values()} == {plain + 8 * up}
        assert (report.bytes_down, report.bytes_up) == (3 * (plain + 8 * down), 3 * (plain + 8 * up))


def test_what_fedfa_sends_and_keeps_by_name() -> None:
    fed, watch = federation("fedfa", TASK, arch=STAGED[True])
    state, _ = run(fed, 2)
    network = {*STAGED[True].parameters, *STAGED[True].buffers}
    running, weight = ({f"{layer}.{entry}" for layer in LAYERS[True]} for entry in ("running", "weight"))
    for client in NAMES:
        received, reply = watch.downs[-1][client], watch.replies[-1][client]
        assert {slot: set(leaves) for slot, leaves in received.items()} == {"model": network | weight}
        assert {slot: set(leaves) for slot, leaves in reply.up.items()} == {"model": network, "running": running}
        assert {slot: set(leaves) for slot, leaves in state.locals[client].items()} == {"model": running}
        assert equal(reply.up["running"], state.locals[client]["model"])


def variant(name: str, options: dict[str, Any], norm: bool) -> Method:
    cls = METHODS[name].make
    return cls(arch=cls.build(tiny_arch(norm=norm), options), train=tiny_train(), **options)


@pytest.mark.grid
@pytest.mark.parametrize(("name", "options", "down", "up"), VARIANTS)
@pytest.mark.parametrize("norm", [True, False])
def test_engines_agree_with_some_clients_at_a_time(
    name: str, options: dict[str, Any], down: int, up: int, norm: bool
) -> None:
    method = variant(name, options, norm)
    ends = [federate(method, engine(DOUBLE), DOUBLE, 4, RAGGED, 0.5) for engine in (Sequential, Vmapped)]
    check_equal(ends[0], ends[1], 1e-10)


@pytest.mark.parametrize(("name", "options", "down", "up"), VARIANTS)
def test_hooks_leave_their_arguments_alone_and_steps_keep_the_form_of_the_state(
    name: str, options: dict[str, Any], down: int, up: int
) -> None:
    watched, steps = watching(METHODS[name].make)
    fed, _ = federation(watched, TASK, arch=STAGED[True], **options)
    state, _ = run(fed, 1)
    before = copied(state.server), {client: copied(tree) for client, tree in state.locals.items()}
    fed.deploy(state).trained()
    following, _ = fed.step(state)
    assert equal_trees(state.server, before[0])
    assert all(equal_trees(state.locals[client], tree) for client, tree in before[1].items())
    assert form(following.server) == form(state.server)
    for client, tree in following.locals.items():
        assert form(tree) == form(state.locals[client])
    shapes: dict[str, Any] = {}
    for tree, _, phase in steps:
        assert shapes.setdefault(phase.name, form(tree)) == form(tree)


def form(tree: Tree) -> dict[str, Any]:
    return {slot: {n: (t.shape, t.dtype) for n, t in leaves.items()} for slot, leaves in tree.items()}


@pytest.mark.parametrize(("name", "options", "down", "up"), VARIANTS)
def test_equal_clients_are_each_of_them(name: str, options: dict[str, Any], down: int, up: int) -> None:
    """Clients with the same data in one batch, and nothing drawn, do what one does."""
    one = replace(TASK, clients=TASK.clients[:1])
    three = replace(TASK, clients=tuple(replace(TASK.clients[0], name=k) for k in "abc"))
    still = {"partialfed": {"policy_lr": 0.0}, "fedfa": {"probability": 0.0}}.get(name, {})
    train = replace(TRAIN, batch_size=5, local_epochs=3)
    feds: list[Session] = [federation(name, t, train, STAGED[True], **options, **still)[0] for t in (one, three)]
    ends: list[State] = [run(fed)[0] for fed in feds]
    assert far(ends[0].server["model"], ends[1].server["model"]) < 1e-10
    alone = feds[0].deploy(ends[0]).trained()["a"]["model"]
    for tree in feds[1].deploy(ends[1]).trained().values():
        assert far(tree["model"], alone) < 1e-10
    assert far(alone, feds[0].start().server["model"]) > 0.01


@pytest.mark.parametrize(("name", "options"), [("partialfed", {}), ("feddg-ga", {})])
def test_without_validation_images_one_sentence_says_what_to_do(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"^method '{name}' .* validation images, .*: set \[split\] val$") as said:
        federation(name, without_val(TASK), **options)
    assert "\n" not in str(said.value)
    assert run(federation("partialfed", without_val(TASK), mode="fix")[0])[0].round == 3


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("partialfed", {"mode": "both"}, r"^method 'partialfed': mode = 'both' is not valid: .*'fix' or 'adaptive'$"),
        ("partialfed", {"policy-steps": -1}, r"^method 'partialfed': policy-steps must not be negative, not -1$"),
        ("partialfed", {"policy-lr": -0.1}, r"^method 'partialfed': policy-lr must not be negative, not -0.1$"),
        ("fedfa", {"probability": 1.5}, r"^method 'fedfa': probability must lie in \[0, 1\], not 1.5$"),
        ("fedfa", {"probability": math.nan}, r"^method 'fedfa': probability must lie in \[0, 1\], not nan$"),
        ("fedfa", {"shared-variance": "none"}, r"^method 'fedfa': shared-variance = 'none' is not valid: .*'scalar'$"),
        ("feddg-ga", {"step-size": 2.0}, r"^method 'feddg-ga': step-size must lie in \[0, 1\], not 2.0$"),
        ("feddg-ga", {"step-size": -0.1}, r"^method 'feddg-ga': step-size must lie in \[0, 1\], not -0.1$"),
        ("feddg-ga", {"metric": "f1"}, r"^method 'feddg-ga': metric = 'f1' is not valid: .*'accuracy' or 'loss'$"),
    ],
)
def test_settings_that_cannot_be_meant(name: str, options: dict[str, Any], expected: str) -> None:
    said = refusal(METHODS, "method", name, options, arch=PLAIN, train=TRAIN)
    assert re.search(expected, said)
    assert "\n" not in said


def test_an_unseen_client_starts_with_nothing_private() -> None:
    info = ClientInfo("new", 0, torch.zeros(CLASSES, dtype=torch.int64), 0, unseen=True)
    for name, options, _, _ in VARIANTS:
        method = variant(name, options, norm=True)
        assert method.init_local(method.arch.init(0), info, CTX) == {}


def test_uniform_means_are_where_a_step_of_zero_begins() -> None:
    """The share of a client and FedAvg's uniform weight are the same number."""
    method = FedDGGA(arch=PLAIN, train=replace(TRAIN, weights="uniform"))
    server = method.init_server({"plain": PLAIN.init(0)}, tuple(NAMES), NO_IDS)
    uniform = FedAvg(arch=PLAIN, train=method.train).weights(server_context(SIZES))
    assert torch.equal(torch.stack(list(server["share"].values())), uniform)
    models = [PLAIN.init(seed) for seed in range(3)]
    assert far(weighted_mean(models, uniform), mean_of(models, [1 / 3] * 3)) < 1e-6
