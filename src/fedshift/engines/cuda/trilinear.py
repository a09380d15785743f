"""A convolution and all its derivatives as one function.

Images x, kernels w and slopes y of the answers make a number, ``T(x, w, y) = <conv(x, w), y>``, which is linear in each of
the three. Its derivative by one of them is a function of the other two: answers are ``dT/dy``, the gradients of images and
kernels ``dT/dx`` and ``dT/dw``. So one function, the third from two, is closed under differentiation: derivatives of any
order, backward and forward, need nothing else, and neither do stacked clients, whose dimension comes first.

On a GPU kernels of our own (``kernels.py``) compute it; elsewhere torch's convolutions with a group for each client,
which is what the former are tested against.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input, conv2d_weight

from fedshift.engines.base import Compute
from fedshift.engines.cuda.geometry import Geometry, Pair, Role

Roles: TypeAlias = tuple[Role, Role]
Maker: TypeAlias = Callable[[Mapping[Role, Tensor], Geometry], Tensor]


def has_kernels(compute: Compute) -> bool:
    """Whether kernels of our own can be used: they multiply as TF32, which has to be allowed.

    >>> has_kernels(Compute(tf32=True))
    False
    """
    return compute.tf32 and compute.dtype == torch.float32 and compute.device.type == "cuda" and works(compute.device)


@cache
def works(device: torch.device) -> bool:
    """Whether this GPU runs them, found out by one tiny product; why not is said once."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return False
    why = _why_not(device)
    if why:
        warnings.warn(f"our own convolution kernels are off ({why}); cuDNN's take their place", stacklevel=2)
    return not why


def _why_not(device: torch.device) -> str:
    """What keeps kernels of our own from running; empty if nothing does.

    The trial has a thread of its own: transforms, modes and streams belong to a thread, and whoever asks first may be deep
    inside a ``vmap``, where tensors have no memory to give to a kernel.
    """
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "this GPU has no TF32"
    with ThreadPoolExecutor(1) as alone:
        return alone.submit(_tried, device).result()


def _tried(device: torch.device) -> str:
    try:
        from fedshift.engines.cuda import kernels as implicit

        one = torch.zeros(1, 1, 1, 1, 1, device=device)
        implicit.slopes(one, one, Geometry((1, 1), (1, 1), (1, 1), (0, 0)))
        torch.cuda.synchronize(device)
    except ImportError:
        return "there is no Triton"
    except Exception as error:  # Triton needs a C compiler, for one
        return f"Triton cannot run here: {str(error)[:200]}"
    return ""


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair) -> Tensor:
    """``F.conv2d`` without groups and dilation.

    >>> x, weight = torch.ones(2, 3, 8, 8), torch.ones(4, 3, 5, 5)
    >>> convolution(x, weight, None, (1, 1), (2, 2)).shape
    torch.Size([2, 4, 8, 8])
    """
    image, size = (x.shape[2], x.shape[3]), (weight.shape[2], weight.shape[3])
    answers = third(x[None], weight[None], (Role.IMAGES, Role.KERNELS), Geometry(image, size, stride, padding))[0]
    return answers if bias is None else answers + bias[:, None, None]


def third(one: Tensor, two: Tensor, roles: Roles, geometry: Geometry) -> Tensor:
    """The derivative of the form by the role that is not among ``roles``, which are those of ``one`` and ``two``."""
    found: Tensor = _Third.apply(one, two, roles, geometry)  # type: ignore[no-untyped-call]
    return found


class _Third(torch.autograd.Function):
    @staticmethod
    def forward(one: Tensor, two: Tensor, roles: Roles, geometry: Geometry) -> Tensor:
        with torch.cuda.device_of(one):
            return _makers(one)[_missing(roles)](dict(zip(roles, (one, two), strict=True)), geometry)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Roles, Geometry], output: Tensor) -> None:  # noqa: ARG004
        one, two, ctx.roles, ctx.geometry = inputs
        ctx.save_for_backward(one, two)
        ctx.save_for_forward(one, two)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (one, two), (first, second), missing = ctx.saved_tensors, ctx.roles, _missing(ctx.roles)
        of_one = third(two, slope, (second, missing), ctx.geometry) if ctx.needs_input_grad[0] else None
        of_two = third(one, slope, (first, missing), ctx.geometry) if ctx.needs_input_grad[1] else None
        return of_one, of_two, None, None

    @staticmethod
    def jvp(ctx: Any, along_one: Tensor | None, along_two: Tensor | None, *_: None) -> Tensor | None:
        one, two = ctx.saved_tensors
        by_one = None if along_one is None else third(along_one, two, ctx.roles, ctx.geometry)
        by_two = None if along_two is None else third(one, along_two, ctx.roles, ctx.geometry)
        return by_two if by_one is None else by_one if by_two is None else by_one + by_two

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], one: Tensor, two: Tensor, roles: Roles, geometry: Geometry
    ) -> tuple[Tensor, int]:
        def stacked(tensor: Tensor, at: int | None) -> Tensor:
            whole = tensor.expand(info.batch_size, *tensor.shape) if at is None else tensor.movedim(at, 0)
            return whole.flatten(0, 1)

        found = third(stacked(one, in_dims[0]), stacked(two, in_dims[1]), roles, geometry)
        return found.unflatten(0, (info.batch_size, -1)), 0


def _missing(roles: Roles) -> Role:
    (missing,) = set(Role) - set(roles)
    return missing


def _makers(like: Tensor) -> Mapping[Role, Maker]:
    if like.is_cuda and like.dtype == torch.float32 and works(like.device):
        from fedshift.engines.cuda.kernels import MAKERS

        return MAKERS
    return BY_GROUPS


def _answers(given: Mapping[Role, Tensor], geometry: Geometry) -> Tensor:
    x, w = given[Role.IMAGES], given[Role.KERNELS]
    grouped = F.conv2d(_side_by_side(x), w.flatten(0, 1), None, geometry.stride, geometry.padding, groups=len(x))
    return _apart(grouped, len(x))


def _kernels(given: Mapping[Role, Tensor], geometry: Geometry) -> Tensor:
    x, y = given[Role.IMAGES], given[Role.ANSWERS]
    shape = (len(x) * y.shape[2], x.shape[2], *geometry.size)
    rest = (geometry.stride, geometry.padding, 1, len(x))
    stacked: Tensor = conv2d_weight(_side_by_side(x), shape, _side_by_side(y), *rest).unflatten(0, (len(x), -1))
    return stacked


def _images(given: Mapping[Role, Tensor], geometry: Geometry) -> Tensor:
    w, y = given[Role.KERNELS], given[Role.ANSWERS]
    shape = (y.shape[1], len(w) * w.shape[2], *geometry.image)
    rest = (geometry.stride, geometry.padding, 1, len(w))
    return _apart(conv2d_input(shape, w.flatten(0, 1), _side_by_side(y), *rest), len(w))


BY_GROUPS: Mapping[Role, Maker] = {Role.ANSWERS: _answers, Role.KERNELS: _kernels, Role.IMAGES: _images}


def _side_by_side(stacked: Tensor) -> Tensor:
    """(K, N, C, H, W) to (N, K C, H, W): clients as groups of channels."""
    return stacked.transpose(0, 1).flatten(1, 2)


def _apart(grouped: Tensor, clients: int) -> Tensor:
    clients_second: Tensor = grouped.unflatten(1, (clients, -1))
    return clients_second.transpose(0, 1)
