"""An upload as one vector: how far it is from what came down. All of privacy works on that vector."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedshift.core.tree import Tree, shapes
from fedshift.errors import UserError


@dataclass(frozen=True)
class Frame:
    """What an upload is measured from: the leaf that came down under its name, or zero where none did.

    Counters (BatchNorm's ``num_batches_tracked``) do not travel: nobody could take the largest of a sum, so they stay what
    came down.

    >>> frame = Frame.of({"model": {"w": torch.tensor([3.0])}}, {"model": {"w": torch.tensor([1.0])}})
    >>> frame.vector({"model": {"w": torch.tensor([3.0])}}), frame.tree(torch.tensor([0.5]))
    (tensor([2.]), {'model': {'w': tensor([1.5000])}})
    """

    reference: Tree

    @staticmethod
    def of(up: Tree, down: Tree) -> Frame:
        """The frame of an upload; only its names, shapes and types matter, and what came down."""
        return Frame(
            {
                slot: {name: _reference(slot, name, leaf, down) for name, leaf in leaves.items()}
                for slot, leaves in up.items()
            }
        )

    @property
    def size(self) -> int:
        """How long the vector is."""
        return sum(leaf.numel() for leaf in self._floats())

    def vector(self, up: Tree) -> Tensor:
        """An upload as a vector."""
        parts = [
            (up[slot][name] - leaf).flatten()
            for slot, leaves in self.reference.items()
            for name, leaf in leaves.items()
            if leaf.is_floating_point()
        ]
        return torch.cat(parts) if parts else torch.zeros(0)

    def tree(self, vector: Tensor) -> Tree:
        """The upload that a vector stands for."""
        parts = iter(vector.split([leaf.numel() for leaf in self._floats()]))
        return {
            slot: {
                name: leaf + next(parts).to(leaf).reshape(leaf.shape) if leaf.is_floating_point() else leaf
                for name, leaf in leaves.items()
            }
            for slot, leaves in self.reference.items()
        }

    def same_as(self, other: Frame) -> bool:
        """Whether sums can be taken over uploads of both."""
        if shapes(self.reference) != shapes(other.reference):
            return False
        pairs = zip(self._leaves(), other._leaves(), strict=True)
        return all(one is two or torch.equal(one, two) for one, two in pairs)

    def _leaves(self) -> list[Tensor]:
        return [leaf for leaves in self.reference.values() for leaf in leaves.values()]

    def _floats(self) -> list[Tensor]:
        return [leaf for leaf in self._leaves() if leaf.is_floating_point()]


def _reference(slot: str, name: str, leaf: Tensor, down: Tree) -> Tensor:
    found = down.get(slot, {}).get(name)
    if found is not None and found.shape == leaf.shape:
        return found
    if not leaf.is_floating_point():
        raise UserError(f"[privacy] {slot}/{name} is a counter that did not come down, and counters do not travel")
    return torch.zeros_like(leaf)
