"""Runs an experiment: every method and seed, then every adapter, into folders that are never run twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedshift.data.pool import Pool
from fedshift.data.task import Task
from fedshift.engines.auto import compute_for, engine_for
from fedshift.engines.base import Compute
from fedshift.engines.scratch import sweep
from fedshift.engines.torch_flags import steady
from fedshift.errors import UserError
from fedshift.experiment.schema import Experiment
from fedshift.results.collect import collect
from fedshift.results.result import Result
from fedshift.runs.filling import overlapping, processes_for
from fedshift.runs.finish import finish
from fedshift.runs.notebook import usual
from fedshift.runs.own_network import headed
from fedshift.runs.plan import Job, check_unfinished, check_writable, planned, write_plan
from fedshift.runs.progress import Reporter, Silent
from fedshift.runs.setup import Network, split_as_own
from fedshift.runs.space import check_space
from fedshift.runs.tracking import Tracking
from fedshift.runs.train import groups
from fedshift.runs.workers import side_by_side
from fedshift.store.lock import Occupied
from fedshift.track.base import Tracker


def run(
    experiment: Experiment | str | Path | None = None,
    out: str | Path = "runs",
    *,
    engine: str = "auto",
    device: str = "auto",
    resume: bool = False,
    restart: bool = False,
    processes: int | None = None,
    network: Network | None = None,
    head: str | None = None,
    data: Pool | Task | Mapping[str, Any] | None = None,
    reporter: Reporter | None = None,
    trackers: Sequence[Tracker] = (),
    **changes: Any,
) -> Result:
    """Run an experiment and return its results.

    ``experiment`` is one, a TOML file, a preset's name, or nothing for the demo. Further keywords change its keys:
    ``run("mine.toml", rounds=5, train={"lr": 0.1})``; tables merge, as in a file that extends another.

    ``network`` is your own ``nn.Module`` (or a function that makes one) instead of ``[model]``, ``head`` the name of its
    last linear layer, if it is not the last one made; ``data`` your own pool or
    task instead of ``[data]``. Finished runs are read, not run again; unfinished ones need ``resume`` (go on from the
    last checkpoint) or ``restart`` (begin again). ``processes``: so many runs at the same time, in as many processes;
    left out, so many as fill a GPU, and one elsewhere.
    ``trackers`` are told everything that is written (:mod:`fedshift.track`).
    In a notebook a bar shows how far it is; ``reporter`` is told of everything instead.

    >>> import tempfile
    >>> small = Experiment(rounds=1, baselines=False, data={"size": 8}, model={"name": "mlp", "hidden": [8]})
    >>> result = run(small, out=tempfile.mkdtemp(), engine="sequential")
    >>> [row.method for row in result.rows]
    ['fedavg']
    """
    say = reporter or usual()
    if isinstance(data, Mapping):  # the table [data]
        changes, data = {**changes, "data": data}, None
    jobs = plan(_meant(experiment, changes), out, network=headed(network, head), data=data, reporter=say)
    return carry_out(
        jobs,
        engine=engine,
        device=device,
        resume=resume,
        restart=restart,
        processes=processes,
        reporter=say,
        trackers=trackers,
    )


def _meant(experiment: Experiment | str | Path | None, changes: Mapping[str, Any]) -> Experiment:
    if isinstance(experiment, Experiment):
        return experiment.changed(changes) if changes else experiment
    return Experiment.load(experiment, changes=changes)


def plan(
    experiment: Experiment,
    out: str | Path = "runs",
    *,
    network: Network | None = None,
    data: Pool | Task | None = None,
    reporter: Reporter | None = None,
) -> list[Job]:
    """The runs of an experiment, made and checked: whatever can be wrong is found here, before anything runs."""
    with steady():
        return list(planned(split_as_own(experiment, data), Path(out), network, data, reporter or Silent()))


def carry_out(
    jobs: Sequence[Job],
    *,
    engine: str = "auto",
    device: str = "auto",
    resume: bool = False,
    restart: bool = False,
    processes: int | None = None,
    reporter: Reporter | None = None,
    trackers: Sequence[Tracker] = (),
) -> Result:
    """Train and score planned runs of one experiment, and return their results; options as in :func:`run`."""
    say = Tracking(reporter or Silent(), trackers, jobs)
    if resume and restart:
        raise UserError("interrupted runs can be gone on with (resume) or begun again (restart), not both")
    if processes is not None and processes < 1:
        raise UserError(f"at least one run must be made at a time, not {processes}")
    sweep()  # what killed runs left in memory
    compute = compute_for(device, jobs[0].experiment.precision)
    with steady(compute.tf32):
        check_unfinished(jobs, resume, restart)
        chosen, worker = engine_for(
            engine,
            compute,
            any(method.arch.has_convolution for job in jobs for method in job.setup.methods.values()),
            max(len(job.task.clients) for job in jobs),
        )
        check_writable(jobs)
        check_space(jobs, jobs[0].folder.path.parents[2])
        write_plan(jobs)
        if processes is not None and processes > 1 and chosen in ("parallel", "ray"):  # the cores are taken
            chosen = "sequential"
        say.plan([(job.setup.spec.title, job.seed, job.rounds) for job in jobs], chosen, str(compute.device))
        try:
            together = groups(jobs, worker, compute)
            untrained = [group for group in together if not all(job.folder.done for job in group)]
            with _seats(untrained, processes, chosen, compute) as count:
                if count > 1:
                    if processes is None:
                        say.note(f"{count} runs are made at a time, which fills the GPU; --jobs 1 makes one")
                    side_by_side(untrained, count, chosen, compute, resume, say)
                    together = [group for group in together if group not in untrained]
            occupied = list[str]()
            for group in together:
                try:
                    check_unfinished(group, resume, restart)  # another process may have been at it since the first look
                    finish(group, worker, compute, resume, say)
                except Occupied as error:  # the others are finished before it is said
                    occupied.append(str(error))
            if occupied:
                raise UserError("; ".join(occupied))
        finally:
            worker.close()
            say.finish()
            say.close()
    return collect({job.folder.path: [spec.title for spec in job.setup.spec.adapters] for job in jobs})


@contextmanager
def _seats(groups: Sequence[Sequence[Job]], asked: int | None, engine: str, compute: Compute) -> Iterator[int]:
    """How many of these groups are run at a time; meanwhile their kernels overlap, where a GPU can do that."""
    wanted = processes_for(groups, engine, compute) if asked is None else asked
    if wanted < 2:
        yield wanted
        return
    with overlapping(compute) as together:
        yield wanted if together or asked is not None else 1
