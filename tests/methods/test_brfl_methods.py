"""FedRoD, APFL, GMA, and what fine-tuning and Ditto hand over: limits, gradient flow, messages, unseen clients."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedshift.core.arch import Arch, Output
from fedshift.core.context import ClientInfo, Phase, ServerContext
from fedshift.core.grad import gradient
from fedshift.core.method import Batch
from fedshift.core.registry import METHODS
from fedshift.core.tree import Tensors, Tree, pick
from fedshift.engines.balance import log_prior, with_balance
from fedshift.engines.sequential import Sequential
from fedshift.engines.vmapped import Vmapped
from fedshift.methods.apfl import APFL
from fedshift.methods.fedavg import FedAvg
from fedshift.methods.fedrod import FedRoD
from fedshift.methods.finetune import FineTune
from fedshift.methods.gma import GMA
from tests.conftest import refusal
from tests.methods.federations import (
    AWKWARD,
    CLASSES,
    CTX,
    DOUBLE,
    HEAD,
    PLAIN,
    SHAPE,
    TRAIN,
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

ENTRIES = set(AWKWARD.parameters) | set(AWKWARD.buffers)
PARAMETERS = set(AWKWARD.parameters)
PERSONAL = {f"personal.{name}" for name in HEAD}
SIZED = make_task((5, 9, 12))
RECIPES: dict[str, dict[str, Any]] = {
    "sgd": {},
    "momentum and decay": {"momentum": 0.9, "weight_decay": 0.1, "lr_decay": 0.7},
    "adam": {"optimiser": "adam", "weight_decay": 0.1, "lr": 0.01},
    "steps": {"local_steps": 5},
}
CLIPPED = {**RECIPES, "clipped": {"clip": 0.5, "momentum": 0.9}}


def one_batch(count: int = 6) -> dict[str, Tensor]:
    task = make_task((count,))
    return {"x": task.images.double() / 255, "y": task.labels, "index": task.ids}


def random_like(tensors: Tensors, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(leaf.shape, generator=generator, dtype=torch.float64) if leaf.is_floating_point() else leaf
        for name, leaf in tensors.items()
    }


def batches_of(steps: list[tuple[Tree, Batch, Phase]], size: int) -> list[Batch]:
    """The batches of the client with this many samples."""
    return [batch for state, batch, _ in steps if int(state["now"]["samples"]) == size]


# --- balanced softmax -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 700])
def test_balanced_softmax_of_equally_many_is_cross_entropy(count: int) -> None:
    logits, labels = torch.randn(20, 5, dtype=torch.float64), torch.arange(20) % 5
    expected = F.cross_entropy(logits, labels)

    def balanced(histogram: Tensor) -> Tensor:
        return FedAvg(AWKWARD, TRAIN).cross_entropy(logits, {"y": labels, "log-prior": log_prior(histogram)})

    assert torch.allclose(balanced(torch.full((5,), count)), expected, rtol=0, atol=1e-13)
    assert abs(float(balanced(torch.tensor([1, 10, 100, 0, 5])) - expected)) > 0.01


def test_where_classes_are_equally_many_balanced_training_is_fedavg() -> None:
    task = make_task((6, 9, 12))
    level = replace(task, labels=torch.arange(len(task.labels)) % CLASSES)
    assert far(ran("finetune", level, balanced=True).server["model"], ran("fedavg", level).server["model"]) < 1e-12
    assert far(ran("finetune", task, balanced=True).server["model"], ran("fedavg", task).server["model"]) > 1e-3


# --- fine-tuning and Ditto --------------------------------------------------------------------------------------------


def trained_with_torch(tensors: Tensors, batches: list[Batch], lr: float, histogram: Tensor | None) -> Tensors:
    """Plain SGD on cross-entropy, or on balanced softmax written out."""
    module = module_of(tensors).train()
    optimiser = torch.optim.SGD(module.parameters(), lr)
    for batch in batches:
        optimiser.zero_grad()
        logits = module((batch["x"] - 0.5) / 0.5)
        if histogram is not None:
            p = (histogram + 1) * logits.exp() / ((histogram + 1) * logits.exp()).sum(1, keepdim=True)
            (-p.log()[torch.arange(len(logits)), batch["y"]].mean()).backward()
        else:
            F.cross_entropy(logits, batch["y"]).backward()
        optimiser.step()
    return {name: leaf.detach().clone() for name, leaf in module.state_dict().items()}


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("tuning", [False, True])
def test_rounds_and_finetuning_are_balanced_each_for_itself(balanced: bool, tuning: bool) -> None:
    watched, steps = watching(FineTune)
    fed, watch = federation(watched, SIZED, epochs=2, balanced=balanced, balanced_tuning=tuning)
    start = fed.start()
    state, _ = fed.step(start)
    for client in SIZED.clients:
        histogram = SIZED.histogram(client) if balanced else None
        expected = trained_with_torch(start.server["model"], batches_of(steps, len(client.train)), TRAIN.lr, histogram)
        assert far(watch.replies[0][client.name].up["model"], expected) < 1e-12
    steps.clear()
    deployed = fed.deploy(state).trained()
    assert {phase.name for _, _, phase in steps} == {"finetune"}
    for client in SIZED.clients:
        histogram = SIZED.histogram(client) if tuning else None
        expected = trained_with_torch(state.server["model"], batches_of(steps, len(client.train)), TRAIN.lr, histogram)
        assert far(deployed[client.name]["model"], expected) < 1e-12
        assert far(deployed[client.name]["model"], state.server["model"]) > 1e-3


@pytest.mark.parametrize("method", ["finetune", "ditto", "apfl"])
def test_the_received_model_is_deployed_beside_the_personal_one(method: str) -> None:
    fed, _ = federation(method, make_task((5, 9, 12), unseen=2))
    state, _ = run(fed)
    for tree in fed.deploy(state).trained().values():
        assert set(tree) == {"model", "global"}
        assert equal(tree["global"], state.server["model"])
        assert far(tree["model"], tree["global"]) > 1e-4
    deployment = fed.deploy(state)
    unseen = fed.unseen(deployment)
    assert set(unseen) == {"new0", "new1"}
    assert deployment.given_bytes == 0
    for tree in unseen.values():
        assert equal(tree["model"], state.server["model"])
        assert equal(tree["global"], state.server["model"])


def test_a_client_whose_finetuning_fails_serves_the_received_model_twice() -> None:
    class Failing(FineTune):
        def loss(self, state: Tree, tensors: Tensors, batch: Batch, phase: Phase) -> tuple[Tensor, Tensors]:
            value, buffers = super().loss(state, tensors, batch, phase)
            return value * (torch.nan if phase.name == "finetune" else 1.0), buffers

    fed, _ = federation(Failing, SIZED)
    state, _ = run(fed, 1)
    for tree in fed.deploy(state).trained().values():
        assert equal(tree["model"], state.server["model"])
        assert equal(tree["global"], state.server["model"])


# --- FedRoD -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("arch", [AWKWARD, PLAIN], ids=["batch-norm", "plain"])
def test_fedrods_shared_part_is_balanced_fedavg_to_the_bit(recipe: str, arch: Arch) -> None:
    train = replace(TRAIN, local_epochs=2, **RECIPES[recipe])
    fed, _ = federation("fedrod", SIZED, train, arch)
    base, _ = federation("finetune", SIZED, train, arch, balanced=True)
    expected, state = base.start(), fed.start()
    for _ in range(3):
        expected, state = base.step(expected)[0], fed.step(state)[0]
        assert equal_trees(state.server, expected.server)
    assert all(bool(leaf.any()) for local in state.locals.values() for leaf in local["model"].values())


def gradients_of_fedrod(histogram: Tensor) -> tuple[Tensors, Tensors, Output]:
    """Of the loss at a random place, by name; the place; the forward pass there."""
    method = FedRoD(AWKWARD, TRAIN)
    (phase,) = method.phases(CTX)
    model = {n: t.double() if t.is_floating_point() else t for n, t in AWKWARD.init(0).items()}
    residual = random_like({f"personal.{n}": model[n] for n in HEAD}, 1)
    state = {"model": {**model, **residual}, "now": {"histogram": histogram}}
    assert method.trainable(phase) == PARAMETERS | PERSONAL
    live = pick(state["model"], method.trainable(phase))
    batch = with_balance(method, state, one_batch(), phase)
    grads, _, _ = gradient(lambda t: method.loss(state, {**state["model"], **t}, batch, phase), live)
    return grads, state["model"], AWKWARD(model, batch["x"], True)


HISTOGRAM = torch.tensor([7.0, 0.0, 2.0], dtype=torch.float64)


def test_fedrods_balanced_term_moves_extractor_and_generic_head_only(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _, _ = gradients_of_fedrod(HISTOGRAM)
    monkeypatch.setattr("fedshift.methods.fedrod.F", SimpleNamespace(cross_entropy=lambda *_: torch.zeros(())))
    alone, _, _ = gradients_of_fedrod(HISTOGRAM)
    assert {name for name, grad in alone.items() if bool(grad.any())} == PARAMETERS
    assert equal(pick(alone, PARAMETERS), pick(whole, PARAMETERS))  # the other term adds nothing, not even round-off


def test_fedrods_personal_term_moves_the_personal_head_only(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, tensors, output = gradients_of_fedrod(HISTOGRAM)
    monkeypatch.setattr(FedRoD, "cross_entropy", lambda *_: torch.zeros(()))
    alone, _, _ = gradients_of_fedrod(HISTOGRAM)
    assert {name for name, grad in alone.items() if bool(grad.any())} == PERSONAL
    assert equal(pick(alone, PERSONAL), pick(whole, PERSONAL))
    # and it is the gradient of cross-entropy at the sum of both heads
    weight, bias = tensors["personal.out.weight"], tensors["personal.out.bias"]
    logits = output.logits + output.features @ weight.T + bias
    error = (logits.softmax(1) - F.one_hot(one_batch()["y"], CLASSES)) / len(logits)
    assert torch.allclose(alone["personal.out.weight"], error.T @ output.features, rtol=0, atol=1e-13)
    assert torch.allclose(alone["personal.out.bias"], error.sum(0), rtol=0, atol=1e-13)


def test_fedrod_predicts_with_both_heads_and_hands_over_their_sum_and_the_generic_one() -> None:
    fed, _ = federation("fedrod", SIZED)
    state, _ = run(fed)
    method = fed.setup.method
    x = one_batch()["x"]
    for name, tree in fed.deploy(state).trained().items():
        assert set(tree) == method.provides == {"model", "generic"}
        assert set(tree["model"]) == ENTRIES
        assert equal(tree["generic"], pick(state.server["model"], HEAD))
        assert equal({**tree["model"], **tree["generic"]}, state.server["model"])
        generic, answer = AWKWARD(state.server["model"], x), method.predict(tree, x)
        residual = {n.removeprefix("personal."): leaf for n, leaf in state.locals[name]["model"].items()}
        expected = generic.logits + AWKWARD.classify(residual, generic.features)
        assert torch.allclose(answer.logits, expected, rtol=0, atol=1e-13)
        assert torch.equal(AWKWARD.classify(tree["generic"], answer.features), generic.logits)
        assert far({"": answer.logits}, {"": generic.logits}) > 1e-3


def test_fedrod_starts_at_the_generic_prediction_and_unseen_clients_stay_there() -> None:
    fed, _ = federation("fedrod", make_task((5, 9, 12), unseen=2))
    start = fed.start()
    state, _ = run(fed)
    deployment = fed.deploy(state)
    unseen = fed.unseen(deployment)
    assert set(unseen) == {"new0", "new1"}
    assert deployment.given_bytes == 0
    for server, trees in ((start.server, fed.deploy(start).trained()), (state.server, unseen)):
        for tree in trees.values():
            assert equal(tree["model"], server["model"])
            assert equal(tree["generic"], pick(server["model"], HEAD))


def test_fedrods_personal_head_knows_its_clients_classes() -> None:
    task = make_task((12, 12, 12))
    labels = torch.arange(3).repeat_interleave(12)  # every client has a class of its own
    fed, _ = federation("fedrod", replace(task, labels=labels), replace(TRAIN, local_epochs=10))
    state, _ = run(fed)
    x = torch.rand(50, *SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for own, tree in enumerate(fed.deploy(state).trained().values()):
        personal = fed.setup.method.predict(tree, x).logits.softmax(1).mean(0)
        generic = AWKWARD(state.server["model"], x).logits.softmax(1).mean(0)
        assert personal[own] > 0.75
        assert generic[own] < 0.4


def test_fedrod_with_a_head_without_bias() -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, CLASSES, bias=False))

    fed, _ = federation("fedrod", SIZED, arch=Arch.of(network, SHAPE))
    state, _ = run(fed)
    assert all(set(local["model"]) == {"personal.3.weight"} for local in state.locals.values())
    assert all(set(tree["generic"]) == {"3.weight"} for tree in fed.deploy(state).trained().values())


# --- APFL -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", CLIPPED)
@pytest.mark.parametrize("how", [{}, {"alpha": 0.0}, {"alpha": 1.0, "adapt": False}, {"alpha": 0.3}], ids=str)
def test_apfls_global_model_is_fedavgs_whatever_alpha(recipe: str, how: dict[str, Any]) -> None:
    train = replace(TRAIN, **CLIPPED[recipe])
    fed, base = federation("apfl", SIZED, train, **how)[0], federation("fedavg", SIZED, train)[0]
    (state, reports), (expected, told) = run(fed), run(base)
    assert equal_trees(state.server, expected.server)
    assert [report.loss for report in reports] == [report.loss for report in told]


@pytest.mark.parametrize("recipe", CLIPPED)
def test_apfl_without_a_share_deploys_fedavg(recipe: str) -> None:
    train = replace(TRAIN, **CLIPPED[recipe])
    for arch, same in ((PLAIN, set(PLAIN.parameters)), (AWKWARD, PARAMETERS)):  # statistics are the client's own
        fed, _ = federation("apfl", SIZED, train, arch, alpha=0.0, adapt=False)
        state, _ = run(fed)
        expected = ran("fedavg", SIZED, train, arch).server["model"]
        for tree in fed.deploy(state).trained().values():
            assert equal(pick(tree["model"], same), pick(expected, same))


@pytest.mark.parametrize("recipe", CLIPPED)
@pytest.mark.parametrize("arch", [AWKWARD, PLAIN], ids=["batch-norm", "plain"])
def test_apfl_with_the_whole_share_is_local(recipe: str, arch: Arch) -> None:
    train = replace(TRAIN, local_epochs=2, **CLIPPED[recipe])
    fed, _ = federation("apfl", SIZED, train, arch, alpha=1.0, adapt=False)
    state, _ = run(fed)
    local = ran("local", SIZED, train, arch)
    for name, tree in fed.deploy(state).trained().items():
        assert equal(state.locals[name]["personal"], local.locals[name]["model"])
        assert equal(tree["model"], local.locals[name]["model"])


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9, "weight_decay": 0.1, "lr_decay": 0.7}, {"clip": 0.3}])
@pytest.mark.parametrize("adapt", [False, True])
def test_apfl_is_the_papers_recursion(settings: dict[str, Any], adapt: bool) -> None:
    """Three rounds against torch: gradients of v and alpha taken through the mixture itself."""
    train = replace(TRAIN, local_epochs=2, lr=0.1, **settings)
    watched, steps = watching(APFL)
    fed, watch = federation(watched, SIZED, train, alpha=0.4, adapt=adapt)
    state = fed.start()
    v = {name: {n: t.clone() for n, t in state.server["model"].items()} for name in "abc"}
    alphas = dict.fromkeys("abc", 0.4)
    for number in range(3):
        steps.clear()
        state, _ = fed.step(state)
        lr = train.lr * train.lr_decay**number
        for client, size in zip("abc", (5, 9, 12), strict=True):
            received, own = watch.downs[-1][client]["model"], batches_of(steps, size)
            alphas[client] = mixed_training(received, v[client], alphas[client], own, train.clip, lr, settings, adapt)
            local = state.locals[client]
            assert far(local["personal"], v[client]) < 1e-12
            assert float(local["mix"]["alpha"]) == pytest.approx(alphas[client], abs=1e-12)
    assert (len(set(alphas.values())) == 3) == adapt
    for name, tree in fed.deploy(state).trained().items():
        for entry in ENTRIES - PARAMETERS:  # the mixture's statistics
            assert torch.equal(tree["model"][entry], state.locals[name]["personal"][entry])
        for entry in PARAMETERS:
            mixed = alphas[name] * v[name][entry] + (1 - alphas[name]) * state.server["model"][entry]
            assert torch.allclose(tree["model"][entry], mixed, rtol=0, atol=1e-12)


def mixed_training(
    received: Tensors,
    v: Tensors,
    alpha: float,
    batches: list[Batch],
    clip: float | None,
    lr: float,
    settings: dict[str, Any],
    adapt: bool,
) -> float:
    """Train ``v`` (in place) beside a module; the new alpha."""
    how = {"momentum": settings.get("momentum", 0.0), "weight_decay": settings.get("weight_decay", 0.0)}
    module = module_of(received).train()
    inner = module_of(received).train()
    parts = {name: nn.Parameter(v[name].clone()) for name in PARAMETERS}
    own_rule, rule = (torch.optim.SGD(list(p), lr, **how) for p in (parts.values(), module.parameters()))
    for number, batch in enumerate(batches):
        x = (batch["x"] - 0.5) / 0.5
        share = torch.tensor(alpha, dtype=torch.float64, requires_grad=True)
        w = {name: leaf.detach().clone() for name, leaf in module.named_parameters()}
        mixed = {name: share * parts[name] + (1 - share) * w[name] for name in PARAMETERS}
        statistics = {name: v[name] for name in ENTRIES - PARAMETERS}  # refreshed in place
        own_rule.zero_grad()
        F.cross_entropy(functional_call(inner, {**mixed, **statistics}, (x,)), batch["y"]).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(parts.values(), clip)
        own_rule.step()
        rule.zero_grad()
        F.cross_entropy(module(x), batch["y"]).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        rule.step()
        if adapt and number == 0:
            assert share.grad is not None
            alpha = min(max(alpha - lr * float(share.grad), 0.0), 1.0)
    v.update({name: leaf.detach().clone() for name, leaf in parts.items()})
    return alpha


def test_alpha_moves_once_a_round_and_stays_between_zero_and_one() -> None:
    watched, steps = watching(APFL)
    fed, _ = federation(watched, SIZED, replace(TRAIN, lr=2.0, clip=0.5, local_epochs=3), rounds=6, alpha=0.9)
    state, _ = run(fed)
    seen: dict[tuple[int, int], list[float]] = {}
    for before, _, _ in steps:
        key = (int(before["now"]["samples"]), int(before["now"]["round"]))
        seen.setdefault(key, []).append(float(before["mix"]["alpha"]))
    for (size, number), values in seen.items():
        assert len(set(values[1:])) == 1  # from the second batch on
        following = seen.get((size, number + 1))
        assert following is None or following[0] == values[-1]
        if number == 0:
            assert set(values) == {0.9}  # both models start at the same place
    ends = {value for values in seen.values() for value in values}
    assert all(0 <= value <= 1 for value in ends)
    assert len(ends) > 3
    assert ends & {0.0, 1.0}
    assert all(local["mix"]["alpha"].shape == () for local in state.locals.values())


def test_unseen_clients_have_no_share_of_their_own() -> None:
    method = APFL(AWKWARD, TRAIN)
    model = AWKWARD.init(0)
    info = ClientInfo("new", 0, torch.zeros(CLASSES), 0, unseen=True)
    assert method.init_local(model, info, CTX) == {}
    assert set(method.init_local(model, replace(info, unseen=False), CTX)) == {"personal", "mix"}


# --- GMA --------------------------------------------------------------------------------------------------------------


def random_round(count: int, seed: int) -> tuple[Tree, dict[str, Tree], ServerContext]:
    """A server, updates of this many clients (a third of the entries untouched), and their sizes."""
    generator = torch.Generator().manual_seed(seed)
    here = random_like(AWKWARD.init(0), seed)
    ups: dict[str, Tree] = {}
    for number in range(count):
        step = random_like(here, 100 * seed + number)
        still = {n: torch.rand(t.shape, generator=generator) < 1 / 3 for n, t in here.items()}
        model = {
            n: torch.where(still[n], t, t + step[n]) if t.is_floating_point() else t + number for n, t in here.items()
        }
        ups["abcde"[number]] = {"model": model}
    samples = torch.randint(1, 50, (count,), generator=generator).double()
    return {"model": here}, ups, server_context(samples)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("weights", ["size", "uniform"])
@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.4, 1.0])
@pytest.mark.parametrize("rate", [1.0, 1.5])
def test_gma_is_the_papers_formula(count: int, weights: Any, threshold: float, rate: float) -> None:
    train = replace(TRAIN, weights=weights)
    server, ups, ctx = random_round(count, seed=count)
    new = GMA(AWKWARD, train, threshold, rate).aggregate(server, ups, ctx)[0]["model"]
    base = FedAvg(AWKWARD, train).aggregate(server, ups, ctx)[0]["model"]
    assert new.keys() == base.keys() == ENTRIES
    for name in ENTRIES - PARAMETERS:
        assert torch.equal(new[name], base[name])
    sizes = ctx.samples if weights == "size" else torch.ones(count).double()
    shares = (sizes / sizes.sum()).tolist()
    masked = 0
    for name in PARAMETERS:
        w = server["model"][name].flatten().tolist()
        deltas = [(up["model"][name].flatten() - server["model"][name].flatten()).tolist() for up in ups.values()]
        for i, result in enumerate(new[name].flatten().tolist()):
            step = [delta[i] for delta in deltas]
            agreement = abs(sum((d > 0) - (d < 0) for d in step)) / count
            mask = 1.0 if agreement >= threshold else agreement
            masked += mask < 1
            mean = sum(share * d for share, d in zip(shares, step, strict=True))
            assert result == pytest.approx(w[i] + rate * mask * mean, abs=1e-12)
    assert (masked > 0) == (threshold > 0)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_gma_without_a_threshold_is_fedavg_to_the_bit(count: int) -> None:
    server, ups, ctx = random_round(count, seed=10 + count)
    expected, _ = FedAvg(AWKWARD, TRAIN).aggregate(server, ups, ctx)
    assert equal_trees(GMA(AWKWARD, TRAIN, threshold=0.0).aggregate(server, ups, ctx)[0], expected)
    assert equal_trees(GMA(AWKWARD, TRAIN, threshold=1.0).aggregate(server, ups, ctx)[0], expected) == (count == 1)


def test_gma_does_not_move_where_two_clients_disagree_and_counts_heads_not_samples() -> None:
    here = {n: t.double() if t.is_floating_point() else t for n, t in AWKWARD.init(0).items()}
    up, down = ({"model": {n: t + d if n in PARAMETERS else t for n, t in here.items()}} for d in (1.0, -1.0))
    ctx = server_context([99.0, 1.0])
    method = GMA(AWKWARD, TRAIN)
    assert equal(method.aggregate({"model": here}, {"a": up, "b": down}, ctx)[0]["model"], here)
    agreed = method.aggregate({"model": here}, {"a": up, "b": up}, ctx)[0]["model"]
    assert far(agreed, up["model"]) < 1e-14
    # a client that stood still has no vote: agreement is one half
    half, _ = replace(method, threshold=0.6).aggregate({"model": here}, {"a": {"model": here}, "b": down}, ctx)
    for name in PARAMETERS:
        assert torch.allclose(half["model"][name], here[name] - 0.5 * 0.01, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gma_reaches_its_threshold_exactly(dtype: torch.dtype) -> None:
    """Eleven against nine agree by a tenth, which is not below the papers' threshold; ten against ten do not agree."""
    here = {n: t.to(dtype) if t.is_floating_point() else t for n, t in AWKWARD.init(0).items()}
    method, ctx = GMA(AWKWARD, TRAIN), server_context([1.0] * 20)
    for ahead, agree in ((11, True), (10, False)):
        steps = [3.0 if k < ahead else -1.0 for k in range(20)]
        ups = {
            f"{k}": {"model": {n: t + d if n in PARAMETERS else t for n, t in here.items()}}
            for k, d in enumerate(steps)
        }
        new, _ = method.aggregate({"model": here}, ups, ctx)
        expected = FedAvg(AWKWARD, TRAIN).aggregate({"model": here}, ups, ctx)[0] if agree else {"model": here}
        assert equal(pick(new["model"], PARAMETERS), pick(expected["model"], PARAMETERS))


def test_gma_in_a_federation() -> None:
    expected = ran("fedavg", SIZED).server
    assert equal_trees(ran("gma", SIZED, threshold=0.0).server, expected)
    alone = make_task((10,))
    assert equal_trees(ran("gma", alone).server, ran("fedavg", alone).server)
    # three clients who all move agree by a third at least, so it takes a threshold above that
    other = ran("gma", SIZED, threshold=0.5).server["model"]
    assert far(pick(other, PARAMETERS), pick(expected["model"], PARAMETERS)) > 1e-3
    assert not GMA.linear  # not a weighted mean


# --- what travels -----------------------------------------------------------------------------------------------------

PRIVATE = {"fedrod": {"model": PERSONAL}, "apfl": {"personal": ENTRIES, "mix": {"alpha"}}, "gma": {}, "finetune": {}}


@pytest.mark.parametrize("method", PRIVATE)
def test_the_model_travels_and_nothing_else(method: str) -> None:
    fed, watch = federation(method, SIZED)
    state, reports = run(fed)
    for downs, replies in zip(watch.downs, watch.replies, strict=True):
        for name, reply in replies.items():
            for message in (downs[name], reply.up):
                assert {slot: set(leaves) for slot, leaves in message.items()} == {"model": ENTRIES}
    floats = sum(leaf.numel() for leaf in state.server["model"].values() if leaf.is_floating_point())
    assert [(r.bytes_down, r.bytes_up) for r in reports] == [(3 * 8 * floats, 3 * 8 * floats)] * 3
    assert set(state.locals) == (set("abc") if PRIVATE[method] else set())
    for local in state.locals.values():
        assert {slot: set(leaves) for slot, leaves in local.items()} == PRIVATE[method]
    assert set(state.server["model"]) == ENTRIES


@pytest.mark.parametrize("method", ["fedrod", "apfl"])
def test_private_memory_differs_and_outlives_a_round(method: str) -> None:
    fed, _ = federation(method, make_task((4,) * 4), participation=0.5, rounds=6)
    state = fed.start()
    for _ in range(6):
        before = state
        state, _ = fed.step(state)
        same = {name for name in before.locals if equal_trees(before.locals[name], state.locals[name])}
        assert len(before.locals.keys() - same) <= 2  # only those who took part
    slot = next(iter(state.locals["a"]))
    assert far(state.locals["a"][slot], state.locals["b"][slot]) > 1e-3


# --- settings and engines ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        ("apfl", {"alpha": 1.5}, r"method 'apfl': alpha must lie in \[0, 1\], not 1.5"),
        ("apfl", {"alpha": float("nan")}, "alpha must lie in"),
        ("gma", {"threshold": -0.1}, r"method 'gma': threshold must lie in \[0, 1\], not -0.1"),
        ("gma", {"server_lr": -1.0}, "method 'gma': server-lr must not be negative"),
        ("finetune", {"epochs": -1}, "method 'finetune': epochs must not be negative"),
        ("finetune-rotation", {"epochs": -1}, "method 'finetune-rotation': epochs must not be negative"),
    ],
)
def test_settings_that_cannot_be_meant(method: str, options: dict[str, Any], expected: str) -> None:
    assert re.search(expected, refusal(METHODS, "method", method, options, arch=PLAIN, train=TRAIN))


@pytest.mark.grid
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedrod", {}),
        ("apfl", {}),
        ("apfl", {"alpha": 1.0, "adapt": False}),
        ("gma", {"threshold": 0.5}),
        ("finetune", {"balanced": True, "balanced_tuning": True}),
    ],
)
@pytest.mark.parametrize("changes", [{"optimiser": "adam"}, {"clip": 0.5, "lr_decay": 0.5}])
def test_stacked_clients_agree_for_other_settings_too(
    name: str, options: dict[str, Any], changes: dict[str, Any]
) -> None:
    method = make(name, True, **changes)
    assert method is not None
    method = replace(method, **options)
    check_equal(federate(method, Sequential(DOUBLE), DOUBLE), federate(method, Vmapped(DOUBLE), DOUBLE), 1e-10)
