"""All that runs still lack: training, scores, costs, notes."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import replace

from fedshift.engines.base import Compute, Engine
from fedshift.runs.evaluate import annotate, annotated, score, scored
from fedshift.runs.flops import count
from fedshift.runs.plan import Job
from fedshift.runs.private import told_by
from fedshift.runs.progress import Reporter
from fedshift.runs.session import Session
from fedshift.runs.train import train
from fedshift.store.costs import measured, published_by
from fedshift.store.files import MISSING, Damaged, attempt
from fedshift.store.folder import CONFIG
from fedshift.store.found import read_config
from fedshift.store.lock import locked
from fedshift.store.toml import toml_text


def finish(jobs: Sequence[Job], engine: Engine, compute: Compute, resume: bool, say: Reporter) -> None:
    """Train these runs together, then bring the scores and the ledger of each up to date; what is there stays.

    No other process may write into their folders meanwhile; one that lacks nothing is only read, by anybody.
    """
    with locked(job.folder.path for job in jobs if not _complete(job)):
        for job in jobs:
            job.folder.sweep()
            _mend_config(job, say)
        sessions = [job.session(engine, compute, say) for job in jobs]
        train(jobs, sessions, resume, say)
        for job, session in zip(jobs, sessions, strict=True):
            score(job, session, say)
            _account(job, session, say)
            annotate(job)


def _complete(job: Job) -> bool:
    if not job.folder.done or attempt(job.folder.costs, []) is None or not annotated(job):
        return False
    return attempt(lambda: read_config(job.folder.path), []) is not None and scored(job)


def _mend_config(job: Job, say: Reporter) -> None:
    """The settings of a run are known from the name of its folder, so that damaged ones can be written again."""
    if not job.folder.begun:
        return
    damaged, text = list[Damaged](), toml_text(job.config)
    found = attempt(lambda: read_config(job.folder.path), damaged)
    if found is not None and not job.folder.strict and found != tomllib.loads(text):  # half of a file may be one too
        damaged.append(Damaged(job.folder.path / CONFIG, "it has other settings"))
    for one in damaged:
        job.folder.write_config(text)
        say.note(f"{one.path} was {'missing' if one.why == MISSING else f'damaged ({one.why})'} and is written again")


def _account(job: Job, session: Session, say: Reporter) -> None:
    """The cost ledger: what can be counted, and what all rounds, also those before an interruption, were like."""
    damaged: list[Damaged] = []
    if attempt(job.folder.costs, damaged) is not None:
        return
    for one in damaged:
        say.note(f"{one.path} was damaged ({one.why}) and is made again")
    say.doing(f"{job.title}: counting costs")
    counted = count(session, job.rounds)
    costs = measured(counted, job.folder.history().rounds, published_by(job.folder.scores([])))
    if job.lost and job.setup.privacy is not None:  # no line tells of a round that is not among the run's
        told = told_by(job.setup.privacy, job.experiment.participation, job.rounds, job.setup.method, job.lost)
        costs = replace(costs, epsilon=told["epsilon"])
    job.folder.write_costs(costs)
