"""An unseen client joins a trained run, with unlabelled images and nothing else."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedshift.core import rng
from fedshift.core.adapter import Adapter
from fedshift.core.registry import ADAPTERS
from fedshift.core.tree import Tree
from fedshift.data._folders import SUFFIXES
from fedshift.data.pool import Pool
from fedshift.data.task import Client, Task
from fedshift.engines.auto import compute_for
from fedshift.engines.base import Compute
from fedshift.engines.reference import placed, predictions
from fedshift.engines.sequential import Sequential
from fedshift.engines.torch_flags import steady
from fedshift.errors import UserError
from fedshift.experiment.schema import AdapterSpec
from fedshift.join.images import Images, read_images
from fedshift.runs.artefact import check_free, described, difference, write
from fedshift.runs.deployment import Snapshot
from fedshift.runs.open import OpenRun, choose_run, open_run
from fedshift.runs.setup import Network

PREDICTIONS = "predictions.csv"


@dataclass(frozen=True)
class Prediction:
    """One line of the predictions."""

    file: str
    label: str
    confidence: float


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

    @property
    def accuracy(self) -> float | None:
        """The share of right answers, where labels are known."""
        return None if self.right is None else sum(self.right) / len(self.right)

    @property
    def confidence(self) -> float:
        """The mean over images."""
        return sum(item.confidence for item in self.predictions) / len(self.predictions)


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
    device: str = "auto",
) -> Joined:
    """Give an unseen client a model, let an adapter run along its images, and write artefact and predictions.

    ``run`` is a run folder or one above it (``method`` and ``seed`` choose among several), ``data`` a folder of pictures,
    one picture, or Parquet; labels, if there are any, are only compared with. ``adapter`` is a label of the run's own
    adapters or any adapter's name. ``model`` chooses among the networks of a mixed run; ``network`` is the user's own, if
    the run was trained with one. Nothing is written if anything is wrong, and nothing is ever written over.
    """
    opened = open_run(choose_run(Path(run), method, seed), network)
    setup, experiment, title = opened.setup, opened.experiment, opened.spec.title
    name = choose_network(opened, model)
    chosen = choose_adapter(opened.scored, adapter)
    snapshot = opened.snapshot(chosen.title)
    adapting = setup.adapter(chosen, setup.methods[name], snapshot.ctx)
    source = Path(data)
    client = name_of(source)
    folder = Path(out) if out is not None else opened.folder.path / "joined" / f"{client}-{chosen.title}"
    check_free(folder)
    images = read_images(source, snapshot.shape, snapshot.classes, experiment.data.columns)
    compute = compute_for(device, experiment.precision)
    task = unseen_task(client, images, snapshot)
    with steady(compute.tf32):
        deployment = snapshot.deployment(setup).serving(name)
        trees, failed = deployment.admit(task, Sequential(compute), compute)
        if client not in trees:
            raise UserError(f"{title!r} has nothing to give to an unseen client: its clients share no whole model")
        logits, state = predicted(adapting, trees[client], task, snapshot.seed, compute)
    if not logits.isfinite().all():
        raise UserError(f"{title!r} with adapter {chosen.title!r} gives no finite numbers on {source}")
    chances, codes = logits.double().softmax(1).max(1)
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
        predictions=tuple(map(Prediction, images.names, _named(codes, snapshot.classes), chances.tolist())),
        right=None if images.truth is None else tuple((codes == images.truth).tolist()),
        files=(),
        notes=(*images.notes(), *([trouble] if failed else []), *_broken(opened, chosen.title)),
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
    beside = {PREDICTIONS: _csv(joined.predictions)}
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
    changed = {"resized": images.resized, "converted": images.converted}
    return {"images": len(images.names), **changed, "mean-confidence": joined.confidence, **accuracy}


def _csv(items: Sequence[Prediction]) -> bytes:
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(("file", "label", "confidence"))
    lines.writerows((item.file, item.label, f"{item.confidence:.6f}") for item in items)
    return text.getvalue().encode()


def _named(codes: Tensor, classes: Sequence[str]) -> list[str]:
    """Names of classes; a network may have more outputs than there are."""
    return [classes[i] if i < len(classes) else str(i) for i in codes.tolist()]


def name_of(source: Path) -> str:
    """What an unseen client is called: like its folder or file.

    >>> name_of(Path("data/clinic-7.parquet")), name_of(Path("data/clinic.7/"))
    ('clinic-7', 'clinic.7')
    """
    whole = source.resolve()
    return (whole.stem if whole.suffix.lower() in {".parquet", *SUFFIXES} else whole.name) or "data"


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


def predicted(adapter: Adapter, tree: Tree, task: Task, seed: int, compute: Compute) -> tuple[Tensor, Tree]:
    """Logits of all images, in the order of their files, and the adapter's state after the last one it was shown."""
    (client,) = task.unseen
    samples = placed(task, compute.device).samples(client, "test")
    logits: list[Tensor] = []
    state = tree
    shown = predictions(adapter, tree, samples, task.setting("test"), rng.seed_of(seed, "adapter"), compute)
    for output, _, current in shown:
        logits.append(output.logits.cpu())
        state = current
    return torch.cat(logits)[client.test.argsort()], state


def choose_network(opened: OpenRun, name: str | None) -> str:
    """One of the run's networks, by default the first one."""
    names = list(opened.setup.methods)
    if name is not None and name not in names:
        raise UserError(f"{opened.folder.path} has no network {name!r}; it has: {', '.join(names)}")
    return names[0] if name is None else name


def choose_adapter(scored: Mapping[str, AdapterSpec], name: str | None) -> AdapterSpec:
    """A run's adapter by label or name, with its options; any other registered one with its defaults.

    Nothing asked for is the run's adapter that works with more than the model (FedTTA's with its learnt loss), if there is
    one such: the method was trained for it. Otherwise it is no adaptation, unless one other adapter alone was scored.

    >>> scored = {"tent lr=0.01": AdapterSpec(name="tent", label="tent lr=0.01", lr=0.01)}
    >>> choose_adapter(scored, "tent").options()
    {'lr': 0.01}
    >>> choose_adapter(scored, None).title, choose_adapter({**scored, "none": AdapterSpec(name="none")}, None).title
    ('tent lr=0.01', 'none')
    >>> choose_adapter(scored, "t3a").options()
    {}
    """
    if name is None:
        special = [spec for spec in scored.values() if not ADAPTERS[spec.name].make.requires <= {"model"}]
        if len({spec.name for spec in special}) == 1:
            return min(special, key=lambda spec: len(spec.options()))  # the plainest
        if "none" in scored or not scored:
            return AdapterSpec(name="none")
        if len(scored) == 1:
            return next(iter(scored.values()))
        raise UserError(
            f"choose an adapter with --adapter: none, or {', '.join(scored)}, which the run was scored with"
        )
    if name in scored:
        return scored[name]
    same = {title: spec for title, spec in scored.items() if spec.name == name}
    if len(same) > 1:
        raise UserError(
            f"the run was scored with several {name!r}; choose one by its label: {', '.join(map(repr, same))}"
        )
    if same:
        return next(iter(same.values()))
    return AdapterSpec(name=ADAPTERS[name].name)
