"""Runs an experiment: every method and seed, then every adapter, into folders that are never run twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from fedshift.data.pool import Pool
from fedshift.data.task import Task
from fedshift.engines.auto import device_for, engine_for
from fedshift.engines.base import Compute
from fedshift.engines.torch_flags import steady
from fedshift.errors import UserError
from fedshift.experiment.schema import Experiment
from fedshift.results.collect import collect
from fedshift.results.result import Result
from fedshift.runs.finish import finish
from fedshift.runs.identity import config_of
from fedshift.runs.plan import Job
from fedshift.runs.progress import Reporter, Silent
from fedshift.runs.setup import PRECISIONS, Network, make_setup, make_task, with_baselines
from fedshift.runs.train import groups
from fedshift.runs.workers import side_by_side
from fedshift.store.folder import RunFolder


def run(
    experiment: Experiment,
    out: str | Path = "runs",
    *,
    engine: str = "auto",
    device: str = "auto",
    resume: bool = False,
    restart: bool = False,
    processes: int = 1,
    network: Network | None = None,
    data: Pool | Task | None = None,
    reporter: Reporter | None = None,
) -> Result:
    """Run an experiment and return its results.

    ``network`` is your own ``nn.Module`` (or a function that makes one) instead of ``[model]``; ``data`` your own pool or
    task instead of ``[data]``. Finished runs are read, not run again; unfinished ones need ``resume`` (go on from the
    last checkpoint) or ``restart`` (begin again). ``processes``: so many runs at the same time, a process for each.

    >>> import tempfile
    >>> small = Experiment(rounds=1, baselines=False, data={"size": 8}, model={"name": "mlp", "hidden": [8]})
    >>> result = run(small, out=tempfile.mkdtemp(), engine="sequential")
    >>> [row.method for row in result.rows]
    ['fedavg']
    """
    say = reporter or Silent()
    if processes < 1:
        raise UserError(f"at least one run must be made at a time, not {processes}")
    compute = Compute(device_for(device), PRECISIONS[experiment.precision])
    with steady(experiment.precision == "fast"):
        jobs = list(_jobs(experiment, Path(out), network, data, say))
        _check_unfinished(jobs, resume, restart)
        chosen, worker = engine_for(
            engine,
            compute,
            any(method.arch.has_convolution for job in jobs for method in job.setup.methods.values()),
            max(len(job.task.clients) for job in jobs),
        )
        _check_writable(Path(out), jobs)
        if processes > 1 and chosen == "parallel":  # the cores are taken
            chosen = "sequential"
        say.plan([(job.setup.spec.title, job.seed, job.rounds) for job in jobs], chosen, str(compute.device))
        try:
            together = groups(jobs, worker, compute)
            if processes > 1:
                untrained = [group for group in together if not all(job.folder.done for job in group)]
                side_by_side(untrained, processes, chosen, compute, resume, say)
                together = [group for group in together if group not in untrained]
            for group in together:
                finish(group, worker, compute, resume, say)
        finally:
            worker.close()
            say.close()
    return collect({job.folder.path: [spec.title for spec in job.setup.spec.adapters] for job in jobs})


def _jobs(
    experiment: Experiment, out: Path, network: Network | None, data: Pool | Task | None, say: Reporter
) -> Iterator[Job]:
    """Everything that will be run, made and checked before anything runs."""
    name = experiment.name or "experiment"
    for point, variant in experiment.variants():
        for seed in variant.seeds:
            say.doing(f"preparing data, seed {seed}")
            task = make_task(variant, seed, data)
            _check_means(variant, task)
            for spec in with_baselines(variant):
                setup = make_setup(variant, spec, task, network)
                if len(setup.methods) > 1:  # methods that cannot mix networks say so here
                    setup.method.server_init({name: m.arch.init(0) for name, m in setup.methods.items()}, ())
                setup.method.prepare_task(task)  # a method refuses a task it cannot work on now, not after hours
                config = config_of(variant, spec, point, seed, task, setup)
                yield Job(variant, point, setup, task, seed, RunFolder.of(out, name, spec.title, seed, config), config)


def _check_means(variant: Experiment, task: Task) -> None:
    """A task of the user's own need not have the streams the experiment names."""
    for name in variant.evaluate.mean_of:
        if name not in task.streams:
            raise UserError(f"[evaluate] mean-of: the task has no stream {name!r}; it has: {', '.join(task.streams)}")
    if "mean" in task.streams:
        raise UserError("a stream cannot be called 'mean'")


def _check_unfinished(jobs: Sequence[Job], resume: bool, restart: bool) -> None:
    """Refuse to throw work away silently."""
    paths = [job.folder.path for job in jobs]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise UserError(f"two parts of this experiment are the same run ({twice}); remove one of them")
    if resume or restart:
        return
    for job in jobs:
        if not job.folder.done and job.folder.checkpoints():
            state = job.folder.checkpoints()[-1].stem.removeprefix("ckpt-")
            raise UserError(
                f"{job.folder.path} was interrupted after round {int(state)} of {job.rounds}: add --resume to "
                "go on, or --restart to begin again"
            )


def _check_writable(out: Path, jobs: Sequence[Job]) -> None:
    """Find out before hours of training, not after."""
    try:
        for job in jobs:
            job.folder.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out} cannot hold the runs ({error.strerror}); choose another folder with --out") from None
