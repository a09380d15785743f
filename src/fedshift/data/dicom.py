"""DICOM images as pictures, with their window applied (extra ``dicom``)."""

from __future__ import annotations

import io
import zlib
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from fedshift.data import windows
from fedshift.data.windows import Window
from fedshift.errors import UserError

MAGIC = slice(128, 132)
DICOM_HEAD = 132  # bytes that tell whether a file is one
DICOM = "dicom"  # what a picture's ``info`` has if it was made of one with more than eight bits
_META = 2  # the group of what a file says of itself
_PIXEL = 8  # bytes, at most: three colours of sixteen bits
_HEADERS = 1 << 20  # bytes of everything beside pixels


class TooLarge(ValueError):
    """A picture of more pixels than are decoded."""


def is_dicom(data: bytes) -> bool:
    """Whether these bytes are a DICOM file.

    >>> is_dicom(bytes(128) + b"DICM"), is_dicom(b"a picture")
    (True, False)
    """
    return data[MAGIC] == b"DICM"


def dicom_picture(
    source: bytes | Path | io.BytesIO, window: Window | None = None, most_pixels: int | None = None
) -> Image.Image:
    """The one image of a DICOM file, 8 bits a channel, grey or RGB.

    ``window`` is centre and width, after the file's rescaling (Hounsfield units, for CT). Left out, it is the file's own
    first window or lookup table, or else from the least to the greatest value, so that 12-bit images keep their contrast.
    Low values are dark, whatever the file's photometric interpretation. ``most_pixels`` is checked before anything is
    decoded. What cannot be read raises ValueError.
    """
    dataset = _read(source, most_pixels)
    rows, columns = (int(getattr(dataset, name, 0) or 0) for name in ("Rows", "Columns"))
    frames = int(getattr(dataset, "NumberOfFrames", 1) or 1)
    if not rows or not columns or "PixelData" not in dataset:
        raise ValueError("the DICOM file has no image")
    if frames > 1:
        raise ValueError(f"the DICOM file has {frames} images; give them one by one")
    if most_pixels is not None and rows * columns > most_pixels:
        raise TooLarge(f"it is too large ({columns}x{rows}, at most {most_pixels:,} pixels are read)")
    try:
        values = _values(dataset, window)
    except Exception as error:  # decoders raise whatever they stumble over
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"the DICOM image cannot be decoded: {first}") from None
    picture = Image.fromarray(values)
    if int(getattr(dataset, "BitsStored", 8)) > 8:
        picture.info[DICOM] = True
    return picture


def _read(source: bytes | Path | io.BytesIO, most_pixels: int | None) -> Any:
    try:
        import pydicom
    except ImportError:
        raise UserError('DICOM files need pydicom: pip install "fedshift[dicom]"') from None
    try:
        with source.open("rb") if isinstance(source, Path) else nullcontext(_stream(source)) as file:
            if most_pixels is not None:
                _check_deflated(file, most_pixels * _PIXEL + _HEADERS)
                file.seek(0)
            return pydicom.dcmread(file)
    except TooLarge:
        raise
    except Exception as error:
        raise ValueError(f"the DICOM file cannot be read: {type(error).__name__}") from None


def _stream(source: bytes | io.BytesIO) -> io.BytesIO:
    return io.BytesIO(source) if isinstance(source, bytes) else source


def _check_deflated(file: BinaryIO, most: int) -> None:
    """Refuse a file that is deflated as a whole and grows beyond so many bytes: pydicom would inflate all of it."""
    from pydicom.filereader import read_dataset, read_preamble
    from pydicom.uid import DeflatedExplicitVRLittleEndian

    read_preamble(file, False)
    meta = read_dataset(file, False, True, stop_when=lambda tag, *_: tag.group != _META)
    if meta.get("TransferSyntaxUID") == DeflatedExplicitVRLittleEndian:
        inflating = zlib.decompressobj(-zlib.MAX_WBITS)
        inflating.decompress(file.read(), most)
        if inflating.unconsumed_tail:
            raise TooLarge(f"it is too large (more than {most:,} bytes when it is inflated)")


def _values(dataset: Any, window: Window | None) -> np.ndarray:
    from pydicom.pixels.processing import apply_color_lut, apply_modality_lut, apply_voi
    from pydicom.pixels.utils import pixel_array

    stored = pixel_array(dataset)
    if getattr(dataset, "PhotometricInterpretation", "") == "PALETTE COLOR":  # numbers of colours, not shades
        colours = apply_color_lut(stored, dataset)
        return windows.between(colours, 0.0, float(np.iinfo(colours.dtype).max))
    if stored.ndim == 3:  # colours have no window
        return stored if stored.dtype == np.uint8 else windows.as_bytes(stored, None)
    values = np.asarray(apply_modality_lut(stored, dataset), dtype=np.float64)
    if window is None and dataset.get("VOILUTSequence"):
        looked_up = apply_voi(np.rint(values).astype(np.int64), dataset)
        shades = windows.between(looked_up, 0.0, float(2 ** int(dataset.VOILUTSequence[0].LUTDescriptor[2]) - 1))
    elif window is None and (own := _window(dataset)) is not None:
        shades = _windowed(values, own, str(dataset.get("VOILUTFunction") or "LINEAR").upper())
    else:
        shades = windows.as_bytes(values, window, _stored_range(dataset, stored))
    inverted = getattr(dataset, "PhotometricInterpretation", "") == "MONOCHROME1"
    return 255 - shades if inverted else shades


def _window(dataset: Any) -> Window | None:
    """The file's first window; None if it has none, or leaves it empty, as some scanners do."""
    found = [dataset.get(name) for name in ("WindowCenter", "WindowWidth")]
    first = [next(iter(value), None) if isinstance(value, Sequence) else value for value in found]
    if first[0] is None or first[1] is None or not float(first[1]) > 0:
        return None
    return float(first[0]), float(first[1])


def _windowed(values: np.ndarray, window: Window, kind: str) -> np.ndarray:
    """Shades by one of the standard's three functions (PS3.3 C.11.2.1)."""
    centre, width = window
    if kind == "SIGMOID":
        return windows.between(np.tanh(2 * (values - centre) / width), -1.0, 1.0)
    if kind != "LINEAR_EXACT" and width >= 1:  # of whole numbers: it begins and ends on one
        centre, width = centre - 0.5, width - 1
    return windows.as_bytes(values, (centre, width))


def _stored_range(dataset: Any, stored: np.ndarray) -> tuple[float, float]:
    """The least and the greatest value that the file can hold, after its rescaling."""
    from pydicom.pixels.processing import apply_modality_lut

    bits = int(dataset.BitsStored)
    signed = int(dataset.PixelRepresentation) == 1
    extremes = np.array([-(2 ** (bits - 1)), 2 ** (bits - 1) - 1] if signed else [0, 2**bits - 1])
    low, high = np.sort(np.asarray(apply_modality_lut(extremes.astype(stored.dtype), dataset), dtype=np.float64))
    return float(low), float(high)
