"""FedSR and the stochastic encoder under it: against plain torch, in its limits, and what travels."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from fedshift.adapters.deterministic import Deterministic
from fedshift.blocks import gaussians
from fedshift.blocks.stochastic_encoder import SEED, StochasticMethod, stochastic
from fedshift.core import rng
from fedshift.core.arch import Arch
from fedshift.core.context import Phase
from fedshift.core.grad import gradient
from fedshift.core.method import Batch
from fedshift.core.registry import METHODS
from fedshift.core.tree import Tensors, Tree, drop, float_bytes, pick
from fedshift.methods.fedavg import FedAvg
from fedshift.methods.fedsr import DEVIATION, MEAN, NAMES, SCALE, FedSR
from fedshift.runs.session import Session
from fedshift.store.state import State
from tests.conftest import refusal
from tests.methods.federations import (
    AWKWARD,
    CLASSES,
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
    ran,
    run,
    watching,
)

ARCHS: dict[str, tuple[Arch, type[nn.Module]]] = {"awkward": (AWKWARD, Awkward), "plain": (PLAIN, Plain)}
SIZED = make_task((5, 9, 12), unseen=2)
STRONG: dict[str, Any] = {"l2r": 0.3, "cmi": 0.2}  # terms that can be seen


def images(count: int = 6) -> Tensor:
    return rng.uniform(3, torch.arange(count), SHAPE).double()


def double(tensors: Tensors) -> Tensors:
    return {name: leaf.double() if leaf.is_floating_point() else leaf for name, leaf in tensors.items()}


def quiet(arch: Arch, tensors: Tensors) -> Tensors:
    """The same model with a deviation that is exactly zero and has no slope."""
    size = arch.feature_size
    weight, bias = tensors["latent.weight"].clone(), tensors["latent.bias"].clone()
    weight[size:], bias[size:] = 0.0, -2000.0
    return {**tensors, "latent.weight": weight, "latent.bias": bias}


def rounds_from(fed: Session, model: Tensors, rounds: int = 3) -> State:
    """A federation that starts from another model."""
    start = fed.start()
    state = State(0, {**start.server, "model": model}, {})
    for _ in range(rounds):
        state, _ = fed.step(state)
    return state


class Slow(nn.Module):
    """The network written out, with its client's references."""

    def __init__(self, kind: type[nn.Module], size: int) -> None:
        super().__init__()
        self.body = kind()
        self.head = self.body.out
        self.body.out = nn.Identity()
        self.latent = nn.Linear(size, 2 * size)
        self.mean = nn.Parameter(torch.zeros(CLASSES, size))
        self.deviation = nn.Parameter(torch.ones(CLASSES, size))
        self.scale = nn.Parameter(torch.ones(()))
        self.double()

    def loss(self, batch: Batch, l2r: float, cmi: float) -> Tensor:
        """Sample by sample, with torch's own Gaussians."""
        both = self.latent(self.body((batch["x"] - 0.5) / 0.5))
        size = both.shape[1] // 2
        total = torch.zeros((), dtype=torch.float64)
        for row, label, noise in zip(both, batch["y"].tolist(), batch["noise"], strict=True):
            mean, deviation = row[:size], (1 + row[size:].exp()).log()
            z = mean + deviation * noise
            total = total - self.head(z).softmax(0)[label].log()
            total = total + l2r * z.square().sum().sqrt()
            reference = Normal(self.mean[label], (1 + self.deviation[label].exp()).log())
            total = total + cmi * kl_divergence(Normal(self.scale * mean, self.scale * deviation), reference).sum()
        return total / len(both)


# ---- the network --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ARCHS)
def test_the_network_is_the_backbone_with_one_more_layer(name: str) -> None:
    backbone = ARCHS[name][0]
    arch = stochastic(backbone)
    assert arch.encoder == {f"body.{entry}" for entry in backbone.encoder} | {"latent.weight", "latent.bias"}
    assert arch.head == {"head.weight", "head.bias"}
    assert arch.norm == {f"body.{entry}" for entry in backbone.norm}
    assert (arch.feature_size, arch.classes, arch.name) == (backbone.feature_size, backbone.classes, backbone.name)
    assert (arch.has_batch_norm, arch.mean, arch.std) == (backbone.has_batch_norm, backbone.mean, backbone.std)
    own, before = arch.init(5), backbone.init(5)
    assert own["latent.weight"].shape == (2 * arch.feature_size, arch.feature_size)
    for entry, leaf in before.items():  # it starts where the backbone would
        assert torch.equal(own[entry.replace("out.", "head.") if entry in backbone.head else f"body.{entry}"], leaf)


def test_a_network_that_was_handed_over_is_left_alone() -> None:
    module = Awkward()
    before = {name: leaf.clone() for name, leaf in module.state_dict().items()}
    arch = stochastic(Arch.of(module, SHAPE))
    tensors = arch.init(0)
    assert isinstance(module.out, nn.Linear)
    assert equal(dict(module.state_dict()), before)
    assert torch.equal(tensors["head.weight"], before["out.weight"])
    assert torch.equal(tensors["body.bn_not.weight"], before["bn_not.weight"])


def test_a_body_with_inner_activations_keeps_them() -> None:
    class Telling(Plain):
        def forward(self, x: Tensor) -> Any:
            inner = self.hidden(x.flatten(1))
            return self.out(inner.tanh()), {"inner": inner}

    arch = stochastic(Arch.of(Telling, SHAPE))
    output = arch(arch.init(0), images().float())
    assert set(output.aux) == {"inner", "deviation", "body"}
    assert output.aux["inner"].shape == output.aux["deviation"].shape == (6, 5)
    assert torch.equal(
        output.aux["body"], output.aux["inner"].tanh()
    )  # what the head read before there was one more layer


@pytest.mark.parametrize("name", ARCHS)
def test_a_representation_is_mean_and_deviation_times_noise(name: str) -> None:
    backbone = ARCHS[name][0]
    method = StochasticMethod(stochastic(backbone), TRAIN)
    tensors = double(method.arch.init(0))
    noise = rng.normal(1, torch.arange(6), (method.arch.feature_size,)).double()
    batch = {"x": images(), "y": torch.zeros(6, dtype=torch.int64), "noise": noise}
    output = method.outputs(tensors, batch, Phase())
    plain = method.arch(tensors, images(), batch_stats=True)
    both = F.linear(
        backbone.encode(
            {entry[5:]: leaf for entry, leaf in tensors.items() if entry.startswith("body.")}, images(), True
        )[0],
        tensors["latent.weight"],
        tensors["latent.bias"],
    )
    mean, deviation = both[:, : method.arch.feature_size], F.softplus(both[:, method.arch.feature_size :])
    assert torch.allclose(output.features, mean + deviation * noise, rtol=0, atol=1e-12)
    assert torch.allclose(output.aux["mean"], mean, rtol=0, atol=1e-12)
    assert float(output.aux["deviation"].min()) > 0
    assert torch.equal(output.logits, method.arch.classify(tensors, output.features))
    assert torch.equal(plain.logits, method.arch.classify(tensors, output.aux["mean"]))
    assert set(output.buffers) == set(method.arch.buffers)


# ---- against torch ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ARCHS)
def test_two_rounds_are_torchs(name: str) -> None:
    """Networks are averaged in between; every client goes on with the references it had."""
    backbone, kind = ARCHS[name]
    watched, steps = watching(FedSR)
    fed, watch = federation(watched, SIZED, arch=backbone, **STRONG)
    state = fed.start()
    slow = {client.name: Slow(kind, backbone.feature_size) for client in SIZED.clients}
    for number in range(2):
        received = state.server["model"]
        steps.clear()
        state, _ = fed.step(state)
        for client in SIZED.clients:
            module = slow[client.name].train()
            module.load_state_dict({n: leaf.clone() for n, leaf in received.items()}, strict=False)
            optimiser = torch.optim.SGD(module.parameters(), TRAIN.lr)
            for before, batch, phase in steps:
                if int(before["now"]["samples"]) != len(client.train):
                    continue
                module.train(phase.batch_stats)
                optimiser.zero_grad()
                module.loss(batch, **STRONG).backward()
                optimiser.step()
            reply = watch.replies[number][client.name]
            expected = dict(module.state_dict())
            assert far(reply.up["model"], pick(expected, received)) < 1e-10
            own = {MEAN: expected["mean"], DEVIATION: expected["deviation"], SCALE: expected["scale"]}
            assert far(state.locals[client.name]["model"], own) < 1e-10
            assert all(
                float((leaf - start).abs().max()) > 1e-5 for leaf, start in zip(own.values(), (0, 1, 1), strict=True)
            )


# ---- gradient flow ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ARCHS)
def test_where_each_term_has_gradients(name: str) -> None:
    backbone = ARCHS[name][0]
    watched, steps = watching(FedSR)
    run(federation(watched, SIZED, arch=backbone, **STRONG)[0], 1)
    state, batch, phase = steps[-1]
    arch = stochastic(backbone)
    live = set(arch.parameters) | set(NAMES)

    def touched(l2r: float, cmi: float) -> Tensors:
        method = FedSR(arch, TRAIN, l2r=l2r, cmi=cmi)
        rest = drop(state["model"], live)
        return gradient(lambda t: method.loss(state, {**rest, **t}, batch, phase), pick(state["model"], live))[0]

    def where(grads: Tensors) -> set[str]:
        return {entry for entry, grad in grads.items() if float(grad.abs().max()) > 0}

    plain = touched(0, 0)
    encoder = set(arch.parameters) - arch.head
    assert where(plain) == set(arch.parameters)
    short, close = touched(1, 0), touched(0, 1)
    assert where({n: short[n] - plain[n] for n in live}) == encoder
    assert where({n: close[n] - plain[n] for n in live}) == encoder | set(NAMES)


# ---- limits -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ARCHS)
def test_without_weights_and_deviation_the_trajectory_is_fedavgs(name: str) -> None:
    arch = stochastic(ARCHS[name][0])
    train = replace(TRAIN, momentum=0.9, local_epochs=2)
    fed, _ = federation(FedSR, SIZED, train, ARCHS[name][0], l2r=0.0, cmi=0.0)
    plain, _ = federation(FedAvg, SIZED, train, arch)
    start = quiet(arch, fed.start().server["model"])
    ends = [rounds_from(one, start).server["model"] for one in (fed, plain)]
    assert far(*ends) < 1e-12
    assert far(ends[0], start) > 0.01
    for client in fed.deploy(State(3, {"model": ends[0]})).trained().values():  # and so are its predictions
        logits = fed.setup.method.predict(client, images()).logits
        assert torch.allclose(logits, arch(ends[1], images()).logits.log_softmax(1), rtol=0, atol=1e-10)


def test_without_weights_it_is_fedavg_with_a_stochastic_encoder() -> None:
    state = ran("fedsr", SIZED, l2r=0.0, cmi=0.0)
    assert equal(state.server["model"], ran(StochasticMethod, SIZED).server["model"])
    for tree in state.locals.values():
        size = stochastic(AWKWARD).feature_size
        untouched = {MEAN: torch.zeros(CLASSES, size), DEVIATION: torch.ones(CLASSES, size), SCALE: torch.ones(())}
        assert equal(tree["model"], double(untouched))
    assert far(state.server["model"], ran("fedsr", SIZED, **STRONG).server["model"]) > 1e-3


def test_the_norm_shortens_and_the_references_come_closer() -> None:
    train = replace(TRAIN, local_epochs=10)

    def measured(**weights: float) -> tuple[float, float]:
        fed, _ = federation("fedsr", make_task((12,)), train, PLAIN, **weights)
        state, _ = run(fed)
        output = fed.setup.method.arch(state.server["model"], make_task((12,)).images.double() / 255)
        own = state.locals["a"]["model"]
        table = {"mean": own[MEAN], "deviation": F.softplus(own[DEVIATION])}
        reference = gaussians.of_classes(table, make_task((12,)).labels)
        scale = own[SCALE]
        apart = gaussians.divergence(scale * output.features, scale * output.aux["deviation"], *reference)
        return float(output.features.norm(dim=1).mean()), float(apart.mean())

    plain, short, close = measured(l2r=0.0, cmi=0.0), measured(l2r=1.0, cmi=0.0), measured(l2r=0.0, cmi=0.5)
    assert short[0] < 0.8 * plain[0]
    assert close[1] < 0.5 * plain[1]


def test_a_negative_scale_is_still_a_gaussian() -> None:
    watched, steps = watching(FedSR)
    run(federation(watched, SIZED, **STRONG)[0], 1)
    state, batch, phase = steps[0]
    method = FedSR(stochastic(AWKWARD), TRAIN, **STRONG)
    mirrored = {**state["model"], SCALE: -state["model"][SCALE], MEAN: -state["model"][MEAN]}
    values = [method.loss(state, tensors, batch, phase)[0] for tensors in (state["model"], mirrored)]
    assert torch.allclose(*values, rtol=0, atol=1e-12)


# ---- what travels and what is served --------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ARCHS)
def test_only_the_network_travels(name: str) -> None:
    arch = stochastic(ARCHS[name][0])
    fed, watch = federation("fedsr", SIZED, arch=ARCHS[name][0])
    state, reports = run(fed)
    entries = {*arch.parameters, *arch.buffers}
    floats = sum(leaf.numel() for leaf in state.server["model"].values() if leaf.is_floating_point())
    for downs, replies in zip(watch.downs, watch.replies, strict=True):
        for client in "abc":
            for message in (downs[client], replies[client].up):
                assert set(message) == {"model"}
                assert set(message["model"]) == entries
                assert float_bytes(message) == 8 * floats
            assert set(replies[client].local["model"]) == set(NAMES)
    assert [report.bytes_up for report in reports] == [report.bytes_down for report in reports] == [3 * 8 * floats] * 3


def test_everybody_serves_with_the_global_model() -> None:
    fed, _ = federation("fedsr", SIZED)
    state, _ = run(fed)
    served = {**fed.deploy(state).trained(), **fed.unseen(fed.deploy(state))}
    assert set(served) == {"a", "b", "c", "new0", "new1"}
    for tree in served.values():
        assert set(tree) == {"model"}
        assert equal(tree["model"], state.server["model"])
    assert METHODS["fedsr"].make.personal is False


def test_an_absent_client_keeps_its_references() -> None:
    fed, watch = federation("fedsr", make_task((4,) * 4), participation=0.5, rounds=6, **STRONG)
    state = fed.start()
    stayed = 0
    for _ in range(6):
        before = state
        state, _ = fed.step(state)
        for name in set(before.locals) - set(watch.downs[-1]):
            assert equal_trees(state.locals[name], before.locals[name])
            stayed += 1
    assert stayed > 3


@pytest.mark.parametrize("samples", [1, 3, 20])
def test_a_deployed_model_averages_the_probabilities_of_samples(samples: int) -> None:
    method = FedSR(stochastic(AWKWARD), TRAIN, samples=samples)
    tensors = double(method.arch.init(0))
    x = images()
    found = method.predict({"model": tensors}, x)
    output = method.arch(tensors, x)
    mean = torch.zeros(len(x), CLASSES, dtype=torch.float64)
    for number in range(samples):
        noise = rng.normal(SEED, torch.tensor([number]), (method.arch.feature_size,)).double()
        for row in range(len(x)):
            z = output.features[row] + output.aux["deviation"][row] * noise[0]
            mean[row] += (tensors["head.weight"] @ z + tensors["head.bias"]).softmax(0) / samples
    assert torch.allclose(found.logits, mean.log(), rtol=0, atol=1e-12)
    assert torch.allclose(found.logits.exp().sum(1), torch.ones(6, dtype=torch.float64))
    assert torch.equal(found.features, output.features)  # adapters see the mean


def test_no_samples_predict_with_the_mean() -> None:
    method = FedSR(stochastic(AWKWARD), TRAIN, samples=0)
    tensors = double(method.arch.init(0))
    for batch_stats in (False, True):
        found, plain = (
            one({"model": tensors}, images(), batch_stats) for one in (method.predict, FedAvg(method.arch).predict)
        )
        assert torch.equal(found.logits, plain.logits)
        assert equal(found.buffers, plain.buffers)


def test_the_deterministic_adapter_predicts_with_the_mean_too() -> None:
    drawing, plain = (FedSR(stochastic(AWKWARD), TRAIN, samples=samples) for samples in (20, 0))
    state = {"model": double(drawing.arch.init(0))}
    found, after = Deterministic(arch=drawing.arch, predict_with=drawing.predict).predict(state, images(), {})
    assert after is state
    assert torch.equal(found.logits, plain.predict(state, images()).logits)
    assert not torch.allclose(found.logits.softmax(1), drawing.predict(state, images()).logits.softmax(1))


def test_many_samples_come_close_to_the_expectation() -> None:
    arch = stochastic(PLAIN)
    tensors = double(arch.init(1))
    few, many, exact = (
        FedSR(arch, TRAIN, samples=s).predict({"model": tensors}, images()).logits.exp() for s in (5, 2000, 200_000)
    )
    assert float((many - exact).abs().max()) < 0.01
    assert float((many - exact).abs().max()) < float((few - exact).abs().max())


def test_an_answer_depends_on_the_image_alone() -> None:
    method = FedSR(stochastic(AWKWARD), TRAIN)
    model = {"model": double(method.arch.init(0))}
    x = images(7)
    together = method.predict(model, x).logits
    alone = torch.cat([method.predict(model, one).logits for one in x.split(1)])
    shuffled = method.predict(model, x.flip(0)).logits.flip(0)
    assert torch.allclose(together, alone, rtol=0, atol=1e-13)
    assert torch.allclose(together, shuffled, rtol=0, atol=1e-13)


def test_training_noise_is_new_in_every_step_round_and_client() -> None:
    watched, steps = watching(FedSR)
    run(federation(watched, SIZED, replace(TRAIN, local_epochs=2))[0], 2)
    first = [tuple(batch["noise"][0].tolist()) for _, batch, _ in steps]
    assert len(set(first)) == len(steps) == 24
    pooled = torch.cat([batch["noise"].flatten() for _, batch, _ in steps])
    assert abs(float(pooled.mean())) < 5 / math.sqrt(len(pooled))
    assert float(pooled.std()) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"l2r": -1.0}, "method 'fedsr': l2r must not be negative, not -1.0"),
        ({"cmi": float("nan")}, "method 'fedsr': cmi must not be negative, not nan"),
        ({"samples": -1}, "method 'fedsr': samples must not be negative, not -1"),
    ],
)
def test_settings_that_cannot_be_meant(options: dict[str, Any], expected: str) -> None:
    assert refusal(METHODS, "method", "fedsr", options, arch=PLAIN, train=TRAIN) == expected


def test_the_papers_defaults() -> None:
    method = FedSR(stochastic(PLAIN))
    assert (method.l2r, method.cmi, method.samples) == (0.01, 5e-4, 20)


# ---- Gaussians ------------------------------------------------------------------------------------------------------------
def gaussian(seed: int) -> tuple[Tensor, Tensor]:
    draws = rng.normal(seed, torch.arange(8), (2, 5)).double()
    return draws[:, 0], draws[:, 1].exp()


def test_the_divergence_is_torchs_and_never_negative() -> None:
    for seed in range(20):
        one, other = gaussian(seed), gaussian(seed + 100)
        found = gaussians.divergence(*one, *other)
        assert torch.allclose(found, kl_divergence(Normal(*one), Normal(*other)).sum(-1), rtol=1e-12)
        assert float(found.min()) > 0
        assert torch.allclose(gaussians.divergence(*one, *one), torch.zeros(8, dtype=torch.float64), atol=1e-14)


def test_the_most_likely_gaussian_is_mean_and_biased_deviation() -> None:
    samples = rng.normal(1, torch.arange(3), (50, 4)).double() * 3 + 1
    found = gaussians.fitted(samples, 1e-3)
    for group in range(3):
        for size in range(4):
            values = samples[group, :, size].tolist()
            mean = sum(values) / 50
            variance = sum((value - mean) ** 2 for value in values) / 50
            assert float(found["mean"][group, size]) == pytest.approx(mean, rel=1e-12)
            assert float(found["deviation"][group, size]) ** 2 == pytest.approx(variance, rel=1e-12)
    best = Normal(found["mean"][:, None], found["deviation"][:, None]).log_prob(samples).sum()
    for factor in (0.9, 1.1):
        assert (
            float(Normal(found["mean"][:, None], factor * found["deviation"][:, None]).log_prob(samples).sum()) < best
        )
        shifted = found["mean"] + (factor - 1)
        assert float(Normal(shifted[:, None], found["deviation"][:, None]).log_prob(samples).sum()) < best


def test_a_class_without_spread_has_the_least_deviation() -> None:
    found = gaussians.fitted(torch.ones(2, 10, 3), floor=0.25)
    assert equal(found, {"mean": torch.ones(2, 3), "deviation": torch.full((2, 3), 0.25)})


def test_every_label_gets_its_class() -> None:
    table: Tree = {"g": {"mean": torch.arange(6.0).reshape(3, 2), "deviation": torch.ones(3, 2)}}
    mean, deviation = gaussians.of_classes(table["g"], torch.tensor([2, 0, 2]))
    assert mean.tolist() == [[4, 5], [0, 1], [4, 5]]
    assert deviation.shape == (3, 2)
