"""A finished run, made again from its folder alone: its settings, its method and what it keeps for newcomers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fedshift.core.adapter import Adapter
from fedshift.core.method import Method
from fedshift.core.registry import ADAPTERS
from fedshift.data.task import Task
from fedshift.errors import UserError
from fedshift.experiment.schema import AdapterSpec, Experiment, MethodSpec, ModelSpec
from fedshift.results.collect import find_runs
from fedshift.runs.deployment import Welcome, entries_of
from fedshift.runs.evaluate import adapters_of
from fedshift.runs.identity import check_code, experiment_of
from fedshift.runs.setup import Network, Setup, make_setup
from fedshift.store.folder import RunFolder, read_config, title_of


@dataclass(frozen=True)
class Choice:
    """What a newcomer asks of a run."""

    network: str
    model: ModelSpec
    method: Method  # on this network
    adapter: AdapterSpec


@dataclass(frozen=True)
class Trained:
    """A run that clients can join."""

    folder: RunFolder
    experiment: Experiment
    setup: Setup
    welcome: Welcome

    @property
    def spec(self) -> MethodSpec:
        """The method's words."""
        return self.setup.spec

    def choice(self, network: str | None, adapter: str | None) -> Choice:
        """One of the run's networks, by default the first one, with an adapter that fits; or a sentence on why not."""
        names = list(self.setup.methods)
        name = names[0] if network is None else network
        if name not in names:
            raise UserError(f"{self.folder.path} has no network {name!r}; it has: {', '.join(names)}")
        return Choice(
            name,
            self.experiment.models[names.index(name)],
            self.setup.methods[name],
            choose_adapter(self.scored, adapter),
        )

    def adapter(self, chosen: Choice) -> Adapter:
        """The adapter that was chosen, for models of the round that serves."""
        return self.setup.adapter(chosen.adapter, chosen.method, self.welcome.now)

    @property
    def scored(self) -> dict[str, AdapterSpec]:
        """The adapters the run was scored with, by label."""
        return adapters_of(self.folder.scores())


def read_run(path: Path, network: Network | None = None) -> Trained:
    """What a run folder says; ``network`` is the user's own, if it was trained with one."""
    config = read_config(path)
    experiment = experiment_of(config, path)
    welcome = Welcome.load(path)
    (spec,) = experiment.method
    lost = _lost_weights(experiment, spec)
    if lost:  # only where a network starts from: what was trained is in the run folder
        spec = spec.model_copy(update={"model": {**spec.model, "weights": ""}})
    setup = make_setup(experiment, spec, placeholder(welcome.shape, welcome.classes), network)
    if lost and any(method.joining_phases() for method in setup.methods.values()):
        raise UserError(f"a newcomer of {spec.title!r} starts from the weights file {lost}, which is not there")
    check_code(config, setup, path)
    if {name: entries_of(method.arch) for name, method in setup.methods.items()} != welcome.networks:
        raise UserError(
            f"{path} was trained with another network than its config.toml makes now; if it is your own, join in Python: "
            "fedshift.join.join(..., network=...)"
        )
    return Trained(RunFolder(path), experiment, setup, welcome)


def placeholder(shape: tuple[int, int, int], classes: Sequence[str]) -> Task:
    """A task without images: all that making a network takes.

    >>> placeholder((3, 8, 8), ["cat", "dog"]).shape
    (3, 8, 8)
    """
    nothing = torch.zeros(0, dtype=torch.int64)
    return Task(torch.zeros(0, *shape, dtype=torch.uint8), nothing, nothing, tuple(classes), ())


def _lost_weights(experiment: Experiment, spec: MethodSpec) -> str:
    """The file a network started from, if it is not on this machine."""
    files = [str({**model.options(), **spec.model}.get("weights", "")) for model in experiment.models]
    return next((file for file in files if file and not Path(os.path.expandvars(file)).expanduser().is_file()), "")


def choose_run(path: Path, method: str | None = None, seed: int | None = None) -> Path:
    """The one finished run that is meant: a run folder, or one below a folder, by method and seed if there are several."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is not a run folder")
    if (path / "metrics.jsonl").is_file() and not (path / "done").is_file():
        raise UserError(f"{path} is not finished: go on with fedshift run ... --resume")
    runs = {run: _identity(run) for run in find_runs(path)}
    wanted = {
        run for run, (title, number) in runs.items() if method in (None, title) and (seed is None or seed == number)
    }
    if len(wanted) == 1:
        return wanted.pop()
    asked = [f"method {method!r}"] * (method is not None) + [f"seed {seed}"] * (seed is not None)
    listed = _listed([run.relative_to(path).as_posix() for run in runs if run in wanted or not wanted])
    if not wanted:
        raise UserError(f"{path} has no finished run of {' and '.join(asked)}; it has: {listed}")
    raise UserError(
        f"{path} holds {len(wanted)} finished runs, and a client joins one: add --method and --seed, or name one of them: "
        f"{listed}"
    )


def _identity(run: Path) -> tuple[str, int]:
    """A run's method and seed."""
    config = read_config(run)
    try:
        return title_of(config), int(config["seed"])
    except (LookupError, TypeError, AttributeError, ValueError):
        raise UserError(f"{run / 'config.toml'} is not a run's") from None


def _listed(names: Sequence[str], most: int = 30) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def choose_adapter(scored: Mapping[str, AdapterSpec], name: str | None) -> AdapterSpec:
    """A run's adapter by label or name, with its options; any other registered one with its defaults.

    Nothing asked for is the run's adapter that works with more than the model (FedTTA's with its learnt loss), if there is
    one such: the method was trained for it. Otherwise it is no adaptation, unless one other adapter alone was scored.

    >>> scored = {"tent lr=0.01": AdapterSpec(name="tent", label="tent lr=0.01", lr=0.01)}
    >>> choose_adapter(scored, "tent").options()
    {'lr': 0.01}
    >>> choose_adapter(scored, None).title, choose_adapter({**scored, "none": AdapterSpec(name="none")}, None).title
    ('tent lr=0.01', 'none')
    >>> choose_adapter(scored, "t3a").options()
    {}
    """
    if name is None:
        special = [spec for spec in scored.values() if not ADAPTERS[spec.name].make.needs <= {"model"}]
        if len({spec.name for spec in special}) == 1:
            return min(special, key=lambda spec: len(spec.options()))  # the plainest
        if "none" in scored or not scored:
            return AdapterSpec(name="none")
        if len(scored) == 1:
            return next(iter(scored.values()))
        raise UserError(
            f"choose an adapter with --adapter: none, or {', '.join(scored)}, which the run was scored with"
        )
    if name in scored:
        return scored[name]
    same = {title: spec for title, spec in scored.items() if spec.name == name}
    if len(same) > 1:
        raise UserError(
            f"the run was scored with several {name!r}; choose one by its label: {', '.join(map(repr, same))}"
        )
    if same:
        return next(iter(same.values()))
    return AdapterSpec(name=ADAPTERS[name].name)
