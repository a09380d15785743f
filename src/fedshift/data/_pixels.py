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
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from fedshift.data import windows
from fedshift.data._room import check_room
from fedshift.data._rows import Rows, line
from fedshift.data.dicom import DICOM, DICOM_HEAD, TooLarge, dicom_picture, is_dicom
from fedshift.data.windows import Window
from fedshift.errors import UserError

MODES = {1: "L", 3: "RGB"}  # channels -> Pillow's name
# the formats that are read, whatever a file is called: Pillow knows others that start other programs (EPS: Ghostscript)
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
MOST_PIXELS = 100_000_000  # of one picture: a small file may claim to be larger than any memory
_THREADS = min(8, os.cpu_count() or 1)
_SUBFILE, _SMALLER, _MASK = 254, 1, 4  # TIFF: what a page is, as bits
_PHOTOMETRIC, _ZERO_IS_WHITE, _ZERO_IS_BLACK = 262, 0, 1  # TIFF: what a grey means


class Decoded(NamedTuple):
    """One image."""

    pixels: np.ndarray  # uint8 [channels, height, width]
    kind: str  # size and mode of what it was
    dark: bool = False  # of more than eight bits, and almost nothing can be seen


def decode(
    rows: Rows, size: int | tuple[int, int] | None, channels: int, window: Window | None = None
) -> tuple[np.ndarray, Counter[str], int]:
    """All images as uint8 [N, channels, height, width], how many had which size and mode, and how many came out black.

    ``size`` is the side of a square, or width and height; None keeps what is there. ``window`` is of greys of more than
    eight bits (:mod:`fedshift.data.windows`).
    """
    if size is not None:
        width, height = (size, size) if isinstance(size, int) else size
        check_room(len(rows.encoded), (channels, height, width))
    with _own_limit():
        shape = _picture(rows, 0, size, channels, window).pixels.shape
    check_room(len(rows.encoded), shape)
    images = np.empty((len(rows.encoded), *shape), dtype=np.uint8)

    def some(start: int) -> tuple[Counter[str], int]:
        kinds: Counter[str] = Counter()
        dark = 0
        for i in range(start, min(start + 128, len(images))):
            found = _picture(rows, i, size, channels, window)
            if found.pixels.shape != shape:
                raise UserError(
                    f"images differ in size, so a size is needed: {shape[2]}x{shape[1]} in {rows.where(0)} but "
                    f"{found.pixels.shape[2]}x{found.pixels.shape[1]} in {rows.where(i)}"
                )
            images[i] = found.pixels
            kinds[found.kind] += 1
            dark += found.dark
        return kinds, dark

    with _own_limit():
        counted = in_threads(some, range(0, len(images), 128))
    return images, sum((kinds for kinds, _ in counted), Counter()), sum(dark for _, dark in counted)


def decode_readable(
    rows: Rows, size: tuple[int, int], channels: int, window: Window | None = None
) -> tuple[list[Decoded], dict[int, str]]:
    """The images that can be read, and of the others by number what is wrong with them."""

    def one(i: int) -> Decoded | str:
        try:
            return _read(rows.encoded[i], size, channels, window)
        except Exception as error:  # as below
            return _why(error)

    with _own_limit():
        found = in_threads(one, range(len(rows.encoded)))
    whole = [item for item in found if not isinstance(item, str)]
    return whole, {i: item for i, item in enumerate(found) if isinstance(item, str)}


def _picture(rows: Rows, i: int, size: int | tuple[int, int] | None, channels: int, window: Window | None) -> Decoded:
    try:
        return _read(rows.encoded[i], size, channels, window)
    except Exception as error:  # Pillow's readers raise whatever their parsers stumble over
        raise UserError(undecodable(rows.where(i), _why(error))) from error


def _read(item: Any, size: int | tuple[int, int] | None, channels: int, window: Window | None) -> Decoded:
    with open_picture(item if isinstance(item, Path) else io.BytesIO(item), window=window) as opened:
        kind, wide = f"{opened.width}x{opened.height} {opened.mode}", is_wide(opened)
        pixels = fitted(opened, size, channels, window)
    return Decoded(pixels, kind, wide and windows.is_dark(pixels))


def open_picture(
    file: Path | io.BytesIO,
    *,
    formats: tuple[str, ...] = FORMATS,
    most_pixels: int = MOST_PIXELS,
    window: Window | None = None,
) -> Image.Image:
    """A picture of one of the formats, or DICOM, of no more than so many pixels.

    Pictures are not decoded yet; DICOM is, with its window or this one.
    """
    if is_dicom(_head(file)):
        return dicom_picture(file, window, most_pixels)
    opened = Image.open(file, formats=formats)
    _turn_to_page(opened)
    if opened.width * opened.height > most_pixels:
        raise TooLarge(f"it is too large ({opened.width}x{opened.height}, at most {most_pixels:,} pixels are read)")
    return opened


def _head(file: Path | io.BytesIO) -> bytes:
    if isinstance(file, Path):
        with file.open("rb") as opened:
            return opened.read(DICOM_HEAD)
    head = file.read(DICOM_HEAD)
    file.seek(0)
    return head


def _turn_to_page(picture: Image.Image) -> None:
    """To the one page of a TIFF file that is no smaller copy or mask, which may come first; other formats have one."""
    if picture.format != "TIFF" or getattr(picture, "n_frames", 1) == 1:
        return
    pages: list[int] = []
    for number in range(picture.n_frames):  # type: ignore[attr-defined]
        picture.seek(number)
        if not _tiff_tag(picture, _SUBFILE, 0) & (_SMALLER | _MASK):
            pages.append(number)
    if len(pages) > 1:
        raise ValueError(f"it has {len(pages)} pages; give them one by one")
    picture.seek(pages[0] if pages else 0)


def _tiff_tag(picture: Image.Image, tag: int, usual: int) -> int:
    return int(getattr(picture, "tag_v2", {}).get(tag, usual))


def is_wide(picture: Image.Image) -> bool:
    """Whether a picture has more than eight bits a channel; what DICOM files were made of is not known any more."""
    tiles = getattr(picture, "tile", None)
    raw = str(tiles[0][3]) if tiles else ""  # Pillow drops the lower bits of colours
    return picture.mode.startswith(("I", "F")) or ";16" in raw or DICOM in picture.info


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


def fitted(
    picture: Image.Image, size: int | tuple[int, int] | None, channels: int, window: Window | None = None
) -> np.ndarray:
    """A picture upright, in these colours and this size (Pillow's bicubic filter), as [channels, height, width]."""
    wide = picture.mode.startswith(("I", "F"))
    negative = wide and _tiff_tag(picture, _PHOTOMETRIC, _ZERO_IS_BLACK) == _ZERO_IS_WHITE  # Pillow mends bytes alone
    upright = _eight_bit(ImageOps.exif_transpose(picture), window)
    upright = (ImageOps.invert(upright) if negative else upright).convert(MODES[channels])
    box = (size, size) if isinstance(size, int) else size
    if box is not None and upright.size != box:
        upright = upright.resize(box, Image.Resampling.BICUBIC)
    pixels = np.asarray(upright)
    return pixels.transpose(2, 0, 1) if channels == 3 else pixels[None]


def _eight_bit(picture: Image.Image, window: Window | None) -> Image.Image:
    """Mend modes whose plain conversion is wrong: Pillow clips wide greys to white, and palettes with alpha warn."""
    if picture.mode.startswith(("I", "F")):
        return Image.fromarray(windows.as_bytes(np.asarray(picture), window))
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
