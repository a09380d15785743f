"""A client served on a GPU: the benchmark's answers there, versions that any machine can read."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import fedshift
from fedshift import Experiment
from fedshift.engines.reference import predictions
from fedshift.engines.torch_flags import steady
from fedshift.runs.setup import make_task
from fedshift.serve.history import History
from fedshift.serve.opening import open_service
from fedshift.serve.service import Service, Settings, answered, fitted
from fedshift.store.trees import load

ADAPTERS = ("none", "the", "the-plus", "home-or-away", "t3a", "tent", "bn", "eata", "prior-em")
EXPERIMENT = Experiment.parse(
    {
        "name": "tiny", "rounds": 1, "baselines": False, "data": {"size": 8, "limit": 300},
        "evaluate": {"every": 0, "advice": False}, "model": {"name": "cnn", "norm": True, "width": 4, "hidden": 12},
        "train": {"lr": 0.05, "batch-size": 16}, "method": [{"name": "fedthe"}],
        "stream": [{"name": "corrupted", "kind": "corrupted", "severity": 3}],
    }
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (run,) = fedshift.run(EXPERIMENT, tmp_path_factory.mktemp("serve"), engine="sequential").folders
    return run / "artefacts" / "paper"


def devices(service: Service, *trees: fedshift.Tree) -> set[str]:
    return {
        leaf.device.type for tree in (service.start, *trees) for leaves in tree.values() for leaf in leaves.values()
    }


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_stream_gets_the_benchmarks_answers(name: str, folder: Path, tmp_path: Path) -> None:
    task = make_task(EXPERIMENT, 0)
    samples = task.samples(task.client("paper"), "corrupted")
    images, ids = samples.images[samples.index], samples.ids[samples.index]
    with steady(), torch.no_grad():
        service = open_service(folder, name, settings=Settings(fall_back="never"), device="cuda")
        artefact, adapter = service.artefact, service.adapter
        state = adapter.init(artefact.deployed)
        condition = service.begin()
        if adapter.fits:
            condition = fitted(service, condition, images, ids)
            state = condition.tree
        setting = task.setting("corrupted")
        run = predictions(
            adapter, artefact.deployed, samples, setting, artefact.seed, artefact.compute, state, fit=False
        )
        wanted = torch.cat([output.logits.cpu() for output, _, _ in run])
        size = len(images) if service.together else 7
        found = []
        for pixels, own in zip(images.split(size), ids.split(size), strict=True):
            pieces, condition = answered(service, condition, pixels, own)
            found += [piece.logits for piece in pieces]
            assert all(piece.logits.device.type == piece.frozen.device.type == "cpu" for piece in pieces)
        assert torch.allclose(torch.cat(found), wanted, atol=2e-3)
        assert devices(service, condition.tree, condition.good) == {"cuda"}
        history = History(tmp_path, service)
        history.claim()
        history.save(1, condition, "kept")
        trees, _ = load(next((tmp_path / "versions").glob("*.safetensors")))
        assert all(leaf.device.type == "cpu" for tree in trees.values() for s in tree.values() for leaf in s.values())
        back = history.load(1)
        assert devices(service, back.tree, back.good) == {"cuda"}
        again, before = (answered(service, one, images[:16], ids[:16])[0][0] for one in (back, condition))
        assert torch.allclose(again.logits, before.logits, atol=1e-5)
