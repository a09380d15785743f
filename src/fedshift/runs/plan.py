"""What an experiment will run: one job for every method, variant and seed, made and checked before anything runs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from fedshift.data.audit import short_notes
from fedshift.data.pool import Pool
from fedshift.data.task import Task
from fedshift.engines.base import Compute, Engine
from fedshift.errors import HostError, UserError
from fedshift.experiment.schema import Experiment
from fedshift.runs.identity import config_of
from fedshift.runs.own_network import surplus
from fedshift.runs.private import affordable, check_counted
from fedshift.runs.progress import Reporter
from fedshift.runs.session import Session
from fedshift.runs.setup import EACH, Network, Setup, make_setup, make_task, make_twin, with_baselines
from fedshift.store import files
from fedshift.store.folder import DONE, RunFolder
from fedshift.store.lock import RunLock, check_free
from fedshift.store.plans import PLAN

MOST_RUNS = 10_000


@dataclass(frozen=True)
class Twin:
    """The task with validation images in place of test images: made when it is asked for, once in every process."""

    experiment: Experiment
    seed: int
    data: Pool | Task | None

    @cached_property
    def _task(self) -> Task:
        return make_twin(self.experiment, self.seed, self.data)

    def __call__(self) -> Task:
        """That task; raises a UserError if there is none."""
        return self._task


@dataclass(frozen=True)
class Job:
    """One training: a method of one variant of the experiment under one seed."""

    experiment: Experiment
    point: Mapping[str, Any]  # of the sweep
    setup: Setup
    task: Task
    seed: int
    folder: RunFolder
    config: Mapping[str, Any]
    twin: Twin
    lost: int = 0  # rounds that have told something about clients and are run again, with other noise

    @property
    def rounds(self) -> int:
        """The experiment's rounds and those a method adds to them, or as many as a budget of epsilon allows."""
        method, privacy = self.setup.method, self.setup.privacy
        whole = self.experiment.rounds + (method.extra_rounds if self.experiment.rounds else 0)
        if privacy is None:
            return whole
        return affordable(privacy, self.experiment.participation, whole, method, self.lost)

    @property
    def chosen_from(self) -> int:
        """The first round whose state validation may choose: before a method's own rounds its models are half-trained."""
        return int(self.config.get("chosen-from", 0))

    @property
    def title(self) -> str:
        """What people call it."""
        return f"{self.setup.spec.title} seed {self.seed}"

    @property
    def model(self) -> str:
        """Whose model is scored: everybody's, or each client's own."""
        return "personal" if self.setup.method.personal else "global"

    def session(self, engine: Engine, compute: Compute, say: Reporter) -> Session:
        """The session that trains it."""
        variant = self.experiment
        note = cache(lambda text: say.note(f"{self.title}: {text}"))  # each thing is said once
        moved = partial(say.moved, self.title)
        return Session(
            self.setup, self.task, engine, compute, self.seed, variant.rounds, variant.participation, note, moved
        )


def planned(
    experiment: Experiment, out: Path, network: Network | None, data: Pool | Task | None, say: Reporter
) -> Iterator[Job]:
    """Everything that will be run, made and checked before anything runs."""
    experiment = each_in_turn(experiment, data)
    count = math.prod(map(len, experiment.sweep.values())) * len(experiment.seeds) * len(with_baselines(experiment))
    if count > MOST_RUNS:
        raise UserError(f"this experiment asks for {count:,} runs; at most {MOST_RUNS:,} are planned at once")
    told = cache(say.note)  # of several seeds and points only once
    for point, variant in experiment.variants():
        for seed in variant.seeds:
            say.doing(f"preparing data, seed {seed}")
            task = make_task(variant, seed, data)
            twin = Twin(variant, seed, data)
            _check_means(variant, task)
            for note in short_notes(task) if variant.split.get("stratify") else ():  # presets are as published
                told(note)
            for spec in with_baselines(variant):
                setup = make_setup(variant, spec, task, network)
                check_counted(setup.privacy, setup.method, variant, spec.title)
                for note in filter(None, (surplus(m.arch, len(task.classes)) for m in setup.methods.values())):
                    told(note)
                if len(setup.methods) > 1:  # methods that cannot mix networks say so here
                    setup.method.init_server(
                        {name: m.arch.init(0) for name, m in setup.methods.items()}, (), task.ids[:0]
                    )
                setup.method.prepare_task(task)  # a method refuses a task it cannot work on now, not after hours
                config = config_of(variant, spec, point, seed, task, setup)
                folder = RunFolder.of(out, experiment.name, spec.title, seed, config)
                yield Job(variant, point, setup, task, seed, folder, config, twin)


def each_in_turn(experiment: Experiment, data: Pool | Task | None = None) -> Experiment:
    """The experiment; with ``[split] unseen = "each"`` one that leaves out every client in turn, as a sweep does.

    >>> each_in_turn(Experiment(split={"unseen": "each"})).sweep
    {'split.unseen': ['pen', 'paper', 'china', 'flower', 'font']}
    """
    if experiment.split.get("unseen") != EACH:
        return experiment
    if isinstance(data, Task):
        raise UserError(f'[split] unseen = "{EACH}" divides a pool; a task of your own is divided already')
    clients = make_task(experiment, experiment.seeds[0], data).clients
    if len(clients) < 2:
        raise UserError(f'[split] unseen = "{EACH}" needs two clients or more, not {len(clients)}')
    split = {key: value for key, value in experiment.split.items() if key != "unseen"}
    sweep = {**experiment.sweep, "split.unseen": [client.name for client in clients]}
    return experiment.model_copy(update={"split": split, "sweep": sweep})


def _check_means(variant: Experiment, task: Task) -> None:
    """A task of the user's own need not have the streams the experiment names."""
    for name in variant.evaluate.mean_of:
        if name not in task.streams:
            raise UserError(f"[evaluate] mean-of: the task has no stream {name!r}; it has: {', '.join(task.streams)}")
    if "mean" in task.streams:
        raise UserError("a stream cannot be called 'mean'")


def check_unfinished(jobs: Sequence[Job], resume: bool, restart: bool) -> None:
    """Refuse to throw work away silently, or to disturb a process that is at it."""
    paths = [job.folder.path for job in jobs]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise UserError(f"two parts of this experiment are the same run ({twice}); remove one of them")
    for job in jobs:
        if not job.folder.done:
            check_free(job.folder.path)
        elif restart and job.folder.unsound():
            check_free(job.folder.path)
            job.folder.reopen()
        else:
            job.folder.history()  # raises if it is damaged: it cannot be made again
    if resume or restart:
        return
    for job in jobs:
        if not job.folder.done and (job.folder.path / DONE).exists():
            job.folder.ending()  # raises, and says what to do
        if not job.folder.done and job.folder.begun:
            state = [path.stem.removeprefix("ckpt-") for path in job.folder.checkpoints()[-1:]]
            when = f"after round {int(state[0])} of {job.rounds}" if state else "and has no checkpoint"
            raise UserError(
                f"{job.folder.path} was interrupted {when}: add --resume to go on, or --restart to begin again"
            )


def check_writable(jobs: Sequence[Job]) -> None:
    """Find out before hours of training, not after."""
    try:
        for job in jobs:
            job.folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        where = jobs[0].folder.path.parents[2]
        raise HostError(f"{where} cannot hold the runs ({error.strerror}); choose another folder with --out") from None


def write_plan(jobs: Sequence[Job]) -> None:
    """Say beside the runs which there will be, for who watches them."""
    base = jobs[0].folder.path.parents[1]
    runs = [
        {
            "name": job.title,
            "seed": job.seed,
            "rounds": job.rounds,
            "folder": str(job.folder.path.relative_to(base)),
            "adapters": [adapter.title for adapter in job.setup.spec.adapters],
        }
        for job in jobs
    ]
    with RunLock(base):  # for a moment: no other process may be writing one where what killed ones left is swept
        files.sweep(base)
        RunFolder(base).write(PLAN, json.dumps({"runs": runs}, indent=1) + "\n")
