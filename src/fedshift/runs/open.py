"""A finished run opened from its folder: for show, join, inspect, export, deployment and serving alike."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from fedshift.core.registry import ADAPTERS
from fedshift.data.pool import Pool
from fedshift.data.task import Task
from fedshift.errors import UserError
from fedshift.experiment.schema import AdapterSpec, Experiment, MethodSpec
from fedshift.runs.deployment import Deployment, Snapshot, entries_of, unseen_phases
from fedshift.runs.evaluate import adapters_of
from fedshift.runs.identity import FORMAT, check_code, experiment_of, fingerprint, revision_of
from fedshift.runs.own_network import headed
from fedshift.runs.plan import Job, Twin
from fedshift.runs.setup import Network, Setup, make_setup, make_task, placeholder
from fedshift.store.files import Damaged, attempt
from fedshift.store.folder import RunFolder
from fedshift.store.found import find_runs, read_config, title_of
from fedshift.store.state import State

SELECTIONS = ("best-val", "last")


@dataclass(frozen=True)
class OpenRun:
    """A run folder read back; what needs the run's data or its snapshot is made when it is asked for."""

    folder: RunFolder
    config: Mapping[str, Any]
    experiment: Experiment
    network: Network | None = field(default=None, repr=False)  # the user's own, if it was trained with one

    @property
    def spec(self) -> MethodSpec:
        """The method's words."""
        (spec,) = self.experiment.method
        return spec

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.config["seed"])

    @cached_property
    def scored(self) -> dict[str, AdapterSpec]:
        """The adapters the run was scored with, by label."""
        return adapters_of(self.folder.scores())

    def snapshot(self, adapter: str = "") -> Snapshot:
        """What it keeps for unseen clients, of the round this adapter chose if it chose its own."""
        return Snapshot.load(self.folder.path, adapter)

    @cached_property
    def setup(self) -> Setup:
        """Its method and networks, without its data."""
        snapshot, spec = self.snapshot(), self.spec
        lost = _lost_weights(self.experiment, spec)
        if lost:  # only where a network starts from: what was trained is in the run folder
            spec = spec.model_copy(update={"model": {**spec.model, "weights": ""}})
        nobody = placeholder(snapshot.shape, snapshot.classes)
        setup = make_setup(self.experiment, spec, nobody, self.network, trains=False)
        if lost and any(unseen_phases(method, snapshot.ctx) for method in setup.methods.values()):
            raise UserError(
                f"an unseen client of {spec.title!r} starts from the weights file {lost}, which is not there"
            )
        check_code(self.config, setup, self.folder.path)
        if {name: entries_of(method.arch) for name, method in setup.methods.items()} != snapshot.networks:
            raise UserError(
                f"{self.folder.path} was trained with another network than its config.toml makes now; if it is your own, "
                "join in Python: fedshift.join.join(..., network=...)"
            )
        return setup

    def deployment(self, adapter: str = "") -> Deployment:
        """The deployment of its snapshot, for unseen clients."""
        return self.snapshot(adapter).deployment(self.setup)

    def job(self, known: Task | None = None, data: Pool | Task | None = None) -> Job:
        """The job whose folder this is, with its data; ``known`` is its task where that is this run's.

        A UserError says what is not what it was: the settings' format, the data or the network.
        """
        path = self.folder.path
        made_by, wanted, networks = (self.config[key] for key in ("format", "task-hash", "networks"))
        task = known if known is not None and known.hash == wanted else self._task(wanted, data)
        setup = make_setup(self.experiment, self.spec, task, self.network)
        if (made_by, self.config.get("revision", 0)) != (FORMAT, revision_of(setup)):
            raise UserError(f"{path} was made by another version of fedshift, whose numbers this one cannot make again")
        check_code(self.config, setup, path)
        if {name: fingerprint(method.arch, self.seed) for name, method in setup.methods.items()} != dict(networks):
            raise UserError(
                f"{path} trained another network than the one its settings make now; pass its network in Python"
            )
        point = dict(self.config.get("sweep-point") or {})
        twin = Twin(self.experiment, self.seed, data)
        return Job(self.experiment, point, setup, task, self.seed, self.folder, self.config, twin)

    def _task(self, wanted: Any, data: Pool | Task | None) -> Task:
        path = self.folder.path
        try:
            task = make_task(self.experiment, self.seed, data)
        except UserError as error:
            raise UserError(f"the data of {path} cannot be made again: {error}") from None
        if task.hash != wanted:
            raise UserError(
                f"the data of {path} are not there any more: its settings give task {task.hash} now, "
                f"it was trained on {wanted}"
            )
        return task


def open_run(path: str | Path, network: Network | None = None, head: str | None = None) -> OpenRun:
    """Open a run folder; ``network`` is the user's own, if it was trained with one, and ``head`` as it was then.

    >>> import tempfile
    >>> from fedshift import Experiment, run
    >>> tiny = Experiment(rounds=1, baselines=False, data={"size": 8}, model={"name": "mlp", "hidden": [8]})
    >>> result = run(tiny, out=tempfile.mkdtemp(), engine="sequential")
    >>> opened = open_run(result.folders[0])
    >>> opened.spec.title, opened.seed, list(opened.scored)
    ('fedavg', 0, ['none'])
    """
    folder = Path(path)
    config = read_config(folder)
    return OpenRun(RunFolder(folder), config, experiment_of(config, folder), headed(network, head))


def state_of(folder: RunFolder, select: str, device: torch.device, adapter: str = "") -> State:
    """The state chosen by validation (by that of ``adapter``, if it chose for itself), or the last one."""
    if select not in SELECTIONS:
        raise UserError(f"--select must be {' or '.join(SELECTIONS)}, not {select!r}")
    return folder.best(device, adapter) if select == "best-val" else folder.last(device)


def _lost_weights(experiment: Experiment, spec: MethodSpec) -> str:
    """The file a network started from, if it is not on this machine."""
    files = [str({**model.options(), **spec.model}.get("weights", "")) for model in experiment.models]
    return next((file for file in files if file and not _is_there(file)), "")


def _is_there(weights: str) -> bool:
    """Whether weights can be had again, as far as can be said without asking the hub."""
    where = weights.partition("#")[0]
    return where.startswith("hub:") or Path(os.path.expandvars(where)).expanduser().is_file()


def choose_run(path: Path, method: str | None = None, seed: int | None = None) -> Path:
    """The one finished run that is meant: a run folder, or one below a folder, by method and seed if there are several."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is not a run folder")
    if (path / "metrics.jsonl").is_file() and not (path / "done").is_file():
        raise UserError(f"{path} is not finished: go on with fedshift run ... --resume")
    damaged: list[Damaged] = []
    read = {run: attempt(partial(_identity, run), damaged) for run in find_runs(path)}
    runs = {run: who for run, who in read.items() if who is not None}  # one that is damaged may not be the one
    if not runs:
        raise damaged[0]
    wanted = {
        run for run, (title, number) in runs.items() if method in (None, title) and (seed is None or seed == number)
    }
    if damaged and (not wanted or method is None):  # which may be the one that is meant
        raise damaged[0]
    if len(wanted) == 1:
        return wanted.pop()
    asked = [f"method {method!r}"] * (method is not None) + [f"seed {seed}"] * (seed is not None)
    names = listed([run.relative_to(path).as_posix() for run in runs if run in wanted or not wanted])
    if not wanted:
        raise UserError(f"{path} has no finished run of {' and '.join(asked)}; it has: {names}")
    raise UserError(
        f"{path} holds {len(wanted)} finished runs, and one is wanted: add --method and --seed, or name one of them: "
        f"{names}"
    )


def choose_network(opened: OpenRun, name: str | None) -> str:
    """One of the run's networks, by default the first one."""
    names = list(opened.setup.methods)
    if name is not None and name not in names:
        raise UserError(f"{opened.folder.path} has no network {name!r}; it has: {', '.join(names)}")
    return names[0] if name is None else name


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
        special = [spec for spec in scored.values() if not ADAPTERS[spec.name].make.requires <= {"model"}]
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


def _identity(run: Path) -> tuple[str, int]:
    """A run's method and seed."""
    config = read_config(run)
    return title_of(config), config["seed"]


def listed(names: Sequence[str], most: int = 30) -> str:
    """Names for a sentence.

    >>> listed(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
