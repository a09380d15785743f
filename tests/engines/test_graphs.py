"""What surrounds captured steps and needs no GPU: the state's values in their places."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fedshift.core.tree import Tree, map_tree
from fedshift.engines.cuda.graphs import copy_into, settled


def start() -> Tree:
    return {"model": {name: torch.arange(9.0).view(3, 3) + 10 * k for k, name in enumerate("ab")}, "empty": {}}


STEPS: dict[str, Callable[[Tree], dict[str, torch.Tensor]]] = {
    "as it was": lambda old: dict(old["model"]),
    "one new": lambda old: {**old["model"], "a": old["model"]["a"] + 1},
    "exchanged": lambda old: {"a": old["model"]["b"], "b": old["model"]["a"]},
    "handed on": lambda old: {"a": old["model"]["b"] * 2, "b": old["model"]["a"]},
    "turned": lambda old: {**old["model"], "a": old["model"]["a"].t()},
    "one row for all": lambda old: {**old["model"], "b": old["model"]["b"][:1].expand(3, 3)},
    "rows in another order": lambda old: {"a": old["model"]["a"].flip(0), "b": old["model"]["a"][1:2].expand(3, 3)},
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_values_come_into_their_places_wherever_they_lay(step: Callable[[Tree], dict[str, torch.Tensor]]) -> None:
    places = start()
    pointers = [leaf.data_ptr() for leaf in places["model"].values()]
    expected = map_tree(torch.clone, {"model": step(start())})["model"]
    copy_into(places, {"model": step(places), "empty": {}})
    for name, leaf in expected.items():
        assert torch.equal(places["model"][name], leaf)
    assert [leaf.data_ptr() for leaf in places["model"].values()] == pointers


def test_a_row_of_a_table_is_read_before_the_table_is_written() -> None:
    places: Tree = {"s": {"table": torch.arange(8.0).view(4, 2), "last": torch.zeros(2)}}
    moved: Tree = {"s": {"table": places["s"]["table"] + 10, "last": places["s"]["table"][2]}}
    copy_into(places, moved)
    assert places["s"]["last"].tolist() == [4.0, 5.0]
    assert places["s"]["table"][0].tolist() == [10.0, 11.0]


@pytest.mark.parametrize("view", [lambda w: w, lambda w: w[0], lambda w: w[:1, :1].expand(4, 3)])
def test_what_a_step_says_is_not_overwritten_by_the_state_it_moves(
    view: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """An adapter may tell a number as it was before its step."""
    state = start()
    expected = view(start()["model"]["a"])
    moved = {name: leaf + 1 for name, leaf in state["model"].items()}
    said = settled({"model": moved, "said": {"was": view(state["model"]["a"])}}, state)
    assert torch.equal(said["said"]["was"], expected)
    assert torch.equal(state["model"]["a"], start()["model"]["a"] + 1)
    assert list(said) == ["said"]
