"""Captured CUDA graphs of a step: the launch overhead of hundreds of small kernels is paid once."""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fedshift.core.tree import Tree, map_tree

Step: TypeAlias = Callable[[Tree, Mapping[str, Tensor]], Tree]
WARM_UP = 3  # a step runs this often before it is captured, so that rare shapes are never captured
MOST = 32  # graphs kept; each holds the memory of its intermediate results


class Graphs:
    """Replays steps. Tensors of a returned state belong to the graph until the next call.

    A step may return more slots than it was given: what it says beside the state it moved. What cannot be captured (a
    method or adapter that looks at values) goes on step by step, and that is said.
    """

    def __init__(self, warm_up: int = WARM_UP) -> None:
        self._warm_up = warm_up
        self._seen: Counter[Hashable] = Counter()
        self._steps: dict[Hashable, Step] = {}
        self._states: dict[Hashable, Tree] = {}
        self._batches: dict[Hashable, dict[str, Tensor]] = {}
        self._copied: dict[Hashable, Tensor] = {}
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._said: dict[Hashable, Tree] = {}  # slots that a captured step returned beside its state
        self._refused: set[Hashable] = set()
        self._pool: Any = None

    @property
    def captured(self) -> int:
        """How many steps are replayed."""
        return len(self._graphs)

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
            if (
                self._seen[key] <= self._warm_up
                or len(self._graphs) >= MOST
                or not self._can(key, group, chosen, state, batch)
            ):
                return chosen(state, batch)
        static = self._states[group]
        copy_into(static, state)
        for name, leaf in batch.items():
            if self._copied.get((key, name)) is not leaf:  # most of a batch is new, but not what all steps share
                self._batches[key][name].copy_(leaf)
                self._copied[key, name] = leaf
        self._graphs[key].replay()
        return {**static, **self._said[key]} if self._said[key] else static

    def clear(self) -> None:
        """Free everything; a pool whose last graph is gone cannot be captured into again."""
        self._pool = None
        self._seen.clear()
        self._steps.clear()
        self._states.clear()
        self._batches.clear()
        self._copied.clear()
        self._graphs.clear()
        self._said.clear()
        self._refused.clear()

    def _can(self, key: Hashable, group: Hashable, step: Step, state: Tree, batch: Mapping[str, Tensor]) -> bool:
        """Whether this step could be captured, now or before."""
        if key in self._refused:
            return False
        try:
            self._capture(key, group, step, state, batch)
        except RuntimeError as error:
            if wants_memory(error):
                raise
            self._refused.add(key)
            warnings.warn(f"a step is slower than need be, no CUDA graph can be made of it: {error}", stacklevel=3)
            return False
        return True

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
        with _capturing(graph, self._pool):
            said = settled(step(static, inputs), static)
        self._graphs[key] = graph
        self._said[key] = said


def wants_memory(error: BaseException | None) -> bool:
    """Whether memory is what is missing: a capture that breaks off says something else first.

    >>> wants_memory(torch.OutOfMemoryError()), wants_memory(RuntimeError("no"))
    (True, False)
    """
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Capture what is done inside; if that breaks off, streams and memory are as they were before."""
    before, collects = torch.cuda.current_stream(), gc.isenabled()
    gc.disable()  # an old graph that is collected meanwhile would break the capture
    try:
        with torch.cuda.graph(graph, pool=pool):
            yield
    except BaseException:
        torch.cuda.set_stream(before)
        with suppress(RuntimeError):  # torch ended it itself, or else would not release memory to anybody again
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            torch._C._cuda_releasePool(torch.cuda.current_device(), pool)
        raise
    finally:
        if collects:
            gc.enable()


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


def copy_into(target: Tree, source: Tree) -> None:
    """Values into their places. Some may lie in each other's places, or be views of them: a step may hand an old value on
    under another name, transposed, or one row of it for all.
    """
    if source is target:
        return
    places = _memory(target)
    pairs = [(target[slot][name], leaf) for slot, leaves in source.items() for name, leaf in leaves.items()]
    changed = [(place, _outside(leaf, places)) for place, leaf in pairs if not _same(place, leaf)]
    if changed:  # in few launches: states have many small tensors
        torch._foreach_copy_([place for place, _ in changed], [leaf for _, leaf in changed])


def settled(result: Tree, state: Tree) -> Tree:
    """Put the state that a step moved into its places; what the step says beside it is of before, also where it lay there.

    >>> state = {"model": {"w": torch.ones(2)}}
    >>> said = settled({"model": {"w": torch.zeros(2)}, "said": {"was": state["model"]["w"]}}, state)
    >>> state["model"]["w"], said
    (tensor([0., 0.]), {'said': {'was': tensor([1., 1.])}})
    """
    places = _memory(state)
    beside = {slot: leaves for slot, leaves in result.items() if slot not in state}
    said = map_tree(lambda leaf: _outside(leaf, places), beside)
    copy_into(state, {slot: leaves for slot, leaves in result.items() if slot in state})
    return said


def _memory(tree: Tree) -> set[int]:
    return {leaf.untyped_storage().data_ptr() for leaves in tree.values() for leaf in leaves.values()}


def _outside(leaf: Tensor, places: set[int]) -> Tensor:
    """The leaf, or a copy of it if it lies in these places."""
    return leaf.clone() if leaf.untyped_storage().data_ptr() in places else leaf


def _same(one: Tensor, other: Tensor) -> bool:
    alike = (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    return alike and one.data_ptr() == other.data_ptr()
