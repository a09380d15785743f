"""A client nobody has seen joins a trained run, with unlabelled images and nothing else."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fedshift
from fedshift.core import rng
from fedshift.core.adapter import Adapter
from fedshift.core.method import Method
from fedshift.core.registry import ADAPTERS
from fedshift.core.tree import Tree, to
from fedshift.data._folders import SUFFIXES
from fedshift.data.pool import Pool
from fedshift.data.task import Client, Task
from fedshift.engines.auto import device_for
from fedshift.engines.base import Compute
from fedshift.engines.reference import facts_of, placed, predictions
from fedshift.engines.sequential import Sequential
from fedshift.engines.torch_flags import steady
from fedshift.errors import UserError
from fedshift.join.images import Images, read_images
from fedshift.join.trained import Choice, Trained, choose_run, read_run
from fedshift.results.collect import validated_by
from fedshift.runs.artefact import FORMAT, Prediction, check_free, write
from fedshift.runs.deployment import Welcome
from fedshift.runs.session import welcomed
from fedshift.runs.setup import PRECISIONS, Network


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
    networks: tuple[str, ...]  # that a newcomer may choose from
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
    """Give a client nobody has seen a model, let an adapter run along its images, and write model and predictions.

    ``run`` is a run folder or one above it (``method`` and ``seed`` choose among several), ``data`` a folder of pictures,
    one picture, or Parquet; labels, if there are any, are only compared with. ``adapter`` is a label of the run's own
    adapters or any adapter's name. ``model`` chooses among the networks of a mixed run; ``network`` is the user's own, if
    the run was trained with one. Nothing is written if anything is wrong, and nothing is ever written over.
    """
    trained = read_run(choose_run(Path(run), method, seed), network)
    chosen = trained.choice(model, adapter)
    trained = replace(trained, welcome=Welcome.load(trained.folder.path, chosen.adapter.title))
    adapting = trained.adapter(chosen)
    source, title = Path(data), trained.spec.title
    client = name_of(source)
    folder = Path(out) if out is not None else trained.folder.path / "joined" / f"{client}-{chosen.adapter.title}"
    check_free(folder)
    welcome, experiment = trained.welcome, trained.experiment
    images = read_images(source, welcome.shape, welcome.classes, experiment.data.columns)
    compute = Compute(device_for(device), PRECISIONS[experiment.precision])
    task = newcomer_task(client, images, welcome)
    arch = chosen.method.arch
    with steady(experiment.precision == "fast"):
        tree, notes = served(chosen.method, welcome, task, compute)
        if not {*arch.parameters, *arch.buffers} <= set(tree.get("model", {})):
            raise UserError(
                f"{title!r} has nothing to give to a client nobody has seen: its clients share no whole model"
            )
        logits, state = predicted(adapting, tree, task, welcome.seed, compute)
    if not logits.isfinite().all():
        raise UserError(f"{title!r} with adapter {chosen.adapter.title!r} gives no finite numbers on {source}")
    chances, codes = logits.double().softmax(1).max(1)
    joined = Joined(
        client=client,
        run=trained.folder.path,
        method=title,
        seed=welcome.seed,
        round=welcome.now.round,
        validated=validated_by(trained.folder.lines()),
        network=chosen.network,
        adapter=chosen.adapter.title,
        networks=tuple(trained.setup.methods),
        scored=tuple(trained.scored),
        predictions=tuple(map(Prediction, images.names, _named(codes, welcome.classes), chances.tolist())),
        right=None if images.truth is None else tuple((codes == images.truth).tolist()),
        files=(),
        notes=(*images.notes(), *notes),
    )
    config = described(joined, trained, chosen, adapting, source, images)
    return replace(joined, files=tuple(write(folder, arch, state, config, joined.predictions)))


def _named(codes: Tensor, classes: Sequence[str]) -> list[str]:
    """Names of classes; a network may have more outputs than there are."""
    return [classes[i] if i < len(classes) else str(i) for i in codes.tolist()]


def name_of(source: Path) -> str:
    """What a newcomer is called: like its folder or file.

    >>> name_of(Path("data/clinic-7.parquet")), name_of(Path("data/clinic.7/"))
    ('clinic-7', 'clinic.7')
    """
    whole = source.resolve()
    return (whole.stem if whole.suffix.lower() in {".parquet", *SUFFIXES} else whole.name) or "data"


def newcomer_task(client: str, images: Images, welcome: Welcome) -> Task:
    """A task with one client, who does not train; nobody is told its labels, not even by the order of its images."""
    count, nothing = len(images.pixels), torch.zeros(0, dtype=torch.int64)
    ids = Pool(images.pixels, torch.zeros(count, dtype=torch.int64), welcome.classes).content()
    index = torch.arange(count) if images.truth is None else ids.argsort(stable=True)  # ids are digests of pixels
    pixels, public = images.pixels, None
    if welcome.public:
        pixels = torch.cat([pixels, welcome.public["images"]])
        ids = torch.cat([ids, welcome.public["ids"]])
        public = torch.arange(count, len(pixels))
    newcomer = Client(client, nothing, nothing, index)
    labels = torch.zeros(len(pixels), dtype=torch.int64)
    return Task(pixels, labels, ids, welcome.classes, (), (newcomer,), public=public)


def served(method: Method, welcome: Welcome, task: Task, compute: Compute) -> tuple[Tree, list[str]]:
    """The newcomer's model before it adapts, as a run makes it for its unseen clients; and what went wrong."""
    (client,) = task.unseen
    now, seed = welcome.now, welcome.seed
    down = method.broadcast(to(welcome.server, compute.device), None, now)
    start = to({"model": method.arch.init(rng.seed_of(seed, "init"))}, compute.device, compute.dtype)["model"]
    facts = facts_of(task, client, -1, rng.seed_of(seed, "birth", client.name))
    if task.public is not None:
        facts = replace(facts, public=task.ids[task.public])
    mines = {client.name: to(method.birth(start, facts, now), compute.device)}
    trees, replies = welcomed(method, down, mines, task, Sequential(compute), now, seed)
    failed = any(not reply.finite for reply in replies.values())
    note = "the newcomer serves without its own training steps: their loss or update is not finite"
    return trees[client.name], [note] if failed else []


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


def described(
    joined: Joined, trained: Trained, chosen: Choice, adapting: Adapter, source: Path, images: Images
) -> dict[str, Any]:
    """Everything one needs to use the model, or to find out where it came from."""
    spec, experiment, welcome = trained.spec, trained.experiment, trained.welcome
    model, adapter, arch = chosen.model, chosen.adapter, chosen.method.arch
    channels, height, width = welcome.shape
    settings = {**ADAPTERS[adapter.name].options, **adapter.options()}  # as they are at the round that serves
    options = {key: value for key, value in {**model.options(), **spec.model}.items() if key != "weights"}
    accuracy = {} if joined.accuracy is None else {"accuracy": joined.accuracy}
    return {
        "format": FORMAT,
        "client": joined.client,
        "images": len(images.names),
        "resized": images.resized,
        "converted": images.converted,
        "mean-confidence": joined.confidence,
        **accuracy,
        "classes": list(welcome.classes),
        "input": {
            "channels": channels,
            "height": height,
            "width": width,
            "scale": "bytes / 255, then (x - mean) / std",
            "mean": list(arch.mean),
            "std": list(arch.std),
        },
        "network": {"name": model.name, **options},
        "method": {"name": spec.name, **({"label": spec.label} if spec.label else {}), **spec.options()},
        "train": {**experiment.train, **spec.train},
        "adapter": {"name": adapter.name, **{key: getattr(adapting, key.replace("-", "_")) for key in settings}},
        "origin": {
            "run": str(joined.run.resolve()),
            "seed": joined.seed,
            "round": joined.round,
            "selection": "best-val" if joined.validated else "last",
            "task-hash": welcome.task_hash,
            "data": str(source.resolve()),
        },
        "versions": {
            "fedshift": fedshift.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
