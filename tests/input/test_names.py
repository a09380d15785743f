"""Names of clients, classes, streams and labels are only text: on the screen, in pictures, in pages, on the disk."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from fedshift.results.plain import Screen, Sheet, plain
from fedshift.results.plots.style import save
from tests.input.program import Said, fedshift, run, table

NASTY = ["[/]", "[bold]x", "$^$", r"$\x$", "\x1b[31mred", "a\u202eb", "<b>&", ":smile:", "_x"]


@pytest.mark.parametrize("name", NASTY)
def test_the_screen_shows_what_is_there(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    sheet = Sheet(name, title=name, caption=name)
    sheet.add_row(name)
    screen = Screen(width=60)
    screen.print(name)
    screen.print(sheet, name)
    with screen.status(name) as doing:
        doing.update(name)
    Console(width=60).print(sheet)  # a table that Python code prints on a console of its own
    said = capsys.readouterr().out
    assert said.count(plain(name)) == 10
    assert "\x1b" not in said


def test_visible_characters_stay_what_they_are() -> None:
    for text in ("Zürich", "北京", "👩‍⚕️", "a b", "naïve\u00a0x", "[x] $y$"):
        assert plain(text) == text
    assert plain("\udcff\x00\r\u2028") == "\\udcff\\x00\\r\\u2028"
    assert plain("a\nb") == "a\nb"


@pytest.mark.parametrize("name", NASTY)
def test_a_picture_takes_any_name(name: str, tmp_path: Path) -> None:
    figure = Figure(figsize=(2, 2), layout="constrained")
    axes = figure.subplots()
    axes.plot([1, 2], [1, 2], label=name)
    axes.set_title(name)
    axes.set_xticks([1, 2], [name, name])
    axes.text(1, 1, name)
    axes.legend(title=name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(figure, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 0


@pytest.fixture(scope="module")
def nasty(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Said]:
    """A finished run whose every name is nasty."""
    folder = tmp_path_factory.mktemp("nasty")
    clients, classes = NASTY[:6], NASTY[:4]
    rows = [(label, client) for client in clients for label in classes for _ in range(4)]
    data = table(folder / "data.parquet", [label for label, _ in rows], [client for _, client in rows])
    method = r"""method=[{name="fedavg", label="[bold]x", adapters=["none", {name="t3a", label="$^$", family="[/]"},
        {name="t3a", label="[x]", family="[/]"}]}]"""
    said = run(
        folder / "runs",
        f"data.source=parquet:{data}",
        "split={train=0.5, val=0.25, test=0.25}",
        "stream=[{name='$^$', kind='original'}, {name='[red]', kind='original'}]",
        "title='[/] $^$'",
        "name='[bold]'",
        method,
    )
    return folder, said


def test_a_run_with_such_names_ends_well(nasty: tuple[Path, Said]) -> None:
    _, said = nasty
    assert said.code == 0, said.err
    assert "[bold]x" in said.out
    assert "[/] $^$" in said.out
    assert "\x1b" not in said.out + said.err


@pytest.mark.parametrize(
    "command",
    [
        ["show", "{run}"],
        ["show", "{run}", "--classes"],
        ["show", "{run}", "--by", "client"],
        ["show", "{run}", "--picture", "results", "--picture", "radar"],
        ["show", "{run}", "--format", "json"],
        ["advise", "{run}"],
        ["inspect", "{run}", "--samples", "4"],
        ["cost-to-target", "{run}", "--target", "1"],
        ["join", "{run}", "--data", "{data}", "--adapter", "$^$"],
        ["export", "{run}", "--client", "\x1b[31mred"],
        ["export", "{run}", "--client", "nobody"],
        ["data", "{data}"],
    ],
    ids=lambda command: " ".join(command).replace("{run}", "").replace("\x1b", ""),
)
def test_every_command_prints_such_names(
    command: list[str], nasty: tuple[Path, Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, _ = nasty
    filled = [part.format(run=folder / "runs" / "[bold]", data=folder / "data.parquet") for part in command]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        said = fedshift(*filled)
    assert said.code == (2 if "nobody" in command else 0), said.err
    assert "\x1b" not in said.out + said.err


RESERVED = [
    "done",
    "results.png",
    "task.png",
    "inspect",
    "joined",
    "exported",
    "Results.PNG",
    "../x",
    "x" * 200,
    "\x07",
]


@pytest.mark.parametrize("label", RESERVED)
def test_a_label_that_would_meet_other_files_is_refused(label: str, tmp_path: Path) -> None:
    for change in (f'method=[{{name="fedavg", label={label!r}}}]', f"name={label!r}"):
        said = run(tmp_path / "runs", change)
        assert said.refused, said.err
        assert "cannot name a folder" in said.err
    assert not (tmp_path / "runs").exists()


def test_a_folder_name_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    for client in (b"a", b"b\xff"):
        place = os.fsencode(tmp_path / "data") + b"/" + client + b"/cat"
        os.makedirs(place)
        with open(place + b"/1.png", "wb") as file:
            file.write(b"")
    said = run(tmp_path / "runs", f"data.source=folder:{tmp_path / 'data'}")
    assert said.refused
    assert r"b\udcff" in said.err
    assert "UTF-8" in said.err


def test_a_name_that_is_no_utf8_on_the_command_line_is_refused(tmp_path: Path) -> None:
    for command in (["show", "\udcff"], ["data", "\udcff"], ["run", "\udcff"], ["run", "-c", "name=\udcff"]):
        said = fedshift(*command)
        assert said.refused, said.err
