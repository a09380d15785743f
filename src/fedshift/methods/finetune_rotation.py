"""FedAvg-FT whose personal phase also learns which way up images are: what test-time training starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from fedshift.blocks.rotation import NAMES, TURNS, turn_losses, turned, untrained
from fedshift.core.arch import Arch
from fedshift.core.context import ClientInfo, Context, Phase, RandomSpec
from fedshift.core.method import Batch
from fedshift.core.registry import method
from fedshift.core.tree import Tensors, Tree, drop, pick
from fedshift.errors import UserError
from fedshift.methods.finetune import FineTune


@method(
    "finetune-rotation",
    paper="Test-Time Training with Self-Supervision for Generalization under Distribution Shifts",
    venue="ICML",
    year=2020,
)
@dataclass(frozen=True)
class RotationFineTune(FineTune):
    """FedAvg-FT with a linear head on the features that guesses by how many quarter turns an image was rotated.

    The head is born with the personal phase, all zero, and trained there together with everything else on the sum of both
    losses, each image turned at random in every step; it never travels. FedTHE's row TTT is this with the adapter ``ttt``.
    Unseen clients have an untrained head.
    """

    provides: ClassVar[frozenset[str]] = FineTune.provides | {"rotation"}

    @classmethod
    def build(cls, backbone: Arch, options: Mapping[str, Any]) -> Arch:
        """A quarter turn needs square images."""
        _, height, width = backbone.input_shape
        if height != width:
            raise UserError(f"method 'finetune-rotation' turns images, so they must be square, not {width}x{height}")
        return backbone

    def init_local(self, model: Tensors, info: ClientInfo, ctx: Context) -> Tree:
        """The head is needed at the end only."""
        like = next(iter(model.values()))
        return {"rotation": untrained(like, self.arch.feature_size)} if ctx.ending else {}

    def begin(self, down: Tree, local: Tree) -> Tree:
        """Both heads in one slot, so that one optimiser trains them."""
        state = super().begin(down, local)
        return {**state, "model": {**state["model"], **local.get("rotation", {})}}

    def last_phases(self, ctx: Context) -> tuple[Phase, ...]:
        """The personal phase trains the rotation head too."""
        return tuple(replace(phase, trainable=self.arch.trainable | set(NAMES)) for phase in super().last_phases(ctx))

    def draws(self, phase: Phase) -> dict[str, RandomSpec]:
        """A turn for each image of a batch."""
        return {"turn": RandomSpec("integers", high=TURNS)} if phase.name == "finetune" else {}

    def loss(self, state: Tree, tensors: Tensors, batch: Batch, phase: Phase) -> tuple[Tensor, Tensors]:
        """The sum of both tasks' losses."""
        value, buffers = super().loss(state, tensors, batch, phase)
        if phase.name != "finetune":
            return value, buffers
        x = turned(batch["x"], batch["turn"])
        features, _, refreshed = self.arch.encode({**tensors, **buffers}, x, phase.batch_stats)
        return value + turn_losses(tensors, features, batch["turn"]).mean(), {**buffers, **refreshed}

    def settle(self, state: Tree | None, down: Tree, local: Tree, ctx: Context) -> tuple[Tree, Tree]:
        """The tuned model and its rotation head stay."""
        if state is None:
            return {}, local
        gift, kept = super().settle({**state, "model": drop(state["model"], NAMES)}, down, local, ctx)
        return gift, {**kept, "rotation": pick(state["model"], NAMES)}

    @property
    def gives(self) -> bool:
        """Nothing: both are one's own."""
        return False

    def deployed(self, down: Tree, local: Tree) -> Tree:
        """With the rotation head."""
        like = next(iter(down["model"].values()))
        return {
            **super().deployed(down, local),
            "rotation": local.get("rotation", untrained(like, self.arch.feature_size)),
        }
