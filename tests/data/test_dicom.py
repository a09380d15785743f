"""DICOM: the window is applied, and twelve bits keep their contrast."""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np
import pydicom
import pytest
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import (
    DeflatedExplicitVRLittleEndian,
    ExplicitVRLittleEndian,
    SecondaryCaptureImageStorage,
    generate_uid,
)

from fedshift.data.dicom import TooLarge, dicom_picture, is_dicom


def dicom(values: np.ndarray, **tags: Any) -> bytes:
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID, meta.TransferSyntaxUID = SecondaryCaptureImageStorage, ExplicitVRLittleEndian
    meta.MediaStorageSOPInstanceUID = generate_uid()
    file = FileDataset("", {}, file_meta=meta, preamble=bytes(128))
    colour = values.ndim == 3
    file.Rows, file.Columns, file.SamplesPerPixel = values.shape[0], values.shape[1], 3 if colour else 1
    file.PhotometricInterpretation = "RGB" if colour else "MONOCHROME2"
    if colour:
        file.PlanarConfiguration = 0
    file.BitsAllocated = 8 * values.dtype.itemsize
    file.BitsStored = 12 if file.BitsAllocated == 16 else 8
    file.HighBit, file.PixelRepresentation = file.BitsStored - 1, int(values.dtype.kind == "i")
    file.PixelData = values.tobytes()
    for name, value in tags.items():
        setattr(file, name, value)
    stream = io.BytesIO()
    pydicom.dcmwrite(stream, file, enforce_file_format=True)
    return stream.getvalue()


RAMP = np.arange(4096, dtype=np.uint16).reshape(64, 64)


def test_twelve_bits_keep_their_contrast() -> None:
    data = dicom(RAMP)
    assert is_dicom(data)
    pixels = np.asarray(dicom_picture(data))
    assert pixels.dtype == np.uint8
    assert (pixels.min(), pixels.max(), len(np.unique(pixels))) == (0, 255, 256)
    assert (np.diff(pixels.flatten().astype(int)) >= 0).all()


def test_the_files_window_is_applied_after_its_rescaling() -> None:
    window = {"WindowCenter": 40, "WindowWidth": 400, "RescaleIntercept": -1024, "RescaleSlope": 1}
    pixels = np.asarray(dicom_picture(dicom(RAMP, **window))).flatten().astype(int)
    units = RAMP.flatten().astype(int) - 1024
    assert (pixels[units < -165] == 0).all()
    assert (pixels[units > 245] == 255).all()
    assert abs(pixels[units == 40][0] - 128) <= 2
    other = np.asarray(dicom_picture(dicom(RAMP, **window), window=(40, 400))).flatten().astype(int)
    assert np.abs(pixels - other).max() <= 2
    assert np.asarray(dicom_picture(dicom(RAMP, **window), window=(-600, 1500))).flatten()[units == -600][0] == 128


def test_signed_inverted_and_coloured_images() -> None:
    signed = (RAMP.astype(np.int16) - 2048).astype(np.int16)
    assert np.array_equal(np.asarray(dicom_picture(dicom(signed))), np.asarray(dicom_picture(dicom(RAMP))))
    inverted = dicom_picture(dicom(RAMP, PhotometricInterpretation="MONOCHROME1"))
    assert np.array_equal(np.asarray(inverted), 255 - np.asarray(dicom_picture(dicom(RAMP))))
    colours = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    assert np.array_equal(np.asarray(dicom_picture(dicom(colours))), colours)


def test_what_is_no_image_is_refused_in_a_sentence() -> None:
    for data, words in (
        (b"nothing", "cannot be read"),
        (dicom(RAMP)[:300], "cannot be"),
        (dicom(RAMP, NumberOfFrames=4), "4 images"),
    ):
        with pytest.raises(ValueError, match=r"DICOM") as said:
            dicom_picture(data)
        assert words in str(said.value) or "has no image" in str(said.value)
    with pytest.raises(ValueError, match=r"it is too large \(64x64, at most 1,000 pixels are read\)"):
        dicom_picture(dicom(RAMP), most_pixels=1000)


EMPTY = [{"WindowCenter": None, "WindowWidth": None}, {"WindowCenter": 40}, {"WindowCenter": 40, "WindowWidth": 0}]


@pytest.mark.parametrize("empty", EMPTY)
def test_an_empty_window_is_none(empty: dict[str, Any]) -> None:
    """Scanners leave the field empty: 12 bits in a file of 16 would come out black, or not at all."""
    tags = {"BitsStored": 16, "HighBit": 15}
    assert np.array_equal(dicom_picture(dicom(RAMP, **tags, **empty)), dicom_picture(dicom(RAMP, **tags)))


def test_the_first_of_several_windows_counts() -> None:
    several = dicom(RAMP, WindowCenter=[2048, 100], WindowWidth=[1000, 50], WindowCenterWidthExplanation=["A", "B"])
    alone = dicom(RAMP, WindowCenter=2048, WindowWidth=1000)
    assert np.array_equal(dicom_picture(several), dicom_picture(alone))


def test_low_values_are_dark_with_a_negative_slope_too() -> None:
    rescaled = {"RescaleSlope": -1, "RescaleIntercept": 4095}
    windowed = np.asarray(dicom_picture(dicom(RAMP, **rescaled, WindowCenter=2048, WindowWidth=4096)))
    assert np.abs(windowed.astype(int) - np.asarray(dicom_picture(dicom(RAMP, **rescaled)))).max() <= 1


def test_every_window_function_of_the_standard() -> None:
    def shades(function: str, width: float = 1000) -> np.ndarray:
        data = dicom(RAMP, WindowCenter=2048, WindowWidth=width, VOILUTFunction=function)
        return np.asarray(dicom_picture(data)).flatten().astype(int)

    assert abs(shades("SIGMOID")[2048] - 128) <= 1
    assert abs(shades("SIGMOID")[2298] - round(255 / (1 + np.exp(-1)))) <= 1
    assert np.array_equal(shades("LINEAR_EXACT")[[1548, 2548]], [0, 255])
    assert np.array_equal(shades("LINEAR")[[1548, 2547]], [0, 255])
    assert np.array_equal(shades("LINEAR", 1)[[2047, 2048]], [0, 255])


def test_a_lookup_table_of_the_file_is_applied_after_rescaling() -> None:
    item = pydicom.Dataset()
    item.LUTDescriptor, item.LUTData = [4096, 0, 12], np.arange(4095, -1, -1).astype("<u2").tobytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = dicom(RAMP, VOILUTSequence=[item], RescaleSlope=1, RescaleIntercept=0)
        looked_up = np.asarray(dicom_picture(data))
    assert np.array_equal(looked_up, np.asarray(dicom_picture(dicom(RAMP[::-1, ::-1].copy()))))


def test_a_palette_is_looked_up() -> None:
    """Ultrasound: what is stored are numbers of colours."""
    tags: dict[str, Any] = {"PhotometricInterpretation": "PALETTE COLOR"}
    for colour, values in (("Red", [0, 65535]), ("Green", [0, 32896]), ("Blue", [257, 0])):
        tags[f"{colour}PaletteColorLookupTableDescriptor"] = [2, 0, 16]
        tags[f"{colour}PaletteColorLookupTableData"] = np.array(values, dtype=np.uint16).tobytes()
    pixels = np.asarray(dicom_picture(dicom(np.array([[0, 1], [1, 0]], dtype=np.uint8), **tags)))
    assert pixels[0].tolist() == [[0, 0, 1], [255, 128, 0]]


def deflated(data: bytes, **tags: Any) -> bytes:
    """The same file, deflated as a whole."""
    file = pydicom.dcmread(io.BytesIO(data))
    file.file_meta.TransferSyntaxUID = DeflatedExplicitVRLittleEndian
    for name, value in tags.items():
        setattr(file, name, value)
    stream = io.BytesIO()
    pydicom.dcmwrite(stream, file, enforce_file_format=True)
    return stream.getvalue()


def test_a_deflated_file_is_read_and_a_bomb_is_not() -> None:
    """What is inflated is bounded by what an image of so many pixels takes."""
    wanted = np.asarray(dicom_picture(dicom(RAMP)))
    assert np.array_equal(np.asarray(dicom_picture(deflated(dicom(RAMP)), most_pixels=4096)), wanted)
    for bomb in (
        deflated(dicom(RAMP), ImageComments="x" * (1 << 22)),
        deflated(dicom(np.zeros((1000, 1000), dtype=np.uint16))),
    ):
        assert len(bomb) < 1 << 14
        with pytest.raises(TooLarge, match="when it is inflated"):
            dicom_picture(bomb, most_pixels=4096)
