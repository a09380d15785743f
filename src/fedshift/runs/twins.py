"""Validation twins: what advice rests on. Every stream's shift on validation images, so that no test label is needed.

For unseen clients the training clients stand, one at a time: each is served as if it had never taken part, from its
unlabelled validation images alone. The models have seen its training images, so the level of such a score is too high;
but for all adapters alike, and it is their differences that advice compares.
"""

from __future__ import annotations

from fedshift.data.task import Task
from fedshift.errors import UserError
from fedshift.runs.calibrate import as_unseen
from fedshift.runs.deployment import Deployment
from fedshift.runs.described import remade_by_stream
from fedshift.runs.plan import Job
from fedshift.runs.progress import Reporter
from fedshift.runs.served import Served
from fedshift.runs.session import Session


def has_twin(job: Job, say: Reporter) -> bool:
    """Whether there are twins; if not, it is said why there will be no advice."""
    try:
        return bool(job.twin().streams)
    except UserError as error:
        say.note(f"there will be no advice on this experiment: {error}")
        return False


def twin_of(job: Job, population: str) -> Task:
    """The twin task of those who trained, or with them in the place of unseen clients."""
    twin = job.twin()
    return twin if population == "clients" else as_unseen(twin)


def twin_models(job: Job, session: Session, deployment: Deployment) -> list[Served]:
    """The models that are scored on twins: of those who trained, and as unseen ones where there are such."""
    tested = any(len(client.test) for client in job.task.clients)
    models = [Served(job.model, "clients", deployment.trained())] if tested else []
    if job.task.unseen:
        twin = twin_of(job, "unseen")
        remade = remade_by_stream(session, deployment, twin)
        models.append(Served(job.model, "unseen", session.unseen(deployment, twin), remade=remade))
    return [served for served in models if served.trees]
