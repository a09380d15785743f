"""FedTHE at test time against autograd, sample by sample; what its weight may depend on; all adapters' manners."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedshift.core import rng
from fedshift.core.adapter import Adapter
from fedshift.core.arch import Arch
from fedshift.core.registry import ADAPTERS
from fedshift.core.tree import Tree, to
from fedshift.data.streams import Setting, Stream
from fedshift.data.task import Client, Samples, Task
from fedshift.engines import reference as work
from fedshift.engines.base import Compute, Score
from fedshift.engines.reference import draws_of, predictions
from fedshift.engines.sequential import Sequential
from fedshift.engines.vmapped import Vmapped
from fedshift.methods.fedavg import FedAvg
from fedshift.systems.fdse.surgery import with_erasers
from fedshift.systems.fedthe.adapter import HeadEnsemble
from fedshift.systems.fedthe.adapter_plus import TunedHeadEnsemble
from fedshift.systems.fedtta.learned_loss import RATE, fresh
from tests.conftest import refusal, tiny_arch, tiny_train
from tests.systems.test_fedthe import trained

SHAPE, CLASSES = (2, 2, 3), 5
SIZE = 12  # features
DOUBLE = Compute(dtype=torch.float64)
WEIGHTINGS = ("similarity", "em", "fa", "half")
DTYPES = (torch.float32, torch.float64)


def linear(bias: bool = False) -> Arch:
    """A network that is nothing but its head: an image is its own feature."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(SIZE, CLASSES, bias=bias))
    return Arch.of(lambda: copy.deepcopy(network), SHAPE, "linear", mean=(0.0,), std=(1.0,))


LINEAR = linear()
HEAD = "1.weight"


def on(arch: Arch, name: str = "the", **options: Any) -> Any:
    return ADAPTERS[name].make(arch=arch, predict_with=FedAvg(arch=arch, train=tiny_train()).predict, **options)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def deployment(scale: float = 0.7, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tree:
    """Two random heads, and two descriptors on either side of the features' mean."""
    heads = [scale * normal(CLASSES, SIZE, seed=seed + i, dtype=dtype) for i in (1, 2)]
    common = normal(SIZE, seed=seed + 3, dtype=dtype)
    descriptors = {"global": common, "local": 0.1 * normal(SIZE, seed=seed + 4, dtype=dtype) - common}
    return {"model": {HEAD: heads[0]}, "generic": {HEAD: heads[1]}, "descriptors": descriptors}


def images(features: Tensor) -> Tensor:
    return features.reshape(-1, *SHAPE)


def answers(adapter: Adapter, tree: Tree, features: Tensor, state: Tree | None = None) -> tuple[Tensor, Tensor, Tree]:
    """Logits, weights and the state after a stream that is given at once."""
    output, after = adapter.predict(adapter.init(tree) if state is None else state, images(features), {})
    return output.logits, output.aux["e"], after


# ---- the reference ------------------------------------------------------------------------------------------------------
def cosine(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum() / ((a * a).sum().sqrt() * (b * b).sum().sqrt())


def reference(
    tree: Tree,
    features: Tensor,
    alpha: float = 0.1,
    beta: float = 0.3,
    lr: float = 0.1,
    steps: int = 20,
    weighting: str = "similarity",
    history: bool = True,
    batches: Sequence[int] = (),
    inclusive: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """FedTHE as its paper has it, with autograd, torch's Adam and a loop: logits, weights, and the first gradients."""
    personal, generic = tree["model"][HEAD], tree["generic"][HEAD]
    smoothed, mean = [], features[0]
    for h in features:
        after = alpha * h + (1 - alpha) * mean
        past = after if inclusive else mean
        smoothed.append(beta * h + (1 - beta) * past if history else h)
        mean = after
    logits, weights = [], []
    first = torch.zeros(len(features), dtype=features.dtype)
    groups = torch.arange(len(features)).split(list(batches) or 1)
    for group in groups:
        a = torch.ones(2, dtype=features.dtype, requires_grad=True)
        optimiser = torch.optim.Adam([a], lr=lr, foreach=False)
        for step in range(steps):
            losses = []
            for n in group.tolist():
                e = a.softmax(0)
                y_g, y_l = generic @ features[n], personal @ features[n]
                agreement = {
                    "similarity": cosine(y_g.softmax(0), y_l.softmax(0)), "em": 1.0, "fa": 0.0, "half": 0.5,
                }[weighting]  # fmt: skip
                p = (e[0] * y_g + e[1] * y_l).softmax(0)
                entropy = -(p * p.clamp(min=torch.finfo(p.dtype).tiny).log()).sum()
                near = [(smoothed[n] - tree["descriptors"][name]).square().sum().sqrt() for name in ("global", "local")]
                losses.append(agreement * entropy + (1 - agreement) * (e[0] * near[0] + e[1] * near[1]))
            optimiser.zero_grad()
            torch.stack(losses).mean().backward()
            if step == 0:
                assert a.grad is not None
                first[group] = a.grad[0].abs()
            optimiser.step()
        e = a.detach().softmax(0)
        for n in group.tolist():
            weights.append(e[0])
            logits.append(e[0] * (generic @ features[n]) + e[1] * (personal @ features[n]))
    return torch.stack(logits), torch.stack(weights), first


def agree(found: tuple[Tensor, Tensor, Tree], expected: tuple[Tensor, Tensor, Tensor], tolerance: float) -> None:
    """Predictions everywhere; weights where the first gradient is no rounding error, which Adam would make large."""
    assert torch.equal(found[0].argmax(1), expected[0].argmax(1))
    sound = expected[2] > 1e-5
    assert int(sound.sum()) > 0.8 * len(sound)
    assert float((found[1] - expected[1])[sound].abs().max()) < tolerance
    assert float((found[0] - expected[0])[sound].abs().max()) < 20 * tolerance


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("history", [True, False])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_a_whole_stream_at_once_is_autograd_for_every_sample(weighting: str, history: bool, dtype: torch.dtype) -> None:
    tree, features = deployment(dtype=dtype), normal(16, SIZE, seed=9, dtype=dtype)
    found = answers(on(LINEAR, weighting=weighting, history=history), tree, features)
    expected = reference(tree, features, weighting=weighting, history=history)
    agree(found, expected, 2e-4 if dtype == torch.float32 else 1e-8)
    assert float(found[1].max() - found[1].min()) > 0.5  # there was something to find


@pytest.mark.parametrize(("options"), [
    {"alpha": 0.0}, {"alpha": 1.0}, {"beta": 0.0}, {"beta": 1.0}, {"alpha": 0.5, "beta": 0.1}, {"lr": 0.01},
    {"steps": 0}, {"steps": 5, "lr": 0.3},
])  # fmt: skip
def test_all_settings_against_the_reference(options: dict[str, Any]) -> None:
    tree, features = deployment(seed=20), normal(16, SIZE, seed=10)
    expected = reference(tree, features, **options)
    if options.get("steps") == 0:
        expected = (*expected[:2], torch.ones(16))
    agree(answers(on(LINEAR, **options), tree, features), expected, 1e-8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_one_weight_for_each_batch_minimises_the_mean_loss(weighting: str, dtype: torch.dtype) -> None:
    count, size = 70, 32
    tree, features = deployment(dtype=dtype), normal(count, SIZE, seed=11, dtype=dtype)
    adapter = on(LINEAR, weighting=weighting, batch_size=size)
    assert adapter.batch == size
    state, logits, weights = adapter.init(tree), [], []
    for piece in features.split(size):  # as an engine cuts it; the history goes on across batches
        output, e, state = answers(adapter, tree, piece, state)
        assert len(e.unique()) == 1
        logits.append(output)
        weights.append(e)
    expected = reference(tree, features, weighting=weighting, batches=[32, 32, 6], steps=20)
    agree((torch.cat(logits), torch.cat(weights), state), expected, 2e-4 if dtype == torch.float32 else 1e-8)
    if weighting == "similarity":
        assert len(expected[1].unique()) == 3


@pytest.mark.parametrize(("alpha", "beta"), [(0.1, 0.3), (0.1, 0.1), (0.5, 0.2), (0.9, 0.0)])
def test_a_history_that_includes_the_sample_is_one_that_does_not_with_another_beta(alpha: float, beta: float) -> None:
    """``beta' = beta + alpha (1 - beta)``: 0.3 -> 0.37 and 0.1 -> 0.19."""
    tree, features = deployment(), normal(16, SIZE, seed=12)
    other = beta + alpha * (1 - beta)
    expected = reference(tree, features, alpha, beta, inclusive=True)
    agree(answers(on(LINEAR, alpha=alpha, beta=other), tree, features), expected, 1e-8)
    assert float((answers(on(LINEAR, alpha=alpha, beta=beta), tree, features)[1] - expected[1]).abs().max()) > 1e-4


# ---- what the weight can be ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("lr", "low", "high"), [(0.1, 0.0141, 0.9859), (0.01, 0.395, 0.605)])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_the_weight_stays_within_its_bounds(
    weighting: str, lr: float, low: float, high: float, dtype: torch.dtype
) -> None:
    for scale, reach in itertools.product((1e-3, 1.0, 30.0), (1e-4, 1.0, 1e4)):
        tree = deployment(scale, dtype=dtype)
        for name in ("global", "local"):
            tree["descriptors"][name] = reach * tree["descriptors"][name]
        _, e, _ = answers(on(LINEAR, weighting=weighting, lr=lr), tree, reach * normal(300, SIZE, dtype=dtype))
        assert low <= float(e.min()) <= float(e.max()) <= high


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options", [{}, {"weighting": "em"}, {"weighting": "fa"}, {"batch_size": 8}, {"history": False}]
)
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e4, 1e6])
def test_no_features_and_huge_logits_give_numbers(size: float, options: dict[str, Any], dtype: torch.dtype) -> None:
    tree, features = deployment(dtype=dtype), size * normal(8, SIZE, dtype=dtype)
    logits, e, after = answers(on(LINEAR, **options), tree, features)
    assert bool(logits.isfinite().all())
    assert bool(e.isfinite().all())
    assert 0 < float(e.min()) <= float(e.max()) < 1
    assert bool(after["history"]["mean"].isfinite().all())
    same = {**tree, "generic": tree["model"], "descriptors": {"global": features[0], "local": features[0]}}
    assert bool(answers(on(LINEAR, **options), same, features)[1].isfinite().all())


@pytest.mark.parametrize("weight", [None, 0.0, 0.2, 0.5, 1.0])
def test_identical_heads_predict_what_either_does_whatever_the_weight(weight: float | None) -> None:
    tree, features = deployment(), normal(60, SIZE)
    tree = {**tree, "generic": tree["model"]}
    logits, e, _ = answers(on(LINEAR, e=weight), tree, features)
    assert torch.equal(logits, LINEAR(tree["model"], images(features)).logits)
    assert weight is None or bool((e == weight).all())


def test_a_fixed_weight_of_nought_or_one_is_the_personal_or_the_global_head() -> None:
    tree, features = deployment(), normal(60, SIZE)
    personal = LINEAR(tree["model"], images(features)).logits
    generic = LINEAR(tree["generic"], images(features)).logits
    assert torch.equal(answers(on(LINEAR, e=0.0), tree, features)[0], personal)
    assert torch.equal(answers(on(LINEAR, e=1.0), tree, features)[0].argmax(1), generic.argmax(1))
    assert float((answers(on(LINEAR, e=1.0), tree, features)[0] - generic).abs().max()) < 1e-13
    half = answers(on(LINEAR, e=0.5), tree, features)[0]
    assert float((half - (personal + generic) / 2).abs().max()) < 1e-13


@pytest.mark.parametrize("loud", [1.0, 1e3, 1e6])
def test_a_fixed_weight_of_one_is_exactly_the_global_head_however_loud_the_personal_one_is(loud: float) -> None:
    """``y_l + 1 (y_g - y_l)`` rounds: it loses digits of y_g where y_l is large, and with them predictions."""
    tree, features = deployment(dtype=torch.float32), normal(60, SIZE, dtype=torch.float32)
    tree = {**tree, "model": {HEAD: loud * tree["model"][HEAD]}}
    found, _, _ = answers(on(LINEAR, e=1.0), tree, features)
    generic = LINEAR(tree["generic"], images(features)).logits
    assert torch.equal(found, generic)


def test_fixed_weights_and_entropy_alone_need_no_descriptors() -> None:
    tree, features = deployment(), normal(20, SIZE)
    bare = {slot: leaves for slot, leaves in tree.items() if slot != "descriptors"}
    for options in ({"e": 0.3}, {"weighting": "em"}):
        adapter = on(LINEAR, **options)
        assert adapter.slots() == {"model", "generic"}
        assert torch.equal(answers(adapter, bare, features)[0], answers(adapter, tree, features)[0])
    assert on(LINEAR).slots() == {"model", "generic", "descriptors"}


# ---- what it may depend on ----------------------------------------------------------------------------------------------
def test_alpha_is_irrelevant_if_beta_is_one_or_there_is_no_history() -> None:
    tree, features = deployment(), normal(100, SIZE)
    for fixed in ({"beta": 1.0}, {"history": False}):
        found = [answers(on(LINEAR, alpha=alpha, **fixed), tree, features) for alpha in (0.0, 0.1, 0.7, 1.0)]
        assert all(torch.equal(other[0], found[0][0]) and torch.equal(other[1], found[0][1]) for other in found[1:])
    assert torch.equal(
        answers(on(LINEAR, beta=1.0), tree, features)[1], answers(on(LINEAR, history=False), tree, features)[1]
    )
    moved = [answers(on(LINEAR, alpha=alpha), tree, features)[1] for alpha in (0.1, 0.7)]
    assert float((moved[0] - moved[1]).abs().max()) > 1e-3


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 150])
def test_what_comes_after_a_sample_changes_nothing_for_it(n: int) -> None:
    tree, features = deployment(), normal(200, SIZE)
    other = torch.cat([features[:n], features[n:][torch.randperm(200 - n, generator=torch.Generator().manual_seed(n))]])
    shorter = features[:n]
    adapter = on(LINEAR)
    logits, e, _ = answers(adapter, tree, features)
    for changed in (other, shorter, torch.cat([shorter, 1e3 * features[n:]])):
        new_logits, new_e, _ = answers(adapter, tree, changed)
        assert float((new_e[:n] - e[:n]).abs().max()) < 1e-10
        assert torch.equal(new_logits[:n].argmax(1), logits[:n].argmax(1))
    if n > 1:  # while what came before does
        before = torch.cat([features[:n].flip(0), features[n:]])
        assert float((answers(adapter, tree, before)[1][n:] - e[n:]).abs().max()) > 1e-6


def test_the_first_sample_is_its_own_history() -> None:
    tree, features = deployment(), normal(3, SIZE)
    adapter = on(LINEAR)
    assert torch.equal(
        answers(adapter, tree, features[:1])[1], answers(on(LINEAR, history=False), tree, features[:1])[1]
    )
    _, _, after = answers(adapter, tree, features)
    mean = features[0]
    for h in features:
        mean = 0.1 * h + 0.9 * mean
    assert float((after["history"]["mean"] - mean).abs().max()) < 1e-14


def test_a_stream_of_zeros_is_a_history_too() -> None:
    """Whether there was a sample before is counted, not read off its feature."""
    tree, features = deployment(), normal(2, SIZE)
    stream = torch.cat([torch.zeros(5, SIZE, dtype=torch.float64), features])
    adapter, state, weights = on(LINEAR), None, []
    for h in stream:
        _, e, state = answers(adapter, tree, h[None], state)
        weights.append(e)
    assert float((torch.cat(weights) - answers(adapter, tree, stream)[1])[5:].abs().max()) < 1e-10
    assert float((torch.cat(weights)[5:] - answers(adapter, tree, features)[1]).abs().max()) > 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 32, 1000])
def test_chunks_of_a_long_stream_go_on_where_the_last_one_stopped(size: int, dtype: torch.dtype) -> None:
    tree, features = deployment(dtype=dtype), normal(300, SIZE, dtype=dtype)
    adapter = on(LINEAR)
    whole = answers(adapter, tree, features)
    state, logits, weights = adapter.init(tree), [], []
    for chunk in features.split(size):
        output, e, state = answers(adapter, tree, chunk, state)
        logits.append(output)
        weights.append(e)
    assert torch.equal(torch.cat(logits).argmax(1), whole[0].argmax(1))
    assert float((state["history"]["mean"] - whole[2]["history"]["mean"]).abs().max()) < 1e-6
    if dtype == torch.float64:
        assert float((torch.cat(weights) - whole[1]).abs().max()) < 1e-9
    assert int(state["history"]["seen"]) == 300


# ---- streams and scores -------------------------------------------------------------------------------------------------
def pixel_task(settings: dict[str, Setting], count: int = 40) -> Task:
    """One client and several streams of its own images."""
    numbers = torch.arange(count * len(settings))
    pictures = rng.integers(3, numbers, 256, SHAPE).to(torch.uint8)
    labels = rng.integers(4, numbers, CLASSES)
    nothing = torch.zeros(0, dtype=torch.int64)
    parts = dict(zip(settings, numbers.split(count), strict=True))
    streams = {
        name: Stream(name, "original", setting, None, labels, numbers, {"a": parts[name]})
        for name, setting in settings.items()
    }
    client = Client("a", nothing, nothing, numbers[:0])
    return Task(pictures, labels, numbers, tuple("abcde"), (client,), streams=streams)


def shown(task: Task, part: str) -> Tensor:
    samples = task.samples(task.clients[0], part)
    return (samples.images[samples.index].double() / 255).flatten(1)


def test_the_state_is_new_for_every_stream_and_goes_on_where_it_is_never_reset() -> None:
    stream, never, chunk = Setting("stored"), Setting("stored", "never"), Setting("stored", "chunk", 1, 10)
    task = pixel_task({"first": stream, "second": stream, "on": never, "anew": chunk})
    adapter, tree = on(LINEAR), deployment(3.0)
    scores = Sequential(DOUBLE).evaluate(adapter, {"a": tree}, task, list(task.streams), seed=0)
    x = {name: shown(task, name) for name in task.streams}
    alone = {name: answers(adapter, tree, x[name]) for name in ("first", "second")}
    together = answers(adapter, tree, torch.cat([x["second"], x["on"]]))
    pieces = [answers(adapter, tree, piece) for piece in x["anew"].split(10)]
    expected = {
        "first": (alone["first"][0], alone["first"][1]),
        "second": (alone["second"][0], alone["second"][1]),
        "on": (together[0][40:], together[1][40:]),
        "anew": (torch.cat([piece[0] for piece in pieces]), torch.cat([piece[1] for piece in pieces])),
    }
    for name, (logits, e) in expected.items():
        score = scores["a", name]
        samples = task.samples(task.clients[0], name)
        labels = samples.labels[samples.index]
        assert score.correct == int((logits.argmax(1) == labels).sum())
        assert score.loss == pytest.approx(
            float(nn.functional.cross_entropy(logits, labels, reduction="sum")), abs=1e-8
        )
        assert score.telemetry["e"].mean == pytest.approx(float(e.mean()), abs=1e-9)
        bins = torch.histc(e, 20, 0, 1).long().tolist()
        assert list(score.telemetry["e"].counts) == bins
        assert sum(score.telemetry["e"].counts) == score.samples == 40
    fresh = answers(adapter, tree, x["on"])[1]
    assert float((fresh - expected["on"][1]).abs().max()) > 1e-3  # it really went on
    assert float((answers(adapter, tree, x["anew"])[1] - expected["anew"][1]).abs().max()) > 1e-3


def test_batches_of_one_are_samples() -> None:
    """And a last sample that would be alone joins the batch before it, for every adapter that wants batches."""
    task = pixel_task({"stream": Setting("stored")}, count=33)
    tree, x = deployment(3.0), shown(task, "stream")

    def score(**options: Any) -> Score:
        return Sequential(DOUBLE).evaluate(on(LINEAR, **options), {"a": tree}, task, ["stream"], seed=0)["a", "stream"]

    one, plain = score(batch_size=1), score()
    assert one.correct == plain.correct
    assert one.loss == pytest.approx(plain.loss, abs=1e-8)
    assert one.telemetry["e"].counts == plain.telemetry["e"].counts
    together = score(batch_size=32)
    assert together.telemetry["e"].mean == pytest.approx(
        float(answers(on(LINEAR, batch_size=33), tree, x)[1][0]), abs=1e-9
    )


@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0])
def test_telemetry_of_a_fixed_weight_is_that_weight(weight: float) -> None:
    task = pixel_task({"stream": Setting("stored")})
    score = Sequential(DOUBLE).evaluate(on(LINEAR, e=weight), {"a": deployment()}, task, ["stream"], seed=0)[
        "a", "stream"
    ]
    assert score.telemetry["e"].mean == weight
    assert score.telemetry["e"].counts[min(int(20 * weight), 19)] == 40


@pytest.mark.parametrize("options", [
    {"alpha": -0.1}, {"beta": 1.1}, {"e": 2.0}, {"lr": -1.0}, {"steps": -1}, {"batch_size": -1},
])  # fmt: skip
def test_settings_that_cannot_be_meant_are_refused(options: dict[str, Any]) -> None:
    sentence = refusal(ADAPTERS, "adapter", "the", options, arch=LINEAR, predict_with=LINEAR)
    assert sentence.startswith(f"adapter 'the': {next(iter(options)).replace('_', '-')} must")


# ---- real images, real weights ------------------------------------------------------------------------------------------
SHORT = 45
LIGHT: dict[str, dict[str, Any]] = {
    "the": {},
    "the-plus": {"views": 3, "tune_steps": 2, "tune_lr": 0.01, "flip": False},
    "t3a": {"keep": 3},
    "memo": {"views": 3, "steps": 2, "lr": 0.01, "flip": False},
    "lp-ft": {"views": 3, "steps": 1, "head_steps": 1, "lr": 0.01, "flip": False},
    "tsa": {"flip": False},
    "ttt": {"copies": 8, "lr": 0.01},
}


@cache
def real(name: str) -> tuple[Any, dict[str, Tree], Task]:
    """An adapter on a trained network, two clients' models in single precision, and streams of 45 digits each."""
    made = trained("finetune-rotation", rounds=8) if name == "ttt" else trained()
    sizes = {client.name: len(made.task.streams["out-of-client"].index[client.name]) for client in made.task.clients}
    longest = sorted(sizes, key=lambda client: -sizes[client])[:2]
    assert min(sizes[client] for client in longest) >= SHORT
    stream = made.task.streams["out-of-client"]
    cut = replace(stream, index={client: rows[:SHORT] for client, rows in stream.index.items()})
    adapter = ADAPTERS[name].make(arch=made.method.arch, predict_with=made.method.predict, **LIGHT[name])
    return adapter, {client: made.deployed[client] for client in longest}, replace(made.task, streams={"s": cut})


def collected(adapter: Adapter, tree: Tree, samples: Samples, compute: Compute) -> tuple[Tensor, list[int]]:
    shown = list(predictions(adapter, to(tree, dtype=compute.dtype), samples, Setting(), 5, compute))
    return torch.cat([output.logits for output, _, _ in shown]), [len(labels) for _, labels, _ in shown]


@pytest.mark.parametrize("name", LIGHT)
def test_chunks_of_any_size_give_the_same_answers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, deployed, task = real(name)
    assert adapter.batch is None
    client, tree = next(iter(deployed.items()))
    samples = task.samples(task.client(client), "s")
    single: list[Tensor] = []
    double: list[Tensor] = []
    scores: list[Score] = []
    for size in (1, 7, 32, 10_000):
        monkeypatch.setattr(work, "EVALUATION_CHUNK", size)
        logits, sizes = collected(adapter, tree, samples, Compute())
        assert max(sizes) == min(size, SHORT)
        single.append(logits)
        if size != 1 or name in ("the", "t3a", "tsa"):
            double.append(collected(adapter, tree, samples, DOUBLE)[0])
        scores.append(work.evaluate(adapter, tree, task, task.client(client), ["s"], 5, Compute())[client, "s"])
    for logits in single[1:]:
        assert torch.equal(logits.argmax(1), single[0].argmax(1))
    for logits in double[1:]:
        assert float((logits - double[0]).abs().max()) < 1e-8
    assert len({score.correct for score in scores}) == 1
    assert scores[0].correct == int((single[0].argmax(1) == samples.labels[samples.index]).sum())
    assert len({score.telemetry["e"].counts for score in scores if score.telemetry}) <= 1
    plain, _ = collected(
        ADAPTERS["none"].make(arch=adapter.arch, predict_with=adapter.predict_with), tree, samples, Compute()
    )
    assert float((single[0] - plain).abs().max()) > 1e-3  # it did something


@pytest.mark.parametrize("name", LIGHT)
def test_engines_agree_on_what_per_sample_adapters_answer(name: str) -> None:
    adapter, deployed, task = real(name)
    ends = [engine.evaluate(adapter, deployed, task, ["s"], seed=5) for engine in (Sequential(), Vmapped())]
    assert list(ends[0]) == list(ends[1]) == [(client, "s") for client in deployed]
    for key, score in ends[0].items():
        assert (score.samples, score.correct) == (ends[1][key].samples, ends[1][key].correct)
        assert score.loss == pytest.approx(ends[1][key].loss, rel=1e-4)
        assert set(score.telemetry) == set(ends[1][key].telemetry)
        for entry, density in score.telemetry.items():
            assert density.mean == pytest.approx(ends[1][key].telemetry[entry].mean, abs=1e-4)


def test_a_rate_of_nought_makes_the_plus_variant_the_plain_one() -> None:
    adapter, deployed, task = real("the-plus")
    client, tree = next(iter(deployed.items()))
    samples = task.samples(task.client(client), "s")
    common = {"arch": adapter.arch, "predict_with": adapter.predict_with}
    expected, _ = collected(HeadEnsemble(**common), tree, samples, Compute())
    for options in ({"tune_lr": 0.0}, {"tune_steps": 0}):
        found, _ = collected(TunedHeadEnsemble(**common, views=2, **options), tree, samples, Compute())
        assert torch.equal(found.argmax(1), expected.argmax(1))
        assert float((found - expected).abs().max()) < 1e-6 * float(expected.abs().max())
    tuned, _ = collected(adapter, tree, samples, Compute())
    assert float((tuned - expected).abs().max()) > 1e-3
    # and the weights and the history are those of untuned features, tuned or not
    x = samples.images[samples.index].float() / 255
    plain_output, plain_state = HeadEnsemble(**common).predict(HeadEnsemble(**common).init(tree), x, {})
    output, state = adapter.predict(adapter.init(tree), x, draws_of(adapter, samples.ids[samples.index], 5, Compute()))
    assert torch.equal(output.aux["e"], plain_output.aux["e"])
    assert torch.equal(state["history"]["mean"], plain_state["history"]["mean"])


def test_the_mixture_of_streams_is_the_mean_for_stateless_methods_and_not_for_the_ensemble() -> None:
    """The same samples in one stream: without state every answer stays; a history makes neighbours matter."""
    adapter, deployed, task = real("the")
    client, tree = next(iter(deployed.items()))
    original, foreign = (trained().task.streams[name].index[client][:SHORT] for name in ("original", "out-of-client"))
    mixed = torch.stack([original, foreign], 1).flatten()  # one of these, one of those
    base = task.streams["s"]
    streams = {
        name: replace(base, name=name, index={client: rows})
        for name, rows in (("original", original), ("foreign", foreign), ("mixture", mixed))
    }
    task = replace(task, streams=streams)
    common = {"arch": adapter.arch, "predict_with": adapter.predict_with}
    stateless = {
        "none": ADAPTERS["none"].make(**common),
        "memo": ADAPTERS["memo"].make(**common, views=2, steps=1, lr=0.01, flip=False),
        "tsa": ADAPTERS["tsa"].make(**common),
        "a weight": ADAPTERS["the"].make(**common, e=0.5),
        "no history": ADAPTERS["the"].make(**common, history=False),
    }
    for label, each in stateless.items():
        scores = Sequential().evaluate(each, {client: tree}, task, list(streams), seed=0)
        parts, whole = [scores[client, name] for name in ("original", "foreign")], scores[client, "mixture"]
        assert len({part.samples for part in parts}) == 1
        assert whole.accuracy == pytest.approx(sum(part.accuracy for part in parts) / 2, abs=1e-12), label
        assert whole.loss == pytest.approx(sum(part.loss for part in parts), rel=1e-4), label
    scores = Sequential().evaluate(adapter, {client: tree}, task, list(streams), seed=0)
    weights = {name: scores[client, name].telemetry["e"].mean for name in streams}
    assert abs(weights["mixture"] - (weights["original"] + weights["foreign"]) / 2) > 1e-3
    assert scores[client, "mixture"].loss != pytest.approx(
        scores[client, "original"].loss + scores[client, "foreign"].loss, rel=1e-3
    )


def test_an_ensembles_accuracy_on_a_mixture_can_be_that_of_neither_part() -> None:
    """Made by hand: a sample between the descriptors is answered by the head that its neighbours' features suggest."""
    tree = {
        "model": {HEAD: torch.zeros(CLASSES, SIZE, dtype=torch.float64)},
        "generic": {HEAD: torch.zeros(CLASSES, SIZE, dtype=torch.float64)},
        "descriptors": {
            "global": torch.zeros(SIZE, dtype=torch.float64), "local": torch.zeros(SIZE, dtype=torch.float64),
        },
    }  # fmt: skip
    tree["model"][HEAD][0, 0], tree["generic"][HEAD][1, 0] = 1.0, 1.0  # feature 0: class 0 here, class 1 there
    tree["descriptors"]["global"][1], tree["descriptors"]["local"][2] = 1.0, 1.0
    between = torch.zeros(SIZE, dtype=torch.float64)
    between[0] = 1.0
    towards = [between + torch.nn.functional.one_hot(torch.tensor(i), SIZE) for i in (1, 2)]
    adapter = on(LINEAR, beta=0.1, alpha=0.9, weighting="fa")
    own, foreign = torch.stack([towards[1], between]), torch.stack([towards[0], between])
    labels = {"own": torch.tensor([0, 0]), "foreign": torch.tensor([1, 1])}  # what the head of one's own part says
    alone = {
        "own": answers(adapter, tree, own)[0].argmax(1) == labels["own"],
        "foreign": answers(adapter, tree, foreign)[0].argmax(1) == labels["foreign"],
    }
    assert [float(right.double().mean()) for right in alone.values()] == [1.0, 1.0]
    mixture = torch.stack([foreign[0], own[1], own[0], foreign[1]])  # each ambiguous one after the other's neighbour
    right = answers(adapter, tree, mixture)[0].argmax(1) == torch.tensor([1, 0, 0, 1])
    assert right.tolist() == [True, False, True, False]  # accuracy 1/2 where both parts have 1


# ---- manners ------------------------------------------------------------------------------------------------------------
EPISODIC = (
    "the",
    "the-plus",
    "memo",
    "lp-ft",
    "t3a",
    "tsa",
    "none",
    "blend",
    "deterministic",
    "home-or-away",
    "prior-em",
    "ours",
)


def everything(arch: Arch, dtype: torch.dtype = torch.float64) -> Tree:
    """A deployment in which every adapter finds what it needs."""
    tensors = arch.init(0)
    model = {n: leaf.to(dtype) if leaf.is_floating_point() else leaf for n, leaf in tensors.items()}
    generic = {n: normal(*model[n].shape, seed=i, dtype=dtype) for i, n in enumerate(sorted(arch.head))}
    size = arch.feature_size
    return {
        "model": model,
        "global": {n: leaf.clone() + 0.1 if leaf.is_floating_point() else leaf.clone() for n, leaf in model.items()},
        "generic": generic,
        "descriptors": {"global": normal(size, seed=7, dtype=dtype), "local": normal(size, seed=8, dtype=dtype)},
        "rotation": {
            "rotation.weight": 0.1 * normal(4, size, seed=9, dtype=dtype),
            "rotation.bias": normal(4, seed=10, dtype=dtype),
        },
        "learned-loss": {**fresh(model[min(arch.head)], arch.classes), RATE: torch.tensor(0.1, dtype=dtype)},
    }


def same(a: Tree, b: Tree) -> bool:
    return list(a) == list(b) and all(
        list(a[slot]) == list(b[slot]) and all(torch.equal(a[slot][n], b[slot][n]) for n in a[slot]) for slot in a
    )


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_no_adapter_writes_to_what_it_is_given(name: str, kind: str) -> None:
    """Deployed tensors, images, draws, labels and its own earlier states stay bitwise what they were."""
    arch = with_erasers(tiny_arch(kind, norm=True))  # any network for most of them; one adapter needs these layers
    adapter = on(arch, name, **LIGHT.get(name, {}))
    tree = everything(arch)
    x = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    draws = draws_of(adapter, torch.arange(6), 0, DOUBLE)
    kept = copy.deepcopy((tree, x, draws))
    batch = {"x": x.clone(), "y": torch.arange(6) % 4}
    with torch.no_grad():
        ready = {**tree, **adapter.prepare(tree, [batch])}
        assert torch.equal(batch["x"], x)
        start = adapter.init(ready)
        before = copy.deepcopy(start)
        fitted = adapter.fit(start, x, draws)
        first, after = adapter.predict(fitted, x, draws)
        frozen = copy.deepcopy(after)
        again, repeated = adapter.predict(fitted, x, draws)
        adapter.predict(after, x, draws)
    assert same(tree, kept[0])
    assert torch.equal(x, kept[1])
    assert same({"d": dict(draws)}, {"d": kept[2]})
    assert same(start, before)
    assert same(after, frozen)
    assert torch.equal(first.logits, again.logits)
    assert same(after, repeated)
    assert not any(leaf.requires_grad for leaves in after.values() for leaf in leaves.values())
    assert not first.logits.requires_grad
    if name in EPISODIC:
        assert all(after["model"][n] is leaf for n, leaf in tree["model"].items())


def test_every_adapter_is_either_episodic_or_known_to_move() -> None:
    """A new adapter must say what it does to the weights."""
    assert set(ADAPTERS) - set(EPISODIC) == {
        "bn",
        "eata",
        "fdse-align",
        "fedbn-align",
        "fedicon",
        "fedtta",
        "tent",
        "ttt",
    }
