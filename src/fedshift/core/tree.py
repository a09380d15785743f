"""The one state type: a client's working state, its private memory, a message, a checkpoint.

``Tree = dict[str, dict[str, Tensor]]`` (slot -> name -> tensor). Everything about a client is in trees and nothing is
anywhere else, which is what makes a client resumable, movable to another machine and stackable with a thousand
others. Trees are never changed in place: every function here returns a new one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedshift.errors import UserError

Tensors: TypeAlias = dict[str, Tensor]
Tree: TypeAlias = dict[str, Tensors]


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
    floats = [leaf for leaves in tree.values() for leaf in leaves.values() if leaf.is_floating_point()]
    return not floats or bool(torch.stack([leaf.isfinite().all() for leaf in floats]).all())


def float_bytes(tree: Tree) -> int:
    """What a message costs on the wire: the bytes of every floating-point tensor in it, BN statistics included.

    >>> float_bytes({"m": {"w": torch.zeros(10), "n": torch.tensor(1)}})
    40
    """
    return sum(
        leaf.numel() * leaf.element_size()
        for leaves in tree.values()
        for leaf in leaves.values()
        if leaf.is_floating_point()
    )


def write(path: Path, trees: Mapping[str, Tree], facts: Mapping[str, object] | None = None) -> None:
    """Write several named trees and some JSON facts to one safetensors file.

    The keys are ``owner/slot/name`` with owner and slot as numbers into the header's lists, so that any name will do and
    empty slots and empty trees survive.
    """
    tensors: Tensors = {}
    storages: set[int] = set()
    for i, tree in enumerate(trees.values()):
        for j, leaves in enumerate(tree.values()):
            for name, leaf in leaves.items():
                plain = leaf.detach().cpu().contiguous()
                # a file holds no two tensors of one memory, nor a part of a larger one
                shared = plain.untyped_storage().nbytes() != plain.nbytes or plain.data_ptr() in storages
                tensors[f"{i}/{j}/{name}"] = plain.clone() if shared else plain
                storages.add(plain.data_ptr())
    owners = [[owner, list(tree)] for owner, tree in trees.items()]
    described = {"owners": owners, "order": list(tensors), "facts": dict(facts or {})}
    header = {"fedshift": json.dumps(described)}
    save_file(tensors, path, metadata=header)


def save(path: Path, trees: Mapping[str, Tree], facts: Mapping[str, object] | None = None) -> None:
    """:func:`write`, all or nothing: the file appears under its name only when it is complete and on disk.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "state.safetensors"
    >>> save(path, {"server": {"model": {"w": torch.ones(2)}, "nothing": {}}}, {"round": 3})
    >>> load(path)
    ({'server': {'model': {'w': tensor([1., 1.])}, 'nothing': {}}}, {'round': 3})
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(temporary, trees, facts)
        with open(temporary, "rb") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: Path) -> tuple[dict[str, Tree], dict[str, object]]:
    """Read what :func:`save` wrote: the trees by name, and the facts."""
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})["fedshift"])
            trees: list[Tree] = [{slot: {} for slot in slots} for _, slots in header["owners"]]
            # as they were written: a sum over tensors in another order has other bits, and files sort their names
            for key in header["order"]:
                owner, slot, name = key.split("/", 2)
                trees[int(owner)][header["owners"][int(owner)][1][int(slot)]][name] = file.get_tensor(
                    key
                ).clone()  # aligned memory: same bits as before
            return {owner: tree for (owner, _), tree in zip(header["owners"], trees, strict=True)}, dict(
                header["facts"]
            )
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except (OSError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{path} is not a fedshift state file or is damaged ({error})") from None
    except Exception as error:  # safetensors raises its own type, which it does not export everywhere
        if type(error).__name__ != "SafetensorError":
            raise
        raise UserError(f"{path} is not a fedshift state file or is damaged ({error})") from None
