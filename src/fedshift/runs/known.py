"""What a client's own images look like to its model: with it, whoever serves the model can tell when others arrive.

It is made when a model is deployed, because it takes training and validation images, and these stay where they are: the
artefact holds class means, directions of spread and one number for each validation image, never an image.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from fedshift.core.arch import Output
from fedshift.core.method import Method
from fedshift.core.tree import Tensors, Tree
from fedshift.data.task import Client, Task
from fedshift.engines.base import Compute
from fedshift.engines.reference import EVALUATION_CHUNK, pixels

AXES = 64  # directions whose spread is told apart; all others share one
PLACES = 8  # directions, of all classes together, along which images are placed
LEAST = 16  # images of either part: fewer say nothing
MOST = 1000  # images of either part that are looked at
SURE = 0.95  # how often a model should be right where it is said to be sure


@dataclass(frozen=True)
class Known:
    """Class means of features with one spread for all classes, and the scores of images that were not used for them.

    Features of a class are taken as a Gaussian whose covariance all classes share: ``spread`` along the ``axes`` of largest
    variance, ``rest`` in every other direction. ``energy``, ``distance``, ``places``, ``confidence`` and ``right`` belong to
    the same validation images.
    """

    means: Tensor  # [classes that were there, features]
    axes: Tensor  # [features, directions]
    spread: Tensor  # [directions]: variances
    rest: Tensor  # []: the variance of any other direction
    directions: Tensor  # [features, few]: in which features vary most, classes aside
    energy: Tensor  # [n]
    distance: Tensor  # [n]
    places: Tensor  # [n, few]: along the directions
    confidence: Tensor  # [n]
    right: Tensor  # bool [n]: whether the model's answer was
    answered: Tensor  # int64 [outputs]: how often each class was the answer

    @staticmethod
    def of(training: Output, labels: Tensor, validation: Output, truth: Tensor) -> Known | None:
        """From what a model says about training images and about validation images; None where they are too few.

        >>> h = torch.cat([torch.randn(50, 4), torch.randn(50, 4) + 9])
        >>> y = torch.arange(2).repeat_interleave(50)
        >>> known = Known.of(Output(h[:, :2], h, {}, {}), y, Output(h[:, :2], h, {}, {}), y)
        >>> bool(known.distances(torch.full((1, 4), 99.0)) > known.distance.max())
        True
        """
        if min(len(labels), len(truth)) < LEAST:
            return None
        features, labels = training.features.double().cpu(), labels.cpu()
        classes = labels.unique()
        means = torch.stack([features[labels == number].mean(0) for number in classes])
        centred = features - means[torch.searchsorted(classes, labels)]
        variances, axes = _principal(centred, len(labels) - len(classes))
        size = features.shape[1]
        count = min(AXES, size, max(1, len(labels) // 4))
        floor = max(float(variances.sum()) / size * 1e-3, 1e-12)
        left = float(variances[count:].sum()) / max(size - count, 1)
        shape = (means, axes[:, :count], variances[:count].clamp(min=floor), torch.tensor(max(left, floor)).double())
        means, axes, spread, rest = (leaf.float().contiguous() for leaf in shape)
        directions = _principal(features - features.mean(0), 1)[1][:, :PLACES].float().contiguous()
        logits = validation.logits.double().cpu()
        empty = torch.zeros(0)
        shape_only = Known(
            means, axes, spread, rest, directions, empty, empty, empty, empty, right=empty.bool(), answered=empty.long()
        )
        return replace(
            shape_only,
            energy=energy_of(logits).float(),
            distance=shape_only.distances(validation.features.cpu()),
            places=shape_only.placed(validation.features.cpu()),
            confidence=logits.softmax(1).amax(1).float(),
            right=logits.argmax(1) == truth.cpu(),
            answered=logits.argmax(1).bincount(minlength=logits.shape[1]),
        )

    def placed(self, features: Tensor) -> Tensor:
        """Where images lie along the directions."""
        return features.to(self.directions) @ self.directions

    def distances(self, features: Tensor) -> Tensor:
        """From the nearest class mean, in standard deviations: the Mahalanobis distance."""
        away = features.to(self.means)[:, None] - self.means
        within = (away @ self.axes).square()
        rest = (away.square().sum(2) - within.sum(2)).clamp(min=0) / self.rest
        return (within @ (1 / self.spread) + rest).amin(1).sqrt()

    @property
    def sure(self) -> float:
        """The least confidence from which on nearly all answers to validation images were right; infinite if none is."""
        order = self.confidence.argsort(descending=True)
        share = self.right[order].double().cumsum(0) / torch.arange(1, len(order) + 1)
        good = (share >= SURE).nonzero().flatten()
        good = good[good >= LEAST // 2]
        return float(self.confidence[order[good[-1]]]) if len(good) else math.inf

    def tensors(self) -> Tensors:
        """As a file holds it."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @staticmethod
    def from_tensors(tensors: Tensors) -> Known:
        """From a file; a ValueError says that these do not belong together."""
        known = Known(**{field.name: tensors[field.name] for field in fields(Known)})
        (features, axes), places, images = known.axes.shape, known.directions.shape[1], len(known.energy)
        wanted = {
            "means": (len(known.means), features),
            "spread": (axes,),
            "rest": (),
            "directions": (features, places),
            **dict.fromkeys(("energy", "distance", "confidence", "right"), (images,)),
            "places": (images, places),
            "answered": (len(known.answered),),
        }
        wrong = [name for name, shape in wanted.items() if tuple(tensors[name].shape) != shape]
        if wrong or not len(known.means) or not images:
            raise ValueError(f"its {' and '.join(wrong) or 'images'} cannot be")
        return known


@torch.no_grad()
def known_of(method: Method, tree: Tree, task: Task, client: Client, compute: Compute) -> Known | None:
    """Of a client's training and validation images; None if it has few, or if its model gives no numbers for them."""
    parts = [_some(index) for index in (client.train, client.val)]
    if min(map(len, parts)) < LEAST:
        return None
    training, validation = (_outputs(method, tree, task, index, compute) for index in parts)
    numbers = (*training[:2], *validation[:2])
    if not all(leaf.shape[1] and leaf.isfinite().all() for leaf in numbers):
        return None
    return Known.of(training, task.labels[parts[0]], validation, task.labels[parts[1]])


def _some(index: Tensor) -> Tensor:
    """At most ``MOST`` of them, evenly spread: sources have images in the order of their classes."""
    return index[torch.linspace(0, len(index) - 1, MOST).long()] if len(index) > MOST else index


def _outputs(method: Method, tree: Tree, task: Task, index: Tensor, compute: Compute) -> Output:
    chunks = (pixels(task.images, some, compute.dtype).to(compute.device) for some in index.split(EVALUATION_CHUNK))
    found = [method.predict(tree, x) for x in chunks]
    return Output(torch.cat([one.logits for one in found]), torch.cat([one.features for one in found]), {}, {})


def energy_of(logits: Tensor) -> Tensor:
    """The free energy: high where no class has evidence.

    >>> energy_of(torch.tensor([[0.0, 0.0], [9.0, 0.0]])).argmax().item()
    0
    """
    return -logits.logsumexp(-1)


def _principal(centred: Tensor, freedom: int) -> tuple[Tensor, Tensor]:
    """Variances along the principal directions, largest first, and the directions as columns."""
    _, values, directions = torch.linalg.svd(centred, full_matrices=False)
    return values.square() / max(freedom, 1), directions.T
