"""FedCiR with its limits FedReg and FedAlign, and FedGen: against plain torch, round by round, and their invariants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from fedshift import Experiment
from fedshift import run as run_experiment
from fedshift.blocks import gaussians
from fedshift.blocks.generator import STATISTICS, GeneratorMethod, ensemble_loss, generated, server_seed, stacked_heads
from fedshift.blocks.stochastic_encoder import StochasticMethod, stochastic
from fedshift.core import rng
from fedshift.core.arch import Arch
from fedshift.core.context import Phase, ServerContext
from fedshift.core.grad import gradient
from fedshift.core.method import Batch, Method
from fedshift.core.registry import METHODS
from fedshift.core.tree import Tensors, Tree, drop, float_bytes, pick
from fedshift.methods.fedavg import FedAvg
from fedshift.methods.fedgen import FedGen, alikeness
from fedshift.runs.session import Session
from fedshift.store.state import State
from fedshift.store.trees import load, save
from fedshift.systems.fedcir.method import FedCiR
from tests.blocks.test_generator import Slow as SlowGenerator
from tests.blocks.test_generator import slow_ensemble_loss
from tests.conftest import refusal
from tests.methods.federations import (
    AWKWARD,
    CLASSES,
    DOUBLE,
    PLAIN,
    SEED,
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
from tests.methods.test_fedsr import double, images, quiet, rounds_from
from tests.test_resume import check_identical, contents

ARCHS: dict[str, tuple[Arch, type[nn.Module]]] = {"awkward": (AWKWARD, Awkward), "plain": (PLAIN, Plain)}
SIZED = make_task((5, 9, 12), unseen=2)
ROUNDS = 3
SMALL: dict[str, Any] = {"generator_noise": 4, "generator_hidden": 6, "generator_lr": 0.01, "generator_batch": 8}
STRONG: dict[str, Any] = {**SMALL, "reg": 0.7, "align": 0.05, "class_samples": 20}  # terms that can be seen
TAUGHT: dict[str, Any] = {**SMALL, "kd": 0.9, "reg": 0.7, "decay": 0.8}
NOTHING = torch.zeros(0, dtype=torch.int64)
Steps = list[tuple[Tree, Batch, Phase]]


def of_client(steps: Steps, size: int) -> Steps:
    return [step for step in steps if int(step[0]["now"]["samples"]) == size]


def server_context(rounds: int, number: int, samples: Tensor) -> ServerContext:
    """What the server knows in round ``number``, with messages of clients of these sizes."""
    seed = rng.seed_of(SEED, number, "server")
    return ServerContext(number, rounds, len(SIZED.clients), samples=samples, seed=seed)


def server_draws(number: int, purpose: str = "") -> int:
    """The seed of a purpose of the server in this round."""
    return server_seed(server_context(ROUNDS, number, torch.zeros(0)), purpose)


def floats(tensors: Mapping[str, Tensor]) -> int:
    return sum(leaf.numel() for leaf in tensors.values() if leaf.is_floating_point())


@dataclass
class SlowServer:
    """The server's generator as a torch module with torch's Adam; both live through all rounds."""

    start: Tensors
    decay: float = 0.0
    falls: float = 1.0  # the rate, in every round
    module: SlowGenerator = field(init=False)
    optimiser: torch.optim.Adam = field(init=False)

    def __post_init__(self) -> None:
        self.module = SlowGenerator(self.start)
        self.optimiser = torch.optim.Adam(self.module.parameters(), SMALL["generator_lr"], weight_decay=self.decay)

    def step(self, number: int, loss: Any) -> None:
        """The five steps of a round."""
        self.module.train()
        for group in self.optimiser.param_groups:
            group["lr"] = SMALL["generator_lr"] * self.falls**number
        ids = torch.arange(5)
        labels = rng.integers(server_draws(number, "labels"), ids, CLASSES, (SMALL["generator_batch"],))
        shape = (SMALL["generator_batch"], SMALL["generator_noise"])
        noise = rng.normal(server_draws(number, "noise"), ids, shape).double()
        for own, numbers in zip(labels, noise, strict=True):
            self.optimiser.zero_grad()
            loss(self.module(own, numbers), own, numbers).backward()
            self.optimiser.step()

    @torch.no_grad()
    def __call__(self, labels: Tensor, noise: Tensor) -> Tensor:
        found: Tensor = self.module.eval()(labels, noise)
        return found


class SlowNetwork(nn.Module):
    """A body, perhaps a layer of means and deviations, and a head."""

    def __init__(self, kind: type[nn.Module], size: int, latent: bool) -> None:
        super().__init__()
        self.body = kind()
        self.head = self.body.out
        self.body.out = nn.Identity()
        if latent:
            self.latent = nn.Linear(size, 2 * size)
        self.double()

    def load(self, tensors: Tensors) -> None:
        """Names of the stochastic network, or of the backbone."""
        if not any(name.startswith("body.") for name in tensors):
            tensors = {
                n.replace("out.", "head.") if n.startswith("out.") else f"body.{n}": t for n, t in tensors.items()
            }
        self.load_state_dict({name: leaf.clone() for name, leaf in tensors.items()})

    def tensors(self, like: Tensors) -> Tensors:
        own = dict(self.state_dict())
        if not any(name.startswith("body.") for name in like):
            own = {
                n.removeprefix("body.") if n.startswith("body.") else n.replace("head.", "out."): t
                for n, t in own.items()
            }
        return {name: own[name] for name in like}


# ---- FedCiR against torch -----------------------------------------------------------------------------------------------
def slow_cir_loss(
    network: SlowNetwork, batch: Batch, server: SlowServer, table: Tensors, reg: float, align: float
) -> Tensor:
    """Sample by sample."""
    both = network.latent(network.body((batch["x"] - 0.5) / 0.5))
    size = both.shape[1] // 2
    total = torch.zeros((), dtype=torch.float64)
    for row, label, noise in zip(both, batch["y"].tolist(), batch["noise"], strict=True):
        mean, deviation = row[:size], (1 + row[size:].exp()).log()
        total = total - network.head(mean + deviation * noise).softmax(0)[label].log()
        reference = Normal(table["mean"][label], table["deviation"][label])
        total = total + align * kl_divergence(Normal(mean, deviation), reference).sum()
    made = server(batch["imagined"], batch["imagined noise"])
    for feature, label in zip(made, batch["imagined"].tolist(), strict=True):
        total = total - reg * network.head(feature).softmax(0)[label].log()
    return total / len(both)


@pytest.mark.parametrize("weights", [(0.7, 0.05), (0.7, 0.0), (0.0, 0.05)], ids=["fedcir", "fedreg", "fedalign"])
@pytest.mark.parametrize("name", ARCHS)
def test_fedcirs_rounds_are_torchs(name: str, weights: tuple[float, float]) -> None:
    backbone, kind = ARCHS[name]
    reg, align = weights
    watched, steps = watching(FedCiR)
    fed, watch = federation(watched, SIZED, arch=backbone, **{**STRONG, "reg": reg, "align": align})
    state = fed.start()
    server = SlowServer(state.server["generator"])
    table: Tensors = {"mean": torch.zeros(CLASSES, 1), "deviation": torch.ones(CLASSES, 1)}
    for number in range(ROUNDS):
        received = state.server["model"]
        steps.clear()
        state, _ = fed.step(state)
        ups = []
        for client in SIZED.clients:
            network = SlowNetwork(kind, backbone.feature_size, latent=True)
            network.load(received)
            optimiser = torch.optim.SGD(network.parameters(), TRAIN.lr)
            own = of_client(steps, len(client.train))
            assert own
            for _, batch, phase in own:
                network.train(phase.batch_stats)
                optimiser.zero_grad()
                now = (reg, align) if number else (0.0, 0.0)
                slow_cir_loss(network, batch, server, table, *now).backward()
                optimiser.step()
            ups.append(network.tensors(received))
            assert far(watch.replies[number][client.name].up["model"], ups[-1]) < 1e-9
        server.step(number, lambda z, y, _, ups=ups: slow_ensemble_loss(ups, z, y))
        rows = []
        for label in range(CLASSES):
            ids = torch.arange(20) + 20 * label
            noise = rng.normal(server_draws(number, "classes"), ids, (SMALL["generator_noise"],)).double()
            rows.append(server(torch.full((20,), label), noise))
        means = [sum(row.unbind()) / 20 for row in rows]
        spread = [
            (sum(((one - m) ** 2 for one in row.unbind()), 0 * m) / 20).sqrt()
            for row, m in zip(rows, means, strict=True)
        ]
        table = {"mean": torch.stack(means), "deviation": torch.stack(spread).clamp(min=1e-3)}
        assert far(state.server["generator"], server.module.tensors()) < 1e-9
        unused = {"mean": torch.zeros_like(table["mean"]), "deviation": torch.ones_like(table["deviation"])}
        assert far(state.server["gaussians"], table if align else unused) < 1e-9


# ---- FedGen against torch -----------------------------------------------------------------------------------------------
def slow_gen_loss(network: SlowNetwork, batch: Batch, server: SlowServer, kd: float, reg: float) -> Tensor:
    """Sample by sample."""
    features = network.body((batch["x"] - 0.5) / 0.5)
    taught = server(batch["y"], batch["taught noise"])
    made = server(batch["imagined"], batch["imagined noise"])
    total = torch.zeros((), dtype=torch.float64)
    for row, label in enumerate(batch["y"].tolist()):
        said = network.head(features[row]).softmax(0)
        total = total - said[label].log()
        with torch.no_grad():
            target = network.head(taught[row]).softmax(0)
        total = total + kd * sum(target[c] * (target[c].log() - said[c].log()) for c in range(CLASSES))
        total = total - reg * network.head(made[row]).softmax(0)[batch["imagined"][row]].log()
    return total / len(features)


def slow_gen_server_loss(
    heads: list[Tensors], counts: list[Tensor], features: Tensor, labels: Tensor, noise: Tensor
) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for feature, label in zip(features, labels.tolist(), strict=True):
        seen = sum(float(own[label]) for own in counts)
        for head, own in zip(heads, counts, strict=True):
            said = (head["out.weight"] @ feature + head["out.bias"]).softmax(0)[label]
            total = total - (float(own[label]) / seen if seen else 0.0) * said.log()
    products = []
    for i in range(len(features)):
        for j in range(len(features)):
            apart = sum(abs(features[i, d] - features[j, d]) for d in range(features.shape[1])) / features.shape[1]
            products.append(apart * ((noise[i] - noise[j]) ** 2).sum() / noise.shape[1])
    return total / len(features) + (-sum(products) / len(products)).exp()


@pytest.mark.parametrize("name", ARCHS)
def test_fedgens_rounds_are_torchs(name: str) -> None:
    arch, kind = ARCHS[name]
    watched, steps = watching(FedGen)
    fed, watch = federation(watched, SIZED, arch=arch, **TAUGHT)
    state = fed.start()
    server = SlowServer(state.server["generator"], decay=1e-2, falls=0.8)
    for number in range(ROUNDS):
        received = state.server["model"]
        steps.clear()
        state, _ = fed.step(state)
        ups, counts = [], []
        for client in SIZED.clients:
            network = SlowNetwork(kind, arch.feature_size, latent=False)
            network.load(received)
            optimiser = torch.optim.SGD(network.parameters(), TRAIN.lr)
            own = of_client(steps, len(client.train))
            assert own
            for _, batch, phase in own:
                network.train(phase.batch_stats)
                optimiser.zero_grad()
                factor = 0.8**number if number else 0.0
                slow_gen_loss(network, batch, server, factor * 0.9, factor * 0.7).backward()
                optimiser.step()
            ups.append(network.tensors(received))
            counts.append(SIZED.labels[client.train].bincount(minlength=CLASSES).double())
            assert far(watch.replies[number][client.name].up["model"], ups[-1]) < 1e-9
        server.step(number, lambda z, y, e, u=ups, c=counts: slow_gen_server_loss(u, c, z, y, e))
        assert far(state.server["generator"], server.module.tensors()) < 1e-9


def test_a_class_nobody_has_does_not_count_for_the_generator() -> None:
    method = FedGen(PLAIN, TRAIN, **TAUGHT)
    models = [double(PLAIN.init(seed)) for seed in range(2)]
    counts = [torch.tensor([2.0, 0.0, 0.0]).double(), torch.tensor([1.0, 0.0, 5.0]).double()]
    ups = {c: {"model": models[i], "counts": {"labels": counts[i]}} for i, c in enumerate("ab")}
    features, labels = rng.normal(1, torch.arange(6), (5,)).double(), torch.tensor([0, 1, 2, 1, 0, 2])
    noise = rng.normal(2, torch.arange(6), (4,)).double()
    found = method.generator_loss(ups)(features, labels, noise)
    assert torch.allclose(found, slow_gen_server_loss(models, counts, features, labels, noise), rtol=1e-12)
    nobody = method.generator_loss(ups)(features[:1], torch.tensor([1]), noise[:1])
    assert float(nobody) == 1.0  # nothing but the likeness of one feature to itself


def test_features_that_differ_where_the_noise_does_are_less_alike() -> None:
    noise = rng.normal(1, torch.arange(6), (4,)).double()
    assert float(alikeness(torch.ones(6, 3).double(), noise)) == 1
    assert float(alikeness(noise, noise)) < float(alikeness(0.1 * noise, noise)) < 1
    spread = {"z": 0.01 * rng.normal(2, torch.arange(6), (3,)).double()}
    grads, before, _ = gradient(lambda t: (alikeness(t["z"], noise), None), spread)
    assert float(alikeness(spread["z"] - grads["z"], noise)) < float(before)


# ---- gradient flow ------------------------------------------------------------------------------------------------------
def slopes(method: Method, state: Tree, batch: Batch, phase: Phase) -> Tensors:
    names = set(method.arch.parameters)
    rest = drop(state["model"], names)
    return gradient(lambda t: method.loss(state, {**rest, **t}, batch, phase), pick(state["model"], names))[0]


def touched(more: Tensors, less: Tensors) -> set[str]:
    """Where a term has a gradient: exactly zero elsewhere."""
    return {name for name in more if not torch.equal(more[name], less[name])}


@pytest.mark.parametrize("name", ARCHS)
def test_where_fedcirs_terms_have_gradients(name: str) -> None:
    arch = stochastic(ARCHS[name][0])
    watched, steps = watching(FedCiR)
    run(federation(watched, SIZED, arch=ARCHS[name][0], **STRONG)[0], 2)
    last = steps[-1]
    plain, reg, align = (
        slopes(FedCiR(arch, TRAIN, **{**STRONG, "reg": r, "align": a}), *last) for r, a in ((0, 0), (1, 0), (0, 1))
    )
    nothing = {entry: torch.zeros_like(leaf) for entry, leaf in plain.items()}
    assert touched(plain, nothing) == set(arch.parameters)
    assert touched(reg, plain) == arch.head
    assert touched(align, plain) == set(arch.parameters) - arch.head


@pytest.mark.parametrize("name", ARCHS)
def test_where_fedgens_terms_have_gradients(name: str) -> None:
    arch = ARCHS[name][0]
    watched, steps = watching(FedGen)
    run(federation(watched, SIZED, arch=arch, **TAUGHT)[0], 2)
    last = steps[-1]
    plain, kd, reg = (
        slopes(FedGen(arch, TRAIN, **{**TAUGHT, "kd": k, "reg": r}), *last) for k, r in ((0, 0), (1, 0), (0, 1))
    )
    assert touched(kd, plain) == set(arch.parameters)
    assert touched(reg, plain) == arch.head


@pytest.mark.parametrize("method", ["fedcir", "fedgen"])
def test_the_generator_is_frozen_at_the_client_and_heads_are_at_the_server(method: str) -> None:
    base = METHODS[method].make
    watched, steps = watching(base)
    fed, watch = federation(watched, SIZED, **(STRONG if method == "fedcir" else TAUGHT))
    state = fed.start()
    for number in range(2):
        steps.clear()
        before = state.server
        state, _ = fed.step(state)
        assert all(equal(step[0]["generator"], before["generator"]) for step in steps)
        assert all(not torch.equal(state.server["generator"][n], before["generator"][n]) for n in before["generator"])
        ups = {name: reply.up for name, reply in watch.replies[number].items()}
        ctx = server_context(fed.rounds, number, torch.tensor([5.0, 9.0, 12.0]))
        averaged, _ = FedAvg(fed.setup.method.arch, TRAIN).aggregate(before, ups, ctx)
        assert equal(state.server["model"], averaged["model"])  # the generator's steps move no head


# ---- limits -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ARCHS)
def test_fedcir_without_weights_and_deviation_has_fedavgs_trajectory(name: str) -> None:
    backbone = ARCHS[name][0]
    arch = stochastic(backbone)
    train = replace(TRAIN, momentum=0.9, local_epochs=2)
    fed, _ = federation("fedcir", SIZED, train, backbone, **{**STRONG, "reg": 0.0, "align": 0.0})
    plain, _ = federation(FedAvg, SIZED, train, arch)
    start = quiet(arch, fed.start().server["model"])
    ends = [rounds_from(one, start).server["model"] for one in (fed, plain)]
    assert far(*ends) < 1e-12
    assert far(ends[0], start) > 0.01


def test_fedcir_without_weights_is_fedavg_with_a_stochastic_encoder() -> None:
    none = ran("fedcir", SIZED, **{**STRONG, "reg": 0.0, "align": 0.0}).server["model"]
    assert equal(none, ran(StochasticMethod, SIZED).server["model"])
    assert equal(none, ran("fedsr", SIZED, l2r=0.0, cmi=0.0).server["model"])
    ends = [
        none,
        *(ran("fedcir", SIZED, **{**STRONG, **o}).server["model"] for o in ({}, {"reg": 0.0}, {"align": 0.0})),
    ]
    assert all(far(a, b) > 1e-4 for i, a in enumerate(ends) for b in ends[:i])


@pytest.mark.parametrize("name", ARCHS)
def test_fedgen_without_weights_is_fedavg(name: str) -> None:
    train = replace(TRAIN, momentum=0.9)
    arch = ARCHS[name][0]
    plain = ran("fedavg", SIZED, train, arch).server["model"]
    assert equal(ran("fedgen", SIZED, train, arch, kd=0.0, reg=0.0).server["model"], plain)
    assert far(ran("fedgen", SIZED, train, arch, **TAUGHT).server["model"], plain) > 1e-4


@pytest.mark.parametrize(("method", "strong"), [("fedcir", STRONG), ("fedgen", TAUGHT)])
def test_regularisers_act_from_the_second_round_on(method: str, strong: dict[str, Any]) -> None:
    none = {**strong, **({"reg": 0.0, "align": 0.0} if method == "fedcir" else {"reg": 0.0, "kd": 0.0})}
    ends = []
    for options in (strong, none):
        fed, _ = federation(method, SIZED, **options)
        first, _ = fed.step(fed.start())
        ends.append((first.server["model"], fed.step(first)[0].server["model"]))
    assert far(ends[0][0], ends[1][0]) < 1e-14
    assert far(ends[0][1], ends[1][1]) > 1e-4


def test_alignment_brings_representations_to_their_classes() -> None:
    def apart(align: float) -> float:
        options = {**STRONG, "reg": 0.0, "align": align}
        fed, _ = federation("fedcir", SIZED, replace(TRAIN, local_epochs=5), PLAIN, rounds=5, **options)
        state, _ = run(fed)
        arch = fed.setup.method.arch
        output = arch(state.server["model"], SIZED.images[:26].double() / 255)
        own = gaussians.of_classes(state.server["gaussians"], SIZED.labels[:26])
        return float(gaussians.divergence(output.features, output.aux["deviation"], *own).mean())

    assert apart(0.05) < 0.5 * apart(1e-12)  # with none at all no Gaussians are fitted


# ---- the server ---------------------------------------------------------------------------------------------------------
def test_the_generators_loss_falls_over_the_rounds() -> None:
    """On the last round's heads, labels and noise, as far as each round's generator had come."""
    fed, watch = federation("fedcir", SIZED, TRAIN, PLAIN, rounds=12, **STRONG)
    state = fed.start()
    generators = [state.server["generator"]]
    for _ in range(12):
        state, _ = fed.step(state)
        generators.append(state.server["generator"])
    heads = stacked_heads([reply.up["model"] for reply in watch.replies[-1].values()], fed.setup.method.arch.head)
    labels = torch.arange(CLASSES).repeat(20)
    noise = rng.normal(5, torch.arange(60), (4,)).double()
    losses = [float(ensemble_loss(heads, generated(one, labels, noise)[0], labels)) for one in generators]
    assert losses[12] < losses[8] < losses[4] < losses[0]


def test_the_generator_learns_from_those_who_came_and_were_sound() -> None:
    class Rotten(FedCiR):
        def loss(self, state: Tree, tensors: Tensors, batch: Batch, phase: Phase) -> tuple[Tensor, Tensors]:
            value, buffers = super().loss(state, tensors, batch, phase)
            return value * torch.where(state["now"]["samples"] == 9, torch.nan, 1.0), buffers

    fed, watch = federation(Rotten, SIZED, **STRONG)
    start = fed.start()
    state, report = fed.step(start)
    assert report.diverged == ("b",)
    assert all(bool(leaf.isfinite().all()) for slot in state.server.values() for leaf in slot.values())
    sound = {name: watch.replies[0][name].up for name in "ac"}
    ctx = server_context(fed.rounds, start.round, torch.tensor([5.0, 12.0]))
    assert equal_trees(state.server, fed.setup.method.aggregate(start.server, sound, ctx)[0])


def test_class_gaussians_are_the_most_likely_ones_of_what_is_generated() -> None:
    method = FedCiR(stochastic(PLAIN), TRAIN, **{**STRONG, "class_samples": 4000})
    tensors = method.init_server({"net": double(method.arch.init(0))}, (), NOTHING)["generator"]
    table = method.class_gaussians(tensors, 1)
    for label in range(CLASSES):
        noise = rng.normal(99, torch.arange(20_000), (4,)).double()  # other noise, the same distribution
        made = generated(tensors, torch.full((20_000,), label), noise)[0]
        assert torch.allclose(table["mean"][label], made.mean(0), atol=0.05)
        assert torch.allclose(table["deviation"][label], made.std(0), rtol=0.1)
    assert float((table["mean"][0] - table["mean"][1]).abs().max()) > 0.01
    floor = FedCiR(stochastic(PLAIN), TRAIN, floor=10.0, **STRONG).class_gaussians(tensors, 1)
    assert equal({"d": floor["deviation"]}, {"d": torch.full((CLASSES, 5), 10.0, dtype=torch.float64)})


@pytest.mark.parametrize(("method", "options"), [("fedcir", STRONG), ("fedgen", TAUGHT)])
@pytest.mark.parametrize("name", ARCHS)
def test_generator_and_optimiser_survive_a_checkpoint(
    name: str, method: str, options: dict[str, Any], tmp_path: Path
) -> None:
    fed, _ = federation(method, SIZED, arch=ARCHS[name][0], rounds=5, participation=0.7, **options)
    whole, _ = run(fed)
    half, _ = run(fed, 2)
    memory = half.server["generator memory"]
    assert float(memory["t/inner.weight"]) == 10  # five steps in each of two rounds
    assert all(bool(leaf.any()) for leaf in memory.values())
    assert set(memory) == {f"{kind}/{n}" for kind in "mv" for n in drop(half.server["generator"], STATISTICS)} | {
        "t/inner.weight"
    }
    save(tmp_path / "state", half.trees(), {})
    state = State.of(load(tmp_path / "state")[0], 2, DOUBLE.device)
    assert equal_trees(state.server, half.server)
    for _ in range(3):
        state, _ = fed.step(state)
    assert equal_trees(state.server, whole.server)  # bit for bit
    forgetful = State(2, {**half.server, "generator memory": {n: 0 * leaf for n, leaf in memory.items()}})
    assert far(fed.step(forgetful)[0].server["generator"], fed.step(half)[0].server["generator"]) > 1e-6


@pytest.mark.grid
@pytest.mark.parametrize("method", ["fedcir", "fedgen"])
def test_an_interrupted_run_ends_as_one_that_was_not(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = Experiment.parse(
        {
            "rounds": 4,
            "baselines": False,
            "data": {"size": 8},
            "model": {"name": "mlp", "hidden": [4], "norm": True},
            "checkpoint-every": 1,
            "name": "small",
            "method": [{"name": method, "reg": 0.7}],
        }
    )
    step = Session.step

    def stops(self: Session, state: State) -> Any:
        if state.round == 2:
            raise KeyboardInterrupt
        return step(self, state)

    monkeypatch.setattr(Session, "step", stops)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(experiment, tmp_path, engine="sequential")
    monkeypatch.setattr(Session, "step", step)
    resumed = run_experiment(experiment, tmp_path, engine="sequential", resume=True)
    whole = run_experiment(experiment, tmp_path / "again", engine="sequential")
    check_identical(contents(whole.folders[0]), contents(resumed.folders[0]))
    last = max(whole.folders[0].glob("ckpt-*"))
    assert {"generator", "generator memory"} <= set(load(last)[0]["server"])


# ---- what travels and what is served ------------------------------------------------------------------------------------
@pytest.mark.parametrize("weights", [(0.5, 1e-6), (0.5, 0.0), (0.0, 1e-6), (0.0, 0.0)])
@pytest.mark.parametrize("name", ARCHS)
def test_what_fedcir_sends(name: str, weights: tuple[float, float]) -> None:
    backbone = ARCHS[name][0]
    options = {**STRONG, "reg": weights[0], "align": weights[1]}
    fed, watch = federation("fedcir", SIZED, arch=backbone, **options)
    state, reports = run(fed)
    size = backbone.feature_size
    model = floats(double(stochastic(backbone).init(0)))
    made = 6 * (CLASSES + 4) + 2 * 6 + size * 6 + size + 2 * 6  # with BatchNorm's statistics
    assert floats(state.server["generator"]) == made
    down = model + (made if weights[0] else 0) + (2 * CLASSES * size if weights[1] else 0)
    slots = {"model", *(["generator"] if weights[0] else []), *(["gaussians"] if weights[1] else [])}
    for downs, replies in zip(watch.downs, watch.replies, strict=True):
        for client in "abc":
            assert set(downs[client]) == slots
            assert float_bytes(downs[client]) == 8 * down
            assert set(replies[client].up) == {"model"}
            assert float_bytes(replies[client].up) == 8 * model
            assert replies[client].local == {}
    assert [(report.bytes_down, report.bytes_up) for report in reports] == [(24 * down, 24 * model)] * ROUNDS


@pytest.mark.parametrize("name", ARCHS)
def test_what_fedgen_sends(name: str) -> None:
    arch = ARCHS[name][0]
    fed, watch = federation("fedgen", SIZED, arch=arch, **TAUGHT)
    state, _ = run(fed)
    model, made = floats(state.server["model"]), floats(state.server["generator"])
    for downs, replies in zip(watch.downs, watch.replies, strict=True):
        for client in SIZED.clients:
            down, reply = downs[client.name], replies[client.name]
            assert set(down) == {"model", "generator"}
            assert float_bytes(down) == 8 * (model + made)
            assert set(reply.up) == {"model", "counts"}
            assert float_bytes(reply.up) == 8 * (model + CLASSES)
            counts = SIZED.labels[client.train].bincount(minlength=CLASSES)
            assert reply.up["counts"]["labels"].tolist() == counts.tolist()


@pytest.mark.parametrize(("method", "options"), [("fedcir", STRONG), ("fedgen", TAUGHT)])
def test_everybody_serves_with_the_global_model(method: str, options: dict[str, Any]) -> None:
    fed, _ = federation(method, SIZED, **options)
    state, _ = run(fed)
    served = {**fed.deploy(state).trained(), **fed.unseen(fed.deploy(state))}
    assert set(served) == {"a", "b", "c", "new0", "new1"}
    for tree in served.values():
        assert equal_trees(tree, {"model": state.server["model"]})
    ctx = replace(fed.context(state.round), stage="unseen")
    assert set(fed.setup.method.broadcast(state.server, "new0", ctx)) == {"model"}


def test_fedcir_predicts_with_samples_or_with_the_mean() -> None:
    arch = stochastic(AWKWARD)
    model = {"model": double(arch.init(0))}
    sampled, mean = (FedCiR(arch, TRAIN, samples=samples).predict(model, images()) for samples in (20, 0))
    assert torch.equal(mean.logits, arch(model["model"], images()).logits)
    assert torch.equal(sampled.features, mean.features)
    assert 1e-4 < float((sampled.logits.exp() - mean.logits.softmax(1)).abs().max()) < 0.2


# ---- random numbers -----------------------------------------------------------------------------------------------------
def test_labels_and_noise_are_new_everywhere_and_uniform() -> None:
    watched, steps = watching(FedGen)
    run(federation(watched, SIZED, replace(TRAIN, local_epochs=10), rounds=3)[0])
    size = AWKWARD.feature_size
    assert all(
        batch[n].shape == (len(batch["y"]), size) for _, batch, _ in steps for n in ("taught noise", "imagined noise")
    )
    seen = {tuple(batch[n][0].tolist()) for _, batch, _ in steps for n in ("taught noise", "imagined noise")}
    assert len(seen) == 2 * len(steps)
    shares = torch.cat([batch["imagined"] for _, batch, _ in steps]).bincount(minlength=CLASSES) / (26 * 30)
    assert float((shares - 1 / CLASSES).abs().max()) < 0.06


def test_the_generator_has_as_much_noise_as_features_and_eight_times_as_many_units() -> None:
    method = GeneratorMethod(PLAIN, TRAIN)
    server = method.init_server({"net": PLAIN.init(0)}, (), NOTHING)
    shapes = {n: tuple(leaf.shape) for n, leaf in server["generator"].items()}
    assert shapes["inner.weight"] == (40, CLASSES + 5)
    assert shapes["outer.weight"] == (5, 40)
    assert method.noise_size == 5


# ---- settings -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("fedcir", {"reg": -0.5}, "reg must not be negative, not -0.5"),
        ("fedcir", {"align": float("nan")}, "align must not be negative, not nan"),
        ("fedcir", {"class_samples": 0}, "class-samples must be positive, not 0"),
        ("fedcir", {"floor": 0.0}, "floor must be positive, not 0.0"),
        ("fedcir", {"samples": -2}, "samples must not be negative, not -2"),
        ("fedcir", {"generator_steps": -1}, "generator-steps must not be negative, not -1"),
        ("fedgen", {"kd": -1.0}, "kd must not be negative, not -1.0"),
        ("fedgen", {"reg": -1.0}, "reg must not be negative, not -1.0"),
        ("fedgen", {"decay": 1.5}, "decay must lie in [0, 1], not 1.5"),
        ("fedgen", {"diversity": -1.0}, "diversity must not be negative, not -1.0"),
        ("fedgen", {"generator_lr": -1.0}, "generator-lr must not be negative, not -1.0"),
        ("fedgen", {"generator_decay": -1.0}, "generator-decay must not be negative, not -1.0"),
        ("fedgen", {"generator_noise": 0}, "generator-noise must be positive, not 0"),
        ("fedgen", {"generator_hidden": 0}, "generator-hidden must be positive, not 0"),
        ("fedgen", {"generator_batch": 1}, "generator-batch must be at least 2, because of BatchNorm, not 1"),
    ],
)
def test_settings_that_cannot_be_meant(name: str, options: dict[str, Any], expected: str) -> None:
    assert refusal(METHODS, "method", name, options, arch=PLAIN, train=TRAIN) == f"method {name!r}: {expected}"


def test_the_papers_defaults() -> None:
    method = FedCiR(stochastic(PLAIN))
    assert (method.reg, method.align, method.generator_steps, method.generator_lr) == (0.5, 5e-7, 5, 3e-4)
    assert (method.class_samples, method.floor, method.samples, method.generator_decay) == (1000, 1e-3, 20, 0.0)
    other = FedGen(PLAIN)
    assert (other.kd, other.reg, other.decay, other.generator_decay) == (1.0, 0.5, 0.98, 1e-2)
    assert [m.linear or m.personal for m in (FedCiR, FedGen)] == [False, False]
