"""Convolutions of stacked clients, each the way that is fastest.

``vmap`` makes one convolution with K groups of the convolutions of K clients. cuDNN is good at those, but not where a group
has few input channels, nor on maps of a few positions, for which it has no kernel on tensor cores. Three other ways:

- Patches: those of the images are written out, a row for each position, and multiplied with every client's kernels at once.
- Implicit: kernels of our own read the patches where they lie (``kernels.py``), where products may round to TF32.
- Folded: a large stride becomes channels (every square of stride x stride pixels is one position), then as implicit.

``benchmarks/convolutions.py`` measures all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedshift.core.optim import descended
from fedshift.engines.cuda import maps, normalisation, trilinear
from fedshift.engines.cuda.geometry import Geometry, Pair, Shape
from fedshift.engines.cuda.ways import by_folding, by_patches

FEW_POSITIONS = 16  # cuDNN has no fast kernel for a map of so many
SMALL_PATCH = 100  # numbers in a patch that is cheap to write out
MOST_NUMBERS = 1 << 29  # in one layer's patches, which training keeps until it goes back
CHANNELS = 16  # kernels of our own like channels in multiples of this, but for those of pictures
PICTURES = 4  # channels that pictures have at most
PICTURE_PATCH = 150  # numbers in a patch of a picture up to which they are faster
ADDRESSABLE = 1 << 30  # numbers of a client's batch that they can count
MOST_STACKED = (1 << 16) - 1  # clients: layers of a grid


class StackedNormalisation(TorchFunctionMode):
    """While it lasts, BatchNorm takes maps in whatever order of memory ``vmap`` has made of them.

    >>> with StackedNormalisation():
    ...     F.batch_norm(torch.ones(2, 3), torch.zeros(3), torch.ones(3)).shape
    torch.Size([2, 3])
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Every call of torch comes along here; nearly all go on as they are."""
        if func is F.batch_norm:
            return _normalised(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class StackedConvolutions(StackedNormalisation):
    """While it lasts, 2d convolutions go the way that is fastest for stacked clients; so do pooling and steps of SGD.

    ``stack`` is how many clients each call stands for (None: as many as transforms have stacked, so that calls outside of
    them stay torch's own): patches that would take too much memory are not written out. ``ours`` says whether convolutions
    of our own can be used; the ways that were gone are added to ``used``.

    >>> x, weight, used = torch.ones(2, 3, 8, 8), torch.ones(4, 3, 5, 5), set()
    >>> with StackedConvolutions(used=used):
    ...     F.conv2d(x, weight).shape
    torch.Size([2, 4, 4, 4])
    >>> used
    {'patches'}
    """

    def __init__(self, stack: int | None = 1, used: set[str] | None = None, ours: bool = False) -> None:
        super().__init__()
        self._stack, self._ours = stack, ours
        self._used = set() if used is None else used

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Convolutions, and what else is not as it should be for stacked clients."""
        given = kwargs or {}
        if func is descended:
            return _descended(*args, **given)
        if func is F.max_pool2d:
            return _pooled(*args, **given)
        if func is torch.conv2d or func is F.conv2d:
            stack = transforms()[0] if self._stack is None else self._stack
            if self._stack is not None or stack > 1:
                return _convolved(stack, self._used, self._ours, *args, **given)
        return super().__torch_function__(func, types, args, kwargs)


def transforms() -> tuple[int, int]:
    """How many clients ``vmap`` has stacked here, and how many times something is differentiated (forward: twice).

    >>> from torch.func import grad, vmap
    >>> found = []
    >>> _ = vmap(grad(lambda x: (found.append(transforms()), x)[1]))(torch.ones(3))
    >>> found, transforms()
    ([(3, 1)], (1, 0))
    """
    stack, times = 1, 0
    kinds = torch._C._functorch.TransformType
    for level in torch._C._functorch.get_interpreter_stack() or ():
        if level.key() == kinds.Vmap:
            stack *= torch._C._functorch.CVmapInterpreterPtr(level).batchSize()
        else:
            times += 1 if level.key() == kinds.Grad else 2
    return stack, times


def _descended(
    leaf: Tensor, grad: Tensor, velocity: Tensor | None, rate: Tensor | float, momentum: float, decay: float
) -> tuple[Tensor, Tensor | None]:
    """One pass where clients are stacked and nobody differentiates the step."""
    stack, times = transforms()
    backward = times > 0 or (torch.is_grad_enabled() and (leaf.requires_grad or grad.requires_grad))
    if backward or not 1 < stack <= MOST_STACKED:
        return descended(leaf, grad, velocity, rate, momentum, decay)
    rates = rate if isinstance(rate, Tensor) else leaf.new_full((), rate)
    return maps.descended(leaf, grad, velocity, rates, momentum, decay)


def _pooled(
    input: Tensor,
    kernel_size: int | Pair,
    stride: int | Pair | None = None,
    padding: int | Pair = 0,
    dilation: int | Pair = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """``F.max_pool2d``, in one pass each way."""
    size = pair(kernel_size)
    if ceil_mode or return_indices or pair(dilation) != (1, 1) or input.dim() != 4 or transforms()[0] == 1:
        return F.max_pool2d(input, size, stride, padding, dilation, ceil_mode, return_indices)  # type: ignore[call-overload]
    if math.prod(size) > maps.MOST_IN_A_WINDOW:
        return F.max_pool2d(input, size, stride, padding)
    image = (input.shape[2], input.shape[3])
    return maps.max_pool(input, Geometry(image, size, pair(stride or kernel_size), pair(padding)))


def _convolved(
    stack: int,
    used: set[str],
    ours: bool,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Pair = 1,
    padding: int | str | Pair = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
) -> Tensor:
    """``F.conv2d``, one way or another."""
    fits = input.dim() == 4 and input.shape[1] == weight.shape[1]
    if isinstance(padding, str) or pair(dilation) != (1, 1) or groups != 1 or not fits:
        used.add("groups")
        return F.conv2d(input, weight, bias, stride, padding, dilation, groups)
    strides, pads = pair(stride), pair(padding)
    way = fastest(stack, shape_of(input), shape_of(weight), strides, pads, ours)
    used.add(way)
    return WAYS[way](input, weight, bias, strides, pads)


def _normalised(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """``F.batch_norm`` of maps in any order of memory.

    cuDNN's refuses some that ``vmap`` makes: clients side by side as channels are not contiguous where each has one channel,
    and no copy of one's own changes that. It says so before it does anything; then the formula takes its place.
    """
    own = training or running_mean is None or running_var is None
    stack, times = transforms()
    countable = input.shape[1] < input.numel() < ADDRESSABLE  # at least two of a channel
    if own and stack > 1 and times <= 1 and countable and normalisation.suits(input):
        return _by_own_statistics(input, running_mean, running_var, weight, bias, momentum, eps)
    try:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    except RuntimeError as error:
        if "contiguous" not in str(error):
            raise
    over, shape = [0, *range(2, input.dim())], (1, -1, *[1] * (input.dim() - 2))
    mean, var = running_mean, running_var
    if training or mean is None or var is None:
        mean, var = input.mean(over), input.var(over, correction=0)
        _refresh(input, running_mean, running_var, mean.detach(), var.detach(), momentum)
    normalised = (input - mean.view(shape)) * (var.view(shape) + eps).rsqrt()
    normalised = normalised if weight is None else normalised * weight.view(shape)
    return normalised if bias is None else normalised + bias.view(shape)


def _by_own_statistics(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:
    """The same by kernels of our own."""
    ones, zeros = input.new_ones(input.shape[1]), input.new_zeros(input.shape[1])
    scale, shift = ones if weight is None else weight, zeros if bias is None else bias
    y, mean, var = normalisation.batch_norm(input, scale, shift, eps)
    _refresh(input, running_mean, running_var, mean, var, momentum)
    return y


def _refresh(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, mean: Tensor, var: Tensor, momentum: float
) -> None:
    """What BatchNorm keeps for later is the unbiased variance."""
    if running_mean is None or running_var is None:
        return
    count = input.numel() / input.shape[1]
    running_mean.copy_((1 - momentum) * running_mean + momentum * mean)
    running_var.copy_((1 - momentum) * running_var + momentum * (var * (count / (count - 1))))


def fastest(stack: int, images: Shape, kernels: Shape, stride: Pair, padding: Pair, ours: bool) -> str:
    """Which of ``WAYS`` is, for so many clients; ``ours`` says whether kernels of our own can be used.

    >>> fastest(50, (64, 3, 32, 32), (32, 3, 5, 5), (1, 1), (2, 2), ours=False)
    'patches'
    >>> fastest(50, (64, 3, 32, 32), (32, 3, 5, 5), (1, 1), (2, 2), ours=True)
    'implicit'
    >>> fastest(50, (64, 32, 16, 16), (64, 32, 5, 5), (1, 1), (2, 2), ours=False)
    'groups'
    """
    geometry = Geometry(images[2:], kernels[2:], stride, padding)
    spots, patch = math.prod(geometry.positions), math.prod(kernels[1:])
    back = (side + reach - 1 for side, reach in zip(geometry.image, geometry.size, strict=True))
    largest = images[0] * max(images[1], kernels[0]) * max(math.prod(geometry.frame), math.prod(back))
    ours = ours and 1 < stack <= MOST_STACKED and largest < ADDRESSABLE
    if ours and folding_pays(kernels, stride) and spots > FEW_POSITIONS:
        return "folded"
    ours = ours and implicit_pays(kernels, stride)
    writable = stack * images[0] * spots * patch <= MOST_NUMBERS
    single = kernels[2:] == (1, 1)  # a product of matrices as it is
    if writable and (single or spots <= FEW_POSITIONS or (patch <= SMALL_PATCH and not ours)):
        return "patches"
    return "implicit" if ours else "groups"


def implicit_pays(kernels: Shape, stride: Pair) -> bool:
    """Whether kernels of our own are faster at convolutions with kernels of this shape, (D, C, R, S).

    >>> implicit_pays((64, 32, 5, 5), (1, 1)), implicit_pays((32, 1, 5, 5), (1, 1)), implicit_pays((64, 32, 1, 1), (1, 1))
    (True, True, False)
    """
    out, channels, tall, wide = kernels
    first = channels <= PICTURES and channels * tall * wide <= PICTURE_PATCH
    # on the way back, which pictures do not need, a stride means zeros between outputs that cost as much as outputs
    later = channels % CHANNELS == 0 and max(stride) <= 2
    return out % CHANNELS == 0 and tall * wide > 1 and (first or later)


def folding_pays(kernels: Shape, stride: Pair) -> bool:
    """Whether a stride is too large for kernels of our own as it is, and makes channels that they like.

    >>> folding_pays((64, 3, 11, 11), (4, 4)), folding_pays((64, 32, 3, 3), (2, 2)), folding_pays((64, 3, 4, 4), (4, 4))
    (True, False, False)
    """
    out, channels, tall, wide = kernels
    overlap = tall > stride[0] and wide > stride[1]  # otherwise patches are the pixels, each once
    return overlap and max(stride) > 2 and out % CHANNELS == 0 and channels * math.prod(stride) % CHANNELS == 0


WAYS: Mapping[str, Callable[[Tensor, Tensor, Tensor | None, Pair, Pair], Tensor]] = {
    "groups": F.conv2d,  # which vmap makes of it
    "patches": by_patches,
    "implicit": trilinear.convolution,
    "folded": by_folding,
}


def shape_of(tensor: Tensor) -> Shape:
    """Of four dimensions."""
    one, two, three, four = tensor.shape
    return one, two, three, four


def pair(value: int | Sequence[int]) -> Pair:
    """As torch reads it: one number stands for both.

    >>> pair(2), pair((1, 2)), pair([3])
    ((2, 2), (1, 2), (3, 3))
    """
    return (value, value) if isinstance(value, int) else (value[0], value[-1])
