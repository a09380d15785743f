"""All that runs still lack: training, scores, costs, notes."""

from __future__ import annotations

import json
from collections.abc import Sequence

from fedshift.engines.base import Compute, Engine
from fedshift.runs.evaluate import annotate, annotated, score, scored
from fedshift.runs.flops import count
from fedshift.runs.plan import Job
from fedshift.runs.progress import Reporter
from fedshift.runs.session import Session
from fedshift.runs.train import train
from fedshift.store.costs import measured, published_by
from fedshift.store.folder import COSTS
from fedshift.store.lock import locked


def finish(jobs: Sequence[Job], engine: Engine, compute: Compute, resume: bool, say: Reporter) -> None:
    """Train these runs together, then bring the scores and the ledger of each up to date; what is there stays.

    No other process may write into their folders meanwhile; one that lacks nothing is only read, by anybody.
    """
    with locked(job.folder.path for job in jobs if not _complete(job)):
        sessions = [job.session(engine, compute, say) for job in jobs]
        train(jobs, sessions, resume, say)
        for job, session in zip(jobs, sessions, strict=True):
            score(job, session, say)
            _account(job, session, say)
            annotate(job)


def _complete(job: Job) -> bool:
    return job.folder.done and scored(job) and job.folder.costs() is not None and annotated(job)


def _account(job: Job, session: Session, say: Reporter) -> None:
    """The cost ledger: what can be counted, and what all rounds, also those before an interruption, were like."""
    if job.folder.costs() is not None:
        return
    say.doing(f"{job.title}: counting costs")
    counted = count(session, job.rounds)
    costs = measured(counted, job.folder.history().rounds, published_by(job.folder.scores()))
    job.folder.write(COSTS, json.dumps(costs.as_dict(), indent=1) + "\n")
