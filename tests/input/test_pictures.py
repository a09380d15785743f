"""Pictures nobody checked: formats are named, sizes are bounded, links and pipes do not hold anybody up."""

from __future__ import annotations

import io
import os
import struct
import time
import zlib
from pathlib import Path

import pytest
from PIL import EpsImagePlugin, Image

import fedshift as package
from fedshift.data import _walk
from fedshift.data._pixels import FORMATS, MOST_PIXELS, open_picture
from fedshift.runs.raw_images import as_bytes
from tests.input.program import png, run

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


def claimed(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it is large."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def classes(folder: Path, first: bytes) -> Path:
    """A source of two classes, whose first picture is given."""
    for label in ("cat", "dog"):
        (folder / label).mkdir(parents=True)
        for i in range(6):
            (folder / label / f"{i}.png").write_bytes(png(i + 10 * (label == "dog")))
    (folder / "cat" / "0.png").write_bytes(first)
    return folder


def said(tmp_path: Path, source: Path) -> str:
    """The sentence with which a folder is refused, within three seconds."""
    started = time.perf_counter()
    found = run(
        tmp_path / "runs", f"data.source=folder:{source}", "partition={kind='iid', clients=2}", "split.unseen=0.0"
    )
    assert found.refused, found.err
    assert time.perf_counter() - started < 3
    assert not (tmp_path / "runs").exists()
    return found.err


def test_no_other_program_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An EPS picture called 0.png would reach Ghostscript."""
    started: list[object] = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *rest, **more: started.append((rest, more)))
    assert "0.png cannot be decoded: its format is not known" in said(tmp_path, classes(tmp_path / "data", EPS))
    (tmp_path / "one.png").write_bytes(EPS)
    with pytest.raises(package.UserError, match="cannot be decoded"):
        as_bytes(tmp_path / "one.png", (3, 8, 8))
    assert not started


@pytest.mark.parametrize("kind", FORMATS)
def test_the_usual_formats_are_read(kind: str) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (200, 10, 10)).save(buffer, kind)
    with open_picture(buffer) as opened:
        assert opened.size == (8, 8)


def test_a_picture_that_claims_to_be_huge_is_refused(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    side = int(MOST_PIXELS**0.5) + 1
    assert f"too large ({side}x{side}" in said(tmp_path, classes(tmp_path / "data", claimed(side, side)))
    assert "cannot be decoded" in said(tmp_path, classes(tmp_path / "more", claimed(2**31 - 1, 2**31 - 1)))
    assert not [warning for warning in recwarn if "Decompression" in str(warning.message)]


def test_loops_of_links_end(tmp_path: Path) -> None:
    folder = classes(tmp_path / "data", png(0))
    for name in ("again", "more"):
        (folder / "cat" / name).symlink_to(folder, target_is_directory=True)
    assert "already" in said(tmp_path, folder)


def test_links_that_double_at_every_step_end(tmp_path: Path) -> None:
    """Forty folders with two links each to the next would be a million million paths."""
    for i in range(40):
        (tmp_path / "data" / str(i)).mkdir(parents=True)
        for name in ("a", "b"):
            (tmp_path / "data" / str(i) / name).symlink_to(tmp_path / "data" / str(i + 1), target_is_directory=True)
    assert "already" in said(tmp_path, tmp_path / "data")


def test_a_folder_elsewhere_may_be_linked_to(tmp_path: Path) -> None:
    classes(tmp_path / "store", png(0))
    (tmp_path / "data").mkdir()
    for label in ("cat", "dog"):
        (tmp_path / "data" / label).symlink_to(tmp_path / "store" / label, target_is_directory=True)
    names, folders = _walk.walk(tmp_path / "data")
    assert len(names) == 12
    assert folders == ["cat", "dog"]


def test_the_folder_of_a_process_is_no_data(tmp_path: Path) -> None:
    assert "/proc/self" in said(tmp_path, Path("/proc/self"))


def test_too_many_files_without_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_walk, "MOST_OTHERS", 10)
    for i in range(12):
        (tmp_path / f"{i}.txt").touch()
    with pytest.raises(package.UserError, match="no picture among"):
        _walk.walk(tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "nowhere"])
def test_what_is_no_ordinary_file_is_refused(kind: str, tmp_path: Path) -> None:
    folder = classes(tmp_path / "data", png(0))
    if kind == "pipe":
        os.mkfifo(folder / "cat" / "pipe.png")
    else:
        (folder / "cat" / "pipe.png").symlink_to(tmp_path / "nowhere")
    assert "pipe.png" in said(tmp_path, folder)
