"""A network as a function: roles by module type, the head found or refused, nothing changed behind anybody's back."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedshift.core.arch import Arch
from fedshift.errors import UserError

SHAPE = (1, 4, 4)


class Block(nn.Module):
    """A residual block whose normalisation layers have names that do not say so."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1, bias=False)
        self.foo = nn.BatchNorm2d(3)
        self.downsample = nn.Sequential(nn.Conv2d(1, 3, 1, bias=False), nn.BatchNorm2d(3))
        self.bn_lookalike = nn.Conv2d(3, 3, 1)
        self.group = nn.GroupNorm(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.bn_lookalike(self.foo(self.conv(x)) + self.downsample(x))
        return torch.relu(self.group(y)).mean((2, 3))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()
        self.out = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.inner(x))
        return logits


class Tail(nn.Module):
    """Something after the last linear layer."""

    def __init__(self, tail: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.flat, self.hidden, self.last, self.tail = nn.Flatten(), nn.Linear(16, 4), nn.Linear(4, 3), tail
        nn.init.constant_(self.last.bias, -9.0)  # so that a ReLU shows

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.last(self.hidden(self.flat(x)).relu()))


class Inner(nn.Module):
    """Returns inner activations beside the logits; the linear layer made last is not the last one used."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.head, self.early = nn.Flatten(), nn.Linear(4, 3), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        hidden = self.early(self.flat(x))
        return self.head(hidden.relu()), {"early": hidden}


def images(count: int = 6, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(0))


# --- roles ------------------------------------------------------------------------------------------------------------


def test_normalisation_layers_are_found_by_type_with_their_statistics() -> None:
    arch = Arch.of(Net, SHAPE)
    batch = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    expected = {f"inner.{layer}.{name}" for layer in ("foo", "downsample.1") for name in batch}
    assert arch.norm == expected | {"inner.group.weight", "inner.group.bias"}
    assert arch.head == {"out.weight", "out.bias"}
    assert arch.encoder | arch.head == set(arch.parameters) | set(arch.buffers)
    assert not arch.encoder & arch.head
    assert set(arch.buffers) == {name for name in expected if "running" in name or "tracked" in name}
    assert arch.trainable == set(arch.parameters)
    assert list(arch.parameters) == [name for name, _ in Net().named_parameters()]
    assert (arch.has_batch_norm, arch.has_convolution, arch.is_random) == (True, True, False)
    assert (arch.classes, arch.input_shape, arch.name) == (2, SHAPE, "net")


@pytest.mark.parametrize(
    ("layer", "batch_norm"),
    [
        (nn.BatchNorm1d(16), True),
        (nn.LayerNorm(16), False),
        (nn.RMSNorm(16), False),
        (nn.GroupNorm(2, 16), False),
        (nn.Linear(16, 16), False),
    ],
)
def test_every_kind_of_normalisation(layer: nn.Module, batch_norm: bool) -> None:
    arch = Arch.of(nn.Sequential(nn.Flatten(), layer, nn.Linear(16, 2)), SHAPE)
    own = {f"1.{name}" for name in layer.state_dict()}
    assert arch.norm == (set() if isinstance(layer, nn.Linear) else own)
    assert arch.has_batch_norm == batch_norm
    assert not arch.has_convolution


def test_layers_that_draw_for_themselves() -> None:
    def has(layer: nn.Module) -> bool:
        return Arch.of(nn.Sequential(nn.Flatten(), layer, nn.Linear(16, 2)), SHAPE).is_random

    assert has(nn.Dropout(0.1))
    assert has(nn.AlphaDropout(0.1))
    assert has(nn.RReLU())
    assert not has(nn.Dropout(0.0))
    assert not has(nn.ReLU())


class Functional(nn.Module):
    """Draws without a layer for it."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(nn.functional.dropout(x.flatten(1), 0.5, self.training))
        return logits


def test_networks_that_draw_without_a_layer_for_it() -> None:
    assert Arch.of(Functional, SHAPE).is_random


# --- the head ---------------------------------------------------------------------------------------------------------


def test_the_head_is_found() -> None:
    assert Arch.of(nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 3)), SHAPE).head == {
        "3.weight",
        "3.bias",
    }
    assert Arch.of(nn.Sequential(nn.Flatten(), nn.Linear(16, 3, bias=False)), SHAPE).head == {"1.weight"}
    assert Arch.of(Inner, SHAPE).head == {"head.weight", "head.bias"}  # by its name, though it is not the last made
    assert Arch.of(Net, SHAPE, head="out").head == {"out.weight", "out.bias"}


def test_inner_activations_come_along() -> None:
    arch = Arch.of(Inner, SHAPE)
    tensors = arch.init(0)
    output = arch(tensors, images())
    assert output.features.shape == (6, 4)
    assert torch.equal(output.features, output.aux["early"].relu())
    assert torch.allclose(output.logits, output.features @ tensors["head.weight"].t() + tensors["head.bias"])


@pytest.mark.parametrize(
    "tail",
    [
        lambda y: y.softmax(1),
        lambda y: y.log_softmax(1),
        lambda y: y.relu(),
        lambda y: y / 2,
        nn.Softmax(1),
    ],
)
def test_a_network_that_does_more_after_its_last_linear_layer_is_refused(tail: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(UserError, match=r"layer 'last' is not the last operation.*return logits, not probabilities"):
        Arch.of(lambda: Tail(tail), SHAPE)


def test_other_mistakes() -> None:
    with pytest.raises(UserError, match="has no layer called 'top'"):
        Arch.of(Net, SHAPE, head="top")
    with pytest.raises(UserError, match=r"does not take images of shape \[3, 4, 4\]"):
        Arch.of(Net, (3, 4, 4))
    with pytest.raises(UserError, match=r"no nn.Linear to be its head"):
        Arch.of(nn.Sequential(nn.Conv2d(1, 2, 4), nn.Flatten()), SHAPE)


def test_a_head_that_cannot_stand_alone_is_not_the_last_operation() -> None:
    with pytest.raises(UserError, match="layer 'last' is not the last operation"):
        Arch.of(lambda: Tail(lambda y: y[:, :2]), SHAPE)
    with pytest.raises(UserError, match="layer 'hidden' is not the last operation"):
        Arch.of(lambda: Tail(lambda y: y), SHAPE, head="hidden")


class LongHead(nn.Module):
    """A head with layers that behave differently in training."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Flatten()
        self.top = nn.Sequential(nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 2))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.top(self.body(x))
        return logits


def test_a_head_that_is_more_than_linear_is_refused_or_obeys_the_mode() -> None:
    try:
        arch = Arch.of(LongHead, SHAPE, head="top")
    except UserError:
        return
    tensors = arch.init(0)
    before = {name: leaf.clone() for name, leaf in tensors.items()}
    first, second = arch(tensors, images()), arch(tensors, images())
    assert all(torch.equal(tensors[name], leaf) for name, leaf in before.items())
    assert torch.equal(first.logits, second.logits)


# --- forward ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_stats", [False, True])
def test_the_forward_pass_is_the_modules(batch_stats: bool) -> None:
    arch = Arch.of(Net, SHAPE, mean=(0.3,), std=(0.2,))
    tensors = arch.init(3)
    module = Net().train(batch_stats)
    module.load_state_dict(tensors)
    for number in range(3):
        x = images(shape=SHAPE) + number
        output = arch(tensors, x, batch_stats)
        assert torch.allclose(output.logits, module((x - 0.3) / 0.2), atol=1e-5)
        tensors = {**tensors, **output.buffers}
        for name, leaf in module.state_dict().items():
            assert torch.allclose(tensors[name], leaf, atol=1e-5), name
            assert tensors[name].dtype == leaf.dtype
    assert int(tensors["inner.downsample.1.num_batches_tracked"]) == 3 * batch_stats
    assert set(output.buffers) == (set(arch.buffers) if batch_stats else set())


@pytest.mark.parametrize("batch_stats", [False, True])
def test_given_tensors_are_never_changed(batch_stats: bool) -> None:
    arch = Arch.of(Net, SHAPE)
    tensors = arch.init(3)
    before = {name: leaf.clone() for name, leaf in tensors.items()}
    x = images()
    first = arch(tensors, x, batch_stats)
    arch.encode(tensors, x, batch_stats)
    arch.classify(tensors, first.features)
    assert all(torch.equal(tensors[name], leaf) for name, leaf in before.items())
    assert torch.equal(arch(tensors, x, batch_stats).logits, first.logits)  # and nothing inside remembers
    assert torch.equal(x, images())


def test_calls_do_not_touch_the_users_module() -> None:
    module = Net()
    module.inner.foo.eval()
    before = copy.deepcopy(module.state_dict())
    arch = Arch.of(module, SHAPE)
    arch(arch.init(0), images(), batch_stats=True)
    assert all(torch.equal(leaf, before[name]) for name, leaf in module.state_dict().items())
    assert module.training
    assert not module.inner.foo.training
    assert isinstance(module.out, nn.Linear)


def test_a_module_in_double_precision_is_taken_and_left_as_it_is() -> None:
    module = Net().double()
    arch = Arch.of(module, SHAPE)
    assert all(leaf.dtype == torch.float64 for leaf in module.parameters())
    assert arch.init(0)["out.weight"].dtype == torch.float64
    assert arch(arch.init(0), images().double()).logits.dtype == torch.float64


def test_batch_statistics_are_used_by_every_layer_whatever_mode_the_module_came_in() -> None:
    ready, resting = Arch.of(Net().eval(), SHAPE), Arch.of(Net().train(), SHAPE)
    tensors = ready.init(0)
    for batch_stats in (False, True):
        a, b = (arch(tensors, images(), batch_stats) for arch in (ready, resting))
        assert torch.equal(a.logits, b.logits)
        assert a.buffers.keys() == b.buffers.keys()


def test_encoder_and_head_make_the_network() -> None:
    arch = Arch.of(Net, SHAPE)
    tensors = arch.init(1)
    features, aux, buffers = arch.encode(tensors, images())
    assert (features.shape, aux, buffers) == ((6, 3), {}, {})
    assert torch.equal(arch.classify(tensors, features), arch(tensors, images()).logits)
    module = functional_call(Net().eval(), tensors, (arch.normalise(images()),))
    assert torch.allclose(arch(tensors, images()).logits, module, atol=1e-5)


def test_normalisation_of_inputs() -> None:
    def arch(**how: tuple[float, ...]) -> Arch:
        return Arch.of(nn.Sequential(nn.Flatten(), nn.Linear(12, 2)), (3, 2, 2), **how)  # type: ignore[arg-type]

    x = images(2, (3, 2, 2)).double()
    assert torch.equal(arch(mean=(0.0,), std=(1.0,)).normalise(x), x)
    assert torch.allclose(arch().normalise(x), (x - 0.5) / 0.5)
    own = arch(mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 3.0)).normalise(x)
    assert own.dtype == torch.float64
    for channel, (mean, std) in enumerate(((0.1, 1.0), (0.2, 2.0), (0.3, 3.0))):
        assert torch.allclose(own[:, channel], (x[:, channel] - mean) / std)


# --- initialisation ---------------------------------------------------------------------------------------------------


def test_a_seed_decides_the_start_and_nothing_else_does() -> None:
    arch = Arch.of(Net, SHAPE)
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    first = arch.init(1)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(6)
    again, other = arch.init(1), arch.init(2)
    assert first.keys() == set(arch.parameters) | set(arch.buffers)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["out.weight"], other["out.weight"])
    torch.manual_seed(1)
    assert torch.equal(first["out.weight"], Net().out.weight)  # torch's own initialisation under this seed
    assert arch.init(2**63 - 1).keys() == first.keys()
    first["out.weight"].zero_()
    assert torch.equal(arch.init(1)["out.weight"], again["out.weight"])


def test_describing_a_network_leaves_the_generator_alone() -> None:
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    Arch.of(Net, SHAPE)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_module_is_every_seeds_start() -> None:
    module = Net()
    arch = Arch.of(module, SHAPE)
    for seed in (0, 1):
        assert all(torch.equal(leaf, module.state_dict()[name]) for name, leaf in arch.init(seed).items())
    arch.init(0)["out.weight"].zero_()
    assert float(module.out.weight.abs().sum().detach()) > 0
    assert not arch.init(0)["out.weight"].requires_grad
