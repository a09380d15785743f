"""Pictures of the usual formats, and arrays of any layout, as uint8 [N, channels, height, width]."""

from __future__ import annotations

import io
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from fedshift.data._room import check_room
from fedshift.data._rows import Rows, line
from fedshift.errors import UserError

MODES = {1: "L", 3: "RGB"}  # channels -> Pillow's name
# the formats that are read, whatever a file is called: Pillow knows others that start other programs (EPS: Ghostscript)
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
MOST_PIXELS = 100_000_000  # of one picture: a small file may claim to be larger than any memory
_THREADS = min(8, os.cpu_count() or 1)


def decode(rows: Rows, size: int | tuple[int, int] | None, channels: int) -> tuple[np.ndarray, Counter[str]]:
    """All images as uint8 [N, channels, height, width], and how many had which size and mode.

    ``size`` is the side of a square, or width and height; None keeps what is there.
    """
    if size is not None:
        width, height = (size, size) if isinstance(size, int) else size
        check_room(len(rows.encoded), (channels, height, width))
    with _own_limit():
        first, _ = _picture(rows, 0, size, channels)
    shape = first.shape
    check_room(len(rows.encoded), shape)
    images = np.empty((len(rows.encoded), *shape), dtype=np.uint8)

    def some(start: int) -> Counter[str]:
        kinds: Counter[str] = Counter()
        for i in range(start, min(start + 128, len(images))):
            pixels, kind = _picture(rows, i, size, channels)
            if pixels.shape != shape:
                raise UserError(
                    f"images differ in size, so a size is needed: {shape[2]}x{shape[1]} in {rows.where(0)} but "
                    f"{pixels.shape[2]}x{pixels.shape[1]} in {rows.where(i)}"
                )
            images[i] = pixels
            kinds[kind] += 1
        return kinds

    with _own_limit():
        total: Counter[str] = sum(in_threads(some, range(0, len(images), 128)), Counter())
    return images, total


def decode_readable(
    rows: Rows, size: tuple[int, int], channels: int
) -> tuple[np.ndarray, Counter[str], dict[int, str]]:
    """:func:`decode` of those that can be read, and of the others by number what is wrong with them."""

    def one(i: int) -> tuple[np.ndarray, str] | str:
        try:
            return _read(rows.encoded[i], size, channels)
        except Exception as error:  # as below
            return _why(error)

    with _own_limit():
        found = in_threads(one, range(len(rows.encoded)))
    whole = [item for item in found if not isinstance(item, str)]
    empty = np.empty((0, channels, size[1], size[0]), dtype=np.uint8)
    images = np.stack([pixels for pixels, _ in whole]) if whole else empty
    return (
        images,
        Counter(kind for _, kind in whole),
        {i: item for i, item in enumerate(found) if isinstance(item, str)},
    )


def _picture(rows: Rows, i: int, size: int | tuple[int, int] | None, channels: int) -> tuple[np.ndarray, str]:
    try:
        return _read(rows.encoded[i], size, channels)
    except Exception as error:  # Pillow's readers raise whatever their parsers stumble over
        raise UserError(undecodable(rows.where(i), _why(error))) from error


def _read(item: Any, size: int | tuple[int, int] | None, channels: int) -> tuple[np.ndarray, str]:
    """One image as [channels, height, width], and what it was."""
    with open_picture(item if isinstance(item, Path) else io.BytesIO(item)) as opened:
        kind = f"{opened.width}x{opened.height} {opened.mode}"
        return fitted(opened, size, channels), kind


def open_picture(file: Path | io.BytesIO) -> Image.Image:
    """A picture of one of the :data:`FORMATS`, and of no more than :data:`MOST_PIXELS`; nothing is decoded yet."""
    opened = Image.open(file, formats=FORMATS)
    if opened.width * opened.height > MOST_PIXELS:
        raise ValueError(f"it is too large ({opened.width}x{opened.height}, at most {MOST_PIXELS:,} pixels are read)")
    return opened


@contextmanager
def _own_limit() -> Iterator[None]:
    """Without Pillow's warning of large pictures, which :func:`open_picture` refuses. Filters hold for all threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        yield


def _why(error: Exception) -> str:
    return "its format is not known" if isinstance(error, UnidentifiedImageError) else line(error)


def undecodable(where: str, why: str) -> str:
    """The sentence about an image that cannot be read."""
    return f"the image in {where} cannot be decoded: {why}"


def fitted(picture: Image.Image, size: int | tuple[int, int] | None, channels: int) -> np.ndarray:
    """A picture upright, in these colours and this size (Pillow's bicubic filter), as [channels, height, width]."""
    upright = _eight_bit(ImageOps.exif_transpose(picture)).convert(MODES[channels])
    box = (size, size) if isinstance(size, int) else size
    if box is not None and upright.size != box:
        upright = upright.resize(box, Image.Resampling.BICUBIC)
    pixels = np.asarray(upright)
    return pixels.transpose(2, 0, 1) if channels == 3 else pixels[None]


def _eight_bit(picture: Image.Image) -> Image.Image:
    """Mend modes whose plain conversion is wrong: Pillow clips 16-bit grey to white, and palettes with alpha warn."""
    if picture.mode.startswith("I"):
        wide = np.clip(np.asarray(picture, dtype=np.int64), 0, 65535)
        return Image.fromarray(((wide + 128) // 257).astype(np.uint8))
    if picture.mode == "F":
        raise ValueError("pictures of floating-point numbers are not supported")
    return picture.convert("RGBA") if picture.mode in ("P", "PA") else picture


def as_pixels(images: np.ndarray | Tensor) -> np.ndarray:
    """Arrays in any of the accepted layouts as uint8 [N, C, H, W]."""
    if isinstance(images, Tensor):  # numpy has no bfloat16
        images = (images.float() if images.is_floating_point() else images).detach().cpu().numpy()
    array = np.asarray(images)
    if array.ndim == 3:
        array = array[:, None]
    if array.ndim == 4 and array.shape[1] not in (1, 3) and array.shape[3] in (1, 3):
        array = array.transpose(0, 3, 1, 2)
    if array.ndim != 4 or array.shape[1] not in (1, 3):
        raise UserError(
            f"images must be [N, H, W], [N, C, H, W] or [N, H, W, C] with 1 or 3 channels, not {list(images.shape)}"
        )
    if np.issubdtype(array.dtype, np.floating):
        # `not (...)` rather than `... < 0 or ... > 1`: it also catches NaN
        if array.size and not (array.min() >= 0.0 and array.max() <= 1.0):
            raise UserError(f"float images must lie in [0, 1], found {array.min():g}..{array.max():g}")
        return np.rint(array * 255.0).astype(np.uint8)
    if array.dtype != np.uint8:
        raise UserError(f"images must be uint8 or floats in [0, 1], not {array.dtype}")
    return np.array(array, order="C")


def in_threads(work: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(work, items))
