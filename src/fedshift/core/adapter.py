"""An adapter: what a deployed client does with its unlabelled test data. The second axis, orthogonal to methods."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from fedshift.core.arch import Arch, BatchStats, Output
from fedshift.core.context import RandomSpec
from fedshift.core.options import Checked
from fedshift.core.tree import Tree


class Predict(Protocol):
    """A method's prediction: logits, features, inner activations, refreshed buffers of a deployed model."""

    def __call__(self, deployed: Tree, x: Tensor, batch_stats: BatchStats = False) -> Output:
        """Predict images in [0, 1]."""


@dataclass(frozen=True)
class Adapter(Checked):
    """Predicts without adapting; override to adapt.

    ``requires`` are slots the method must deploy, ``requires_arch`` properties the network must have.
    """

    arch: Arch
    predict_with: Predict  # the method's predict, bound

    requires: ClassVar[frozenset[str]] = frozenset({"model"})
    requires_arch: ClassVar[frozenset[str]] = frozenset()
    reasons: ClassVar[Mapping[str, str]] = {}  # what a required capability is, in words for who does not have it
    stackable: ClassVar[bool] = True  # many streams' predictions can run under one vmap
    calibrated: ClassVar[bool] = False  # wants what clients measured on validation images: slot ``calibration``
    sequential: ClassVar[bool] = False  # samples are worked through one by one: engines run many streams side by side
    telemetry: ClassVar[tuple[str, ...]] = ()  # entries of its outputs' ``aux``: one number in [0, 1] for each sample

    @property
    def batch(self) -> int | None:
        """How many samples belong together; None: each is on its own, and answers are the same in chunks of any size."""
        return None

    @property
    def fits(self) -> bool:
        """Whether it looks at the whole unlabelled set before it predicts any of it."""
        return type(self).fit is not Adapter.fit

    def slots(self) -> frozenset[str]:
        """The slots that these settings need."""
        return self.requires

    def requirements(self) -> frozenset[str]:
        """Properties of the architecture that these settings need."""
        return self.requires_arch

    def draws(self) -> dict[str, RandomSpec]:
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
        return self.predict_with(state, x), state
