"""Stacks as large as memory allows: one that does not fit is cut in two, and it is said."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import torch

from fedshift.engines.cuda.graphs import wants_memory
from fedshift.errors import UserError

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")


class Stacks:
    """How many of what fits into memory together, found out by trying; ``free`` lets go of what can be made again."""

    def __init__(self, free: Callable[[], object] = lambda: None) -> None:
        self._free = free
        self._found: dict[Hashable, int] = {}

    def work(
        self, what: str, key: Hashable, items: Sequence[T], most: int, work: Callable[[Sequence[T]], dict[K, V]]
    ) -> dict[K, V]:
        """The results of ``work`` on all items, at most ``most`` at a time and fewer where memory is short.

        ``work`` must be pure: what ran out of memory is done again. What was found out stays known under ``key``.

        >>> Stacks().work("clients", "x", [1, 2, 3], 2, lambda some: {one: len(some) for one in some})
        {1: 2, 2: 2, 3: 1}
        """
        results: dict[K, V] = {}
        done = 0
        while done < len(items):
            some = items[done : done + min(most, self._found.get(key, most))]
            made = _tried(work, some)
            if made is None:  # the failed try is out of sight, and so are its tensors
                self._narrow(what, key, len(some))
            else:
                results |= made
                done += len(some)
        return results

    def clear(self) -> None:
        """Forget what was found out."""
        self._found.clear()

    def _narrow(self, what: str, key: Hashable, count: int) -> None:
        if count == 1:
            raise UserError(
                f"there is not enough memory for one of the {what}: choose a smaller [train] batch-size, network or "
                "image size, or end other programs on this device"
            )
        self._found[key] = (count + 1) // 2
        self._free()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        warnings.warn(
            f"{count} {what} do not fit into memory together; from now on at most {self._found[key]} are stacked",
            stacklevel=4,
        )


def _tried(work: Callable[[Sequence[T]], dict[K, V]], some: Sequence[T]) -> dict[K, V] | None:
    try:
        return work(some)
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        if not wants_memory(error):
            raise
        return None
