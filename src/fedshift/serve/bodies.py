"""What people send: pictures and arrays in the body of a request. They are decoded in memory and never written."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import math
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from torch import Tensor

from fedshift.data._pixels import open_picture
from fedshift.data.dicom import TooLarge, is_dicom
from fedshift.data.windows import Window
from fedshift.errors import UserError
from fedshift.runs.artefact import ids_of
from fedshift.runs.raw_images import as_bytes

FORMATS = ("PNG", "JPEG")
NPY = b"\x93NUMPY"
INT64 = 1 << 63
LONGEST = 256  # characters of an id: they are remembered
QUICK = 1 << 16  # pixels that are decoded in less time than another thread takes to begin


class Refused(Exception):
    """A request that is not answered, and why, in one sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status, self.sentence = status, sentence


@dataclass(frozen=True)
class Limits:
    """What one request may be."""

    body: int = 16 << 20  # bytes
    pixels: int = 32 << 20  # of one image
    images: int = 256
    seconds: float = 10.0  # in which a body must have arrived

    @property
    def together(self) -> int:
        """Pixels of all images of a request: a small body may hold very many that are very large."""
        return 4 * self.pixels


class Sent(NamedTuple):
    """Images as the network wants them, and what they are called."""

    pixels: Tensor  # uint8 [n, channels, height, width]
    names: tuple[str, ...]  # sample ids as people wrote them
    ids: Tensor  # int64, what draws are keyed by


async def read(
    body: bytes, headers: Headers, names: Sequence[str], limits: Limits, window: Window | None = None
) -> tuple[list[Image.Image | np.ndarray], list[str]]:
    """The images of a body, opened but not decoded, and their names: those of the query, or of the body itself."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if not body:
        raise Refused(400, "the request has no body: send an image, several, or an array")
    found: list[Image.Image | np.ndarray]
    inside: list[str] = []
    if kind == "multipart/form-data":
        parts, inside = await _form(body, headers, limits)
        found = _all_opened(parts, limits, window)
    elif kind == "application/json" or (kind in ("", "application/x-www-form-urlencoded") and body[:1] == b"{"):
        found, inside = _from_json(body, limits, window)
    elif body.startswith(NPY):
        found = _array(_npy(body), limits)
    else:
        found = [_opened(body, limits, window)]
    if not found:
        raise Refused(400, "the request has no images")
    if len(found) > limits.images:
        raise Refused(413, f"one request may have {limits.images} images, not {len(found)}")
    named = [*names] or inside
    if named and len(named) != len(found):
        raise Refused(400, f"there are {len(found)} images but {len(named)} ids")
    check_names(named)
    return found, named


def check_names(names: Iterable[str]) -> None:
    """Refuse ids that cannot be remembered."""
    for name in names:
        if len(name) > LONGEST:
            raise Refused(400, f"an id may have {LONGEST} characters, not {len(name)}")
        if any("\ud800" <= letter <= "\udfff" for letter in name):  # half a character, which JSON lets through
            raise Refused(400, "an id is not valid text")


def fitted(
    images: Sequence[Image.Image | np.ndarray],
    names: Sequence[str],
    shape: Sequence[int],
    window: Window | None = None,
) -> Sent:
    """Decode and fit images as the benchmark's own were; an image without a name has the fingerprint of its pixels."""
    try:
        pixels = torch.cat([_decoded(image, shape, window) for image in images])
    except UserError as error:
        raise Refused(400, str(error)) from None
    except Exception as error:  # Pillow's decoders raise whatever they stumble over
        raise Refused(400, f"the image cannot be decoded ({type(error).__name__})") from None
    if names:
        return Sent(pixels, tuple(names), torch.tensor([id_of(name) for name in names]))
    ids = ids_of(pixels)
    return Sent(pixels, tuple(map(str, ids.tolist())), ids)


def _decoded(image: Image.Image | np.ndarray, shape: Sequence[int], window: Window | None) -> Tensor:
    try:
        return as_bytes(image, shape, window)
    finally:
        if isinstance(image, Image.Image):
            image.close()  # what was decoded is not held until the last of them is


def quick(images: Sequence[Image.Image | np.ndarray]) -> bool:
    """Whether decoding takes too little time to be worth another thread."""
    sizes = [image.size if isinstance(image, Image.Image) else image.shape[:2] for image in images]
    return sum(int(width) * int(height) for width, height in sizes) <= QUICK


def id_of(name: str) -> int:
    """The number that draws are keyed by: the one that was written, or a fingerprint of a name.

    >>> id_of("17"), id_of("scan-17") == id_of("scan-17")
    (17, True)
    """
    try:
        number = int(name)
    except ValueError:
        number = INT64
    if -INT64 <= number < INT64:
        return number
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


def _opened(data: bytes, limits: Limits, window: Window | None) -> Image.Image:
    """A picture whose header is sound; decoding is put off, but for DICOM."""
    try:
        return open_picture(io.BytesIO(data), formats=FORMATS, most_pixels=limits.pixels, window=window)
    except UserError as error:
        raise Refused(415, str(error)) from None
    except TooLarge as error:
        raise Refused(413, str(error)) from None
    except Image.DecompressionBombError:
        raise Refused(413, "the image has too many pixels") from None
    except Exception as error:  # whatever a parser stumbles over
        if is_dicom(data):
            raise Refused(400, str(error)) from None
        raise Refused(415, "the image is none of PNG, JPEG and DICOM, or is damaged") from None


def _all_opened(parts: Iterable[bytes], limits: Limits, window: Window | None) -> list[Image.Image | np.ndarray]:
    found: list[Image.Image | np.ndarray] = []
    pixels = 0
    for part in parts:
        picture = _opened(part, limits, window)
        found.append(picture)
        pixels += picture.width * picture.height
        if pixels > limits.together:
            raise Refused(413, f"the images of one request may have {limits.together} pixels together")
    return found


def _check_size(width: int, height: int, limits: Limits) -> None:
    if width * height > limits.pixels:
        raise Refused(413, f"an image may have {limits.pixels} pixels, not {width}x{height}")


def _array(array: np.ndarray, limits: Limits) -> list[Image.Image | np.ndarray]:
    if array.dtype != np.uint8 or array.ndim not in (2, 3, 4) or (array.ndim > 2 and array.shape[-1] not in (1, 3, 4)):
        raise Refused(
            400, f"an array of images must be uint8 [n, height, width, channels], not {array.dtype} {list(array.shape)}"
        )
    batch = array if array.ndim == 4 else array[None]
    if 0 in batch.shape:
        raise Refused(400, f"an array of shape {list(array.shape)} has no pixels")
    _check_size(batch.shape[2], batch.shape[1], limits)
    return list(batch)


def _npy(body: bytes) -> np.ndarray:
    """A file of numpy's, whose header is believed only if the bytes are there; nothing is ever unpickled."""
    stream = io.BytesIO(body)
    try:
        version = np.lib.format.read_magic(stream)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = header(stream)
        left = body[stream.tell() :]
        if dtype.hasobject or fortran or math.prod(shape) * dtype.itemsize != len(left):
            raise ValueError
        return np.frombuffer(left, dtype=dtype).reshape(shape)
    except Exception:
        raise Refused(400, "the array is not a plain .npy file in C order") from None


def _from_json(body: bytes, limits: Limits, window: Window | None) -> tuple[list[Image.Image | np.ndarray], list[str]]:
    try:
        table: Any = json.loads(body)
    except (ValueError, RecursionError):
        raise Refused(400, "the body is not valid JSON") from None
    if not isinstance(table, dict) or not ({"images", "array"} & set(table)):
        raise Refused(400, 'the body must have "images" (base64) or "array" (numbers), and may have "ids"')
    names = table.get("ids", [])
    if not isinstance(names, list) or not all(isinstance(name, str | int) for name in names):
        raise Refused(400, '"ids" must be a list of numbers or words')
    named = [str(name) for name in names]
    if "array" in table:
        return _array(_numbers(table["array"]), limits), named
    if not isinstance(table["images"], list) or len(table["images"]) > limits.images:
        raise Refused(400, f'"images" must be a list of at most {limits.images} pictures in base64')
    return _all_opened(map(_plain, table["images"]), limits, window), named


def _numbers(value: Any) -> np.ndarray:
    try:
        array = np.array(value)
        if array.dtype.kind not in "iu" or array.min() < 0 or array.max() > 255:
            raise ValueError
        return array.astype(np.uint8)
    except (ValueError, OverflowError, TypeError, RecursionError):
        raise Refused(400, '"array" must have whole numbers from 0 to 255, [n, height, width, channels]') from None


def _plain(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise Refused(400, '"images" must be pictures in base64') from None


class _InMemory(MultiPartParser):
    """Starlette's parser, which would write large files into a temporary folder."""

    spool_max_size = 1 << 40


async def _form(body: bytes, headers: Headers, limits: Limits) -> tuple[list[bytes], list[str]]:
    async def stream() -> AsyncGenerator[bytes, None]:
        yield body
        yield b""

    try:
        form = await _InMemory(headers, stream(), max_files=limits.images, max_fields=limits.images).parse()
    except (MultiPartException, KeyError, ValueError, UnicodeDecodeError):
        raise Refused(400, "the form cannot be read, or has too many files") from None
    files = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
    names = [value for key, value in form.multi_items() if key == "id" and isinstance(value, str)]
    return [await file.read() for file in files], names
