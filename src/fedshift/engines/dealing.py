"""How clients' work is dealt to workers elsewhere: in pieces, with what is the same for all sent once."""

from __future__ import annotations

from collections.abc import Sequence

from fedshift.core.tree import Tree

PIECES_PER_WORKER = 4  # small enough pieces that no core waits long for the last one


def pieces_of(names: Sequence[str], sizes: Sequence[int], count: int) -> list[list[str]]:
    """Clients dealt into pieces of about equal work, the largest clients first.

    >>> pieces_of(["a", "b", "c"], [5, 9, 3], 2)
    [['b'], ['a', 'c']]
    """
    pieces: list[list[str]] = [[] for _ in range(min(count, len(names)))]
    loads = [0] * len(pieces)
    for size, name in sorted(zip(sizes, names, strict=True), reverse=True):
        lightest = loads.index(min(loads))
        pieces[lightest].append(name)
        loads[lightest] += size + 1
    return pieces


def common_of(trees: Sequence[Tree]) -> Tree:
    """The leaves that are one and the same tensor in all trees: they are written once."""
    first, *rest = trees
    return {
        slot: {n: leaf for n, leaf in leaves.items() if all(tree.get(slot, {}).get(n) is leaf for tree in rest)}
        for slot, leaves in first.items()
    }


def apart(tree: Tree, common: Tree) -> Tree:
    """What is not common; the slot stays, even if empty."""
    return {slot: {n: x for n, x in leaves.items() if n not in common.get(slot, {})} for slot, leaves in tree.items()}


def joined(own: Tree, common: Tree) -> Tree:
    """The whole tree again."""
    return {slot: {**common.get(slot, {}), **leaves} for slot, leaves in own.items()}
