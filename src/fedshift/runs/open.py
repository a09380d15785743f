"""A finished run made again from its folder: its task, its method and its state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fedshift.data.pool import Pool
from fedshift.data.task import Task
from fedshift.errors import UserError
from fedshift.experiment.schema import Experiment
from fedshift.results.collect import points_of
from fedshift.runs.identity import FORMAT, check_code, experiment_of, fingerprint
from fedshift.runs.plan import Job
from fedshift.runs.setup import Network, make_setup, make_task
from fedshift.store.folder import RunFolder, read_config, title_of
from fedshift.store.state import State

SELECTIONS = ("best-val", "last")


def names_of(folders: Sequence[Path]) -> dict[Path, str]:
    """What runs are called: the method, and what else tells them apart; seeds share a name."""
    configs = {path: read_config(path) for path in folders}
    points = points_of(configs)
    return {
        path: ", ".join([title_of(config), *(f"{key} = {value}" for key, value in points[path])])
        for path, config in configs.items()
    }


def rebuilt(
    path: Path, known: Task | None = None, network: Network | None = None, data: Pool | Task | None = None
) -> Job:
    """The job whose folder this is; ``known`` is its task where that is this run's, ``network`` and ``data`` as in a run.

    A UserError says what is not what it was: the settings' format, the data or the network.
    """
    config = read_config(path)
    try:
        made_by, seed, wanted, networks = (config[key] for key in ("format", "seed", "task-hash", "networks"))
    except KeyError as error:
        raise UserError(f"{path / 'config.toml'} is not a run's: it has no {error.args[0]!r}") from None
    if made_by != FORMAT:
        raise UserError(f"{path} was made by another version of fedshift, whose numbers this one cannot make again")
    experiment = experiment_of(config, path)
    task = known if known is not None and known.hash == wanted else _task(path, experiment, seed, wanted, data)
    setup = make_setup(experiment, experiment.method[0], task, network)
    check_code(config, setup, path)
    if {name: fingerprint(method.arch, seed) for name, method in setup.methods.items()} != dict(networks):
        raise UserError(
            f"{path} trained another network than the one its settings make now; pass its network in Python"
        )
    return Job(experiment, dict(config.get("sweep-point") or {}), setup, task, seed, RunFolder(path), config)


def _task(path: Path, experiment: Experiment, seed: int, wanted: Any, data: Pool | Task | None) -> Task:
    try:
        task = make_task(experiment, seed, data)
    except UserError as error:
        raise UserError(f"the data of {path} cannot be made again: {error}") from None
    if task.hash != wanted:
        raise UserError(
            f"the data of {path} are not there any more: its settings give task {task.hash} now, it was trained on {wanted}"
        )
    return task


def state_of(folder: RunFolder, select: str, device: torch.device, adapter: str = "") -> State:
    """The state chosen by validation (by that of ``adapter``, if it chose for itself), or the last one."""
    if select not in SELECTIONS:
        raise UserError(f"--select must be {' or '.join(SELECTIONS)}, not {select!r}")
    try:
        return folder.best(device, adapter) if select == "best-val" else folder.last(device)
    except IndexError:
        raise UserError(f"{folder.path} has no saved state any more") from None
