"""The arithmetic of every kernel of our own, on a GPU or in Triton's interpreter, against torch's.

The interpreter runs kernels with NumPy on a CPU, program after program. What it cannot tell, only ``make gpu`` can: whether
a kernel compiles and a GPU has the registers and the shared memory for it, TF32 (``tl.dot`` multiplies in single precision
there), the same bits each time, programs that get in each other's way, warps and stages, graphs, streams and speed. Who
reads beyond the ends of a tensor given here finds what is not a number; who writes beyond those of a result may go unseen.
"""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.utils._pytree import tree_leaves, tree_map

from fedshift.core.optim import SGD
from fedshift.core.tree import Tensors
from fedshift.engines import cuda
from fedshift.engines.cuda import maps, normalisation, trilinear
from fedshift.engines.cuda.convolutions import StackedConvolutions
from fedshift.engines.cuda.geometry import Geometry, Role
from tests.engines.test_convolutions import SHAPES
from tests.engines.test_maps import WINDOWS

OWN = Path(__file__).parent
ROOT = OWN.parent.parent
FILES = ("test_kernels.py", "test_kernel_orders.py")
LOWEST = (3, 7)  # older interpreters cannot read the arrays of NumPy 2.4
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
HAS_GPU = torch.cuda.is_available() and trilinear.works(torch.device("cuda"))
HERE = torch.device("cuda" if HAS_GPU else "cpu")
needs_kernels = pytest.mark.skipif(not (INTERPRETED or HAS_GPU), reason="needs a GPU, or Triton and TRITON_INTERPRET=1")


def needs_interpreter(test: Callable[..., None]) -> Callable[..., None]:
    """Kernels run on a CPU there, which a GPU has no use of."""
    skipped = pytest.mark.skipif(not INTERPRETED, reason="needs Triton and TRITON_INTERPRET=1")
    marked: Callable[..., None] = pytest.mark.interpreter(skipped(test))
    return marked


FENCE = 64  # numbers before and behind a tensor, so many that its address is as even as that of a new one
HELPERS = {"_first", "_output"}  # which kernels call, and nobody launches


def missing() -> str:
    """Why there is no interpreter here; empty if there is one."""
    try:
        found = version("triton")
    except PackageNotFoundError:
        return "needs Triton, 0.7 GB that torch's CPU builds do not bring: make test-kernels installs it"
    if tuple(map(int, found.split(".")[:2])) < LOWEST:
        return f"Triton {found}: its interpreter cannot read the arrays of NumPy 2.4, that of 3.7 can"
    return ""


@pytest.mark.system
@pytest.mark.interpreter
@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("file", FILES)
def test_every_kernel_in_tritons_interpreter(file: str) -> None:
    """In a process of its own: Triton looks at the variable when kernels are defined, and nobody else should see it."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**others, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(OWN / file)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout.splitlines()[-1]


def lent(tensor: Tensor) -> Tensor:
    """The tensor where kernels run, between numbers that are none: whoever reads beyond its ends has them in its result."""
    wrong = torch.nan if tensor.is_floating_point() else 255
    fence = tensor.new_full((FENCE,), wrong)
    return torch.cat([fence, tensor.flatten(), fence]).to(HERE)[FENCE:-FENCE].view(tensor.shape)


def away(found: Tensor, expected: Tensor) -> float:
    """How far off, as a share of the length."""
    return float((found.cpu().double() - expected).norm() / expected.norm())


def convolutions() -> list[tuple[Any, ...]]:
    """Whole tiles of rows, others, and sums in parts; few channels and many, even and odd."""
    images, channels = ((8, 8), (9, 11), (16, 32)), ((3, 32), (16, 16), (32, 5), (64, 96))
    cases = product(images, channels, [*SHAPES, ((2, 2), (1, 1), (2, 2))])
    # the others take the interpreter two minutes, and have no tiles that these have not
    quick = {*product(images[:1], channels), *product(images[1:2], channels[:3])}
    parts = (images[2], channels[0])
    return [
        (image, *pair, *rest)
        for image, pair, rest in cases
        if HAS_GPU or (image, pair) in quick or ((image, pair) == parts and max(rest[1]) == 1)
    ]


@needs_kernels
@pytest.mark.parametrize(("image", "channels", "out", "size", "stride", "padding"), convolutions(), ids=str)
def test_kernels_of_our_own(
    image: tuple[int, int],
    channels: int,
    out: int,
    size: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
) -> None:
    """Each of images, kernels and outputs from the other two, as exact as TF32 is."""
    check_convolution(2, 4, Geometry(image, size, stride, padding), channels, out)


@needs_kernels
@pytest.mark.parametrize(("clients", "count", "image"), [(1, 4, (9, 11)), (1, 1, (3, 3)), (5, 3, (6, 5))])
@pytest.mark.parametrize(("channels", "out"), [(1, 7), (16, 33)])
def test_convolutions_of_one_client_and_of_several(
    clients: int, count: int, image: tuple[int, int], channels: int, out: int
) -> None:
    check_convolution(clients, count, Geometry(image, (3, 3), (1, 1), (1, 1)), channels, out)


def check_convolution(
    clients: int, count: int, geometry: Geometry, channels: int, out: int, lay: Callable[[Tensor], Tensor] = lent
) -> None:
    from fedshift.engines.cuda.kernels import MAKERS

    generator = torch.Generator().manual_seed(0)
    shapes = {
        Role.IMAGES: (clients, count, channels, *geometry.image),
        Role.KERNELS: (clients, out, channels, *geometry.size),
        Role.OUTPUTS: (clients, count, out, *geometry.positions),
    }
    given = {role: torch.randn(shape, dtype=torch.double, generator=generator) for role, shape in shapes.items()}
    rounded = {role: lay(tensor.float()) for role, tensor in given.items()}
    given = {role: tensor.cpu().double() for role, tensor in rounded.items()}
    for role, make in MAKERS.items():
        expected, found = trilinear.BY_GROUPS[role](given, geometry), make(rounded, geometry)
        assert away(found, expected) < (1e-3 if HAS_GPU else 1e-5)


def pictures(planes: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """With equals, infinities and NaN."""
    x = torch.randint(-3, 4, (*planes, 9, 11), generator=torch.Generator().manual_seed(1)).to(dtype)
    x[0, 0, 3, 4], x[1, 1, 2, 2], x[2, 0] = torch.nan, torch.inf, -torch.inf
    return x


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("planes", [(3, 2), (8, 5)])  # numbers for one program, and for several
@pytest.mark.parametrize("window", WINDOWS)
def test_pooling_kernels(window: tuple, planes: tuple[int, int], dtype: torch.dtype) -> None:
    from fedshift.engines.cuda import map_kernels

    x, geometry = pictures(planes, dtype), Geometry((9, 11), *window)
    y, flat = F.max_pool2d(x, geometry.size, geometry.stride, geometry.padding, return_indices=True)
    highest, which = map_kernels.highest(lent(x), geometry)
    torch.testing.assert_close(highest.cpu(), y, equal_nan=True)
    assert torch.equal(which.cpu(), maps._named(flat, geometry))
    which = lent(which.cpu())
    g = torch.randn(y.shape, dtype=dtype)
    pixels = torch.zeros(*planes, 99, dtype=dtype).scatter_add(2, flat.flatten(2), g.flatten(2)).view_as(x)
    torch.testing.assert_close(map_kernels.scattered(lent(g), which, geometry).cpu(), pixels)
    other = torch.randn_like(pixels)
    chosen = other.flatten(2).gather(2, flat.flatten(2)).view_as(g)
    assert torch.equal(map_kernels.gathered(lent(other), which, geometry).cpu(), chosen)


@needs_kernels
@pytest.mark.parametrize("shape", [(3, 50, 41), (1, 7), (4, 1), (2, 1024)])
@pytest.mark.parametrize("heavy", [False, True])
def test_a_step_of_descent_in_one_pass(heavy: bool, shape: tuple[int, ...]) -> None:
    from fedshift.engines.cuda import map_kernels

    leaf, gradient, velocity = (torch.randn(shape) for _ in range(3))
    rate = torch.tensor([0.1, 0.2, 0.3, 0.0][: len(leaf)])
    step = gradient + 5e-4 * leaf + (0.9 * velocity if heavy else 0)
    given = (lent(leaf), lent(gradient), lent(velocity) if heavy else None, lent(rate), 0.9, 5e-4)
    moved, kept = map_kernels.descended(*given)
    torch.testing.assert_close(moved.cpu(), leaf - rate.view(-1, *[1] * (leaf.dim() - 1)) * step)
    assert (kept is not None) == heavy
    if kept is not None:
        torch.testing.assert_close(kept.cpu(), step)


@needs_kernels
@pytest.mark.parametrize("shape", [(3, 5, 4, 42), (2, 40, 3, 64), (5, 7, 16, 1), (1, 3, 5, 9)])
def test_normalisation_kernels(shape: tuple[int, ...]) -> None:
    from fedshift.engines.cuda import norm_kernels

    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(shape, generator=generator) * 3 + 20 for _ in range(2))
    weight, bias = (torch.rand(shape[0], shape[2], generator=generator) for _ in range(2))
    given = [lent(one) for one in (x, weight, bias)]
    found = [one.cpu().double() for one in norm_kernels.normalised(*given, 1e-5)]
    expected = normalisation._Normalised.forward(x.double(), weight.double(), bias.double(), 1e-5)
    torch.testing.assert_close(found, list(expected), rtol=1e-4, atol=1e-4)
    _, mean, var = expected
    rstd = (var + 1e-5).rsqrt()
    back = norm_kernels.gradients(*(lent(one.float()) for one in (g, x, mean, rstd, weight)))
    slopes = normalisation._Back.forward(g.double(), x.double(), mean, rstd, weight.double())
    for one, other in zip(back, slopes, strict=True):
        assert away(one, other) < 1e-4


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Tensors of a CPU go to kernels as a GPU's do; gives the names of those launched."""
    from fedshift.engines.cuda.kernels import MAKERS

    def for_them(like: Tensor) -> bool:
        return like.dtype == torch.float32

    monkeypatch.setattr(maps, "_has_kernels", for_them)
    monkeypatch.setattr(normalisation, "suits", for_them)
    monkeypatch.setattr(trilinear, "_makers", lambda like: MAKERS if for_them(like) else trilinear.BY_GROUPS)
    launched: set[str] = set()

    def noting(name: str) -> Callable[..., None]:
        return lambda *_, **__: launched.add(name)

    for name, kernel in all_kernels().items():
        monkeypatch.setattr(kernel, "pre_run_hooks", [noting(name)])
    return launched


def all_kernels() -> dict[str, Any]:
    """By name."""
    from triton.runtime.interpreter import InterpretedFunction

    names = [found.name for found in pkgutil.iter_modules(cuda.__path__, f"{cuda.__name__}.")]
    modules: list[ModuleType] = [importlib.import_module(name) for name in names]
    return {n: own for one in modules for n, own in vars(one).items() if isinstance(own, InterpretedFunction)}


def network(weights: Tensors, x: Tensor) -> Tensor:
    """Logits: pictures with few channels, maps with many, a large stride, BatchNorm, windows apart and over each other."""
    maps = F.conv2d(x, weights["pictures"], weights["bias"], padding=2)
    maps = F.max_pool2d(F.batch_norm(maps, None, None, weights["scale"], weights["shift"], training=True).relu(), 2)
    maps = F.max_pool2d(F.conv2d(maps, weights["maps"]).tanh(), 3, 2, 1)
    apart = F.conv2d(x, weights["large"], None, 4, 2).tanh()
    return torch.cat([maps.flatten(1), apart.flatten(1)], 1) @ weights["head"]


def stacked(
    weights: Tensors, x: Tensor, y: Tensor, memory: Tensors, scale: Tensor, along: Tensor
) -> tuple[Tensors, Tensors, Tensor]:
    """A client's step, and forward how maxima change with images (kernels of BatchNorm only go back)."""

    def loss(weights: Tensors) -> Tensor:
        return F.cross_entropy(network(weights, x), y)

    def smooth(x: Tensor) -> Tensor:
        return F.max_pool2d(F.conv2d(x, weights["pictures"]), 3, 2)

    moved, kept = SGD(lr=0.1, momentum=0.9, weight_decay=0.01).update(weights, grad(loss)(weights), memory, scale)
    return moved, kept, jvp(smooth, (x,), (along,))[1]


@needs_interpreter
def test_stacked_clients_by_every_kernel_there_is(everywhere: set[str]) -> None:
    """As engines call them: from inside ``vmap``, with tensors as it leaves them. A new kernel has to be among them."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(3, *shape, generator=generator, dtype=torch.double)

    weights = {
        "pictures": drawn(16, 3, 5, 5) / 8,
        "bias": drawn(16),
        "scale": drawn(16),
        "shift": drawn(16),
        "maps": drawn(16, 16, 3, 3) / 8,
        "large": drawn(16, 3, 5, 5) / 8,
        "head": drawn(16 * (4 * 3 + 5 * 4), 4) / 8,
    }
    memory = {f"velocity/{name}": drawn(*leaf.shape[1:]) for name, leaf in weights.items()}
    x, along = (drawn(2, 18, 14, 3).movedim(4, 2) for _ in range(2))  # channels last, as training on a CPU has them
    y, scale = torch.arange(6).view(3, 2) % 4, torch.tensor([1.0, 0.5, 0.0], dtype=torch.double)
    given = (weights, x, y, memory, scale, along)
    each = [stacked(*tree_map(lambda leaf, k=k: leaf[k], given)) for k in range(3)]
    expected = tree_map(lambda *rows: torch.stack(rows), *each)
    single = tree_map(lambda leaf: leaf.float() if leaf.is_floating_point() else leaf, given)
    used: set[str] = set()
    with StackedConvolutions(3, used, ours=True):
        found = vmap(stacked)(*single)
    for one, other in zip(*map(tree_leaves, (found, expected)), strict=True):
        assert away(one, other) < 1e-5
    assert used == {"implicit", "folded"}
    assert everywhere == set(all_kernels()) - HELPERS


@needs_interpreter
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_steps_of_stacks_of_stacked_clients(everywhere: set[str], momentum: float) -> None:
    """Clients whose own members take steps: two levels of ``vmap``."""
    rule = SGD(lr=0.5, momentum=momentum, weight_decay=0.1)
    tensors, grads = ({"w": torch.randn(3, 2, 5, 4)} for _ in range(2))
    memory = {name: torch.randn_like(leaf) for name, leaf in rule.memory(tensors).items()}
    scale = torch.tensor([1.0, 0.5, 0.0])
    twice = vmap(vmap(rule.update, in_dims=(0, 0, 0, None)))
    expected = twice(tensors, grads, memory, scale)
    with StackedConvolutions(None):
        torch.testing.assert_close(twice(tensors, grads, memory, scale), expected)
    assert everywhere == {"_descended"}


@needs_interpreter
def test_maxima_and_normalised_maps_of_stacks_of_stacked_clients(everywhere: set[str]) -> None:
    x, scale = torch.randn(3, 2, 4, 5, 9, 7), torch.rand(3, 5)

    def loss(x: Tensor, scale: Tensor) -> Tensor:
        return F.max_pool2d(F.batch_norm(x, None, None, scale, training=True), 3, 2, 1).sin().sum()

    twice = vmap(vmap(grad(loss, (0, 1)), in_dims=(0, None)))
    expected = twice(x, scale)
    with StackedConvolutions(None):
        torch.testing.assert_close(twice(x, scale), expected, rtol=1e-4, atol=1e-5)
    assert everywhere == {"_apply", "_back", "_highest", "_scattered", "_statistics", "_sums"}
