"""Damaged files of a run: named in a sentence, made again where that can be, and never silently replaced."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedshift
from fedshift import Experiment, Result, UserError
from fedshift.cli import main
from fedshift.inspect.overhead import overhead
from fedshift.results.collect import collect
from fedshift.runs.open import choose_run
from fedshift.runs.session import Session
from fedshift.store.features import Features
from fedshift.store.files import Damaged
from fedshift.store.folder import RunFolder
from fedshift.store.found import find_runs
from fedshift.store.lines import RoundLine
from fedshift.store.plans import in_order, planned
from fedshift.store.seal import line_text, table_text
from fedshift.store.trees import load, save
from tests.runs.test_run import go
from tests.test_resume import check_identical, contents

CPU = torch.device("cpu")
LOST = (
    "metrics.jsonl",
    "best.safetensors",
    "best/bn.safetensors",
    "ckpt-000003.safetensors",
)  # until it is trained again
AGAIN = (
    "config.toml", "costs.json", "notes.txt", "features.safetensors", "snapshot.safetensors", "snapshots/bn.safetensors",
    "adapters/none.jsonl", "adapters/bn.jsonl", "twins/none.jsonl", "predictions/bn.parquet",
    "artefacts/east/config.toml", "artefacts/west/model.safetensors",
)  # fmt: skip


def small(**changes: object) -> Experiment:
    settings: dict[str, object] = {
        "rounds": 3, "baselines": False, "name": "small", "notes": ["a note"],
        "model": {"name": "mlp", "hidden": [4], "norm": True}, "checkpoint-every": 1,
        "evaluate": {"every": 1, "adapted": True, "features": 5, "predictions": True},
        "method": [{"name": "fedbn", "adapters": ["none", "bn"]}, {"name": "fedavg"}],
    }  # fmt: skip
    return Experiment.parse({**settings, **changes})


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("pristine")
    go(small(), place)
    return place


@pytest.fixture
def runs(pristine: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(pristine, tmp_path / "runs"))


def folder_of(runs: Path, method: str = "fedbn") -> Path:
    (found,) = (runs / "small" / method).iterdir()
    return found


def again(runs: Path, **options: bool) -> tuple[Result, str]:
    """The same experiment, and what was noted."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = go(small(), runs, **options)
    return result, "\n".join(str(one.message) for one in said)


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(bytes(content))


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_link(target: str) -> Callable[[Path], object]:
    def link(path: Path) -> None:
        path.unlink()
        path.symlink_to(target)

    return link


WAYS: dict[str, Callable[[Path], object]] = {
    "emptied": lambda path: path.write_bytes(b""),
    "halved": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "flipped": flipped,
    "a table": lambda path: path.write_text('{"a": {"b": [1, null]}}\n'),
}
NO_FILES: dict[str, Callable[[Path], object]] = {
    "a folder": as_folder,
    "a pipe": as_pipe,
    "a device": as_link("/dev/zero"),
    "a link to itself": lambda path: as_link(path.name)(path),
}  # of a pipe and of a device nobody ever reaches the end


# ---- what can be made again ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("way", WAYS)
def test_what_follows_from_other_files_is_made_again_and_said(way: str, runs: Path, pristine: Path) -> None:
    folder = folder_of(runs)
    for name in AGAIN:
        WAYS[way](folder / name)
    result, said = again(runs)
    check_identical(contents(folder), contents(folder_of(pristine)))
    for name in (name for name in AGAIN if name != "notes.txt"):  # which have no seal
        assert str(folder / name) in said, name
    assert len(result.rows) == 3
    assert not again(runs)[1]


@pytest.mark.parametrize("name", ["artefacts/east", "artefacts (bn)", "artefacts/complete", "adapters", "predictions"])
def test_what_is_gone_is_made_again(name: str, runs: Path, pristine: Path) -> None:
    path = folder_of(runs) / name
    shutil.rmtree(path) if path.is_dir() else path.write_bytes(b"")
    again(runs)
    check_identical(contents(folder_of(runs)), contents(folder_of(pristine)))


# ---- what cannot ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "way"), list(zip(LOST, WAYS, strict=True)))
def test_what_cannot_be_made_again_is_never_replaced(name: str, way: str, runs: Path, pristine: Path) -> None:
    folder = folder_of(runs)
    WAYS[way](folder / name)
    damaged = (folder / name).read_bytes()
    shutil.rmtree(folder / "adapters")  # now the states are needed
    with pytest.raises(UserError, match=r" is damaged \(.*--restart"):
        again(runs)
    assert (folder / name).read_bytes() == damaged
    again(runs, restart=True)
    check_identical(contents(folder), contents(folder_of(pristine)))


def test_a_deleted_state_does_not_become_another_one(runs: Path) -> None:
    folder = RunFolder(folder_of(runs))
    best, last = folder.best(CPU).round, folder.last(CPU).round
    (folder.path / "best.safetensors").unlink()
    with pytest.raises(Damaged, match=r"best\.safetensors is missing; put it back from a copy"):
        folder.best(CPU)
    trees, facts = load(folder.path / "ckpt-000003.safetensors")
    save(folder.path / "best.safetensors", trees, {**facts, "round": best + last + 1})  # sound, and of another round
    with pytest.raises(Damaged, match=rf"it is of round {best + last + 1}, not of round {best}"):
        folder.best(CPU)


def stopping_at(round_: int, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Session.step

    def stops(self: Session, state):  # type: ignore[no-untyped-def]
        if state.round == round_:
            raise KeyboardInterrupt
        return step(self, state)

    monkeypatch.setattr(Session, "step", stops)


@pytest.fixture
def interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """After two rounds of three."""
    with monkeypatch.context() as patch:
        stopping_at(2, patch)
        with pytest.raises(KeyboardInterrupt):
            go(small(), tmp_path / "cut")
    return tmp_path / "cut"


def cut_lines(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-2]))


@pytest.mark.parametrize(
    ("name", "way", "sentence"),
    [
        ("metrics.jsonl", WAYS["emptied"], r"metrics.jsonl is damaged \(it has 0 lines, and 6 were written"),
        ("metrics.jsonl", cut_lines, r"metrics.jsonl is damaged \(it has 4 lines, and 6 were written"),
        ("metrics.jsonl", flipped, r"metrics.jsonl is damaged \(line \d"),
        ("metrics.jsonl", Path.unlink, r"metrics.jsonl is missing"),
        ("best.safetensors", Path.unlink, r"best.safetensors is missing"),
        ("best/bn.safetensors", flipped, r"best/bn.safetensors is damaged"),
        ("ckpt-000002.safetensors", flipped, r"ckpt-000002.safetensors is damaged"),
        ("ckpt-000002.safetensors", Path.unlink, r"ckpt-000000.safetensors is missing"),
    ],
)
def test_resuming_loses_nothing_silently(
    name: str, way: Callable[[Path], object], sentence: str, interrupted: Path, pristine: Path
) -> None:
    folder = folder_of(interrupted)
    way(folder / name)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=sentence):
        again(interrupted, resume=True)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_an_older_checkpoint_will_do(interrupted: Path, pristine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between two checkpoints there are both; whichever is sound, nothing of them is left at the end."""
    folder = folder_of(interrupted)
    older = (folder / "ckpt-000002.safetensors").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "end", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            again(interrupted, resume=True)
    (folder / "ckpt-000002.safetensors").write_bytes(older)
    flipped(folder / "ckpt-000003.safetensors")
    (folder / ".best.safetensors.123").write_bytes(b"half a file")
    (folder / "artefacts").mkdir(exist_ok=True)
    (folder / "artefacts" / ".east.123").mkdir()
    _, said = again(interrupted, resume=True)
    assert "ckpt-000003.safetensors is damaged (" in said
    assert ": going on from ckpt-000002" in said
    check_identical(contents(folder), contents(folder_of(pristine)))
    assert sorted(path.name for path in folder.glob("ckpt-*")) == ["ckpt-000003.safetensors"]
    assert not list(folder.rglob(".*"))


def test_a_damaged_ending_is_written_again(runs: Path, pristine: Path) -> None:
    WAYS["halved"](folder_of(runs) / "done")
    with pytest.raises(UserError, match=r"done is damaged \(it is no JSON\); go on with fedshift run \.\.\. --resume"):
        again(runs)
    again(runs, resume=True)
    check_identical(contents(folder_of(runs)), contents(folder_of(pristine)))
    assert json.loads((folder_of(runs) / "done").read_text())["engine"] == "sequential"


def test_a_folder_in_the_place_of_a_file_is_not_removed(runs: Path) -> None:
    folder = folder_of(runs)
    as_folder(folder / "costs.json")
    with pytest.raises(UserError, match=r"costs\.json is damaged \(it is a folder\); remove that folder"):
        again(runs)
    assert (folder / "costs.json").is_dir()


# ---- reading -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "done", "adapters/none.jsonl", "costs.json"])
@pytest.mark.parametrize("way", [*WAYS, *NO_FILES])
def test_one_damaged_file_does_not_hide_other_runs(
    name: str, way: str, runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    {**WAYS, **NO_FILES}[way](folder_of(runs) / name)
    result = collect(find_runs(runs))
    assert "fedavg" in [row.method for row in result.rows]
    there = os.path.exists(folder_of(runs) / name)  # a link to itself is not
    named = any(note.startswith("left out: ") and str(folder_of(runs) / name) in note for note in result.notes)
    assert named or (
        not there and name in ("done", "costs.json")
    )  # a run without them is not finished, or has no ledger
    assert "fedavg" in [one for one, _, _ in overhead(runs, 5.0).runs]
    monkeypatch.setattr("sys.argv", ["fedshift", "show", str(folder_of(runs) / name / "..")])
    with pytest.raises(SystemExit):
        main()
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("way", NO_FILES)
@pytest.mark.parametrize("name", ["best.safetensors", "features.safetensors", "artefacts/east/model.safetensors"])
def test_a_state_that_is_no_file_is_damaged(name: str, way: str, runs: Path) -> None:
    path = folder_of(runs) / name
    NO_FILES[way](path)
    reads = {
        "best.safetensors": lambda: RunFolder(folder_of(runs)).best(CPU),
        "features.safetensors": lambda: Features.load(path),
        "artefacts/east/model.safetensors": lambda: fedshift.load(path.parent),
    }
    with pytest.raises(Damaged, match=rf"{name} is damaged \(it is (a folder|no file|a link to itself)\)"):
        reads[name]()


VALUES: dict[str, Callable[[Any], None]] = {  # whoever seals them anew may have made a mistake, or mean ill
    "metrics.jsonl round": lambda lines: lines[0].update({"round": "x"}),
    "metrics.jsonl loss": lambda lines: lines[0].update({"train/loss": []}),
    "metrics.jsonl seconds": lambda lines: lines[0].update({"seconds": True}),
    "metrics.jsonl score": lambda lines: lines[1].update({"global/val/clients": {"client-mean": "x"}}),
    "adapters/none.jsonl metric": lambda lines: lines[0].update({"metric": 3}),
    "adapters/none.jsonl client": lambda lines: lines[0]["by-client"].update({"east": [1, [], 0.0]}),
    "adapters/none.jsonl more than all": lambda lines: lines[0]["by-client"].update({"east": [1, 2, 0.0]}),
    "adapters/none.jsonl counts": lambda lines: lines[0]["whole"]["confusion"].__setitem__(0, 10**30),
    "adapters/none.jsonl number": lambda lines: lines[0]["whole"].update({"loss": "x"}),
    "costs.json bytes": lambda table: table.update({"bytes-up": "x"}),
    "costs.json steps": lambda table: table.update({"steps": 3}),
    "done seed": lambda table: table.update({"seed": "x"}),
}


@pytest.mark.parametrize("value", VALUES)
def test_values_of_another_kind_are_damage_too(value: str, runs: Path) -> None:
    path = folder_of(runs) / value.partition(" ")[0]
    if path.suffix == ".jsonl":
        read = [json.loads(line) for line in path.read_text().splitlines()]
        places = [line.pop("seal").split()[0] for line in read]
        VALUES[value](read)
        path.write_text("".join(line_text(line, place) + "\n" for line, place in zip(read, places, strict=True)))
    else:
        read = json.loads(path.read_text())
        del read["seal"]
        VALUES[value](read)
        path.write_text(table_text(read))
    result = collect(find_runs(runs))
    assert "fedavg" in [row.method for row in result.rows]
    assert any(note.startswith("left out: ") and str(path) in note for note in result.notes)


def test_what_is_written_follows_no_link(runs: Path, tmp_path: Path) -> None:
    """A run folder of somebody else's may hold links to what is ours."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "none.jsonl").write_text("mine")
    (tmp_path / "mine.txt").write_text("mine")
    folder = folder_of(runs)
    shutil.rmtree(folder / "adapters")
    (folder / "adapters").symlink_to(tmp_path / "mine", target_is_directory=True)
    for options in ({}, {"restart": True}):
        with pytest.raises(Damaged, match=r"adapters is damaged \(it is a link, which may lead anywhere\); remove it"):
            again(runs, **options)
    as_link(str(tmp_path / "mine.txt"))(folder / "metrics.jsonl")
    with pytest.raises(UserError, match=r"metrics\.jsonl cannot be written"):
        RunFolder(folder).log(RoundLine(9), 9)
    assert (tmp_path / "mine" / "none.jsonl").read_text() == "mine"
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_what_killed_processes_left_beside_the_plan_is_swept(runs: Path) -> None:
    (runs / "small" / ".plan.json.123").write_text("half")
    again(runs)
    assert not list((runs / "small").glob(".*"))


def test_a_damaged_run_is_not_passed_over_where_one_is_wanted(runs: Path) -> None:
    WAYS["halved"](folder_of(runs) / "config.toml")
    for method in ("fedbn", None):
        with pytest.raises(Damaged, match=r"fedbn/.*config\.toml is damaged"):
            choose_run(runs, method)
    assert choose_run(runs, "fedavg") == folder_of(runs, "fedavg")


def test_a_settings_file_may_be_edited_by_who_says_so(runs: Path) -> None:
    path = folder_of(runs) / "config.toml"
    text, mark, _ = path.read_text().partition("# seal: ")
    path.write_text(text.replace("checkpoint-every = 1", "checkpoint-every = 2") + mark + "edited\n")
    assert len(collect(find_runs(runs)).folders) == 2


@pytest.mark.parametrize("kind", ["a pipe", "a device", "a folder", "other JSON", "no JSON"])
def test_a_plan_that_is_none_is_no_plan(tmp_path: Path, kind: str) -> None:
    """It is about an order alone; nobody waits for the end of a pipe."""
    plan, run = tmp_path / "plan.json", tmp_path / "fedavg" / "0-abc"
    run.mkdir(parents=True)
    made = {
        "a pipe": lambda: os.mkfifo(plan),
        "a device": lambda: plan.symlink_to("/dev/zero"),
        "a folder": plan.mkdir,
        "other JSON": lambda: plan.write_text('["runs"]'),
        "no JSON": lambda: plan.write_text("{"),
    }
    made[kind]()
    assert planned(run) == {}
    assert in_order([run]) == [run]
