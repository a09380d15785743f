"""An unseen client joins a trained run, with unlabelled images and nothing else."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedshift.core import rng
from fedshift.data._walk import SUFFIXES
from fedshift.data.output import within
from fedshift.data.pool import Pool
from fedshift.data.task import Client, Task
from fedshift.data.windows import window_of
from fedshift.engines.auto import compute_for
from fedshift.engines.sequential import Sequential
from fedshift.engines.torch_flags import steady
from fedshift.errors import UserError
from fedshift.join.classification import classification
from fedshift.join.images import Images, read_images
from fedshift.measures.confusion import ENOUGH, NEARLY, Confusion
from fedshift.measures.predictions import Predictions
from fedshift.runs.answers import Answers
from fedshift.runs.artefact import answered, described, difference
from fedshift.runs.artefact_files import write
from fedshift.runs.deployment import Snapshot
from fedshift.runs.new_folder import check_free
from fedshift.runs.open import OpenRun, choose_adapter, choose_network, choose_run, open_run
from fedshift.runs.setup import Network

PREDICTIONS, REPORT = "predictions.csv", "report.json"
COLUMNS = ("file", "label", "confidence")


@dataclass(frozen=True)
class Prediction:
    """One line of the predictions."""

    file: str
    label: str
    confidence: float
    probabilities: tuple[float, ...] = ()  # of every class


@dataclass(frozen=True)
class Joined:
    """What came of it."""

    client: str
    run: Path
    method: str
    seed: int
    round: int
    network: str
    adapter: str
    scored: tuple[str, ...]  # adapters the run was scored with
    networks: tuple[str, ...]  # that an unseen client may choose from
    predictions: tuple[Prediction, ...]
    right: tuple[bool, ...] | None  # where labels are known
    files: tuple[Path, ...]
    notes: tuple[str, ...]  # what was done to the images, and what went wrong
    validated: bool = True  # whether validation chose the round; otherwise it is the last one
    classes: tuple[str, ...] = ()  # whose probabilities these are
    report: Mapping[str, Any] | None = None  # class by class, where labels are known
    skipped: tuple[tuple[str, str], ...] = ()  # images that cannot be read, and why

    @property
    def accuracy(self) -> float | None:
        """The share of right answers, where labels are known."""
        return None if self.right is None else sum(self.right) / len(self.right)

    @property
    def confidence(self) -> float:
        """The mean over images."""
        return sum(item.confidence for item in self.predictions) / len(self.predictions)

    def as_dict(self) -> dict[str, Any]:
        """What there is to tell but the predictions, as plain values."""
        known = {} if self.report is None else {"classification": dict(self.report)}
        return {
            "client": self.client,
            "run": str(self.run.resolve()),
            "method": self.method,
            "seed": self.seed,
            "round": self.round,
            "network": self.network,
            "adapter": self.adapter,
            "images": len(self.predictions),
            "mean-confidence": self.confidence,
            **known,
            "skipped": [{"file": file, "why": why} for file, why in self.skipped],
            "notes": list(self.notes),
        }


def join(
    run: str | Path,
    data: str | Path,
    adapter: str | None = None,
    out: str | Path | None = None,
    *,
    method: str | None = None,
    seed: int | None = None,
    model: str | None = None,
    network: Network | None = None,
    head: str | None = None,
    device: str = "auto",
    strict: bool = False,
) -> Joined:
    """Give an unseen client a model, let an adapter run along its images, and write artefact and predictions.

    ``run`` is a run folder or one above it (``method`` and ``seed`` choose among several), ``data`` a folder of pictures,
    one picture, or Parquet; labels, if there are any, are only compared with. ``adapter`` is a label of the run's own
    adapters or any adapter's name. ``model`` chooses among the networks of a mixed run; ``network`` is the user's own, if
    the run was trained with one. An image that cannot be read is skipped and named, or a mistake if ``strict``. Nothing is
    written if anything is wrong, and nothing is ever written over.
    """
    opened = open_run(choose_run(Path(run), method, seed), network, head)
    setup, experiment, title = opened.setup, opened.experiment, opened.spec.title
    name = choose_network(opened, model)
    chosen = choose_adapter(opened.scored, adapter)
    snapshot = opened.snapshot(chosen.title)
    adapting = setup.adapter(chosen, setup.methods[name], snapshot.ctx)
    source = Path(data)
    client = name_of(source)
    folder = Path(out) if out is not None else within(opened.folder.path, "joined") / f"{client}-{chosen.title}"
    check_free(folder)
    window = window_of(experiment.data.window)
    images = read_images(source, snapshot.shape, snapshot.classes, experiment.data.columns, strict, window)
    compute = compute_for(device, experiment.precision)
    task = unseen_task(client, images, snapshot)
    with steady(compute.tf32):
        deployment = snapshot.deployment(setup).serving(name)
        trees, failed = deployment.admit(task, Sequential(compute), compute)
        if client not in trees:
            raise UserError(f"{title!r} has nothing to give to an unseen client: its clients share no whole model")
        order = task.unseen[0].test
        seed = rng.seed_of(snapshot.seed, "adapter")
        shown, state = answered(adapting, trees[client], images.pixels[order], seed, compute)
    logits = shown[order.argsort()]
    if not logits.isfinite().all():
        raise UserError(f"{title!r} with adapter {chosen.title!r} gives no finite numbers on {source}")
    answers = Answers.of(logits, snapshot.classes)
    trouble = "the client serves without its own training steps: their loss or update is not finite"
    joined = Joined(
        client=client,
        run=opened.folder.path,
        method=title,
        seed=snapshot.seed,
        round=snapshot.ctx.round,
        validated=opened.folder.history().validated,
        network=name,
        adapter=chosen.title,
        networks=tuple(setup.methods),
        scored=tuple(opened.scored),
        predictions=_predictions(images, answers),
        right=None if images.truth is None else tuple((answers.codes == images.truth).tolist()),
        files=(),
        notes=(
            *images.notes(),
            *([trouble] if failed else []),
            *_broken(opened, chosen.title),
            *_one_class(answers, images.truth),
        ),
        classes=answers.classes,
        report=None if images.truth is None else classification(images.truth, answers.codes, answers.classes),
        skipped=images.broken,
    )
    origin = {
        "run": str(joined.run.resolve()),
        "seed": joined.seed,
        "round": joined.round,
        "selection": "best-val" if joined.validated else "last",
        "task-hash": snapshot.task_hash,
        "data": str(source.resolve()),
    }
    whole = described(client, setup, experiment, name, snapshot.ctx, snapshot.classes, [chosen], origin)
    config = {**whole, "using": chosen.title, **_counted(joined, images)}
    parts = {chosen.title: difference(state, trees[client])}
    beside = {PREDICTIONS: _csv(joined), REPORT: (json.dumps(joined.as_dict(), indent=1) + "\n").encode()}
    files = write(folder, setup.methods[name].arch, trees[client], config, parts, beside)
    return replace(joined, files=tuple(files))


def _broken(opened: OpenRun, adapter: str) -> list[str]:
    """Whether this adapter's predictions in the run itself were numbers."""
    rows = [
        row for row in opened.folder.scores().get(adapter, []) if row.selection == "best-val" and not row.of_streams
    ]
    broken = sum(row.summary.broken for row in rows)
    samples = sum(own.samples for row in rows for own in row.by_client.values())
    if not broken:
        return []
    return [f"in the run itself {broken} of {samples} predictions with adapter {adapter} are not numbers"]


def _counted(joined: Joined, images: Images) -> dict[str, Any]:
    """What was seen of the client's images."""
    accuracy = {} if joined.accuracy is None else {"accuracy": joined.accuracy}
    changed = {"resized": images.resized, "converted": images.converted, "skipped": len(images.broken)}
    return {"images": len(images.names), **changed, "mean-confidence": joined.confidence, **accuracy}


def _predictions(images: Images, answers: Answers) -> tuple[Prediction, ...]:
    sure = answers.confidence.tolist()
    return tuple(
        Prediction(name, label, confidence, tuple(row))
        for name, label, confidence, row in zip(
            images.names, answers.labels, sure, answers.probabilities.tolist(), strict=True
        )
    )


def _one_class(answers: Answers, truth: Tensor | None) -> Iterator[str]:
    """A model or an adapter to which (nearly) every image is one class has collapsed, unless the images are like that."""
    if truth is None:
        counts = answers.codes.bincount()
        share, label = float(counts.max() / counts.sum()), answers.classes[int(counts.argmax())]
        if share >= NEARLY and len(answers.codes) >= ENOUGH:
            yield (
                f"{100 * share:.0f} % of the predictions are {label!r}: unless nearly all images are, the model or its "
                "adapter has collapsed; compare with --adapter none"
            )
        return
    count = Confusion.of(Predictions(answers.probabilities.log().numpy(), truth.numpy()))
    if count.collapsed:
        yield (
            f"collapsed: {100 * count.top_share:.0f} % of the predictions are {answers.classes[count.top_class]!r}, and the "
            f"mean recall of classes is {100 * count.balanced_accuracy:.1f} %; compare with --adapter none"
        )


def _csv(joined: Joined) -> bytes:
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow((*COLUMNS, *(f"{name} (class)" if name in COLUMNS else name for name in joined.classes)))
    for item in joined.predictions:
        chances = (f"{chance:.9g}" for chance in item.probabilities)
        lines.writerow((item.file, item.label, f"{item.confidence:.6f}", *chances))
    return text.getvalue().encode()


def name_of(source: Path) -> str:
    """What an unseen client is called: like its folder or file.

    >>> name_of(Path("data/clinic-7.parquet")), name_of(Path("data/clinic.7/"))
    ('clinic-7', 'clinic.7')
    """
    whole = Path(os.path.realpath(source))  # also of a link to itself
    return (whole.stem if whole.suffix.lower() in {".parquet", ".csv", ".tsv", *SUFFIXES} else whole.name) or "data"


def unseen_task(client: str, images: Images, snapshot: Snapshot) -> Task:
    """A task with one client, who does not train; nobody is told its labels, not even by the order of its images."""
    count, nothing = len(images.pixels), torch.zeros(0, dtype=torch.int64)
    ids = Pool(images.pixels, torch.zeros(count, dtype=torch.int64), snapshot.classes).content()
    index = torch.arange(count) if images.truth is None else ids.argsort(stable=True)  # ids are digests of pixels
    pixels, public = images.pixels, None
    if snapshot.public:
        pixels = torch.cat([pixels, snapshot.public["images"]])
        ids = torch.cat([ids, snapshot.public["ids"]])
        public = torch.arange(count, len(pixels))
    labels = torch.zeros(len(pixels), dtype=torch.int64)
    unseen = (Client(client, nothing, nothing, index),)
    return Task(pixels, labels, ids, snapshot.classes, (), unseen, public=public)
