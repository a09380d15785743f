"""Real processes: what they import, what becomes of them when their parent ends, what they leave behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedshift.engines.scratch import Scratch, sweep
from tests.forks import Forked, Forks

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.system
# like the script that pip writes; its folder is not the current one
PROGRAM = "import sys\nfrom fedshift.cli import main\nsys.exit(main())\n"
SMALL = ["-c", "rounds=2", "-c", "data.size=8", "-c", "model.width=2", "-c", "model.hidden=4"]
ENDLESS = ["-c", "rounds=100000", "-c", "checkpoint-every=1", "-c", "evaluate.every=0", *SMALL[2:]]
EXPERIMENT = """
name = "small"
baselines = false
[data]
size = 8
[model]
name = "cnn"
[[method]]
name = "fedavg"
[[method]]
name = "fedprox"
"""
WAYS = {"jobs": ["--jobs", "2", "--engine", "sequential"], "parallel": ["--engine", "parallel"]}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder of somebody's, with a program and a temporary folder beside it."""
    for name in ("bin", "tmp", "cache", "here"):
        (tmp_path / name).mkdir()
    (tmp_path / "bin" / "fedshift").write_text(PROGRAM)
    (tmp_path / "here" / "small.toml").write_text(EXPERIMENT)
    return tmp_path


def environment(place: Path, **more: str) -> dict[str, str]:
    known = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "TMPDIR": str(place / "tmp")}
    return {**os.environ, **known, "FEDSHIFT_CACHE": str(place / "cache"), "FEDSHIFT_TEST": place.name, **more}


def start(place: Path, *arguments: str) -> subprocess.Popen[str]:
    """The program as it is installed, in an interpreter of its own."""
    return subprocess.Popen(
        [sys.executable, str(place / "bin" / "fedshift"), *arguments],
        cwd=place / "here",
        env={**environment(place), "FEDSHIFT_MARK": str(place)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def family(place: Path) -> dict[int, str]:
    """The processes that came of one program, by number, with their command lines: their environment tells."""
    mark, found = f"FEDSHIFT_MARK={place}".encode(), dict[int, str]()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                words = (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
                if words:  # a process that has ended and waits to be noticed has none
                    found[int(folder.name)] = words
        except OSError:
            continue
    return found


def workers(place: Path) -> list[int]:
    return [number for number, words in family(place).items() if re.search(r"worker_process|popen_loky", words)]


def wait_for(
    what: str, reached: Callable[[], object], seconds: float, process: Forked | None = None, place: Path | None = None
) -> None:
    until = time.monotonic() + seconds
    while not reached():
        if process is not None and process.poll() is not None:
            raise AssertionError(f"it ended before {what}: {process.err}")
        assert time.monotonic() < until, f"still not: {what} ({family(place) if place else ''})"
        time.sleep(0.02)


def leftovers(place: Path, number: int) -> list[Path]:
    return [found for folder in (Path("/dev/shm"), place / "tmp") for found in folder.glob(f"fedshift-{number}-*")]


def written(place: Path) -> dict[Path, tuple[int, int]]:
    files = [path for path in (place / "here").rglob("*") if path.is_file()]
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in files}


@pytest.fixture
def endless(place: Path, request: pytest.FixtureRequest, forks: Forks) -> Iterator[Forked]:
    """A program in the middle of its work, workers and all; they are interpreters of their own, it is not."""
    way, known = WAYS[request.param], {**environment(place), "FEDSHIFT_MARK": str(place)}
    process = forks.start("run", "small.toml", "--out", "runs", *way, *ENDLESS, cwd=place / "here", env=known)
    try:
        begun = lambda: len(list((place / "here").rglob("ckpt-*.safetensors")))  # noqa: E731
        wait_for("its rounds", lambda: begun() and len(workers(place)) >= 2, 120, process)
        yield process
    finally:
        process.end()
        for number in family(place):
            os.kill(number, signal.SIGKILL)
        for path in leftovers(place, process.pid):
            shutil.rmtree(path, ignore_errors=True)


both = pytest.mark.parametrize("endless", list(WAYS), indirect=True)


@both
def test_children_end_with_a_killed_parent(endless: Forked, place: Path, forks: Forks) -> None:
    left = leftovers(place, endless.pid)
    assert left
    endless.send_signal(signal.SIGKILL)
    assert endless.wait() == -signal.SIGKILL
    wait_for("everybody's end", lambda: not family(place), 5, place=place)
    before = written(place)
    time.sleep(1)
    assert written(place) == before
    words = ["run", "small.toml", "--out", "others", "--engine", "sequential", *SMALL]
    again = forks.start(*words, cwd=place / "here", env=environment(place))
    assert again.wait(120) == 0, again.err
    assert not [path for path in left if path.exists()]


@both
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_to_end(endless: Forked, place: Path, number: signal.Signals) -> None:
    endless.send_signal(number)
    assert endless.wait(10) == 128 + number, endless.err
    said = endless.err.strip()
    assert said.startswith("stopped; go on from the last checkpoint with: fedshift run small.toml ")
    assert said.endswith(" --resume")
    wait_for("everybody's end", lambda: not family(place), 5, place=place)
    before = written(place)
    time.sleep(1)
    assert written(place) == before
    assert not leftovers(place, endless.pid)


@both
def test_a_killed_worker_is_one_sentence(endless: Forked, place: Path) -> None:
    for number in workers(place):
        os.kill(number, signal.SIGKILL)
    assert endless.wait(20) == 2, endless.err
    said = endless.err.strip()
    assert "was ended by signal 9 (SIGKILL), most likely for want of memory" in said
    assert "Warning" not in said
    assert "\n" not in said
    wait_for("everybody's end", lambda: not family(place), 5, place=place)


def test_nothing_of_the_current_folder_is_imported(place: Path) -> None:
    names = ["cloudpickle", "random", "torch", "fedshift", "loky", "tempfile", "code", "open", "joblib", "numpy"]
    for name in names:
        (place / "here" / f"{name}.py").write_text(f"open({str(place / 'imported')!r}, 'a').write('{name} ')\n")
    commands = [["run", "small.toml", "--out", ".", *way, "-c", f"name={name}", *SMALL] for name, way in WAYS.items()]
    for command in [*commands, ["inspect", "."]]:
        process = start(place, *command)
        code, said = process.wait(240), process.stderr.read()  # type: ignore[union-attr]
        process.stderr.close()  # type: ignore[union-attr]
        assert code == 0, said
        assert "Warning" not in said
    assert not (place / "imported").exists(), (place / "imported").read_text()
    assert (place / "here" / "inspect" / "inspect.html").is_file()


def test_python_m_and_an_empty_entry(place: Path) -> None:
    """What the parent may do itself, its workers still may not: here it came before the planted files."""
    empty = {**environment(place), "PYTHONPATH": f"{ROOT / 'src'}:"}
    begin = "import sys, runpy, fedshift.cli, fedshift.runs.workers, random\n"
    trap = f"open({str(place / 'imported')!r}, 'w')"
    plant = "".join(
        f"import pathlib; pathlib.Path('{name}.py').write_text({trap!r})\n" for name in ("cloudpickle", "random")
    )
    for name, way in WAYS.items():
        words = ["fedshift", "run", "small.toml", "--out", name, *way, *SMALL]
        text = f"{begin}{plant}sys.argv = {words!r}\nfedshift.cli.main()\n"
        (place / "bin" / "begin.py").write_text(text)
        done = subprocess.run(
            [sys.executable, str(place / "bin" / "begin.py")],
            cwd=place / "here",
            env=empty,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert not (place / "imported").exists()
        for planted in ("cloudpickle.py", "random.py"):
            (place / "here" / planted).unlink()


def test_folders_of_the_living_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedshift.engines.scratch.tempfile.gettempdir", lambda: str(tmp_path))
    (tmp_path / "fedshift-0.1").mkdir()  # not such a folder at all
    with Scratch(str(tmp_path)) as mine:
        (mine / "letter").touch()
        sweep()
        assert (mine / "letter").is_file()
        code = (
            "import os, sys; from fedshift.engines.scratch import Scratch\n"
            f"made = Scratch({str(tmp_path)!r}); print(made.path, flush=True); os.kill(os.getpid(), 9)"
        )
        done = subprocess.run([sys.executable, "-c", code], env=environment(tmp_path), capture_output=True, text=True)
        theirs = Path(done.stdout.strip())
        assert theirs.is_dir()
        sweep()
        assert not theirs.exists()
        assert mine.is_dir()
    assert not mine.exists()
    assert (tmp_path / "fedshift-0.1").is_dir()
