"""FedDyn, MOON and FedHEAL: slow references in plain PyTorch and plain Python, limits, invariants, messages, memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedshift.core.arch import Arch
from fedshift.core.context import ClientInfo, Phase, ServerContext
from fedshift.core.grad import gradient
from fedshift.core.method import Batch, Method, Train
from fedshift.core.registry import METHODS
from fedshift.core.tree import Tensors, Tree, float_bytes, pick
from fedshift.engines.sequential import Sequential
from fedshift.engines.vmapped import Vmapped
from fedshift.methods.fedavg import FedAvg
from fedshift.methods.feddyn import FedDyn
from fedshift.methods.fedheal import FedHEAL
from fedshift.methods.moon import MOON
from fedshift.runs.session import Session
from fedshift.store.state import State
from fedshift.store.trees import load, save
from tests.conftest import refusal
from tests.methods.federations import (
    AWKWARD,
    CLASSES,
    CTX,
    DOUBLE,
    NO_IDS,
    PLAIN,
    TRAIN,
    Awkward,
    Plain,
    Watch,
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

METHOD_NAMES = ["feddyn", "moon", "fedheal"]
SIZES = {"a": 5, "b": 9, "c": 12, "d": 7}
SIZED = make_task((5, 9, 12))
FOUR = make_task(tuple(SIZES.values()))
ENTRIES = set(AWKWARD.parameters) | set(AWKWARD.buffers)
PARAMETERS = set(AWKWARD.parameters)
STATISTICS = {name for name in ENTRIES - PARAMETERS if "running" in name}
KINDS: dict[str, tuple[Arch, type[nn.Module]]] = {"batch-norm": (AWKWARD, Awkward), "plain": (PLAIN, Plain)}
RECIPES: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum, decay and clipping": {"momentum": 0.9, "weight_decay": 0.1, "lr_decay": 0.7, "clip": 0.3},
}
Steps = list[tuple[Tree, Batch, Phase]]


def batches_of(steps: Steps, client: str) -> list[Batch]:
    return [batch for state, batch, _ in steps if int(state["now"]["samples"]) == SIZES[client]]


def sgd(module: nn.Module, train: Train, number: int) -> torch.optim.SGD:
    """The optimiser of this round."""
    lr = train.lr * train.lr_decay**number
    return torch.optim.SGD(module.parameters(), lr, momentum=train.momentum, weight_decay=train.weight_decay)


def trained(
    module: nn.Module, batches: list[Batch], train: Train, number: int, loss: Callable[[Tensor, Tensor], Tensor]
) -> Tensors:
    """Local work as one does it with torch; the loss sees normalised images and labels."""
    optimiser = sgd(module.train(), train, number)
    for batch in batches:
        optimiser.zero_grad()
        loss((batch["x"] - 0.5) / 0.5, batch["y"]).backward()
        if train.clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), train.clip)
        optimiser.step()
    return {name: leaf.detach().clone() for name, leaf in module.state_dict().items()}


def mean_of(models: list[Tensors], shares: list[float] | None = None) -> Tensors:
    """Written out; counters keep the largest."""
    shares = shares or [1 / len(models)] * len(models)
    result: Tensors = {}
    for name, leaf in models[0].items():
        parts = [model[name] for model in models]
        if leaf.is_floating_point():
            result[name] = torch.stack([share * part for share, part in zip(shares, parts, strict=True)]).sum(0)
        else:
            result[name] = torch.stack(parts).amax(0)
    return result


def doubles(tensors: Tensors) -> Tensors:
    return {name: leaf.double() if leaf.is_floating_point() else leaf for name, leaf in tensors.items()}


def one_batch(count: int = 6) -> dict[str, Tensor]:
    task = make_task((count,))
    return {"x": task.images.double() / 255, "y": task.labels, "index": task.ids}


def inclined(base: type[Method]) -> type[Method]:
    """A method whose loss has the same gradient everywhere and at every client."""
    slope = doubles(pick(AWKWARD.init(5), PARAMETERS))

    class Inclined(base):  # type: ignore[valid-type,misc]
        def loss(self, state: Tree, tensors: Tensors, batch: Batch, phase: Phase) -> tuple[Tensor, Tensors]:
            return torch.stack([(tensors[n] * leaf).sum() for n, leaf in slope.items()]).sum(), {}

    return Inclined


# --- FedDyn -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_feddyn_is_the_papers_recursion(recipe: str, kind: str, participation: float) -> None:
    """Five rounds against torch with the two terms in the loss, and the server's formulas."""
    alpha, train = 0.3, replace(TRAIN, local_epochs=2, **RECIPES[recipe])
    arch, module_kind = KINDS[kind]
    watched, steps = watching(FedDyn)
    fed, watch = federation(watched, FOUR, train, arch, rounds=5, participation=participation, alpha=alpha)
    state = fed.start()
    w = dict(state.server["model"])
    names = arch.parameters
    g = {client: {n: torch.zeros_like(w[n]) for n in names} for client in SIZES}
    h = {n: torch.zeros_like(w[n]) for n in names}
    for number in range(5):
        steps.clear()
        state, _ = fed.step(state)
        present, models = list(watch.downs[-1]), []
        for client in present:
            module = module_of(w, module_kind)

            def loss(x: Tensor, y: Tensor, module: nn.Module = module, own: Tensors = g[client]) -> Tensor:
                here = dict(module.named_parameters())
                linear = torch.stack([(own[n] * here[n]).sum() for n in names]).sum()
                near = torch.stack([(here[n] - w[n]).square().sum() for n in names]).sum()  # noqa: B023
                return F.cross_entropy(module(x), y) - linear + alpha / 2 * near

            model = trained(module, batches_of(steps, client), train, number, loss)
            g[client] = {n: g[client][n] - alpha * (model[n] - w[n]) for n in names}
            models.append(model)
        h = {n: h[n] - alpha * torch.stack([model[n] - w[n] for model in models]).sum(0) / 4 for n in names}
        mean = mean_of(models)
        w = {**mean, **{n: mean[n] - h[n] / alpha for n in names}}
        assert far(state.server["model"], w) < 1e-11
        assert far(state.server["h"], h) < 1e-11
        assert all(far(state.locals[client]["g"], g[client]) < 1e-11 for client in present)
    assert len({tuple(downs) for downs in watch.downs}) == (1 if participation == 1 else 4)
    assert far(w, fed.start().server["model"]) > 0.05


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "lr_decay": 0.8, "clip": 1.0}, {"optimiser": "adam"}])
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_feddyns_memory_is_the_mean_of_the_clients_terms(settings: dict[str, Any], participation: float) -> None:
    """Who never came has a term of zero."""
    fed, _ = federation("feddyn", FOUR, replace(TRAIN, **settings), rounds=5, participation=participation, alpha=0.1)
    state = fed.start()
    for _ in range(5):
        state, _ = fed.step(state)
        for name, memory in state.server["h"].items():
            mean = torch.stack([local["g"][name] for local in state.locals.values()]).sum(0) / 4
            assert torch.allclose(memory, mean, rtol=0, atol=1e-13), name
    assert set(state.server["h"]) == PARAMETERS
    assert max(float(leaf.abs().max()) for leaf in state.server["h"].values()) > 1e-3


def test_without_alpha_feddyns_clients_do_fedavgs_work() -> None:
    def uploads(method: str, **options: Any) -> list[Tensors]:
        fed, watch = federation(method, SIZED, replace(TRAIN, local_epochs=3), **options)
        run(fed, 1)
        return [reply.up["model"] for reply in watch.replies[0].values()]

    plain = uploads("fedavg")
    gaps = [max(map(far, uploads("feddyn", alpha=alpha), plain)) for alpha in (1e-2, 1e-4, 1e-6, 1e-8)]
    assert gaps[0] > 1e-5
    for large, small in pairwise(gaps):  # by as much as alpha
        assert small == pytest.approx(large / 100, rel=0.05)


@pytest.mark.parametrize("weights", ["size", "uniform"])
def test_without_alpha_feddyns_server_still_adds_what_it_remembers(weights: Any) -> None:
    """The limit is uniform FedAvg whose step has the sum of all steps so far added to it, whatever the weights are."""
    fed, watch = federation("feddyn", SIZED, replace(TRAIN, weights=weights), alpha=1e-9)
    state = fed.start()
    total = {name: torch.zeros_like(state.server["model"][name]) for name in PARAMETERS}
    for number in range(3):
        before = state.server["model"]
        plain, alone = federation("fedavg", SIZED, replace(TRAIN, weights="uniform"))
        averaged, _ = plain.step(State(number, {"model": before}))
        state, _ = fed.step(state)
        ours, theirs = ([reply.up["model"] for reply in w.replies[-1].values()] for w in (watch, alone))
        assert max(map(far, ours, theirs)) < 1e-8
        step = {name: averaged.server["model"][name] - before[name] for name in PARAMETERS}
        total = {name: total[name] + step[name] for name in PARAMETERS}
        for name in PARAMETERS:
            expected = before[name] + step[name] + total[name]
            assert torch.allclose(state.server["model"][name], expected, rtol=0, atol=1e-7)
        assert far(pick(state.server["model"], STATISTICS), pick(averaged.server["model"], STATISTICS)) < 1e-7
    assert far(total, {name: torch.zeros_like(leaf) for name, leaf in total.items()}) > 1e-3


def test_feddyn_finds_the_optimum_of_the_sum_where_fedavg_does_not() -> None:
    """Clients with valleys of different steepness who each run to the bottom."""

    def bowls(base: type[Method]) -> type[Method]:
        class Bowls(base):  # type: ignore[valid-type,misc]
            def loss(self, state: Tree, tensors: Tensors, batch: Batch, phase: Phase) -> tuple[Tensor, Tensors]:
                size = state["now"]["samples"] / 10
                parts = [(leaf - size).square().sum() for name, leaf in tensors.items() if name in PLAIN.parameters]
                return size / 2 * torch.stack(parts).sum(), {}

        return Bowls

    train = replace(TRAIN, lr=0.7, local_steps=40, weights="uniform")
    best = sum(n * n for n in (5, 9, 12)) / 10 / sum((5, 9, 12))
    average = ran(bowls(FedAvg), SIZED, train, PLAIN, rounds=2)
    dynamic = ran(bowls(FedDyn), SIZED, train, PLAIN, rounds=30, alpha=1.0)
    for name in PLAIN.parameters:
        plain, found = average.server["model"][name], dynamic.server["model"][name]
        assert torch.allclose(plain, torch.full_like(plain, 26 / 30), rtol=0, atol=1e-6)
        assert torch.allclose(found, torch.full_like(found, best), rtol=0, atol=1e-6)
        for client in "abc":  # the linear terms are the gradients there
            size, own = SIZES[client] / 10, dynamic.locals[client]["g"][name]
            assert torch.allclose(own, torch.full_like(own, size * (best - size)), rtol=0, atol=1e-5)


def test_feddyn_averages_statistics_plainly() -> None:
    fed, watch = federation("feddyn", SIZED, alpha=0.5)
    state = fed.start()
    for _ in range(2):
        state, _ = fed.step(state)
        mean = mean_of([reply.up["model"] for reply in watch.replies[-1].values()])
        assert far(pick(state.server["model"], STATISTICS), pick(mean, STATISTICS)) < 1e-14
        assert far(pick(state.server["model"], PARAMETERS), pick(mean, PARAMETERS)) > 1e-3


# --- MOON -------------------------------------------------------------------------------------------------------------


def features_of(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of a module whose head is called ``out``, and what that head read."""
    read: list[Tensor] = []
    handle = module.get_submodule("out").register_forward_pre_hook(lambda _, args: read.append(args[0]))
    logits = module(x)
    handle.remove()
    return logits, read[0]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_moon_is_the_papers_loss(recipe: str, kind: str, participation: float) -> None:
    """Five rounds against torch with three modules; with half of the clients, first rounds come at different times."""
    mu, temperature, train = 2.0, 0.4, replace(TRAIN, local_epochs=2, **RECIPES[recipe])
    arch, module_kind = KINDS[kind]
    watched, steps = watching(MOON)
    fed, watch = federation(
        watched, FOUR, train, arch, rounds=5, participation=participation, mu=mu, temperature=temperature
    )
    state = fed.start()
    w = dict(state.server["model"])
    last: dict[str, Tensors] = {}
    contrasted = 0
    for number in range(5):
        steps.clear()
        state, _ = fed.step(state)
        present, models = list(watch.downs[-1]), []
        for client in present:
            module, older = module_of(w, module_kind), last.get(client)

            def loss(x: Tensor, y: Tensor, module: nn.Module = module, older: Tensors | None = older) -> Tensor:
                logits, z = features_of(module, x)
                value = F.cross_entropy(logits, y)
                if older is None:
                    return value
                with torch.no_grad():
                    anchors = [features_of(module_of(m, module_kind).train(), x)[1] for m in (w, older)]  # noqa: B023
                near, past = ((z * a).sum(1) / (z.norm(dim=1) * a.norm(dim=1)) / temperature for a in anchors)
                return value + mu * F.cross_entropy(torch.stack([near, past], 1), torch.zeros_like(y))

            contrasted += older is not None
            last[client] = trained(module, batches_of(steps, client), train, number, loss)
            models.append(last[client])
            kept = state.locals[client]["previous"]
            assert far(kept, pick(last[client], arch.encoder)) < 1e-11
        counts = [SIZES[client] for client in present]
        w = mean_of(models, [count / sum(counts) for count in counts])
        assert far(state.server["model"], w) < 1e-11
    assert contrasted == (16 if participation == 1 else 10 - len(last))
    expected = ran("fedavg", FOUR, train, arch, rounds=5, participation=participation).server["model"]
    assert far(w, expected) > 1e-4


@pytest.mark.parametrize(
    "settings", [*RECIPES.values(), {"optimiser": "adam"}, {"local_steps": 5}, {"augment": "shift"}, {"batch_size": 1}]
)
@pytest.mark.parametrize("kind", KINDS)
def test_moon_without_its_term_is_fedavg(settings: dict[str, Any], kind: str) -> None:
    train = replace(TRAIN, local_epochs=2, **settings)
    fed, _ = federation("moon", SIZED, train, KINDS[kind][0], mu=0.0)
    plain, _ = federation("fedavg", SIZED, train, KINDS[kind][0])
    (state, reports), (expected, told) = run(fed), run(plain)
    assert far(state.server["model"], expected.server["model"]) < 1e-14
    assert [r.loss for r in reports] == pytest.approx([r.loss for r in told], abs=1e-14)
    other = ran("moon", SIZED, train, KINDS[kind][0], mu=5.0).server["model"]
    assert far(other, expected.server["model"]) > 1e-4


def test_moons_first_round_is_fedavgs_and_the_second_is_not() -> None:
    results = [run(federation(name, SIZED)[0], 2)[1] for name in ("moon", "fedavg")]
    firsts = [run(federation(name, SIZED)[0], 1)[0].server for name in ("moon", "fedavg")]
    assert equal_trees(*firsts)
    assert results[0][0].loss == results[1][0].loss
    assert results[0][1].loss > results[1][1].loss + 0.1  # the contrast of two nearly equal encoders is about log 2


def moon_state(method: MOON, before: bool) -> tuple[Tree, Tensors]:
    """Three different models, and whether the client has trained before."""
    received, previous, here = (doubles(AWKWARD.init(seed)) for seed in (1, 2, 3))
    local = {"previous": pick(previous, AWKWARD.encoder), "past": {"trained": torch.tensor(before)}}
    return {**method.begin({"model": received}, local), "model": here}, here


@pytest.mark.parametrize("before", [False, True])
def test_moons_term_is_constant_before_there_is_a_previous_model(before: bool) -> None:
    method = MOON(AWKWARD, TRAIN, mu=3.0)
    state, here = moon_state(method, before)

    def valued(which: Method) -> tuple[Tensors, Tensor, Tensors]:
        live = pick(here, PARAMETERS)
        return gradient(lambda t: which.loss(state, {**here, **t}, one_batch(), Phase()), live)

    (grads, value, buffers), (plain, base, own) = valued(method), valued(FedAvg(AWKWARD, TRAIN))
    assert equal(buffers, own)  # the refreshed statistics are those of the model in training
    assert all(bool(leaf.isfinite().all()) for leaf in grads.values())
    assert (float(value) == float(base)) != before
    assert (far(grads, plain) < 1e-15) != before
    assert float(value - base) >= 0


@pytest.mark.parametrize("slot", ["received", "previous"])
def test_moons_frozen_encoders_normalise_as_the_one_in_training(slot: str) -> None:
    method = MOON(AWKWARD, TRAIN)
    state, here = moon_state(method, True)
    moved = {n: leaf + 0.5 if n in STATISTICS else leaf for n, leaf in state[slot].items()}
    other = {**state, slot: moved}
    for batch_stats in (True, False):
        phase = Phase(batch_stats=batch_stats)
        values = [float(method.loss(s, here, one_batch(), phase)[0]) for s in (state, other)]
        assert (values[0] == values[1]) == batch_stats


def test_moon_pulls_to_the_received_features_and_away_from_the_last() -> None:
    """After one step on the contrast alone, z is nearer to one and farther from the other."""
    method = MOON(PLAIN, TRAIN, mu=1.0)
    received, previous, here = (doubles(PLAIN.init(seed)) for seed in (1, 2, 3))
    local = {"previous": pick(previous, PLAIN.encoder), "past": {"trained": torch.tensor(True)}}
    state, batch = method.begin({"model": received}, local), one_batch()

    def alike(model: Tensors) -> list[float]:
        z = [PLAIN.encode(m, batch["x"])[0] for m in (model, received, previous)]
        return [float(F.cosine_similarity(z[0], other).mean()) for other in z[1:]]

    def contrast(t: Tensors) -> tuple[Tensor, None]:
        full = {**here, **t}
        losses = [m.loss(state, full, batch, Phase())[0] for m in (method, FedAvg(PLAIN, TRAIN))]
        return losses[0] - losses[1], None

    grads, _, _ = gradient(contrast, here)
    assert all(not bool(grads[name].any()) for name in PLAIN.head)  # only the encoder is in it
    after = alike({name: leaf - 0.05 * grads[name] for name, leaf in here.items()})
    before = alike(here)
    assert after[0] - after[1] > before[0] - before[1]


def test_moon_keeps_its_own_last_encoder() -> None:
    fed, watch = federation("moon", FOUR, participation=0.5, rounds=5)
    state = fed.start()
    for _ in range(5):
        before = state
        state, _ = fed.step(state)
        for client, reply in watch.replies[-1].items():
            assert equal(state.locals[client]["previous"], pick(reply.up["model"], AWKWARD.encoder))
            assert bool(state.locals[client]["past"]["trained"])
        for client in before.locals.keys() - watch.replies[-1].keys():
            assert equal_trees(state.locals[client], before.locals[client])
    method = fed.setup.method
    info = ClientInfo("new", 0, torch.zeros(CLASSES), 0, unseen=True)
    assert method.init_local(AWKWARD.init(0), info, CTX) == {}
    assert not bool(method.init_local(AWKWARD.init(0), replace(info, unseen=False), CTX)["past"]["trained"])


# --- FedHEAL ----------------------------------------------------------------------------------------------------------


class Healed:
    """The server of FedHEAL with one number after the other, in lists."""

    def __init__(self, threshold: float, beta: float, uniform: bool = False) -> None:
        self.threshold, self.beta, self.uniform = threshold, beta, uniform
        self.signs: dict[str, list[list[bool]]] = {}  # client -> of every earlier round, of every entry
        self.mass: dict[str, float] = {}
        self.delta: dict[str, float] = {}
        self.masked = 0
        self.shares: list[float] = []

    def step(self, here: Tensors, models: Mapping[str, Tensors], names: tuple[str, ...]) -> Tensors:
        updates = {c: [float(v) for n in names for v in (m[n] - here[n]).flatten()] for c, m in models.items()}
        masks = {client: self.mask(client, update) for client, update in updates.items()}
        distances: dict[str, float] = {}
        for client, update in updates.items():
            distances[client], start = 0.0, 0
            for name in names:
                span = range(start, start + here[name].numel())
                distances[client] += sum(update[i] ** 2 for i in span if masks[client][i]) ** 0.5
                start += here[name].numel()
            self.signs.setdefault(client, []).append([value >= 0 for value in update])
        for client in models:
            self.mass.setdefault(client, 1.0 if self.uniform else float(SIZES[client]))
            share = distances[client] / sum(distances.values()) if sum(distances.values()) else 0.0
            self.delta[client] = (1 - self.beta) * self.delta.get(client, 0.0) + self.beta * share
        total = sum(self.mass[client] for client in models)
        raised = {client: self.mass[client] / total + self.delta[client] for client in models}
        weights = {client: value / sum(raised.values()) for client, value in raised.items()}
        self.mass.update({client: total * weight for client, weight in weights.items()})
        self.shares = list(weights.values())
        step = []
        for i in range(len(next(iter(updates.values())))):
            heard = [client for client in models if masks[client][i]]
            self.masked += len(models) - len(heard)
            among = sum(weights[client] for client in heard)
            step.append(sum(weights[client] / among * updates[client][i] for client in heard))
        parts = torch.tensor(step, dtype=torch.float64).split([here[name].numel() for name in names])
        moved = {name: here[name] + part.reshape(here[name].shape) for name, part in zip(names, parts, strict=True)}
        return {**mean_of(list(models.values()), self.shares), **moved}

    def mask(self, client: str, update: list[float]) -> list[bool]:
        past = self.signs.get(client, [])
        if not past:
            return [True] * len(update)
        same = [sum(signs[i] == (value >= 0) for signs in past) for i, value in enumerate(update)]
        return [count / len(past) > self.threshold for count in same]


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize(("threshold", "beta"), [(0.3, 0.4), (0.0, 0.4), (0.5, 1.0), (0.3, 0.0), (1.0, 0.4)])
def test_fedheal_is_the_papers_recursion(participation: float, threshold: float, beta: float) -> None:
    fed, watch = federation(
        "fedheal", FOUR, replace(TRAIN, lr=0.2), rounds=7, participation=participation, threshold=threshold, beta=beta
    )
    state, slow = fed.start(), Healed(threshold, beta)
    for _ in range(7):
        before = state
        state, _ = fed.step(state)
        models = {client: reply.up["model"] for client, reply in watch.replies[-1].items()}
        # from where the server was, to the bit: the sign of an update may hang on the last one
        expected = slow.step(before.server["model"], models, AWKWARD.parameters)
        assert far(state.server["model"], expected) < 1e-12
        for client in SIZES:
            rises = state.server[f"rises of {client}"]
            if client not in models:
                assert equal(rises, before.server[f"rises of {client}"])
                continue
            flat = torch.cat([rises[name].flatten() for name in AWKWARD.parameters]).tolist()
            assert flat == [sum(signs) for signs in zip(*slow.signs[client], strict=True)]
            assert int(state.server["took-part"][client]) == len(slow.signs[client])
            assert float(state.server["delta"][client]) == pytest.approx(slow.delta[client], abs=1e-12)
            assert float(state.server["boost"][client]) * SIZES[client] == pytest.approx(slow.mass[client], abs=1e-10)
    assert slow.masked > 20
    assert sum(slow.shares) == pytest.approx(1, abs=1e-12)


def test_fedheal_starts_from_the_weights_of_train() -> None:
    fed, watch = federation("fedheal", SIZED, replace(TRAIN, weights="uniform"), rounds=2)
    state, slow = fed.start(), Healed(0.3, 0.4, uniform=True)
    for _ in range(2):
        before = state
        state, _ = fed.step(state)
        models = {client: reply.up["model"] for client, reply in watch.replies[-1].items()}
        assert far(state.server["model"], slow.step(before.server["model"], models, AWKWARD.parameters)) < 1e-12


def test_fedheals_clients_do_fedavgs_work() -> None:
    (fed, watch), (plain, other) = federation("fedheal", SIZED), federation("fedavg", SIZED)
    run(fed, 1), run(plain, 1)
    assert all(equal_trees(watch.replies[0][c].up, other.replies[0][c].up) for c in "abc")


@pytest.mark.parametrize("weights", ["size", "uniform"])
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_fedheal_without_beta_is_fedavg_while_nobody_turns_round(weights: Any, participation: float) -> None:
    train = replace(TRAIN, weights=weights)
    how: dict[str, Any] = {"participation": participation, "rounds": 4}
    expected = ran(inclined(FedAvg), FOUR, train, **how).server["model"]
    state = ran(inclined(FedHEAL), FOUR, train, threshold=0.99, beta=0.0, **how)
    assert far(state.server["model"], expected) < 1e-13
    assert all(float(value) == pytest.approx(1, abs=1e-13) for value in state.server["boost"].values())
    # in real training somebody does, in the second round at the earliest
    for rounds, same in ((1, True), (5, False)):
        feds = (federation("fedheal", SIZED, train, beta=0.0)[0], federation("fedavg", SIZED, train)[0])
        assert (far(*(run(fed, rounds)[0].server["model"] for fed in feds)) < 1e-14) == same


def test_fedheal_with_a_threshold_of_one_stops_after_the_first_round() -> None:
    fed, watch = federation("fedheal", SIZED, threshold=1.0)
    first, _ = run(fed, 1)
    last, _ = run(fed)
    assert equal(pick(last.server["model"], PARAMETERS), pick(first.server["model"], PARAMETERS))
    assert far(pick(last.server["model"], STATISTICS), pick(first.server["model"], STATISTICS)) > 1e-3
    ups = [reply.up["model"] for reply in watch.replies[-1].values()]
    boosts = [float(last.server["boost"][c]) * SIZES[c] / 26 for c in "abc"]  # full rounds: the weights themselves
    mean = mean_of(ups, boosts)
    assert far(pick(last.server["model"], STATISTICS), pick(mean, STATISTICS)) < 1e-13


def shifted(here: Tensors, step: float) -> Tree:
    """An upload that moved every parameter by this much."""
    return {"model": {n: leaf + step if n in PARAMETERS else leaf for n, leaf in here.items()}}


def healing(dtype: torch.dtype = torch.float64, **options: Any) -> tuple[FedHEAL, Tree, ServerContext]:
    """A server of clients a and b before their first round, and the sizes of both."""
    method = FedHEAL(AWKWARD, TRAIN, **options)
    here = {n: torch.zeros_like(t, dtype=dtype) if t.is_floating_point() else t for n, t in AWKWARD.init(0).items()}
    return method, method.init_server({"net": here}, ("a", "b"), NO_IDS), server_context([3.0, 1.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("way", [1.0, -1.0])
@pytest.mark.parametrize(("often", "heard"), [(3, False), (4, True)])
def test_fedheal_reaches_its_threshold_exactly(dtype: torch.dtype, way: float, often: int, heard: bool) -> None:
    """Three of ten are not more than 0.3, up or down (1 - 0.7 in floats would be); one client alone has no company."""
    method, server, _ = healing(dtype)
    ctx = server_context([3.0])
    for number in range(10):
        server, _ = method.aggregate(server, {"a": shifted(server["model"], way if number < often else -way)}, ctx)
    here = server["model"]
    after = method.aggregate(server, {"a": shifted(here, way)}, ctx)[0]["model"]
    moved = {name: float((after[name] - here[name]).abs().min()) > 0.5 for name in PARAMETERS}
    assert set(moved.values()) == {heard}
    assert all(after[name].dtype == dtype for name in PARAMETERS)


def test_a_masked_client_leaves_an_entry_to_the_others() -> None:
    method, server, ctx = healing(threshold=0.0)
    server, _ = method.aggregate(server, {"a": shifted(server["model"], 1.0), "b": shifted(server["model"], 1.0)}, ctx)
    here = server["model"]

    def after(a: float, b: float) -> tuple[Tree, set[float]]:
        new, _ = method.aggregate(server, {"a": shifted(here, a), "b": shifted(here, b)}, ctx)
        steps = {round(float(v), 12) for n in PARAMETERS for v in (new["model"][n] - here[n]).flatten()}
        return new, steps

    assert after(-5.0, 0.25)[1] == {0.25}  # whatever the weight of the larger client
    assert after(-5.0, -0.25)[1] == {0.0}
    assert after(0.25, 0.0)[1] != {0.25}  # standing still is going up, and is heard
    silent, _ = after(-5.0, 0.25)
    assert float(silent["delta"]["a"]) < float(server["delta"]["a"])  # what is not heard is no distance
    assert float(silent["delta"]["b"]) > float(server["delta"]["b"])


def test_fedheal_listens_to_the_client_that_moves_farther() -> None:
    method, server, ctx = healing(beta=0.4)
    new, _ = method.aggregate(server, {"a": shifted(server["model"], 1.0), "b": shifted(server["model"], 4.0)}, ctx)
    assert [float(new["delta"][c]) for c in "ab"] == pytest.approx([0.08, 0.32])  # 0.4 times one fifth and four fifths
    weights = [(0.75 + 0.08) / 1.4, (0.25 + 0.32) / 1.4]
    assert [float(new["boost"][c]) for c in "ab"] == pytest.approx([weights[0] / 0.75, weights[1] / 0.25])
    for name in PARAMETERS:
        expected = torch.full_like(new["model"][name], weights[0] + 4 * weights[1])
        assert torch.allclose(new["model"][name], expected, rtol=0, atol=1e-14)
    still, _ = method.aggregate(server, {c: shifted(server["model"], 0.0) for c in "ab"}, ctx)
    assert [float(still["boost"][c]) for c in "ab"] == pytest.approx([1, 1], abs=1e-15)
    assert equal(still["model"], server["model"])


# --- what travels and what stays --------------------------------------------------------------------------------------

PRIVATE: dict[str, dict[str, set[str]]] = {
    "feddyn": {"g": PARAMETERS},
    "moon": {"previous": set(AWKWARD.encoder), "past": {"trained"}},
    "fedheal": {},
}
CLIENTS = ("a", "b", "c")
SERVER: dict[str, dict[str, set[str]]] = {
    "feddyn": {"h": PARAMETERS},
    "moon": {},
    "fedheal": {
        **{f"rises of {client}": PARAMETERS for client in CLIENTS},
        **{slot: set(CLIENTS) for slot in ("took-part", "boost", "delta")},
    },
}


def names_in(tree: Tree) -> dict[str, set[str]]:
    return {slot: set(leaves) for slot, leaves in tree.items()}


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_the_model_travels_and_nothing_else(method: str) -> None:
    fed, watch = federation(method, SIZED)
    state, reports = run(fed)
    cost = float_bytes({"model": state.server["model"]})
    assert cost == 8 * sum(leaf.numel() for name, leaf in AWKWARD.init(0).items() if name in PARAMETERS | STATISTICS)
    for downs, replies in zip(watch.downs, watch.replies, strict=True):
        for client, reply in replies.items():
            for message in (downs[client], reply.up):
                assert names_in(message) == {"model": ENTRIES}
                assert float_bytes(message) == cost
    assert [(r.bytes_down, r.bytes_up) for r in reports] == [(3 * cost, 3 * cost)] * 3
    assert set(state.locals) == (set(CLIENTS) if PRIVATE[method] else set())
    assert all(names_in(local) == PRIVATE[method] for local in state.locals.values())
    assert names_in(state.server) == {"model": ENTRIES, **SERVER[method]}


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_unseen_clients_get_the_global_model(method: str) -> None:
    fed, _ = federation(method, make_task((5, 9, 12), unseen=1))
    state, _ = run(fed)
    deployment = fed.deploy(state)
    for tree in (*fed.unseen(deployment).values(), *deployment.trained().values()):
        assert equal(tree["model"], state.server["model"])
    assert deployment.given_bytes == 0
    assert METHODS[method].make.linear == (method == "moon")


def halves(method: str, path: Path) -> tuple[Session, Watch, State, State]:
    """A federation with half of its clients in each round: after three rounds, and the same from a file."""
    fed, watch = federation(method, FOUR, rounds=6, participation=0.5)
    state, _ = run(fed, 3)
    save(path, state.trees(), {})
    return fed, watch, state, State.of(load(path)[0], state.round, DOUBLE.device)


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_memories_survive_a_checkpoint(method: str, tmp_path: Path) -> None:
    fed, _, state, again = halves(method, tmp_path / "state")
    assert equal_trees(again.server, state.server)
    assert all(equal_trees(again.locals[client], local) for client, local in state.locals.items())
    for _ in range(3):
        state, _ = fed.step(state)
        again, _ = fed.step(again)
    assert equal_trees(again.server, state.server)
    assert again.locals.keys() == state.locals.keys()
    assert all(equal_trees(again.locals[client], local) for client, local in state.locals.items())
    # and they matter: a server or clients that forgot would go elsewhere
    blank, _, middle, _ = halves(method, tmp_path / "other")
    fresh = {**blank.start().server, "model": middle.server["model"]}
    forgot = State(middle.round, fresh, {})
    for _ in range(3):
        forgot, _ = blank.step(forgot)
    assert far(forgot.server["model"], state.server["model"]) > 1e-6


# --- settings and engines ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        ("feddyn", {"alpha": 0.0}, "method 'feddyn': alpha must be positive, not 0.0"),
        ("feddyn", {"alpha": -0.1}, "method 'feddyn': alpha must be positive, not -0.1"),
        ("feddyn", {"alpha": float("nan")}, "method 'feddyn': alpha must be positive, not nan"),
        ("moon", {"mu": -1.0}, "method 'moon': mu must not be negative, not -1.0"),
        ("moon", {"temperature": 0.0}, "method 'moon': temperature must be positive, not 0.0"),
        ("fedheal", {"threshold": -0.1}, r"method 'fedheal': threshold must lie in \[0, 1\], not -0.1"),
        ("fedheal", {"threshold": 1.1}, r"method 'fedheal': threshold must lie in \[0, 1\], not 1.1"),
        ("fedheal", {"beta": 1.5}, r"method 'fedheal': beta must lie in \[0, 1\], not 1.5"),
        ("moon", {"tau": 0.5}, "method 'moon' has no option 'tau'"),
    ],
)
def test_settings_that_cannot_be_meant(method: str, options: dict[str, Any], expected: str) -> None:
    said = refusal(METHODS, "method", method, options, arch=PLAIN, train=TRAIN)
    assert re.match(expected, said)
    assert "\n" not in said


def test_defaults_are_the_authors() -> None:
    assert METHODS["feddyn"].options == {"alpha": 0.01}
    assert METHODS["moon"].options == {"mu": 1.0, "temperature": 0.5}
    assert METHODS["fedheal"].options == {"threshold": 0.3, "beta": 0.4}


@pytest.mark.grid
@pytest.mark.parametrize("name", METHOD_NAMES)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("changes", [{"optimiser": "adam"}, {"clip": 0.5, "lr_decay": 0.5}, {"batch_size": 1}])
def test_stacked_clients_agree_for_other_settings_too(name: str, norm: bool, changes: dict[str, Any]) -> None:
    """With half of the clients in each round, so that some have a past and others have none."""
    method = make(name, norm, **changes)
    assert method is not None
    ends = [federate(method, engine(DOUBLE), DOUBLE, rounds=4, participation=0.5) for engine in (Sequential, Vmapped)]
    check_equal(ends[0], ends[1], 1e-10)
