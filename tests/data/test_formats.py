"""Data as people have them: tables of paths, DICOM, TIFF, greys of more than eight bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from torch import Tensor

from fedshift.data._walk import SUFFIXES
from fedshift.data.audit import notes, short_notes
from fedshift.data.sources import from_arrays, load
from fedshift.data.windows import window_of
from fedshift.errors import UserError
from fedshift.experiment.files import PICTURES, source_of
from fedshift.experiment.schema import Experiment
from fedshift.results.pages.task import task_lines
from fedshift.runs.raw_images import as_bytes
from fedshift.runs.setup import make_task
from tests.data.test_dicom import RAMP, dicom

NAMES = ("a.png", "b.png", "c.png", "d.png")
TABLE = {"file_name": NAMES, "label": ["cat", "dog", "cat", "dog"], "domain": ["x", "x", "y", "y"]}


def pictures(folder: Path, names: Sequence[str] = NAMES) -> Path:
    for i, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (10 * i, 0, 0)).save(folder / name)
    return folder


def written(path: Path, columns: dict[str, Sequence[str]], delimiter: str = ",") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.table({name: list(values) for name, values in columns.items()}), path)
    else:
        rows = [delimiter.join(row) for row in zip(*columns.values(), strict=True)]
        path.write_text("\n".join([delimiter.join(columns), *rows]) + "\n", encoding="utf-8")
    return path


def reds(images: Tensor) -> list[int]:
    return [int(image[0, 0, 0]) for image in images]


# ---- tables of paths ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["scans.csv", "scans.parquet"])
@pytest.mark.parametrize(
    "cells",
    [NAMES, [f"images/{name}" for name in NAMES], [Path(name).stem for name in NAMES], [f"images\\{n}" for n in NAMES]],
    ids=["names", "paths", "stems", "backslashes"],
)
def test_a_table_beside_a_folder_of_images(tmp_path: Path, name: str, cells: Sequence[str]) -> None:
    pictures(tmp_path / "images")
    table = written(tmp_path / name, {**TABLE, "file_name": list(reversed(cells))})
    pool = load(source_of(table))
    assert reds(pool.images) == [30, 20, 10, 0]  # in the order of the table
    assert (pool.classes, pool.domain_names) == (("cat", "dog"), ("x", "y"))
    assert pool.labels.tolist() == [0, 1, 0, 1]
    assert pool.names == tuple(reversed(cells))


def test_absolute_paths_semicolons_and_groups_from_paths(tmp_path: Path) -> None:
    root = pictures(tmp_path / "elsewhere", ["p1_1.png", "p1_2.png", "p2_1.png"])
    columns = {"Path": [str(path) for path in sorted(root.iterdir())], "diagnosis": ["a", "b", "a"]}
    table = written(tmp_path / "t" / "scans.csv", columns, ";")
    pool = load(f"csv:{table}", {"image": "Path", "label": "diagnosis", "group": "Path.path~p[0-9]+"})
    assert pool.groups is not None
    assert pool.groups.tolist() == [0, 0, 1]


def test_a_changed_picture_is_not_taken_from_the_cache(tmp_path: Path) -> None:
    pictures(tmp_path / "images")
    table = written(tmp_path / "scans.csv", TABLE)
    first = load(f"csv:{table}", cache=tmp_path / "cache")
    Image.new("RGB", (8, 8), (200, 0, 0)).save(tmp_path / "images" / "a.png")
    assert reds(first.images)[0] == 0
    assert reds(load(f"csv:{table}", cache=tmp_path / "cache").images)[0] == 200


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({**TABLE, "file_name": ("a", "b", "c", "lost")}, r'"scans.csv", line 5: there is no picture "lost" in'),
        (
            {**TABLE, "file_name": ("a", "b", "c", " ")},
            r'there is no picture in column "file_name" of "scans.csv", line 5',
        ),
        (
            {**TABLE, "file_name": ("a", "b", "c", "A" * 5000)},
            f'there is no picture "{"A" * 100}" in',
        ),  # pixels as text
        ({"file_name": NAMES}, "has no label column that is known by name; name it in columns: file_name"),
        ({**TABLE, "file_name": ("a", "b", "c", "both")}, "may be images/1/both.png and images/2/both.png"),
    ],
)
def test_mistakes_in_a_table(tmp_path: Path, columns: dict[str, Sequence[str]], sentence: str) -> None:
    pictures(tmp_path / "images", [*NAMES, "1/both.png", "2/both.png"])
    table = written(tmp_path / "scans.csv", columns)
    with pytest.raises(UserError, match=sentence):
        load(f"csv:{table}")


@pytest.mark.parametrize("place", ["images/metadata.parquet", "images/about.csv", "images.parquet", "images.csv"])
def test_a_folder_may_have_a_table_of_either_kind(tmp_path: Path, place: str) -> None:
    root = pictures(tmp_path / "images")
    written(tmp_path / place, TABLE)
    assert source_of(root) == f"folder:{root}"
    pool = load(source_of(root))
    assert (pool.classes, pool.labels.tolist(), pool.domain_names) == (("cat", "dog"), [0, 1, 0, 1], ("x", "y"))


@pytest.mark.parametrize("suffix", sorted(SUFFIXES))
def test_a_table_in_a_folder_of_any_pictures_is_about_them(tmp_path: Path, suffix: str) -> None:
    """Whatever the machine's own list of file types knows: Python alone has neither DICOM nor WebP."""
    written(tmp_path / "metadata.parquet", TABLE)
    assert source_of(tmp_path) == f"parquet:{tmp_path}"
    (tmp_path / f"1{suffix}").touch()
    assert source_of(tmp_path) == f"folder:{tmp_path}"
    assert PICTURES == SUFFIXES


# ---- DICOM, TIFF, wide greys ----------------------------------------------------------------------------------------
WINDOW = {"WindowCenter": 40, "WindowWidth": 400, "RescaleIntercept": -1024, "RescaleSlope": 1}


def test_dicom_files_are_pictures_however_they_are_called(tmp_path: Path) -> None:
    for name in ("healthy/1.dcm", "healthy/IM000002", "ill/1.2.840.113619.2.55"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(dicom(RAMP, **WINDOW))
    (tmp_path / "ill" / "README").write_text("no picture")
    pool = load(f"folder:{tmp_path}", channels=1)
    assert pool.labels.tolist() == [0, 0, 1]
    units = RAMP.astype(int) - 1024
    shades = pool.images[0, 0].numpy().astype(int)
    assert (shades[units < -165] == 0).all()  # the file's own window: 40 +- 200
    assert (shades[units > 245] == 255).all()
    lung = load(f"folder:{tmp_path}", channels=1, window="lung").images[0, 0].numpy().astype(int)
    assert abs(lung[units == -600][0] - 128) <= 1
    assert (lung[units < -1351].size, lung[units > 151].min()) == (0, 255)


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_twelve_bits_in_a_file_of_sixteen_keep_their_contrast(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "x").mkdir()
    Image.fromarray(RAMP).save(tmp_path / "x" / f"1.{suffix}")
    pool = load(f"folder:{tmp_path}", channels=1)
    shades = pool.images[0, 0].numpy()
    assert (shades.min(), shades.max(), len(np.unique(shades))) == (0, 255, 256)
    assert "hints" not in pool.provenance
    narrow = load(f"folder:{tmp_path}", channels=1, window=[2048, 100]).images[0, 0].numpy()
    assert (narrow[RAMP < 1998] == 0).all()
    assert (narrow[RAMP > 2098] == 255).all()
    assert narrow[RAMP == 2048] == 128


def test_another_window_is_another_entry_of_the_cache(tmp_path: Path) -> None:
    (tmp_path / "data" / "x").mkdir(parents=True)
    Image.fromarray(RAMP).save(tmp_path / "data" / "x" / "1.png")
    windows = (None, [2048.0, 100.0], [1000.0, 100.0], "lung", [-600, 1500])  # the last two are the same
    cache = tmp_path / "cache"
    for _ in range(2):
        made = [
            load(f"folder:{tmp_path / 'data'}", channels=1, window=window, cache=cache).images for window in windows
        ]
        fresh = [load(f"folder:{tmp_path / 'data'}", channels=1, window=window).images for window in windows]
        assert all(one.equal(other) for one, other in zip(made, fresh, strict=True))
    assert len(list((cache / "sources").iterdir())) == 4


def test_tiff_of_floats_colours_and_several_pages(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    floats = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
    Image.fromarray(floats).save(tmp_path / "x" / "1.tif")
    Image.new("RGB", (8, 8), (10, 20, 30)).save(tmp_path / "x" / "2.tiff")
    pool = load(f"folder:{tmp_path}")
    assert (int(pool.images[0].min()), int(pool.images[0].max())) == (0, 255)
    assert pool.images[1, :, 0, 0].tolist() == [10, 20, 30]
    pages = [Image.new("L", (8, 8), shade) for shade in (1, 2, 3)]
    pages[0].save(tmp_path / "x" / "3.tif", save_all=True, append_images=pages[1:])
    with pytest.raises(UserError, match="it has 3 pages; give them one by one"):
        load(f"folder:{tmp_path}")


def test_a_tiff_that_begins_with_its_small_copy(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    whole, copy = Image.new("L", (8, 8), 200), Image.new("L", (4, 4), 200)
    whole.encoderinfo = {"tiffinfo": {254: 0}}  # whose page is no smaller copy
    copy.save(tmp_path / "x" / "1.tif", save_all=True, append_images=[whole], tiffinfo={254: 1})
    assert load(f"folder:{tmp_path}").images.shape == (1, 3, 8, 8)


def test_white_may_be_zero_in_tiff(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    Image.fromarray(RAMP).save(tmp_path / "x" / "1.tif", tiffinfo={262: 0})
    shades = load(f"folder:{tmp_path}", channels=1).images[0, 0].numpy()
    assert (shades[0, 0], shades[-1, -1]) == (255, 0)


def test_what_comes_out_black_is_said(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    burnt = np.where(RAMP == 4095, 65535, RAMP // 16).astype(np.uint16)  # one bright pixel in a dark picture
    Image.fromarray(burnt).save(tmp_path / "x" / "1.png")
    hints = load(f"folder:{tmp_path}").provenance["hints"]
    assert isinstance(hints, list)
    assert hints[0].startswith("1 of 1 images of more than 8 bits are almost black")
    assert "hints" not in load(f"folder:{tmp_path}", window=[128, 256]).provenance


def test_a_window_is_served_with(tmp_path: Path) -> None:
    """Raw images of an artefact go the same way as those of the task."""
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "1.dcm").write_bytes(dicom(RAMP, **WINDOW))
    task = load(f"folder:{tmp_path}", size=16, window="lung").images
    assert as_bytes(tmp_path / "x" / "1.dcm", (3, 16, 16), window_of("lung")).equal(task)


def test_windows_are_checked() -> None:
    assert Experiment(data={"window": [40, 400.5]}).data.window == [40, 400.5]
    for wrong in ([1.0, 0.0], "lnug"):
        with pytest.raises(UserError, match="window"):
            window_of(Experiment(data={"window": wrong}).data.window)
    for odd in ([1.0], [1, "a"], [True, 2], [float("nan"), 2.0], 7):
        with pytest.raises(UserError, match=r"data\.window: it must be a name, or centre and width, not"):
            Experiment(data={"window": odd})


def test_one_class_is_pointed_at() -> None:
    """The commonest sign of a column that is not the label."""
    images = np.random.default_rng(0).integers(0, 256, (60, 3, 8, 8), dtype=np.uint8)
    pool = from_arrays(images, ["nevus"] * 60, domains=["a", "b"] * 30)
    experiment = Experiment(baselines=False, split={"train": 0.6, "val": 0.2, "test": 0.2})
    task = make_task(experiment, 0, pool)
    said = "all images are of one class, 'nevus': whatever is trained is right then"
    assert said in notes(task)
    assert said in short_notes(task)
    assert task_lines(task)[0] == "1 class: nevus"
