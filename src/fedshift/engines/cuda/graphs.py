"""Captured CUDA graphs of a step: the launch overhead of hundreds of small kernels is paid once."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fedshift.core.tree import Tree, map_tree

Step: TypeAlias = Callable[[Tree, Mapping[str, Tensor]], Tree]
WARM_UP = 3  # a step runs this often before it is captured, so that rare shapes are never captured
MOST = 32  # graphs kept; each holds the memory of its intermediate results


class Graphs:
    """Replays steps. Tensors of a returned state belong to the graph until the next call."""

    def __init__(self) -> None:
        self._seen: Counter[Hashable] = Counter()
        self._steps: dict[Hashable, Step] = {}
        self._states: dict[Hashable, Tree] = {}
        self._batches: dict[Hashable, dict[str, Tensor]] = {}
        self._copied: dict[Hashable, Tensor] = {}
        self._graphs: dict[Hashable, Any] = {}
        self._pool: Any = None

    def step(
        self, group: Hashable, size: int, step: Step, state: Tree, batch: Mapping[str, Tensor], compile_step: bool
    ) -> Tree:
        """One step. ``group`` identifies method, phase and number of clients; ``size`` is the batch's."""
        key = (group, size)
        if key not in self._graphs:
            self._seen[key] += 1
            if key not in self._steps:
                self._steps[key] = _compiled(step) if compile_step else step
            chosen = self._steps[key]
            if self._seen[key] <= WARM_UP or len(self._graphs) >= MOST:
                return chosen(state, batch)
            self._capture(key, group, chosen, state, batch)
        static = self._states[group]
        _copy(state, static)
        for name, leaf in batch.items():
            if self._copied.get((key, name)) is not leaf:  # most of a batch is new, but not what all steps share
                self._batches[key][name].copy_(leaf)
                self._copied[key, name] = leaf
        self._graphs[key].replay()
        return static

    def clear(self) -> None:
        """Free everything; a pool whose last graph is gone cannot be captured into again."""
        self._pool = None
        self._seen.clear()
        self._steps.clear()
        self._states.clear()
        self._batches.clear()
        self._copied.clear()
        self._graphs.clear()

    def _capture(self, key: Hashable, group: Hashable, step: Step, state: Tree, batch: Mapping[str, Tensor]) -> None:
        static = self._states.setdefault(group, map_tree(torch.clone, state))
        inputs = self._batches.setdefault(key, {name: leaf.clone() for name, leaf in batch.items()})
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step(static, inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            _copy(_apart(step(static, inputs), static), static)
        self._graphs[key] = graph


def _compiled(step: Step) -> Step:
    compiled: Step = torch.compile(step, dynamic=False)

    def guarded(state: Tree, batch: Mapping[str, Tensor]) -> Tree:
        nonlocal compiled
        try:
            return compiled(state, batch)
        except torch._dynamo.exc.TorchDynamoException as error:  # the eager step gives the same numbers
            warnings.warn(f"torch.compile cannot handle this step ({str(error)[:200]}); going on without", stacklevel=2)
            compiled = step
            return step(state, batch)

    return guarded


def _copy(source: Tree, target: Tree) -> None:
    if source is target:
        return
    pairs = [(target[slot][name], leaf) for slot, leaves in source.items() for name, leaf in leaves.items()]
    changed = [(old, new) for old, new in pairs if old.data_ptr() != new.data_ptr()]
    if changed:  # in few launches: states have many small tensors
        torch._foreach_copy_([old for old, _ in changed], [new for _, new in changed])


def _apart(moved: Tree, static: Tree) -> Tree:
    """A step may hand an old value on under another name; it is copied before its position is overwritten."""
    positions = {leaf.data_ptr() for leaves in static.values() for leaf in leaves.values()}
    return {
        slot: {
            name: leaf.clone() if leaf.data_ptr() in positions - {static[slot][name].data_ptr()} else leaf
            for name, leaf in leaves.items()
        }
        for slot, leaves in moved.items()
    }
