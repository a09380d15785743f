"""Captured steps: what breaks off leaves nothing behind, what cannot be captured goes on, streams are replayed."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from fedshift.core.tree import Tree, map_tree
from fedshift.data.streams import Setting
from fedshift.engines.base import Compute
from fedshift.engines.cuda.graphs import WARM_UP, Graphs, wants_memory
from fedshift.engines.sequential import Sequential
from fedshift.engines.vmapped import Vmapped, streams
from tests.cuda.fast import DOUBLE, GPU
from tests.engines.test_streams import ARCHS, CASES, check, on, ragged, serving

THERE = Compute(GPU, torch.float64)
START = {"model": {"w": torch.ones(4)}}
ONE = {"x": torch.ones(4)}


def there(tree: Tree) -> Tree:
    return map_tree(lambda leaf: leaf.to(GPU), tree)


def added(state: Tree, batch: Mapping[str, Tensor]) -> Tree:
    return {"model": {"w": state["model"]["w"] + batch["x"]}}


def taken(graphs: Graphs, step: object, times: int) -> Tree:
    state, batch = there(START), there({"": ONE})[""]
    for _ in range(times):
        state = graphs.step("group", 4, step, state, batch, False)  # type: ignore[arg-type]
    return map_tree(torch.clone, state)


def test_a_replayed_step_says_what_it_says_beside_its_state() -> None:
    def saying(state: Tree, batch: Mapping[str, Tensor]) -> Tree:
        w = state["model"]["w"]
        return {**added(state, batch), "said": {"sum": w.sum(), "was": w, "one": w[:1].expand(3)}}

    graphs = Graphs()
    state, batch, heard = there(START), there({"": ONE})[""], []
    for _ in range(2 * WARM_UP):
        result = graphs.step("group", 4, saying, state, batch, False)
        heard.append(float(result["said"]["sum"]))
        assert all(4 * float(result["said"][name][0]) == heard[-1] for name in ("was", "one"))  # not what came after
        state = {"model": result["model"]}
    assert graphs.captured == 1
    assert heard == [4.0 * number for number in range(1, 2 * WARM_UP + 1)]


@pytest.mark.parametrize("warm_up", [1, WARM_UP])
def test_a_step_is_captured_when_it_was_seen_often_enough(warm_up: int) -> None:
    graphs = Graphs(warm_up)
    taken(graphs, added, warm_up)
    assert graphs.captured == 0
    taken(graphs, added, 1)
    assert graphs.captured == 1


@contextmanager
def collecting_at_every_chance() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def test_old_graphs_that_are_garbage_do_not_break_a_capture() -> None:
    """A graph that is destroyed while another one is captured would end the capture."""
    gc.disable()
    try:
        for _ in range(3):
            old = Graphs()
            taken(old, added, WARM_UP + 1)
            old.itself = old  # type: ignore[attr-defined]  # only the collector can tell that nobody needs it
            del old
    finally:
        gc.enable()

    def littering(state: Tree, batch: Mapping[str, Tensor]) -> Tree:
        for _ in range(100):
            garbage: list[object] = []
            garbage.append(garbage)
        return added(state, batch)

    graphs = Graphs()
    with collecting_at_every_chance(), warnings.catch_warnings():
        warnings.simplefilter("error")
        state = taken(graphs, littering, 2 * WARM_UP)
    assert graphs.captured == 1
    assert state["model"]["w"].tolist() == [2.0 * WARM_UP + 1] * 4


def test_want_of_memory_in_a_capture_leaves_nothing_behind() -> None:
    """It is said as want of memory, and what was taken until then is free again."""
    gc.collect()
    torch.cuda.empty_cache()
    stream, before = torch.cuda.current_stream(), torch.cuda.memory_reserved()
    total = torch.cuda.get_device_properties(GPU).total_memory

    def greedy(state: Tree, batch: Mapping[str, Tensor]) -> Tree:
        if torch.cuda.is_current_stream_capturing():
            held = [torch.empty(1 << 28, dtype=torch.uint8, device=GPU) for _ in range(9)]
            return {"model": {"w": state["model"]["w"] + held[-1][:4]}}
        return added(state, batch)

    graphs = Graphs()
    torch.cuda.set_per_process_memory_fraction((before + (1 << 31)) / total)
    try:
        with pytest.raises(RuntimeError) as raised:
            taken(graphs, greedy, WARM_UP + 1)
        assert wants_memory(raised.value)
        del raised
        graphs.clear()
        gc.collect()
        torch.cuda.empty_cache()
        assert torch.cuda.current_stream() == stream
        assert torch.cuda.memory_reserved() <= before + (1 << 26)
        again = Graphs()
        assert taken(again, added, 2 * WARM_UP)["model"]["w"].tolist() == [2.0 * WARM_UP + 1] * 4
        assert again.captured == 1
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_what_cannot_be_captured_goes_on_and_is_said_once() -> None:
    def looking(state: Tree, batch: Mapping[str, Tensor]) -> Tree:
        return added(state, batch) if float(state["model"]["w"].sum()) > 0 else state

    graphs = Graphs()
    with pytest.warns(UserWarning, match="no CUDA graph can be made of it") as said:
        state = taken(graphs, looking, 3 * WARM_UP)
    assert len(said) == 1
    assert graphs.captured == 0
    assert state["model"]["w"].tolist() == [3.0 * WARM_UP + 1] * 4
    other = Graphs()  # and captures work as before
    taken(other, added, WARM_UP + 1)
    assert other.captured == 1


@pytest.mark.parametrize("case", CASES)
def test_steps_along_streams_are_replayed(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, options, network = CASES[case]
    batch = options.get("batch_size", 16)
    arch, task = ARCHS[network], ragged({"plain": Setting("stored")}, (7 * (batch or 16), 7 * (batch or 16) + 3))
    adapter, deployed = on(arch, name, **options), serving(arch, task)
    made: list[Graphs] = []

    class Watched(Graphs):
        def __init__(self, warm_up: int = WARM_UP) -> None:
            super().__init__(warm_up)
            made.append(self)

    monkeypatch.setattr(streams, "Graphs", Watched)
    reference = Sequential(DOUBLE).evaluate(adapter, deployed, task, ["plain"], seed=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = Vmapped(THERE).evaluate(adapter, {n: there(t) for n, t in deployed.items()}, task, ["plain"], seed=3)
    check(reference, found, relative=1e-8)
    if batch:  # otherwise a stream is one batch
        assert sum(graphs.captured for graphs in made) >= 1
