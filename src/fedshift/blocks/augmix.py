"""AugMix views of images (Hendrycks et al. 2020), batched: what MEMO and FedTHE+ show a model besides the image itself.

A view mixes the image, cropped and flipped at random, with three chains of one to three random operations on it. Up to
the mixing everything is integer arithmetic on bytes that reproduces Pillow bit for bit, so a view is a function of its
image and its own numbers alone: the same in any batch, and the same on a CPU and on a GPU up to the rounding of the
mixing. Geometric operations repeat Pillow's nearest-neighbour sampling in 16.16 fixed point. What computes an
operation's parameter is in float64, one rounding after the other as Pillow and AugMix do it in Python.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedshift.errors import UserError

# The geometric operations come first; ``operate`` works on slices of images sorted by their place here.
OPERATIONS: tuple[str, ...] = (
    "rotate",
    "shear-x",
    "shear-y",
    "translate-x",
    "translate-y",
    "autocontrast",
    "equalize",
    "solarize",
    "posterize",
)
CHAINS = 3
DEPTH = 3

# A view's numbers in order: 3 for crop row, crop column and flip; 1 for each chain's weight; 1 for the share of the
# image itself; 1 for each chain's depth; 3 (operation, level, sign) for each step of each chain.
NUMBERS = 3 + CHAINS + 1 + CHAINS + CHAINS * DEPTH * 3

_GEOMETRIC = 5
_MIN_LEVEL, _MAX_LEVEL = 0.1, 10.0
_MAX_ANGLE = 30
_BLOCK_VALUES = 2**21  # values (views x channels x pixels) made at once: what stays in a CPU's cache


def _turn(degrees: int) -> tuple[float, float]:
    """Cosine and sine of a rotation as Pillow takes them: of the opposite angle, to 15 places."""
    angle = -math.radians(degrees)
    return round(math.cos(angle), 15), round(math.sin(angle), 15)


_TURNS = tuple(_turn(degrees) for degrees in range(-_MAX_ANGLE, _MAX_ANGLE + 1))


def _choice(u: Tensor, count: int) -> Tensor:
    """Uniform numbers as whole ones below ``count`` (float64 numbers close to 1 would round up to it)."""
    return (u.double() * count).long().clamp(max=count - 1)


def _inverse(order: Tensor) -> Tensor:
    """Where each element went: the inverse of a permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def _warp(images: Tensor, matrix: Tensor) -> Tensor:
    """Pixel (x, y) becomes the one at (ax + by + c, dx + ey + f), rows ``a..f`` of ``matrix`` in pixels; outside is 0.

    These are Pillow's steps for nearest neighbours: coefficients and the position of the first pixel's centre are
    rounded to 16.16 fixed point, from there on everything is exact.
    """
    height, width = images.shape[2:]
    a, b, c, d, e, f = matrix.unbind(1)
    fixed = torch.stack((a, b, c + a * 0.5 + b * 0.5, d, e, f + d * 0.5 + e * 0.5), 1).mul(65536.0).add(0.5).floor()
    a, b, c, d, e, f = fixed.to(torch.int32)[:, :, None, None].unbind(1)
    columns = torch.arange(width, dtype=torch.int32, device=images.device)
    rows = torch.arange(height, dtype=torch.int32, device=images.device)[:, None]
    x = (columns * a + c).add(rows * b).bitwise_right_shift_(16)
    y = (columns * d).add(rows * e + f).bitwise_right_shift_(16)
    near_x, near_y = x.clamp(0, width - 1), y.clamp(0, height - 1)
    outside = x.bitwise_xor_(near_x).bitwise_or_(y.bitwise_xor_(near_y)).bool()  # on a CPU faster than comparisons
    source = near_y.mul_(width).add_(near_x).flatten(1).long()[:, None].expand(-1, images.shape[1], -1)
    return images.flatten(2).gather(2, source).view_as(images).mul_((~outside).to(torch.uint8)[:, None])


def _crop_and_flip(images: Tensor, draws: Tensor, flip: bool) -> Tensor:
    """Crop out of a border of zeros, an eighth of the side wide (at least 1), then mirror every other image."""
    height, width = images.shape[2:]
    pads = max(1, height // 8), max(1, width // 8)
    top, left = (_choice(draws[:, i], 2 * pad + 1) - pad for i, pad in enumerate(pads))
    mirrored = (draws[:, 2] >= 0.5) & flip
    matrix = draws.new_zeros(len(draws), 6, dtype=torch.float64)
    matrix[:, 0] = torch.where(mirrored, -1.0, 1.0)
    matrix[:, 2] = left + mirrored * width
    matrix[:, 4] = 1.0
    matrix[:, 5] = top
    return _warp(images, matrix)


def _move(images: Tensor, amount: Tensor, counts: Sequence[int]) -> Tensor:
    """The geometric operations on images sorted by operation, ``counts`` of each; ``amount`` carries the sign."""
    x, y = images.shape[3] / 2, images.shape[2] / 2
    angle, *others = amount.split(counts)
    cos, sin = amount.new_tensor(_TURNS)[angle.long() + _MAX_ANGLE].unbind(1)
    matrix = torch.zeros_like(amount)[:, None].repeat(1, 6)
    matrix[:, ::4] = 1.0
    turned, *rest = matrix.split(counts)
    turned.copy_(torch.stack((cos, sin, cos * -x + sin * -y + x, -sin, cos, sin * x + cos * -y + y), 1))
    for part, place, value in zip(rest, (1, 3, 2, 5), others, strict=True):
        part[:, place] = value
    return _warp(images, matrix)


def _autocontrast(images: Tensor) -> Tensor:
    """Stretch each channel from its darkest to its lightest value over 0..255; a flat one stays."""
    low, high = (t.double() for t in (images.amin((2, 3), True), images.amax((2, 3), True)))
    flat = low == high
    # Both a tensor: torch turns a division of or by a number into a product with a rounded reciprocal.
    scale = (torch.full_like(low, 255.0) / (high - low)).masked_fill_(flat, 1.0)
    offset = (low * scale).masked_fill_(flat, 0.0)
    return images.double().mul_(scale).sub_(offset).int().to(torch.uint8)


def _equalize(images: Tensor) -> Tensor:
    """Spread each channel's values evenly over 0..255, in steps of a whole number of pixels."""
    values = images.flatten(2).long()
    levels = torch.arange(256, dtype=torch.int32, device=images.device)
    one = torch.ones((), dtype=torch.int32, device=images.device)
    histogram = levels.new_zeros(*images.shape[:2], 256).scatter_add_(2, values, one.expand_as(values))
    lightest = histogram.gather(2, images.flatten(2).amax(2, keepdim=True).long())
    step = (values.shape[2] - lightest) // 255
    darker = histogram.cumsum(2, dtype=torch.int32).sub_(histogram)
    table = ((darker + step // 2) // step.clamp(min=1)).clamp_(max=255)
    return torch.where(step > 0, table, levels).to(torch.uint8).gather(2, values).view_as(images)


def _solarize(images: Tensor, amount: Tensor) -> Tensor:
    """Invert the ``amount`` lightest values."""
    amount = amount.int()[:, None, None, None]
    limit, every = (255 - amount).clamp(min=0).to(torch.uint8), (amount > 255).to(torch.uint8)
    # A mask of bytes 0 and 255 from differences of bytes: comparisons and torch.where take 30 times longer on a CPU.
    light = (images - torch.minimum(images, limit)).clamp_(max=1).bitwise_or_(every).neg_()
    return light.bitwise_xor_(images)


def _posterize(images: Tensor, amount: Tensor) -> Tensor:
    """Keep the ``4 - amount`` highest bits."""
    mask = (0xFF << (4 + amount.long())) & 0xFF
    return images & mask.to(torch.uint8)[:, None, None, None]


def operate(images: Tensor, operation: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    """Apply to each of the uint8 ``images`` ``[m, channels, H, W]`` one operation, exactly as Pillow does.

    ``operation`` ``[m]`` is a place in ``OPERATIONS``, ``level`` ``[m]`` its strength in 0..10 and ``sign`` ``[m]`` the
    direction, 1 or -1, of a rotation (30 degrees at level 10), shear (0.3) or translation (a third of the side).

    >>> x = torch.tensor([[[[10, 20, 30, 40]]]], dtype=torch.uint8)
    >>> shift = torch.tensor([OPERATIONS.index("translate-x")])
    >>> operate(x, shift, torch.tensor([9.0]), torch.tensor([-1.0])).tolist()
    [[[[0, 10, 20, 30]]]]
    """
    height, width = images.shape[2:]
    level = level.double()
    most = level.new_tensor((_MAX_ANGLE, 0.3, 0.3, width / 3, height / 3, 0.0, 0.0, 256.0, 4.0))[operation]
    amount = level * most / torch.full_like(level, _MAX_LEVEL)  # by a tensor: see _autocontrast
    shears = (operation == OPERATIONS.index("shear-x")) | (operation == OPERATIONS.index("shear-y"))
    amount = torch.where(shears, amount, amount.trunc())
    # Weak translations and rotations round to nothing; such images are left alone, as a tenth kind.
    kind = operation.masked_fill((operation < _GEOMETRIC) & (amount == 0), len(OPERATIONS))
    order = kind.argsort(stable=True)
    counts = kind.bincount(minlength=len(OPERATIONS) + 1).tolist()
    amount = torch.where(kind < _GEOMETRIC, amount * sign, amount).index_select(0, order)
    pieces = [sum(counts[:_GEOMETRIC]), *counts[_GEOMETRIC:]]
    moved, dull, uneven, light, fine, still = images.index_select(0, order).split(pieces)
    moves, _, _, solarized, posterized, _ = amount.split(pieces)
    done = (
        _move(moved, moves, counts[:_GEOMETRIC]),
        _autocontrast(dull),
        _equalize(uneven),
        _solarize(light, solarized),
        _posterize(fine, posterized),
        still,
    )
    return torch.cat(done).index_select(0, _inverse(order))


def layers(images: Tensor, draws: Tensor, severity: float = 1.0, flip: bool = True) -> Tensor:
    """What a view mixes, as bytes ``[1 + CHAINS, m, channels, H, W]``: the image, cropped and flipped, and its chains.

    ``images`` are uint8 ``[m, channels, H, W]``, one per view; ``draws`` is ``[m, NUMBERS]``.

    >>> x = torch.full((1, 1, 8, 8), 200, dtype=torch.uint8)
    >>> layers(x, torch.full((1, NUMBERS), 0.5)).shape
    torch.Size([4, 1, 1, 8, 8])
    """
    m = len(images)
    image = _crop_and_flip(images, draws, flip)
    depth, steps = draws[:, 7:].split((CHAINS, CHAINS * DEPTH * 3), 1)
    depth = _choice(depth, DEPTH).t().flatten() + 1
    # Sorted by depth, the chains that still have a step to go are the first ones: a slice.
    order = depth.argsort(descending=True, stable=True)
    going = [m * CHAINS, *depth.bincount(minlength=DEPTH + 1).flip(0).cumsum(0)[: DEPTH - 1].flip(0).tolist()]
    steps = steps.reshape(m, CHAINS, DEPTH, 3).transpose(0, 1).flatten(0, 1).double().index_select(0, order)
    operation, level, sign = steps.unbind(2)
    operation, sign = _choice(operation, len(OPERATIONS)), torch.where(sign < 0.5, 1.0, -1.0)
    level = level * (severity - _MIN_LEVEL) + _MIN_LEVEL
    chains = image.index_select(0, order % max(1, m))
    for step, n in enumerate(going):
        chains[:n] = operate(chains[:n], operation[:n, step], level[:n, step], sign[:n, step])
    return torch.cat((image, chains.index_select(0, _inverse(order)))).view(1 + CHAINS, *images.shape)


def weights(draws: Tensor) -> Tensor:
    """Each layer's share in a view, ``[1 + CHAINS, m]`` float32: Beta(1, 1) for the image, Dirichlet(1) for the rest.

    They are computed in float64 and rounded, so that the last digit of a logarithm, which may depend on the device and
    on the place in a batch, is not seen.

    >>> weights(torch.full((1, NUMBERS), 0.25)).flatten()
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    exponential, share = draws[:, 3:7].double().t().split((CHAINS, 1))
    exponential = -exponential.clamp(min=2.0**-25).log()  # half of the smallest float32 that rng.uniform draws
    return torch.cat((share, (1.0 - share) * exponential / exponential.sum(0))).float()


def _block_values(device: torch.device) -> int:
    """On a GPU the host waits for every block, so they are large: each value takes about twenty bytes in between."""
    if device.type != "cuda":
        return _BLOCK_VALUES
    return min(2**28, torch.cuda.get_device_properties(device).total_memory >> 8)


def views(x: Tensor, draws: Tensor, severity: float = 1.0, flip: bool = True) -> Tensor:
    """AugMix views of images in [0, 1]: ``[n, channels, H, W]`` and ``[n, views, NUMBERS]`` uniform numbers on [0, 1).

    The images' values are rounded to bytes first. The result is ``[n, views, channels, H, W]`` in ``x``'s dtype, in
    [0, 1]. The level of every operation is uniform between 0.1 and ``severity`` (at most 10). Without ``flip`` no view
    is mirrored (digits, letters).

    >>> from fedshift.core import rng
    >>> x = torch.rand(3, 1, 8, 8)
    >>> draws = rng.uniform(0, torch.arange(3), (5, NUMBERS))
    >>> views(x, draws).shape
    torch.Size([3, 5, 1, 8, 8])
    >>> torch.equal(views(x, draws)[1:2, 2:4], views(x[1:2], draws[1:2, 2:4]))    # of its image and numbers alone
    True
    """
    if not _MIN_LEVEL <= severity <= _MAX_LEVEL:
        raise UserError(f"the severity of AugMix must be in {_MIN_LEVEL:g}..{_MAX_LEVEL:g}, not {severity:g}")
    if draws.ndim != 3 or draws.shape[::2] != (len(x), NUMBERS):
        raise UserError(f"views of {len(x)} images need [{len(x)}, views, {NUMBERS}] numbers, not {list(draws.shape)}")
    n, count = draws.shape[:2]
    dtype = torch.promote_types(x.dtype, torch.float32)
    images = (x.to(dtype) * 255.0).round().clamp(0, 255).to(torch.uint8)
    draws = draws.flatten(0, 1)
    result = torch.empty(n * count, *x.shape[1:], dtype=dtype, device=x.device)
    block = max(1, _block_values(x.device) // max(1, x[:1].numel()))
    scratch = torch.empty_like(result[:block])
    for start in range(0, n * count, block):
        part = slice(start, start + block)
        source = torch.arange(start, min(start + block, n * count), device=x.device) // count
        stack = layers(images.index_select(0, source), draws[part], severity, flip)
        shares = (weights(draws[part]).to(dtype) * (1 / 255))[:, :, None, None, None]
        # Products and sums one at a time: a fused one may round differently from place to place.
        mixed = torch.mul(stack[0], shares[0], out=result[part])
        for layer, share in zip(stack[1:], shares[1:], strict=True):
            mixed += torch.mul(layer, share, out=scratch[: len(mixed)])
        mixed.clamp_(0.0, 1.0)
    return result.view(n, count, *x.shape[1:]).to(x.dtype)
