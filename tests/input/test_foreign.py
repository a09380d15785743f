"""A run folder of somebody else's: pickles, modules, links, pages and terminal escapes lie in wait, and nothing happens."""

from __future__ import annotations

import base64
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import fedshift as package
from tests.input.program import Said, fedshift, png, run, table
from tests.results.test_watch import ask, serving

SCRIPT = "<script>alert(1)</script>"
OWNED = "\x1b]0;owned\x07"
MODULES = ("cloudpickle", "random", "numpy", "torch", "json", "sitecustomize", "conftest", "fedshift", "rich")
COMMANDS = (
    ["show", "."],
    ["show", ".", "--classes"],
    ["show", ".", "--by", "client"],
    ["show", ".", "--format", "json"],
    ["show", ".", "--picture", "results", "--picture", "radar"],
    ["advise", "."],
    ["report", "."],
    ["inspect", ".", "--samples", "4"],
    ["inspect", ".", "--samples", "4", "--out", "{out}/inspect"],
    ["cost-to-target", ".", "--target", "5"],
    ["join", ".", "--data", "{data}"],
    ["join", ".", "--data", "{data}", "--out", "{out}/joined"],
    ["export", ".", "--client", OWNED],
    ["export", ".", "--client", OWNED, "--out", "{out}/exported"],
    ["compare", ".", "."],
    ["serve", "{artefacts}", "--adapter", "t3a", "--docker", "--out", "{out}/image"],
    ["data", "."],
    ["run", "."],
    ["tune", "."],
    ["cache"],
    ["deploy", "check", ".", "--data", "{data}"],
    ["deploy", "status", "."],
    ["deploy", "run", "."],
    ["deploy", "join", ".", "--data", "{data}"],
    ["deploy", "join", ".", "--data", "{data}", "--out", "{out}/party"],
    ["list", "methods"],
    ["doctor"],
)


class Trap:
    """Whoever unpickles this leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.mark,)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with traps in it; ``sprung`` beside it says whether one was."""
    home = tmp_path_factory.mktemp("home")
    rows = [(label, client) for client in (OWNED, SCRIPT) for label in (SCRIPT, "b") for _ in range(6)]
    data = table(home / "data.parquet", [label for label, _ in rows], [client for _, client in rows])
    said = run(
        home / "runs",
        f"data.source=parquet:{data}",
        "split={train=0.5, val=0.25, test=0.25}",
        "stream=[{name='original', kind='original'}]",
        f"title='{SCRIPT}'",
        "name=x",
        'method=[{name="fedavg", adapters=["none", "t3a"]}]',
    )
    assert said.code == 0, said.err
    folder = home / "runs" / "x"
    (one,) = (done.parent for done in folder.rglob("done"))
    for place in (folder, one):
        for name in ("state.pkl", "model.pt", "order", "cache.joblib", "ckpt-9999.pt"):
            (place / name).write_bytes(pickle.dumps(Trap(home / "sprung")))
        for name in MODULES:
            (place / f"{name}.py").write_text(f"open({str(home / 'sprung')!r}, 'w')\n")
    (home / "mine").mkdir()
    (home / "mine.txt").write_text("mine")
    for name in ("results.png", "radar.png", "radar.json", "report.html", "task.png", "task.html", "split.csv"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(home / "mine.txt")
    for place in (folder, one):
        for name in ("inspect", "joined", "exported"):
            (place / name).symlink_to(home / "mine", target_is_directory=True)
    (home / "new").mkdir()
    (home / "new" / "1.png").write_bytes(png(1))
    return folder


def untouched(folder: Path) -> None:
    """No trap was sprung, and no link was followed."""
    home = folder.parents[1]
    assert not (home / "sprung").exists()
    assert (home / "mine.txt").read_text() == "mine"
    assert not list((home / "mine").iterdir())


def filled(command: Sequence[str], folder: Path, out: Path) -> list[str]:
    artefacts = next(folder.rglob("artefacts"))
    return [part.format(out=out, data=folder.parents[1] / "new", artefacts=artefacts) for part in command]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command).replace(OWNED, "x"))
def test_every_command_opens_it_unharmed(
    command: list[str], foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(foreign)
    said: Said = fedshift(*filled(command, foreign, tmp_path))
    assert said.code == 0 or said.refused, said.err
    assert "\x1b" not in said.out + said.err
    assert "\x07" not in said.out + said.err
    untouched(foreign)
    pages = [*tmp_path.rglob("*.html"), *(page for page in foreign.glob("*.html") if not page.is_symlink())]
    for page in pages:
        assert SCRIPT not in page.read_text(encoding="utf-8")


def test_a_page_shows_no_file_that_a_link_leads_to(
    foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages are sent around: what is not a picture of the run has no place there."""
    monkeypatch.chdir(foreign)
    said = fedshift("report", ".", "--out", str(tmp_path / "page.html"))
    assert said.code == 0, said.err
    assert base64.b64encode(b"mine").decode() not in (tmp_path / "page.html").read_text()


def test_links_are_named_where_they_are_refused(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(foreign)
    said = fedshift("inspect", ".", "--samples", "4")
    assert said.refused
    assert "is a link" in said.err
    assert "--out" in said.err


def test_an_artefact_of_pickles_is_refused(foreign: Path, tmp_path: Path) -> None:
    """``fedshift.load`` reads safetensors and TOML, whatever a file is called."""
    (whole,) = (place.parent for place in foreign.rglob("artefacts/*/config.toml") if "script" in place.parent.name)
    for file in whole.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises(package.UserError):
        package.load(tmp_path)
    assert not (tmp_path / "sprung").exists()


def test_the_live_page_holds_no_name_and_serves_no_file(foreign: Path) -> None:
    """Names come as JSON, beside the page, and its script writes them as text."""
    with serving(foreign) as server:
        paths = ("/", "/state", "/report.html", "/radar.png", "/../../mine.txt")
        (page, state, *others) = (ask(server, "GET", path) for path in paths)
    assert [status for status, _ in (page, state, *others)] == [200, 200, 404, 404, 404]
    assert SCRIPT not in page[1]
    assert "\x1b" not in page[1] + state[1]
    (run,) = json.loads(state[1])["runs"]
    assert {name for name, _ in run["losses"]} == {OWNED, SCRIPT}
    assert run["state"] == "finished"
    untouched(foreign)


@pytest.mark.system
@pytest.mark.parametrize(
    "command", [["show", "."], ["inspect", ".", "--samples", "4", "--out", "{out}/x"]], ids=" ".join
)
def test_modules_that_lie_there_are_not_imported(command: list[str], foreign: Path, tmp_path: Path) -> None:
    """As it is installed: the folder one stands in is no place for code."""
    source = str(Path(package.__file__).parents[1])
    script = "import sys; from fedshift.cli import main; sys.argv[0] = 'fedshift'; main()"
    environment = {**os.environ, "PYTHONPATH": source}
    asked = [sys.executable, "-P", "-c", script, *filled(command, foreign, tmp_path)]
    done = subprocess.run(asked, cwd=foreign, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    untouched(foreign)
