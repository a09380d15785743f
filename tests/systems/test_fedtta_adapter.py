"""FedTTA's adapter against torch's SGD on the learnt loss: one step, many, and which state predicts."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedshift.blocks.losses import entropy
from fedshift.core.arch import Arch
from fedshift.core.compatibility import missing_for_pair
from fedshift.core.context import Context, Phase
from fedshift.core.method import Train
from fedshift.core.registry import ADAPTERS, METHODS
from fedshift.core.tree import Tensors, Tree, pick, stack, unstack
from fedshift.data.streams import Setting, Stream
from fedshift.engines.base import Compute
from fedshift.engines.sequential import Sequential
from fedshift.engines.vmapped import Vmapped
from fedshift.systems.fedtta import adapter as fedtta
from fedshift.systems.fedtta.adapter import LearnedAdaptation, curve
from fedshift.systems.fedtta.learned_loss import NAMES, RATE, SLOT, fresh, norms
from fedshift.systems.fedtta.method import FedTTA
from tests.adapters.test_adapters import CLASSES, MODELS, SHAPE, STREAM, TASK, images_of, normalised, stream
from tests.adapters.test_adapters import trained as network
from tests.conftest import refusal

DOUBLE = Compute(dtype=torch.float64)
CLIENT = TASK.clients[0]
X = images_of(CLIENT)
FAST: dict[str, Any] = {"batch_size": 16}
PLUS: dict[str, Any] = {**FAST, "steps": 12, "patience": 3}


def trained(kind: str, rate: float = 0.3, seed: int = 3, loud: float = 3.0) -> tuple[Arch, nn.Module, Tree]:
    """A network with a loss on its logits, and the rate that belongs to it."""
    arch, module, tree = network(kind, seed)
    like = torch.full((1,), 0.1 + seed, dtype=torch.float64)
    loss = {name: loud**0.25 * leaf for name, leaf in fresh(like, CLASSES).items()}
    return arch, module, {**tree, SLOT: {**loss, RATE: torch.tensor(rate, dtype=torch.float64)}}


def on(arch: Arch, **options: Any) -> LearnedAdaptation:
    return LearnedAdaptation(arch=arch, predict_with=FedTTA(arch).predict, **options)


def far(a: Tensors, b: Tensors) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def uncertainty(arch: Arch, tree: Tree, x: Tensor = X) -> float:
    return float(entropy(arch(tree["model"], x).logits).mean())


def with_torch(module: nn.Module, tree: Tree, adapter: Any, x: Tensor, steps: int) -> tuple[list[Tensors], list[float]]:
    """The states before and after every step with a module and an optimiser, and the losses before them."""
    module = copy.deepcopy(module)
    rate = float(tree[SLOT][RATE]) if adapter.lr is None else adapter.lr
    optimiser = torch.optim.SGD(module.parameters(), rate, weight_decay=adapter.weight_decay)
    states, losses = [{n: leaf.clone() for n, leaf in module.state_dict().items()}], []
    for _ in range(steps):
        parts = []
        for images in x.split(adapter.batch_size):
            module.train(len(images) > 1)
            unused = {n: leaf.clone() for n, leaf in module.named_buffers()}
            s = functional_call(module, unused, (normalised(images),))
            for layer in range(4):
                s = s @ tree[SLOT][f"{SLOT}.{layer}.weight"].T + tree[SLOT][f"{SLOT}.{layer}.bias"]
                s = s.relu() if layer < 3 else s
            parts.append((s.square().sum() + 1e-12).sqrt())
        optimiser.zero_grad()
        loss = torch.stack(parts).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), adapter.clip)
        optimiser.step()
        states.append({n: leaf.clone() for n, leaf in module.state_dict().items()})
        losses.append(float(loss.detach()))
    return states, losses


# ---- one step -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [{}, {"lr": 0.05}, {"clip": 0.1, "weight_decay": 0.1}, {"batch_size": 11}])
@pytest.mark.parametrize("kind", MODELS)
def test_it_is_a_step_of_torchs_sgd_on_the_mean_of_the_batches_norms(kind: str, options: dict[str, Any]) -> None:
    """45 images in batches of 16 and 11: the last ones are short, and of one image."""
    arch, module, tree = trained(kind)
    adapter = on(arch, **{**FAST, **options})
    found = stream(adapter, tree)
    (_, expected), _ = with_torch(module, tree, adapter, X, 1)
    assert far(found.states[-1]["model"], expected) < 1e-12
    assert torch.equal(found.logits, arch(found.states[-1]["model"], X).logits)
    assert far(pick(found.states[-1]["model"], arch.parameters), pick(tree["model"], arch.parameters)) > 1e-3
    assert all(torch.equal(found.states[-1]["model"][name], tree["model"][name]) for name in arch.buffers)
    assert all(leaf is tree[SLOT][name] for name, leaf in found.states[-1][SLOT].items())


def test_the_gradient_is_clipped_and_the_decay_is_not() -> None:
    arch, _, tree = trained("plain", rate=1.0)
    after = on(arch, clip=0.01, weight_decay=0.0).step(tree, X)[0]["model"]
    length = sum(float((after[n] - leaf).square().sum()) for n, leaf in tree["model"].items()) ** 0.5
    assert length == pytest.approx(0.01, rel=1e-3)
    decayed = on(arch, clip=0.01, weight_decay=0.5).step(tree, X)[0]["model"]
    for name, leaf in tree["model"].items():
        assert torch.allclose(decayed[name], after[name] - 0.5 * leaf, rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", MODELS)
def test_how_many_images_go_through_at_once_does_not_matter(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arch, _, tree = trained(kind)
    adapter = on(arch, batch_size=8)
    whole = adapter.fit(tree, X, {})
    monkeypatch.setattr(fedtta, "AT_ONCE", 2 * 8 * X[0].numel())
    assert far(adapter.fit(tree, X, {})["model"], whole["model"]) < 1e-13
    assert float(adapter.uncertainty(whole, X)) == pytest.approx(uncertainty(arch, whole), abs=1e-13)


@pytest.mark.parametrize("kind", MODELS)
def test_a_loss_that_says_the_same_to_everything_changes_nothing(kind: str) -> None:
    arch, _, tree = trained(kind)
    for bias in (0.0, 2.0):
        constant = {NAMES[-2]: torch.zeros(1, 32).double(), NAMES[-1]: torch.full((1,), bias).double()}
        flat = {**tree, SLOT: {**tree[SLOT], **constant}}
        assert far(on(arch, weight_decay=0.0).fit(flat, X, {})["model"], tree["model"]) == 0
        shrunk = on(arch, weight_decay=0.1).fit(flat, X, {})["model"]
        for name in arch.parameters:
            assert torch.allclose(shrunk[name], (1 - 0.3 * 0.1) * tree["model"][name], rtol=0, atol=1e-14)


def test_no_rate_no_change() -> None:
    arch, _, tree = trained("cnn", rate=0.0)
    assert far(on(arch).fit(tree, X, {})["model"], tree["model"]) == 0
    assert far(on(arch, lr=0.1).fit(tree, X, {})["model"], tree["model"]) > 1e-3
    assert far(on(arch, lr=0.0).fit(trained("cnn")[2], X, {})["model"], tree["model"]) == 0


@pytest.mark.parametrize("options", [{}, {"steps": 5}])
@pytest.mark.parametrize("kind", MODELS)
def test_one_image_is_enough_and_none_is_nothing(kind: str, options: dict[str, Any]) -> None:
    arch, module, tree = trained(kind)
    adapter = on(arch, **options, patience=9)
    state = adapter.fit(tree, X[:1], {})
    states, _ = with_torch(module, tree, adapter, X[:1], adapter.steps)
    least = min(states[1:], key=lambda model: uncertainty(arch, {"model": model}, X[:1]))
    assert far(state["model"], least) < 1e-12
    assert adapter.predict(state, X[:1], {})[0].logits.isfinite().all()
    assert adapter.fit(tree, X[:0], {}) is tree


def test_every_stream_starts_from_what_was_deployed() -> None:
    arch, _, tree = trained("plain")
    together = stream(on(arch, **FAST), tree, ["test", "val", "test"])
    alone = stream(on(arch, **FAST), tree, ["test"])
    assert torch.equal(together.chunks[0], alone.logits)
    assert torch.equal(together.chunks[2], alone.logits)
    assert torch.equal(together.chunks[1], stream(on(arch, **FAST), tree, ["val"]).logits)


def test_where_the_state_is_reset_it_sees_what_arrives_together() -> None:
    arch, _, tree = trained("plain")
    tests = {client.name: client.test for client in TASK.clients}
    setting = Setting(chunk=20, reset="chunk")
    shown = Stream("arriving", "original", setting, None, TASK.labels, TASK.ids, tests)
    task = replace(TASK, streams={"arriving": shown})
    adapter = on(arch, **FAST)
    found = stream(adapter, tree, ["arriving"], task)
    for logits, x in zip(found.chunks, X.split(20), strict=True):
        assert torch.equal(logits, arch(adapter.fit(tree, x, {})["model"], x).logits)


# ---- many steps ---------------------------------------------------------------------------------------------------------
def chosen(entropies: list[float], patience: int, initial: bool) -> tuple[int, int]:
    """The paper's rule, number by number: which state predicts, and how many steps are taken."""
    best, waited, taken = (0 if initial else -1), 0, 0
    for number in range(1, len(entropies)):
        taken = number
        if best < 0 or entropies[number] < entropies[best]:
            best, waited = number, 0
        else:
            waited += 1
        if waited >= patience:
            break
    return best, taken


def counted(adapter: LearnedAdaptation) -> tuple[LearnedAdaptation, list[int]]:
    """The same adapter, which counts its steps."""
    steps: list[int] = []

    class Counting(LearnedAdaptation):
        def step(self, state: Tree, x: Tensor) -> tuple[Tree, Tensor]:
            steps.append(len(x))
            return super().step(state, x)

    return Counting(**{field.name: getattr(adapter, field.name) for field in fields(adapter)}), steps


@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("patience", [1, 3, 5])
@pytest.mark.parametrize(("kind", "rate"), [("plain", 0.3), ("plain", 1.0), ("cnn", 0.3), ("mlp", 0.2)])
def test_the_state_with_the_least_entropy_predicts(kind: str, rate: float, patience: int, initial: bool) -> None:
    arch, module, tree = trained(kind, rate)
    adapter, steps = counted(on(arch, **FAST, steps=12, patience=patience, include_initial=initial))
    states, _ = with_torch(module, tree, adapter, X, 12)
    entropies = [uncertainty(arch, {"model": model}) for model in states]
    best, taken = chosen(entropies, patience, initial)
    found = adapter.fit(tree, X, {})
    assert len(steps) == taken
    assert far(found["model"], states[best]) < 1e-10
    assert uncertainty(arch, found) <= entropies[0 if initial else 1] + 1e-12


def test_the_cases_above_are_different_ones() -> None:
    """Adaptation that goes on to the end, that is stopped early, that waits and goes on, and that is not begun."""
    seen = set()
    for kind, rate in (("plain", 0.3), ("plain", 1.0), ("cnn", 0.3), ("mlp", 0.2)):
        arch, module, tree = trained(kind, rate)
        states, _ = with_torch(module, tree, on(arch, **FAST), X, 12)
        entropies = [uncertainty(arch, {"model": model}) for model in states]
        seen |= {chosen(entropies, patience, initial) for patience in (1, 3, 5) for initial in (False, True)}
    assert {best for best, _ in seen} > {0, 1}
    assert len({taken for _, taken in seen}) >= 4


@pytest.mark.parametrize("kind", MODELS)
def test_one_of_many_steps_is_one_step(kind: str) -> None:
    arch, _, tree = trained(kind)
    one = on(arch, **FAST).fit(tree, X, {})
    assert far(on(arch, **FAST, steps=1, patience=5).fit(tree, X, {})["model"], one["model"]) == 0
    stopped = on(arch, **FAST, steps=2, patience=1, include_initial=True).fit(tree, X, {})
    assert uncertainty(arch, stopped) <= min(uncertainty(arch, tree), uncertainty(arch, one))


def test_an_entropy_that_is_not_a_number_is_no_improvement() -> None:
    arch, _, tree = trained("plain", rate=float("nan"))
    assert on(arch, steps=5, patience=2).fit(tree, X, {}) is tree


# ---- as a part of training, and the curve -------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["plain", "mlp"])
def test_its_differentiable_step_is_the_one_the_method_trains_through(kind: str) -> None:
    arch, _, tree = trained(kind, rate=0.4)
    batch = {"x": X[:12], "y": TASK.labels[CLIENT.test][:12]}
    method = FedTTA(arch, Train(), inner_lr=0.4, inner_weight_decay=0.01)
    adapter = on(arch, weight_decay=0.01)
    leaves = {n: leaf.clone() for n, leaf in {**tree["model"], **tree[SLOT]}.items()}
    live = {n: leaves[n].requires_grad_() for n in (*arch.parameters, *NAMES)}
    state = {"now": {"decay": torch.tensor(1.0, dtype=torch.float64)}}
    expected, _ = method.loss(state, leaves, batch, Phase())
    after = adapter.update(leaves, batch["x"])
    found = nn.functional.cross_entropy(arch(after, batch["x"], batch_stats=True).logits, batch["y"])
    assert float(found.detach()) == pytest.approx(float(expected.detach()), abs=1e-12)
    for a, b in zip(*(torch.autograd.grad(v, list(live.values())) for v in (found, expected)), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)
    assert after.keys() == leaves.keys()
    assert all(after[name] is leaves[name] for name in (*NAMES, RATE))


@pytest.mark.parametrize("kind", MODELS)
def test_the_curve_tells_loss_and_entropy_of_every_state(kind: str) -> None:
    arch, module, tree = trained(kind)
    adapter = on(arch, **FAST, steps=6, patience=1)
    states, losses = with_torch(module, tree, adapter, X, 7)
    labels = TASK.labels[CLIENT.test]
    with torch.no_grad():
        points = curve(adapter, adapter.init(tree), X, labels)
    assert [set(point) for point in points] == [{"loss", "entropy", "accuracy"}] * 7
    for point, model, loss in zip(points, states, losses, strict=False):
        assert point["loss"] == pytest.approx(loss, abs=1e-10)
        assert point["entropy"] == pytest.approx(uncertainty(arch, {"model": model}), abs=1e-10)
        assert point["accuracy"] == float((arch(model, X).logits.argmax(1) == labels).double().mean())
    assert curve(adapter, tree, X) == [{k: v for k, v in p.items() if k != "accuracy"} for p in points]
    assert points[-1]["loss"] < points[0]["loss"]


@pytest.mark.parametrize("kind", MODELS)
def test_it_tells_how_sure_every_prediction_is(kind: str) -> None:
    arch, _, tree = trained(kind)
    adapter = on(arch, **FAST)
    state = adapter.fit(adapter.init(tree), X, {})
    found, _ = adapter.predict(state, X, {})
    p = found.logits.softmax(1)
    expected = -(p * p.log()).sum(1) / torch.tensor(float(CLASSES)).log()
    assert torch.allclose(found.aux["uncertainty"], expected, atol=1e-10)
    guess = {"model": {name: leaf * 0 if name in arch.head else leaf for name, leaf in tree["model"].items()}}
    assert torch.allclose(adapter.predict({**state, **guess}, X, {})[0].aux["uncertainty"], torch.ones(len(X)).double())


# ---- manners ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [FAST, PLUS])
@pytest.mark.parametrize("kind", MODELS)
def test_engines_agree(kind: str, options: dict[str, Any]) -> None:
    arch, _, tree = trained(kind)
    trees = {client.name: tree for client in TASK.clients}
    a, b = (
        engine.evaluate(on(arch, **options), trees, TASK, ["test", "val"], 0)
        for engine in (Sequential(DOUBLE), Vmapped(DOUBLE))
    )
    assert a.keys() == b.keys()
    assert a["client-0", "test"].samples == STREAM
    for key, score in a.items():
        assert (score.samples, score.correct) == (b[key].samples, b[key].correct)
        assert score.loss == pytest.approx(b[key].loss, abs=1e-9)


@pytest.mark.parametrize("kind", MODELS)
def test_many_clients_can_take_their_step_at_once(kind: str) -> None:
    arch, _, _ = trained(kind)
    trees = [trained(kind, seed=seed)[2] for seed in (3, 4, 5)]
    x = torch.stack([X[:20], X[10:30], X[20:40]])
    adapter = on(arch, **FAST)
    together = unstack(vmap(lambda tree, x: adapter.fit(tree, x, {}))(stack(trees), x), 3)
    for tree, images, found in zip(trees, x, together, strict=True):
        assert far(adapter.fit(tree, images, {})["model"], found["model"]) < 1e-12


@pytest.mark.parametrize("options", [FAST, PLUS])
@pytest.mark.parametrize("kind", MODELS)
def test_nothing_that_it_is_given_is_changed(kind: str, options: dict[str, Any]) -> None:
    arch, _, tree = trained(kind)
    before, x = copy.deepcopy(tree), X.clone()
    adapter = on(arch, **options)
    with torch.no_grad():
        state = adapter.fit(adapter.init(tree), x, {})
        output, after = adapter.predict(state, x, {})
        curve(adapter, tree, x)
    assert all(torch.equal(leaf, before[slot][n]) for slot, leaves in tree.items() for n, leaf in leaves.items())
    assert torch.equal(x, X)
    assert after is state
    assert not output.logits.requires_grad
    assert not any(leaf.requires_grad for leaves in state.values() for leaf in leaves.values())


def test_it_needs_a_learnt_loss() -> None:
    arch, _, _ = trained("plain")
    adapter = on(arch)
    for name, entry in METHODS.items():
        reason = missing_for_pair(name, entry.make.provides, "fedtta", adapter)
        assert (reason is None) == (SLOT in entry.make.provides)
        assert reason is None or reason.endswith(" would")
    assert adapter.fits
    assert missing_for_pair("fedtta", FedTTA.provides, "fedtta", adapter) is None


def test_it_takes_what_the_method_provides() -> None:
    arch = Arch.of(lambda: MODELS["plain"].make(SHAPE, CLASSES), SHAPE, "plain")
    method = FedTTA(arch, Train(lr_decay=0.5), inner_lr=0.8)
    server = method.init_server({"plain": arch.init(0)}, (), torch.zeros(0, dtype=torch.int64))
    deployed = method.deployed(method.broadcast(server, "new", Context(2, 5, 3, "unseen")), {})
    adapter = on(arch, weight_decay=0.0)
    x = X.float()
    state, value = adapter.step(deployed, x)
    expected = norms(deployed[SLOT], arch(deployed["model"], x).logits, 64)
    assert float(value) == pytest.approx(float(expected.sum()), rel=1e-6)
    other, _ = replace(adapter, lr=0.8 * 0.5).step(deployed, x)  # two rounds were trained, the second at half the rate
    assert far(state["model"], other["model"]) < 1e-7


@pytest.mark.parametrize("options", [
    {"steps": 0}, {"lr": -1.0}, {"weight_decay": -1.0}, {"clip": 0.0}, {"batch_size": 0}, {"patience": 0},
])  # fmt: skip
def test_settings_that_cannot_be_meant_are_refused(options: dict[str, Any]) -> None:
    sentence = refusal(ADAPTERS, "adapter", "fedtta", options, arch=trained("plain")[0], predict_with=None)
    assert sentence.startswith(f"adapter 'fedtta': {next(iter(options)).replace('_', '-')} must")
