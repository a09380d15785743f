"""What a run is: the settings that decide its training, as ``config.toml`` holds them, and read from there again."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fedshift.core import rng
from fedshift.core.arch import Arch
from fedshift.data.task import Task
from fedshift.errors import UserError
from fedshift.experiment.schema import Experiment, MethodSpec
from fedshift.runs.code import code_digest
from fedshift.runs.setup import Setup

FORMAT = 1  # raise when the same settings would give other numbers
# what a run has beside an experiment's settings
FACTS = (
    "format",
    "seed",
    "task-hash",
    "networks",
    "sweep-point",
    "code",
    "revision",
    "method",
    "validated",
    "chosen-from",
)


def config_of(
    variant: Experiment, spec: MethodSpec, point: Mapping[str, Any], seed: int, task: Task, setup: Setup
) -> dict[str, Any]:
    """What decides the training of one run; adapters do not, so that new ones can be added to a finished run.

    Those that choose a round of their own while it is trained do; what only stands beside their scores does not.
    """
    others = ("method", "seeds", "sweep", "name", "title", "baselines", "scale", "notes")
    whole = variant.model_dump(
        by_alias=True, exclude={**dict.fromkeys(others, True), "evaluate": {"mean_of", "adapted"}}
    )
    if whole["evaluate"]["metric"] == "accuracy":  # as all runs were before there was a choice
        del whole["evaluate"]["metric"]
    if whole["data"]["window"] is None:  # nor was there one of these
        del whole["data"]["window"]
    arch = {name: fingerprint(m.arch, seed) for name, m in setup.methods.items()}
    method = {key: value for key, value in spec.model_dump(by_alias=True).items() if key != "adapters"}
    facts = {"format": FORMAT, "seed": seed, "task-hash": task.hash, "networks": arch, "sweep-point": dict(point)}
    code = code_digest(type(setup.method))
    choosers = sorted(spec.validated(variant.evaluate), key=lambda adapter: adapter.title)
    validated = [adapter.model_dump(by_alias=True, exclude={"paper", "family", "aside"}) for adapter in choosers]
    extra = setup.method.extra_rounds
    optional = {"code": code, "revision": revision_of(setup), "validated": validated}
    optional |= {"chosen-from": variant.rounds + 1 if extra else 0}
    own = {key: value for key, value in optional.items() if value}
    return {**facts, **own, "method": method, **whole}


def revision_of(setup: Setup) -> int:
    """How often the numbers of these settings have changed: a method's own, and once those of rates that decay."""
    return setup.method.revision + (setup.train.lr_decay < 1)


def fingerprint(arch: Arch, seed: int) -> str:
    """A digest of where a network starts and what it answers: two networks of one name do not share a run."""
    digest = hashlib.blake2b(digest_size=8)
    tensors = arch.init(rng.seed_of(seed, "init"))
    with torch.no_grad():
        probe = torch.linspace(0, 1, math.prod(arch.input_shape)).reshape(1, *arch.input_shape)
        logits = arch(tensors, probe).logits
    for name, leaf in {**tensors, "logits": (logits * 1e3).round()}.items():  # coarse: the same on every machine
        digest.update(f"{name}{tuple(leaf.shape)}{leaf.dtype}".encode())
        digest.update(leaf.contiguous().numpy().tobytes())
    return digest.hexdigest()


def experiment_of(config: Mapping[str, Any], folder: Path) -> Experiment:
    """The experiment of one method and one seed whose run this is."""
    where = str(folder / "config.toml")
    for missing in (key for key in ("format", "seed", "task-hash", "networks", "method") if key not in config):
        raise UserError(f"{where} is not a run's: it has no {missing!r}")
    settings = {key: value for key, value in config.items() if key not in FACTS}
    settings["split"] = {"stratify": False, **settings.get("split", {})}  # whoever stratified wrote it down
    return Experiment.parse(
        {**settings, "method": [config["method"]], "seeds": [config["seed"]], "baselines": False}, where
    )


def check_code(config: Mapping[str, Any], setup: Setup, folder: Path) -> None:
    """A method of the user's own may not be what it was."""
    if config.get("code", "") != code_digest(type(setup.method)):
        raise UserError(f"the code of method {setup.spec.name!r} has changed since {folder} was trained")
