"""Images as people have them (arrays, pictures, files) as the bytes a network was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedshift.data._pixels import fitted, open_picture
from fedshift.data._rows import line
from fedshift.data.windows import Window
from fedshift.errors import UserError

RawImage: TypeAlias = np.ndarray | Tensor | Image.Image | str | Path
RawImages: TypeAlias = RawImage | Sequence[RawImage]


def as_bytes(images: RawImages, shape: Sequence[int], window: Window | None = None) -> Tensor:
    """Raw images as uint8 [n, channels, height, width] of this shape, one image as a batch of one.

    An array is uint8 [height, width], [height, width, channels] or a batch of the latter, as Pillow and OpenCV have it
    (red first); a tensor is uint8 [channels, height, width] or a batch, as torch has it. Pillow's images and paths of
    picture files are taken too, and lists of all of these. Other sizes and colours are fitted as ``fedshift join`` does:
    Pillow's bicubic filter, grey and colour converted. ``window`` is of greys of more than eight bits, DICOM among them.

    >>> as_bytes(np.zeros((9, 7, 3), dtype=np.uint8), (3, 8, 8)).shape
    torch.Size([1, 3, 8, 8])
    >>> as_bytes([Image.new("L", (20, 20)), np.zeros((8, 8, 3), dtype=np.uint8)], (3, 8, 8)).shape
    torch.Size([2, 3, 8, 8])
    """
    found = [_fitted(image, shape, window) for image in _singles(images)]
    if not found:
        raise UserError("there are no images to answer to")
    return torch.from_numpy(np.stack(found))


def _singles(images: RawImages) -> Sequence[np.ndarray | Image.Image | str | Path]:
    """One by one; arrays have their channels last."""
    if isinstance(images, Tensor):
        if images.dtype != torch.uint8 or images.dim() not in (3, 4):
            found = f"{str(images.dtype).removeprefix('torch.')} {list(images.shape)}"
            raise UserError(f"a tensor of images must be uint8 [n, channels, height, width], not {found}")
        return _singles(images.detach().cpu().movedim(-3, -1).numpy())
    if isinstance(images, np.ndarray):
        grey = images.ndim == 2
        if images.dtype != np.uint8 or not (grey or (images.ndim in (3, 4) and images.shape[-1] in (1, 3, 4))):
            found = f"{images.dtype} {list(images.shape)}"
            raise UserError(f"an array of images must be uint8 [n, height, width, channels], not {found}")
        return list(images) if images.ndim == 4 else [images]
    if isinstance(images, Image.Image | str | Path):
        return [images]
    if isinstance(images, Sequence):
        return [one for image in images for one in _singles(image)]
    raise UserError(f"images must be arrays, tensors, Pillow's images or paths, not {type(images).__name__}")


def _fitted(image: np.ndarray | Image.Image | str | Path, shape: Sequence[int], window: Window | None) -> np.ndarray:
    channels, height, width = shape
    if isinstance(image, np.ndarray):
        grey = image.ndim == 3 and image.shape[2] == 1
        return fitted(Image.fromarray(image[:, :, 0] if grey else image), (width, height), channels)
    if isinstance(image, Image.Image):
        return fitted(image, (width, height), channels, window)
    try:
        with open_picture(Path(image), window=window) as opened:
            return fitted(opened, (width, height), channels, window)
    except Exception as error:  # Pillow's readers raise whatever their parsers stumble over
        raise UserError(f"the image in {image} cannot be decoded: {line(error)}") from None
