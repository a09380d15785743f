"""The cache is private, whole or not there, and can be shown and cleared."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fedshift.cli import app
from fedshift.data import _pixels
from fedshift.data.cache import clear, entries
from fedshift.data.partition import Iid
from fedshift.data.sources import from_arrays, load
from fedshift.data.task import build


def folder(root: Path) -> Path:
    for i in range(300):
        path = root / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4), i % 256).save(path)
    return root


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def everything(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file() or path.name.startswith(".")]


def filled(tmp_path: Path) -> Path:
    cache = tmp_path / "cache"
    pool = load(f"folder:{folder(tmp_path / 'data')}", cache=cache)
    build(pool, Iid(clients=3), cache=cache)
    return cache


def test_only_its_user_may_look_into_it(tmp_path: Path) -> None:
    (tmp_path / "cache" / "sources").mkdir(parents=True)
    (tmp_path / "cache" / "sources").chmod(0o755)  # as earlier versions made it
    before = os.umask(0)
    try:
        cache = filled(tmp_path)
    finally:
        os.umask(before)
    folders = [cache / "sources", cache / "tasks", *(cache / "sources").iterdir(), *(cache / "tasks").iterdir()]
    assert [mode(path) for path in folders] == [0o700] * 4
    other = tmp_path / "new" / "cache"
    build(from_arrays(np.arange(144, dtype=np.uint8).reshape(9, 4, 4), [0] * 9), Iid(clients=1), cache=other)
    assert (mode(other), mode(other / "tasks")) == (0o700, 0o700)


@pytest.mark.parametrize("at", [1, 200])
def test_interrupted_decoding_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    root, fitted, calls = folder(tmp_path / "data"), _pixels.fitted, []

    def stop(*given: Any) -> np.ndarray:
        calls.append(1)
        if len(calls) == at:
            raise KeyboardInterrupt
        return fitted(*given)

    monkeypatch.setattr(_pixels, "fitted", stop)
    with pytest.raises(KeyboardInterrupt):
        load(f"folder:{root}", cache=tmp_path / "cache")
    assert everything(tmp_path / "cache") == []


@pytest.mark.parametrize("function", ["save", "savez"])
def test_interrupted_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    root, write = folder(tmp_path / "data"), getattr(np, function)

    def stop(path: Path, *given: Any, **named: Any) -> None:
        write(path, *given, **named)
        raise KeyboardInterrupt

    monkeypatch.setattr(np, function, stop)
    with pytest.raises(KeyboardInterrupt):
        load(f"folder:{root}", cache=tmp_path / "cache")
    assert everything(tmp_path / "cache") == []


def test_it_is_shown_and_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled(tmp_path)
    (cache / "sources" / "mine").mkdir()  # no entry
    monkeypatch.setenv("FEDSHIFT_CACHE", str(cache))
    told = json.loads(CliRunner().invoke(app, ["cache", "show", "--format", "json"]).output)
    assert {entry["kind"]: entry["what"] for entry in told} == {
        "sources": "300 images, 4x4 RGB",
        "tasks": "3 clients, 0 unseen",
    }
    assert {entry["source"] for entry in told} == {f"folder:{tmp_path / 'data'}"}
    assert "300 images" in CliRunner().invoke(app, ["cache"]).output
    os.utime(told[0]["path"], (0, time.time() - 5 * 86400))
    assert CliRunner().invoke(app, ["cache", "clear", "--unused-days", "3"]).output.startswith("removed 1 entry, ")
    assert CliRunner().invoke(app, ["cache", "clear"]).output.startswith("removed 1 entry, ")
    assert entries(cache) == []
    assert everything(cache) == []
    assert (cache / "sources" / "mine").is_dir()
    assert "0 entries, 0.0 MB" in CliRunner().invoke(app, ["cache"]).output


@pytest.mark.system
def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    root, cache = folder(tmp_path / "data"), tmp_path / "cache"
    script = f"""
import os, signal
import numpy as np
from pathlib import Path
from fedshift.data.sources import load
np.savez = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
load("folder:{root}", cache=Path("{cache}"))
"""
    ended = subprocess.run([sys.executable, "-c", script], check=False, env=os.environ)
    assert ended.returncode == -signal.SIGKILL
    (half,) = (cache / "sources").iterdir()
    assert (half / "images.npy").exists()
    assert mode(half) == 0o700
    load(f"folder:{root}", cache=cache)
    assert not half.exists()
    half.mkdir()
    (half / "owner").touch()
    clear(cache)
    assert everything(cache) == []
