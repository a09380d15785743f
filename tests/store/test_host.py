"""The operating system says no: one sentence, exit code 1, and what was written stays usable."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedshift import cli
from fedshift.errors import HostError, UserError
from fedshift.runs import space
from fedshift.runs.session import Session
from fedshift.store import files
from fedshift.store.folder import RunFolder
from tests.runs.test_run import POOL, go, tiny
from tests.test_resume import check_identical, contents

SMALL = [
    "run", *(part for change in (
        "rounds=3", "baselines=false", "data.size=8", "data.limit=200", "model.name=mlp", "model.hidden=[4]",
        "checkpoint-every=1", "name=small",
    ) for part in ("-c", change)), "--engine", "sequential", "--out",
]  # fmt: skip


# ---- in this process -----------------------------------------------------------------------------------------------------
def guarded(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    monkeypatch.setattr("sys.argv", ["fedshift", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0), capsys.readouterr().err.strip()


def refuses(number: int, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the system refuses to write files of a name."""
    replace = os.replace

    def no(source: Path, target: Path) -> None:
        if at in str(target):
            raise OSError(number, os.strerror(number), str(source))
        replace(source, target)

    monkeypatch.setattr("os.replace", no)


@pytest.mark.parametrize("at", ["config.toml", "ckpt-000002", "best.safetensors", "done", "none.jsonl", "costs.json"])
def test_a_full_disk_is_a_sentence_and_nothing_is_lost(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = tiny(rounds=3, **{"checkpoint-every": 1})
    whole = go(experiment, tmp_path / "whole").folders[0]
    with monkeypatch.context() as patch:
        refuses(errno.ENOSPC, at, patch)
        with pytest.raises(HostError, match=r"cannot be written \(No space left on device\); .* go on with --resume"):
            go(experiment, tmp_path / "full")
    assert not list((tmp_path / "full").rglob(".*"))
    result = go(experiment, tmp_path / "full", resume=True)
    check_identical(contents(result.folders[0]), contents(whole))


def test_a_folder_that_is_deleted_while_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Session.step

    def deletes(self: Session, state):  # type: ignore[no-untyped-def]
        if state.round == 1:
            shutil.rmtree(tmp_path / "tiny")
        return step(self, state)

    monkeypatch.setattr(Session, "step", deletes)
    with pytest.raises(
        HostError, match=r"metrics\.jsonl cannot be written \(No such file or directory: its folder is gone\)"
    ):
        go(tiny(), tmp_path)
    assert not (tmp_path / "tiny").exists()


def test_everything_is_flushed_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint counts lines, and an ending counts on all files: they are on disk first."""
    flushed: list[str] = []
    fsync, replace = os.fsync, os.replace

    def heard(handle: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    def placed(source: Path, target: Path) -> None:
        assert Path(source).name in flushed, target
        flushed.append(f"placed {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr("os.fsync", heard)
    monkeypatch.setattr("os.replace", placed)
    folder = go(tiny(rounds=1), tmp_path).folders[0]
    for name in ("ckpt-000001.safetensors", "done"):
        before = flushed[: flushed.index(f"placed {name}")]
        assert "metrics.jsonl" in before[-3:], name
        assert flushed[flushed.index(f"placed {name}") + 1] == folder.name  # who is in the folder
    assert {"placed none.jsonl", "placed costs.json", "placed config.toml"} <= set(flushed)


def test_no_room_is_said_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: usage._replace(free=1000))
        with pytest.raises(
            HostError, match=r"these runs need about \S+ kB, and \S+ has 1.0 kB left: make room, or .* --out"
        ):
            go(tiny(), tmp_path)
    assert not list(tmp_path.rglob("metrics.jsonl"))
    monkeypatch.setattr(space, "_most_of_a_file", lambda: 10)
    with pytest.raises(HostError, match=r"no file may have more than 10 bytes here: raise ulimit -f"):
        go(tiny(), tmp_path)


@pytest.mark.parametrize("method", ["fedavg", "fedbn", "scaffold"])
def test_the_estimate_is_about_right(method: str, tmp_path: Path) -> None:
    from fedshift.runs.run import plan

    experiment = tiny(rounds=2, model={"name": "mlp", "hidden": [300], "norm": True}, method=[{"name": method}])
    (job,) = plan(experiment, tmp_path, data=POOL)
    wanted = space.needed(job)
    folder = go(experiment, tmp_path).folders[0]
    sizes = {path.stat().st_ino: path.stat().st_size for path in folder.rglob("*") if path.is_file()}  # links once
    taken = sum(sizes.values())
    largest = max(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert 0.7 < wanted.largest / largest < 1.4
    assert 0.7 < (wanted.whole - wanted.largest) / taken < 1.6  # without the moment with two checkpoints


def test_the_guard_says_what_the_system_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases: dict[str, tuple[Callable[[], None], str]] = {
        "a file": (
            lambda: _raise(OSError(errno.EROFS, "Read-only file system", "/x/a.png")),
            "/x/a.png cannot be written",
        ),
        "memory": (lambda: _raise(MemoryError()), "there is not enough memory"),
        "a locale": (lambda: _raise(UnicodeEncodeError("ascii", "für", 1, 2, "no")), "set PYTHONUTF8=1"),
        "ours": (lambda: _raise(HostError("no")), "error: no"),
    }
    for name, (command, sentence) in cases.items():
        with pytest.raises(SystemExit) as ended:
            cli.guarded(command)
        said = capsys.readouterr().err.strip()
        assert ended.value.code == 1, name
        assert sentence in said
        assert len(said.splitlines()) == 1, name


def _raise(error: BaseException) -> None:
    raise error


# ---- the engine ----------------------------------------------------------------------------------------------------------
def test_the_engine_is_a_part_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = tiny(rounds=3, **{"checkpoint-every": 1})
    step = Session.step

    def stops(self: Session, state):  # type: ignore[no-untyped-def]
        if state.round == 2:
            raise KeyboardInterrupt
        return step(self, state)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "step", stops)
        with pytest.raises(KeyboardInterrupt):
            go(experiment, tmp_path)
    said = "fedavg seed 0 was trained by sequential on cpu in float32 and goes on with vmapped on cpu in float32: rounding "
    with pytest.warns(UserWarning, match=said):
        result = go(experiment, tmp_path, engine="vmapped", resume=True)
    done = RunFolder(result.folders[0]).ending()
    assert done["engine"] == "vmapped"
    assert done["made-by"] == ["sequential on cpu in float32", "vmapped on cpu in float32"]
    assert any("was trained by sequential on cpu in float32, then by vmapped" in note for note in result.notes)
    plain = RunFolder(go(experiment, tmp_path / "plain").folders[0]).ending()
    assert (plain["engine"], plain["precision"], "made-by" in plain) == ("sequential", "float32", False)


# ---- real processes ------------------------------------------------------------------------------------------------------
def program(*words: object, shell: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    command = " ".join([shell, f"exec {sys.executable} -m fedshift.cli", *(f"'{word}'" for word in words)])
    return subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.system
def test_the_system_says_no_to_real_processes(tmp_path: Path) -> None:
    small = program(*SMALL, tmp_path / "limit", shell="ulimit -f 3;")  # blocks of 1024 bytes
    assert small.returncode == 1, small.stderr
    assert "File too large" in small.stderr or "raise ulimit -f" in small.stderr
    assert len(small.stderr.strip().splitlines()) == 1
    full = subprocess.run(
        ["bash", "-c", f"exec {sys.executable} -m fedshift.cli list methods > /dev/full"],
        env=dict(os.environ), capture_output=True, text=True,
    )  # fmt: skip
    assert (full.returncode, full.stderr.strip()) == (
        1,
        "error: the output cannot be written (No space left on device)",
    )
    ascii_ = program(*SMALL, tmp_path / "limit", "--resume", PYTHONUTF8="0", PYTHONIOENCODING="ascii", LC_ALL="C",
                     PYTHONCOERCECLOCALE="0")  # fmt: skip
    assert ascii_.returncode == 0, ascii_.stderr
    assert "fedavg" in ascii_.stdout
    assert "Traceback" not in ascii_.stderr


@pytest.mark.system
@pytest.mark.long
def test_a_small_torture(tmp_path: Path) -> None:
    """A few of everything that ``benchmarks/torture.py`` does by the hundred."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "OMP_NUM_THREADS": "1"}
    few = (
        ["kills", "--count", "4"],
        ["doubles", "--count", "3"],
        ["orphans", "--count", "2"],
        ["damage", "--step", "60"],
    )
    for words in few:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.torture", *words],
            env=environment,
            capture_output=True,
            text=True,
            cwd=root,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert ", 0 failures" in done.stdout


def test_a_sentence_for_everything_that_is_written(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="its folder is gone"):
        files.write(tmp_path / "gone" / "a", "")
    with pytest.raises(UserError, match="it is a folder"):
        files.write(tmp_path, "")
    assert HostError("x").exit_code == 1
    assert UserError("x").exit_code == 2
