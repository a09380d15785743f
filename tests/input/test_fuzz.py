"""Input nobody checked, by the hundred: ``fuzzing.py`` has the rule."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fedshift.data._pixels import FORMATS
from fedshift.errors import UserError
from tests.input.fuzzing import CORPUS, budget, changes, damaged, tables, texts, toml, violations
from tests.input.program import SMALL, Said, png, run
from tests.input.test_pictures import EPS, claimed

long = pytest.mark.long


@pytest.fixture
def planning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything up to the first round: what would train says so instead."""

    def stop(*_: Any, **__: Any) -> Any:
        raise UserError("planned")

    monkeypatch.setattr("fedshift.runs.run.carry_out", stop)


def planned(text: str, folder: Path) -> list[str]:
    """Plan an experiment whose file says this, and look at its data: what of the rule did not hold."""
    file = folder / "fuzzed.toml"
    file.write_text(text, encoding="utf-8")
    commands = (["run", file, "--out", folder / "runs"], ["data", file, "--out", folder / "looked"])
    return [broken for command in commands for broken in violations(*command, inputs=[file])]


@pytest.mark.parametrize("file", sorted(CORPUS.glob("*.toml")), ids=lambda file: file.stem)
def test_files_that_were_found_once(file: Path, planning: None, tmp_path: Path) -> None:
    assert planned(file.read_text(encoding="utf-8"), tmp_path) == []


@long
@pytest.mark.usefixtures("planning")
@budget(80)
@given(table=tables)
def test_any_table(tmp_path_factory: pytest.TempPathFactory, table: dict[str, Any]) -> None:
    whole: dict[str, Any] = {"extends": "default"}
    lines = [f"{key} = {toml(value)}" for key, value in {**whole, **table}.items()]
    written = set(table)
    for setting in SMALL:
        key, _, value = setting.partition("=")
        if key not in written and key.split(".")[0] not in written:
            lines.append(f"{key} = {value if key != 'model.name' else toml(value)}")
    assert planned("\n".join(lines) + "\n", tmp_path_factory.mktemp("table")) == []


@long
@pytest.mark.usefixtures("planning")
@budget(40)
@given(changed=changes)
def test_any_text(tmp_path_factory: pytest.TempPathFactory, changed: list[tuple[str, float, bytes]]) -> None:
    folder = tmp_path_factory.mktemp("text")
    content = b'rounds = 1\nname = "x"\n[data]\nsize = 8\n[model]\nname = "mlp"\n[[method]]\nname = "fedavg"\n'
    file = folder / "fuzzed.toml"
    file.write_bytes(damaged(content, changed))
    assert violations("run", file, "--out", folder / "runs", inputs=[file]) == []


# ---- pictures and tables -------------------------------------------------------------------------------------------------
def encoded(kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (9, 8), (200, 10, 10)).save(buffer, kind)
    return buffer.getvalue()


WHOLE = [*map(encoded, FORMATS), EPS, claimed(8, 8), claimed(50_000, 50_000), b""]
pictures = st.builds(damaged, st.sampled_from(WHOLE), changes) | st.sampled_from(WHOLE) | st.binary(max_size=64)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small experiment that was run."""
    folder = tmp_path_factory.mktemp("trained") / "runs"
    methods = 'method=[{name="fedavg", adapters=["none", "t3a"]}, {name="fedbn", model={norm=true}}]'
    said = run(folder, methods, "evaluate.features=4", "evaluate.artefacts=true", "name=x")
    assert said.code == 0, said.err
    return folder / "x"


@long
@budget(50)
@given(pictures=st.lists(pictures, min_size=1, max_size=4), strict=st.booleans())
def test_any_picture(
    tmp_path_factory: pytest.TempPathFactory, trained: Path, pictures: list[bytes], strict: bool
) -> None:
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "new").mkdir()
    for i, content in enumerate(pictures):
        (folder / "new" / f"{i}.png").write_bytes(content)
    how = ["--method", "fedavg", "--data", folder / "new", "--out", folder / "joined"]
    assert violations("join", trained, *how, *(["--strict"] if strict else []), inputs=[folder / "new"]) == []


cells = st.one_of(st.none(), st.integers(-2, 3), st.floats(), texts, st.booleans(), st.binary(max_size=3))
columns = st.one_of(
    st.lists(st.integers(-1, 3), min_size=8, max_size=8),
    st.lists(st.sampled_from(["a", "b", "[/]", "\x1b[1m", "", "a/b", ".."]), min_size=8, max_size=8),
    st.lists(st.none() | st.sampled_from(["a", "b"]), min_size=8, max_size=8),
    st.lists(st.floats(), min_size=8, max_size=8),
    st.lists(st.lists(st.integers(0, 9), max_size=2), min_size=8, max_size=8),
    st.lists(st.binary(max_size=4), min_size=8, max_size=8),
    st.lists(st.booleans(), min_size=8, max_size=8),
)


@long
@budget(40)
@given(
    named=st.dictionaries(
        st.sampled_from(["label", "domain", "client", "split", "user", "group", "patient_id", "image", "[/]", ""]),
        columns,
        max_size=4,
    ),
    content=st.lists(pictures, min_size=8, max_size=8) | st.none(),
    changed=st.none() | changes,
)
def test_any_parquet(
    tmp_path_factory: pytest.TempPathFactory,
    named: dict[str, list[Any]],
    content: list[bytes] | None,
    changed: list[tuple[str, float, bytes]] | None,
) -> None:
    folder = tmp_path_factory.mktemp("parquet")
    images = [{"bytes": item, "path": f"{i}.png"} for i, item in enumerate(content or [png(i) for i in range(8)])]
    table = {"image": images, "label": ["a", "b"] * 4, "domain": ["c"] * 4 + ["d"] * 4, **named}
    file = folder / "fuzzed.parquet"
    pq.write_table(pa.table(table), file)
    if changed is not None:
        file.write_bytes(damaged(file.read_bytes(), changed))
    assert violations("data", file, "--out", folder / "looked", "-c", "data.size=8", inputs=[file]) == []


# ---- files of a run ------------------------------------------------------------------------------------------------------
COMMANDS = (
    ["show", "{run}"],
    ["show", "{run}", "--by", "client"],
    ["advise", "{run}"],
    ["cost-to-target", "{run}", "--target", "5"],
    ["report", "{run}", "--out", "{out}/report.html"],
    ["compare", "{run}", "{run}"],
    ["inspect", "{run}", "--samples", "4", "--out", "{out}"],
    ["join", "{run}", "--method", "fedavg", "--data", "{data}", "--out", "{out}"],
    ["export", "{run}", "--method", "fedavg", "--client", "pen", "--out", "{out}"],
    ["serve", "{artefacts}", "--adapter", "none", "--docker", "--out", "{out}"],
)
CONTENTS = (b"", b"{}", b"[]", b"null", b'"x"', b"[[1]]", b"a = 1\n", b"\xff\xfe", b"NaN\n", b"{" * 3000)


@pytest.fixture(scope="module")
def one_picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("new")
    (folder / "1.png").write_bytes(png(1))
    return folder


def copies(trained: Path, folder: Path) -> Iterator[Path]:
    """The files of a copy of a run."""
    shutil.copytree(trained, folder / "x")
    yield from sorted(file for file in (folder / "x").rglob("*") if file.is_file())


@long
@budget(40)
@given(
    number=st.integers(0, 10**6),
    command=st.sampled_from(COMMANDS),
    change=changes | st.sampled_from(CONTENTS) | st.sampled_from(["gone", "folder"]),
)
def test_any_file_of_a_run(
    tmp_path_factory: pytest.TempPathFactory,
    trained: Path,
    one_picture: Path,
    number: int,
    command: list[str],
    change: Any,
) -> None:
    folder = tmp_path_factory.mktemp("run")
    files = list(copies(trained, folder))
    artefacts = next((folder / "x" / "fedavg").rglob("artefacts"))
    if command[0] == "serve":
        files = [file for file in files if file.is_relative_to(artefacts)]  # it reads no other
    file = files[number % len(files)]
    content = file.read_bytes()
    file.unlink()
    if change == "folder":
        file.mkdir()
    elif change != "gone":
        file.write_bytes(change if isinstance(change, bytes) else damaged(content, change))
    places = {"run": folder / "x", "out": folder / "out", "data": one_picture, "artefacts": artefacts}
    filled = [part.format(**places) for part in command]
    assert violations(*filled, inputs=[one_picture]) == []


def test_a_command_that_fails_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule itself."""
    assert violations("list", "methods") == []
    assert violations("show", "x" * 5000) == []
    monkeypatch.setattr("fedshift.catalogue.rows_of", lambda _: 1 / 0)
    broken = violations("list", "methods")
    assert [one.partition(" of fedshift")[0] for one in broken] == ["exit code 70", "a traceback"]


def test_every_part_of_the_rule_is_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")

    def misbehaves(*_: str) -> Said:
        (tmp_path / "mine").write_text("theirs")
        return Said(2, "\x1b[1m", "error: one\nerror: two\n")

    monkeypatch.setattr("tests.input.fuzzing.fedshift", misbehaves)
    monkeypatch.setattr("tests.input.fuzzing.LONGEST", 0.0)
    broken = " ".join(violations("show", inputs=[tmp_path / "mine"]))
    for what in ("not one sentence", "a terminal escape", "s of work", "s without an answer", "a changed input"):
        assert what in broken
