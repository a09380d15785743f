"""Some methods trained once, whose clients are served."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor

import fedshift
from fedshift import Experiment
from fedshift.data.task import Task
from fedshift.runs.artefact import Artefact
from fedshift.runs.setup import make_task

METHODS = ("fedbn", "fedthe", "fedtta", "fdse", "fedcir", "finetune-rotation", "ditto")  # what adapters ask for


def experiment() -> Experiment:
    return Experiment.parse(
        {
            "name": "tiny", "rounds": 1, "baselines": False, "data": {"size": 8, "limit": 400}, "evaluate": {"every": 0},
            "split": {"unseen": ["font"]}, "model": {"name": "cnn", "norm": True, "width": 4, "hidden": 12},
            "train": {"lr": 0.05, "batch-size": 16, "momentum": 0.9}, "method": [{"name": name} for name in METHODS],
            "stream": [{"name": "corrupted", "kind": "corrupted", "severity": 3}],
        }
    )  # fmt: skip


@dataclass(frozen=True)
class World:
    task: Task
    folders: dict[str, Path]

    def folder(self, method: str, client: str = "paper") -> Path:
        return self.folders[method] / "artefacts" / client

    def artefact(self, method: str, client: str = "paper") -> Artefact:
        return fedshift.load(self.folder(method, client))

    def stream(self, client: str = "paper") -> tuple[Tensor, Tensor]:
        """Images and their ids, as they arrive in the benchmark."""
        samples = self.task.samples(self.task.client(client), "corrupted")
        return samples.images[samples.index], samples.ids[samples.index]


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folders = fedshift.run(experiment(), tmp_path_factory.mktemp("serve"), engine="sequential").folders
    return World(make_task(experiment(), 0), {folder.parent.name: folder for folder in folders})
