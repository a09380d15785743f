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
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from fedshift import Experiment, UserError, run
from fedshift.store import lock
from fedshift.store.found import find_runs
from fedshift.store.lock import LOCK, Occupied, Owner, RunLock, locked, owner_of
from tests.forks import Forked, Forks
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


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"pid": "x"}', "[" * 5000, "\0" * 50]
    + [
        json.dumps(
            {"pid": 1, "host": "x", "since": "2024-03-02T20:15:00+00:00", "started": "", "way": "flock", **wrong}
        )
        for wrong in (
            {"pid": 10**30},
            {"pid": -1},
            {"pid": True},
            {"since": "x"},
            {"since": 3},
            {"host": 3},
            {"way": "x"},
        )
    ],
)
def test_whatever_stands_in_a_lock(text: str, tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text(text)
    assert owner_of(tmp_path) is None
    with RunLock(tmp_path):
        assert owner_of(tmp_path).pid == os.getpid()  # type: ignore[union-attr]


def test_a_lock_that_is_no_file_is_left_alone(tmp_path: Path) -> None:
    """Taking a lock empties its file: in a folder of somebody else's it may be a link to ours."""
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / LOCK).symlink_to(tmp_path / "mine.txt")
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / LOCK)
    (tmp_path / "folder" / LOCK).mkdir(parents=True)
    for name in ("link", "pipe", "folder"):
        assert owner_of(tmp_path / name) is None
        with (
            pytest.raises(UserError, match=rf"{name}/\.lock is no file of fedshift's; remove it"),
            RunLock(tmp_path / name),
        ):
            raise AssertionError
    assert (tmp_path / "mine.txt").read_text() == "mine"


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


@pytest.fixture
def begin(forks: Forks) -> Iterator[Callable[..., Forked]]:
    """Starts the experiment; nobody outlives the test."""
    processes: list[Forked] = []

    def begun(out: Path, *more: str) -> Forked:
        changes = [part for setting in SETTINGS for part in ("-c", setting)]
        processes.append(forks.start("run", *changes, "--out", out, "--engine", "sequential", *more))
        return processes[-1]

    yield begun
    for process in processes:
        process.end()


def writing(out: Path, process: Forked, lines: int = 6) -> Owner:
    """The owner of the run, once it has come so far."""
    for _ in range(12000):
        assert process.poll() is None, process.err
        for metrics in out.rglob("metrics.jsonl"):
            owner = owner_of(metrics.parent)
            if owner is not None and len(metrics.read_text().splitlines()) >= lines:
                return owner
        time.sleep(0.005)
    raise AssertionError("it never began")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Path:
    """A run that nobody disturbed."""
    out = tmp_path_factory.mktemp("whole")
    changes = [part for setting in SETTINGS for part in ("-c", setting)]
    process = forks.start("run", *changes, "--out", out, "--engine", "sequential")
    assert process.wait() == 0
    assert process.err == ""
    return out


@pytest.mark.system
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_nobody_gets_between_a_run_and_its_folder(
    tmp_path: Path, whole: Path, begin: Callable[..., Forked], jobs: str
) -> None:
    first = begin(tmp_path, "--jobs", jobs)
    owner = writing(tmp_path, first)
    assert (owner.pid == first.pid) == (jobs == "1")  # with --jobs the process that writes is the owner
    os.kill(owner.pid, signal.SIGSTOP)  # it must still be at it when the others come
    for option in (["--resume"], ["--restart"], []):
        other = begin(tmp_path, *option)
        assert other.wait(120) == 2
        assert f"is being trained by process {owner.pid} on {platform.node()} since" in other.err
        assert "interrupted" not in other.err
    with pytest.raises(Occupied, match=f"is being trained by process {owner.pid}"):
        find_runs(tmp_path)
    os.kill(owner.pid, signal.SIGCONT)
    assert first.wait() == 0, first.err
    check_identical(contents(whole), contents(tmp_path))
    assert not [*tmp_path.rglob(f"{LOCK}*")]


@pytest.mark.system
def test_a_killed_owner_is_followed_at_once(tmp_path: Path, whole: Path, begin: Callable[..., Forked]) -> None:
    first = begin(tmp_path)
    writing(tmp_path, first)
    folder = next(tmp_path.rglob("metrics.jsonl")).parent
    first.send_signal(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    assert (folder / LOCK).is_file()
    assert owner_of(folder) is None
    refused = begin(tmp_path)
    assert refused.wait(120) == 2
    assert "was interrupted after round" in refused.err
    again = begin(tmp_path, "--resume")
    assert again.wait() == 0, again.err
    check_identical(contents(whole), contents(tmp_path))


@pytest.mark.system
def test_nobody_is_left_in_the_folder_of_a_killed_parent(
    tmp_path: Path, whole: Path, begin: Callable[..., Forked]
) -> None:
    first = begin(tmp_path, "--jobs", "2")
    writing(tmp_path, first)
    first.send_signal(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    for _ in range(1000):
        if owner_of(next(tmp_path.rglob(LOCK)).parent) is None:
            break
        time.sleep(0.01)
    again = begin(tmp_path, "--resume")
    assert again.wait() == 0, again.err
    check_identical(contents(whole), contents(tmp_path))
