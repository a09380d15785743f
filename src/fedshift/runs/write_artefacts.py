"""At the end of a run: an artefact for every client that has a model, of the round that validation chose."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fedshift.core.context import Context
from fedshift.core.tree import Tree
from fedshift.data.task import Client, Task
from fedshift.engines.base import Compute
from fedshift.engines.reference import prepared
from fedshift.experiment.schema import AdapterSpec, Experiment
from fedshift.runs.artefact import Artefact, Part, described, difference
from fedshift.runs.artefact_files import CONFIG, read_config
from fedshift.runs.deployment import Deployment
from fedshift.runs.known import known_of
from fedshift.runs.plan import Job
from fedshift.runs.session import Session
from fedshift.runs.setup import Setup
from fedshift.store.files import Damaged, attempt, parsed
from fedshift.store.folder import artefacts_folder
from fedshift.store.seal import read_table, table_text

COMPLETE = "complete"  # the last file that is written
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
        if target.is_dir():
            if _sound(target, job.folder.strict, []):  # of a run that was interrupted while it wrote them
                continue
            shutil.rmtree(target)
        artefact = artefact_of(job, session, deployment, name, tree, adapters)
        key = id(tree["model"][artefact.method.arch.parameters[0]])
        artefact.save(target, like=None if session.setup.method.personal else written.get(key))
        written[key] = target
    job.folder.write(f"{artefacts_folder(chooser)}/{COMPLETE}", table_text({"folders": list(map(folder_name, trees))}))


def lacks_artefacts(job: Job, chooser: str, damaged: list[Damaged]) -> bool:
    """Whether any is missing or damaged."""
    folder = job.folder.path / artefacts_folder(chooser)
    if not (folder / COMPLETE).exists():
        return True
    if not job.folder.strict and not (folder / COMPLETE).stat().st_size:  # an older version wrote no names
        return False
    found = attempt(lambda: read_table(folder / COMPLETE), damaged)
    names = (
        None if found is None else attempt(lambda: parsed(folder / COMPLETE, lambda: list(found["folders"])), damaged)
    )
    if names is None:
        return True
    return bool([name for name in names if not _sound(folder / name, job.folder.strict, damaged)])


def _sound(folder: Path, strict: bool, damaged: list[Damaged]) -> bool:
    return (folder / CONFIG).exists() and attempt(partial(read_config, folder, strict), damaged) is not None


def artefact_of(
    job: Job, session: Session, deployment: Deployment, name: str, tree: Tree, adapters: Sequence[AdapterSpec]
) -> Artefact:
    """What one client of a run serves with: its deployed tree, and what every adapter makes of its training data."""
    client = job.task.client(name)
    origin, network = _origin(job, deployment), session.arch_of(client)
    return made_of(
        tree,
        client,
        job.task,
        session.setup,
        job.experiment,
        network,
        deployment.ctx,
        adapters,
        origin,
        session.compute,
    )


def made_of(
    tree: Tree,
    client: Client,
    task: Task,
    setup: Setup,
    experiment: Experiment,
    network: str,
    ctx: Context,
    adapters: Sequence[AdapterSpec],
    origin: Mapping[str, Any],
    compute: Compute,
) -> Artefact:
    """The artefact of a deployed tree, with what every adapter makes of the client's training data."""
    config = described(client.name, setup, experiment, network, ctx, task.classes, adapters, origin)
    own = replace(setup, methods={network: setup.methods[network]})
    specs = [AdapterSpec(**entry) for entry in config["adapter"]]  # with all settings, as they are at this round
    parts: dict[str, Part] = {}
    for spec in specs:
        adapter = own.adapter(spec, own.method)
        ready = prepared(adapter, tree, task, client, setup.train.batch_size, compute)
        parts[spec.title] = Part(spec, difference(ready, tree))
    known = known_of(own.method, tree, task, client, compute)
    return Artefact(own, tree, parts, task.classes, {**config, "unseen": client in task.unseen}, known)


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
    ('clinic 7', '%2E.%2Fetc')
    """
    name = quote(client, safe=" ()[]{}+,=@!'&;")
    return f"%2E{name[1:]}" if name.startswith(".") else name  # a dot begins what is not finished
