"""One run looked at: features, risks and confusions of its models at its clients."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedshift.core import rng
from fedshift.core.adapter import Adapter
from fedshift.core.tree import Tree
from fedshift.data.task import Client
from fedshift.engines.base import Compute, Engine, sound
from fedshift.errors import UserError
from fedshift.experiment.schema import AdapterSpec
from fedshift.inspect.following import Curve, follow
from fedshift.inspect.pad import Distances, distances
from fedshift.inspect.risk import average_risk, confusion, local_risk
from fedshift.results.plots.tsne import places
from fedshift.runs.calibrate import calibrated
from fedshift.runs.features import outputs, stream_of
from fedshift.runs.open import state_of
from fedshift.runs.plan import Job
from fedshift.runs.progress import Silent
from fedshift.runs.session import Session
from fedshift.store.features import Features, Wanted, positions_of
from fedshift.store.metric import Metric
from fedshift.store.rows import ScoreRow, Told
from fedshift.store.state import State

T = TypeVar("T")
MODELS = ("deployed", "global")
PLAIN = AdapterSpec(name="none")
MOST_CLIENTS = 40  # whose pairs are compared, spread evenly over all
MOST_POINTS = 2000  # that t-SNE places
COARSE = 10  # images of a client, below which its PAD has a few values only
ANYONE = "an unseen client"


@dataclass(frozen=True)
class Wish:
    """What of a run is looked at."""

    select: str = "best-val"
    samples: int = 200  # images of each client whose features are compared
    model: str = "deployed"
    steps: int = 0  # of adaptation on a learnt loss that are followed
    adapter: str = ""  # a label of the run's, or any name: models that have adapted to what they are shown
    stream: str = ""  # left out: original, or else the first one

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if self.samples < 2:
            raise UserError(f"--samples must be at least 2, not {self.samples}")
        if self.steps < 0:
            raise UserError(f"--steps must not be negative, not {self.steps}")
        if self.model not in MODELS:
            raise UserError(f"--model must be {' or '.join(MODELS)}, not {self.model!r}")


@dataclass(frozen=True)
class Part:
    """One client: all of its test images counted, some of their features."""

    client: str
    unseen: bool
    risk: float | None
    confusion: Tensor  # int64 [classes, outputs], of predictions that are numbers
    features: Tensor  # float32 [n, d]
    labels: Tensor  # of these n
    answers: Tensor
    positions: Tensor  # in the client's stream
    broken: int = 0  # predictions that are not numbers

    @property
    def images(self) -> int:
        """How many were counted."""
        return int(self.confusion.sum()) + self.broken

    @property
    def accuracy(self) -> float:
        """In percent; a prediction that is not a number is wrong."""
        return 100 * int(self.confusion.diagonal().sum()) / self.images


@dataclass(frozen=True)
class Look:
    """What was found in one run."""

    name: str  # method and sweep values
    job: Job
    model: str  # "global", or "personal": clients' own
    round: int
    adapter: str  # whose adaptation models have gone through; empty: none
    wanted: Wanted
    parts: tuple[Part, ...]
    risks: Mapping[
        str, float | None
    ]  # of all clients that trained (or else of unseen ones), also those not among the parts
    accuracies: Mapping[str, float]
    confusions: Mapping[str, Tensor]  # of all clients, seen or not
    distances: Distances | None
    telemetry: Mapping[str, Mapping[Metric, Mapping[str, Told]]]  # what adapters told, by adapter and metric
    curve: Curve | None = None  # what every step on a learnt loss does
    broken: int = 0  # predictions of all clients that are not numbers
    notes: tuple[str, ...] = ()

    @property
    def risk(self) -> float | None:
        """The average local risk."""
        return average_risk(self.risks)

    @property
    def accuracy(self) -> float:
        """The client mean."""
        return statistics.fmean(self.accuracies.values())

    def features(self) -> Features:
        """The features, not more than t-SNE can place, in the shape in which runs save them."""
        room = MOST_POINTS // len(self.parts)
        few = [(part, evenly(range(len(part.labels)), room)) for part in self.parts]
        rows = [[t[chosen] for t in (p.features, p.labels, p.answers, p.positions)] for p, chosen in few]
        features, labels, answers, positions = (torch.cat(column) for column in zip(*rows, strict=True))
        owners = torch.tensor([number for number, (_, chosen) in enumerate(few) for _ in chosen])
        tensors = (features, labels, answers, owners, positions)
        names = tuple(part.client for part in self.parts)
        unseen = tuple(part.client for part in self.parts if part.unseen)
        return Features(*tensors, names, unseen, self.job.task.classes, self.round, self.wanted)

    def places(self) -> dict[str, Any] | None:
        """t-SNE of the features as plain numbers; None where there is nothing to place."""
        if self.distances is None:
            return None
        try:
            return places(self.features())
        except UserError:
            return None  # too few images


class Heard(Silent):
    """Keeps notes to be shown later."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        """Kept."""
        self.notes.append(text)


def look(
    job: Job,
    name: str,
    wish: Wish,
    engine: Engine,
    compute: Compute,
    doing: Callable[[str], object] = lambda _: None,
    spec: AdapterSpec = PLAIN,
) -> Look:
    """Look at one run; nothing is written. ``doing`` is told what takes a moment, ``spec`` is the adapter at work."""
    heard = Heard()
    session = job.session(engine, compute, heard)
    state = state_of(job.folder, wish.select, compute.device)
    doing(f"{job.title}: models of round {state.round}")
    model, trees = _served(job, session, state, wish.model, spec)
    if wish.model != "deployed" and model == "personal":
        heard.note(f"{job.setup.spec.title} has no global model; these are its clients' own")
    if wish.stream and wish.stream not in job.task.streams:
        there = ", ".join(job.task.streams)
        raise UserError(f"{job.folder.path} has no stream {wish.stream!r}; it has: {there}")
    wanted = Wanted(wish.samples, wish.stream or stream_of(job.task), job.seed, job.task.hash)
    if spec.name != PLAIN.name or wish.stream:
        how = "without adaptation" if spec.name == PLAIN.name else f"with adapter {spec.title}"
        heard.note(f"models answer to stream {wanted.stream!r} {how}")
    clients = [c for name in trees if len(job.task.samples(c := job.task.client(name), wanted.stream))]
    if not clients:
        raise UserError(f"no client of {job.folder.path} has images in stream {wanted.stream!r}")
    # means are of clients that trained; where only unseen ones are tested they are of those
    counted = {client.name for client in clients if client in job.task.clients} or {client.name for client in clients}
    adapters = job.setup.adapters(spec, session.context(state.round))
    own = {c.name: adapters[arch] for arch, members in session.by_arch(clients).items() for c in members}
    kept = {client.name for client in evenly(clients, MOST_CLIENTS)}
    doing(f"{job.title}: features")
    every = [_part(session, client, own[client.name], trees[client.name], wanted, compute) for client in clients]
    parts = tuple(part for part in every if part.client in kept)
    compared = [client.name for client in clients if client.name in kept & counted]
    why = incomparable(parts)
    curve = None
    if wish.steps:
        doing(f"{job.title}: {wish.steps} steps of adaptation")
        unseen = [client for client in clients if client in job.task.unseen]
        followed = evenly(unseen or clients, MOST_CLIENTS)
        curve = follow(job, session, followed, wanted.stream, wish.select, wish.steps, compute)
        if curve is None:
            heard.note("no steps are followed: none of its adapters works with a learnt loss")
    doing(f"{job.title}: distances between {len(parts)} clients")
    found = None if why else distances({part.client: part.features for part in parts}, compared)
    more = [f"{len(parts)} of {len(every)} clients are compared, spread evenly"] if len(parts) < len(every) else []
    if broken := sum(part.broken for part in every):
        images = sum(part.images for part in every)
        more.append(f"{broken} of {images} predictions on {wanted.stream} are not numbers: they count as wrong")
    if coarse := sum(part.images < COARSE for part in parts):
        more.append(f"{coarse} clients have fewer than {COARSE} test images, and distances that are hardly measured")
    return Look(
        name=name,
        job=job,
        model=model,
        round=state.round,
        adapter="" if spec.name == PLAIN.name else spec.title,
        wanted=wanted,
        parts=parts,
        risks={part.client: part.risk for part in every if part.client in counted},
        accuracies={part.client: part.accuracy for part in every if part.client in counted},
        confusions={part.client: part.confusion for part in every},
        distances=found,
        telemetry=told(job.folder.scores(), wish.select),
        curve=curve,
        broken=broken,
        notes=(*heard.notes, *more, *((f"no distances and no t-SNE, because {why}",) if why else ())),
    )


def _served(job: Job, session: Session, state: State, model: str, spec: AdapterSpec) -> tuple[str, dict[str, Tree]]:
    """What every client, seen or not, predicts with, and whether that is a global model."""
    if model == "global" and job.model == "personal":
        shared = _shared(job, session, state)
        if shared is not None:
            return "global", {client.name: shared for client in (*job.task.clients, *job.task.unseen)}
    deployment = calibrated(session, session.deploy(state), [spec])
    return job.model, {**deployment.trained(), **session.unseen(deployment)}


def _shared(job: Job, session: Session, state: State) -> Tree | None:
    """The global model of a method whose clients have their own: what it would give to an unseen client."""
    if len(job.setup.methods) > 1:
        return None
    nothing = torch.zeros(0, dtype=torch.int64)
    task = replace(job.task, unseen=(Client(ANYONE, nothing, nothing, nothing),))
    return session.deploy(state).admit(task, session.engine, session.compute)[0].get(ANYONE)


def _part(session: Session, client: Client, adapter: Adapter, deployed: Tree, wanted: Wanted, compute: Compute) -> Part:
    task = session.task
    samples = task.samples(client, wanted.stream)
    ready, seed = session.prepared(adapter, deployed, client), rng.seed_of(session.seed, "adapter")
    features, logits, labels = outputs(adapter, ready, samples, compute, task.setting(wanted.stream), seed)
    positions = positions_of(len(samples), wanted.at_most, wanted.seed, client.name)
    answers, fine = logits.argmax(1), sound(logits)
    return Part(
        client.name,
        client in task.unseen,
        local_risk(logits, labels),
        confusion(labels[fine], answers[fine], len(task.classes), logits.shape[1]),
        features[positions],
        labels[positions],
        answers[positions],
        positions,
        broken=len(labels) - int(fine.sum()),
    )


def incomparable(parts: Sequence[Part]) -> str:
    """Why features cannot be compared; empty if they can."""
    widths = sorted({part.features.shape[1] for part in parts})
    if len(widths) > 1:
        return f"networks give {' and '.join(map(str, widths))} features"
    return "" if all(bool(part.features.isfinite().all()) for part in parts) else "features are not finite: it diverged"


def told(scores: Mapping[str, Sequence[ScoreRow]], select: str) -> dict[str, dict[Metric, Mapping[str, Told]]]:
    """What adapters told about themselves (FedTHE's ``e``), by adapter and metric, under one selection rule.

    >>> from fedshift.store.summary import Summary
    >>> row = ScoreRow(Metric("personal", "original"), Summary(), "last", telemetry={"e": Told(0.5, (1, 1))})
    >>> told({"the": [row]}, "last")["the"][row.metric]["e"].mean
    0.5
    """
    found = {
        adapter: {row.metric: row.telemetry for row in rows if row.selection == select and row.telemetry}
        for adapter, rows in scores.items()
    }
    return {adapter: by_metric for adapter, by_metric in found.items() if by_metric}


def evenly(items: Sequence[T], most: int) -> list[T]:
    """All of a few items, or so many of them, spread evenly.

    >>> evenly("abcdef", 3), evenly("ab", 3)
    (['a', 'c', 'e'], ['a', 'b'])
    """
    return list(items) if len(items) <= most else [items[k * len(items) // most] for k in range(most)]
