"""What every method and adapter costs on one small task, counted: bytes and FLOPs, which do not depend on the machine."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.flop_counter import FlopCounterMode

import fedshift
from fedshift.catalogue import pairs
from fedshift.core.registry import ADAPTERS, METHODS

SETTING = "Four clients with forty training images each, the small CNN with BatchNorm at 16 pixels, twenty rounds."
KEPT = ("bytes-up", "bytes-down", "bytes-published", "flops-round", "flops-end", "flops-server", "memory-step")
IMAGES = 32


def everything() -> dict[str, Any]:
    """All of it."""
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: trained(name, Path(folder)) for name in METHODS}
        methods = {name: of_method(run) for name, run in runs.items()}
        adapters = {name: of_adapter(name, runs) for name in ADAPTERS}
    return {"setting": SETTING, "methods": methods, "adapters": adapters}


def trained(name: str, out: Path) -> Path:
    """The folder of a run of one method."""
    experiment = fedshift.Experiment(
        name=name,
        rounds=20,
        baselines=False,
        data={"size": 16},
        split={"train-limit": 40, "unseen": ["flower"], "public": 0.1},
        stream=[{"name": "original", "kind": "original", "fraction": 0.1}],
        model={"name": "cnn", "norm": True},
        train={"batch-size": 20, "local-epochs": 1},
        evaluate={"every": 0, "advice": False},
        method=[{"name": name}],
    )
    return fedshift.run(experiment, out=out, engine="sequential").folders[0]


def of_method(run: Path) -> dict[str, float]:
    """What does not depend on the clock, of the run's ledger."""
    found = json.loads((run / "costs.json").read_text(encoding="utf-8"))
    return {key: round(found[key]) for key in KEPT if found.get(key) is not None}


def of_adapter(name: str, runs: dict[str, Path]) -> dict[str, Any]:
    """FLOPs of answering a client's images with an adapter and without, after the first method that it can follow."""
    images = np.random.default_rng(0).integers(0, 256, (IMAGES, 16, 16, 3), dtype=np.uint8)
    method = next(row["name"] for row in sorted(pairs(), key=_usual) if row[name] == "yes")
    served = fedshift.load(runs[method] / "artefacts" / "paper")
    with FlopCounterMode(display=False) as plain:
        served.predict(images)
    with FlopCounterMode(display=False) as adapted:
        served.adapt(images, name)
    return {
        "method": method,
        "images": IMAGES,
        "plain": plain.get_total_flops(),
        "flops": adapted.get_total_flops(),
    }


def _usual(row: dict[str, Any]) -> bool:
    return row["name"] not in ("fedavg", "fedthe")  # these two first
