"""Corrupting a batch of uint8 images: all by one corruption, or each by one that is drawn for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from fedshift.core import rng
from fedshift.data.corruptions import blur, digital, noise, weather
from fedshift.data.corruptions.blur import PUBLISHED
from fedshift.data.corruptions.draws import Corruption, Draws
from fedshift.data.corruptions.severities import SEVERITIES
from fedshift.errors import UserError

CHUNK_VALUES = MappingProxyType({"cpu": 2**20, "cuda": 2**25})  # pixels x channels worked on at once
CORRUPTIONS: Mapping[str, Corruption] = MappingProxyType(
    {**noise.CORRUPTIONS, **blur.CORRUPTIONS, **weather.CORRUPTIONS, **digital.CORRUPTIONS}
)
NAMES: tuple[str, ...] = tuple(CORRUPTIONS)


def _check(images: Tensor, severity: int, ids: Tensor, names: Sequence[str]) -> None:
    """Refuse what cannot be corrupted."""
    wrong = ", ".join(repr(name) for name in names if name not in CORRUPTIONS)
    if wrong:
        raise UserError(f"unknown corruption {wrong}: choose from {', '.join(NAMES)}")
    if severity not in (1, 2, 3, 4, 5):
        raise UserError(f"severity must be 1, 2, 3, 4 or 5, not {severity}")
    if images.dtype == torch.uint8 and images.ndim == 4 and min(images.shape[2:]) < 8:
        raise UserError(f"images to corrupt must have 8 x 8 pixels or more, not {images.shape[2]} x {images.shape[3]}")
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3) or min(images.shape[2:]) < 8:
        raise UserError(
            "images to corrupt must be uint8 [B, 1 or 3, height, width] of at least 8 x 8 pixels, "
            f"not {images.dtype} {list(images.shape)}"
        )
    if ids.shape != (len(images),):
        raise UserError(f"{len(images)} images need as many sample ids, not {list(ids.shape)}")


def corrupt(images: Tensor, name: str, severity: int, seed: int, ids: Tensor, published: bool = False) -> Tensor:
    """Apply the corruption ``name`` at a severity of 1 to 5 to uint8 images ``[B, C, H, W]`` with C 1 or 3.

    ``ids`` ``[B]`` are the images' sample ids. Each result is a function of (seed, id, name, severity, pixels) only,
    bitwise the same in any batch on one device. Between 64 and 224 pixels the constants are interpolated with the
    image side (see the package). ``published`` repeats the slips of the files that were published.

    >>> x = torch.arange(2 * 3 * 16 * 16).reshape(2, 3, 16, 16).to(torch.uint8)
    >>> both = corrupt(x, "fog", 3, seed=0, ids=torch.tensor([4, 9]))
    >>> torch.equal(both[1:], corrupt(x[1:], "fog", 3, seed=0, ids=torch.tensor([9])))
    True
    >>> corrupt(x, "hail", 3, seed=0, ids=torch.tensor([4, 9]))    # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    fedshift.errors.UserError: unknown corruption 'hail': choose from gaussian-noise, shot-noise, ..., jpeg
    """
    _check(images, severity, ids, (name,))
    ids = ids.to(images.device)
    corruption = PUBLISHED.get(name, CORRUPTIONS[name]) if published else CORRUPTIONS[name]
    constants = SEVERITIES[name].constants(severity, min(images.shape[2:]))
    chunk = max(1, CHUNK_VALUES.get(images.device.type, 2**20) // images[:1].numel()) if len(images) else 1
    result = torch.empty_like(images, memory_format=torch.contiguous_format)
    for start in range(0, len(images), chunk):
        part = slice(start, start + chunk)
        values = corruption(images[part].float().contiguous(), Draws(seed, name, ids[part]), constants)
        result[part] = values.round().clamp(0, 255).to(torch.uint8)
    return result


def mixed_choice(seed: int, ids: Tensor, names: Sequence[str] = NAMES) -> Tensor:
    """The index into ``names`` that ``corrupt_mixed`` picks for each sample id, uniformly: int64 ``[B]``.

    >>> mixed_choice(0, torch.arange(3000)).bincount(minlength=15).min().item() > 150
    True
    """
    if not names:
        raise UserError(f"a mixture needs at least one corruption: choose from {', '.join(NAMES)}")
    return rng.integers(rng.seed_of(seed, "corruption", "choice"), ids, len(names))


def corrupt_mixed(
    images: Tensor, severity: int, seed: int, ids: Tensor, names: Sequence[str] = NAMES, published: bool = False
) -> Tensor:
    """Corrupt each image by one of ``names``, picked uniformly as a function of (seed, id).

    >>> x, ids = torch.full((4, 1, 8, 8), 99, dtype=torch.uint8), torch.arange(4)
    >>> first = NAMES[int(mixed_choice(7, ids)[0])]
    >>> torch.equal(corrupt_mixed(x, 5, 7, ids)[:1], corrupt(x[:1], first, 5, 7, ids[:1]))
    True
    """
    _check(images, severity, ids, names)
    ids = ids.to(images.device)
    choice = mixed_choice(seed, ids, names)
    result = torch.empty_like(images, memory_format=torch.contiguous_format)
    for i, name in enumerate(names):
        chosen = (choice == i).nonzero()[:, 0]
        if len(chosen):
            result[chosen] = corrupt(images[chosen], name, severity, seed, ids[chosen], published)
    return result
