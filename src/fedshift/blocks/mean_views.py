"""``views``: an adapter that sees, in place of every image, what the network makes of it and of AugMix views of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedshift.blocks import augmix
from fedshift.core.adapter import Adapter, Predict
from fedshift.core.arch import Arch, BatchStats, Output
from fedshift.core.context import RandomSpec
from fedshift.core.options import Count
from fedshift.core.tree import Tensors, Tree
from fedshift.errors import UserError

DRAWS = "mean-views"


@dataclass(frozen=True, eq=False)
class MeanOverViews:
    """A prediction whose probabilities and features are means over an image and its views; other images as they are."""

    predict: Predict
    images: Tensor  # these have views
    numbers: Tensor  # [n, views, augmix.NUMBERS]
    flip: bool

    def __call__(self, deployed: Tree, x: Tensor, batch_stats: BatchStats = False) -> Output:
        """Predict all views at once; ``aux["every-view"]`` has the features of each, ``[n, 1 + views, d]``."""
        plain = self.predict(deployed, x, batch_stats)
        if x is not self.images:
            return plain
        views = augmix.views(x, self.numbers, flip=self.flip)
        seen = self.predict(deployed, views.flatten(0, 1), False)
        logits, features = (
            torch.cat([own[:, None], other.unflatten(0, views.shape[:2])], 1)
            for own, other in ((plain.logits, seen.logits), (plain.features, seen.features))
        )
        return plain._replace(
            logits=log_mean(logits), features=features.mean(1), aux={**plain.aux, "every-view": features}
        )


def second_head(arch: Arch, head: Tensors, output: Output) -> Tensor:
    """The logits of another head on what was predicted; the log of a mean of probabilities where there are views."""
    every = output.aux.get("every-view")
    return arch.classify(head, output.features) if every is None else log_mean(arch.classify(head, every))


def log_mean(logits: Tensor) -> Tensor:
    """The log of the mean over views of probabilities: ``[n, views, classes] -> [n, classes]``.

    >>> log_mean(torch.tensor([[[0.0, 0.0], [50.0, 0.0]]])).exp()
    tensor([[0.7500, 0.2500]])
    """
    return logits.log_softmax(-1).logsumexp(1) - torch.tensor(logits.shape[1], dtype=logits.dtype).log()


class _WithViews(Adapter):
    """Put before an adapter's own class by :func:`with_views`."""

    views: int
    flip: bool
    stackable: ClassVar[bool] = False  # views are made by sorting them

    def draws(self) -> dict[str, RandomSpec]:
        return {**super().draws(), DRAWS: RandomSpec("uniform", (self.views, augmix.NUMBERS))}

    def looking_at(self, x: Tensor, draws: Mapping[str, Tensor]) -> _WithViews:
        return replace(self, predict_with=MeanOverViews(self.predict_with, x, draws[DRAWS], self.flip))

    def predict(self, state: Tree, x: Tensor, draws: Mapping[str, Tensor]) -> tuple[Output, Tree]:
        return super(_WithViews, self.looking_at(x, draws)).predict(state, x, draws)


def looks(adapter: Adapter) -> str:
    """What an adapter looks at beside an image itself, in words: nothing, or views of it."""
    if not isinstance(adapter, _WithViews):
        return ""
    return f"{adapter.views} views" if adapter.flip else f"{adapter.views} views not mirrored"


def looking_at(adapter: Adapter, x: Tensor, draws: Mapping[str, Tensor]) -> Adapter:
    """An adapter when it predicts these images: itself, unless it looks at views of them too."""
    return adapter.looking_at(x, draws) if isinstance(adapter, _WithViews) else adapter


def like(adapter: Adapter, cls: type[Adapter]) -> Adapter:
    """An adapter of another class, with its own settings, that looks at images as this one does."""
    if not isinstance(adapter, _WithViews):
        return cls(adapter.arch, adapter.predict_with)
    network = adapter.predict_with
    network = network.predict if isinstance(network, MeanOverViews) else network
    return with_views(cls)(adapter.arch, network, views=adapter.views, flip=adapter.flip)  # type: ignore[call-arg]


def with_views(cls: type[Adapter]) -> type[Adapter]:
    """An adapter's class with two more options: how many ``views``, and whether they may be mirrored (``flip``).

    Probabilities and features are means over the image and its views, so what views are worth and what the adapter is worth
    can be told apart: ``none`` with views is plain test-time augmentation. Forward passes only. An adapter that has
    a second head asks :func:`second_head` for its logits.

    >>> from fedshift.adapters.none import NoAdaptation
    >>> with_views(NoAdaptation).__name__
    'NoAdaptationWithViews'
    """
    made: type[Adapter] = _made(cls)  # type: ignore[arg-type]
    return made


@cache
def _made(cls: Any) -> type[Adapter]:
    space = {
        "__doc__": cls.__doc__,
        "__module__": cls.__module__,
        "__annotations__": {"views": Count, "flip": bool},
        "views": 8,
        "flip": True,
    }
    return dataclass(frozen=True)(type(f"{cls.__name__}WithViews", (_WithViews, cls), space))


def check_views(name: str, adapter: Adapter) -> None:
    """Views are of single images: an adapter of batches, or one that trains along the stream, has none."""
    if adapter.batch is not None or adapter.sequential:
        raise UserError(f"adapter {name!r} has no option 'views': it does not answer sample by sample")
