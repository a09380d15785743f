"""Erasers against layers written by hand, where they are put, and the distance of their statistics from the shared ones."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedshift.core.arch import Arch
from fedshift.core.tree import Tensors
from fedshift.errors import UserError
from fedshift.models.alexnet import AlexNet
from fedshift.models.cnn import CNN
from fedshift.models.mlp import MLP
from fedshift.models.resnet import ResNet18, ResNet50
from fedshift.models.vit import ViT
from fedshift.systems.fdse import eraser as erasure
from fedshift.systems.fdse.eraser import Eraser, entries, fresh_tracking, inconsistency
from fedshift.systems.fdse.surgery import with_erasers

EPS = 1e-5
WIDTHS = (64, 192, 384, 256, 256, 1024, 1024)  # of AlexNet's blocks


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_a_past(module: nn.Module, seed: int = 0) -> nn.Module:
    """All parameters random, all statistics somewhere, in double precision."""
    module = module.double()
    with torch.no_grad():
        for number, (name, leaf) in enumerate([*module.named_parameters(), *module.named_buffers()]):
            if name.endswith("var"):
                leaf.copy_(0.5 + draw(*leaf.shape, seed=seed + number).abs())
            elif leaf.is_floating_point() and not name.endswith("steps"):
                leaf.copy_(draw(*leaf.shape, seed=seed + number))
    return module


def block(kind: str, wide: int, expansion: int = 2, relu: bool = False, bias: bool = False) -> Eraser:
    layer: nn.Conv2d | nn.Linear
    if kind == "conv":
        layer, norm = nn.Conv2d(4, wide, 5, 2, 1), nn.BatchNorm2d(wide)
    else:
        layer, norm = nn.Linear(4, wide), nn.BatchNorm1d(wide)
    made = with_a_past(Eraser(layer, norm, expansion, 3, relu, bias))
    assert isinstance(made, Eraser)
    return made


def inputs(kind: str, count: int = 6, seed: int = 50) -> Tensor:
    shape = {"conv": (count, 4, 9, 8), "linear": (count, 4), "tokens": (count, 3, 4)}[kind]
    return draw(*shape, seed=seed)


def tensors_of(module: nn.Module) -> Tensors:
    return {name: leaf.detach().clone() for name, leaf in module.state_dict().items()}


def by_hand(p: Tensors, x: Tensor, wide: int, training: bool, relu: bool = False) -> tuple[Tensor, Tensor]:
    """What enters the outer normalisation, and the output."""
    if x.dim() == 3:
        parts = [by_hand(p, x.reshape(-1, x.shape[-1]), wide, training, relu)]
        return parts[0][0], parts[0][1].reshape(*x.shape[:2], wide)
    flat = x.dim() == 2
    if flat:
        x = x[:, :, None, None]
    weight, bias = p["dfe.weight"], p.get("dfe.bias")
    u = F.conv2d(x, weight[:, :, None, None] if flat else weight, bias, *((1, 0) if flat else (2, 1)))

    def norm(z: Tensor, name: str) -> Tensor:
        statistics = [p[f"{name}.{which}"].clone() for which in ("running_mean", "running_var")]
        return F.batch_norm(z, *statistics, p[f"{name}.weight"], p[f"{name}.bias"], training, 0.1, EPS)

    u = norm(u, "dse_norm")
    u = u.relu() if relu else u
    v = F.conv2d(u, p["dse.weight"], padding=0 if flat else 1, groups=u.shape[1])
    both = torch.cat([u, v], 1)[:, :wide]
    if "bias" in p:
        both = both + p["bias"][:, None, None]
    out = norm(both, "dfe_norm")
    return (both.flatten(1), out.flatten(1)) if flat else (both, out)


# ---- one block ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("wide", [1, 2, 3, 5, 6, 7, 8])
@pytest.mark.parametrize("expansion", [2, 3, 4])
@pytest.mark.parametrize("kind", ["conv", "linear", "tokens"])
def test_a_block_has_as_many_outputs_as_the_layer_had(kind: str, expansion: int, wide: int) -> None:
    eraser = block("conv" if kind == "conv" else "linear", wide, expansion)
    half = math.ceil(wide / expansion)
    assert eraser.dfe.weight.shape[0] == half
    assert eraser.dse.weight.shape == (half * (expansion - 1), 1, *([3, 3] if kind == "conv" else [1, 1]))
    assert eraser.dse_norm.weight.shape == (half,)
    shape = {"conv": (6, wide, 4, 3), "linear": (6, wide), "tokens": (6, 3, wide)}[kind]
    for mode in (True, False):
        assert eraser.train(mode)(inputs(kind)).shape == shape


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("wide", "expansion"), [(6, 2), (5, 2), (7, 3)])
@pytest.mark.parametrize("kind", ["conv", "linear", "tokens"])
def test_a_block_by_hand(kind: str, wide: int, expansion: int, bias: bool, relu: bool, training: bool) -> None:
    eraser = block("conv" if kind == "conv" else "linear", wide, expansion, relu, bias).train(training)
    before, x = tensors_of(eraser), inputs(kind)
    assert ("bias" in before, "dfe.bias" in before) == (bias, bias)
    both, expected = by_hand(before, x, wide, training, relu)
    assert torch.allclose(eraser(x), expected, rtol=0, atol=1e-12)
    after = tensors_of(eraser)
    if not training:
        assert all(torch.equal(leaf, after[name]) for name, leaf in before.items())
        return
    over = [0, *range(2, both.dim())]
    assert torch.allclose(after["tracked_mean"], both.mean(over))
    assert torch.allclose(after["tracked_var"], both.var(over, correction=1))
    for which, now in (("running_mean", both.mean(over)), ("running_var", both.var(over, correction=1))):
        assert torch.allclose(after[f"dfe_norm.{which}"], 0.9 * before[f"dfe_norm.{which}"] + 0.1 * now)


def test_without_a_normalisation_after_it_a_block_brings_its_own() -> None:
    eraser = Eraser(nn.Linear(4, 5), None, 2, 3, False, False)
    assert isinstance(eraser.dfe_norm, nn.BatchNorm1d)
    assert eraser.dfe_norm.num_features == 5
    assert eraser(torch.rand(3, 2, 4)).shape == (3, 2, 5)


def test_the_layer_keeps_its_geometry() -> None:
    layer = nn.Conv2d(3, 8, (3, 5), (2, 1), (4, 2), (1, 2), bias=False, padding_mode="reflect")
    narrow = Eraser(layer, nn.BatchNorm2d(8), 2, 3, False, True).dfe
    assert isinstance(narrow, nn.Conv2d)
    for name in ("in_channels", "kernel_size", "stride", "padding", "dilation", "padding_mode", "groups"):
        assert getattr(narrow, name) == getattr(layer, name), name
    assert narrow.out_channels == 4
    assert narrow.bias is None


def test_a_grouped_convolution_is_refused_in_a_sentence() -> None:
    with pytest.raises(UserError, match="grouped convolution"):
        Eraser(nn.Conv2d(4, 8, 3, groups=2), nn.BatchNorm2d(8), 2, 3, False, False)


# ---- tracked statistics -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["conv", "linear", "tokens"])
def test_tracked_statistics_start_with_the_first_batch_and_then_take_a_tenth(kind: str) -> None:
    wide = 5
    eraser = block("conv" if kind == "conv" else "linear", wide).train()
    tensors = tensors_of(eraser)
    mean, var = None, None
    for number in range(4):
        x = inputs(kind, seed=100 + number)
        both, _ = by_hand(tensors, x, wide, True)
        over = [0, *range(2, both.dim())]
        if mean is None or var is None:
            mean, var = both.mean(over), both.var(over)
        else:
            mean, var = 0.9 * mean + 0.1 * both.mean(over), 0.9 * var + 0.1 * both.var(over)
        with torch.no_grad():
            eraser(x)
        assert torch.allclose(eraser.tracked_mean, mean, rtol=0, atol=1e-12), number
        assert torch.allclose(eraser.tracked_var, var, rtol=0, atol=1e-12), number
        assert float(eraser.tracked_steps) == number + 1
    with torch.no_grad():
        eraser.tracked_steps.zero_()
        eraser(x)  # begins again, whatever was there
        assert torch.allclose(eraser.tracked_mean, both.mean(over), rtol=0, atol=1e-12)
        assert torch.allclose(eraser.tracked_var, both.var(over), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["conv", "linear", "tokens"])
@pytest.mark.parametrize("steps", [0.0, 1.0, 5.0])
def test_gradient_flows_through_the_newest_batch_only(kind: str, steps: float) -> None:
    wide = 5
    eraser = block("conv" if kind == "conv" else "linear", wide).train()
    tensors = tensors_of(eraser)
    tensors["tracked_steps"] = torch.tensor(steps, dtype=torch.float64)
    own = [name for name, _ in eraser.named_parameters()]
    x, old = inputs(kind), 0.9 if steps else 0.0

    def gradients(far: Callable[[Tensors], tuple[Tensor, Tensor]]) -> Tensors:
        live = {name: tensors[name].clone().requires_grad_() for name in own}
        mean, var = far({**{n: t.clone() for n, t in tensors.items()}, **live})
        value = (mean * draw(wide, seed=7)).sum() + (var * draw(wide, seed=8)).sum()
        found = torch.autograd.grad(value, list(live.values()), allow_unused=True)
        return {n: torch.zeros_like(live[n]) if g is None else g for n, g in zip(own, found, strict=True)}

    def module(all_of_them: Tensors) -> tuple[Tensor, Tensor]:
        functional_call(eraser, all_of_them, (x,))
        return all_of_them["tracked_mean"], all_of_them["tracked_var"]

    def hand(all_of_them: Tensors) -> tuple[Tensor, Tensor]:
        both, _ = by_hand(all_of_them, x, wide, True)
        over = [0, *range(2, both.dim())]
        mean = old * tensors["tracked_mean"] + (1 - old) * both.mean(over)
        return mean, old * tensors["tracked_var"] + (1 - old) * both.var(over)

    found, expected = gradients(module), gradients(hand)
    for name in own:
        assert torch.allclose(found[name], expected[name], atol=1e-12), name
    for name in ("dse.weight", "dse_norm.weight", "dse_norm.bias"):
        assert found[name].abs().max() > 1e-6, name
    # behind BN_DSE, what is as small as one number has the statistics of its affine part, whatever comes in
    assert (found["dfe.weight"].abs().max() > 1e-5) == (kind == "conv")
    for name in ("dfe_norm.weight", "dfe_norm.bias"):
        assert not found[name].any(), name


# ---- putting them in ----------------------------------------------------------------------------------------------------
@cache
def backbone() -> Arch:
    return Arch.of(lambda: AlexNet().make((3, 64, 64), 10), (3, 64, 64), "alexnet")


@cache
def alexnet(bias: bool) -> tuple[Arch, Tensors]:
    arch = with_erasers(backbone(), bias=bias)
    return arch, arch.init(0)


def count(tensors: Tensors, names: Iterable[str]) -> int:
    return sum(tensors[name].numel() for name in names)


def test_alexnet_has_the_published_size() -> None:
    arch, tensors = alexnet(bias=True)
    assert count(tensors, arch.parameters) == 6_508_010
    assert count(tensors, [name for name in arch.parameters if ".dse." in name]) == 6_208
    assert count(tensors, [name for name in arch.parameters if ".dse_norm." in name]) == 3_200
    stored = {name: leaf for name, leaf in tensors.items() if ".tracked_" not in name}
    assert round(sum(leaf.numel() * leaf.element_size() for leaf in stored.values()) / 2**20, 2) == 24.86
    erasers = sum(WIDTHS) // 2  # with a bias in every eraser it would be the paper's 24.87
    whole = sum(leaf.numel() * leaf.element_size() for leaf in stored.values())
    assert round((whole + 4 * erasers) / 2**20, 2) == 24.87
    plain, fewer = alexnet(bias=False)
    assert count(fewer, plain.parameters) == 6_503_210
    least = sum(leaf.numel() * leaf.element_size() for name, leaf in fewer.items() if ".tracked_" not in name)
    assert round(least / 2**20, 2) == 24.84
    biases = {name for name in arch.parameters if name not in plain.parameters}
    assert count(tensors, biases) == sum(WIDTHS) + sum(WIDTHS) // 2
    assert set(plain.parameters) | biases == set(arch.parameters)


def test_alexnet_has_seven_blocks_of_the_layers_width() -> None:
    arch, tensors = alexnet(bias=False)
    blocks = arch.layers(Eraser)
    assert len(blocks) == 7
    assert tuple(len(tensors[f"{name}.tracked_mean"]) for name in blocks) == WIDTHS
    assert [tuple(tensors[f"{name}.dse.weight"].shape[2:]) for name in blocks] == [(3, 3)] * 5 + [(1, 1)] * 2
    assert arch.head == {"head.weight", "head.bias"}
    assert arch(tensors, torch.rand(2, 3, 64, 64)).logits.shape == (2, 10)


def changed(network: Callable[[], nn.Module], shape: tuple[int, int, int], **how: Any) -> tuple[Arch, Arch, Tensors]:
    before = Arch.of(network, shape, "net")
    after = with_erasers(before, **how)
    return before, after, after.init(0)


def untouched(before: Arch, after: Arch, replaced: dict[str, str]) -> None:
    """All but the replaced layers and their norms is there as it was."""
    old, new = before.init(0), after.init(0)
    gone = {name for name in old if name.startswith(tuple(f"{n}." for pair in replaced.items() for n in pair if n))}
    assert {name: leaf.shape for name, leaf in old.items() if name not in gone} == {
        name: leaf.shape for name, leaf in new.items() if not name.startswith(tuple(f"{n}." for n in replaced))
    }
    assert after.layers(Eraser) == tuple(replaced)
    assert (after.name, after.input_shape, after.classes, after.head) == (
        before.name,
        before.input_shape,
        before.classes,
        before.head,
    )


def test_the_two_layer_cnn() -> None:
    before, after, tensors = changed(lambda: CNN(width=3, hidden=6, norm=True).make((3, 8, 8), 4), (3, 8, 8))
    untouched(before, after, {"body.0": "body.1", "body.4": "body.5"})
    assert len(tensors["body.0.tracked_mean"]) == 3
    assert after(tensors, torch.rand(5, 3, 8, 8), True).logits.shape == (5, 4)


@pytest.mark.parametrize(
    ("kind", "depths", "last"),
    [
        (ResNet18, (2, 2, 2, 2), 2),
        pytest.param(ResNet50, (3, 4, 6, 3), 3, marks=pytest.mark.grid),
    ],
)
def test_residual_networks_change_the_last_layer_of_every_block(kind: Any, depths: tuple[int, ...], last: int) -> None:
    before, after, tensors = changed(lambda: kind(stem="cifar").make((3, 8, 8), 10), (3, 8, 8))
    names = [f"body.layer{i + 1}.{j}" for i, depth in enumerate(depths) for j in range(depth)]
    untouched(before, after, {f"{name}.conv{last}": f"{name}.bn{last}" for name in names})
    assert "body.layer2.0.downsample.1.running_mean" in tensors
    output = after(tensors, torch.rand(2, 3, 8, 8), True)
    assert output.logits.shape == (2, 10)
    assert all(float(output.buffers[f"{name}.conv{last}.tracked_steps"]) == 1 for name in names)


def test_a_residual_network_with_group_norm_stays_as_it_is() -> None:
    before, after, _ = changed(lambda: ResNet18(stem="cifar", groups=2).make((3, 8, 8), 10), (3, 8, 8))
    untouched(before, after, {})
    assert after.layers(Eraser) == ()


def test_transformers_change_the_second_layer_of_the_feed_forward() -> None:
    before, after, tensors = changed(lambda: ViT(size="tiny").make((3, 16, 16), 10), (3, 16, 16))
    untouched(before, after, {f"body.blocks.{i}.mlp.fc2": "" for i in range(12)})
    assert tensors["body.blocks.3.mlp.fc2.dfe.weight"].shape == (96, 768)
    assert tensors["body.blocks.3.mlp.fc2.dfe_norm.running_mean"].shape == (192,)
    output = after(tensors, torch.rand(3, 3, 16, 16), True)
    assert output.logits.shape == (3, 10)
    mean = output.buffers["body.blocks.0.mlp.fc2.tracked_mean"]
    assert torch.allclose(0.1 * mean, output.buffers["body.blocks.0.mlp.fc2.dfe_norm.running_mean"], atol=1e-6)


def test_a_users_own_network() -> None:
    def net() -> nn.Module:
        inner = nn.Sequential(nn.ReLU(), nn.Conv2d(5, 6, 1), nn.BatchNorm2d(6))
        first = OrderedDict(a=nn.Conv2d(1, 5, 3, bias=False), b=nn.BatchNorm2d(5), c=inner, d=nn.Conv2d(6, 2, 1))
        return nn.Sequential(nn.Sequential(first), nn.Flatten(), nn.Linear(8, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))

    before, after, tensors = changed(net, (1, 4, 4), expansion=3)
    untouched(before, after, {"0.a": "0.b", "0.c.1": "0.c.2", "2": "3"})
    assert [len(tensors[f"{name}.dse_norm.weight"]) for name in after.layers(Eraser)] == [2, 2, 3]
    assert after(tensors, torch.rand(4, 1, 4, 4), True).logits.shape == (4, 3)


def test_a_network_given_as_a_module_is_left_alone() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    kept = tensors_of(module)
    arch = with_erasers(Arch.of(module, (1, 2, 2)))
    assert isinstance(module[1], nn.Linear)
    assert isinstance(module[2], nn.BatchNorm1d)
    arch(arch.init(0), torch.rand(3, 1, 2, 2), True)
    assert all(torch.equal(kept[name], leaf) for name, leaf in module.state_dict().items())
    assert torch.equal(arch.init(0)["4.weight"], module[4].weight)  # what is not replaced keeps its weights
    assert torch.equal(arch.init(3)["1.dse.weight"], arch.init(3)["1.dse.weight"])
    assert not torch.equal(arch.init(3)["1.dse.weight"], arch.init(4)["1.dse.weight"])


def test_the_network_itself_may_be_a_block() -> None:
    class Net(nn.Module):
        last = ("conv", "bn")

        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn, self.out = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(16, 2)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.out(self.bn(self.conv(x)).relu().flatten(1))
            return logits

    before, after, _ = changed(Net, (1, 4, 4))
    untouched(before, after, {"conv": "bn"})
    assert after.layers(Eraser) == ("conv",)


def test_a_network_without_batch_norm_stays_as_it_is() -> None:
    for made in (CNN(width=2, hidden=6), MLP(hidden=(6,))):
        before, after, tensors = changed(lambda made=made: made.make((3, 8, 8), 4), (3, 8, 8))  # type: ignore[misc]
        untouched(before, after, {})
        assert all(torch.equal(leaf, tensors[name]) for name, leaf in before.init(0).items())


# ---- the distance from everybody's statistics ---------------------------------------------------------------------------
BLOCKS = ("a", "b.c", "d", "e")


def statistics(seed: int, kind: str = "seen") -> Tensors:
    names = erasure.TRACKED if kind == "seen" else erasure.ANCHORS
    made: Tensors = {}
    for number, name in enumerate(BLOCKS):
        wide = 2 + number
        made[f"{name}.{names[0]}"] = draw(wide, seed=seed + number)
        made[f"{name}.{names[1]}"] = 0.1 + draw(wide, seed=seed + number + 20).abs()
    return made


def reference(seen: Tensors, anchor: Tensors, beta: float, first: int = 1) -> float:
    """Number by number; layers are counted from ``first``."""
    raw = [math.exp(beta * (first + i)) for i in range(len(BLOCKS))]
    total = 0.0
    for name, weight in zip(BLOCKS, raw, strict=True):
        m, v = (seen[f"{name}.{which}"].tolist() for which in ("tracked_mean", "tracked_var"))
        mu, var = (anchor[f"{name}.dfe_norm.{which}"].tolist() for which in ("running_mean", "running_var"))
        first_part = sum((a - b) ** 2 for a, b in zip(m, mu, strict=True)) / len(m)
        second = ((sum(abs(a) for a in v) - sum(abs(b) for b in var)) / len(v)) ** 2
        total += weight / sum(raw) * (first_part + second)
    return total


@pytest.mark.parametrize("beta", [0.0, 0.001, 0.05, 1.0, -2.0])
def test_the_distance_number_by_number(beta: float) -> None:
    seen, anchor = statistics(0), statistics(100, "anchor")
    found = float(inconsistency(seen, anchor, BLOCKS, beta))
    for first in (0, 1, 5):
        assert found == pytest.approx(reference(seen, anchor, beta, first), rel=1e-12)


def test_the_distance_is_zero_exactly_when_means_and_mean_variances_are_equal() -> None:
    anchor = statistics(100, "anchor")
    same = {
        f"{name}.{ours}": anchor[f"{name}.{theirs}"].clone()
        for name in BLOCKS
        for ours, theirs in zip(erasure.TRACKED, erasure.ANCHORS, strict=True)
    }
    assert float(inconsistency(same, anchor, BLOCKS, 0.3)) == 0.0
    turned = {name: leaf.roll(1) if name.endswith("var") else leaf for name, leaf in same.items()}
    assert float(inconsistency(turned, anchor, BLOCKS, 0.3)) < 1e-30  # variances count by their mean
    for name, leaf in same.items():
        other = leaf.clone()
        other[0] += 0.1
        assert float(inconsistency({**same, name: other}, anchor, BLOCKS, 0.3)) > 1e-6, name


def weights(beta: float) -> list[float]:
    """What every block counts for, found from outside."""
    zero = {name: torch.zeros_like(leaf) for name, leaf in statistics(0).items()}
    anchor = {name: torch.zeros_like(leaf) for name, leaf in statistics(0, "anchor").items()}
    ones = [{**zero, f"{name}.tracked_mean": torch.ones_like(zero[f"{name}.tracked_mean"])} for name in BLOCKS]
    return [float(inconsistency(one, anchor, BLOCKS, beta)) for one in ones]


@pytest.mark.parametrize("beta", [-1e4, -50.0, -1.0, 0.0, 0.001, 0.5, 50.0, 1e4, 1e300])
def test_weights_of_blocks(beta: float) -> None:
    found = weights(beta)
    assert all(math.isfinite(weight) for weight in found)
    assert sum(found) == pytest.approx(1, abs=1e-12)
    assert found == sorted(found, reverse=beta < 0)
    if beta == 0:
        assert found == pytest.approx([0.25] * 4, abs=1e-15)
    if abs(beta) >= 50:
        assert found[-1 if beta > 0 else 0] == pytest.approx(1)
    elif beta:
        assert [b / a for a, b in pairwise(found)] == pytest.approx([math.exp(beta)] * 3)


def test_tracking_begins_anew_or_from_the_shared_statistics() -> None:
    model = {**statistics(0), **statistics(100, "anchor")}
    for name in BLOCKS:
        model[f"{name}.tracked_steps"] = torch.tensor(9.0, dtype=torch.float64)
    anew, received = (fresh_tracking(model, BLOCKS, flag) for flag in (False, True))
    names = entries(BLOCKS, (*erasure.TRACKED, "tracked_steps"))
    assert set(anew) == set(received) == names
    assert not any(leaf.any() for leaf in anew.values())
    for name in BLOCKS:
        assert float(received[f"{name}.tracked_steps"]) > 0
        assert torch.equal(received[f"{name}.tracked_mean"], model[f"{name}.dfe_norm.running_mean"])
        assert torch.equal(received[f"{name}.tracked_var"], model[f"{name}.dfe_norm.running_var"])
        assert received[f"{name}.tracked_var"] is not model[f"{name}.dfe_norm.running_var"]
    assert all(made[name].shape == model[name].shape for made in (anew, received) for name in names)
    assert all(made[name].dtype == model[name].dtype for made in (anew, received) for name in names)


# ---- batch statistics for some layers only ------------------------------------------------------------------------------
def small() -> nn.Module:
    first = [nn.Conv2d(1, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU()]
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(80, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


ERASED = with_erasers(Arch.of(small, (1, 4, 4)))
PLAIN = Arch.of(small, (1, 4, 4))


def model_of(arch: Arch, seed: int = 0) -> Tensors:
    tensors = arch.init(seed)
    made: Tensors = {}
    for number, (name, leaf) in enumerate(tensors.items()):
        if not leaf.is_floating_point() or name.endswith("steps"):
            made[name] = leaf.double() if leaf.is_floating_point() else leaf
        elif name.endswith("var"):
            made[name] = 0.5 + draw(*leaf.shape, seed=seed + number).abs()
        else:
            made[name] = 0.5 * draw(*leaf.shape, seed=seed + number)
    return made


def images(seed: int = 0, count: int = 7) -> Tensor:
    return draw(count, 1, 4, 4, seed=900 + seed).sigmoid()


def module_with(arch: Arch, tensors: Tensors, training: set[str]) -> nn.Module:
    """A module in inference mode except for these layers."""
    module = arch.factory().double().eval()
    module.load_state_dict({name: leaf.clone() for name, leaf in tensors.items()})
    for name, layer in module.named_modules():
        layer.training = name in training
    return module


@pytest.mark.parametrize(
    ("arch", "layers"),
    [(PLAIN, {"1"}), (PLAIN, {"5"}), (PLAIN, {"1", "5"}), (ERASED, {"0.dse_norm"}), (ERASED, {"0", "0.dse_norm"}),
     (ERASED, {"4.dfe_norm"}), (ERASED, {"4", "4.dse_norm", "0", "0.dse_norm"})],
)  # fmt: skip
def test_only_the_named_layers_use_the_batch_and_only_their_buffers_come_back(arch: Arch, layers: set[str]) -> None:
    tensors, x = model_of(arch), images()
    kept = {name: leaf.clone() for name, leaf in tensors.items()}
    named = frozenset(n for n in {*arch.parameters, *arch.buffers} if n.rpartition(".")[0] in layers)
    module = module_with(arch, tensors, layers)
    with torch.no_grad():
        found = arch(tensors, x, named)
        expected = module((x - 0.5) / 0.5)
    assert torch.allclose(found.logits, expected, atol=1e-12)
    assert set(found.buffers) == set(arch.buffers) & named
    after = module.state_dict()
    for name, leaf in found.buffers.items():
        assert torch.allclose(leaf.double(), after[name].double(), atol=1e-12), name
        assert not torch.equal(leaf, tensors[name]), name
    assert all(torch.equal(leaf, tensors[name]) for name, leaf in kept.items())
    assert float((found.logits - arch(tensors, x).logits).abs().max()) > 1e-3
    assert float((found.logits - arch(tensors, x, True).logits).abs().max()) > 1e-3 or arch is PLAIN


def test_no_names_are_plain_inference_and_all_names_plain_training() -> None:
    for arch in (PLAIN, ERASED):
        tensors, x = model_of(arch), images()
        none, plain = arch(tensors, x, frozenset()), arch(tensors, x)
        assert torch.equal(none.logits, plain.logits)
        assert none.buffers == {}
        every, training = arch(tensors, x, frozenset(arch.encoder)), arch(tensors, x, True)
        assert torch.equal(every.logits, training.logits)
        assert every.buffers.keys() == training.buffers.keys()
        assert all(torch.equal(leaf, training.buffers[name]) for name, leaf in every.buffers.items())
        assert torch.equal(arch(tensors, x).logits, plain.logits)  # and nobody stayed in another mode


@pytest.mark.parametrize("name", ["1.weight", "1.running_mean", "5.num_batches_tracked"])
def test_one_entry_stands_for_its_layer_and_the_given_tensors_are_never_changed(name: str) -> None:
    tensors, x = model_of(PLAIN), images()
    kept = {entry: leaf.clone() for entry, leaf in tensors.items()}
    found = PLAIN(tensors, x, frozenset({name}))
    layer = name.rpartition(".")[0]
    with torch.no_grad():
        expected = module_with(PLAIN, kept, {layer})((x - 0.5) / 0.5)
    assert torch.allclose(found.logits, expected, atol=1e-12)
    assert [entry for entry, leaf in kept.items() if not torch.equal(leaf, tensors[entry])] == []


@pytest.mark.parametrize("which", ["all", "erasers"])
def test_stacked_networks_are_a_loop(which: str) -> None:
    blocks = ERASED.layers(Eraser)
    stats = True if which == "all" else entries(blocks, (*erasure.OWN, *erasure.AT_HOME))
    models = [model_of(ERASED, seed) for seed in (0, 40, 80)]
    for number, model in enumerate(models):
        for name in blocks:  # one of them begins
            model[f"{name}.tracked_steps"] = torch.tensor(float(number), dtype=torch.float64)
    x = torch.stack([images(seed) for seed in range(3)])
    stacked = {name: torch.stack([model[name] for model in models]) for name in models[0]}
    logits, buffers = vmap(lambda t, images: (ERASED(t, images, stats).logits, ERASED(t, images, stats).buffers))(
        stacked, x
    )
    for number, model in enumerate(models):
        alone = ERASED(model, x[number], stats)
        assert torch.allclose(logits[number], alone.logits, atol=1e-12)
        assert set(buffers) == set(alone.buffers)
        for name, leaf in alone.buffers.items():
            assert torch.allclose(buffers[name][number].double(), leaf.double(), atol=1e-12), name


def test_stacked_gradients_are_a_loop() -> None:
    blocks = ERASED.layers(Eraser)
    models = [model_of(ERASED, seed) for seed in (0, 40)]
    x = torch.stack([images(seed) for seed in range(2)])

    def loss(live: Tensors, model: Tensors, batch: Tensor) -> Tensor:
        return inconsistency(ERASED({**model, **live}, batch, True).aux, model, blocks, 0.5)

    def gradients(model: Tensors, batch: Tensor) -> Tensors:
        live = {name: model[name] for name in ERASED.parameters}
        return torch.func.grad(loss)(live, model, batch)

    stacked = {name: torch.stack([model[name] for model in models]) for name in models[0]}
    together = vmap(gradients)(stacked, x)
    for number, model in enumerate(models):
        leaves = {name: model[name].clone().requires_grad_() for name in ERASED.parameters}
        value = loss(leaves, model, x[number])
        alone = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
        for name, grad in zip(leaves, alone, strict=True):
            expected = torch.zeros_like(leaves[name]) if grad is None else grad
            assert torch.allclose(together[name][number], expected, atol=1e-12), name
        assert together["0.dse.weight"][number].abs().max() > 1e-9
