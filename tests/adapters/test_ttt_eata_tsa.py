"""TTT, EATA and TSA against plain loops with modules, copies and autograd; the views that TSA compares."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from fedshift.blocks import views as augment
from fedshift.blocks.rotation import turned
from fedshift.blocks.views import contrastive_views
from fedshift.core import rng
from fedshift.core.arch import Arch
from fedshift.core.registry import ADAPTERS
from fedshift.core.tree import Tree
from fedshift.engines.base import Compute
from fedshift.engines.reference import draws_of
from fedshift.engines.sequential import Sequential
from fedshift.errors import UserError
from fedshift.methods.fedavg import FedAvg
from fedshift.models.cnn import CNN
from fedshift.models.mlp import MLP
from tests.adapters.test_adapters import CLASSES, SHAPE, TASK, images_of, normalised, stream
from tests.adapters.test_adapters import trained as network
from tests.conftest import refusal, tiny_train

DOUBLE = Compute(dtype=torch.float64)
NETWORKS = {
    "mlp": MLP(hidden=(6,)),
    "mlp with norm": MLP(hidden=(6,), norm=True),
    "cnn": CNN(width=2, hidden=6),
    "cnn with norm": CNN(width=2, hidden=6, norm=True),
}


def on(arch: Arch, name: str, **options: Any) -> Any:
    return ADAPTERS[name].make(arch=arch, predict_with=FedAvg(arch=arch, train=tiny_train()).predict, **options)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def pictures(count: int, seed: int = 0, shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def far(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a.double() - b.double()).abs().max())


# ---- TTT ----------------------------------------------------------------------------------------------------------------
def rotating(kind: str) -> tuple[Arch, nn.Module, nn.Linear, Tree]:
    torch.manual_seed(4)
    module = NETWORKS[kind].make(SHAPE, CLASSES).double()
    arch = Arch.of(lambda: NETWORKS[kind].make(SHAPE, CLASSES), SHAPE, kind)
    head = nn.Linear(arch.feature_size, 4).double()
    tree = {
        "model": {name: leaf.detach().clone() for name, leaf in module.state_dict().items()},
        "rotation": {f"rotation.{name}": leaf.detach().clone() for name, leaf in head.state_dict().items()},
    }
    return arch, module, head, tree


def test_a_turn_is_numpys_quarter_turn() -> None:
    x = pictures(8)
    turns = torch.arange(8) % 4
    expected = [np.rot90(image.numpy(), int(k), axes=(1, 2)).copy() for image, k in zip(x, turns, strict=True)]
    assert torch.equal(turned(x, turns), torch.from_numpy(np.stack(expected)))


@pytest.mark.parametrize("copies", [1, 32])
@pytest.mark.parametrize("kind", NETWORKS)
def test_ttt_is_a_step_on_real_copies_for_every_sample_and_nothing_is_reset(kind: str, copies: int) -> None:
    if copies == 1 and "norm" in kind:
        copies = 2  # one copy has no batch statistics
    arch, module, head, tree = rotating(kind)
    adapter = on(arch, "ttt", copies=copies, lr=0.1)
    x, ids = pictures(9), torch.arange(20, 29)
    draws = draws_of(adapter, ids, 0, DOUBLE)
    assert draws["turns"].shape == (9, copies)
    with torch.no_grad():
        output, state = adapter.predict(adapter.init(tree), x, draws)
    optimiser = torch.optim.SGD([*module.body.parameters(), *head.parameters()], lr=0.1)
    for n in range(9):
        turns = draws["turns"][n]
        batch = torch.stack([torch.from_numpy(np.rot90(x[n].numpy(), k, axes=(1, 2)).copy()) for k in turns.tolist()])
        module.train()
        optimiser.zero_grad()
        F.cross_entropy(head(module.body(normalised(batch))), turns).backward()
        optimiser.step()
        with torch.no_grad():
            assert far(output.logits[n : n + 1], module.eval()(normalised(x[n : n + 1]))) < 1e-9
    for name, leaf in module.state_dict().items():
        assert far(state["model"][name], leaf) < 1e-9, name
    for name, leaf in head.state_dict().items():
        assert far(state["rotation"][f"rotation.{name}"], leaf) < 1e-9, name
    moved = {name for name, leaf in tree["model"].items() if not torch.equal(leaf, state["model"][name])}
    assert moved == (set(arch.parameters) | set(arch.buffers)) - arch.head  # the classifier stands still


def test_ttts_order_matters_and_its_chunks_do_not() -> None:
    arch, _, _, tree = rotating("cnn with norm")
    adapter = on(arch, "ttt", copies=8, lr=0.1)
    x, ids = pictures(10), torch.arange(10)

    def run(order: Tensor, size: int) -> Tensor:
        state, parts = adapter.init(tree), []
        for rows in order.split(size):
            output, state = adapter.predict(state, x[rows], draws_of(adapter, ids[rows], 0, DOUBLE))
            parts.append(output.logits)
        return torch.cat(parts)

    forwards = run(ids, 10)
    for size in (1, 3):
        assert far(run(ids, size), forwards) < 1e-12
    assert far(run(ids.flip(0), 10).flip(0), forwards) > 1e-4


def test_a_rotation_head_of_zeros_pulls_at_no_feature() -> None:
    """An unseen client's: its first step moves the head alone."""
    arch, _, _, tree = rotating("cnn")
    zero = {name: torch.zeros_like(leaf) for name, leaf in tree["rotation"].items()}
    adapter = on(arch, "ttt", copies=32, lr=0.5)
    x, draws = pictures(1), draws_of(adapter, torch.arange(1), 0, DOUBLE)
    output, state = adapter.predict(adapter.init({**tree, "rotation": zero}), x, draws)
    assert torch.equal(output.logits, arch(tree["model"], x).logits)
    assert float(state["rotation"]["rotation.bias"].abs().max()) > 0


def test_no_rate_no_change() -> None:
    arch, _, _, tree = rotating("cnn")
    adapter = on(arch, "ttt", copies=4, lr=0.0)
    x = pictures(5)
    output, _ = adapter.predict(adapter.init(tree), x, draws_of(adapter, torch.arange(5), 0, DOUBLE))
    assert far(output.logits, arch(tree["model"], x).logits) < 1e-12


@pytest.mark.parametrize("kind", NETWORKS)
def test_one_copy_never_meets_batch_norm_alone(kind: str) -> None:
    """It is served, or refused with a sentence."""
    arch, _, _, tree = rotating(kind)
    try:
        adapter = on(arch, "ttt", copies=1)
        output, _ = adapter.predict(adapter.init(tree), pictures(2), draws_of(adapter, torch.arange(2), 0, DOUBLE))
    except UserError:
        return
    assert bool(output.logits.isfinite().all())


# ---- EATA ---------------------------------------------------------------------------------------------------------------
STEPS: dict[str, tuple[dict[str, Any], Any]] = {
    "sgd": ({"optimiser": "sgd", "lr": 0.05}, lambda p: torch.optim.SGD(p, lr=0.05)),
    "momentum": (
        {"optimiser": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    ),
    "adam": ({"optimiser": "adam", "lr": 0.02}, lambda p: torch.optim.Adam(p, lr=0.02)),
}


def batch_statistics(module: nn.Module) -> list[nn.Parameter]:
    """The module as Tent and EATA use it, and what they train."""
    module.train().requires_grad_(False)
    norms = [layer for layer in module.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
    for layer in norms:
        layer.track_running_stats = False
        layer.running_mean = layer.running_var = None
    return [leaf.requires_grad_() for layer in norms for leaf in (layer.weight, layer.bias)]


def entropies(logits: Tensor) -> Tensor:
    p = logits.softmax(1)
    return -(p * p.log()).sum(1)


def eata_loop(
    module: nn.Module,
    batches: list[Tensor],
    make: Any,
    margin: float,
    redundancy: float,
    memory: float = 0.9,
    fisher: list[Tensor] | None = None,
    weight: float = 0.0,
) -> tuple[Tensor, list[list[bool]], list[nn.Parameter]]:
    """EATA as its authors describe it, one sample after the other where samples are chosen."""
    moving = batch_statistics(module)
    start = [leaf.detach().clone() for leaf in moving]
    optimiser, limit, known = make(moving), margin * math.log(CLASSES), None
    answers, choices = [], []
    for x in batches:
        logits = module(normalised(x))
        uncertainty = entropies(logits)
        p = logits.detach().softmax(1)
        chosen: list[bool] = []
        for n in range(len(x)):
            reliable = float(uncertainty[n].detach()) < limit
            new = known is None or abs(float((p[n] * known).sum() / (p[n].norm() * known.norm()))) < redundancy
            chosen.append(reliable and new)
        rows = torch.tensor([n for n, kept in enumerate(chosen) if kept], dtype=torch.int64)
        if len(rows):
            mean = p[rows].mean(0)
            known = mean if known is None else memory * known + (1 - memory) * mean
            factors = (limit - uncertainty[rows].detach()).exp()
            loss = (factors * uncertainty[rows]).mean()
            for leaf, first, matters in zip(moving, start, fisher or [], strict=False):
                loss = loss + weight * (matters * (leaf - first) ** 2).sum()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        answers.append(logits.detach())
        choices.append(chosen)
    return torch.cat(answers), choices, moving


def norm_names(arch: Arch) -> list[str]:
    return [name for name in arch.parameters if name in arch.norm]


@pytest.mark.parametrize("optimiser", STEPS)
@pytest.mark.parametrize("model", ["mlp", "cnn"])
@pytest.mark.parametrize(("margin", "redundancy"), [(1.1, 2.0), (0.97, 0.95), (0.9, 0.9), (1.1, 0.05)])
def test_eata_is_the_loop(model: str, optimiser: str, margin: float, redundancy: float) -> None:
    arch, module, tree = network(model)
    options, make = STEPS[optimiser]
    fisher = {name: normal(*tree["model"][name].shape, seed=i).abs() for i, name in enumerate(norm_names(arch))}
    adapter = on(arch, "eata", batch_size=16, margin=margin, redundancy=redundancy, fisher_weight=3.0, **options)
    found = stream(adapter, {**tree, "fisher": fisher})
    batches = list(images_of(TASK.clients[0]).split(16))
    in_order = [fisher[name] for name in norm_names(arch)]
    expected, choices, moving = eata_loop(module, batches, make, margin, redundancy, fisher=in_order, weight=3.0)
    assert far(found.logits, expected) < 1e-7
    for name, leaf in zip(norm_names(arch), moving, strict=True):
        assert far(found.states[-1]["model"][name], leaf.detach()) < 1e-7
    score = Sequential(DOUBLE).evaluate(adapter, {"client-0": {**tree, "fisher": fisher}}, TASK, ["test"], 0)
    kept = sum(sum(chosen) for chosen in choices)
    density = score["client-0", "test"].telemetry["kept"]
    assert density.total == kept
    assert density.mean == pytest.approx(kept / 45)
    if redundancy == 2.0:
        assert kept == 45  # both doors open: Tent with weights
    if redundancy == 0.05:
        assert kept == 16  # with few classes nothing is new after the first batch, as the docstring warns
    if redundancy == 0.9 and model == "mlp":
        assert 0 < kept < 45


def test_both_filters_are_at_work_in_the_comparison() -> None:
    _, module, _ = network("mlp")
    batches = list(images_of(TASK.clients[0]).split(16))
    make = STEPS["sgd"][1]
    by_entropy = eata_loop(network("mlp")[1], batches, make, 0.9, 2.0)[1]
    by_both = eata_loop(module, batches, make, 0.9, 0.9)[1]
    assert 0 < sum(map(sum, by_both)) < sum(map(sum, by_entropy)) < 45


@pytest.mark.parametrize("optimiser", STEPS)
def test_a_batch_of_which_nothing_is_kept_changes_no_bit(optimiser: str) -> None:
    arch, _, tree = network("cnn")
    never = stream(on(arch, "eata", batch_size=16, margin=0.0, **STEPS[optimiser][0]), tree)
    start = on(arch, "eata", batch_size=16, margin=0.0, **STEPS[optimiser][0]).init(tree)
    for state in never.states:
        for slot in ("model", "optim", "known"):
            assert all(torch.equal(state[slot][name], leaf) for name, leaf in start[slot].items()), slot
    assert bool(never.logits.isfinite().all())
    # and after a batch that moved something, with momentum that would like to go on
    once = stream(on(arch, "eata", batch_size=16, margin=1.1, redundancy=0.0, **STEPS[optimiser][0]), tree)
    assert any(not torch.equal(once.states[0]["model"][n], tree["model"][n]) for n in norm_names(arch))
    for state in once.states[1:]:
        for slot in ("model", "optim", "known"):
            assert all(torch.equal(state[slot][name], leaf) for name, leaf in once.states[0][slot].items()), slot
    score = Sequential(DOUBLE).evaluate(
        on(arch, "eata", batch_size=16, margin=0.0), {"client-0": tree}, TASK, ["test"], 0
    )["client-0", "test"]
    assert score.telemetry["kept"].mean == 0.0


def test_the_pull_to_the_deployed_weights_is_nought_where_it_starts() -> None:
    arch, _, tree = network("mlp")
    fisher = {name: torch.ones_like(tree["model"][name]) for name in norm_names(arch)}
    ends = []
    for weight in (0.0, 50.0):
        options = {"batch_size": 16, "margin": 1.1, "redundancy": 2.0, "optimiser": "sgd", "lr": 0.01}
        ends.append(stream(on(arch, "eata", fisher_weight=weight, **options), {**tree, "fisher": fisher}))
    assert torch.equal(ends[0].chunks[0], ends[1].chunks[0])
    for name in norm_names(arch):
        assert far(ends[0].states[0]["model"][name], ends[1].states[0]["model"][name]) < 1e-15
    moved = [
        sum(float((end.states[-1]["model"][n] - tree["model"][n]).square().sum()) for n in norm_names(arch))
        for end in ends
    ]
    assert moved[1] < moved[0]  # later it holds back


def test_fisher_is_the_mean_squared_gradient_under_the_models_own_labels() -> None:
    arch, module, tree = network("cnn")
    x = pictures(50, seed=6)
    batches = [{"x": part, "y": torch.zeros(len(part), dtype=torch.int64)} for part in x.split(16)]
    moving = batch_statistics(module)
    squares = []
    for batch in batches:
        logits = module(normalised(batch["x"]))
        grads = torch.autograd.grad(F.cross_entropy(logits, logits.argmax(1)), moving)
        squares.append([grad.square() for grad in grads])
    for samples, used in ((2000, 4), (33, 3), (32, 2), (1, 1)):
        found = on(arch, "eata", fisher_samples=samples).prepare(tree, batches)["fisher"]
        for i, name in enumerate(norm_names(arch)):
            assert far(found[name], torch.stack([own[i] for own in squares[:used]]).mean(0)) < 1e-12
    assert set(found) == set(norm_names(arch))
    none = on(arch, "eata", fisher_samples=0).prepare(tree, batches)["fisher"]
    assert all(float(leaf.abs().max()) == 0 for leaf in none.values())
    assert all(float(leaf.abs().max()) == 0 for leaf in on(arch, "eata").init(tree)["fisher"].values())


@pytest.mark.parametrize("options", [{"predict_when": "after"}, {"steps": 2}, {"predict_when": "after", "steps": 2}])
def test_eata_tells_its_pass_rate_whenever_it_predicts(options: dict[str, Any]) -> None:
    arch, _, tree = network("mlp")
    adapter = on(arch, "eata", batch_size=16, margin=1.1, redundancy=2.0, **options)
    score = Sequential(DOUBLE).evaluate(adapter, {"client-0": tree}, TASK, ["test"], 0)["client-0", "test"]
    assert score.telemetry["kept"].mean == 1.0


@pytest.mark.parametrize(("name", "options"), [
    ("eata", {"memory": 1.5}), ("eata", {"margin": -1.0}), ("eata", {"redundancy": -0.1}),
    ("eata", {"fisher_weight": -1.0}), ("eata", {"fisher_samples": -1}), ("eata", {"steps": 0}),
    ("ttt", {"lr": -1.0}), ("ttt", {"copies": 0}), ("tsa", {"lr": -1.0}), ("tsa", {"steps": -1}),
])  # fmt: skip
def test_settings_that_cannot_be_meant_are_refused(name: str, options: dict[str, Any]) -> None:
    sentence = refusal(ADAPTERS, "adapter", name, options, arch=network("mlp")[0], predict_with=None)
    assert sentence.startswith(f"adapter {name!r}: ")
    assert f"{next(iter(options)).replace('_', '-')} must" in sentence


# ---- TSA ----------------------------------------------------------------------------------------------------------------
def two_heads(arch: Arch, tree: Tree, dtype: torch.dtype = torch.float64) -> Tree:
    model = {name: leaf.to(dtype) if leaf.is_floating_point() else leaf for name, leaf in tree["model"].items()}
    generic = {name: normal(*model[name].shape, seed=i, dtype=dtype) for i, name in enumerate(sorted(arch.head))}
    return {"model": model, "generic": generic}


def tsa_by_autograd(arch: Arch, tree: Tree, views: list[Tensor], lr: float, steps: int) -> tuple[Tensor, Tensor]:
    """Weights of all samples and the size of their first gradient: torch's Adam on two logits each, one by one."""
    weights, first = [], []
    for n in range(len(views[0])):
        pairs = []
        for view in views:
            features = arch.encode(tree["model"], view[n : n + 1])[0]
            pairs.append((arch.classify(tree["generic"], features)[0], arch.classify(tree["model"], features)[0]))
        a = torch.zeros(2, dtype=views[0].dtype, requires_grad=True)
        optimiser = torch.optim.Adam([a], lr=lr, foreach=False)
        for step in range(steps):
            e = a.softmax(0)
            p, q = ((e[0] * generic + e[1] * personal).softmax(0) for generic, personal in pairs)
            agreement = (p * q).sum() / ((p * p).sum().sqrt() * (q * q).sum().sqrt())
            optimiser.zero_grad()
            (-agreement).backward()
            if step == 0:
                assert a.grad is not None
                first.append(float(a.grad[0].abs()))
            optimiser.step()
        weights.append(a.detach().softmax(0)[0])
    return torch.stack(weights), torch.tensor(first)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-4), (torch.float64, 1e-7)])
@pytest.mark.parametrize("model", ["plain", "cnn"])
def test_tsa_is_autograd_on_the_same_views(model: str, dtype: torch.dtype, tolerance: float) -> None:
    arch, _, tree = network(model)
    tree = two_heads(arch, tree, dtype)
    adapter = on(arch, "tsa", lr=0.1, steps=10)
    x = pictures(12, dtype=dtype)
    draws = draws_of(adapter, torch.arange(12), 0, Compute(dtype=dtype))
    views = [contrastive_views(x, draws["views"][:, i]) for i in range(2)]
    assert far(views[0], views[1]) > 0.1
    with torch.no_grad():
        output, state = adapter.predict(adapter.init(tree), x, draws)
    e, first = tsa_by_autograd(arch, tree, views, 0.1, 10)
    sound = first > 1e-5
    assert int(sound.sum()) >= 10
    assert far(output.aux["e"][sound], e[sound]) < tolerance
    with torch.no_grad():
        features = arch.encode(tree["model"], x)[0]
        clean = [arch.classify(tree[slot], features) for slot in ("generic", "model")]
    found = output.aux["e"][:, None]
    assert far(output.logits, found * clean[0] + (1 - found) * clean[1]) < (1e-5 if dtype == torch.float32 else 1e-12)
    assert state["model"] is tree["model"]
    assert float((output.aux["e"] - 0.5).abs().max()) > 0.05


def test_tsa_makes_views_agree_more_than_a_half_does() -> None:
    arch, _, tree = network("plain")
    tree = two_heads(arch, tree)
    adapter = on(arch, "tsa")
    x = pictures(40)
    draws = draws_of(adapter, torch.arange(40), 0, DOUBLE)
    output, _ = adapter.predict(adapter.init(tree), x, draws)

    def agreement(e: Tensor) -> Tensor:
        p = []
        for i in range(2):
            features = arch.encode(tree["model"], contrastive_views(x, draws["views"][:, i]))[0]
            heads = [arch.classify(tree[slot], features) for slot in ("generic", "model")]
            p.append((e[:, None] * heads[0] + (1 - e[:, None]) * heads[1]).softmax(1))
        return F.cosine_similarity(*p)

    gain = agreement(output.aux["e"]) - agreement(torch.full((40,), 0.5).double())
    assert float(gain.mean()) > 0
    assert float((gain > -1e-9).double().mean()) > 0.9


def test_tsa_stays_in_the_middle_where_the_heads_are_one() -> None:
    arch, _, tree = network("plain")
    tree = {"model": tree["model"], "generic": {name: tree["model"][name] for name in arch.head}}
    adapter = on(arch, "tsa")
    x = pictures(6)
    output, _ = adapter.predict(adapter.init(tree), x, draws_of(adapter, torch.arange(6), 0, DOUBLE))
    assert torch.equal(output.logits, arch(tree["model"], x).logits)
    assert torch.equal(output.aux["e"], torch.full((6,), 0.5).double())


# ---- the views ----------------------------------------------------------------------------------------------------------
def numbers_of(count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return rng.uniform(1, torch.arange(count), (augment.NUMBERS,)).to(dtype)


def middle(count: int = 1, **chosen: float) -> Tensor:
    """Numbers that change nothing, but for the ones that are named."""
    names = (
        "area",
        "ratio",
        "top",
        "left",
        "mirror",
        "brightness",
        "contrast",
        "saturation",
        "hue",
        "gray",
        "jittered",
    )
    neutral = {**dict.fromkeys(names, 0.5), "area": 1.0, "mirror": 0.9, "gray": 0.9}
    return torch.tensor([[{**neutral, **chosen}[name] for name in names]], dtype=torch.float64).repeat(count, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("channels", [1, 2, 3])
def test_views_stay_in_range_and_keep_their_shape_and_type(channels: int, dtype: torch.dtype) -> None:
    x = pictures(200, shape=(channels, 12, 12), dtype=dtype)
    x[:20], x[20:40] = 0.0, 1.0
    numbers = numbers_of(200, dtype)
    numbers[40:44], numbers[44:48] = 0.0, 1 - 2.0**-24
    view = contrastive_views(x, numbers)
    assert view.shape == x.shape
    assert view.dtype == dtype
    assert 0 <= float(view.min()) <= float(view.max()) <= 1
    assert bool(view.isfinite().all())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_view_is_a_function_of_its_own_image_and_numbers(channels: int, dtype: torch.dtype, tolerance: float) -> None:
    x, numbers = pictures(20, shape=(channels, 9, 9), dtype=dtype), numbers_of(20, dtype)
    whole = contrastive_views(x, numbers)
    for rows in ([3], [7, 2], list(range(5, 20))):
        assert far(contrastive_views(x[rows], numbers[rows]), whole[rows]) < tolerance
    stacked = vmap(contrastive_views)(x.unflatten(0, (4, 5)), numbers.unflatten(0, (4, 5)))
    assert far(stacked.flatten(0, 1), whole) < tolerance


def test_neutral_numbers_are_the_image_itself() -> None:
    x = pictures(4)
    assert far(contrastive_views(x, middle(4)), x) < 1e-12
    mirrored = contrastive_views(x, middle(4, mirror=0.1))
    assert far(mirrored, x.flip(3)) < 1e-12
    assert far(contrastive_views(x, middle(4, mirror=0.1), flip=False), x) < 1e-12


def test_each_number_does_its_own_thing() -> None:
    x = 0.3 + 0.3 * pictures(3, shape=(3, 16, 16))
    luma = torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64)[:, None, None]
    assert far(contrastive_views(x, middle(3, brightness=1.0)), 1.4 * x) < 1e-12
    assert far(contrastive_views(x, middle(3, brightness=0.0)), 0.6 * x) < 1e-12
    mean = (x * luma).sum(1, keepdim=True).mean((1, 2, 3), keepdim=True)
    assert far(contrastive_views(x, middle(3, contrast=0.0)), mean + 0.6 * (x - mean)) < 1e-12
    plain = (x * luma).sum(1, keepdim=True)
    assert far(contrastive_views(x, middle(3, saturation=1.0)), plain + 1.4 * (x - plain)) < 1e-9
    gray = contrastive_views(x, middle(3, gray=0.1))
    assert far(gray, plain.expand_as(x)) < 1e-9
    hued = contrastive_views(x, middle(3, hue=0.9))
    assert far(hued, x) > 0.01
    assert far((hued * luma).sum(1), plain[:, 0]) < 1e-9  # other colours, as bright as before
    loud = {"brightness": 0.1, "contrast": 0.9, "saturation": 0.1, "hue": 0.9}
    assert far(contrastive_views(x, middle(3, jittered=0.9, **loud)), x) < 1e-12  # one in five keeps its colours
    assert far(contrastive_views(x, middle(3, jittered=0.7, **loud)), x) > 0.05
    one = contrastive_views(x[:, :1], middle(3, hue=0.9, saturation=0.1, gray=0.0))
    assert far(one, x[:, :1]) < 1e-12  # one channel has no colours


def test_a_part_is_a_part() -> None:
    """A ramp shows which columns and rows are in view: all of the area that was drawn, within the image."""
    ramp = (torch.arange(64, dtype=torch.float64) + 0.5) / 64
    x = torch.stack([ramp.expand(64, 64), ramp[:, None].expand(64, 64)])[:, None]  # columns, rows
    for numbers in numbers_of(40).unbind():
        n = middle(2)
        n[:, :4] = numbers[:4]
        columns, rows = contrastive_views(x, n)[:, 0]
        width, height = (float(v.max() - v.min()) * 64 / 63 for v in (columns, rows))
        share = 0.2 + 0.8 * float(numbers[0])
        longest = min(math.log(4 / 3), -math.log(share))  # neither side is longer than the image
        shape = math.exp((2 * float(numbers[1]) - 1) * longest)
        assert width == pytest.approx(math.sqrt(share * shape), abs=0.02)
        assert height == pytest.approx(math.sqrt(share / shape), abs=0.02)
        left = float(columns.min()) - width / 128
        assert left == pytest.approx(float(numbers[3]) * (1 - width), abs=0.02)
