"""MEMO, LP-FT and FedTHE+ against copies of a module and ``torch.optim.SGD``, on the same views."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedshift.blocks import augmix
from fedshift.blocks import per_sample_tuning as episodic
from fedshift.blocks.per_sample_tuning import tuned_logits, tuned_on_views
from fedshift.core.arch import Arch
from fedshift.core.compatibility import missing_for_method
from fedshift.core.registry import ADAPTERS, METHODS
from fedshift.core.tree import Tensors, Tree, to
from fedshift.engines.base import Compute
from fedshift.engines.reference import draws_of
from fedshift.methods.fedavg import FedAvg
from tests.adapters.test_adapters import CLASSES, SHAPE, federated, normalised
from tests.adapters.test_adapters import trained as network
from tests.conftest import refusal, tiny_arch, tiny_train

DOUBLE = Compute(dtype=torch.float64)
MODELS = ("plain", "mlp", "cnn")  # an MLP without and with BatchNorm, a CNN with it; MLPs are tuned side by side
COUNT = 5


def on(arch: Arch, name: str, **options: Any) -> Any:
    return ADAPTERS[name].make(arch=arch, predict_with=FedAvg(arch=arch, train=tiny_train()).predict, **options)


def pictures(count: int = COUNT, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(count, *SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def marginal(p: Tensor) -> Tensor:
    """Entropy of the mean prediction."""
    mean = p.mean(0)
    return -(mean * mean.log()).sum()


def shown(adapter: Any, x: Tensor, ids: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """What the adapter draws for these samples, and the views made of it: ``[n, steps, views, ...]``."""
    draws = draws_of(adapter, ids, 3, Compute(dtype=x.dtype))
    numbers = draws["views"]
    return draws, augmix.views(x, numbers.flatten(1, 2), flip=adapter.flip).unflatten(1, numbers.shape[1:3])


def by_copies(module: nn.Module, x: Tensor, views: Tensor, stages: Sequence[str], lr: float) -> Tensor:
    """MEMO as one writes it: copy, a few steps, predict, throw away."""
    answers = []
    for image, own in zip(x, views, strict=True):
        copied = copy.deepcopy(module).eval()
        for step, stage in enumerate(stages):
            chosen = copied.head if stage == "head" else copied
            optimiser = torch.optim.SGD(chosen.parameters(), lr=lr)
            copied.zero_grad()
            marginal(copied(normalised(own[step])).softmax(1)).backward()
            optimiser.step()
        with torch.no_grad():
            answers.append(copied(normalised(image[None]))[0])
    return torch.stack(answers)


def far(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max())


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("model", MODELS)
def test_memo_is_copies_and_sgd(model: str, steps: int) -> None:
    arch, module, tree = network(model)
    adapter = on(arch, "memo", views=4, steps=steps, lr=0.2)
    x, ids = pictures(), torch.arange(10, 10 + COUNT)
    draws, views = shown(adapter, x, ids)
    assert views.shape == (COUNT, steps, 4, *SHAPE)
    with torch.no_grad():
        output, state = adapter.predict(adapter.init(tree), x, draws)
    assert far(output.logits, by_copies(module, x, views, ["all"] * steps, 0.2)) < 1e-10
    assert far(output.logits, arch(tree["model"], x).logits) > 1e-3  # there was something to tune
    assert state["model"] is tree["model"]
    assert not output.logits.requires_grad


@pytest.mark.parametrize("model", MODELS)
def test_lp_ft_moves_the_head_first_and_then_everything(model: str) -> None:
    arch, module, tree = network(model)
    adapter = on(arch, "lp-ft", views=4, head_steps=2, steps=1, lr=0.2)
    x, ids = pictures(), torch.arange(COUNT)
    draws, views = shown(adapter, x, ids)
    assert views.shape[1] == 3
    output, _ = adapter.predict(adapter.init(tree), x, draws)
    assert far(output.logits, by_copies(module, x, views, ["head", "head", "all"], 0.2)) < 1e-10
    assert far(output.logits, by_copies(module, x, views, ["all", "head", "head"], 0.2)) > 1e-5  # the order matters
    head_only = on(arch, "lp-ft", views=4, head_steps=2, steps=0, lr=0.2)
    draws, views = shown(head_only, x, ids)
    output, _ = head_only.predict(head_only.init(tree), x, draws)
    assert far(output.logits, by_copies(module, x, views, ["head", "head"], 0.2)) < 1e-10
    none = on(arch, "lp-ft", views=4, head_steps=0, steps=2, lr=0.2)
    memo = on(arch, "memo", views=4, steps=2, lr=0.2)
    draws, _ = shown(none, x, ids)
    assert torch.equal(
        none.predict(none.init(tree), x, draws)[0].logits, memo.predict(memo.init(tree), x, draws)[0].logits
    )


def two_heads(arch: Arch, tree: Tree) -> Tree:
    generator = torch.Generator().manual_seed(5)
    size = arch.feature_size
    return {
        **tree,
        "generic": {
            name: torch.randn(tree["model"][name].shape, generator=generator, dtype=torch.float64)
            for name in sorted(arch.head)
        },
        "descriptors": {name: torch.rand(size, generator=generator).double() for name in ("global", "local")},
    }


@pytest.mark.parametrize("weight", [None, 0.0, 0.3, 1.0])
@pytest.mark.parametrize("model", MODELS)
def test_fedthe_plus_tunes_extractor_and_both_heads_with_the_weight_held_fixed(
    model: str, weight: float | None
) -> None:
    arch, module, tree = network(model)
    tree = two_heads(arch, tree)
    adapter = on(arch, "the-plus", views=4, tune_steps=2, tune_lr=0.2, e=weight)
    x, ids = pictures(), torch.arange(COUNT)
    draws, views = shown(adapter, x, ids)
    with torch.no_grad():
        output, _ = adapter.predict(adapter.init(tree), x, draws)
    plain = on(arch, "the", e=weight)
    untuned, _ = plain.predict(plain.init(tree), x, {})
    assert torch.equal(output.aux["e"], untuned.aux["e"])
    expected, moved = [], []
    for image, own, e in zip(x, views, untuned.aux["e"], strict=True):
        copied = copy.deepcopy(module).eval()
        generic = nn.Linear(arch.feature_size, CLASSES).double()
        generic.load_state_dict({name.removeprefix("head."): leaf.clone() for name, leaf in tree["generic"].items()})
        parameters = [*copied.parameters(), *generic.parameters()]
        optimiser = torch.optim.SGD(parameters, lr=0.2)

        def mixed(pixels: Tensor, net: nn.Module = copied, other: nn.Module = generic, e: Tensor = e) -> Tensor:
            h = net.body(normalised(pixels))
            return e * other(h) + (1 - e) * net.head(h)

        for step in range(2):
            optimiser.zero_grad()
            marginal(mixed(own[step]).softmax(1)).backward()
            optimiser.step()
        with torch.no_grad():
            expected.append(mixed(image[None])[0])
        moved.append(far(generic.weight.detach(), tree["generic"]["head.weight"]) > 1e-6)
    assert far(output.logits, torch.stack(expected)) < 1e-10
    assert far(output.logits, untuned.logits) > 1e-3
    assert all(moved) is (weight != 0.0)  # a head that does not count is not moved


# ---- side by side or one by one -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_samples_tuned_side_by_side_are_samples_tuned_one_by_one(
    kind: str, norm: bool, dtype: torch.dtype, tolerance: float
) -> None:
    arch = tiny_arch(kind, norm)
    tensors = to({"model": arch.init(1)}, dtype=dtype)["model"]
    x, views = pictures(6, dtype=dtype), pictures(6 * 2 * 3, seed=1, dtype=dtype).unflatten(0, (6, 2, 3))

    def logits(live: Tensors, images: Tensor, e: Tensor) -> Tensor:
        return (1 + e) * arch(live, images).logits

    stages = [arch.head, arch.trainable]
    condition = torch.linspace(0, 2, 6, dtype=dtype)
    before = {name: leaf.clone() for name, leaf in tensors.items()}
    with torch.no_grad():
        together, alone = (
            tuned_logits(logits, tensors, x, views, condition, steps=stages, lr=0.1, together=t) for t in (True, False)
        )
    assert far(together, alone) < tolerance
    assert together.dtype == dtype
    assert all(torch.equal(tensors[name], leaf) for name, leaf in before.items())
    for n in range(6):  # everybody starts from the same weights: nobody's neighbours matter
        one = tuned_logits(
            logits, tensors, x[n : n + 1], views[n : n + 1], condition[n : n + 1], steps=stages, lr=0.1, together=False
        )
        assert far(one, alone[n : n + 1]) < tolerance


@pytest.mark.parametrize("name", ["memo", "lp-ft", "the-plus"])
def test_the_adapters_choose_and_both_choices_are_the_same(name: str) -> None:
    """On a CPU an MLP's samples go side by side, a CNN's one by one; declaring the opposite changes nothing."""
    for kind in ("mlp", "cnn"):
        arch = tiny_arch(kind, norm=True)
        tree = two_heads(arch, to({"model": arch.init(2)}, dtype=torch.float64))
        other = copy.copy(arch)
        object.__setattr__(other, "has_convolution", not arch.has_convolution)
        rate = {"tune_lr": 0.2} if name == "the-plus" else {"lr": 0.2}
        results = []
        for each in (arch, other):
            adapter = on(each, name, views=3, **rate)
            draws, _ = shown(adapter, pictures(), torch.arange(COUNT))
            results.append(adapter.predict(adapter.init(tree), pictures(), draws)[0].logits)
        assert far(*results) < 1e-10


def test_blocks_that_fit_into_memory_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    arch = tiny_arch("mlp")
    tensors = to({"model": arch.init(1)}, dtype=torch.float64)["model"]
    x = pictures(7)
    numbers = torch.rand(7, 2, 3, augmix.NUMBERS, generator=torch.Generator().manual_seed(0))

    def tuned(together: bool) -> Tensor:
        def logits(live: Tensors, images: Tensor, e: Tensor) -> Tensor:
            return arch(live, images).logits

        nothing = torch.zeros(7, dtype=torch.float64)
        steps = [arch.trainable] * 2
        return tuned_on_views(
            logits, tensors, x, numbers, nothing, steps=steps, lr=0.1, flip=True, convolutional=not together
        )

    whole = tuned(True)
    for size in (1, 3, 7, 100):
        monkeypatch.setattr(episodic, "at_once", lambda *_, size=size: size)
        assert far(tuned(True), whole) < 1e-12
        assert far(tuned(False), whole) < 1e-12
    monkeypatch.undo()
    assert episodic.at_once({"w": torch.zeros(1).expand(10**9)}, x, 32) == 1  # never nobody


def test_a_samples_views_are_its_own_and_new_in_every_step() -> None:
    arch, _, tree = network("cnn")
    adapter = on(arch, "memo", views=4, steps=2, lr=0.2)
    x, ids = pictures(), torch.arange(COUNT)
    draws, views = shown(adapter, x, ids)
    assert far(views[:, 0], views[:, 1]) > 0.1
    whole, _ = adapter.predict(adapter.init(tree), x, draws)
    order = torch.tensor([3, 0, 4, 1, 2])
    mixed_draws, _ = shown(adapter, x[order], ids[order])
    mixed, _ = adapter.predict(adapter.init(tree), x[order], mixed_draws)
    assert far(mixed.logits, whole.logits[order]) < 1e-10
    elsewhere, _ = shown(adapter, x, ids + 100)
    assert far(adapter.predict(adapter.init(tree), x, elsewhere)[0].logits, whole.logits) > 1e-4


@pytest.mark.parametrize("options", [{"lr": 0.0}, {"steps": 0}])
def test_no_step_is_no_adaptation(options: dict[str, Any]) -> None:
    arch, _, tree = network("cnn")
    adapter = on(arch, "memo", views=3, **options)
    draws, _ = shown(adapter, pictures(), torch.arange(COUNT))
    assert (
        far(adapter.predict(adapter.init(tree), pictures(), draws)[0].logits, arch(tree["model"], pictures()).logits)
        < 1e-12
    )


def test_the_marginal_entropy_falls_on_the_views_it_is_taken_on() -> None:
    arch, _, tree = network("cnn")
    views = pictures(8, seed=4)[None, None].expand(1, 6, *[-1] * 4)

    def logits(live: Tensors, images: Tensor, e: Tensor) -> Tensor:
        return arch(live, images).logits

    def after(steps: int) -> float:
        answers = [
            tuned_logits(
                logits,
                tree["model"],
                image[None],
                views,
                torch.zeros(1),
                steps=[arch.trainable] * steps,
                lr=0.05,
                together=False,
            )
            for image in views[0, 0]
        ]
        return float(marginal(torch.cat(answers).softmax(1)))

    falling = [after(steps) for steps in (0, 1, 3, 6)]
    assert falling == sorted(falling, reverse=True)
    assert falling[0] - falling[-1] > 1e-3


@pytest.mark.parametrize("name", [name for name in METHODS if "model" in METHODS[name].make.provides])
def test_linear_probing_reaches_the_head_that_predicts_whatever_the_method(name: str) -> None:
    """A valid pair must do something: LP-FT with head steps only moves every method's predictions."""
    cls = METHODS[name].make
    assert missing_for_method(name, cls.requires, cls.build(tiny_arch("mlp", norm=True), {})) is None
    federation, deployed = federated(name)
    method = federation.setup.method
    tree = next(iter(deployed.values()))
    if "lam" in tree.get("memory", {}):  # the part of kNN-Per that is a head
        tree = {**tree, "memory": {**tree["memory"], "lam": torch.zeros_like(tree["memory"]["lam"])}}
    adapter = ADAPTERS["lp-ft"].make(
        arch=method.arch, predict_with=method.predict, views=3, head_steps=1, steps=0, lr=1.0
    )
    draws, _ = shown(adapter, pictures(), torch.arange(COUNT))
    tuned, _ = adapter.predict(adapter.init(tree), pictures(), draws)
    assert far(tuned.logits, method.predict(tree, pictures()).logits) > 1e-4


@pytest.mark.parametrize(("name", "options"), [
    ("memo", {"views": 0}), ("memo", {"steps": -1}), ("memo", {"lr": -1.0}), ("lp-ft", {"head_steps": -1}),
    ("the-plus", {"views": 0}), ("the-plus", {"tune_steps": -1}), ("the-plus", {"tune_lr": -0.1}),
    ("the-plus", {"alpha": 2.0}),
])  # fmt: skip
def test_settings_that_cannot_be_meant_are_refused(name: str, options: dict[str, Any]) -> None:
    sentence = refusal(ADAPTERS, "adapter", name, options, arch=tiny_arch("mlp"), predict_with=None)
    assert sentence.startswith(f"adapter {name!r}: {next(iter(options)).replace('_', '-')} must")
