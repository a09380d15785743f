"""DICOM images as pictures, with their window applied (extra ``dicom``)."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedshift.errors import UserError

MAGIC = slice(128, 132)


def is_dicom(data: bytes) -> bool:
    """Whether these bytes are a DICOM file.

    >>> is_dicom(bytes(128) + b"DICM"), is_dicom(b"a picture")
    (True, False)
    """
    return data[MAGIC] == b"DICM"


def dicom_picture(
    source: bytes | Path, window: tuple[float, float] | None = None, most_pixels: int | None = None
) -> Image.Image:
    """The one image of a DICOM file, 8 bits a channel, grey or RGB.

    ``window`` is centre and width, after the file's rescaling (Hounsfield units, for CT). Left out, it is the file's own
    first window or lookup table, or else from the least to the greatest value, so that 12-bit images keep their contrast.
    Low values are dark, whatever the file's photometric interpretation. ``most_pixels`` is checked before anything is
    decoded. What cannot be read raises ValueError.
    """
    dataset = _read(source)
    rows, columns = (int(getattr(dataset, name, 0) or 0) for name in ("Rows", "Columns"))
    frames = int(getattr(dataset, "NumberOfFrames", 1) or 1)
    if not rows or not columns or "PixelData" not in dataset:
        raise ValueError("the DICOM file has no image")
    if frames > 1:
        raise ValueError(f"the DICOM file has {frames} images; give them one by one")
    if most_pixels is not None and rows * columns > most_pixels:
        raise ValueError(f"an image of {columns}x{rows} pixels is too large")
    try:
        values = _values(dataset, window)
    except Exception as error:  # decoders raise whatever they stumble over
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"the DICOM image cannot be decoded: {first}") from None
    return Image.fromarray(values)


def _read(source: bytes | Path) -> Any:
    try:
        import pydicom
    except ImportError:
        raise UserError('DICOM files need pydicom: pip install "fedshift[dicom]"') from None
    try:
        return pydicom.dcmread(io.BytesIO(source) if isinstance(source, bytes) else source)
    except UserError:
        raise
    except Exception as error:
        raise ValueError(f"the DICOM file cannot be read: {type(error).__name__}") from None


def _values(dataset: Any, window: tuple[float, float] | None) -> np.ndarray:
    from pydicom.pixels.processing import apply_modality_lut, apply_voi_lut
    from pydicom.pixels.utils import pixel_array

    stored = pixel_array(dataset)
    if stored.ndim == 3:  # colours have no window
        return stored.astype(np.uint8) if stored.dtype == np.uint8 else _scaled(stored, stored.min(), stored.max())
    values = np.asarray(apply_modality_lut(stored, dataset), dtype=np.float64)
    if window is not None:
        centre, width = window
        low, high = centre - width / 2, centre + width / 2
    elif "WindowCenter" in dataset or "VOILUTSequence" in dataset:
        values = np.asarray(apply_voi_lut(apply_modality_lut(stored, dataset), dataset), dtype=np.float64)
        low, high = _window_range(dataset, stored)
    else:
        low, high = values.min(), values.max()
    scaled = _scaled(values, low, high)
    inverted = getattr(dataset, "PhotometricInterpretation", "") == "MONOCHROME1"
    return 255 - scaled if inverted else scaled


def _window_range(dataset: Any, stored: np.ndarray) -> tuple[float, float]:
    """From where to where the file's window maps: pydicom gives the whole output range to it."""
    from pydicom.pixels.processing import apply_modality_lut

    if "VOILUTSequence" in dataset:
        item = dataset.VOILUTSequence[0]
        return 0.0, float(2 ** int(item.LUTDescriptor[2]) - 1)
    bits = int(dataset.BitsStored)
    signed = int(dataset.PixelRepresentation) == 1
    extremes = np.array([-(2 ** (bits - 1)), 2 ** (bits - 1) - 1] if signed else [0, 2**bits - 1])
    low, high = np.sort(np.asarray(apply_modality_lut(extremes.astype(stored.dtype), dataset), dtype=np.float64))
    return float(low), float(high)


def _scaled(values: np.ndarray, low: float, high: float) -> np.ndarray:
    share = (values.astype(np.float64) - low) / max(float(high) - float(low), 1e-12)
    return np.rint(np.clip(share, 0.0, 1.0) * 255.0).astype(np.uint8)
