"""Steps of a phase: what engines do before a method sees a batch, ``[train] augment`` and ``[train] balance``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedshift.core.context import Phase, RandomSpec
from fedshift.core.method import Batch, Method
from fedshift.core.tree import Tree
from fedshift.engines.balance import with_balance

SHIFT = "[train] augment"  # the draw behind it; no method's own draw is called so
SHIFT_NUMBERS = 3  # uniform numbers that one shifted image needs


def step(
    method: Method, state: Tree, batch: Batch, phase: Phase, lay: Callable[[Tensor], Tensor] = lambda x: x
) -> Tree:
    """One batch of a phase: a training step on augmented images, with balanced classes, or a fold.

    ``lay`` puts the inputs into the order of memory that an engine likes.
    """
    x = batch["x"]
    if _augments(method, phase):
        how = method.train.augment
        x = shifted(x, batch[SHIFT], flip="flip" in how, move="shift" in how)
    batch = {**batch, "x": lay(x)}
    if phase.kind == "fold":
        return method.fold(state, batch, phase)
    return method.client_step(state, with_balance(method, state, batch, phase), phase)


def wanted(method: Method, phase: Phase) -> dict[str, RandomSpec]:
    """Every random tensor of a phase's steps: the method's own and the augmentation's."""
    shift = {SHIFT: RandomSpec("uniform", (SHIFT_NUMBERS,))} if _augments(method, phase) else {}
    return {**method.draws(phase), **shift}


def _augments(method: Method, phase: Phase) -> bool:
    return method.train.augment != "none" and phase.kind != "fold" and phase.inputs == "x"


def shifted(x: Tensor, numbers: Tensor, flip: bool = True, move: bool = True) -> Tensor:
    """Images moved by up to an eighth of their sides, black where nothing was, and mirrored with probability 1/2.

    The usual augmentation of small images (crop out of a padded image, flip). ``numbers`` is ``[n, SHIFT_NUMBERS]`` uniform.

    >>> x = torch.arange(64.0).reshape(1, 1, 8, 8)
    >>> torch.equal(shifted(x, torch.tensor([[0.5, 0.5, 0.9]])), x)
    True
    """
    height, width = x.shape[2:]
    reach = (height // 8, width // 8) if move else (0, 0)
    rows, columns = (
        torch.arange(side, device=x.device) + (number * (2 * pad + 1)).floor().clamp(max=2 * pad).long()[:, None] - pad
        for side, number, pad in zip((height, width), numbers.unbind(1), reach, strict=False)
    )
    if flip:
        columns = torch.where((numbers[:, 2] < 0.5)[:, None], columns.flip(1), columns)
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None]
    source = rows.clamp(0, height - 1)[:, :, None] * width + columns.clamp(0, width - 1)[:, None]
    moved = x.flatten(2).gather(2, source.flatten(1)[:, None].expand(-1, x.shape[1], -1))
    return moved.view_as(x) * inside[:, None]
