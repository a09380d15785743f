"""FedTTA against plain torch with explicit second derivatives, in its limits, and what it is for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._python_dispatch import TorchDispatchMode

from fedshift.core.arch import Arch
from fedshift.core.context import Context, Phase
from fedshift.core.grad import gradient
from fedshift.core.method import Batch, Train
from fedshift.core.registry import METHODS
from fedshift.core.tree import Tensors, Tree, drop, float_bytes, pick, stack
from fedshift.data import sources
from fedshift.data.partition import Pathological
from fedshift.data.task import Splitting, Task, build
from fedshift.engines import augment
from fedshift.engines.base import Compute
from fedshift.engines.reference import start_phase
from fedshift.engines.sequential import Sequential
from fedshift.engines.vmapped import Vmapped
from fedshift.experiment.schema import AdapterSpec, MethodSpec
from fedshift.models.mlp import MLP
from fedshift.runs.session import Session
from fedshift.runs.setup import Setup
from fedshift.store.state import State
from fedshift.systems.fedtta.learned_loss import NAMES, RATE, SLOT
from fedshift.systems.fedtta.method import FedTTA
from tests.conftest import refusal
from tests.methods.federations import (
    AWKWARD,
    CLASSES,
    DOUBLE,
    PLAIN,
    TRAIN,
    Awkward,
    Plain,
    equal,
    equal_trees,
    far,
    federation,
    make_task,
    ran,
    run,
    watching,
)

ARCHS: dict[str, tuple[Arch, type[nn.Module]]] = {"plain": (PLAIN, Plain), "awkward": (AWKWARD, Awkward)}
SIZED = make_task((5, 9, 12), unseen=2)
SEEN = make_task((5, 9, 12))
LOUD: dict[str, Any] = {"inner_lr": 0.4, "loss_lr": 0.2}  # rates at which two rounds show
LOSS_SIZE = 32 * CLASSES + 32 + 2 * (32 * 32 + 32) + 32 + 1


def state_of(method: FedTTA, seed: int = 0) -> Tree:
    """A client's state at the start of a round, in double precision."""
    init = {n: leaf.double() if leaf.is_floating_point() else leaf for n, leaf in method.arch.init(seed).items()}
    model = method.init_server({"net": init}, (), torch.zeros(0, dtype=torch.int64))["model"]
    now = {"decay": torch.tensor(1.0, dtype=torch.float64)}
    return {**method.begin({"model": model}, {}), "now": now}


def batch_of(count: int = 6) -> dict[str, Tensor]:
    task = make_task((count,))
    return {"x": task.images.double() / 255, "y": task.labels, "index": task.ids}


def tta(arch: Arch = PLAIN, train: Train = TRAIN, **options: Any) -> FedTTA:
    return FedTTA(arch, train, **{**LOUD, **options})


def silent(model: Tensors) -> Tensors:
    """With a learnt loss that is zero for everything."""
    return {**model, **{name: torch.zeros_like(model[name]) for name in NAMES[-2:]}}


# ---- the reference ------------------------------------------------------------------------------------------------------
class Slow:
    """One client with a module, a second module on its logits, and torch's optimisers."""

    def __init__(self, kind: type[nn.Module], model: Tensors, method: FedTTA, decay: float) -> None:
        self.net = kind().double()
        self.net.load_state_dict({n: leaf.clone() for n, leaf in drop(model, NAMES).items()})
        self.server = kind().double()
        self.server.load_state_dict(self.net.state_dict())
        widths = [CLASSES, 32, 32, 32, 1]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths)).double()
        self.layers.load_state_dict({n.removeprefix(f"{SLOT}."): model[n].clone() for n in NAMES})
        self.method, self.inner = method, method.inner_lr * decay
        wd = method.train.weight_decay
        self.optimisers = [
            torch.optim.SGD(self.net.parameters(), method.train.lr * decay, weight_decay=wd),
            torch.optim.SGD(self.layers.parameters(), method.loss_lr * decay, momentum=0.9, weight_decay=wd),
        ]
        self.losses: list[float] = []

    def step(self, batch: Batch) -> None:
        x, y = (batch["x"] - 0.5) / 0.5, batch["y"]
        self.net.train()
        self.server.train()
        psi = dict(self.net.named_parameters())
        unused = {n: leaf.clone() for n, leaf in self.net.named_buffers()}
        z = s = functional_call(self.net, {**psi, **unused}, (x,))
        for number, layer in enumerate(self.layers):
            s = layer(s).relu() if number < 3 else layer(s)
        personal = (sum(one**2 for one in s.flatten()) + 1e-12) ** 0.5
        slopes = torch.autograd.grad(personal, list(psi.values()), create_graph=True)
        decay = self.method.inner_weight_decay
        adapted = {n: w - self.inner * (g + decay * w) for (n, w), g in zip(psi.items(), slopes, strict=True)}
        after = functional_call(self.net, adapted, (x,))  # refreshes the module's own statistics
        with torch.no_grad():
            clean = {n: leaf.clone() for n, leaf in self.server.named_buffers()}
            teacher = functional_call(self.server, clean, (x,)).softmax(1)
        apart = F.kl_div(z.log_softmax(1), teacher, reduction="batchmean")
        value = F.cross_entropy(after, y) + self.method.mu * apart
        for optimiser in self.optimisers:
            optimiser.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.method.clip)
        torch.nn.utils.clip_grad_norm_(self.layers.parameters(), self.method.clip)
        for optimiser in self.optimisers:
            optimiser.step()
        self.losses.append(value.item())

    @property
    def model(self) -> Tensors:
        loss = {f"{SLOT}.{n}": leaf for n, leaf in self.layers.state_dict().items()}
        return {**self.net.state_dict(), **loss}


@pytest.mark.parametrize("mu", [0.0, 0.5])
@pytest.mark.parametrize("kind", ARCHS)
def test_two_rounds_are_the_slow_reference(kind: str, mu: float) -> None:
    """Clients of several sizes, a falling rate, weight decay, and a clip that bites each of the two gradients."""
    arch, module = ARCHS[kind]
    train = replace(TRAIN, local_epochs=2, lr_decay=0.8, weight_decay=0.01, clip=1e-3)  # [train] clip is not used
    watched, steps = watching(FedTTA)
    options = {**LOUD, "mu": mu, "clip": 0.3, "inner_weight_decay": 0.02}
    fed, _ = federation(watched, SEEN, train, arch, **options)
    method, state = fed.setup.method, fed.start()
    for number in range(2):
        before = state.server["model"]
        steps.clear()
        state, report = fed.step(state)
        sizes, losses, models = [5, 9, 12], [], []
        for size in sizes:
            slow = Slow(module, before, method, 0.8**number)  # type: ignore[arg-type]
            for own, batch, _ in steps:
                if int(own["now"]["samples"]) == size:
                    slow.step(batch)
            models.append(slow.model)
            losses.append(sum(slow.losses) / len(slow.losses))
        for name, leaf in state.server["model"].items():
            if leaf.is_floating_point():
                mean = sum((k * m[name] for k, m in zip(sizes, models, strict=True)), torch.tensor(0.0)) / 26
                assert torch.allclose(leaf, mean, rtol=0, atol=1e-11), name
        expected = sum(k * one for k, one in zip(sizes, losses, strict=True)) / 26
        assert report.loss == pytest.approx(expected, abs=1e-11)
    start = fed.start().server["model"]
    assert far(pick(state.server["model"], NAMES), pick(start, NAMES)) > 1e-2


def test_both_gradients_are_clipped_each_for_itself() -> None:
    """Steps no longer than the rate times the limit, and shorter limits for one do not shorten the other's step."""
    watched, steps = watching(FedTTA)
    for clip, ignored in ((1e-3, None), (1e-3, 1e-9)):
        steps.clear()
        train = replace(TRAIN, clip=ignored, local_steps=1)
        fed, _ = federation(watched, make_task((8,)), train, PLAIN, **LOUD, clip=clip)
        start = fed.start().server["model"]
        after = run(fed, 1)[0].server["model"]
        moved = {name: after[name] - leaf for name, leaf in start.items()}
        for names, rate in ((PLAIN.parameters, TRAIN.lr), (NAMES, LOUD["loss_lr"])):
            length = sum(float(moved[name].square().sum()) for name in names) ** 0.5
            assert length == pytest.approx(rate * clip, rel=1e-2)


# ---- the meta-gradient --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mu", [0.0, 0.5])
@pytest.mark.parametrize("kind", ARCHS)
def test_the_meta_gradient_is_that_of_finite_differences(kind: str, mu: float) -> None:
    """In random directions: of all of psi, all of phi, and of each tensor."""
    method = tta(ARCHS[kind][0], mu=mu)
    state, batch, (phase,) = state_of(method), batch_of(), method.phases(Context(0, 1, 1))
    if mu:  # a teacher that is not the student
        state["received"] = drop(state_of(method, seed=1)["model"], NAMES)
    model = state["model"]
    live = pick(model, method.trainable(phase))
    grads, _, _ = gradient(lambda t: method.loss(state, {**model, **t}, batch, phase), live)
    generator = torch.Generator().manual_seed(0)

    def value(moved: Tensors) -> float:
        return float(method.loss(state, {**model, **moved}, batch, phase)[0].detach())

    for names in (method.arch.parameters, NAMES, *[(name,) for name in live]):
        along = {n: torch.randn(live[n].shape, generator=generator, dtype=torch.float64) for n in names}
        eps = 1e-6
        ends = [value({n: live[n] + sign * eps * d for n, d in along.items()}) for sign in (1, -1)]
        slope = float(sum((grads[n] * d).sum() for n, d in along.items()))
        assert (ends[0] - ends[1]) / (2 * eps) == pytest.approx(slope, rel=1e-5, abs=1e-8), names
    assert max(float(grads[name].abs().max()) for name in NAMES) > 1e-3


def test_it_is_taken_through_the_step() -> None:
    """Not the first-order gradient, which the adapted weights alone would give."""
    method = tta()
    state, batch = state_of(method), batch_of()
    model, live = state["model"], pick(state["model"], PLAIN.parameters)
    whole, _, _ = gradient(lambda t: method.loss(state, {**model, **t}, batch, Phase()), live)
    inner = {n: torch.zeros_like(leaf) for n, leaf in live.items()}
    norm = gradient(lambda t: (_personal(method, {**model, **t}, batch), None), live)[0]
    adapted = {n: leaf - method.inner_lr * (norm[n] + 1e-4 * leaf) for n, leaf in live.items()}
    first, _, _ = gradient(
        lambda t: (F.cross_entropy(PLAIN({**model, **t}, batch["x"]).logits, batch["y"]), None), adapted
    )
    assert far(whole, first) > 1e-3
    assert far(first, inner) > 1e-3


def _personal(method: FedTTA, model: Tensors, batch: Mapping[str, Tensor]) -> Tensor:
    s: Tensor = method.arch(model, batch["x"]).logits
    for layer in range(4):
        s = F.linear(s, model[f"{SLOT}.{layer}.weight"], model[f"{SLOT}.{layer}.bias"])
        s = s.relu() if layer < 3 else s
    return s.norm()


@pytest.mark.parametrize("bias", [0.0, 1.0])
@pytest.mark.parametrize("kind", ARCHS)
def test_a_loss_that_says_the_same_to_everything_leaves_the_model_alone(kind: str, bias: float) -> None:
    arch = ARCHS[kind][0]
    method = tta(arch, inner_weight_decay=0.0)
    state, batch = state_of(method), batch_of()
    model = {**silent(state["model"]), NAMES[-1]: torch.full((1,), bias, dtype=torch.float64)}
    (phase,) = method.phases(Context(0, 1, 1))
    live = pick(model, method.trainable(phase))
    grads, value, _ = gradient(lambda t: method.loss(state, {**model, **t}, batch, phase), live)
    assert float(value) == float(F.cross_entropy(arch(model, batch["x"], batch_stats=True).logits, batch["y"]))
    assert all(leaf.isfinite().all() for leaf in grads.values())
    plain, _, _ = gradient(
        lambda t: (F.cross_entropy(arch({**model, **t}, batch["x"], batch_stats=True).logits, batch["y"]), None),
        pick(live, arch.parameters),
    )
    assert far(pick(grads, arch.parameters), plain) < 1e-13


# ---- limits -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ARCHS)
def test_without_an_inner_step_it_is_fedavg(kind: str) -> None:
    arch = ARCHS[kind][0]
    for train in (TRAIN, replace(TRAIN, momentum=0.9, weight_decay=0.01, lr_decay=0.9, clip=0.5)):
        fed, _ = federation("fedtta", SIZED, train, arch, inner_lr=0.0, loss_lr=0.3, clip=train.clip or 1e9)
        state = run(fed)[0]
        expected = ran("fedavg", SIZED, train, arch).server["model"]
        assert far(drop(state.server["model"], NAMES), expected) < 1e-15
        start, after = (pick(s.server["model"], NAMES) for s in (fed.start(), state))
        if not train.weight_decay:  # no gradient: only decay moves it
            assert far(after, start) < 1e-15
        else:
            assert all(after[n].abs().sum() < leaf.abs().sum() for n, leaf in start.items())


def test_without_its_term_prox_is_fedtta() -> None:
    train = replace(TRAIN, local_epochs=3)
    base = ran("fedtta", SIZED, train, PLAIN, **LOUD).server["model"]
    assert far(ran("fedtta", SIZED, train, PLAIN, **LOUD, mu=1e-30).server["model"], base) < 1e-14
    assert far(ran("fedtta", SIZED, train, PLAIN, **LOUD, mu=5.0).server["model"], base) > 1e-4


@pytest.mark.parametrize("kind", ARCHS)
def test_the_first_local_step_of_prox_is_fedttas(kind: str) -> None:
    ends: dict[int, list[Tensors]] = {}
    for steps in (1, 2):
        train = replace(TRAIN, local_steps=steps)
        feds = [federation("fedtta", SEEN, train, ARCHS[kind][0], **LOUD, mu=mu)[0] for mu in (0.0, 5.0)]
        ends[steps] = [run(fed, 1)[0].server["model"] for fed in feds]
    assert far(*ends[1]) < 1e-14
    assert far(*ends[2]) > 1e-5


def test_the_teacher_is_what_was_received_all_round_long() -> None:
    watched, steps = watching(FedTTA)
    fed, watch = federation(watched, SEEN, TRAIN, PLAIN, **LOUD, mu=0.5)
    run(fed)
    received = {int(s["now"]["round"]): s["received"] for s, _, _ in steps}
    assert len(received) == 3
    for state, _, _ in steps:
        assert equal(state["received"], received[int(state["now"]["round"])])
    for number, model in received.items():
        assert equal(model, drop(watch.downs[number]["a"]["model"], NAMES))
    assert far(received[0], received[2]) > 1e-3


def test_a_strong_term_holds_predictions_at_the_teachers() -> None:
    gaps = []
    batch = batch_of()["x"]
    for mu in (0.0, 1.0, 10.0):
        fed, watch = federation("fedtta", SEEN, replace(TRAIN, local_epochs=10), PLAIN, inner_lr=0.1, mu=mu)
        run(fed, 1)
        down, up = watch.downs[0]["c"]["model"], watch.replies[0]["c"].up["model"]
        p, q = (PLAIN(model, batch).logits.softmax(1) for model in (down, up))
        gaps.append(float((p - q).abs().max()))
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 0.5 * gaps[0]


def test_only_the_loss_has_momentum_and_it_is_fresh_in_every_round() -> None:
    watched, steps = watching(FedTTA)
    run(federation(watched, make_task((8,)), replace(TRAIN, batch_size=2), PLAIN, **LOUD)[0])
    assert len(steps) == 12
    for number, (state, _, _) in enumerate(steps):
        assert set(state["optim"]) == {f"velocity/{name}" for name in NAMES}
        assert any(leaf.any() for leaf in state["optim"].values()) == (number % 4 > 0)


# ---- what travels, and what is deployed ---------------------------------------------------------------------------------
def test_model_and_loss_travel_and_nothing_else() -> None:
    fed, watch = federation("fedtta", SEEN, TRAIN, PLAIN, mu=0.1)
    state, reports = run(fed)
    assert sum(leaf.numel() for leaf in pick(state.server["model"], NAMES).values()) == LOSS_SIZE
    count = sum(leaf.numel() for leaf in fed.initial["plain"].values()) + LOSS_SIZE
    for report in reports:
        assert report.bytes_down == report.bytes_up == 3 * 8 * count
    assert all(set(down) == {"model"} for downs in watch.downs for down in downs.values())
    assert not state.locals


def test_model_and_loss_are_deployed_apart_with_the_rate_of_the_round_that_trained_them() -> None:
    fed, _ = federation("fedtta", SIZED, replace(TRAIN, lr_decay=0.5), AWKWARD, inner_lr=0.4)
    for rounds, rate in (
        (0, 0.4),
        (1, 0.4),
        (2, 0.2),
        (3, 0.1),
    ):  # one round was of the first rate, the third of a quarter
        state = run(fed, rounds)[0]
        for tree in (*fed.deploy(state).trained().values(), *fed.unseen(fed.deploy(state)).values()):
            assert set(tree) == {"model", SLOT}
            assert set(tree["model"]) == {*AWKWARD.parameters, *AWKWARD.buffers}
            assert tuple(tree[SLOT]) == (*NAMES, RATE)
            assert float(tree[SLOT][RATE]) == pytest.approx(rate)
            assert equal({**tree["model"], **pick(tree[SLOT], NAMES)}, state.server["model"])
    assert set(fed.unseen(fed.deploy(state))) == {"new0", "new1"}
    after = fed.after_local(state)
    assert {float(tree[SLOT][RATE]) for tree in after.values()} == {0.4}


def test_unseen_clients_never_influence_training() -> None:
    unseen = torch.cat([client.test for client in SIZED.unseen])
    images, labels = SIZED.images.clone(), SIZED.labels.clone()
    images[unseen], labels[unseen] = 0, 1
    others: list[Task] = [replace(SIZED, images=images, labels=labels), SEEN]
    base = ran("fedtta", SIZED, TRAIN, PLAIN, **LOUD)
    for task in others:
        assert equal_trees(ran("fedtta", task, TRAIN, PLAIN, **LOUD).server, base.server)


@pytest.mark.parametrize("mu", [0.0, 0.5])
@pytest.mark.parametrize("kind", ARCHS)
def test_clients_at_once_are_clients_one_by_one(kind: str, mu: float) -> None:
    method = tta(ARCHS[kind][0], replace(TRAIN, local_epochs=2, weight_decay=0.01), mu=mu, clip=0.3)
    setup = Setup(MethodSpec(name="fedtta"), {"net": method}, method.train)
    ends = []
    for engine in (Sequential(DOUBLE), Vmapped(DOUBLE)):
        fed = Session(setup, SEEN, engine, DOUBLE, seed=1, rounds=2)
        state = fed.start()
        for _ in range(2):
            state, _ = fed.step(state)
        ends.append(state.server["model"])
    assert far(*ends) < 1e-12


def test_a_step_asks_the_device_nothing() -> None:
    """What a captured graph could not do: read a value, look for entries, bring a tensor from the host."""
    seen: set[str] = set()

    class Listening(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.add(func._schema.name)
            return func(*args, **(kwargs or {}))

    method = tta(AWKWARD, mu=0.5)
    (phase,) = method.phases(Context(0, 1, 1))
    start = state_of(method)
    now = {**start["now"], "lr": torch.tensor(0.1, dtype=torch.float64)}
    state = stack([start_phase(method, start, phase, now)] * 2)
    batch = {name: torch.stack([leaf, leaf.flip(0)]) for name, leaf in batch_of().items()}
    with Listening():
        vmap(lambda state, batch: augment.step(method, state, batch, phase))(state, batch)
    assert {"aten::convolution", "aten::sqrt"} <= seen
    assert not seen & {f"aten::{name}" for name in ("_local_scalar_dense", "item", "nonzero", "lift_fresh", "equal")}


def test_settings_that_cannot_be_meant_are_refused() -> None:
    for options in ({"mu": -1.0}, {"inner_lr": -0.1}, {"inner_weight_decay": -1.0}, {"loss_lr": -1.0}, {"clip": 0.0}):
        sentence = refusal(METHODS, "method", "fedtta", options, arch=PLAIN, train=TRAIN)
        assert sentence.startswith(f"method 'fedtta': {next(iter(options)).replace('_', '-')} must")
    sentence = refusal(METHODS, "method", "fedtta", {"loss_momentum": 1.0}, arch=PLAIN, train=TRAIN)
    assert "momentum must be below 1" in sentence


def test_the_received_copy_is_kept_only_where_it_is_needed() -> None:
    for mu, slots in ((0.0, {"model"}), (0.1, {"model", "received"})):
        method = tta(mu=mu)
        assert set(state_of(method)) - {"now"} == slots
        assert float_bytes({"model": pick(state_of(method)["model"], NAMES)}) == 8 * LOSS_SIZE


# ---- what it is for -----------------------------------------------------------------------------------------------------
@cache
def digits() -> tuple[Session, State]:
    """A small network on written digits, two classes a client; half of the clients come later."""
    pool = sources.load("embedded:digits", size=8).only(("pen",))
    task = build(pool, Pathological(clients=40), Splitting(train=0.85, val=0.15, test=0.0, unseen=0.5), {})
    arch = Arch.of(lambda: MLP(hidden=(64,)).make(task.shape, 10), task.shape, "mlp")
    train = Train(lr=0.1, batch_size=32, local_steps=10, weight_decay=1e-4, weights="uniform")
    method = FedTTA(arch, train, inner_lr=0.1, loss_lr=0.01)
    setup = Setup(MethodSpec(name="fedtta"), {"mlp": method}, train)
    fed = Session(setup, task, Vmapped(Compute()), Compute(), seed=0, rounds=50)
    return fed, run(fed)[0]


def right(trees: dict[str, Tree], part: str, **spec: Any) -> float:
    """The share of right answers over these clients."""
    fed, _ = digits()
    adapter = fed.setup.adapter(AdapterSpec.model_validate(spec), fed.setup.method)
    scores = fed.evaluate({"mlp": adapter}, trees, [part]).values()
    return sum(score.correct for score in scores) / sum(score.samples for score in scores)


@pytest.mark.grid
def test_a_step_without_labels_helps_unseen_clients() -> None:
    fed, state = digits()
    unseen = fed.unseen(fed.deploy(state))
    assert len(unseen) == 20
    before, after = (right(unseen, "test", name=name) for name in ("none", "fedtta"))
    assert after >= before + 0.05
    assert after > 0.6


@pytest.mark.grid
def test_what_was_learnt_is_a_loss_and_not_a_direction() -> None:
    """A step against it is worse than none."""
    fed, state = digits()
    trees = fed.unseen(fed.deploy(state))
    against = {name: {**tree, SLOT: {**tree[SLOT], RATE: -tree[SLOT][RATE]}} for name, tree in trees.items()}
    assert right(against, "test", name="fedtta") < right(trees, "test", name="none")
