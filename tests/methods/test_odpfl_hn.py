"""ODPFL-HN: a reference in plain PyTorch from images to the last weight, limits, messages, unseen clients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedshift.core import rng
from fedshift.core.arch import Arch
from fedshift.core.grad import gradient
from fedshift.core.method import Train
from fedshift.core.registry import METHODS
from fedshift.core.tree import Tensors, Tree, float_bytes, pick
from fedshift.data.task import Client, Task
from fedshift.engines.sequential import Sequential
from fedshift.engines.vmapped import Vmapped
from fedshift.methods import odpfl_hn
from fedshift.methods.odpfl_hn import ODPFL
from fedshift.runs.session import Session
from fedshift.store.state import State
from tests.conftest import refusal
from tests.methods.federations import (
    AWKWARD,
    CLASSES,
    DOUBLE,
    PLAIN,
    SHAPE,
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
    torch_training,
    watching,
)
from tests.test_engines_agree import check_equal, federate, make

SIZES = {"a": 5, "b": 9, "c": 12, "d": 7}
SIZED = make_task((5, 9, 12))
FOUR = make_task(tuple(SIZES.values()))
ENTRIES = set(AWKWARD.parameters) | set(AWKWARD.buffers)
KINDS: dict[str, tuple[Arch, type[nn.Module]]] = {"batch-norm": (AWKWARD, Awkward), "plain": (PLAIN, Plain)}
SMALL: dict[str, Any] = {"embedding": 8, "hidden": 20}


class Encoder(nn.Module):
    """As the method's, with torch's own layers: of networks that convolve, and of those that do not."""

    def __init__(self, size: int, convolves: bool = True, shape: tuple[int, int, int] = SHAPE) -> None:
        super().__init__()
        channels, height, width = shape
        self.convolves = convolves
        if convolves:
            self.conv = nn.ModuleList([nn.Conv2d(channels, 32, 5, padding=2), nn.Conv2d(32, 64, 5, padding=2)])
            self.out = nn.Linear(64 * (height // 4) * (width // 4), size)
        else:
            self.encoder = nn.ModuleList([nn.Linear(channels * height * width, 200), nn.Linear(200, size)])

    def forward(self, x: Tensor) -> Tensor:
        embedding: Tensor
        if self.convolves:
            for layer in self.conv:
                x = F.max_pool2d(layer(x).relu(), 2)
            embedding = self.out(x.flatten(1))
        else:
            embedding = self.encoder[1](self.encoder[0](x.flatten(1)).relu())
        return embedding


class Hyper(nn.Module):
    """A trunk and one linear layer for each target."""

    def __init__(self, tensors: Tensors, base: Tensors) -> None:
        super().__init__()
        sizes = [tensors[f"{odpfl_hn.TRUNK}.{i}.weight"].shape for i in range(4)]
        self.trunk = nn.ModuleList([nn.Linear(reads, writes) for writes, reads in sizes])
        self.heads = nn.ModuleList([nn.Linear(sizes[-1][0], leaf.numel()) for leaf in base.values()])
        self.double()
        self.shapes = {name: leaf.shape for name, leaf in base.items()}
        with torch.no_grad():
            for i, layer in enumerate(self.trunk):
                layer.weight.copy_(tensors[f"{odpfl_hn.TRUNK}.{i}.weight"])
                layer.bias.copy_(tensors[f"{odpfl_hn.TRUNK}.{i}.bias"])
            for head, (name, leaf) in zip(self.heads, base.items(), strict=True):
                head.weight.copy_(tensors[odpfl_hn.output_of(name)])
                head.bias.copy_(leaf.flatten())

    def forward(self, embedding: Tensor) -> Tensors:
        for i, layer in enumerate(self.trunk):
            embedding = layer(embedding.relu() if i else embedding)
        pairs = zip(self.heads, self.shapes.items(), strict=True)
        return {name: head(embedding).reshape(shape) for head, (name, shape) in pairs}

    def tensors(self) -> tuple[Tensors, Tensors]:
        """Hyper-network and base, by the method's names."""
        hyper = {
            f"{odpfl_hn.TRUNK}.{i}.{part}": getattr(layer, part).detach().clone()
            for i, layer in enumerate(self.trunk)
            for part in ("weight", "bias")
        }
        heads = list(zip(self.heads, self.shapes.items(), strict=True))
        outputs = {odpfl_hn.output_of(name): head.weight.detach().clone() for head, (name, _) in heads}
        return {**hyper, **outputs}, {name: head.bias.detach().reshape(shape).clone() for head, (name, shape) in heads}


def images_of(task: Task, index: Tensor) -> Tensor:
    """Normalised as the networks do it."""
    return (task.images[index].double() / 255 - 0.5) / 0.5


def awake(state: State, seed: int = 1) -> State:
    """A state whose hyper-network tells clients apart already: outputs that are not zero."""
    hyper = {
        name: leaf + 0.1 * rng.normal(seed, torch.arange(len(leaf)), leaf.shape[1:]).double()
        for name, leaf in state.server["hyper"].items()
    }
    return State(state.round, {**state.server, "hyper": hyper}, state.locals)


# --- the whole method against torch -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", [{}, {"momentum": 0.9, "weight_decay": 0.1, "lr_decay": 0.7, "clip": 0.3}])
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_odpfl_is_autograd_from_images_to_weights(kind: str, recipe: dict[str, Any], participation: float) -> None:
    """Three rounds: embeddings with a graph, local training, ``<Delta, psi>`` and one backward pass through everything."""
    train = replace(TRAIN, local_epochs=2, **recipe)
    arch, module_kind = KINDS[kind]
    watched, steps = watching(ODPFL)
    fed, watch = federation(
        watched, FOUR, train, arch, participation=participation, hyper_lr=0.3, encoder_lr=0.2, **SMALL
    )
    state = awake(fed.start())
    model = dict(state.server["model"])
    encoder = Encoder(8, arch.has_convolution).double()
    encoder.load_state_dict({name: leaf.clone() for name, leaf in state.server["encoder"].items()})
    hyper = Hyper(state.server["hyper"], pick(model, arch.parameters))
    for number in range(3):
        steps.clear()
        state, _ = fed.step(state)
        decay = train.lr_decay**number
        rules = [torch.optim.SGD(hyper.parameters(), 0.3 * decay), torch.optim.SGD(encoder.parameters(), 0.2 * decay)]
        total, ends = torch.zeros(()).double(), []
        present = list(watch.downs[-1])
        count = sum(SIZES[client] for client in present)
        for client in present:
            e = encoder(images_of(FOUR, FOUR.client(client).train)).mean(0)
            psi = hyper(e)
            module = module_of({**model, **{n: leaf.detach() for n, leaf in psi.items()}}, module_kind)
            batches = [batch for before, batch, _ in steps if int(before["now"]["samples"]) == SIZES[client]]

            def rule(p: Any, lr: float = train.lr * decay) -> torch.optim.Optimizer:
                return torch.optim.SGD(p, lr, momentum=train.momentum, weight_decay=train.weight_decay)

            torch_training(module, batches, rule, train.clip)
            end = {name: leaf.detach().clone() for name, leaf in module.state_dict().items()}
            up = watch.replies[-1][client].up
            assert far(up["model"], end) < 1e-11
            assert torch.allclose(up["embedding"]["mean"], e.detach(), rtol=0, atol=1e-12)
            inner = torch.stack([((psi[n] - end[n]).detach() * psi[n]).sum() for n in psi]).sum()
            total = total + SIZES[client] / count * inner
            ends.append((SIZES[client] / count, end))
        for optimiser in rules:
            optimiser.zero_grad()
        total.backward()
        for optimiser in rules:
            optimiser.step()
        tensors, base = hyper.tensors()
        for name in arch.buffers:
            parts = [end[name] for _, end in ends]
            weighted = torch.stack([share * end[name] for share, end in ends]).sum(0)
            model[name] = weighted if parts[0].is_floating_point() else torch.stack(parts).amax(0)
        model.update(base)
        assert far(state.server["model"], model) < 1e-11
        assert far(state.server["hyper"], tensors) < 1e-11
        assert far(state.server["encoder"], {n: leaf.detach() for n, leaf in encoder.state_dict().items()}) < 1e-11
    start = fed.start().server
    assert far(state.server["encoder"], start["encoder"]) > 1e-5
    assert all(bool((state.server["hyper"][n] != awake(fed.start()).server["hyper"][n]).any()) for n in start["hyper"])


def test_the_pull_has_the_gradient_of_the_vector_jacobian_product() -> None:
    """Against ``torch.autograd.functional.jacobian`` with Delta multiplied in by hand, for every tensor at once."""
    base = {name: leaf.double() for name, leaf in PLAIN.init(3).items()}
    hyper, _ = odpfl_hn.fresh_hypernetwork(base, (4, 6, 6))
    hyper = {
        n: leaf + 0.1 * rng.normal(5, torch.arange(len(leaf)), leaf.shape[1:]).double() for n, leaf in hyper.items()
    }
    e = torch.linspace(-1, 1, 4, dtype=torch.float64)
    trained = {name: leaf.double() for name, leaf in PLAIN.init(4).items()}
    grads, _, _ = gradient(lambda t: (odpfl_hn.pull(t, base, e, trained), None), hyper)
    towards, _, _ = gradient(lambda t: (odpfl_hn.pull(hyper, base, t["e"], trained), None), {"e": e})
    delta = {n: leaf - trained[n] for n, leaf in odpfl_hn.made(hyper, base, e).items()}
    names = list(hyper)

    def targets(*values: Tensor) -> tuple[Tensor, ...]:
        return tuple(odpfl_hn.made(dict(zip(names, values[1:], strict=True)), base, values[0]).values())

    rows = torch.autograd.functional.jacobian(targets, (e, *hyper.values()))
    for position, found in enumerate((towards["e"], *(grads[name] for name in names))):
        parts = [
            torch.tensordot(delta[target], row[position], dims=delta[target].dim())
            for target, row in zip(delta, rows, strict=True)
        ]
        assert torch.allclose(found, torch.stack(parts).sum(0), rtol=0, atol=1e-12)
    assert bool(towards["e"].any())


@pytest.mark.parametrize("convolves", [False, True])
@pytest.mark.parametrize(("height", "width"), [(4, 6), (7, 9), (28, 28), (32, 32)])
def test_the_encoder_is_that_of_the_released_code(convolves: bool, height: int, width: int) -> None:
    """Two padded convolutions with pooling, or a hidden layer of 200, and the scale of torch's own start."""
    module = Encoder(32, convolves, (1, height, width)).double()
    tensors = {name: leaf.detach() for name, leaf in module.state_dict().items()}
    x = rng.normal(height, torch.arange(5), (1, height, width)).double()
    assert torch.allclose(odpfl_hn.embedded(tensors, x), module(x).detach(), rtol=0, atol=1e-12)
    fresh = odpfl_hn.fresh_encoder(torch.ones(1), (1, height, width), 32, convolves)
    assert {n: leaf.shape for n, leaf in fresh.items()} == {n: leaf.shape for n, leaf in tensors.items()}
    for name, leaf in fresh.items():
        bound = fresh[name.replace("bias", "weight")][0].numel() ** -0.5
        assert 0.8 * bound < float(leaf.abs().max()) <= bound


def test_very_small_images_are_not_convolved() -> None:
    assert "out.weight" not in odpfl_hn.fresh_encoder(torch.ones(1), (1, 3, 8), 32)


def test_the_released_start_draws_every_output_as_torch_does() -> None:
    server = federation("odpfl-hn", SIZED)[0].start().server
    for name in AWKWARD.parameters:
        for leaf in (server["model"][name], server["hyper"][odpfl_hn.output_of(name)]):
            assert 0 < float(leaf.abs().max()) <= 0.1  # one over the root of a hundred
    assert far(server["model"], federation("odpfl-hn", SIZED, start="network")[0].start().server["model"]) > 0.01


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_round_at_rate_one_is_fedavg_for_the_common_part(kind: str) -> None:
    """With start = "network" everybody starts from the same model, and the mean of Delta leads to the mean of the models."""
    arch, _ = KINDS[kind]
    fed, watch = federation("odpfl-hn", SIZED, arch=arch, hyper_lr=1.0, start="network")
    plain, other = federation("fedavg", SIZED, arch=arch)
    (state, _), (expected, _) = run(fed, 1), run(plain, 1)
    assert far(state.server["model"], expected.server["model"]) < 1e-14
    for client in "abc":
        assert equal(watch.replies[0][client].up["model"], other.replies[0][client].up["model"])
    assert equal(state.server["encoder"], fed.start().server["encoder"])  # nothing leads to it yet
    second, _ = fed.step(state)
    assert far(second.server["encoder"], state.server["encoder"]) > 1e-9
    downs = watch.downs[1]["a"]["model"], watch.downs[1]["b"]["model"]
    assert equal(*downs)
    models = [tree["model"] for tree in fed.deploy(state).trained().values()]
    assert far(models[0], models[1]) > 1e-6  # the hyper-network tells them apart after one round


def test_rates_of_zero_leave_hyper_network_and_encoder_alone() -> None:
    still = ran("odpfl-hn", SIZED, hyper_lr=0.0, encoder_lr=0.0)
    start = federation("odpfl-hn", SIZED)[0].start()
    parameters = set(AWKWARD.parameters)
    assert equal(pick(still.server["model"], parameters), pick(start.server["model"], parameters))
    assert equal(still.server["hyper"], start.server["hyper"])
    assert equal(still.server["encoder"], start.server["encoder"])


def test_a_client_without_training_images_changes_nothing() -> None:
    """Its model is that of the empty description, and it has taken no step from there."""
    fed, watch = federation("odpfl-hn", make_task((0, 9, 12)), replace(TRAIN, weights="uniform"), **SMALL)
    state, report = fed.step(awake(fed.start()))
    assert report.diverged == ()
    up = watch.replies[0]["a"].up
    assert not bool(up["embedding"]["mean"].any())
    assert all(not bool(leaf.any()) for leaf in up["encoder"].values())
    method, server = fed.setup.method, awake(fed.start()).server
    after, _ = method.aggregate(server, {"a": up}, server_context([1.0], fed.context(0)))
    assert far(after["model"], server["model"]) < 1e-15
    assert far(after["hyper"], server["hyper"]) < 1e-15
    assert equal(after["encoder"], server["encoder"])
    assert far(state.server["hyper"], server["hyper"]) > 1e-5


# --- what travels -----------------------------------------------------------------------------------------------------


def test_what_travels() -> None:
    fed, watch = federation("odpfl-hn", SIZED)
    state, reports = run(fed)
    network = float_bytes({"model": state.server["model"]})
    parameters = sum(state.server["model"][name].numel() for name in AWKWARD.parameters)
    trunk = 32 * 100 + 100 + 3 * (100 * 100 + 100)
    encoder = sum(leaf.numel() for leaf in state.server["encoder"].values())
    assert float_bytes({"hyper": state.server["hyper"]}) == 8 * (trunk + 100 * parameters)
    for downs, replies in zip(watch.downs, watch.replies, strict=True):
        for client, reply in replies.items():
            assert set(downs[client]) == {"model", "hyper", "encoder"}
            assert set(reply.up) == {"model", "embedding", "encoder"}
            assert set(downs[client]["model"]) == set(reply.up["model"]) == ENTRIES
            assert float_bytes(downs[client]) == network + 8 * (trunk + 100 * parameters + encoder)
            assert float_bytes(reply.up) == network + 8 * (32 + encoder)  # d_emb + P, and the encoder's gradient
    assert reports[0].bytes_up == 3 * (network + 8 * (32 + encoder))
    assert state.locals == {}
    assert fed.deploy(state).given_bytes == 0
    assert not METHODS["odpfl-hn"].make.linear


# --- who is served with what ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_unseen_clients_are_served_by_what_their_images_look_like(kind: str) -> None:
    arch, _ = KINDS[kind]
    task = make_task((5, 9, 12), unseen=3)
    fed, _ = federation("odpfl-hn", task, arch=arch, **SMALL)
    state = awake(run(fed)[0])
    deployment = fed.deploy(state)
    unseen, deployed = fed.unseen(deployment), deployment.trained()
    server = state.server
    base = pick(server["model"], arch.parameters)
    for client in (*task.unseen, *task.clients):
        index = client.train if len(client.train) else client.test
        e = odpfl_hn.embedded(server["encoder"], images_of(task, index)).mean(0)
        expected = {**server["model"], **odpfl_hn.made(server["hyper"], base, e)}
        tree = {**unseen, **deployed}[client.name]
        assert set(tree) == {"model"}
        assert far(tree["model"], expected) < 1e-12
    assert far(unseen["new0"]["model"], unseen["new1"]["model"]) > 1e-4
    # labels are nobody's business, and neither are the test images of a client that trains
    relabelled = replace(task, labels=torch.where(torch.arange(len(task.labels)) < 26, task.labels, 0))
    other, _ = federation("odpfl-hn", relabelled, arch=arch, **SMALL)
    assert all(equal_trees(tree, unseen[c]) for c, tree in other.unseen(other.deploy(state)).items())
    swapped = replace(task, clients=tuple(replace(c, test=torch.arange(20, 26)) for c in task.clients))
    third, _ = federation("odpfl-hn", swapped, arch=arch, **SMALL)
    assert all(equal_trees(tree, deployed[c]) for c, tree in third.deploy(state).trained().items())


def served_by(session: Session, state: State) -> dict[str, Tree]:
    """What everybody serves with, unseen clients too."""
    deployment = session.deploy(state)
    return {**session.unseen(deployment), **deployment.trained()}


def test_the_description_does_not_depend_on_batches_or_engines() -> None:
    task = make_task((5, 9, 12), unseen=2)
    fed, _ = federation("odpfl-hn", task, **SMALL)
    state = awake(run(fed)[0])
    expected = served_by(fed, state)
    for size, engine in ((1, Sequential(DOUBLE)), (64, Vmapped(DOUBLE)), (3, Vmapped(DOUBLE))):
        method = replace(fed.setup.method, train=replace(TRAIN, batch_size=size))
        setup = replace(fed.setup, methods={method.arch.name: method}, train=method.train)
        other = Session(setup, task, engine, DOUBLE, fed.seed, 3)
        for client, tree in served_by(other, state).items():
            assert far(tree["model"], expected[client]["model"]) < 1e-12


def test_unseen_clients_never_influence_training() -> None:
    alone, _ = federation("odpfl-hn", make_task((5, 9, 12)), **SMALL)
    beside, _ = federation("odpfl-hn", make_task((5, 9, 12), unseen=3), **SMALL)
    expected, state = alone.start(), beside.start()
    for _ in range(3):
        expected, _ = alone.step(expected)
        state, _ = beside.step(state)
        assert len(beside.unseen(beside.deploy(state))) == 3
    assert equal_trees(state.server, expected.server)


def test_models_after_local_training_are_the_trained_ones() -> None:
    fed, watch = federation("odpfl-hn", SIZED, **SMALL)
    state = awake(run(fed, 1)[0])
    trees = fed.after_local(state)
    ups = {client: reply.up["model"] for client, reply in watch.replies[-1].items()}
    before = fed.deploy(state).trained()
    for client, tree in trees.items():
        assert equal(tree["model"], ups[client])
        assert far(tree["model"], before[client]["model"]) > 1e-4


def told_apart(count: int = 6) -> Task:
    """Clients with dark images name two patterns one way, clients with bright images the other; three unseen of each."""
    groups = []
    for number in range(2 * count):
        noise = rng.integers(number, torch.arange(16), 40, SHAPE)
        pattern = torch.arange(16) % 2
        images = noise + 60 * pattern[:, None, None, None] * torch.tensor([[1, 0] * 2, [0, 1] * 2] * 2)
        groups.append((images + 100 * (number % 2), pattern if number % 2 else 1 - pattern))
    images = torch.cat([x for x, _ in groups]).to(torch.uint8)
    labels = torch.cat([y for _, y in groups])
    parts, nothing = torch.arange(32 * count).split(16), torch.zeros(0, dtype=torch.int64)
    seen = tuple(Client(f"c{k}", parts[k], parts[k], parts[k]) for k in range(count))
    unseen = tuple(Client(f"n{k}", nothing, nothing, parts[k]) for k in range(count, 2 * count))
    return Task(images, labels, torch.arange(32 * count), tuple("abc"), seen, unseen)


class Linear(nn.Module):
    """Cannot do one thing with dark images and the opposite with bright ones."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(x.flatten(1))
        return logits


@pytest.mark.grid
def test_unseen_clients_get_the_model_of_their_kind() -> None:
    """What one model cannot know: the hyper-network tells by the images what the labels of such a client mean."""
    task, arch = told_apart(), Arch.of(Linear, SHAPE)
    train = Train(lr=0.1, batch_size=16, local_epochs=3)

    def accuracy(method: str, **options: Any) -> float:
        fed, _ = federation(method, task, train, arch, rounds=80, **options)
        state, _ = run(fed)
        scores = fed.evaluate(fed.setup.plain, fed.unseen(fed.deploy(state)), ["test"])
        return sum(score.accuracy for score in scores.values()) / len(scores)

    assert accuracy("fedavg") < 0.7
    assert accuracy("odpfl-hn", start="network") > 0.9


# --- engines and settings ---------------------------------------------------------------------------------------------


@pytest.mark.grid
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("changes", [{"optimiser": "adam"}, {"clip": 0.5, "lr_decay": 0.5}, {"batch_size": 1}])
def test_stacked_clients_agree_for_other_settings_too(norm: bool, changes: dict[str, Any]) -> None:
    base = make("odpfl-hn", norm, **changes)
    assert base is not None
    # from the released start batches of one sample make tiny networks diverge, and rounding with them
    method = replace(base, hidden=6, start="network")  # type: ignore[call-arg]
    ends = [federate(method, engine(DOUBLE), DOUBLE, rounds=3, participation=0.5) for engine in (Sequential, Vmapped)]
    check_equal(ends[0], ends[1], 1e-10)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"hyper_lr": -0.1}, "hyper-lr must not be negative, not -0.1"),
    ({"encoder_lr": -1.0}, "encoder-lr must not be negative, not -1.0"),
    ({"embedding": 0}, "embedding must be positive, not 0"),
    ({"hidden": -5}, "hidden must be positive, not -5"),
]


@pytest.mark.parametrize(("options", "expected"), REFUSED)
def test_settings_that_cannot_be_meant(options: dict[str, Any], expected: str) -> None:
    said = refusal(METHODS, "method", "odpfl-hn", options, arch=PLAIN, train=TRAIN)
    assert said == f"method 'odpfl-hn': {expected}"


def test_defaults_are_fedttas_for_cifar() -> None:
    expected = {"hyper-lr": 0.5, "encoder-lr": 0.1, "embedding": 32, "hidden": 100, "start": "released"}
    assert METHODS["odpfl-hn"].options == expected
