"""How many runs are made at a time when nobody says."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from fedshift.engines.base import Compute
from fedshift.experiment.schema import Experiment
from fedshift.runs import filling
from fedshift.runs import run as running
from fedshift.runs.plan import Job

GPU = Compute(torch.device("cuda"))
SMALL = {"data": {"size": 8}, "model": {"name": "mlp", "hidden": [4]}, "rounds": 1, "baselines": False}


@pytest.fixture
def groups(tmp_path: Path) -> list[list[Job]]:
    names = ["fedavg", "fedprox", "ditto"]
    experiment = Experiment.parse({**SMALL, "method": [{"name": name} for name in names]})
    return [[job] for job in running.plan(experiment, tmp_path)]


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100 << 30, 140 << 30))
    monkeypatch.setattr(filling, "usable_cores", lambda: 16)
    monkeypatch.setattr(filling, "PAYS", 0)


@pytest.mark.usefixtures("roomy")
def test_as_many_as_there_are_and_fit(groups: list[list[Job]], monkeypatch: pytest.MonkeyPatch) -> None:
    assert filling.processes_for(groups, "vmapped", GPU) == 3
    assert filling.processes_for(groups[:1], "vmapped", GPU) == 1
    assert filling.processes_for(groups, "sequential", GPU) == 1
    assert filling.processes_for(groups, "vmapped", Compute()) == 1
    monkeypatch.setattr(filling, "FULL", 2 * len(groups[0][0].task.clients))
    assert filling.processes_for(groups, "vmapped", GPU) == 2  # one run is half of what fills it
    monkeypatch.setattr(filling, "FULL", 128)
    monkeypatch.setattr(filling, "usable_cores", lambda: 4)
    assert filling.processes_for(groups, "vmapped", GPU) == 2
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (7 << 30, 140 << 30))
    assert filling.processes_for(groups, "vmapped", GPU) == 1


@pytest.mark.usefixtures("roomy")
def test_short_runs_and_what_cannot_travel_stay_in_one(
    groups: list[list[Job]], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = groups[0][0]
    samples = sum(len(client.train) for client in job.task.clients) * job.setup.train.local_epochs
    assert filling.samples_of(job) == samples
    monkeypatch.setattr(filling, "PAYS", 3 * samples + 1)
    assert filling.processes_for(groups, "vmapped", GPU) == 1
    monkeypatch.setattr(filling, "PAYS", 3 * samples)
    assert filling.processes_for(groups, "vmapped", GPU) == 3

    def refused(_: object) -> bytes:
        raise TypeError("a lock")

    monkeypatch.setattr(filling.shipping, "dumps", refused)
    assert filling.processes_for(groups, "vmapped", GPU) == 1


def program(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / filling.CONTROL
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv(filling.PIPES, raising=False)
    monkeypatch.setattr(filling, "_serves", lambda: True)


def test_the_service_runs_as_long_as_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f'echo "$1 $$" > {tmp_path}/started; : > "$CUDA_MPS_PIPE_DIRECTORY/control"; exec sleep 60'
    program(tmp_path, script, monkeypatch)
    with filling.overlapping(GPU) as together:
        assert together
        option, number = (tmp_path / "started").read_text().split()
        assert option == "-f"
        folder = Path(os.environ[filling.PIPES])
        assert (folder / "control").exists()
        with filling.overlapping(GPU) as nested:  # it is there already
            assert nested
            assert os.environ[filling.PIPES] == str(folder)
    assert filling.PIPES not in os.environ
    assert not folder.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int(number), 0)


def test_a_service_that_does_not_start_or_serve_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "exit 1", monkeypatch)
    with filling.overlapping(GPU) as together:
        assert not together
    program(tmp_path, ': > "$CUDA_MPS_PIPE_DIRECTORY/control"; exec sleep 60', monkeypatch)
    monkeypatch.setattr(filling, "_serves", lambda: False)
    with filling.overlapping(GPU) as together:
        assert not together
    with filling.overlapping(Compute()) as together:
        assert not together


@pytest.mark.parametrize(
    ("asked", "overlaps", "count"), [(None, True, 2), (None, False, 0), (3, False, 3), (1, True, 0)]
)
def test_who_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: int | None, overlaps: bool, count: int
) -> None:
    made: list[int] = []

    @contextmanager
    def overlapping(_: Compute) -> Iterator[bool]:
        yield overlaps

    def side_by_side(groups: Sequence[Sequence[Job]], processes: int, *_: object) -> None:
        made.append(processes)

    monkeypatch.setattr(running, "overlapping", overlapping)
    monkeypatch.setattr(running, "processes_for", lambda *_: 2)
    monkeypatch.setattr(running, "side_by_side", side_by_side)
    monkeypatch.setattr(running, "finish", lambda *_: None)
    monkeypatch.setattr(running, "collect", lambda _: None)
    experiment = Experiment.parse({**SMALL, "method": [{"name": "fedavg"}, {"name": "fedprox"}]})
    if count and asked is None:
        with pytest.warns(UserWarning, match="2 runs are made at a time"):
            running.run(experiment, tmp_path, processes=asked)
    else:
        running.run(experiment, tmp_path, processes=asked)
    assert made == ([count] if count else [])
