"""What deployed models make of some test images, saved with a run (``[evaluate] features``), and t-SNE of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedshift.bench.federation import Federation
from fedshift.bench.folder import FEATURES
from fedshift.bench.job import Job
from fedshift.bench.progress import Reporter
from fedshift.core import rng
from fedshift.core.adapter import Adapter
from fedshift.core.tree import Tree
from fedshift.data.streams import Setting
from fedshift.data.task import Samples, Task
from fedshift.engines.work import Compute, predictions
from fedshift.errors import UserError

PREFERRED = "original"  # the stream whose images are taken, where there is one of this name
LEAST = 4  # rows t-SNE can place
HEADER = "fedshift"
TENSORS = ("features", "labels", "predictions", "client", "positions")


@dataclass(frozen=True)
class Wanted:
    """What decides which images are taken: features of other ones are made again."""

    at_most: int  # images of each client
    stream: str
    seed: int
    task_hash: str

    @staticmethod
    def by(job: Job) -> Wanted:
        """What an experiment asks for."""
        return Wanted(job.experiment.evaluate.features, stream_of(job.task), job.seed, job.task.hash)


@dataclass(frozen=True)
class Features:
    """Rows of images, client by client, each client's in the order of its stream."""

    features: Tensor  # float32 [n, d]: what the head of the client's deployed model sees
    labels: Tensor  # int64 [n]
    predictions: Tensor  # int64 [n]
    client: Tensor  # int64 [n]: into ``clients``
    positions: Tensor  # int64 [n]: in the client's stream
    clients: tuple[str, ...]
    unseen: tuple[str, ...]  # those of them nobody has seen in training
    classes: tuple[str, ...]
    round: int  # of the model, chosen by validation
    wanted: Wanted

    def as_bytes(self) -> bytes:
        """As a safetensors file; its metadata are JSON in one entry, because several have no fixed order."""
        tensors = {name: getattr(self, name).contiguous() for name in TENSORS}
        facts = {"clients": self.clients, "unseen": self.unseen, "classes": self.classes, "round": self.round}
        described = {_kebab(key): value for key, value in {**facts, **asdict(self.wanted)}.items()}
        return save(tensors, {HEADER: json.dumps(described)})

    @staticmethod
    def load(path: Path) -> Features:
        """From a file; a UserError says what is wrong with it."""
        try:
            with safe_open(path, framework="pt") as file:
                facts = _facts(file.metadata())
                features, labels, answers, client, positions = (file.get_tensor(name) for name in TENSORS)
            clients, unseen, classes = (tuple(facts[key]) for key in ("clients", "unseen", "classes"))
            wanted = Wanted(**{key: facts[key] for key in Wanted.__dataclass_fields__})
            tensors = (features, labels, answers, client, positions)
            return Features(*tensors, clients, unseen, classes, facts["round"], wanted)
        except (OSError, SafetensorError, LookupError, TypeError, ValueError) as error:
            raise UserError(f"{path} holds no features or is damaged ({error})") from None


def stream_of(task: Task) -> str:
    """Where the images come from: the stream ``original``, or else the first one; test images if there is none."""
    return PREFERRED if PREFERRED in task.streams else next(iter(task.streams), "test")


def positions_of(count: int, at_most: int, seed: int, client: str) -> Tensor:
    """The first ``at_most`` of a permutation of a stream's positions, in their order; more contain fewer.

    >>> positions_of(3, 5, seed=0, client="a")
    tensor([0, 1, 2])
    """
    return rng.permutation(rng.seed_of(seed, "features", client), count)[:at_most].sort().values


def lacking(job: Job) -> bool:
    """Whether a run should have features and has none, or those of other images."""
    if not job.experiment.evaluate.features:
        return False
    try:
        with safe_open(job.folder.path / FEATURES, framework="pt") as file:
            facts = _facts(file.metadata())
    except (OSError, SafetensorError, LookupError, ValueError):
        return True
    return {key: facts.get(key) for key in Wanted.__dataclass_fields__} != asdict(Wanted.by(job))


def save_features(job: Job, federation: Federation, trees: Mapping[str, Tree], round_: int, say: Reporter) -> None:
    """Save the features of every client that has a deployed model, all or nothing."""
    wanted = Wanted.by(job)
    clients = [job.task.client(name) for name in trees]
    plain = {c.name: job.setup.plain[arch] for arch, members in federation.by_arch(clients).items() for c in members}
    chosen: dict[str, Tensor] = {}
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for client in clients:
        samples = job.task.samples(client, wanted.stream)
        chosen[client.name] = positions_of(len(samples), wanted.at_most, job.seed, client.name)
        few = replace(samples, index=samples.index[chosen[client.name]])
        if len(few):
            parts.append(_outputs(plain[client.name], trees[client.name], few, federation.compute))
    widths = sorted({features.shape[1] for features, _, _ in parts})
    if len(widths) != 1:
        why = f"networks give {' and '.join(map(str, widths))} features" if widths else "there are no test images"
        say.note(f"{job.title}: no features are saved, because {why}")
        return
    owners = torch.tensor([number for number, own in enumerate(chosen.values()) for _ in own])
    features, labels, answers = (torch.cat(part) for part in zip(*parts, strict=True))
    strangers = tuple(client.name for client in job.task.unseen if client.name in chosen)
    positions = torch.cat(list(chosen.values()))
    names, classes = tuple(chosen), job.task.classes
    made = Features(features, labels, answers, owners, positions, names, strangers, classes, round_, wanted)
    job.folder.write(FEATURES, made.as_bytes())


def _outputs(adapter: Adapter, deployed: Tree, samples: Samples, compute: Compute) -> tuple[Tensor, Tensor, Tensor]:
    """Features, labels and predictions of these images, without adaptation, in inference mode."""
    shown = list(predictions(adapter, deployed, samples, Setting("stored"), 0, compute))
    features = torch.cat([output.features.flatten(1) for output, _, _ in shown])
    answers = torch.cat([output.logits.argmax(1) for output, _, _ in shown])
    return features.float().cpu(), torch.cat([labels for _, labels, _ in shown]).cpu(), answers.cpu()


def embedded(features: Tensor, seed: int) -> Tensor:
    """Places in the plane for the rows of a matrix, by t-SNE: float32 [n, 2]; the same for the same seed.

    >>> embedded(torch.eye(6), seed=0).shape
    torch.Size([6, 2])
    """
    from sklearn.manifold import TSNE

    count, width = features.shape
    if count < LEAST:
        raise UserError(f"t-SNE needs at least {LEAST} images, not {count}; run it with -c evaluate.features=200")
    if not bool(features.isfinite().all()):
        raise UserError("t-SNE needs finite features; the training of this run has diverged")
    if torch.equal(features, features[:1].expand_as(features)):
        return torch.zeros(count, 2)  # all in one place, where t-SNE would divide by zero
    wide = features if width > 1 else torch.cat([features, torch.zeros_like(features)], 1)  # it starts from two axes
    perplexity = min(30.0, (count - 1) / 3)
    tsne = TSNE(init="pca", perplexity=perplexity, random_state=rng.seed_of(seed, "t-sne") % 2**32)
    return torch.from_numpy(tsne.fit_transform(wide.numpy()))


def places(made: Features) -> dict[str, Any]:
    """t-SNE of saved features as plain numbers: a list entry for each image."""
    coordinates = embedded(made.features, made.wanted.seed)
    return {
        **{_kebab(key): value for key, value in asdict(made.wanted).items()},
        "round": made.round,
        "classes": list(made.classes),
        "clients": list(made.clients),
        "unseen": list(made.unseen),
        "x": coordinates[:, 0].tolist(),
        "y": coordinates[:, 1].tolist(),
        "label": made.labels.tolist(),
        "prediction": made.predictions.tolist(),
        "client": made.client.tolist(),
    }


def with_features(folders: Sequence[Path]) -> list[Path]:
    """The run folders that have features; a UserError says how to get some if none has."""
    found = [folder for folder in folders if (folder / FEATURES).is_file()]
    if not found:
        raise UserError("no features were saved with these runs; run it with -c evaluate.features=200")
    return found


def _facts(metadata: Mapping[str, str] | None) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((metadata or {})[HEADER])
    return {key.replace("-", "_"): value for key, value in found.items()}


def _kebab(name: str) -> str:
    return name.replace("_", "-")
