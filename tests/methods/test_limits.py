"""Every method in the limits in which it must become something simpler, and the invariants its paper promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedshift.core.context import Context, Phase
from fedshift.core.grad import gradient
from fedshift.core.method import Batch, Method, Train
from fedshift.core.registry import METHODS
from fedshift.core.tree import Tensors, Tree, pick, weighted_mean
from fedshift.errors import UserError
from fedshift.methods.centralised import Centralised
from fedshift.methods.ditto import Ditto
from fedshift.methods.fedavg import FedAvg
from fedshift.methods.fedprox import FedProx
from fedshift.methods.fedrep import FedRep
from fedshift.methods.finetune import FineTune
from fedshift.methods.scaffold import Scaffold
from fedshift.runs.setup import check_method
from fedshift.store.state import State
from tests.conftest import some_of
from tests.methods.federations import (
    AWKWARD,
    HEAD,
    NORM,
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
    torch_training,
    watching,
)

ENTRIES = set(AWKWARD.parameters) | set(AWKWARD.buffers)
PARAMETERS = set(AWKWARD.parameters)
SIZED = make_task((5, 9, 12))  # clients of different sizes, and batches of 4, 1, 5 (9 = 4 + 5 with BatchNorm)


# --- FedAvg and plain PyTorch -----------------------------------------------------------------------------------------

Make = Callable[[list[nn.Parameter], float], torch.optim.Optimizer]
RECIPES: dict[str, tuple[dict[str, Any], Make]] = {
    "sgd": ({}, lambda p, lr: torch.optim.SGD(p, lr)),
    "momentum and decay": (
        {"momentum": 0.9, "weight_decay": 0.1},
        lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, weight_decay=0.1),
    ),
    "adam": ({"optimiser": "adam", "weight_decay": 0.1}, lambda p, lr: torch.optim.Adam(p, lr, weight_decay=0.1)),
    "clipped, with a falling rate": ({"clip": 0.5, "lr_decay": 0.7}, lambda p, lr: torch.optim.SGD(p, lr)),
    "steps": ({"local_steps": 5}, lambda p, lr: torch.optim.SGD(p, lr)),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", [Awkward, Plain])
def test_fedavg_of_one_client_is_plain_torch(recipe: str, kind: type[nn.Module]) -> None:
    settings, make = RECIPES[recipe]
    train = Train(lr=0.05, batch_size=4, local_epochs=2, **settings)
    watched, steps = watching(FedAvg)
    one, _ = federation(watched, make_task((10,)), train, AWKWARD if kind is Awkward else PLAIN)
    state = one.start()
    module = module_of(state.server["model"], kind)
    for number in range(3):
        steps.clear()
        state, _ = one.step(state)
        assert len(steps) == (5 if recipe == "steps" else 6)
        rate = train.lr * train.lr_decay**number
        batches = [batch for _, batch, _ in steps]
        torch_training(module, batches, lambda p, lr=rate: make(p, lr), train.clip)  # type: ignore[misc]
        assert far(state.server["model"], module.state_dict()) < 1e-12
    assert far(state.server["model"], one.start().server["model"]) > 0.05


def test_batches_are_the_clients_own_images_and_labels() -> None:
    watched, steps = watching(FedAvg)
    task = make_task((6, 10))
    run(federation(watched, task, replace(TRAIN, local_epochs=1))[0], 1)
    ids = torch.cat([batch["index"] for _, batch, _ in steps])
    assert sorted(ids.tolist()) == list(range(16))
    for state, batch, _ in steps:
        assert torch.equal(batch["x"], task.images[batch["index"]].double() / 255)
        assert torch.equal(batch["y"], task.labels[batch["index"]])
        first = float(state["now"]["samples"]) == 6
        assert all((i < 6) == first for i in batch["index"].tolist())


def test_the_order_of_samples_is_each_clients_and_rounds_own_and_every_methods() -> None:
    def orders(base: type[Method], clients: int) -> dict[tuple[int, int], list[int]]:
        """(client, round) -> its samples in their order, counted from its first."""
        watched, steps = watching(base)
        run(federation(watched, make_task((12,) * clients))[0])
        found: dict[tuple[int, int], list[int]] = {}
        for state, batch, phase in steps:
            ids = batch["index"].tolist()
            key = (ids[0] // 12, int(state["now"]["round"]))
            found.setdefault(key, []).extend(i % 12 for i in ids if phase.slot == "model")
        return found

    fedavg = orders(FedAvg, 3)
    assert len({tuple(order) for order in fedavg.values()}) == 9
    assert orders(FedProx, 3) == orders(Ditto, 3) == fedavg
    assert orders(FedAvg, 2) == {key: order for key, order in fedavg.items() if key[0] < 2}


def test_the_server_averages_by_size_or_uniformly() -> None:
    for weights, shares in (("size", [5 / 26, 9 / 26, 12 / 26]), ("uniform", [1 / 3] * 3)):
        fed, watch = federation("fedavg", SIZED, replace(TRAIN, weights=weights))  # type: ignore[arg-type]
        state, _ = run(fed, 1)
        ups = [reply.up["model"] for reply in watch.replies[0].values()]
        for name in ENTRIES:
            if name.endswith("num_batches_tracked"):
                continue
            expected = sum((share * up[name] for share, up in zip(shares, ups, strict=True)), torch.tensor(0.0))
            assert torch.allclose(state.server["model"][name], expected, rtol=0, atol=1e-14), name
        assert far(ups[0], ups[1]) > 1e-3


def test_weights_by_size_and_uniform_coincide_for_equal_sizes_only() -> None:
    by_size, uniform = TRAIN, replace(TRAIN, weights="uniform")
    same = [ran("fedavg", make_task((8, 8, 8)), train).server["model"] for train in (by_size, uniform)]
    other = [ran("fedavg", make_task((4, 8, 12)), train).server["model"] for train in (by_size, uniform)]
    assert equal(*same)
    assert far(*other) > 1e-4


@pytest.mark.parametrize("method", some_of(METHODS))
def test_no_epochs_leave_the_model_as_it_is(method: str) -> None:
    exchanged = {name: ["digest_epochs"] for name in ("fedmd", "hetero-tent", "heterofedtta")}
    counted = {**exchanged, "fedicon": ["personal_epochs", "head_epochs"]}
    counted |= {name: ["personal_epochs"] for name in ("fedthe", "ours")}
    epochs = dict.fromkeys(counted.get(method, []), 0)  # those that [train] does not count
    # from the released start a model is a product, which clients and server round differently
    exact: dict[str, Any] = {"start": "network"} if method == "odpfl-hn" else {}
    fed, _ = federation(method, train=replace(TRAIN, local_epochs=0), **epochs, **exact)
    start = fed.start()
    state, reports = run(fed)
    assert state.round == 3
    assert equal(state.server["model"], start.server["model"])
    entries = {*fed.setup.method.arch.parameters, *fed.setup.method.arch.buffers}
    trains = {client.name for client in fed.training.clients}
    for client, tree in fed.deploy(state).trained().items():
        own = fed._first_local(fed.task.client(client), fed.context(start.round)) if client in trains else {}
        begun = {
            **fed.initial[fed.setup.method.arch.name],
            **pick(own.get("model", {}), entries),
        }  # some have a start of their own
        assert equal(tree["model"], begun)
    assert all(report.diverged == () for report in reports)


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "scaffold", "ditto", "fedbn", "fedper", "fedrep", "lg-fedavg"])
def test_the_average_of_equal_clients_is_each_of_them(method: str) -> None:
    """Three clients with the same data, in one batch, do what one does."""
    task = make_task((6,))
    (first,) = task.clients
    thrice = replace(task, clients=tuple(replace(first, name=name) for name in "abc"))
    train = replace(TRAIN, batch_size=6, local_epochs=3)
    one, three = (federation(method, data, train)[0] for data in (task, thrice))
    alone, together = (fed.deploy(run(fed)[0]).trained() for fed in (one, three))
    for tree in together.values():
        assert far(tree["model"], alone["a"]["model"]) < 1e-12
    assert far(alone["a"]["model"], one.start().server["model"]) > 0.01


@pytest.mark.parametrize("method", ["fedbn", "fedper", "lg-fedavg", "local", "centralised"])
def test_with_one_client_it_does_not_matter_what_travels(method: str) -> None:
    task = make_task((10,))
    task = replace(task, clients=(replace(task.clients[0], name="everybody"),))
    base, fed = federation("fedavg", task)[0], federation(method, task)[0]
    expected = run(base)[0].server["model"]
    assert equal(fed.deploy(run(fed)[0]).trained()["everybody"]["model"], expected)


# --- BatchNorm's buffers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", some_of(METHODS))
def test_counters_stay_integers(method: str) -> None:
    fed, _ = federation(method, SIZED)
    state, _ = run(fed)
    trees = {**state.trees(), **{f"deployed {name}": tree for name, tree in fed.deploy(state).trained().items()}}
    found = [
        leaf
        for tree in trees.values()
        for leaves in tree.values()
        for name, leaf in leaves.items()
        if name.endswith("num_batches_tracked")
    ]
    assert len(found) >= 2
    assert all(leaf.dtype == torch.int64 and leaf.shape == () for leaf in found)
    assert max(map(int, found)) > 0 or method == "majority"  # which trains nothing


def test_counters_are_counted_and_never_averaged() -> None:
    fed, watch = federation("fedavg", SIZED)
    state, _ = run(fed, 2)
    name = "downsample.1.num_batches_tracked"
    assert [int(reply.up["model"][name]) for reply in watch.replies[0].values()] == [
        1,
        2,
        3,
    ]  # steps of 5, 9, 12 samples
    assert int(state.server["model"][name]) == 6  # the most steps, twice


def test_running_statistics_are_averaged_with_the_same_weights() -> None:
    fed, watch = federation("fedavg", SIZED)
    state, _ = run(fed, 1)
    ups = [reply.up["model"] for reply in watch.replies[0].values()]
    for name in ("foo.running_mean", "foo.running_var", "downsample.1.running_mean"):
        expected = (5 * ups[0][name] + 9 * ups[1][name] + 12 * ups[2][name]) / 26
        assert torch.allclose(state.server["model"][name], expected, rtol=0, atol=1e-14)
        assert not torch.allclose(ups[0][name], ups[1][name], atol=1e-4)


# --- FedProx ----------------------------------------------------------------------------------------------------------


def test_fedprox_without_its_term_is_fedavg() -> None:
    for train in (TRAIN, replace(TRAIN, momentum=0.9, weight_decay=0.01, clip=0.5)):
        assert equal_trees(ran("fedprox", SIZED, train, mu=0.0).server, ran("fedavg", SIZED, train).server)
    assert far(ran("fedprox", SIZED, mu=0.1).server["model"], ran("fedavg", SIZED).server["model"]) > 1e-5


def test_a_larger_mu_stays_nearer_to_the_received_model() -> None:
    moved = []
    for mu in (0.0, 0.3, 1.0, 3.0, 10.0):
        fed, watch = federation("fedprox", SIZED, replace(TRAIN, local_epochs=10), mu=mu)
        run(fed, 1)
        pairs = [(watch.downs[0][name]["model"], reply.up["model"]) for name, reply in watch.replies[0].items()]
        moved.append(
            sum(
                far(pick(down, PARAMETERS), pick(up, PARAMETERS)) for down, up in pairs
            )  # the largest step of any weight
        )
    assert moved == sorted(moved, reverse=True)
    assert len(set(moved)) == 5
    assert moved[-1] < 0.3 * moved[0]


def random_like(tensors: Tensors, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype) if leaf.is_floating_point() else leaf
        for name, leaf in tensors.items()
    }


def one_batch(count: int = 6) -> dict[str, Tensor]:
    task = make_task((count,))
    return {"x": task.images.double() / 255, "y": task.labels, "index": task.ids}


@pytest.mark.parametrize(("cls", "slot"), [(FedProx, "model"), (Ditto, "personal")])
def test_the_proximal_gradient_is_mu_times_the_distance(cls: Any, slot: str) -> None:
    strength = 0.7
    method = cls(AWKWARD, TRAIN, strength)
    received = {name: leaf.double() if leaf.is_floating_point() else leaf for name, leaf in AWKWARD.init(0).items()}
    here = {**received, **random_like(pick(received, PARAMETERS), 1)}
    state = {**method.begin({"model": received}, {"personal": here} if slot == "personal" else {}), slot: here}

    def grads_of(which: Method) -> Tensors:
        live = pick(here, PARAMETERS)
        return gradient(lambda t: which.loss(state, {**here, **t}, one_batch(), Phase(slot=slot)), live)[0]

    plain, pulled = grads_of(FedAvg(AWKWARD, TRAIN)), grads_of(method)
    assert plain.keys() == PARAMETERS
    for name in PARAMETERS:
        assert torch.allclose(pulled[name] - plain[name], strength * (here[name] - received[name]), rtol=0, atol=1e-13)


@pytest.mark.parametrize(("cls", "slot"), [(FedProx, "model"), (Ditto, "personal")])
def test_running_statistics_are_not_in_the_proximal_term(cls: Any, slot: str) -> None:
    method = cls(AWKWARD, TRAIN, 1.0)
    received = AWKWARD.init(0)
    local = {"personal": received} if slot == "personal" else {}
    values = []
    for shift in (0.0, 100.0):
        state = method.begin({"model": received}, local)
        assert set(state["anchor"]) == PARAMETERS
        moved = {
            n: leaf + shift if n.endswith(("running_mean", "running_var")) else leaf for n, leaf in received.items()
        }
        batch = {**one_batch(), "x": one_batch()["x"].float()}
        values.append(float(method.loss(state, moved, batch, Phase(slot=slot))[0]))
    assert values[0] == values[1]


# --- Ditto ------------------------------------------------------------------------------------------------------------


def test_dittos_personal_model_without_its_term_is_local() -> None:
    for train in (TRAIN, replace(TRAIN, momentum=0.9, weight_decay=0.01, lr_decay=0.9, local_epochs=2)):
        ditto, local = (ran("ditto", SIZED, train, lam=0.0), ran("local", SIZED, train))
        for name in "abc":
            assert equal(ditto.locals[name]["personal"], local.locals[name]["model"])
    assert far(ran("ditto", SIZED, lam=1.0).locals["a"]["personal"], ditto.locals["a"]["personal"]) > 1e-4


def test_dittos_global_model_is_fedavgs_whatever_its_strength() -> None:
    expected = ran("fedavg", SIZED).server
    for lam in (0.0, 1.0, 15.0):
        fed, _ = federation("ditto", SIZED, lam=lam)
        state, reports = run(fed)
        assert equal_trees(state.server, expected)
    base = run(federation("fedavg", SIZED)[0])[1]
    assert [(r.bytes_down, r.bytes_up) for r in reports] == [(r.bytes_down, r.bytes_up) for r in base]


def test_a_large_lambda_holds_the_personal_model_at_the_received_one() -> None:
    gaps = []
    for lam in (0.0, 1.0, 5.0, 20.0):  # at 20 the step is w_t - lr grad: rate times lambda is one
        fed, watch = federation("ditto", SIZED, replace(TRAIN, local_epochs=4), lam=lam)
        state, _ = run(fed)
        received = watch.downs[-1]["a"]["model"]
        gaps.append(far(pick(state.locals["a"]["personal"], PARAMETERS), pick(received, PARAMETERS)))
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 0.25 * gaps[0]


def test_ditto_deploys_the_personal_model() -> None:
    fed, _ = federation("ditto", SIZED)
    state, _ = run(fed)
    deployed = fed.deploy(state).trained()
    for name in "abc":
        assert equal(deployed[name]["model"], state.locals[name]["personal"])


# --- SCAFFOLD ---------------------------------------------------------------------------------------------------------


def test_scaffold_with_zero_controls_takes_fedavgs_first_round() -> None:
    uniform = replace(TRAIN, weights="uniform", momentum=0.5)
    for weights in ("uniform", "size"):  # its own weights are uniform whatever [train] says
        first = run(federation("scaffold", SIZED, replace(uniform, weights=weights))[0], 1)[0]  # type: ignore[arg-type]
        expected = run(federation("fedavg", SIZED, uniform)[0], 1)[0]
        assert far(first.server["model"], expected.server["model"]) < 1e-14
    second = [run(federation(name, SIZED, uniform)[0], 2)[0].server["model"] for name in ("scaffold", "fedavg")]
    assert far(*second) > 1e-4


@pytest.mark.parametrize("participation", [1.0, 0.6])
@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "lr_decay": 0.8, "clip": 1.0}, {"local_steps": 7}])
def test_scaffolds_controls_average_to_the_servers(participation: float, settings: dict[str, Any]) -> None:
    train = replace(TRAIN, **settings)
    fed, _ = federation("scaffold", SIZED, train, participation=participation, rounds=5)
    state = fed.start()
    for _ in range(5):
        state, _ = fed.step(state)
        own = [state.locals[name]["ci"] for name in state.locals]
        assert own
        for name, control in state.server["c"].items():
            mean = sum((ci[name] for ci in own), torch.tensor(0.0)) / 3  # who never came has a control of zero
            assert torch.allclose(mean, control, rtol=0, atol=1e-12), name
    assert set(state.server["c"]) == PARAMETERS
    assert max(float(leaf.abs().max()) for leaf in state.server["c"].values()) > 0.01


def test_scaffold_is_the_papers_recursion() -> None:
    """Three rounds against torch modules and the formulas, with a falling rate and a server's rate."""
    train, server_lr = replace(TRAIN, lr_decay=0.7, local_epochs=2), 1.5
    watched, steps = watching(Scaffold)
    fed, _ = federation(watched, SIZED, train, server_lr=server_lr)
    state = fed.start()
    w = state.server["model"]
    zero = {name: torch.zeros_like(w[name]) for name in PARAMETERS}
    c, ci = dict(zero), {name: dict(zero) for name in "abc"}
    for number in range(3):
        steps.clear()
        state, _ = fed.step(state)
        lr = train.lr * train.lr_decay**number
        ys, changes = [], []
        for client, size in zip("abc", (5, 9, 12), strict=True):
            own = [batch for before, batch, _ in steps if int(before["now"]["samples"]) == size]
            module = module_of(w)
            correction = {name: c[name] - ci[client][name] for name in PARAMETERS}
            torch_training(module, own, lambda p, lr=lr: torch.optim.SGD(p, lr), correct=correction)  # type: ignore[misc]
            y = {name: leaf.detach().clone() for name, leaf in module.state_dict().items()}
            new = {n: ci[client][n] - c[n] + (w[n] - y[n]) / (len(own) * lr) for n in PARAMETERS}
            changes.append({n: new[n] - ci[client][n] for n in PARAMETERS})
            ci[client] = new
            ys.append(y)
        mean = weighted_mean(ys, torch.full((3,), 1 / 3, dtype=torch.float64))
        w = {**mean, **{n: w[n] + server_lr * (mean[n] - w[n]) for n in PARAMETERS}}
        c = {n: c[n] + sum((change[n] for change in changes), torch.tensor(0.0)) / 3 for n in PARAMETERS}
        assert far(state.server["model"], w) < 1e-12
        assert far(state.server["c"], c) < 1e-12
        assert all(far(state.locals[client]["ci"], ci[client]) < 1e-12 for client in "abc")


def test_scaffolds_server_rate_scales_the_step_of_parameters_only() -> None:
    start = federation("scaffold", SIZED)[0].start().server["model"]
    one, two = (run(federation("scaffold", SIZED, server_lr=rate)[0], 1)[0].server["model"] for rate in (1.0, 2.0))
    for name in PARAMETERS:
        assert torch.allclose(two[name] - start[name], 2 * (one[name] - start[name]), rtol=0, atol=1e-13)
    assert all(torch.equal(one[name], two[name]) for name in ENTRIES - PARAMETERS)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("steps", [1, 2, 9])
def test_scaffolds_control_is_the_gradient_where_the_gradient_is_always_the_same(momentum: float, steps: int) -> None:
    """Also with momentum, which goes further than the rate times the number of steps."""
    slope = random_like(pick(AWKWARD.init(0), PARAMETERS), 4)

    class Inclined(Scaffold):
        def loss(self, state: Tree, tensors: Tensors, batch: Batch, phase: Phase) -> tuple[Tensor, Tensors]:
            return torch.stack([(tensors[n] * leaf).sum() for n, leaf in slope.items()]).sum(), {}

    train = replace(TRAIN, momentum=momentum, local_steps=steps, lr_decay=0.5)
    fed, _ = federation(Inclined, SIZED, train)
    state = fed.start()
    for _ in range(3):
        state, _ = fed.step(state)
        for tree in (state.server["c"], *(local["ci"] for local in state.locals.values())):
            assert far(tree, slope) < 1e-12


def test_a_client_without_steps_keeps_scaffolds_control() -> None:
    fed, _ = federation("scaffold", make_task((0, 9, 12)))
    state = fed.start()
    for _ in range(3):
        state, report = fed.step(state)
        assert report.diverged == ()
        assert not any(bool(leaf.any()) for leaf in state.locals["a"]["ci"].values())
    assert any(bool(leaf.any()) for leaf in state.locals["b"]["ci"].values())


def test_scaffold_is_for_sgd() -> None:
    with pytest.raises(UserError, match="defined for optimiser sgd, not adam"):
        Scaffold(AWKWARD, Train(optimiser="adam"))


def test_scaffold_corrects_before_it_clips() -> None:
    method = Scaffold(AWKWARD, replace(TRAIN, clip=0.1))
    received = {n: leaf.double() if leaf.is_floating_point() else leaf for n, leaf in AWKWARD.init(0).items()}
    big = {name: leaf * 100 for name, leaf in random_like(pick(received, PARAMETERS), 3).items()}
    zero = {name: torch.zeros_like(leaf) for name, leaf in big.items()}
    one = torch.tensor(1.0, dtype=torch.float64)
    log = {"loss": one * 0, "steps": one * 0}
    state = {"model": received, "c": big, "ci": zero, "optim": {}, "now": {"decay": one}, "log": log}
    after = method.client_step(state, one_batch(), Phase())["model"]
    step = {name: (after[name] - received[name]) / TRAIN.lr for name in PARAMETERS}
    norm = torch.stack([leaf.square().sum() for leaf in step.values()]).sum().sqrt()
    assert abs(float(norm) - 0.1) < 1e-6  # the corrected gradient has the allowed length
    direction = sum(float((step[n] * big[n]).sum()) for n in PARAMETERS)
    assert direction < 0


# --- what travels -----------------------------------------------------------------------------------------------------

SHARED = {
    "fedavg": ENTRIES,
    "fedprox": ENTRIES,
    "finetune": ENTRIES,
    "ditto": ENTRIES,
    "scaffold": ENTRIES,
    "centralised": ENTRIES,
    "local": set(),
    "fedbn": ENTRIES - NORM,
    "fedper": ENTRIES - HEAD,
    "fedrep": ENTRIES - HEAD,
    "lg-fedavg": HEAD,
}


@pytest.mark.parametrize("method", SHARED)
def test_exactly_the_stated_tensors_travel(method: str) -> None:
    fed, watch = federation(method, SIZED)
    state, reports = run(fed)
    slots = {"model", "c"} if method == "scaffold" else {"model"}
    ups = {"model", "dc"} if method == "scaffold" else {"model"}
    floats = 0
    for downs, replies in zip(watch.downs, watch.replies, strict=True):
        for name, reply in replies.items():
            assert set(downs[name]) == slots
            assert set(reply.up) == ups
            assert set(downs[name]["model"]) == SHARED[method]
            assert set(reply.up["model"]) == SHARED[method]
            controls = PARAMETERS if method == "scaffold" else set()
            assert set(downs[name].get("c", {})) == set(reply.up.get("dc", {})) == controls
            floats = sum(
                leaf.numel() for leaves in reply.up.values() for leaf in leaves.values() if leaf.is_floating_point()
            )
    clients = 1 if method == "centralised" else 3
    assert [report.bytes_up for report in reports] == [8 * floats * clients] * 3
    assert [report.bytes_down for report in reports] == [8 * floats * clients] * 3
    private = ENTRIES - SHARED[method]
    for tree in state.locals.values():
        assert set(tree.get("model", {})) == private
    assert bool(state.locals) == (bool(private) or method in ("ditto", "scaffold"))


@pytest.mark.parametrize("method", ["fedbn", "fedper", "fedrep", "lg-fedavg", "local"])
def test_the_server_never_overwrites_what_is_private(method: str) -> None:
    """Whatever nonsense the server holds under a private name, nobody notices."""
    fed, _ = federation(method, SIZED)
    state, _ = run(fed, 1)
    private = fed.setup.method.private(fed.context(state.round))
    assert private == ENTRIES - SHARED[method]
    kept = private & state.server["model"].keys()
    assert kept == (private if method != "local" else set())  # without a federation the server has no model at all
    for name in kept:  # not even touched by the first round
        assert torch.equal(state.server["model"][name], fed.start().server["model"][name])
    own = [state.locals[name]["model"] for name in "abc"]
    assert all(far(own[i], own[j]) > 1e-4 for i, j in ((0, 1), (1, 2), (0, 2)))
    nonsense = {n: leaf * 0 + 77 if n in private else leaf for n, leaf in state.server["model"].items()}
    spoilt = State(state.round, {**state.server, "model": nonsense}, state.locals)
    clean, dirty = fed.step(state)[0], fed.step(spoilt)[0]
    assert all(equal_trees(clean.locals[name], dirty.locals[name]) for name in "abc")
    assert equal(*({n: t for n, t in which.server["model"].items() if n not in private} for which in (clean, dirty)))
    if method != "fedrep":  # which trains its head once more
        for name, tree in fed.deploy(spoilt).trained().items():
            assert equal(pick(tree["model"], private), state.locals[name]["model"])
            assert equal(pick(tree["model"], SHARED[method]), pick(state.server["model"], SHARED[method]))


def test_fedbn_keeps_affine_and_statistics_in_awkward_places() -> None:
    assert {"foo.weight", "foo.running_mean", "downsample.1.bias", "downsample.1.running_var"} <= NORM
    fed, watch = federation("fedbn", SIZED)
    state, _ = run(fed)
    for messages in (*watch.downs, *({n: r.up for n, r in replies.items()} for replies in watch.replies)):
        assert all(not set(tree["model"]) & NORM for tree in messages.values())
        assert all("bn_not.weight" in tree["model"] for tree in messages.values())
    assert all(set(tree["model"]) == NORM for tree in state.locals.values())


def test_fedbn_needs_normalisation() -> None:
    with pytest.raises(UserError, match="method 'fedbn' needs normalisation layers"):
        check_method("fedbn", METHODS["fedbn"].make(arch=PLAIN, train=TRAIN))
    check_method("fedbn", METHODS["fedbn"].make(arch=AWKWARD, train=TRAIN))


# --- FedRep, FedPer, LG-FedAvg ----------------------------------------------------------------------------------------


def test_fedrep_trains_head_and_body_in_turn() -> None:
    watched, steps = watching(FedRep)
    fed, _ = federation(watched, make_task((8,)), head_epochs=3, body_epochs=2)
    state, _ = run(fed, 1)
    assert [phase.name for _, _, phase in steps] == ["head"] * 6 + ["body"] * 4
    models = [before["model"] for before, _, _ in steps]
    body = ENTRIES - HEAD
    for number in range(1, 6):
        assert equal(pick(models[number], body), pick(models[0], body))  # also the running statistics stand still
        assert not equal(pick(models[number], HEAD), pick(models[number - 1], HEAD))
    for number in range(7, 10):
        assert equal(pick(models[number], HEAD), pick(models[6], HEAD))
        assert far(pick(models[number], body & PARAMETERS), pick(models[number - 1], body & PARAMETERS)) > 0
        assert not equal(pick(models[number], NORM), pick(models[number - 1], NORM))
    assert equal(state.locals["a"]["model"], pick(models[6], HEAD))
    trained = fed.setup.method.phases(Context(0, 1, 1))
    assert [set(fed.setup.method.trainable(phase)) for phase in trained] == [HEAD, PARAMETERS - HEAD]


def test_fedrep_deploys_the_received_body_under_a_head_trained_on_it() -> None:
    watched, steps = watching(FedRep)
    fed, _ = federation(watched, make_task((8, 8)))
    state, _ = run(fed)
    steps.clear()
    deployed = fed.deploy(state).trained()
    assert [phase.name for _, _, phase in steps] == ["head"] * 4  # two clients, two batches
    for name, tree in deployed.items():
        assert equal(pick(tree["model"], ENTRIES - HEAD), pick(state.server["model"], ENTRIES - HEAD))
        assert far(pick(tree["model"], HEAD), state.locals[name]["model"]) > 1e-4
    resting = federation(FedRep, make_task((8, 8)), head_epochs=0)[0]
    first = run(resting)[0]
    for name, tree in resting.deploy(first).trained().items():
        assert equal(pick(tree["model"], HEAD), first.locals[name]["model"])


# --- fine-tuning ------------------------------------------------------------------------------------------------------


def test_finetuned_copies_are_never_aggregated() -> None:
    base, _ = federation("fedavg", SIZED)
    fed, _ = federation("finetune", SIZED, epochs=3)
    expected, state = base.start(), fed.start()
    for _ in range(3):
        expected, told = base.step(expected)
        state, report = fed.step(state)
        tuned = fed.deploy(state).trained()  # in the middle of training, as an evaluation does
        assert all(far(tree["model"], state.server["model"]) > 1e-4 for tree in tuned.values())
        assert equal_trees(state.server, expected.server)
        assert (report.loss, report.bytes_up, report.bytes_down) == (told.loss, told.bytes_up, told.bytes_down)
    assert state.locals == {}


def test_finetuning_is_plain_training_from_the_received_model() -> None:
    train = replace(TRAIN, momentum=0.9, weight_decay=0.1)
    watched, steps = watching(FineTune)
    fed, _ = federation(watched, SIZED, train, epochs=2)
    state, _ = run(fed)
    steps.clear()
    deployed = fed.deploy(state).trained()
    for name, size in zip("abc", (5, 9, 12), strict=True):
        own = [batch for before, batch, _ in steps if int(before["now"]["samples"]) == size]
        assert len(own) == 2 * {"a": 1, "b": 2, "c": 3}[name]
        module = module_of(state.server["model"])
        torch_training(module, own, lambda p: torch.optim.SGD(p, train.lr, momentum=0.9, weight_decay=0.1))
        assert far(deployed[name]["model"], module.state_dict()) < 1e-12
    resting = federation("finetune", SIZED, epochs=0)[0]
    last = run(resting)[0]
    assert all(equal(tree["model"], last.server["model"]) for tree in resting.deploy(last).trained().values())


# --- without a federation ---------------------------------------------------------------------------------------------


def test_local_clients_know_nothing_of_each_other() -> None:
    fed, watch = federation("local", SIZED)
    state, reports = run(fed)
    assert all((report.bytes_down, report.bytes_up) == (0, 0) for report in reports)
    assert all(tree == {"model": {}} for downs in watch.downs for tree in downs.values())
    assert equal_trees(state.server, fed.start().server)
    other = replace(SIZED, labels=torch.where(SIZED.ids < 5, SIZED.labels, (SIZED.labels + 1) % 3))
    for task in (replace(SIZED, clients=SIZED.clients[:1]), other):  # alone, and beside clients with other labels
        assert equal(ran("local", task).locals["a"]["model"], state.locals["a"]["model"])
    assert far(ran("local", other).locals["b"]["model"], state.locals["b"]["model"]) > 1e-4


def test_local_trains_as_long_as_a_federated_client() -> None:
    fed, watch = federation("local", SIZED, replace(TRAIN, local_epochs=2))
    run(fed)
    base, other = federation("fedavg", SIZED, replace(TRAIN, local_epochs=2))
    run(base)
    counts = [[{n: r.steps for n, r in replies.items()} for replies in w.replies] for w in (watch, other)]
    assert counts[0] == counts[1] == [{"a": 2, "b": 4, "c": 6}] * 3


@pytest.mark.parametrize(("settings", "steps"), [({"local_epochs": 2}, 2 * 7), ({"local_steps": 5}, 3 * 5)])
def test_centralised_trains_on_everybodys_data(settings: dict[str, Any], steps: int) -> None:
    watched, seen = watching(Centralised)
    fed, watch = federation(watched, SIZED, replace(TRAIN, **settings))
    state, reports = run(fed, 1)
    assert len(seen) == steps == watch.replies[0]["everybody"].steps
    assert reports[0].participants == 1
    first_epoch = torch.cat([batch["index"] for _, batch, _ in seen[:7]])  # 26 samples in batches of four
    assert sorted(first_epoch.tolist()) == list(range(26))
    module = module_of(fed.start().server["model"])
    torch_training(module, [batch for _, batch, _ in seen], lambda p: torch.optim.SGD(p, TRAIN.lr))
    assert far(state.server["model"], module.state_dict()) < 1e-12
    deployed = fed.deploy(state).trained()  # evaluated on the same clients as everybody else
    assert list(deployed) == ["a", "b", "c"]
    assert all(equal(tree["model"], state.server["model"]) for tree in deployed.values())
