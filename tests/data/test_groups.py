"""Groups and attributes of a source: found by name, hinted at, missing; in tables, CSV files and arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from fedshift.data.pool import Pool
from fedshift.data.sources import from_arrays, load
from fedshift.errors import UserError
from tests.data.test_sources import folder, parquet, sentence

COUNT = 60
LABELS = [i % 2 for i in range(COUNT)]
PEOPLE = [f"P{i // 3:02d}" for i in range(COUNT)]  # twenty, three images each


def table(path: Path, columns: Mapping[str, Sequence[Any]]) -> Path:
    return parquet(path / "a.parquet", {"label": LABELS, **columns})


def together(pool: Pool) -> list[int]:
    """Every image's group, named by the first image in it."""
    assert pool.groups is not None
    codes = pool.groups.tolist()
    return [codes.index(code) if code >= 0 else -1 for code in codes]


TRIPLES = [i // 3 * 3 for i in range(COUNT)]
USUAL = [
    "patient",
    "patient_id",
    "PatientID",
    "Patient ID",
    "subject",
    "subject_id",
    "case",
    "study_id",
    "lesion_id",
    "mrn",
]


# ---- found by name ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", USUAL)
def test_a_table_s_groups_are_found_under_usual_names(tmp_path: Path, name: str) -> None:
    pool = load(f"parquet:{table(tmp_path, {name: PEOPLE})}")
    assert together(pool) == TRIPLES
    assert pool.group_names == tuple(sorted(set(PEOPLE)))
    assert pool.provenance["group"] == name
    assert "hints" not in pool.provenance


def test_the_widest_name_wins(tmp_path: Path) -> None:
    pool = load(f"parquet:{table(tmp_path, {'lesion_id': range(COUNT), 'patient_id': PEOPLE})}")
    assert together(pool) == TRIPLES


def test_they_are_found_though_columns_are_named_and_not_if_that_is_not_wanted(tmp_path: Path) -> None:
    file = table(tmp_path, {"patient": PEOPLE, "hospital": ["a", "b"] * 30, "domain": ["x"] * COUNT})
    assert together(load(f"parquet:{file}", {"client": "hospital"})) == TRIPLES
    none = load(f"parquet:{file}", {"client": "hospital", "group": ""})
    assert none.groups is None
    assert "hints" not in none.provenance  # whoever says so knows
    by_patient = load(f"parquet:{file}", {"client": "patient"})  # then every client would be one group
    assert by_patient.groups is None


def test_naming_a_group_alone_leaves_the_usual_names_of_other_roles(tmp_path: Path) -> None:
    pool = load(f"parquet:{table(tmp_path, {'who': PEOPLE, 'domain': ['x', 'y'] * 30})}", {"group": "who"})
    assert pool.domain_names == ("x", "y")
    assert together(pool) == TRIPLES


def test_numbers_that_went_through_a_float_are_whole(tmp_path: Path) -> None:
    people = [None if i == 5 else float(i // 3) for i in range(COUNT)]  # what pandas makes of a column with a gap
    pool = load(f"parquet:{table(tmp_path, {'patient': people})}")
    assert together(pool) == [-1 if i == 5 else first for i, first in enumerate(TRIPLES)]
    assert pool.group_names[:3] == ("0", "1", "2")


# ---- hints --------------------------------------------------------------------------------------------------------------
LOOKS_LIKE_GROUPS: dict[str, tuple[str, Sequence[Any], bool]] = {
    "an id": ("record_id", PEOPLE, True),
    "a number with such a name": ("ScanID", [i // 2 for i in range(COUNT)], True),
    "texts that repeat": ("record", PEOPLE, True),
    "an id of its own for every image": ("image_id", range(COUNT), False),
    "the same everywhere": ("hsf_id", [0] * COUNT, False),
    "an age": ("age", [30 + i // 2 for i in range(COUNT)], False),
    "a few sites": ("site", ["a", "b", "c"] * 20, False),
    "another name of the class": ("what_id", ["cat", "dog"] * 30, False),
}


@pytest.mark.parametrize("case", LOOKS_LIKE_GROUPS)
def test_a_column_that_looks_like_groups_is_pointed_at(tmp_path: Path, case: str) -> None:
    name, values, expected = LOOKS_LIKE_GROUPS[case]
    file = table(tmp_path, {name: list(values)})
    for _ in range(2):  # the second from the cache
        hints = load(f"parquet:{file}", cache=tmp_path).provenance.get("hints", [])
        assert len(hints) == int(expected)  # type: ignore[arg-type]
    if not expected:
        return
    (hint,) = hints  # type: ignore[misc]
    assert f'column "{name}" looks like the id of a group' in hint
    assert f'set group = "{name}" in [data] columns (-c data.columns.group={name})' in hint
    used = load(f"parquet:{file}", {"group": name}, cache=tmp_path)
    assert used.groups is not None
    assert "hints" not in used.provenance


def test_sites_by_many_images_are_no_groups(tmp_path: Path) -> None:
    file = parquet(tmp_path / "a.parquet", {"label": [0, 1] * 300, "site_id": [i % 4 for i in range(600)]})
    assert "hints" not in load(f"parquet:{file}").provenance


# ---- folders with a CSV file --------------------------------------------------------------------------------------------
def pictures(root: Path, count: int = 12) -> list[str]:
    names = [f"{('north', 'south')[i % 2]}/{('cat', 'dog')[i // 2 % 2]}/img-{i}.png" for i in range(count)]
    folder(root, names)
    return names


def write_csv(path: Path, columns: Mapping[str, Sequence[Any]], comma: str = ",") -> Path:
    lines = [comma.join(columns), *(comma.join(map(str, line)) for line in zip(*columns.values(), strict=True))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8-sig")
    return path


@pytest.mark.parametrize("comma", [",", ";", "\t"])
@pytest.mark.parametrize("place", ["x/metadata.csv", "x/anything.csv", "x.csv"])
@pytest.mark.parametrize("how", ["path", "path without suffix", "name", "name without suffix", "windows"])
def test_a_csv_file_beside_the_pictures(tmp_path: Path, place: str, how: str, comma: str) -> None:
    names = pictures(tmp_path / "x")
    called = {
        "path": list(names),
        "path without suffix": [name.removesuffix(".png") for name in names],
        "name": [name.rsplit("/")[-1] for name in names],
        "name without suffix": [name.rsplit("/")[-1].removesuffix(".png") for name in names],
        "windows": [".\\" + name.replace("/", "\\") for name in names],
    }[how]
    people = [f"p{i // 3}" for i in range(12)]
    columns = {"patient_id": people, "file_name": called, "sex": ["f", "m", "", "f"] * 3}
    write_csv(tmp_path / place, {name: values[::-1] for name, values in columns.items()}, comma)  # in any order
    for _ in range(2):
        pool = load(f"folder:{tmp_path / 'x'}", attributes=["sex"], cache=tmp_path / "cache")
        ids = {name: pool.group_names[int(code)] for name, code in zip(pool.names, pool.groups, strict=True)}  # type: ignore[arg-type]
        assert ids == dict(zip(names, people, strict=True))
        assert dict(zip(pool.names, pool.attributes["sex"].at(torch.arange(12)), strict=True)) == dict(
            zip(names, columns["sex"], strict=True)
        )
        assert pool.domain_names == ("north", "south")
        assert pool.classes == ("cat", "dog")


def test_a_csv_file_can_say_everything(tmp_path: Path) -> None:
    names = [f"img-{i}.png" for i in range(12)]
    folder(tmp_path, names)
    write_csv(
        tmp_path / "all.csv",
        {
            "image": names,
            "dx": ["mel", "nev"] * 6,
            "hospital": ["a", "a", "b"] * 4,
            "patient": [i // 2 for i in range(12)],
        },
    )
    pool = load(f"folder:{tmp_path}", {"label": "dx", "client": "hospital"})
    assert (pool.classes, pool.domain_names) == (("mel", "nev"), ("a", "b"))
    assert pool.groups is not None
    text = sentence(lambda: load(f"folder:{tmp_path}"))
    assert (
        text == '"all.csv" has no label column that is known by name; name it in columns: image, dx, hospital, patient'
    )


def test_pictures_that_the_csv_file_does_not_name_have_no_group(tmp_path: Path) -> None:
    names = pictures(tmp_path)
    write_csv(tmp_path / "metadata.csv", {"file_name": names[:10], "patient": [i // 2 for i in range(10)]})
    pool = load(f"folder:{tmp_path}")
    missing = {name for name, code in zip(pool.names, pool.groups.tolist(), strict=True) if code < 0}  # type: ignore[union-attr]
    assert missing == set(names[10:])


def test_a_csv_file_that_names_no_picture_is_said_to_be_unused(tmp_path: Path) -> None:
    names = pictures(tmp_path / "x")
    write_csv(tmp_path / "x/notes.csv", {"what": ["hello", "world"]})
    pool = load(f"folder:{tmp_path / 'x'}", cache=tmp_path / "cache")
    assert pool.provenance["hints"] == [
        '"notes.csv" is not used, because none of its columns names the pictures; call that column file_name and let it '
        f'say, for instance, "{sorted(names)[0]}"'
    ]
    (tmp_path / "x/notes.csv").unlink()
    assert "hints" not in load(f"folder:{tmp_path / 'x'}", cache=tmp_path / "cache").provenance


def test_an_unused_id_in_a_csv_file_is_pointed_at(tmp_path: Path) -> None:
    names = pictures(tmp_path, 40)
    write_csv(tmp_path / "metadata.csv", {"file_name": names, "record": [f"r{i // 3}" for i in range(40)]})
    (hint,) = load(f"folder:{tmp_path}").provenance["hints"]  # type: ignore[misc]
    assert 'set group = "record" in [data] columns' in hint
    assert load(f"folder:{tmp_path}", {"group": "record"}).groups is not None


def test_a_changed_csv_file_is_read_again(tmp_path: Path) -> None:
    names = pictures(tmp_path / "x")
    for people in ([0] * 6 + [1] * 6, list(range(12))):
        write_csv(tmp_path / "x/metadata.csv", {"file_name": names, "patient": people})
        pool = load(f"folder:{tmp_path / 'x'}", cache=tmp_path / "cache")
        assert len(pool.groups.unique()) == len(set(people))  # type: ignore[union-attr]


def test_mistakes_with_csv_files(tmp_path: Path) -> None:
    names = pictures(tmp_path / "x")
    source = f"folder:{tmp_path / 'x'}"
    assert "no columns to name: leave columns out, or put a CSV file" in sentence(lambda: load(source, {"client": "a"}))
    assert 'has no column "sex" (attributes): it has none at all' in sentence(lambda: load(source, attributes=["sex"]))
    csv = write_csv(tmp_path / "x/metadata.csv", {"file_name": names, "who": range(12), "place": ["a"] * 11 + [""]})
    there = '"metadata.csv" has no column "sex" ({}); its columns are file_name, who, place'
    assert sentence(lambda: load(source, attributes=["sex"])) == there.format("attributes")
    assert sentence(lambda: load(source, {"group": "sex"})) == there.format("group")
    assert sentence(lambda: load(source, {"image": "sex"})) == there.format("image")
    text = sentence(lambda: load(source, {"client": "place"}))
    assert text == f'column "place" (client) of "metadata.csv" is empty for {names[11]}'
    write_csv(csv, {"file_name": [*names, names[0]], "who": range(13)})
    assert sentence(lambda: load(source)) == f'"metadata.csv" names {names[0]} twice'
    write_csv(csv, {"file_name": names[:3], "hospital": ["a"] * 3})
    assert "does not name" in sentence(lambda: load(source, {"client": "hospital"}))
    folder(tmp_path / "x", ["south/dog/img-0.png"])
    write_csv(csv, {"file_name": ["img-0.png"], "patient": [1]})
    text = sentence(lambda: load(source))
    assert text == (
        '"img-0.png" in "metadata.csv" may be north/cat/img-0.png and south/dog/img-0.png: write the path below the folder'
    )
    csv.unlink()
    for name in ("a", "b"):
        write_csv(tmp_path / f"x/{name}.csv", {"file_name": [names[1]], "patient": [1]})
    assert "a.csv and b.csv both name pictures" in sentence(lambda: load(source))


# ---- attributes ---------------------------------------------------------------------------------------------------------
def test_attributes_of_a_table(tmp_path: Path) -> None:
    columns = {
        "sex": ["f", None, " m "] * 20,
        "scanner": [0, 1, 1] * 20,
        "age": [61.0, float("nan"), 42.5] * 20,
        "smokes": [True, False, None] * 20,
    }
    file = parquet(
        tmp_path / "a.parquet", {"label": LABELS, **columns}, {"label": ["cat", "dog"], "scanner": ["A", "B"]}
    )
    wanted = ["sex", "scanner", "age", "smokes"]
    for _ in range(2):  # the second from the cache
        pool = load(f"parquet:{file}", attributes=wanted, cache=tmp_path)
        assert list(pool.attributes) == wanted
        found = {name: column.at(torch.arange(3)) for name, column in pool.attributes.items()}
        assert found == {
            "sex": ("f", "", "m"),
            "scanner": ("A", "B", "B"),
            "age": ("61", "", "42.5"),
            "smokes": ("true", "false", ""),
        }
    assert load(f"parquet:{file}", cache=tmp_path).attributes == {}
    text = sentence(lambda: load(f"parquet:{file}", attributes=["race"]))
    assert (
        text == '"a.parquet" has no column "race" (attributes); its columns are image, label, sex, scanner, age, smokes'
    )
    assert 'has no column "sex" (attributes): it has none' in sentence(
        lambda: load("embedded:digits", attributes=["sex"])
    )


def test_attributes_follow_their_images() -> None:
    pool = from_arrays(np.zeros((4, 8, 8)), ["a", "b", "a", "b"], attributes={"sex": ["f", None, "m", "f"]})
    assert pool.take(torch.tensor([3, 1])).attributes["sex"].at(torch.arange(2)) == ("f", "")
    assert pool.only(classes=["a"]).attributes["sex"].at(torch.arange(2)) == ("f", "m")
    assert pool.attributes["sex"].at(torch.tensor([2, -1])) == ("m", "")
    assert (
        sentence(lambda: pool.carrying(["age"])) == 'the data have no column "age" (attributes); the pool carries: sex'
    )
    with pytest.raises(UserError, match="4 images need as many sex entries, not 2"):
        from_arrays(np.zeros((4, 8, 8)), [0, 1, 0, 1], attributes={"sex": ["f", "m"]})


def test_arrays_may_lack_a_group() -> None:
    pool = from_arrays(np.zeros((4, 8, 8)), [0, 1, 0, 1], groups=["p", None, "", "p"])
    assert pool.groups is not None
    assert pool.groups.tolist() == [0, -1, -1, 0]


def test_names_of_images(tmp_path: Path) -> None:
    assert load(f"parquet:{table(tmp_path, {})}").names[:2] == ("0.png", "1.png")
    twice = parquet(tmp_path / "b.parquet", {"label": [0, 1]}, paths=["x.png", "x.png"])
    assert load(f"parquet:{twice}").names == ("b.parquet row 0", "b.parquet row 1")
    bare = parquet(tmp_path / "c.parquet", {"label": pa.array([0, 1])}, struct=False)
    assert load(f"parquet:{bare}").names == ("c.parquet row 0", "c.parquet row 1")
    assert load(f"folder:{folder(tmp_path / 'f', ['cat/1.png', 'dog/2.png'])}").names == ("cat/1.png", "dog/2.png")
