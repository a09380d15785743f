"""An adapter: what a deployed client does with its unlabelled test data. The second axis, orthogonal to methods."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from fedshift.core.arch import Arch, BatchStats, Output
from fedshift.core.method import Draw
from fedshift.core.schedule import batch_sizes
from fedshift.core.tree import Tensors, Tree


class Forward(Protocol):
    """A method's forward pass: logits, features, inner activations, refreshed buffers of a deployed model."""

    def __call__(self, deployed: Tree, x: Tensor, batch_stats: BatchStats = False) -> Output:
        """Predict images in [0, 1]."""


@dataclass(frozen=True)
class Adapter:
    """Predicts without adapting; override to adapt.

    ``needs`` are slots the method must deploy, ``needs_arch`` properties the network must have. ``batch`` is the number
    of samples an adapter must see together; None means per-sample answers, the same in chunks of any size.
    """

    arch: Arch
    forward: Forward

    needs: ClassVar[frozenset[str]] = frozenset({"model"})
    needs_arch: ClassVar[frozenset[str]] = frozenset()
    stackable: ClassVar[bool] = True  # many streams' predictions can run under one vmap
    sequential: ClassVar[bool] = False  # samples are worked through one by one: engines run many streams side by side
    telemetry: ClassVar[tuple[str, ...]] = ()  # entries of its outputs' ``aux``: one number in [0, 1] for each sample

    @property
    def batch(self) -> int | None:
        """How many samples belong together, or None if each is on its own."""
        return None

    @property
    def fits(self) -> bool:
        """Whether it looks at the whole unlabelled set before it predicts any of it."""
        return type(self).fit is not Adapter.fit

    def slots(self) -> frozenset[str]:
        """The slots that these settings need."""
        return self.needs

    def requirements(self) -> frozenset[str]:
        """Properties of the architecture that these settings need."""
        return self.needs_arch

    def draws(self) -> dict[str, Draw]:
        """Random tensors wanted per sample, keyed by sample id."""
        return {}

    def at(self, lr: float) -> Adapter:
        """The adapter for models whose method would train at this rate now; most have a rate of their own."""
        return self

    def prepare(self, deployed: Tree, batches: Iterable[Mapping[str, Tensor]]) -> Tree:
        """Before deployment, at the client, with its training data (``x``, ``y``); the result joins ``deployed``."""
        return {}

    def init(self, deployed: Tree) -> Tree:
        """The state a stream starts from."""
        return deployed

    def fit(self, state: Tree, x: Tensor, draws: Mapping[str, Tensor]) -> Tree:
        """For adapters that see the whole unlabelled set before they predict any of it."""
        return state

    def predict(self, state: Tree, x: Tensor, draws: Mapping[str, Tensor]) -> tuple[Output, Tree]:
        """One chunk of the stream; the order of predicting and adapting is the adapter's own."""
        return self.forward(state, x), state

    def update(self, tensors: Tensors, x: Tensor) -> Tensors:
        """One differentiable adaptation step, reusable inside a training loss."""
        return tensors


def with_refreshed_statistics(forward: Forward, state: Tree, x: Tensor, batch_size: int, passes: int) -> Tree:
    """A state whose normalisation layers have seen these images so often, in batches, with their own momentum."""
    for _ in range(passes):
        for images in x.split(batch_sizes(len(x), batch_size)):
            if len(images) > 1:  # one sample has no statistics
                buffers = forward(state, images, batch_stats=True).buffers
                state = {**state, "model": {**state["model"], **buffers}}
    return state
