"""At the end of a run: an artefact for every client that has a model, of the round that validation chose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fedshift.core.tree import Tree
from fedshift.experiment.schema import AdapterSpec
from fedshift.runs.artefact import Artefact, Part, described, difference
from fedshift.runs.deployment import Deployment
from fedshift.runs.known import known_of
from fedshift.runs.plan import Job
from fedshift.runs.session import Session
from fedshift.store.folder import artefacts_folder

MOST_CLIENTS = 50  # of a run that nobody has asked for artefacts
MOST_BYTES = 64 << 20


def wanted(job: Job) -> bool:
    """Whether a run writes artefacts: if it is asked to, or else if they are few and small."""
    asked = job.experiment.evaluate.artefacts
    if asked is not None:
        return asked
    clients = len(job.task.clients) + len(job.task.unseen)
    largest = max(sum(leaf.nbytes for leaf in method.arch.init(0).values()) for method in job.setup.methods.values())
    models = clients if job.setup.method.personal else 1  # a model that all share is written once
    return clients <= MOST_CLIENTS and models * largest <= MOST_BYTES


def write_artefacts(
    job: Job,
    session: Session,
    deployment: Deployment,
    trees: Mapping[str, Tree],
    adapters: Sequence[AdapterSpec],
    chooser: str = "",
) -> None:
    """One folder for each client; ``chooser`` is the adapter that chose this round for itself."""
    folder = job.folder.path / artefacts_folder(chooser)
    written: dict[int, Path] = {}  # by the identity of a model's tensors: clients that share one share its file
    for name, tree in trees.items():
        target = folder / folder_name(name)
        if target.is_dir():  # of a run that was interrupted while it wrote them
            continue
        artefact = artefact_of(job, session, deployment, name, tree, adapters)
        key = id(tree["model"][artefact.method.arch.parameters[0]])
        artefact.save(target, like=None if session.setup.method.personal else written.get(key))
        written[key] = target
    job.folder.write(f"{artefacts_folder(chooser)}/complete", "")


def artefact_of(
    job: Job, session: Session, deployment: Deployment, name: str, tree: Tree, adapters: Sequence[AdapterSpec]
) -> Artefact:
    """What one client of a run serves with: its deployed tree, and what every adapter makes of its training data."""
    client = job.task.client(name)
    network = session.arch_of(client)
    setup = replace(session.setup, methods={network: session.setup.methods[network]})
    config = described(
        name,
        session.setup,
        job.experiment,
        network,
        deployment.ctx,
        job.task.classes,
        adapters,
        _origin(job, deployment),
    )
    specs = [AdapterSpec(**entry) for entry in config["adapter"]]  # with all settings, as they are at this round
    made = {spec.title: (spec, setup.adapter(spec, setup.method)) for spec in specs}
    parts = {
        title: Part(spec, difference(session.prepared(own, tree, client), tree)) for title, (spec, own) in made.items()
    }
    known = known_of(setup.method, tree, job.task, client, session.compute)
    return Artefact(setup, tree, parts, job.task.classes, {**config, "unseen": client in job.task.unseen}, known)


def _origin(job: Job, deployment: Deployment) -> dict[str, Any]:
    return {
        "run": job.title,
        "seed": job.seed,
        "round": deployment.ctx.round,
        "selection": "best-val" if job.folder.history().validated else "last",
        "task-hash": job.task.hash,
    }


def folder_name(client: str) -> str:
    """A client's name as that of a folder: any name will do.

    >>> folder_name("clinic 7"), folder_name("../etc")
    ('clinic 7', '..%2Fetc')
    """
    name = quote(client, safe=" ()[]{}+,=@!'&;")
    return name if name not in (".", "..") else name.replace(".", "%2E")
