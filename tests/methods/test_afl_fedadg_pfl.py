"""AFL, FedADG, PFL-Sampled and PFL-Ensemble: slow references in plain PyTorch, limits, messages, unseen clients."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedshift.core.arch import Arch
from fedshift.core.context import Phase
from fedshift.core.grad import gradient
from fedshift.core.method import Batch, Train
from fedshift.core.registry import METHODS
from fedshift.core.tree import Tensors, Tree, drop, float_bytes, pick
from fedshift.engines.sequential import Sequential
from fedshift.engines.vmapped import Vmapped
from fedshift.experiment.schema import AdapterSpec
from fedshift.methods import fedadg
from fedshift.methods.afl import AFL, projected
from fedshift.methods.fedadg import DISCRIMINATOR, GENERATOR, FedADG
from fedshift.runs.session import Session
from fedshift.store.state import State
from tests.conftest import refusal
from tests.methods.federations import (
    AWKWARD,
    CLASSES,
    DOUBLE,
    HEAD,
    NO_IDS,
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
    watching,
)
from tests.test_engines_agree import check_equal, federate, make

NAMES = ["afl", "fedadg", "pfl-sampled", "pfl-ensemble"]
SIZES = {"a": 5, "b": 9, "c": 12, "d": 7}
SIZED = make_task((5, 9, 12))
FOUR = make_task(tuple(SIZES.values()))
ENTRIES = set(AWKWARD.parameters) | set(AWKWARD.buffers)
KINDS: dict[str, tuple[Arch, type[nn.Module]]] = {"batch-norm": (AWKWARD, Awkward), "plain": (PLAIN, Plain)}
MOMENTUM: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.1, "lr_decay": 0.7, "clip": 0.3}
Steps = list[tuple[Tree, Batch, Phase]]


def batches_of(steps: Steps, client: str) -> list[Batch]:
    return [batch for state, batch, _ in steps if int(state["now"]["samples"]) == SIZES[client]]


def images_of(client: str) -> tuple[Tensor, Tensor]:
    """A client's training images, normalised as the networks do it, and their labels."""
    index = FOUR.client(client).train
    return (FOUR.images[index].double() / 255 - 0.5) / 0.5, FOUR.labels[index]


def sgd(parameters: Any, train: Train, number: int) -> torch.optim.SGD:
    lr = train.lr * train.lr_decay**number
    return torch.optim.SGD(parameters, lr, momentum=train.momentum, weight_decay=train.weight_decay)


def stepped(module: nn.Module, optimiser: torch.optim.Optimizer, loss: Tensor, train: Train) -> None:
    """One step of one network; gradients that reached others are forgotten."""
    optimiser.zero_grad()
    loss.backward()
    if train.clip is not None:
        torch.nn.utils.clip_grad_norm_(module.parameters(), train.clip)
    optimiser.step()


def state_of(module: nn.Module) -> Tensors:
    return {name: leaf.detach().clone() for name, leaf in module.state_dict().items()}


def mean_of(models: list[Tensors], shares: list[float]) -> Tensors:
    """Written out; counters keep the largest."""
    result: Tensors = {}
    for name, leaf in models[0].items():
        parts = [model[name] for model in models]
        if leaf.is_floating_point():
            result[name] = torch.stack([share * part for share, part in zip(shares, parts, strict=True)]).sum(0)
        else:
            result[name] = torch.stack(parts).amax(0)
    return result


def lambdas(state: State) -> list[float]:
    return [float(share) for share in state.server["share"].values()]


# --- AFL --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("recipe", [{}, MOMENTUM])
def test_afl_is_the_papers_recursion(kind: str, participation: float, recipe: dict[str, Any]) -> None:
    """Four rounds against torch modules, lists and the formulas."""
    gamma, train = 0.1, replace(TRAIN, local_epochs=2, **recipe)
    arch, module_kind = KINDS[kind]
    watched, steps = watching(AFL)
    fed, watch = federation(watched, FOUR, train, arch, rounds=4, participation=participation, gamma_lambda=gamma)
    state = fed.start()
    w, share, seen = dict(state.server["model"]), dict.fromkeys(SIZES, 0.25), []
    for number in range(4):
        steps.clear()
        state, _ = fed.step(state)
        present, models, losses = list(watch.downs[-1]), [], dict.fromkeys(SIZES, 0.0)
        for client in present:
            module = module_of(w, module_kind)
            x, y = images_of(client)
            losses[client] = float(F.cross_entropy(module.eval()(x), y).detach())
            optimiser = sgd(module.train().parameters(), train, number)
            for batch in batches_of(steps, client):
                loss = F.cross_entropy(module((batch["x"] - 0.5) / 0.5), batch["y"])
                stepped(module, optimiser, loss, train)
            models.append(state_of(module))
            assert float(watch.replies[-1][client].up["risk"]["loss"]) == pytest.approx(losses[client], abs=1e-12)
        total = sum(share[client] for client in present)
        w = mean_of(models, [share[client] / total for client in present])
        rate = gamma * train.lr_decay**number  # falls as every other rate
        point = torch.tensor([share[c] + rate * losses[c] for c in SIZES], dtype=torch.float64)
        share = dict(zip(SIZES, projected(point).tolist(), strict=True))
        seen.append(w)
        assert far(state.server["model"], w) < 1e-11
        assert lambdas(state) == pytest.approx(list(share.values()), abs=1e-12)
        assert far(state.server["average"], mean_of(seen, [1 / len(seen)] * len(seen))) < 1e-11
    assert len(set(share.values())) > 2  # it has moved
    assert far(state.server["average"], state.server["model"]) > 1e-3


@pytest.mark.parametrize("weights", ["size", "uniform"])
def test_afl_without_ascent_is_uniform_fedavg(weights: Any) -> None:
    expected = ran("fedavg", SIZED, replace(TRAIN, weights="uniform"))
    fed, _ = federation("afl", SIZED, replace(TRAIN, weights=weights), gamma_lambda=0.0, average=False)
    state, _ = run(fed)
    assert far(state.server["model"], expected.server["model"]) < 1e-14
    assert lambdas(state) == pytest.approx([1 / 3] * 3, abs=1e-15)
    assert set(state.server) == {"model", "share"}
    assert all(equal(tree["model"], state.server["model"]) for tree in fed.deploy(state).trained().values())


def test_afl_listens_to_the_client_with_the_largest_loss() -> None:
    """The more of the ascent, the larger its share; at last it is the only one, and its model is everybody's."""
    shares = []
    for gamma in (0.0, 0.1, 1.0, 1000.0):
        fed, watch = federation("afl", SIZED, gamma_lambda=gamma)
        state, _ = run(fed, 1)
        risks = [float(reply.up["risk"]["loss"]) for reply in watch.replies[0].values()]
        worst = risks.index(max(risks))
        shares.append(lambdas(state)[worst])
        assert sum(lambdas(state)) == pytest.approx(1, abs=1e-12)
        assert min(lambdas(state)) >= 0
    assert shares == sorted(set(shares))
    assert lambdas(state)[worst] == 1
    state, _ = fed.step(state)
    assert equal(state.server["model"], watch.replies[1]["abc"[worst]].up["model"])


def test_afl_keeps_a_client_apart_that_the_others_would_outvote() -> None:
    """Two clients say one thing of some images and a third the opposite: FedAvg gives it up, AFL does not."""
    task = make_task((12, 12, 12))
    labels = task.labels[:12] % 2
    task = replace(task, images=task.images[:12].repeat(3, 1, 1, 1), labels=torch.cat([labels, labels, 1 - labels]))
    train = Train(lr=0.5, batch_size=12, local_epochs=2)

    def losses(method: str, **options: Any) -> list[float]:
        fed, _ = federation(method, task, train, PLAIN, rounds=40, **options)
        model = run(fed)[0].server["model"]
        parts = [client.train for client in task.clients]
        return [
            float(F.cross_entropy(PLAIN(model, task.images[i].double() / 255).logits, task.labels[i])) for i in parts
        ]

    plain, fair = losses("fedavg"), losses("afl", gamma_lambda=0.05)
    assert max(fair) < max(plain) - 0.2


def test_afl_serves_with_the_mean_and_trains_the_current_model() -> None:
    fed, watch = federation("afl", make_task((5, 9, 12), unseen=1))
    state = fed.start()
    for _ in range(3):
        before = state
        state, _ = fed.step(state)
        assert all(equal(down["model"], before.server["model"]) for down in watch.downs[-1].values())
    for tree in (*fed.deploy(state).trained().values(), *fed.unseen(fed.deploy(state)).values()):
        assert equal(tree["model"], state.server["average"])
    assert int(state.server["averaged"]["rounds"]) == 3
    local = fed.after_local(state)
    assert all(equal(watch.downs[-1][c]["model"], state.server["model"]) for c in local)


def test_a_round_without_a_sound_client_does_not_count_in_the_mean() -> None:
    class Failing(AFL):
        def loss(self, state: Tree, tensors: Tensors, batch: Batch, phase: Phase) -> tuple[Tensor, Tensors]:
            value, buffers = super().loss(state, tensors, batch, phase)
            return value * torch.where(state["now"]["round"] == 1, torch.nan, 1.0), buffers

    fed, _ = federation(Failing, SIZED)
    first, _ = run(fed, 1)
    second, report = fed.step(first)
    assert report.diverged == ("a", "b", "c")
    assert equal_trees(second.server, first.server)
    third, _ = fed.step(second)
    assert int(third.server["averaged"]["rounds"]) == 2


def test_clients_that_count_for_nothing_are_averaged_uniformly() -> None:
    fed, watch = federation("afl", SIZED)
    state = fed.start()
    only = {"a": torch.tensor(1.0).double(), "b": torch.tensor(0.0).double(), "c": torch.tensor(0.0).double()}
    fed.step(state)
    ups = {name: watch.replies[0][name].up for name in "bc"}
    after, _ = fed.setup.method.aggregate({**state.server, "share": only}, ups, server_context([9.0, 12.0]))
    assert far(after["model"], mean_of([up["model"] for up in ups.values()], [0.5, 0.5])) < 1e-14


# --- FedADG -----------------------------------------------------------------------------------------------------------


def networks(tensors: Tensors, prefix: str) -> nn.Sequential:
    """A generator or discriminator as a module."""
    own = {n.removeprefix(f"{prefix}."): leaf for n, leaf in tensors.items() if n.startswith(prefix)}
    sizes = [own["0.weight"].shape, own["1.weight"].shape]
    layers = [nn.Linear(reads, writes) for writes, reads in sizes]
    module = nn.Sequential(layers[0], nn.LeakyReLU(), layers[1]).double()
    module.load_state_dict({n.replace("1.", "2."): leaf.clone() for n, leaf in own.items()})
    return module


def tensors_of(module: nn.Sequential, prefix: str) -> Tensors:
    return {f"{prefix}.{name.replace('2.', '1.')}": leaf for name, leaf in state_of(module).items()}


def features_of(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of a module whose head is called ``out``, and what that head read."""
    read: list[Tensor] = []
    handle = module.get_submodule("out").register_forward_pre_hook(lambda _, args: read.append(args[0]))
    logits = module(x)
    handle.remove()
    return logits, read[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", [{}, MOMENTUM])
def test_fedadg_takes_the_papers_three_steps(kind: str, recipe: dict[str, Any]) -> None:
    """Three rounds, the first a warm-up, against torch with three modules and three optimisers."""
    weight, adversary_lr, train = 0.4, 0.3, replace(TRAIN, local_epochs=2, **recipe)
    arch, module_kind = KINDS[kind]
    watched, steps = watching(FedADG)
    how: dict[str, Any] = {"weight": weight, "adversary_lr": adversary_lr, "warm_up": 1, "hidden": 6, "noise": 3}
    fed, _ = federation(watched, SIZED, train, arch, **how)
    state = fed.start()
    w = dict(state.server["model"])
    judges = {c.name: dict(fed._local(state, c, fed.context(state.round))["model"]) for c in SIZED.clients}
    for number in range(3):
        steps.clear()
        state, _ = fed.step(state)
        models = []
        for client in "abc":
            net = module_of(drop(w, GENERATOR), module_kind).train()
            g, d = networks(w, fedadg.G), networks(judges[client], fedadg.D)
            rate = replace(train, lr=adversary_lr)
            rules = [sgd(net.parameters(), train, number), *(sgd(m.parameters(), rate, number) for m in (g, d))]
            for batch in batches_of(steps, client):
                x, y = (batch["x"] - 0.5) / 0.5, batch["y"]
                if number == 0:
                    assert "noise" not in batch
                    stepped(net, rules[0], F.cross_entropy(net(x), y), train)
                    continue
                classes = F.one_hot(y, CLASSES).double()

                def judged(h: Tensor, d: nn.Module = d, classes: Tensor = classes) -> Tensor:
                    return torch.sigmoid(d(torch.cat([h, classes], 1)))

                def imagined(g: nn.Module = g, classes: Tensor = classes, noise: Tensor = batch["noise"]) -> Tensor:
                    return g(torch.cat([noise, classes], 1))

                before = state_of(net)
                with torch.no_grad():
                    h = features_of(net, x)[1]
                net.load_state_dict(before)  # looking has moved the statistics
                good = judged(imagined().detach()).square().mean() + (1 - judged(h)).square().mean()
                stepped(d, rules[2], -good, train)
                logits, h = features_of(net, x)
                task_loss = F.cross_entropy(logits, y)
                loss = (1 - weight) * task_loss + weight * (1 - judged(h)).square().mean()
                stepped(net, rules[0], loss, train)
                stepped(g, rules[1], (1 - judged(imagined())).square().mean(), train)
            models.append({**state_of(net), **tensors_of(g, fedadg.G)})
            judges[client] = tensors_of(d, fedadg.D)
            assert far(state.locals[client]["model"], judges[client]) < 1e-11
        w = mean_of(models, [5 / 26, 9 / 26, 12 / 26])
        assert far(state.server["model"], w) < 1e-11
    start = fed.start().server["model"]
    assert far(pick(w, GENERATOR), pick(start, GENERATOR)) > 1e-3
    plain = ran("fedavg", SIZED, train, arch).server["model"]
    assert far(drop(w, GENERATOR), plain) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_fedadg_without_its_term_is_fedavg(kind: str) -> None:
    arch, _ = KINDS[kind]
    train = replace(TRAIN, **MOMENTUM)
    expected = ran("fedavg", SIZED, train, arch)
    state = ran("fedadg", SIZED, train, arch, weight=0.0, warm_up=0)
    assert far(drop(state.server["model"], GENERATOR), expected.server["model"]) < 1e-14
    start = federation("fedadg", SIZED, train, arch)[0].start()
    assert far(pick(state.server["model"], GENERATOR), pick(start.server["model"], GENERATOR)) > 1e-5


def test_fedadgs_warm_up_is_fedavg_and_leaves_the_adversaries_alone() -> None:
    fed, _ = federation("fedadg", SIZED, rounds=4, warm_up=3)
    expected, _ = federation("fedavg", SIZED, rounds=4)
    (state, reports), (plain, told) = run(fed, 3), run(expected, 3)
    assert equal(drop(state.server["model"], GENERATOR), plain.server["model"])
    start = fed.start().server["model"]
    assert far(pick(state.server["model"], GENERATOR), pick(start, GENERATOR)) < 1e-15  # the mean of equal ones
    assert [r.loss for r in reports] == [r.loss for r in told]
    for client in SIZED.clients:
        assert equal_trees(state.locals[client.name], fed._first_local(client, fed.context(state.round)))
    after, _ = fed.step(state)
    assert far(pick(after.server["model"], GENERATOR), pick(state.server["model"], GENERATOR)) > 1e-6
    assert far(after.locals["a"]["model"], state.locals["a"]["model"]) > 1e-6


def test_what_travels_in_fedadg() -> None:
    """P and P_gen both ways; the discriminator stays."""
    fed, watch = federation("fedadg", SIZED, warm_up=1, hidden=7, noise=4)
    state, reports = run(fed)
    network = float_bytes({"model": drop(state.server["model"], GENERATOR)})
    generator = 8 * (7 * (4 + CLASSES) + 7 + 12 * 7 + 12)
    for downs, replies in zip(watch.downs, watch.replies, strict=True):
        for client, reply in replies.items():
            for message in (downs[client], reply.up):
                assert {slot: set(leaves) for slot, leaves in message.items()} == {"model": ENTRIES | GENERATOR}
                assert float_bytes(message) == network + generator
    assert [(r.bytes_down, r.bytes_up) for r in reports] == [(3 * (network + generator),) * 2] * 3
    assert all(set(local["model"]) == DISCRIMINATOR for local in state.locals.values())
    assert far(state.locals["a"]["model"], state.locals["b"]["model"]) > 1e-6
    assert METHODS["fedadg"].make.linear


def test_fedadgs_generator_learns_from_the_discriminator() -> None:
    """Its gradient is not zero, is that of finite differences, and steps along it convince the discriminator."""
    method = FedADG(PLAIN, TRAIN, hidden=8)
    model = {n: leaf.double() for n, leaf in PLAIN.init(0).items()}
    judge = fedadg.fresh(model["out.weight"], fedadg.D, (5 + CLASSES, 8, 1))
    tensors = {**method.init_server({"net": model}, ("a",), NO_IDS)["model"], **judge}
    noise = torch.linspace(0, 1, 60, dtype=torch.float64).reshape(6, 10)
    batch = {"x": torch.rand(6, *SHAPE).double(), "y": torch.arange(6) % CLASSES, "noise": noise}
    turn = Phase(name=fedadg.G, trainable=GENERATOR)

    def loss(t: Tensors) -> tuple[Tensor, Tensors]:
        return method.loss({}, {**tensors, **t}, batch, turn)

    live = pick(tensors, GENERATOR)
    grads, first, _ = gradient(loss, live)
    assert all(bool(grads[name].any()) for name in GENERATOR)
    name = f"{fedadg.G}.0.weight"
    nudge = torch.zeros_like(live[name])
    nudge[1, 2] = 1e-6
    ends = [float(loss({**live, name: live[name] + sign * nudge})[0]) for sign in (1, -1)]
    assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(float(grads[name][1, 2]), abs=1e-8)
    for _ in range(100):
        grads, value, _ = gradient(loss, live)
        live = {name: leaf - 5.0 * grads[name] for name, leaf in live.items()}
    assert float(value) < 0.5 * float(first)


def test_fedadg_draws_features_to_the_generators() -> None:
    """What the discriminator says of real features rises against a client trained without the term."""

    def judged(weight: float) -> float:
        fed, _ = federation(
            "fedadg",
            make_task((24,)),
            replace(TRAIN, lr=0.1),
            PLAIN,
            rounds=30,
            weight=weight,
            warm_up=0,
            adversary_lr=0.01,
        )
        state, _ = run(fed)
        method, task = fed.setup.method, fed.task
        assert isinstance(method, FedADG)
        batch = {"x": task.images.double() / 255, "y": task.labels}
        h = PLAIN.encode(state.server["model"], batch["x"])[0]
        return float(method._judged(state.locals["a"]["model"], h, method._one_hot(batch)).mean())

    assert judged(0.9) > judged(0.0) + 0.02


@pytest.mark.grid
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("changes", [{}, {"optimiser": "adam"}, {"clip": 0.5, "lr_decay": 0.5}, {"batch_size": 1}])
def test_stacked_adversaries_agree(norm: bool, changes: dict[str, Any]) -> None:
    """After the warm-up, which the tests of all methods do not leave."""
    base = make("fedadg", norm, **changes)
    assert base is not None
    method = replace(base, warm_up=1, hidden=8)  # type: ignore[call-arg]
    ends = [federate(method, engine(DOUBLE), DOUBLE, rounds=4, participation=0.5) for engine in (Sequential, Vmapped)]
    check_equal(ends[0], ends[1], 1e-10)
    first, *others = (local["model"] for local in ends[0][0].locals.values())
    assert all(far(first, other) > 1e-6 for other in others)  # equal at first: they have been at work


# --- PFL-Sampled and PFL-Ensemble -------------------------------------------------------------------------------------

MANY = make_task((5, 9, 12, 7), unseen=12)
X = MANY.images[-6:].double() / 255
LAYERS = {1: HEAD, 2: HEAD | {n for n in ENTRIES if n.startswith("downsample.1")}}


@pytest.mark.parametrize("method", ["pfl-sampled", "pfl-ensemble"])
def test_pfl_trains_and_serves_as_fedper(method: str) -> None:
    fed, _ = federation(method, MANY)
    plain, _ = federation("fedper", MANY)
    (state, reports), (expected, told) = run(fed), run(plain)
    assert equal_trees(state.server, expected.server)
    assert all(equal_trees(state.locals[c], expected.locals[c]) for c in SIZES)
    assert [(r.loss, r.bytes_up, r.bytes_down) for r in reports] == [(r.loss, r.bytes_up, r.bytes_down) for r in told]
    ours, theirs = fed.deploy(state), plain.deploy(expected)
    served, usual = ours.trained(), theirs.trained()
    assert all(equal(served[c]["model"], usual[c]["model"]) for c in SIZES)
    assert ours.given_bytes == theirs.given_bytes == 4 * 8 * (12 * CLASSES + CLASSES)


@pytest.mark.parametrize("layers", LAYERS)
def test_a_sampled_unseen_client_has_the_model_of_one_client(layers: int) -> None:
    fed, _ = federation("pfl-sampled", MANY, private_layers=layers)
    state, _ = run(fed)
    assert all(set(local["model"]) == LAYERS[layers] for local in state.locals.values())
    deployment = fed.deploy(state)
    whole = {c: tree["model"] for c, tree in deployment.trained().items()}
    drawn, served = [], fed.unseen(deployment)
    for tree in served.values():
        owners = [client for client, model in whole.items() if equal(tree["model"], model)]
        assert len(owners) == 1
        drawn += owners
    assert len(drawn) == 12
    assert len(set(drawn)) == 4  # with this seed everybody is somebody's
    again = federation("pfl-sampled", MANY, private_layers=layers)[0]
    repeated = again.unseen(again.deploy(run(again)[0]))
    assert len(repeated) == 12
    assert all(equal_trees(tree, served[c]) for c, tree in repeated.items())
    other = Session(fed.setup, fed.task, fed.engine, DOUBLE, fed.seed + 1, 3)
    ends = other.unseen(other.deploy(State(state.round, state.server, state.locals)))  # same training, other tickets
    assert any(not equal_trees(tree, served[c]) for c, tree in ends.items())


@pytest.mark.parametrize("layers", LAYERS)
def test_an_ensemble_averages_the_logits_of_all(layers: int) -> None:
    fed, _ = federation("pfl-ensemble", MANY, replace(TRAIN, lr=0.3), private_layers=layers)
    state, _ = run(fed)
    method = fed.setup.method
    deployment = fed.deploy(state)
    outputs = [method.predict(tree, X) for tree in deployment.trained().values()]
    logits = torch.stack([output.logits for output in outputs])
    assert float(logits.std(0).min()) > 0.01  # they disagree
    unseen = fed.unseen(deployment)
    assert len(unseen) == 12
    for tree in unseen.values():
        answer = method.predict(tree, X)
        assert torch.allclose(answer.logits, logits.mean(0), rtol=0, atol=1e-12)
        features = torch.stack([output.features for output in outputs]).mean(0)
        assert torch.allclose(answer.features, features, rtol=0, atol=1e-12)
        assert method.predict(tree, X, batch_stats=True).logits.shape == logits.shape[1:]
        averaged = method.arch(tree["model"], X).logits
        assert (float((averaged - answer.logits).abs().max()) < 1e-12) == (layers == 1)  # else it takes an ensemble
    given = {n: leaf for n, leaf in state.locals["a"]["model"].items() if leaf.is_floating_point()}
    assert deployment.given_bytes == 4 * 8 * sum(leaf.numel() for leaf in given.values())


@pytest.mark.parametrize("layers", LAYERS)
def test_a_fraction_of_an_ensemble_is_each_unseen_clients_own(layers: int) -> None:
    fed, _ = federation("pfl-ensemble", MANY, private_layers=layers, fraction=0.5)
    state, _ = run(fed)
    method = fed.setup.method
    logits = {c: method.predict(tree, X).logits for c, tree in fed.deploy(state).trained().items()}
    pairs = []
    for tree in fed.unseen(fed.deploy(state)).values():
        answer = method.predict(tree, X).logits
        for a in SIZES:
            for b in SIZES:
                if a < b and torch.allclose(answer, (logits[a] + logits[b]) / 2, rtol=0, atol=1e-12):
                    pairs.append((a, b))
    assert len(pairs) == 12
    assert len(set(pairs)) > 2
    smallest, _ = federation("pfl-ensemble", MANY, private_layers=layers, fraction=0.01)
    last, _ = run(smallest)
    sampled, _ = federation("pfl-sampled", MANY, private_layers=layers)
    expected = sampled.unseen(sampled.deploy(run(sampled)[0]))
    for client, tree in smallest.unseen(smallest.deploy(last)).items():  # one of them: the same draw
        one = method.arch(expected[client]["model"], X).logits
        assert torch.allclose(method.predict(tree, X).logits, one, rtol=0, atol=1e-14)


@pytest.mark.parametrize("method", ["pfl-sampled", "pfl-ensemble"])
def test_only_clients_that_took_part_are_given_away(method: str) -> None:
    fed, _ = federation(method, MANY, participation=0.5)
    assert fed.unseen(fed.deploy(fed.start())) == {}  # nobody has trained anything
    state, _ = run(fed, 1)
    known = sorted(state.locals)
    assert len(known) == 2
    own = [state.locals[c]["model"]["out.weight"] for c in known]
    for tree in fed.unseen(fed.deploy(state)).values():
        head = tree["model"]["out.weight"]
        candidates = own if method == "pfl-sampled" else [torch.stack(own).mean(0)]
        assert any(torch.allclose(head, candidate, rtol=0, atol=1e-15) for candidate in candidates)


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("adapter", ["none", "t3a", "tent", "bn"])
def test_adapters_go_on_from_an_ensemble(layers: int, adapter: str) -> None:
    fed, _ = federation("pfl-ensemble", MANY, private_layers=layers)
    state, _ = run(fed, 1)
    made = {fed.setup.method.arch.name: fed.setup.adapter(AdapterSpec(name=adapter), fed.setup.method)}
    scores = fed.evaluate(made, fed.unseen(fed.deploy(state)), ["test"])
    assert len(scores) == 12
    assert all(score.samples == 4 and torch.tensor(score.loss).isfinite() for score in scores.values())


# --- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", NAMES)
def test_unseen_clients_never_influence_training(method: str) -> None:
    alone, _ = federation(method, make_task((5, 9, 12)))
    beside, _ = federation(method, make_task((5, 9, 12), unseen=3))
    expected, state = alone.start(), beside.start()
    for _ in range(3):
        expected, _ = alone.step(expected)
        state, _ = beside.step(state)
        assert len(beside.unseen(beside.deploy(state))) == 3
    assert equal_trees(state.server, expected.server)
    assert all(equal_trees(state.locals[c], expected.locals[c]) for c in expected.locals)


@pytest.mark.parametrize("method", ["afl", "fedadg"])
def test_unseen_clients_get_the_global_model(method: str) -> None:
    fed, _ = federation(method, make_task((5, 9, 12), unseen=1))
    state, _ = run(fed)
    expected = state.server["average"] if method == "afl" else drop(state.server["model"], GENERATOR)
    deployment = fed.deploy(state)
    for tree in (*fed.unseen(deployment).values(), *deployment.trained().values()):
        assert equal(tree["model"], expected)
    assert deployment.given_bytes == 0


def test_one_number_more_goes_up_in_afl() -> None:
    fed, watch = federation("afl", SIZED)
    state, reports = run(fed)
    cost = float_bytes({"model": state.server["model"]})
    for downs, replies in zip(watch.downs, watch.replies, strict=True):
        for client, reply in replies.items():
            assert {slot: set(leaves) for slot, leaves in downs[client].items()} == {"model": ENTRIES}
            assert {slot: set(leaves) for slot, leaves in reply.up.items()} == {"model": ENTRIES, "risk": {"loss"}}
            assert (float_bytes(downs[client]), float_bytes(reply.up)) == (cost, cost + 8)
    assert [(r.bytes_down, r.bytes_up) for r in reports] == [(3 * cost, 3 * cost + 24)] * 3
    assert state.locals == {}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("afl", {"gamma_lambda": -0.1}, "gamma-lambda must not be negative, not -0.1"),
    ("afl", {"gamma_lambda": float("nan")}, "gamma-lambda must not be negative, not nan"),
    ("fedadg", {"weight": 1.5}, "weight must lie in [0, 1], not 1.5"),
    ("fedadg", {"warm_up": -1}, "warm-up must not be negative, not -1"),
    ("fedadg", {"adversary_lr": -1.0}, "adversary-lr must not be negative, not -1.0"),
    ("fedadg", {"noise": 0}, "noise must be positive, not 0"),
    ("fedadg", {"hidden": 0}, "hidden must be positive, not 0"),
    ("pfl-sampled", {"private_layers": 0}, "private-layers must be positive, not 0"),
    ("pfl-ensemble", {"private_layers": 0}, "private-layers must be positive, not 0"),
    ("pfl-ensemble", {"fraction": 0.0}, "fraction must be positive, not 0.0"),
    ("pfl-ensemble", {"fraction": 1.5}, "fraction must lie in [0, 1], not 1.5"),
]


@pytest.mark.parametrize(("method", "options", "expected"), REFUSED)
def test_settings_that_cannot_be_meant(method: str, options: dict[str, Any], expected: str) -> None:
    said = refusal(METHODS, "method", method, options, arch=PLAIN, train=TRAIN)
    assert said == f"method {method!r}: {expected}"


def test_an_unknown_option_is_named() -> None:
    said = refusal(METHODS, "method", "pfl-sampled", {"fraction": 0.5}, arch=PLAIN, train=TRAIN)
    assert re.match("method 'pfl-sampled' has no option 'fraction'", said)


def test_defaults() -> None:
    assert METHODS["afl"].options == {"gamma-lambda": 0.3, "average": True}
    expected = {"weight": 0.15, "warm-up": 5, "noise": 10, "hidden": 512, "adversary-lr": None}
    assert METHODS["fedadg"].options == expected
    assert METHODS["pfl-sampled"].options == {"private-layers": 1}
    assert METHODS["pfl-ensemble"].options == {"private-layers": 1, "fraction": 1.0}
