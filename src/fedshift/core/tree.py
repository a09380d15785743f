"""The one state type: a client's working state, its private memory, a message, a checkpoint.

``Tree = dict[str, dict[str, Tensor]]`` (slot -> name -> tensor). Everything about a client is in trees and nothing is
anywhere else, which is what makes a client resumable, movable to another machine and stackable with a thousand
others. Trees are never changed in place: every function here returns a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Tensors: TypeAlias = dict[str, Tensor]
"""Tensors by name: one slot of a tree."""
Tree: TypeAlias = dict[str, Tensors]
"""Slot, name, tensor: a state, a message, a checkpoint, a row of a stack of clients."""


def map_tree(function: Callable[..., Tensor], *trees: Tree) -> Tree:
    """Apply ``function`` leaf by leaf to trees of the same structure.

    >>> map_tree(torch.add, {"m": {"w": torch.ones(1)}}, {"m": {"w": torch.ones(1)}})
    {'m': {'w': tensor([2.])}}
    """
    first, *rest = trees
    return {
        slot: {name: function(leaf, *(tree[slot][name] for tree in rest)) for name, leaf in leaves.items()}
        for slot, leaves in first.items()
    }


def stack(trees: Sequence[Tree]) -> Tree:
    """Many clients as one: every leaf gets a new first dimension.

    >>> stack([{"m": {"w": torch.zeros(3)}}] * 4)["m"]["w"].shape
    torch.Size([4, 3])
    """
    return map_tree(lambda *leaves: torch.stack(leaves), *trees)


def unstack(tree: Tree, count: int) -> list[Tree]:
    """The inverse of :func:`stack`; the leaves are views.

    >>> unstack({"m": {"w": torch.arange(2)}}, 2)[1]
    {'m': {'w': tensor(1)}}
    """
    parts = {slot: {name: leaf.unbind(0) for name, leaf in leaves.items()} for slot, leaves in tree.items()}
    return [
        {slot: {name: leaf[k] for name, leaf in leaves.items()} for slot, leaves in parts.items()} for k in range(count)
    ]


def shapes(tree: Tree) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """Slots, names and shapes: trees that agree in them can be stacked.

    >>> shapes({"model": {"w": torch.zeros(2)}})
    (('model', 'w', (2,)),)
    """
    return tuple((slot, name, tuple(leaf.shape)) for slot, leaves in tree.items() for name, leaf in leaves.items())


def to(tree: Tree, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Tree:
    """Move a tree; ``dtype`` applies to floating-point leaves only (counters stay integers).

    >>> to({"m": {"n": torch.tensor(3)}}, dtype=torch.float64)
    {'m': {'n': tensor(3)}}
    """
    return map_tree(lambda leaf: leaf.to(device, dtype if leaf.is_floating_point() else None), tree)


def weighted_mean(parts: Sequence[Tensors], weights: Tensor) -> Tensors:
    """Leaf-wise sum of ``weights[k] * parts[k]``, added in client order; integers and flags keep the largest value.

    Averaging a counter (BatchNorm's ``num_batches_tracked``) as a number with a fraction would break its type.

    >>> weighted_mean([{"w": torch.zeros(1)}, {"w": torch.ones(1)}], torch.tensor([0.25, 0.75]))
    {'w': tensor([0.7500])}
    """
    result: Tensors = {}
    for name, leaf in parts[0].items():
        if leaf.is_floating_point():
            total = torch.zeros_like(leaf)
            for part, weight in zip(parts, weights.to(leaf.device, leaf.dtype).unbind(), strict=True):
                total = torch.addcmul(total, part[name], weight)
            result[name] = total
        else:
            result[name] = torch.stack([part[name] for part in parts]).amax(0)
    return result


def uniform_mean(parts: Sequence[Tensors]) -> Tensors:
    """:func:`weighted_mean` in which all count the same.

    >>> uniform_mean([{"w": torch.zeros(1)}, {"w": torch.ones(1)}])
    {'w': tensor([0.5000])}
    """
    return weighted_mean(parts, torch.full((len(parts),), 1 / len(parts), dtype=torch.float64))


def pick(tensors: Mapping[str, Tensor], names: Iterable[str]) -> Tensors:
    """The entries of ``tensors`` with these names, in the order of ``tensors``.

    >>> list(pick({"a": torch.ones(1), "b": torch.ones(1)}, {"b"}))
    ['b']
    """
    wanted = frozenset(names)
    return {name: leaf for name, leaf in tensors.items() if name in wanted}


def drop(tensors: Mapping[str, Tensor], names: Iterable[str]) -> Tensors:
    """The entries of ``tensors`` without these names.

    >>> list(drop({"a": torch.ones(1), "b": torch.ones(1)}, {"b"}))
    ['a']
    """
    unwanted = frozenset(names)
    return {name: leaf for name, leaf in tensors.items() if name not in unwanted}


def zeros_like(tensors: Mapping[str, Tensor]) -> Tensors:
    """Zeros of the same names and shapes.

    >>> zeros_like({"a": torch.ones(1)})
    {'a': tensor([0.])}
    """
    return {name: torch.zeros_like(leaf) for name, leaf in tensors.items()}


def subtract(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensors:
    """``a - b`` for the names of ``b``.

    >>> subtract({"w": torch.tensor(3.0)}, {"w": torch.tensor(1.0)})
    {'w': tensor(2.)}
    """
    return {name: a[name] - leaf for name, leaf in b.items()}


def squared_distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """Sum over the names of ``b`` of the squared L2 distance (a proximal term without its factor).

    >>> squared_distance({"w": torch.tensor([3.0, 4.0])}, {"w": torch.zeros(2)})
    tensor(25.)
    """
    return torch.stack([(a[name] - leaf).square().sum() for name, leaf in b.items()]).sum()


def all_finite(tree: Tree) -> bool:
    """Whether no floating-point leaf holds a NaN or an infinity.

    >>> all_finite({"m": {"w": torch.tensor([1.0, float("nan")])}})
    False
    """
    floats = _floats(tree)
    return not floats or bool(torch.stack([leaf.isfinite().all() for leaf in floats]).all())


def float_bytes(tree: Tree) -> int:
    """What a message costs on the wire: the bytes of every floating-point tensor in it, BN statistics included.

    >>> float_bytes({"m": {"w": torch.zeros(10), "n": torch.tensor(1)}})
    40
    """
    return sum(leaf.numel() * leaf.element_size() for leaf in _floats(tree))


def _floats(tree: Tree) -> list[Tensor]:
    return [leaf for leaves in tree.values() for leaf in leaves.values() if leaf.is_floating_point()]
