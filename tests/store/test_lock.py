"""One process at a time in a run folder: in this process, and with real ones that are refused or killed."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from fedshift import Experiment, UserError, run
from fedshift.store import lock
from fedshift.store.folder import find_runs
from fedshift.store.lock import LOCK, Occupied, Owner, RunLock, locked, owner_of
from tests.test_resume import check_identical, contents

ME = f"process {os.getpid()} on {re.escape(platform.node())} since \\d\\d:\\d\\d"


@pytest.fixture(params=["flock", "file"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Under the system's lock, and where a disk has none."""

    def unsupported(handle: int, how: int) -> None:
        raise OSError(errno.ENOTSUP, "not here")

    if request.param == "file":
        monkeypatch.setattr(lock.fcntl, "flock", unsupported)
    return str(request.param)


def dead() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_the_second_is_refused_and_told_who_is_first(tmp_path: Path, way: str) -> None:
    with RunLock(tmp_path):
        assert owner_of(tmp_path) == Owner(**json.loads((tmp_path / LOCK).read_text()))
        assert owner_of(tmp_path).way == way  # type: ignore[union-attr]
        with (
            pytest.raises(Occupied, match=f"is being trained by {ME} \\(wait for it, or stop it first\\)"),
            RunLock(tmp_path),
        ):
            raise AssertionError
        (tmp_path / "done").touch()
        with pytest.raises(Occupied, match="is being scored by"), RunLock(tmp_path):
            raise AssertionError
    assert not (tmp_path / LOCK).exists()
    with RunLock(tmp_path):
        assert owner_of(tmp_path) is not None
    assert owner_of(tmp_path) is None


def test_the_lock_is_given_back_when_something_goes_wrong(tmp_path: Path, way: str) -> None:
    with pytest.raises(KeyboardInterrupt), RunLock(tmp_path):
        raise KeyboardInterrupt
    with RunLock(tmp_path):
        pass


def test_all_folders_or_none(tmp_path: Path, way: str) -> None:
    with RunLock(tmp_path / "b"):
        with pytest.raises(Occupied, match="/b is being"), locked([tmp_path / "a", tmp_path / "b"]):
            raise AssertionError
        assert owner_of(tmp_path / "a") is None


def test_a_dead_owner_is_followed_at_once(tmp_path: Path, way: str) -> None:
    left = replace(Owner.me("file" if way == "file" else "flock"), pid=dead(), started="")
    (tmp_path / LOCK).write_text(json.dumps(asdict(left)))
    assert owner_of(tmp_path) is None
    with RunLock(tmp_path):
        assert owner_of(tmp_path).pid == os.getpid()  # type: ignore[union-attr]


def test_a_number_given_to_another_process_is_not_the_owner(tmp_path: Path) -> None:
    left = replace(Owner.me("file"), started="1")
    if not Owner.me("file").started:
        pytest.skip("the system does not tell when a process began")
    (tmp_path / LOCK).write_text(json.dumps(asdict(left)))
    with RunLock(tmp_path):
        pass


def test_the_lock_of_another_machine_is_only_trusted_to_the_system(tmp_path: Path, way: str) -> None:
    far = replace(Owner.me("file"), host="far", pid=7, since="2024-03-02T20:15:00+00:00")
    (tmp_path / LOCK).write_text(json.dumps(asdict(far)))
    sentence = (
        "is locked by process 7 on far since 2024-03-0[23] .*, which cannot be looked at .* has ended, remove .*lock"
    )
    with pytest.raises(Occupied, match=sentence), RunLock(tmp_path):
        raise AssertionError
    assert owner_of(tmp_path) == far
    (tmp_path / LOCK).write_text(json.dumps(asdict(replace(far, way="flock"))))
    if way == "flock":  # the system would hold it if its owner were alive
        with RunLock(tmp_path):
            pass


def test_a_lock_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "fcntl", None)
    (tmp_path / LOCK).write_text("")
    with pytest.raises(Occupied, match=r"left no name; if none writes there, remove .*\.lock"), RunLock(tmp_path):
        raise AssertionError


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"), RunLock(tmp_path / "file"):
        raise AssertionError


def tiny(**changes: object) -> Experiment:
    settings: dict[str, object] = {
        "rounds": 2, "baselines": False, "data": {"size": 8}, "model": {"name": "mlp", "hidden": [4]},
        "checkpoint-every": 1, "name": "small",
    }  # fmt: skip
    return Experiment.parse({**settings, **changes})


def test_a_finished_run_is_read_by_anybody_and_scored_by_one(tmp_path: Path) -> None:
    before = run(tiny(), tmp_path, engine="sequential")
    more = tiny(method=[{"name": "fedavg", "adapters": ["none", {"name": "tent", "params": "all"}]}])
    with RunLock(before.folders[0]):
        assert run(tiny(), tmp_path, engine="sequential").rows == before.rows
        with pytest.raises(UserError, match=f"is being scored by {ME}"):
            run(more, tmp_path, engine="sequential")
    assert [row.adapter for row in run(more, tmp_path, engine="sequential").rows] == ["none", "tent params=all"]
    assert not [*tmp_path.rglob(f"{LOCK}*")]


def test_a_run_that_others_are_at_does_not_stop_the_rest(tmp_path: Path) -> None:
    two = tiny(method=[{"name": "fedavg"}, {"name": "local"}])
    first, second = run(two, tmp_path, engine="sequential").folders
    more = [{"name": name, "adapters": ["none", {"name": "tent", "params": "all"}]} for name in ("fedavg", "local")]
    with RunLock(first), pytest.raises(UserError, match="is being scored"):
        run(tiny(method=more), tmp_path, engine="sequential")
    assert not (first / "adapters" / "tent params=all.jsonl").exists()
    assert (second / "adapters" / "tent params=all.jsonl").exists()


# ---- real processes ------------------------------------------------------------------------------------------------------
SETTINGS = [
    "rounds=60", 'method=[{name="fedavg"}]', "baselines=false", "data.size=8", "model.name=mlp", "model.hidden=[8]",
    "name=locked", "checkpoint-every=2", "evaluate.every=10", "evaluate.artefacts=false",
]  # fmt: skip


def started(out: Path, *more: str) -> subprocess.Popen[str]:
    changes = [part for setting in SETTINGS for part in ("-c", setting)]
    line = [sys.executable, "-m", "fedshift.cli", "run", *changes, "--out", str(out), "--engine", "sequential", *more]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def writing(out: Path, process: subprocess.Popen[str], lines: int = 6) -> Owner:
    """The owner of the run, once it has come so far."""
    for _ in range(1200):
        assert process.poll() is None, process.stderr.read()  # type: ignore[union-attr]
        for metrics in out.rglob("metrics.jsonl"):
            owner = owner_of(metrics.parent)
            if owner is not None and len(metrics.read_text().splitlines()) >= lines:
                return owner
        time.sleep(0.05)
    raise AssertionError("it never began")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbed."""
    out = tmp_path_factory.mktemp("whole")
    process = started(out)
    assert process.communicate()[1] == ""
    assert process.returncode == 0
    return out


@pytest.fixture
def stopped() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that a test holds still; they never outlive it."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.system
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_nobody_gets_between_a_run_and_its_folder(
    tmp_path: Path, whole: Path, stopped: list[subprocess.Popen[str]], jobs: str
) -> None:
    first = started(tmp_path, "--jobs", jobs)
    stopped.append(first)
    owner = writing(tmp_path, first)
    assert (owner.pid == first.pid) == (jobs == "1")  # with --jobs the process that writes is the owner
    os.kill(owner.pid, signal.SIGSTOP)  # it must still be at it when the others come
    for option in (["--resume"], ["--restart"], []):
        other = started(tmp_path, *option)
        _, errors = other.communicate(timeout=120)
        assert other.returncode == 2
        assert f"is being trained by process {owner.pid} on {platform.node()} since" in errors
        assert "interrupted" not in errors
    with pytest.raises(Occupied, match=f"is being trained by process {owner.pid}"):
        find_runs(tmp_path)
    os.kill(owner.pid, signal.SIGCONT)
    _, errors = first.communicate(timeout=300)
    assert first.returncode == 0, errors
    check_identical(contents(whole), contents(tmp_path))
    assert not [*tmp_path.rglob(f"{LOCK}*")]


@pytest.mark.system
def test_a_killed_owner_is_followed_at_once(tmp_path: Path, whole: Path, stopped: list[subprocess.Popen[str]]) -> None:
    first = started(tmp_path)
    stopped.append(first)
    writing(tmp_path, first)
    folder = next(tmp_path.rglob("metrics.jsonl")).parent
    first.kill()
    first.wait()
    assert (folder / LOCK).is_file()
    assert owner_of(folder) is None
    refused = started(tmp_path)
    assert "was interrupted after round" in refused.communicate(timeout=120)[1]
    again = started(tmp_path, "--resume")
    _, errors = again.communicate(timeout=300)
    assert again.returncode == 0, errors
    check_identical(contents(whole), contents(tmp_path))


@pytest.mark.system
def test_nobody_is_left_in_the_folder_of_a_killed_parent(
    tmp_path: Path, whole: Path, stopped: list[subprocess.Popen[str]]
) -> None:
    first = started(tmp_path, "--jobs", "2")
    writing(tmp_path, first)
    first.kill()
    first.wait()
    for _ in range(200):
        if owner_of(next(tmp_path.rglob(LOCK)).parent) is None:
            break
        time.sleep(0.05)
    again = started(tmp_path, "--resume")
    _, errors = again.communicate(timeout=300)
    assert again.returncode == 0, errors
    check_identical(contents(whole), contents(tmp_path))
