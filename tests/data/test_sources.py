"""Every scheme of a source on small generated files, every user mistake as one sentence, and the cache."""

from __future__ import annotations

import io
import json
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from fedshift.data import _parts, _source_cache
from fedshift.data.sources import from_arrays, load
from fedshift.errors import UserError

torch.set_num_threads(1)
NAMES = ["cat", "dog", "frog"]


def encoded(shade: int, size: tuple[int, int] = (8, 8), mode: str = "RGB", form: str = "PNG") -> bytes:
    """A picture of one shade."""
    value: Any = shade if mode in ("L", "I;16") else (shade,) * len(mode)
    out = io.BytesIO()
    Image.new(mode, size, value).save(out, format=form)
    return out.getvalue()


def parquet(
    path: Path,
    columns: Mapping[str, Sequence[Any]] | None = None,
    names: Mapping[str, Sequence[str]] | None = None,
    images: Sequence[bytes | None] | None = None,
    struct: bool = True,
    paths: Sequence[str | None] | None = None,
) -> Path:
    """A Parquet file in the hub's layout: six pictures of three classes unless told otherwise."""
    columns = {"label": [0, 1, 2, 0, 1, 2]} if columns is None else columns
    count = len(next(iter(columns.values())))
    pictures = [encoded(10 * i) for i in range(count)] if images is None else images
    places = [f"{i}.png" for i in range(count)] if paths is None else paths
    data: dict[str, Any] = {"image": [{"bytes": p, "path": at} for p, at in zip(pictures, places, strict=True)]}
    kinds = {"image": pa.struct([("bytes", pa.binary()), ("path", pa.string())])}
    if not struct:
        data, kinds = {"image": pictures}, {"image": pa.binary()}
    arrays = [pa.array(data["image"], kinds["image"]), *(pa.array(list(v)) for v in columns.values())]
    table = pa.table(arrays, names=["image", *columns])
    if names is not None:
        features = {column: {"names": list(n), "_type": "ClassLabel"} for column, n in names.items()}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)
    return path


def sentence(call: Callable[[], object]) -> str:
    """The one line a user's mistake produces."""
    with pytest.raises(UserError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    assert not text.endswith(".")
    return text


def folder(root: Path, names: Sequence[str]) -> Path:
    for i, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        form = {"jpg": "JPEG", "jpeg": "JPEG"}.get(name.rsplit(".", 1)[1].lower(), name.rsplit(".", 1)[1].upper())
        (root / name).write_bytes(encoded(10 * i, form=form))
    return root


# --- Parquet ----------------------------------------------------------------------------------------------------------


def test_parquet_in_the_hub_layout(tmp_path: Path) -> None:
    columns = {
        "label": [0, 1, 2, 0, 1, 2],
        "domain": ["sea", "sea", "air", "air", "sea", "air"],
        "split": ["train", "test", "validation", "val", "valid", "TRAIN"],
        "writer_id": [12, 12, 7, 7, 100, 7],
        "coarse_label": [0, 1, 1, 0, 1, 1],
    }
    file = parquet(tmp_path / "a.parquet", columns, {"label": NAMES, "coarse_label": ["big", "small"]})
    pool = load(f"parquet:{file}")
    assert pool.images.shape == (6, 3, 8, 8)
    assert pool.images[:, 0, 0, 0].tolist() == [0, 10, 20, 30, 40, 50]
    assert pool.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert pool.classes == tuple(NAMES)
    assert pool.domains is not None
    assert pool.users is not None
    assert pool.supers is not None
    assert pool.splits is not None
    assert (pool.domain_names, pool.domains.tolist()) == (("air", "sea"), [1, 1, 0, 0, 1, 0])
    assert (pool.user_names, pool.users.tolist()) == (("7", "12", "100"), [1, 1, 0, 0, 2, 0])
    assert (pool.super_names, pool.supers.tolist()) == (("big", "small"), [0, 1, 1, 0, 1, 1])
    assert pool.splits.tolist() == [0, 2, 1, 1, 1, 0]
    assert pool.groups is None


def test_parquet_columns_are_mapped_and_others_left_out(tmp_path: Path) -> None:
    columns = {"what": ["b", "a"], "who": ["x", "y"], "photo": [5, 5], "domain": ["d", "d"], "split": ["odd", "odd"]}
    file = parquet(tmp_path / "a.parquet", columns, struct=False)
    pool = load(f"parquet:{file}", {"label": "what", "client": "who", "group": "photo"})
    assert (pool.classes, pool.labels.tolist()) == (("a", "b"), [1, 0])
    assert pool.domain_names == ("x", "y")
    assert pool.groups is not None
    assert pool.groups.tolist() == [0, 0]
    assert pool.splits is None  # with columns given, an optional role that is not named is not looked for


CROPS = [
    "svhn/train/45_1.png",
    "a_b/7.png",
    "svhn/train/45_9.png",
    "svhn/train/4.png",
    "svhn/test/45_1.png",
    "a_b/8.png",
]


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ("image.path", [0, 1, 2, 3, 4, 5]),
        ("image.path~", [0, 1, 2, 3, 4, 5]),
        ("image.path~^svhn/[a-z]+/[0-9]+", [0, 1, 0, 3, 4, 5]),  # other pictures are groups of their own
        ("image.path~^[^_]+", [0, 1, 0, 3, 4, 1]),
        ("image.path~(?<=/)[0-9]", [0, 1, 0, 0, 0, 5]),  # the first match, anywhere in the path
        ("image.path~x*", [0, 1, 2, 3, 4, 5]),  # matches the empty string everywhere, which says nothing
        ("image.path~a.path~b|_b", [0, 1, 2, 3, 4, 1]),  # only the first ~ is ours
    ],
)
def test_groups_from_the_paths_of_pictures(tmp_path: Path, group: str, expected: list[int]) -> None:
    """``expected`` names every row's group by the first row in it."""
    file = parquet(tmp_path / "a.parquet", paths=CROPS)
    for _ in range(2):  # the second from the cache
        groups = load(f"parquet:{file}", {"group": group}, cache=tmp_path).groups
        assert groups is not None
        assert [groups.tolist().index(code) for code in groups.tolist()] == expected


def test_groups_from_paths_reach_across_files_and_never_mix_parts_with_whole_paths(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", {"label": [0, 1]}, paths=["3_1", "x"])
    parquet(tmp_path / "b.parquet", {"label": [0, 1]}, paths=["3_2", "x_1"])
    groups = load(f"parquet:{tmp_path}", {"group": "image.path~^[^_]+(?=_)"}).groups
    assert groups is not None
    assert [groups.tolist().index(code) for code in groups.tolist()] == [0, 1, 0, 3]


def test_a_column_whose_name_looks_like_a_path_is_that_column(tmp_path: Path) -> None:
    file = parquet(tmp_path / "a.parquet", {"label": [0, 1, 0], "image.path": [5, 6, 5]})
    groups = load(f"parquet:{file}", {"group": "image.path"}).groups
    assert groups is not None
    assert groups.tolist() == [0, 1, 0]


def test_parquet_integers_without_names(tmp_path: Path) -> None:
    pool = load(f"parquet:{parquet(tmp_path / 'a.parquet', {'label': [10, 2, 2, 9]})}")
    assert (pool.classes, pool.labels.tolist()) == (("2", "9", "10"), [2, 0, 0, 1])


def test_parquet_several_files_globs_folders_and_splits_from_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet(tmp_path / "data/train-00000-of-00001.parquet", names={"label": NAMES})
    parquet(tmp_path / "data/test-00000-of-00001.parquet", {"label": [2, 1, 0]}, {"label": NAMES})
    monkeypatch.setenv("SOME_DATA", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    pools = [
        load(source)
        for source in (
            "parquet:$SOME_DATA/data",
            "parquet:${SOME_DATA}/*/t*.parquet",
            "parquet:~/data/test-*.parquet, ~/data/train-*.parquet,~/data/*.parquet",
        )
    ]
    for pool in pools:
        assert pool.splits is not None
        assert pool.splits.tolist() == [2] * 3 + [0] * 6
        assert torch.equal(pool.images, pools[0].images)
        assert str(tmp_path) not in json.dumps(pool.provenance)
    lone = load("parquet:$SOME_DATA/data/train-*.parquet")
    assert lone.splits is None  # "train" alone is what the hub calls data that were never split
    parquet(tmp_path / "data/more.parquet", names={"label": NAMES})
    assert "more.parquet" in sentence(lambda: load("parquet:$SOME_DATA/data"))


def test_parquet_same_name_in_two_folders(tmp_path: Path) -> None:
    a = parquet(tmp_path / "a/x.parquet", {"label": ["u"]})
    b = parquet(tmp_path / "b/x.parquet", {"label": ["v", "v"]})
    pool = load(f"parquet:{a},{b}")
    assert pool.labels.tolist() == [0, 1, 1]
    assert len(pool.provenance["files"]) == 2  # type: ignore[arg-type]


def test_an_unset_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDSHIFT_NOT_SET", raising=False)
    for name in ("$FEDSHIFT_NOT_SET", "${FEDSHIFT_NOT_SET}"):
        text = sentence(lambda name=name: load(f"parquet:{name}/x.parquet"))  # type: ignore[misc]
        assert text == (
            f'the source "parquet:{name}/x.parquet" needs the environment variable FEDSHIFT_NOT_SET, which is not set'
        )


Mistake = tuple[dict[str, Any], dict[str, str] | None, str]
BAD_PARQUET: dict[str, Mistake] = {
    "column not there": (
        {},
        {"client": "place"},
        '"a.parquet" has no column "place" (client); its columns are image, label',
    ),
    "no label": (
        {"columns": {"kind": [1, 2]}},
        None,
        "no label column that is known by name; name it in columns: image, kind",
    ),
    "unknown key": ({}, {"colour": "label"}, 'columns has no key "colour"; its keys are image, label, client'),
    "null label": ({"columns": {"label": [1, None]}}, None, 'column "label" is empty in "a.parquet", row 1'),
    "blank label": ({"columns": {"label": ["a", " "]}}, None, 'column "label" is empty in "a.parquet", row 1'),
    "float label": ({"columns": {"label": [0.5]}}, None, "must hold strings or integers, not double"),
    "unknown label": ({"columns": {"label": [3, -1]}}, None, 'label of "a.parquet", row 1 is -1'),
    "label without a name": (
        {"columns": {"label": [0, 3]}, "names": {"label": NAMES}},
        None,
        'column "label" is 3 in "a.parquet", row 1, but there are names for 0..2 only',
    ),
    "class without samples": (
        {"columns": {"label": [0, 1]}, "names": {"label": NAMES}},
        None,
        "class 'frog' has no samples in parquet:",
    ),
    "empty domain": (
        {"columns": {"label": [0, 1], "domain": ["x", ""]}},
        None,
        'column "domain" is empty in "a.parquet", row 1',
    ),
    "null domain": (
        {"columns": {"label": [0, 1], "domain": [None, "y"]}},
        None,
        'column "domain" is empty in "a.parquet", row 0',
    ),
    "strange split": (
        {"columns": {"label": [0, 1], "split": ["train", "extra"]}},
        None,
        "'extra' in \"a.parquet\", row 1 is not one of train, val, valid, validation, test",
    ),
    "picture of another kind": (
        {},
        {"image": "label"},
        'column "label" of "a.parquet" holds no encoded pictures but int64',
    ),
    "group without paths": (
        {"struct": False},
        {"group": "image.path~^a"},
        'column "image" of "a.parquet" holds no paths to make groups of',
    ),
    "group of paths in a column that is not there": (
        {},
        {"group": "photo.path"},
        '"a.parquet" has no column "photo" (group); its columns are image, label',
    ),
    "paths are for groups": (
        {},
        {"client": "image.path"},
        '"a.parquet" has no column "image.path" (client); its columns are image, label',
    ),
    "group without a path": (
        {"columns": {"label": [0, 1]}, "paths": ["a", None]},
        {"group": "image.path"},
        'there is no path in column "image" of "a.parquet", row 1, to make a group of',
    ),
    "group that is no regular expression": (
        {},
        {"group": "image.path~(a"},
        'the group "image.path~(a" is no regular expression after its "~": missing )',
    ),
    "no picture": (
        {"images": [encoded(0), None], "columns": {"label": [0, 1]}},
        None,
        'no picture in column "image" of "a.parquet", row 1',
    ),
    "broken picture": (
        {"images": [encoded(0), b"GIF89a nonsense"], "columns": {"label": [0, 1]}},
        None,
        'the image in "a.parquet", row 1 cannot be decoded: ',
    ),
    "no picture format": (
        {"images": [b"", encoded(0)], "columns": {"label": [0, 1]}},
        None,
        'the image in "a.parquet", row 0 cannot be decoded: its format is not known',
    ),
    "truncated picture": (
        {"images": [encoded(0), encoded(9, (64, 64), form="JPEG")[:-200]], "columns": {"label": [0, 1]}},
        None,
        'the image in "a.parquet", row 1 cannot be decoded: ',
    ),
    "sizes differ": (
        {"images": [encoded(0), encoded(0, (9, 8))], "columns": {"label": [0, 1]}},
        None,
        'images differ in size, so a size is needed: 8x8 in "a.parquet", row 0 but 9x8 in "a.parquet", row 1',
    ),
}


@pytest.mark.parametrize("mistake", BAD_PARQUET)
def test_mistakes_in_a_parquet_file(tmp_path: Path, mistake: str) -> None:
    content, columns, expected = BAD_PARQUET[mistake]
    file = parquet(tmp_path / "a.parquet", **content)
    assert expected in sentence(lambda: load(f"parquet:{file}", columns))


def test_corrupt_parquet_files(tmp_path: Path) -> None:
    whole = parquet(tmp_path / "whole.parquet").read_bytes()
    for name, data in {"text": b"hello", "empty": b"", "cut": whole[: len(whole) // 2]}.items():
        (tmp_path / f"{name}.parquet").write_bytes(data)
        text = sentence(lambda name=name: load(f"parquet:{tmp_path}/{name}.parquet"))  # type: ignore[misc]
        assert f'"{name}.parquet" cannot be read as Parquet: ' in text


def test_parquet_files_that_do_not_fit_together(tmp_path: Path) -> None:
    parquet(tmp_path / "a.parquet", names={"label": NAMES})
    parquet(tmp_path / "b.parquet", names={"label": NAMES[::-1]})
    text = sentence(lambda: load(f"parquet:{tmp_path}"))
    assert text == '"a.parquet" and "b.parquet" do not agree on the classes: cat, dog, frog against frog, dog, cat'
    parquet(tmp_path / "b.parquet", {"label": ["cat", "dog", "frog"]})
    assert "do not agree on the classes: cat, dog, frog against names" in sentence(lambda: load(f"parquet:{tmp_path}"))
    parquet(tmp_path / "b.parquet", {"label": [0, 1, 2], "domain": ["x"] * 3}, {"label": NAMES})
    assert "do not both have a column for client" in sentence(lambda: load(f"parquet:{tmp_path}"))


def test_nothing_to_read(tmp_path: Path) -> None:
    assert 'no Parquet file matches "' in sentence(lambda: load(f"parquet:{tmp_path}"))
    assert 'no Parquet file matches "' in sentence(lambda: load(f"parquet:{tmp_path}/*.parquet"))
    assert "says nothing after" in sentence(lambda: load("parquet:"))
    assert "holds no images" in sentence(lambda: load("parquet: , "))
    file = parquet(tmp_path / "none.parquet", {"label": pa.array([], pa.int64())})
    assert "holds no images" in sentence(lambda: load(f"parquet:{file}"))
    assert "must start with one of embedded:, parquet:, csv:, folder:, hub:" in sentence(lambda: load("digits"))
    assert "embedded sources are digits" in sentence(lambda: load("embedded:cats"))
    assert "no columns to name" in sentence(lambda: load("embedded:digits", {"label": "label"}))
    assert "size must be a positive" in sentence(lambda: load("embedded:digits", size=0))
    assert "channels must be 1 (grey) or 3 (RGB), not 4" in sentence(lambda: load("embedded:digits", channels=4))


def test_a_schema_with_strange_metadata_names_no_classes() -> None:
    for text in (b"", b"[]", b"{}", b'{"info": null}', b'{"info": {"features": {"label": null}}}'):
        assert _parts._class_labels({b"huggingface": text}) == {}


# --- pixels -----------------------------------------------------------------------------------------------------------


def test_sizes_and_modes_are_converted(tmp_path: Path) -> None:
    pictures = [
        encoded(100, (8, 8), "RGB"),
        encoded(100, (16, 16), "L"),
        encoded(100, (5, 9), "RGBA", "WEBP"),
        encoded(100 * 257, (8, 8), "I;16"),
        encoded(100, (32, 32), "RGB", "JPEG"),
        encoded(100, (32, 32), "RGB", "BMP"),
    ]
    out = io.BytesIO()
    Image.new("RGB", (8, 8), (100, 100, 100)).quantize(4).save(out, format="PNG", transparency=b"\x80\xff")
    pictures.append(out.getvalue())
    file = parquet(tmp_path / "a.parquet", {"label": [0] * 7}, images=pictures)
    for channels in (1, 3):
        pool = load(f"parquet:{file}", size=12, channels=channels)
        assert pool.images.shape == (7, channels, 12, 12)
        assert int((pool.images.int() - 100).abs().max()) <= 2
    assert pool.provenance["original"]["16x16 L"] == 1  # type: ignore[index]
    assert "bicubic" in str(pool.provenance["conversion"])


def test_resizing_is_pillows_bicubic_and_keeps_other_shapes_without_a_size(tmp_path: Path) -> None:
    noise = Image.fromarray(np.arange(8 * 12 * 3, dtype=np.uint8).reshape(8, 12, 3))
    out = io.BytesIO()
    noise.save(out, format="PNG")
    file = parquet(tmp_path / "a.parquet", {"label": [0]}, images=[out.getvalue()])
    assert np.array_equal(load(f"parquet:{file}").images[0].permute(1, 2, 0).numpy(), np.asarray(noise))
    small = noise.resize((6, 6), Image.Resampling.BICUBIC)
    assert np.array_equal(load(f"parquet:{file}", size=6).images[0].permute(1, 2, 0).numpy(), np.asarray(small))


def test_a_camera_s_orientation_is_applied(tmp_path: Path) -> None:
    picture = Image.new("RGB", (8, 4))
    exif = picture.getexif()
    exif[0x0112] = 6
    out = io.BytesIO()
    picture.save(out, format="JPEG", exif=exif)
    file = parquet(tmp_path / "a.parquet", {"label": [0]}, images=[out.getvalue()])
    assert load(f"parquet:{file}").images.shape == (1, 3, 8, 4)


def test_embedded_in_grey_matches_pillow() -> None:
    colour, grey = load("embedded:digits", size=16), load("embedded:digits", size=16, channels=1)
    expected = Image.fromarray(colour.images[700].permute(1, 2, 0).numpy()).convert("L")
    assert np.array_equal(grey.images[700, 0].numpy(), np.asarray(expected))
    assert grey.domain_names == colour.domain_names


# --- folders ----------------------------------------------------------------------------------------------------------


def test_folder_layouts(tmp_path: Path) -> None:
    plain = load(f"folder:{folder(tmp_path / 'a', ['cat/1.png', 'cat/2.JPG', 'dog/1.webp', 'dog/2.bmp'])}")
    assert (plain.classes, plain.labels.tolist(), plain.domains) == (("cat", "dog"), [0, 0, 1, 1], None)
    domains = load(f"folder:{folder(tmp_path / 'b', ['day/cat/1.png', 'night/cat/1.png', 'night/dog/1.jpeg'])}")
    assert domains.domain_names == ("day", "night")
    assert domains.labels.tolist() == [0, 0, 1]
    split = load(f"folder:{folder(tmp_path / 'c', ['test/cat/1.png', 'train/cat/1.png', 'val/dog/1.png'])}")
    assert split.splits is not None
    assert split.splits.tolist() == [2, 0, 1]
    assert split.domains is None
    both = load(f"folder:{folder(tmp_path / 'd', ['train/day/cat/1.png', 'test/night/cat/1.png'])}")
    assert both.splits is not None
    assert both.splits.tolist() == [2, 0]
    assert both.domains is not None
    assert both.domains.tolist() == [1, 0]
    odd = load(f"folder:{folder(tmp_path / 'e', ['test/1.png', 'cat/1.png'])}")
    assert odd.classes == ("cat", "test")  # a class may be called test


def test_folder_ignores_what_is_no_picture(tmp_path: Path) -> None:
    root = folder(tmp_path, ["cat/1.png", ".hidden/2.png", "cat/.3.png", "__MACOSX/4.png"])
    (root / "README.md").write_text("hello")
    (root / "cat/notes.txt").write_text("hello")
    (root / "cat/empty").mkdir()
    assert len(load(f"folder:{root}")) == 1


@pytest.mark.parametrize(
    ("names", "empty", "expected"),
    [
        (["cat/1.png", "day/cat/1.png"], "", "different depths"),
        (["1.png"], "", "must lie in class/ or domain/class/"),
        (["train/1.png", "test/1.png"], "", "must lie in class/ or domain/class/"),
        (["a/b/c/1.png"], "", "must lie in class/ or domain/class/"),
        (["train/cat/1.png", "extra/cat/1.png"], "", "mixes split folders with others at its top: train and extra"),
        (["cat/1.png"], "dog", 'the folder "dog" of the source'),
        (["day/cat/1.png"], "night", 'the folder "night" of the source'),
        (["day/cat/1.png"], "day/dog", 'the folder "day/dog" of the source'),
        ([], "dog", "there are no pictures"),
    ],
)
def test_mistakes_in_a_folder(tmp_path: Path, names: list[str], empty: str, expected: str) -> None:
    (tmp_path / "x" / empty).mkdir(parents=True)
    root = folder(tmp_path / "x", names)
    assert expected in sentence(lambda: load(f"folder:{root}"))


def test_more_mistakes_in_a_folder(tmp_path: Path) -> None:
    root = folder(tmp_path, ["cat/1.png"])
    assert "is not a folder" in sentence(lambda: load(f"folder:{root}/nowhere"))
    assert "no columns to name" in sentence(lambda: load(f"folder:{root}", {"label": "label"}))
    (root / "cat/2.png").write_bytes(b"nonsense")
    text = sentence(lambda: load(f"folder:{root}"))
    assert text == "the image in cat/2.png cannot be decoded: its format is not known"


# --- hub --------------------------------------------------------------------------------------------------------------


class FakeSplit:
    """What the datasets library gives for a split, as far as it is used."""

    def __init__(self, table: pa.Table, **names: Sequence[str]) -> None:
        self.table = table
        kinds = {column: types.SimpleNamespace() for column in table.column_names}
        self.features = kinds | {column: types.SimpleNamespace(names=list(n)) for column, n in names.items()}

    def with_format(self, kind: str) -> pa.Table:
        assert kind == "arrow"
        return self.table


def fake_hub(monkeypatch: pytest.MonkeyPatch, splits: Mapping[str, FakeSplit]) -> list[tuple[str, str | None]]:
    asked: list[tuple[str, str | None]] = []

    def load_dataset(name: str, config: str | None = None) -> Mapping[str, FakeSplit]:
        asked.append((name, config))
        if name.startswith("missing"):
            raise ConnectionError("Couldn't reach the Hub.\nmore lines")
        return splits

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return asked


def test_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tables = [
        pq.read_table(parquet(tmp_path / "a.parquet")),
        pq.read_table(parquet(tmp_path / "b.parquet", {"label": [2, 1]})),
    ]
    (tmp_path / "on-disk.png").write_bytes(encoded(200))
    kind = tables[1].schema.field("image").type
    paths = pa.array(
        [{"bytes": None, "path": str(tmp_path / "on-disk.png")}, {"bytes": encoded(9), "path": None}], kind
    )
    tables[1] = tables[1].set_column(0, "image", paths)
    splits = {"train": FakeSplit(tables[0], label=NAMES), "validation": FakeSplit(tables[1], label=NAMES)}
    asked = fake_hub(monkeypatch, splits)
    pool = load("hub:owner/name:small", cache=tmp_path)
    assert asked == [("owner/name", "small")]
    assert pool.classes == tuple(NAMES)
    assert pool.splits is not None
    assert pool.splits.tolist() == [0] * 6 + [1] * 2
    assert pool.images[6:, 0, 0, 0].tolist() == [200, 9]
    again = load("hub:owner/name:small", cache=tmp_path)
    assert torch.equal(again.images, pool.images)
    assert again.provenance == pool.provenance
    assert len(list((tmp_path / "sources").iterdir())) == 1
    fake_hub(monkeypatch, {"train": splits["train"]})
    assert load("hub:owner/name").splits is None


def test_hub_mistakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table = pq.read_table(parquet(tmp_path / "a.parquet"))
    fake_hub(monkeypatch, {"train": FakeSplit(table, label=NAMES), "extra": FakeSplit(table, label=NAMES)})
    text = sentence(lambda: load("hub:missing/name"))
    assert text == 'the source "hub:missing/name" could not be loaded: Couldn\'t reach the Hub'
    assert "'extra' in \"extra\", row 0 is not one of train" in sentence(lambda: load("hub:owner/name"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    text = sentence(lambda: load("hub:owner/name"))
    assert text == 'the source "hub:owner/name" needs the datasets library: pip install "fedshift[hub]"'


# --- cache ------------------------------------------------------------------------------------------------------------


def entries(cache: Path) -> list[Path]:
    return sorted((cache / "sources").iterdir())


def test_cache_gives_the_same_pool_without_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    columns = {"label": [0, 1, 2], "domain": ["b", "a", "b"], "split": ["train", "test", "val"], "writer_id": [3, 1, 2]}
    file = parquet(tmp_path / "a.parquet", columns, {"label": NAMES})
    cold = load(f"parquet:{file}", cache=tmp_path)
    monkeypatch.setattr(_source_cache, "decode", None)  # calling it would be an error
    warm = load(f"parquet:{file}", cache=tmp_path)
    for name in ("images", "labels", "domains", "users", "splits"):
        assert torch.equal(getattr(warm, name), getattr(cold, name)), name
    assert (warm.classes, warm.domain_names, warm.user_names) == (cold.classes, cold.domain_names, cold.user_names)
    assert warm.supers is None
    assert warm.groups is None
    assert warm.provenance == cold.provenance == json.loads(json.dumps(cold.provenance))
    warm.images[0] = 255  # copy on write: a careless user cannot damage the cache
    assert torch.equal(load(f"parquet:{file}", cache=tmp_path).images, cold.images)
    assert {path.name for path in entries(tmp_path)[0].iterdir()} == {"images.npy", "codes.npz", "meta.json"}


def test_cache_key_follows_content_and_request_not_place(tmp_path: Path) -> None:
    file = parquet(tmp_path / "one/a.parquet", {"label": [0, 1], "other": ["x", "y"]})
    cache = tmp_path / "cache"
    load(f"parquet:{file}", cache=cache)
    moved = tmp_path / "two/a.parquet"
    moved.parent.mkdir()
    file.rename(moved)
    assert load(f"parquet:{moved}", cache=cache).provenance["source"] == f"parquet:{moved}"
    assert len(entries(cache)) == 1
    load(f"parquet:{moved}", size=4, cache=cache)
    load(f"parquet:{moved}", channels=1, cache=cache)
    load(f"parquet:{moved}", {"label": "other"}, cache=cache)
    assert len(entries(cache)) == 4
    parquet(moved, {"label": [1, 0], "other": ["x", "y"]})
    assert load(f"parquet:{moved}", cache=cache).labels.tolist() == [1, 0]
    assert len(entries(cache)) == 5


@pytest.mark.parametrize("damage", ["truncate", "flip", "meta", "codes", "no images", "empty"])
def test_a_broken_cache_entry_is_made_again(tmp_path: Path, damage: str) -> None:
    root = folder(tmp_path / "data", ["cat/1.png", "cat/2.png", "dog/1.png"])
    cold = load(f"folder:{root}", cache=tmp_path)
    (entry,) = entries(tmp_path)
    images = (entry / "images.npy").read_bytes()
    broken: dict[str, Callable[[], object]] = {
        "truncate": lambda: (entry / "images.npy").write_bytes(images[:-50]),
        "flip": lambda: (entry / "images.npy").write_bytes(images[:-1] + b"\x55"),
        "meta": lambda: (entry / "meta.json").write_text("{"),
        "codes": lambda: (entry / "codes.npz").write_bytes(b"no zip"),
        "no images": lambda: (entry / "images.npy").unlink(),
        "empty": lambda: [path.unlink() for path in entry.iterdir()],
    }
    broken[damage]()
    for _ in range(2):
        again = load(f"folder:{root}", cache=tmp_path)
        assert torch.equal(again.images, cold.images)
        assert again.classes == cold.classes
    assert entries(tmp_path) == [entry]  # mended in place, nothing half-written left behind
    assert _source_cache._recall(entry) is not None


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    root = folder(tmp_path / "data", ["cat/1.png"])
    (tmp_path / "file").write_text("in the way")
    assert "sources cannot be written (Not a directory)" in sentence(
        lambda: load(f"folder:{root}", cache=tmp_path / "file")
    )


def test_a_race_for_the_same_entry_is_won_by_the_first(tmp_path: Path) -> None:
    root = folder(tmp_path / "data", ["cat/1.png"])
    pool = load(f"folder:{root}", cache=tmp_path)
    (entry,) = entries(tmp_path)
    before = (entry / "images.npy").stat().st_ino
    _source_cache._remember(entry, pool, "folder:x")
    assert (entry / "images.npy").stat().st_ino == before
    assert entries(tmp_path) == [entry]


# --- arrays -----------------------------------------------------------------------------------------------------------


def test_arrays_in_every_layout() -> None:
    chw = (np.arange(2 * 3 * 4 * 5) % 256).astype(np.uint8).reshape(2, 3, 4, 5)
    hwc = chw.transpose(0, 2, 3, 1)
    for images in (chw, hwc, torch.from_numpy(chw), chw / 255.0, torch.from_numpy(chw).float() / 255):
        pool = from_arrays(images, [0, 1])
        assert np.array_equal(pool.images.numpy(), chw)
    grey = from_arrays(chw[:, 0], torch.tensor([1, 0]))
    assert grey.images.shape == (2, 1, 4, 5)
    assert from_arrays(torch.zeros(2, 1, 4, 4, dtype=torch.bfloat16), [0, 1]).images.shape == (2, 1, 4, 4)
    pool = from_arrays(chw, [0, 1])
    chw[:] = 0
    assert int(pool.images.sum()) > 0  # copied


def test_arrays_with_everything() -> None:
    pool = from_arrays(
        np.zeros((3, 4, 4), np.uint8),
        np.array(["dog", "cat", "dog"]),
        domains=["x", "y", "x"],
        users=torch.tensor([10, 9, 10]),
        supers=["pet"] * 3,
        groups=[4, 4, 7],
        splits=["train", "test", "valid"],
        classes=["dog", "cat", "frog"],
    )
    assert (pool.labels.tolist(), pool.classes) == ([0, 1, 0], ("dog", "cat", "frog"))
    assert pool.users is not None
    assert pool.groups is not None
    assert pool.splits is not None
    assert (pool.user_names, pool.users.tolist()) == (("9", "10"), [1, 0, 1])
    assert (pool.groups.tolist(), pool.splits.tolist()) == ([0, 0, 1], [0, 2, 1])
    assert from_arrays(np.zeros((2, 4, 4)), [1, 0], classes=["a", "b"]).labels.tolist() == [1, 0]
    numbered = from_arrays(np.zeros((3, 4, 4)), [0, 0, 0], splits=np.array([0, 1, 2])).splits
    assert numbered is not None
    assert numbered.tolist() == [0, 1, 2]
    json.dumps(pool.provenance)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"images": np.zeros((2, 4, 4, 4), np.uint8)}, "1 or 3 channels, not [2, 4, 4, 4]"),
        ({"images": np.zeros((2, 4), np.uint8)}, "1 or 3 channels, not [2, 4]"),
        ({"images": np.zeros((2, 4, 4), np.int64)}, "must be uint8 or floats in [0, 1], not int64"),
        ({"images": np.full((2, 4, 4), 255.0)}, "must lie in [0, 1], found 255..255"),
        ({"images": np.full((2, 4, 4), np.nan)}, "must lie in [0, 1], found nan..nan"),
        ({"images": np.zeros((0, 4, 4)), "labels": []}, "holds no images"),
        ({"labels": [0]}, "2 images need as many label entries, not 1"),
        ({"labels": [0.5, 1.0]}, "the label of item 0 must be a string or an integer, not 0.5"),
        ({"labels": [0, None]}, "the label of item 1 must be a string or an integer, not None"),
        ({"labels": [0, -1]}, "the label of item 1 is -1"),
        ({"labels": [0, 5], "classes": ["a", "b"]}, "labels must lie in 0..1, found 0..5"),
        ({"labels": ["a", "c"], "classes": ["a", "b"]}, "'c' in item 1 is not one of a, b"),
        ({"classes": ["a", "a"]}, "classes must have different names"),
        ({"domains": ["x", ""]}, "the client of item 1 must be a string or an integer"),
        ({"splits": ["train", "later"]}, "'later' in item 1 is not one of train"),
    ],
)
def test_mistakes_in_arrays(change: dict[str, Any], expected: str) -> None:
    given: dict[str, Any] = {"images": np.zeros((2, 4, 4), np.uint8), "labels": [0, 1], **change}
    assert expected in sentence(lambda: from_arrays(given.pop("images"), given.pop("labels"), **given))


# --- real files -------------------------------------------------------------------------------------------------------


def test_a_real_file(tmp_path: Path) -> None:
    if not (Path(os.environ.get("FEDSHIFT_DATA", "/nowhere")) / "office_caltech10.parquet").is_file():
        pytest.skip("FEDSHIFT_DATA does not name a folder that holds office_caltech10.parquet")
    pool = load("parquet:$FEDSHIFT_DATA/office_caltech10.parquet", size=32, cache=tmp_path)
    assert pool.images.shape == (2533, 3, 32, 32)
    assert pool.classes[:2] == ("backpack", "bike")
    assert pool.domain_names == ("amazon", "caltech10", "dslr", "webcam")
    assert pool.domains is not None
    assert pool.splits is not None
    assert torch.bincount(pool.domains).tolist() == [958, 1123, 157, 295]
    assert torch.bincount(pool.splits, minlength=3).tolist() == [2027, 0, 506]
    again = load("parquet:$FEDSHIFT_DATA/office_caltech10.parquet", size=32, cache=tmp_path)
    assert torch.equal(again.images, pool.images)
