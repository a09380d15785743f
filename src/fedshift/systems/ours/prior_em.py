"""Prior-EM: find out which classes a client has from its unlabelled images, and answer accordingly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedshift.blocks.calibration import Calibration, calibration_of
from fedshift.blocks.class_prior import Estimate, Shift, estimated_shift
from fedshift.blocks.mean_views import looking_at
from fedshift.core.adapter import Adapter
from fedshift.core.arch import Output
from fedshift.core.options import Count
from fedshift.core.registry import adapter
from fedshift.core.tree import Tensors, Tree

CHUNK = 512  # images whose forward pass is done at once


@adapter(
    "prior-em",
    paper="Adjusting the Outputs of a Classifier to New a Priori Probabilities: A Simple Procedure",
    venue="Neural Computation",
    year=2002,
)
@dataclass(frozen=True)
class PriorEM(Adapter):
    """Reweigh the model's probabilities by the class prior under which the client's images are most likely.

    With the prior q behind the model's probabilities p, ``p(y|x) / q(y)`` is the density of an image in a class up to a
    number for each image, so the client's class prior pi can be found by maximum likelihood, by expectation maximisation
    (Saerens et al. 2002), without labels; and ``pi(y) / q(y) p(y|x)``, made to sum to one, are its probabilities here.
    Temperature, a bias of every class, q and how good such estimates are here are measured by the training clients
    (``calibration``; Alexandari et al. 2020 found that calibration decides whether this works).

    ``mode = "transductive"`` looks at the whole unlabelled set first. ``mode = "online"`` answers every image with what the
    images before it say: after every ``block`` of them the prior is found again from the last ``memory`` ones, so that it
    also follows a prior that moves. Chunks of any size give the same answers.

    ``estimate``: ``em``; ``bbse`` (Lipton et al. 2018) and ``rlls`` (Azizzadenesheli et al. 2019), which use the answers'
    counts alone, for comparison.

    It assumes that images of a class look as they did in training. To do no harm where that is not so, the correction is
    only as strong as such estimates were right at the training clients, and as the images insist (``guard = false``: always
    whole); :func:`fedshift.blocks.class_prior.estimated_shift` says how.
    """

    mode: Literal["transductive", "online"] = "transductive"
    estimate: Estimate = "em"
    guard: bool = True
    block: Count = 16
    memory: Count = 1024

    stackable: ClassVar[bool] = False  # the online variant counts in Python where blocks begin
    telemetry: ClassVar[tuple[str, ...]] = ("strength",)
    calibrated: ClassVar[bool] = True

    @property
    def fits(self) -> bool:
        """Only the transductive variant looks at the whole set."""
        return self.mode == "transductive"

    def init(self, deployed: Tree) -> Tree:
        """Nothing has been seen."""
        like = next(iter(deployed["model"].values()))
        shift = like.new_zeros(self.arch.classes, dtype=torch.float64)
        start: Tensors = {"shift": shift, "strength": shift[0]}
        if self.mode == "online":
            nothing = shift.new_full((self.memory, self.arch.classes), -torch.inf)
            start |= {"recent": nothing, "seen": shift.new_zeros((), dtype=torch.int64)}
        return {**deployed, "classes": start}

    def fit(self, state: Tree, x: Tensor, draws: Mapping[str, Tensor]) -> Tree:
        """Find the prior of the whole set."""
        if len(x) == 0:
            return state
        parts = []
        for start in range(0, len(x), CHUNK):
            images = x[start : start + CHUNK]
            own = {name: leaf[start : start + CHUNK] for name, leaf in draws.items()}
            parts.append(looking_at(self, images, own).predict_with(state, images).logits)
        calibration = calibration_of(self, state, "own")
        return {**state, "classes": self._shift(torch.cat(parts), calibration)._asdict()}

    def predict(self, state: Tree, x: Tensor, draws: Mapping[str, Tensor]) -> tuple[Output, Tree]:
        """Reweigh."""
        output = self.predict_with(state, x)
        calibration = calibration_of(self, state, "own")
        if self.mode == "transductive":
            shift, strength = state["classes"]["shift"], state["classes"]["strength"].expand(len(x))
        else:
            shift, strength, state = self._follow(state, output.logits.double(), calibration)
        logits = (calibration.fit[0] * output.logits.double() + shift).log_softmax(1).to(output.logits.dtype)
        return output._replace(logits=logits, aux={**output.aux, "strength": strength.to(logits.dtype)}), state

    def _shift(self, logits: Tensor, calibration: Calibration) -> Shift:
        return estimated_shift(logits, calibration, self.estimate, self.guard)

    def _follow(self, state: Tree, logits: Tensor, calibration: Calibration) -> tuple[Tensor, Tensor, Tree]:
        """Corrections of every sample; the prior is found anew where a block of the stream begins."""
        now = state["classes"]
        recent, seen, shift, strength = now["recent"], int(now["seen"]), now["shift"], now["strength"]
        first = self.block - seen % self.block
        sizes = [first, *[self.block] * (max(len(logits) - first, 0) // self.block + 1)]
        shifts, strengths = [], []
        for part in logits.split(_cut(sizes, len(logits))):
            if seen and seen % self.block == 0:
                there = recent[recent.amax(1) > -torch.inf]
                shift, strength = self._shift(there, calibration)
            shifts.append(shift.expand(len(part), -1))
            strengths.append(strength.expand(len(part)))
            recent = torch.cat([recent, part])[-self.memory :]
            seen += len(part)
        kept = {"recent": recent, "seen": now["seen"] + len(logits), "shift": shift, "strength": strength}
        return torch.cat(shifts), torch.cat(strengths), {**state, "classes": kept}


def _cut(sizes: list[int], total: int) -> list[int]:
    """The first of these sizes that make up a total, the last one as large as there is left.

    >>> _cut([3, 4, 4], 9), _cut([3, 4], 2), _cut([3, 4], 3)
    ([3, 4, 2], [2], [3])
    """
    cut: list[int] = []
    for size in sizes:
        left = total - sum(cut)
        if left > 0:
            cut.append(min(size, left))
    return cut
