"""A run that is killed at any moment and resumed ends bit-identical to one that was never killed."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedshift import Experiment, UserError, run
from fedshift.store.folder import RunFolder
from fedshift.store.trees import load
from tests.forks import Forks

SETTINGS = [
    "rounds=30", "baselines=false", "data.size=8", "data.limit=400", "model.name=cnn", "model.width=2", "model.hidden=8",
    "checkpoint-every=3", "evaluate.every=4", "evaluate.oracle=true", "evaluate.adapted=true",
    "participation=0.6",
]  # fmt: skip
METHODS = '[{name="fedbn", adapters=["none", "tent"]}, {name="scaffold", label="sc"}]'
CLOCK = {"seconds", "memory-grown", "memory-peak", "seal"}


def command(out: Path, engine: str, *more: str) -> list[str]:
    changes = [part for setting in [*SETTINGS, f"method={METHODS}"] for part in ("-c", setting)]
    return ["run", *changes, "--out", str(out), "--engine", engine, *more]


def contents(folder: Path) -> dict[str, object]:
    """Everything a run leaves behind, wall-clock fields aside."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.name in ("model.safetensors", "known.safetensors", "features.safetensors"):  # no trees
            found[name] = load_file(path)
        elif path.suffix == ".safetensors":
            trees, facts = load(path)
            found[name] = (trees, facts)
        elif path.suffix == ".jsonl":
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            found[name] = [{k: v for k, v in line.items() if k not in CLOCK} for line in lines]
        elif path.name == "config.toml":
            found[name] = path.read_text()
    return found


def check_identical(a: object, b: object) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)  # type: ignore[arg-type]
    elif isinstance(a, dict):
        assert list(a) == list(b)  # type: ignore[call-overload]
        for key in a:
            check_identical(a[key], b[key])  # type: ignore[index]
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)  # type: ignore[arg-type]
        for x, y in zip(a, b, strict=True):  # type: ignore[call-overload]
            check_identical(x, y)
    else:
        assert a == b


@pytest.mark.system
@pytest.mark.parametrize("engine", ["vmapped", "auto", pytest.param("sequential", marks=pytest.mark.long)])
def test_killed_and_resumed_is_bit_identical(tmp_path: Path, engine: str, forks: Forks) -> None:
    whole = forks.start(*command(tmp_path / "whole", engine))
    assert whole.wait() == 0, whole.err
    killed = tmp_path / "killed"
    rng = random.Random(time.time_ns())
    kills = 0
    for attempt in range(12):
        process = forks.start(*command(killed, engine, *(["--resume"] if attempt else [])))
        target = rng.randint(1, 25)
        deadline = time.time() + 120
        while process.poll() is None and time.time() < deadline and kills < 3:
            metrics = [path for path in killed.rglob("metrics.jsonl") if not (path.parent / "done").exists()]
            if any(len(path.read_text().splitlines()) >= target for path in metrics):
                process.send_signal(signal.SIGKILL)
                kills += 1
            time.sleep(0.002)
        code = process.wait()
        if code == 0:
            break
        assert code == -signal.SIGKILL, process.err
    assert kills >= 1
    assert code == 0
    check_identical(contents(tmp_path / "whole"), contents(killed))


def small(**changes: object) -> Experiment:
    settings: dict[str, object] = {
        "rounds": 4, "baselines": False, "data": {"size": 8}, "model": {"name": "mlp", "hidden": [4]},
        "checkpoint-every": 1, "name": "small",
    }  # fmt: skip
    return Experiment.parse({**settings, **changes})


def test_interrupted_runs_are_not_thrown_away_silently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedshift.runs.session import Session

    step = Session.step

    def stops(self: Session, state):  # type: ignore[no-untyped-def]
        if state.round == 2:
            raise KeyboardInterrupt
        return step(self, state)

    monkeypatch.setattr(Session, "step", stops)
    with pytest.raises(KeyboardInterrupt):
        run(small(), tmp_path, engine="sequential")
    monkeypatch.setattr(Session, "step", step)
    with pytest.raises(UserError, match="interrupted after round 2 of 4: add --resume"):
        run(small(), tmp_path, engine="sequential")
    result = run(small(), tmp_path, engine="sequential", resume=True)
    whole = run(small(), tmp_path / "again", engine="sequential")
    check_identical(contents(whole.folders[0]), contents(result.folders[0]))
    monkeypatch.setattr(Session, "step", stops)
    assert run(small(), tmp_path, engine="sequential").rows == result.rows  # finished: read, not run again


def test_restart_begins_again(tmp_path: Path) -> None:
    first = run(small(), tmp_path, engine="sequential")
    (first.folders[0] / "done").unlink()
    again = run(small(), tmp_path, engine="sequential", restart=True)
    assert [line["round"] for line in RunFolder(again.folders[0]).lines() if "bytes-up" in line] == [1, 2, 3, 4]


def test_new_adapters_use_the_finished_training(tmp_path: Path) -> None:
    run(small(), tmp_path, engine="sequential")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("ckpt-*")}
    more = small(method=[{"name": "fedavg", "adapters": ["none", {"name": "tent", "params": "all"}]}])
    result = run(more, tmp_path, engine="sequential")
    assert [row.adapter for row in result.rows] == ["none", "tent params=all"]
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("ckpt-*")}


def test_a_damaged_checkpoint_is_said_in_a_sentence(tmp_path: Path) -> None:
    result = run(small(), tmp_path, engine="sequential")
    (result.folders[0] / "done").unlink()
    checkpoint = next(result.folders[0].glob("ckpt-*"))
    os.truncate(checkpoint, 100)
    with pytest.raises(
        UserError,
        match=r"ckpt-000004.safetensors is damaged \(.*\); put it back from a copy, or train this run again with .*",
    ):
        run(small(), tmp_path, engine="sequential", resume=True)
