"""Whose model is exported: a client's of a run, or the one any unseen client would get."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace

import torch

from fedshift.core.tree import Tree
from fedshift.data.task import Client, Task
from fedshift.engines.auto import compute_for, engine_for
from fedshift.engines.sequential import Sequential
from fedshift.engines.torch_flags import steady
from fedshift.errors import UserError
from fedshift.experiment.schema import AdapterSpec
from fedshift.export.adapters import is_plain
from fedshift.runs.artefact import Artefact, Part, described, load
from fedshift.runs.calibrate import calibrated
from fedshift.runs.deployment import Snapshot, unseen_phases
from fedshift.runs.open import OpenRun, choose_network, listed, state_of
from fedshift.runs.progress import Silent
from fedshift.runs.write_artefacts import artefact_of, folder_name
from fedshift.store.folder import artefacts_folder, snapshot_file

UNSEEN = "unseen"  # what the client is called that is nobody in particular


def clients_of(opened: OpenRun) -> list[str]:
    """Everybody a run has scores of."""
    rows = (row for rows in opened.folder.scores().values() for row in rows)
    return list(dict.fromkeys(name for row in rows for name in row.by_client))


def artefact_of_client(opened: OpenRun, client: str, chosen: AdapterSpec | None, device: str) -> Artefact:
    """What one client of a run serves with: as the run has written it, or made again from the run's data."""
    folder, names = opened.folder.path, clients_of(opened)
    if client not in names:
        raise UserError(f"{folder} has no client {client!r}; it has: {listed(names)}")
    chooser = _chooser(opened, chosen)
    written = folder / artefacts_folder(chooser) / folder_name(client)
    return load(written, opened.network) if written.is_dir() else _made(opened, client, chooser, device)


def artefact_of_unseen(opened: OpenRun, chosen: AdapterSpec | None, model: str | None, device: str) -> Artefact:
    """What any unseen client would get, before it shows an image."""
    network, chooser = choose_network(opened, model), _chooser(opened, chosen)
    snapshot, setup, title = opened.snapshot(chooser), opened.setup, opened.spec.title
    method = setup.methods[network]
    if any(phase.data != "public" for phase in unseen_phases(method, snapshot.ctx)):
        raise UserError(
            f"an unseen client of {title!r} gets a model that is made with its own images: use fedshift join --data"
        )
    compute = compute_for(device, opened.experiment.precision)
    with steady(compute.tf32):
        deployment = snapshot.deployment(setup).serving(network)
        trees, _ = deployment.admit(_nobody(snapshot), Sequential(compute), compute)
    if UNSEEN not in trees:
        raise UserError(f"{title!r} has nothing to give to an unseen client: its clients share no whole model")
    origin = {
        "run": f"{title} seed {snapshot.seed}",
        "seed": snapshot.seed,
        "round": snapshot.ctx.round,
        "selection": "best-val" if opened.folder.history().validated else "last",
        "task-hash": snapshot.task_hash,
    }
    adapters = _served_from(opened, chooser)
    config = described(UNSEEN, setup, opened.experiment, network, snapshot.ctx, snapshot.classes, adapters, origin)
    specs = [AdapterSpec(**entry) for entry in config["adapter"]]
    parts = {spec.title: Part(spec) for spec in specs}
    own = replace(setup, methods={network: method})
    return Artefact(own, trees[UNSEEN], parts, snapshot.classes, {**config, "unseen": True})


def _chooser(opened: OpenRun, chosen: AdapterSpec | None) -> str:
    """The adapter if it chose a round of its own."""
    own = chosen is not None and (opened.folder.path / snapshot_file(chosen.title)).is_file()
    return chosen.title if chosen is not None and own else ""


def _served_from(opened: OpenRun, chooser: str) -> list[AdapterSpec]:
    """The run's adapters whose models are those of the round that ``chooser`` chose."""
    real = [spec for spec in opened.scored.values() if not is_plain(spec.name)]
    return [spec for spec in real if _chooser(opened, spec) == chooser]


def _made(opened: OpenRun, client: str, chooser: str, device: str) -> Artefact:
    """From the run's state and data, where it has written no artefacts because they were many or large."""
    job = opened.job()
    compute = compute_for(device, opened.experiment.precision)
    convolutions = any(method.arch.has_convolution for method in job.setup.methods.values())
    with steady(compute.tf32), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run has said it
        _, engine = engine_for("auto", compute, convolutions, len(job.task.clients))
        try:
            session = job.session(engine, compute, Silent())
            state = state_of(job.folder, "best-val", compute.device, chooser)
            deployment = calibrated(session, session.deploy(state), job.setup.spec.adapters)
            trained = deployment.trained()
            trees: Mapping[str, Tree] = trained if client in trained else session.unseen(deployment)
        finally:
            engine.close()
        return artefact_of(job, session, deployment, client, trees[client], _served_from(opened, chooser))


def _nobody(snapshot: Snapshot) -> Task:
    """A task whose one unseen client has no images."""
    nothing = torch.zeros(0, dtype=torch.int64)
    images, ids, public = torch.zeros(0, *snapshot.shape, dtype=torch.uint8), nothing, None
    if snapshot.public:
        images, ids = snapshot.public["images"], snapshot.public["ids"]
        public = torch.arange(len(images))
    unseen = (Client(UNSEEN, nothing, nothing, nothing),)
    return Task(images, torch.zeros_like(ids), ids, snapshot.classes, (), unseen, public=public)
