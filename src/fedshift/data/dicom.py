"""DICOM images as pictures, with their window applied (extra ``dicom``)."""

from __future__ import annotations

import io
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedshift.data import windows
from fedshift.data.windows import Window
from fedshift.errors import UserError

MAGIC = slice(128, 132)
DICOM_HEAD = 132  # bytes that tell whether a file is one
META = 2  # the group of elements that say how the others are written
DEEPEST, HEADERS = 8, 1 << 20  # bytes of a pixel at most, and of everything beside pixels
DICOM = "dicom"  # what a picture's ``info`` has if it was made of one with more than eight bits


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
        content = source.read_bytes() if isinstance(source, Path) else source
        file = io.BytesIO(content) if isinstance(content, bytes) else content
        if most_pixels is not None:
            _check_inflated(file, DEEPEST * most_pixels + HEADERS)
        return pydicom.dcmread(file)
    except (UserError, TooLarge):
        raise
    except Exception as error:
        raise ValueError(f"the DICOM file cannot be read: {type(error).__name__}") from None


def _check_inflated(file: io.BytesIO, most: int) -> None:
    """Refuse a file that is deflated as a whole and larger than this: pydicom would inflate it before it can be asked."""
    from pydicom.filereader import read_dataset, read_preamble
    from pydicom.uid import DeflatedExplicitVRLittleEndian

    read_preamble(file, False)
    meta = read_dataset(file, False, True, stop_when=lambda tag, *_: tag >> 16 != META)
    if meta.get("TransferSyntaxUID") == DeflatedExplicitVRLittleEndian:
        inflater = zlib.decompressobj(-zlib.MAX_WBITS)
        inflater.decompress(file.read(), most)
        if inflater.unconsumed_tail:
            raise TooLarge(f"it is too large (more than {most:,} bytes when it is inflated)")
    file.seek(0)


def _values(dataset: Any, window: Window | None) -> np.ndarray:
    from pydicom.pixels.processing import apply_modality_lut, apply_voi_lut
    from pydicom.pixels.utils import pixel_array

    stored = pixel_array(dataset)
    if stored.ndim == 3:  # colours have no window
        return stored if stored.dtype == np.uint8 else windows.as_bytes(stored, None)
    values = np.asarray(apply_modality_lut(stored, dataset), dtype=np.float64)
    if window is None and ("WindowCenter" in dataset or "VOILUTSequence" in dataset):
        shown = np.asarray(apply_voi_lut(apply_modality_lut(stored, dataset), dataset), dtype=np.float64)
        shades = windows.between(shown, *_window_range(dataset, stored))
    else:
        shades = windows.as_bytes(values, window, _stored_range(dataset, stored))
    inverted = getattr(dataset, "PhotometricInterpretation", "") == "MONOCHROME1"
    return 255 - shades if inverted else shades


def _window_range(dataset: Any, stored: np.ndarray) -> tuple[float, float]:
    """From where to where the file's window maps: pydicom gives the whole output range to it."""
    if "VOILUTSequence" in dataset:
        item = dataset.VOILUTSequence[0]
        return 0.0, float(2 ** int(item.LUTDescriptor[2]) - 1)
    return _stored_range(dataset, stored)


def _stored_range(dataset: Any, stored: np.ndarray) -> tuple[float, float]:
    """The least and the greatest value that the file can hold, after its rescaling."""
    from pydicom.pixels.processing import apply_modality_lut

    bits = int(dataset.BitsStored)
    signed = int(dataset.PixelRepresentation) == 1
    extremes = np.array([-(2 ** (bits - 1)), 2 ** (bits - 1) - 1] if signed else [0, 2**bits - 1])
    low, high = np.sort(np.asarray(apply_modality_lut(extremes.astype(stored.dtype), dataset), dtype=np.float64))
    return float(low), float(high)
