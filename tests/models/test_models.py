"""Networks: published sizes, roles of entries, the same numbers stacked as one by one, and weights from files."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, autograd, nn
from torch.func import vmap
from torch.nn.functional import cross_entropy

from fedshift.core.arch import Arch
from fedshift.core.grad import gradient
from fedshift.core.registry import MODELS, with_options
from fedshift.core.tree import Tensors
from fedshift.errors import UserError
from fedshift.models.pretrained import load_pretrained

torch.set_num_threads(1)

RGB = (3, 224, 224)
SMALL: list[tuple[str, dict[str, Any], tuple[int, int, int]]] = [
    ("lenet", {"hidden": 16}, (1, 13, 10)),
    ("lenet", {"hidden": 16, "norm": True}, (3, 12, 12)),
    ("resnet20-gn", {}, (3, 8, 8)),
    ("resnet18", {}, (3, 32, 32)),
    ("resnet18", {"stem": "cifar", "groups": 2}, (1, 8, 8)),
    ("resnet50", {"stem": "cifar"}, (1, 12, 12)),
    ("cct4", {}, (1, 9, 14)),
    ("alexnet", {}, (3, 63, 70)),
    ("vit", {"size": "tiny"}, (1, 16, 24)),
]
SMALL_IDS = ["-".join([name, *map(str, options.values())]) for name, options, _ in SMALL]


def build(name: str, options: dict[str, Any], shape: tuple[int, int, int], classes: int = 10) -> nn.Module:
    module = with_options(MODELS[name].make, name, options).make(shape, classes)
    assert isinstance(module, nn.Module)
    return module


@pytest.mark.parametrize(
    ("name", "options", "shape", "classes", "count"),
    [
        ("lenet", {}, (3, 32, 32), 10, 2_156_490),
        ("lenet", {"hidden": 2048}, (1, 28, 28), 62, 832 + 51_264 + 3136 * 2048 + 2048 + 2049 * 62),
        ("resnet20-gn", {}, (3, 32, 32), 10, 272_464),
        ("resnet20-gn", {"width": 4}, (3, 32, 32), 86, 4_347_200),
        ("resnet18", {}, RGB, 1000, 11_689_512),
        ("resnet18", {}, RGB, 10, 11_181_642),
        ("resnet18", {"stem": "cifar"}, (3, 32, 32), 10, 11_173_962),
        ("resnet50", {}, RGB, 1000, 25_557_032),
        ("cct4", {}, (3, 32, 32), 10, 482_123),
        ("alexnet", {}, (3, 256, 256), 10, 12_974_154),
        ("alexnet", {"bias": False}, (3, 256, 256), 10, 12_970_954),
        ("vit", {"size": "base", "patch": 16}, RGB, 1000, 86_567_656),
        ("vit", {"size": "base", "patch": 8}, RGB, 1000, 86_576_872),
        ("vit", {"size": "small", "patch": 16}, RGB, 1000, 22_050_664),
        ("vit", {"size": "tiny", "patch": 16}, RGB, 1000, 5_717_416),
    ],
)
def test_published_sizes(
    name: str, options: dict[str, Any], shape: tuple[int, int, int], classes: int, count: int
) -> None:
    with torch.device("meta"):
        module = build(name, options, shape, classes)
        logits = module.eval()(torch.zeros(2, *shape))
    assert sum(p.numel() for p in module.parameters()) == count
    assert logits.shape == (2, classes)


@pytest.mark.parametrize(("name", "options", "shape"), SMALL, ids=SMALL_IDS)
def test_roles(name: str, options: dict[str, Any], shape: tuple[int, int, int]) -> None:
    arch = Arch.of(lambda: build(name, options, shape, 7), shape, name=name)
    assert arch.classes == 7
    assert arch.head == ({"head.weight"} if name == "resnet20-gn" else {"head.weight", "head.bias"})
    assert arch.has_batch_norm == (
        "norm" in options or (name in ("alexnet", "resnet18", "resnet50") and "groups" not in options)
    )
    assert not arch.is_random
    assert arch.norm or (name == "lenet" and "norm" not in options)
    if arch.has_batch_norm and name != "alexnet":  # BatchNorm cancels a bias before it
        module = build(name, options, shape)
        assert all(layer.bias is None for layer in module.modules() if isinstance(layer, nn.Conv2d))
    if name.startswith("resnet"):
        last = "body.layer3.0.downsample.1"
        assert {f"{last}.weight", f"{last}.bias"} <= arch.norm
        assert (f"{last}.running_var" in arch.norm) == arch.has_batch_norm
        assert f"{last[:-1]}0.weight" not in arch.norm
    one, other = arch.init(0), arch.init(0)
    assert all(torch.equal(one[n], other[n]) for n in one)
    assert any(not torch.equal(one[n], leaf) for n, leaf in arch.init(1).items())


@pytest.mark.parametrize("name", ["lenet", "cnn"])
def test_the_maximum_before_relu_is_the_papers_network_to_the_last_bit(name: str) -> None:
    ours = build(name, {"width": 4, "hidden": 16}, (3, 20, 20), 7)
    layers = list(ours.body)
    swaps = [at for at, layer in enumerate(layers) if isinstance(layer, nn.MaxPool2d)]
    for at in swaps:
        layers[at], layers[at + 1] = layers[at + 1], layers[at]
    published = nn.Sequential(*layers, ours.head)
    assert len(swaps) == 2
    assert all(isinstance(published[at], nn.ReLU) for at in swaps)
    images = torch.randn(5, 3, 20, 20, generator=torch.Generator().manual_seed(0))
    answers = [
        (logits, *autograd.grad(logits.square().sum(), ours.parameters()))
        for logits in (ours(images), published(images))
    ]
    assert all(torch.equal(one, other) for one, other in zip(*answers, strict=True))


@pytest.mark.grid
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("name", "options", "shape"), SMALL, ids=SMALL_IDS)
def test_stacked_clients_equal_the_loop(
    name: str, options: dict[str, Any], shape: tuple[int, int, int], training: bool
) -> None:
    arch, clients, x, y = _clients(name, options, shape)

    def one(tensors: Tensors, x: Tensor, y: Tensor) -> tuple[Tensors, Tensor, tuple[Tensor, Tensors]]:
        rest = {n: tensors[n] for n in arch.buffers}

        def loss(live: Tensors) -> tuple[Tensor, tuple[Tensor, Tensors]]:
            out = arch({**live, **rest}, x, batch_stats=training)
            return cross_entropy(out.logits, y), (out.logits, out.buffers)

        return gradient(loss, {n: tensors[n] for n in arch.parameters})

    stacked = {n: torch.stack([c[n] for c in clients]) for n in clients[0]}
    grads, losses, (logits, buffers) = vmap(one)(stacked, x, y)
    assert set(buffers) == (set(arch.buffers) if training else set())
    for k, client in enumerate(clients):
        before = {n: t.clone() for n, t in client.items()}
        own_grads, own_loss, (own_logits, own_buffers) = one(client, x[k], y[k])
        _same({"loss": losses[k], "logits": logits[k]}, {"loss": own_loss, "logits": own_logits})
        _same({n: t[k] for n, t in grads.items()}, own_grads)
        _same({n: t[k] for n, t in buffers.items()}, own_buffers)
        assert all(torch.equal(client[n], before[n]) for n in client)
        moved = [n for n in own_buffers if not torch.equal(own_buffers[n], client[n])]
        assert len(moved) == len(own_buffers)
    assert not torch.allclose(losses[0], losses[1])


@pytest.mark.parametrize("case", [0, 1, 2, 6, 8], ids=[SMALL_IDS[i] for i in (0, 1, 2, 6, 8)])
def test_a_loss_through_a_step_equals_the_loop(case: int) -> None:
    arch, clients, x, y = _clients(*SMALL[case])

    def one(tensors: Tensors, x: Tensor, y: Tensor) -> Tensors:
        rest = {n: tensors[n] for n in arch.buffers}

        def inner(live: Tensors) -> tuple[Tensor, Tensors]:
            logits = arch({**live, **rest}, x, batch_stats=True).logits
            return -(logits.softmax(1) * logits.log_softmax(1)).sum(), {}

        def outer(live: Tensors) -> tuple[Tensor, Tensors]:
            step = gradient(inner, live, differentiable=True)[0]
            tuned = {n: leaf - 0.1 * step[n] for n, leaf in live.items()}
            return cross_entropy(arch({**tuned, **rest}, x, batch_stats=True).logits, y), {}

        return gradient(outer, {n: tensors[n] for n in arch.parameters})[0]

    grads = vmap(one)({n: torch.stack([c[n] for c in clients]) for n in clients[0]}, x, y)
    for k, client in enumerate(clients):
        _same({n: t[k] for n, t in grads.items()}, one(client, x[k], y[k]), 1e-8)


@pytest.mark.parametrize(
    ("name", "options", "shape", "message"),
    [
        ("lenet", {}, (3, 3, 9), "at least 4x4 pixels, not 3x9"),
        ("resnet20-gn", {}, (3, 3, 3), "at least 4x4"),
        ("resnet20-gn", {"width": 0}, (3, 32, 32), "width must be at least 1"),
        ("resnet18", {}, (3, 15, 32), "at least 16x16 pixels, not 15x32; with stem = 'cifar' it takes 8x8"),
        ("resnet50", {"stem": "cifar"}, (3, 7, 7), "at least 8x8 pixels, not 7x7$"),
        ("resnet50", {"groups": 3}, (3, 32, 32), "groups must divide its 64 channels"),
        ("resnet18", {"stem": "imagnet"}, (3, 32, 32), "stem = 'imagnet' is not valid"),
        ("cct4", {}, (1, 2, 2), "at least 4x4"),
        ("alexnet", {}, (3, 62, 62), "at least 63x63 pixels, not 62x62"),
        ("vit", {}, (3, 28, 28), "cannot cut images of 28x28 pixels into patches of 8x8"),
        ("vit", {"patch": 0}, (3, 32, 32), "choose a patch that divides both sides"),
    ],
)
def test_what_does_not_fit_is_said(
    name: str, options: dict[str, Any], shape: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        build(name, options, shape)


@pytest.mark.parametrize(
    ("name", "options", "shape"),
    [("lenet", {}, (1, 4, 4)), ("resnet20-gn", {}, (1, 4, 4)), ("resnet18", {}, (3, 16, 16)), ("cct4", {}, (1, 4, 4))],
)
def test_the_smallest_image_works(name: str, options: dict[str, Any], shape: tuple[int, int, int]) -> None:
    assert build(name, options, shape)(torch.rand(2, *shape)).isfinite().all()


@pytest.mark.parametrize("name", ["lenet", "resnet20-gn", "cct4", "resnet18"])
def test_weights_round_trip(name: str, tmp_path: Path) -> None:
    shape, path = (3, 16, 16), tmp_path / "w.safetensors"
    source = build(name, {}, shape)
    source.train()(torch.rand(2, *shape))  # running statistics that are not the start's
    save_file(source.state_dict(), path)
    loaded = build(name, {"weights": str(path)}, shape).state_dict()
    assert all(torch.equal(leaf, loaded[n]) for n, leaf in source.state_dict().items())

    torch.manual_seed(5)
    fresh = build(name, {}, shape, classes=3)
    head = fresh.get_parameter("head.weight").clone()
    skipped = load_pretrained(fresh, path)
    assert skipped == [n for n in fresh.state_dict() if n.startswith("head.")]
    assert torch.equal(fresh.get_parameter("head.weight"), head)
    assert all(torch.equal(leaf, loaded[n]) for n, leaf in fresh.state_dict().items() if n not in skipped)


def test_every_model_of_this_file_takes_weights(tmp_path: Path) -> None:
    for name in ("lenet", "resnet20-gn", "resnet18", "resnet50", "cct4", "alexnet", "vit"):
        with pytest.raises(UserError, match="there is no weights file"):
            build(name, {"weights": str(tmp_path / "none.safetensors")}, (3, 64, 64))


def test_weights_of_another_type_are_converted(tmp_path: Path) -> None:
    source, path = build("lenet", {"hidden": 8}, (1, 8, 8)), tmp_path / "w.safetensors"
    save_file({n: t.half() for n, t in source.state_dict().items()}, path)
    loaded = build("lenet", {"hidden": 8, "weights": str(path)}, (1, 8, 8)).state_dict()
    assert all(torch.equal(leaf.half().float(), loaded[n]) for n, leaf in source.state_dict().items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"body.0.weight": None}, "has no 'body.0.weight'; its names must be the network's own"),
        ({"head.weight": None}, "has no 'head.weight'"),
        ({"body.0.bias": torch.zeros(5)}, r"has 'body.0.bias' of shape \[5\], but the network needs \[32\]"),
        ({"head.weight": torch.zeros(10, 9)}, r"has 'head.weight' of shape \[10, 9\], but"),
        ({"fc.weight": torch.zeros(1)}, "has 'fc.weight', which the network does not have"),
        ({"head.scale": torch.zeros(1)}, "has 'head.scale', which"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(change: dict[str, Tensor | None], message: str, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    tensors = {**build("lenet", {"hidden": 8}, (1, 8, 8)).state_dict(), **change}
    save_file({n: t for n, t in tensors.items() if t is not None}, path)
    fresh = build("lenet", {"hidden": 8}, (1, 8, 8))
    before = {n: t.clone() for n, t in fresh.state_dict().items()}
    with pytest.raises(UserError, match=message):
        load_pretrained(fresh, path)
    assert all(torch.equal(t, fresh.state_dict()[n]) for n, t in before.items())


def test_a_head_for_other_classes_is_skipped_with_or_without_bias(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file(build("resnet20-gn", {"bias": True}, (3, 8, 8), classes=5).state_dict(), path)
    assert "head.bias" in load_file(path)
    assert load_pretrained(build("resnet20-gn", {}, (3, 8, 8)), path) == ["head.weight"]


def test_files_that_are_no_weights(tmp_path: Path) -> None:
    network = build("cct4", {}, (3, 8, 8))
    (tmp_path / "text").write_text("not tensors at all")
    (tmp_path / "empty").touch()
    torch.save(network.state_dict(), tmp_path / "pickle")
    for name in ("text", "empty", "pickle"):
        with pytest.raises(UserError, match="is not a safetensors file or is damaged"):
            load_pretrained(network, tmp_path / name)
    with pytest.raises(UserError, match="there is no weights file"):
        load_pretrained(network, tmp_path)
    assert load_pretrained(network, "") == []


def _clients(
    name: str, options: dict[str, Any], shape: tuple[int, int, int]
) -> tuple[Arch, list[Tensors], Tensor, Tensor]:
    """Two clients with different tensors and data, in float64 and with running statistics that differ."""
    arch = Arch.of(lambda: build(name, options, shape, 4), shape, name=name)
    clients = [{n: t.double() if t.is_floating_point() else t for n, t in arch.init(seed).items()} for seed in (1, 2)]
    generator = torch.Generator().manual_seed(0)
    for client in clients:
        for entry in arch.norm:
            if client[entry].is_floating_point():
                client[entry] += 0.1 * torch.rand(client[entry].shape, generator=generator, dtype=torch.float64)
    x = torch.rand(2, 4, *shape, generator=generator, dtype=torch.float64)
    return arch, clients, x, torch.randint(4, (2, 4), generator=generator)


def _same(one: Tensors, other: Tensors, tolerance: float = 1e-10) -> None:
    """Equal up to rounding, which is measured against each tensor's largest number."""
    assert set(one) == set(other)
    for name, leaf in one.items():
        assert leaf.dtype == other[name].dtype
        worst, scale = (leaf - other[name]).abs().max(), other[name].abs().max().clamp(min=1)
        assert worst <= tolerance * scale, name


def test_torchvisions_names_are_known(tmp_path: Path) -> None:
    theirs = {
        name.replace("head.", "fc.").removeprefix("body."): leaf + 1
        for name, leaf in build("resnet18", {}, (3, 32, 32)).state_dict().items()
    }
    assert {"conv1.weight", "fc.weight"} <= set(theirs)
    save_file(theirs, tmp_path / "theirs.safetensors")
    loaded = build("resnet18", {"weights": str(tmp_path / "theirs.safetensors")}, (3, 32, 32)).state_dict()
    assert all(torch.equal(leaf, loaded[f"body.{name}"]) for name, leaf in theirs.items() if not name.startswith("fc."))
    assert torch.equal(loaded["head.weight"], theirs["fc.weight"])


def test_weights_have_a_digest(tmp_path: Path) -> None:
    path = tmp_path / "lenet.safetensors"
    save_file(build("lenet", {"hidden": 8}, (1, 8, 8)).state_dict(), path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    for given in (digest, digest[:16]):
        build("lenet", {"hidden": 8, "weights": f"{path}#sha256={given}"}, (1, 8, 8))
    with pytest.raises(UserError, match="is not what was asked for: its digest is"):
        build("lenet", {"hidden": 8, "weights": f"{path}#sha256={'0' * 64}"}, (1, 8, 8))
    with pytest.raises(UserError, match="behind #sha256= stand 16 to 64 letters"):
        build("lenet", {"hidden": 8, "weights": f"{path}#sha256=abc"}, (1, 8, 8))


def test_weights_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    save_file(build("lenet", {"hidden": 8}, (1, 8, 8)).state_dict(), path)
    asked: list[tuple[str, str, str | None]] = []

    def fetch(repository: str, file: str, revision: str | None) -> str:
        asked.append((repository, file, revision))
        if repository == "me/none":
            raise ValueError("404: there is no such repository\nand more")
        return str(path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=fetch))
    for weights in ("hub:me/net", "hub:me/net/a/b.safetensors@v1"):
        build("lenet", {"hidden": 8, "weights": weights}, (1, 8, 8))
    assert set(asked) == {("me/net", "model.safetensors", None), ("me/net", "a/b.safetensors", "v1")}
    for weights, words in (
        ("hub:net", "must be hub:OWNER/NAME"),
        ("hub:me/net/pytorch_model.bin", "only safetensors files are read, not pytorch_model.bin"),
        ("hub:me/none", "could not be fetched: 404: there is no such repository$"),
    ):
        with pytest.raises(UserError, match=words):
            build("lenet", {"hidden": 8, "weights": weights}, (1, 8, 8))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"need the hub's library: pip install \"fedshift\[hub\]\""):
        build("lenet", {"hidden": 8, "weights": "hub:me/other"}, (1, 8, 8))
