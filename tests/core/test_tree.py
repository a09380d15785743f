"""Trees: leaf-wise functions, means in client order, and files that give back exactly what was put in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fedshift.core.tree import (
    Tree,
    all_finite,
    drop,
    float_bytes,
    map_tree,
    pick,
    squared_distance,
    stack,
    subtract,
    to,
    unstack,
    weighted_mean,
    zeros_like,
)
from fedshift.errors import HostError, UserError
from fedshift.store.trees import load, save


def same(a: Tree, b: Tree) -> bool:
    """Equal in structure, order of slots, types, shapes and bits."""
    return list(a) == list(b) and all(
        a[slot].keys() == b[slot].keys()
        and all(
            a[slot][n].dtype == b[slot][n].dtype and a[slot][n].shape == b[slot][n].shape
            and torch.equal(a[slot][n], b[slot][n])
            for n in a[slot]
        )
        for slot in a
    )  # fmt: skip


def mixed(shift: int = 0) -> Tree:
    return {
        "model": {"w": torch.arange(6.0).reshape(2, 3) + shift, "n": torch.tensor(3 + shift), "b": torch.tensor(True)},
        "empty": {},
        "now": {"lr": torch.tensor(0.5 + shift, dtype=torch.float64)},
    }


# --- leaf by leaf -----------------------------------------------------------------------------------------------------


def test_map_tree_goes_by_name_and_changes_nothing() -> None:
    a = {"m": {"x": torch.tensor(1.0), "y": torch.tensor(2.0)}, "e": {}}
    b = {"e": {}, "m": {"y": torch.tensor(20.0), "x": torch.tensor(10.0)}}  # another order
    assert same(map_tree(torch.add, a, b), {"m": {"x": torch.tensor(11.0), "y": torch.tensor(22.0)}, "e": {}})
    assert float(a["m"]["x"]) == 1.0
    assert map_tree(torch.neg, {}) == {}


def test_unstack_undoes_stack() -> None:
    trees = [mixed(k) for k in range(3)]
    whole = stack(trees)
    assert whole["model"]["w"].shape == (3, 2, 3)
    assert whole["model"]["n"].tolist() == [3, 4, 5]
    assert whole["empty"] == {}
    assert all(same(a, b) for a, b in zip(unstack(whole, 3), trees, strict=True))
    assert unstack({"empty": {}}, 2) == [{"empty": {}}, {"empty": {}}]


def test_to_converts_floats_only() -> None:
    moved = to(mixed(), dtype=torch.float64)
    assert [leaf.dtype for leaf in moved["model"].values()] == [torch.float64, torch.int64, torch.bool]
    assert moved["empty"] == {}


def test_pick_and_drop_divide_a_slot() -> None:
    slot = {name: torch.tensor(i) for i, name in enumerate("cab")}
    assert list(pick(slot, ["b", "c", "not there"])) == ["c", "b"]  # the order of the slot
    assert list(drop(slot, ["b", "c", "not there"])) == ["a"]
    assert list(pick(slot, iter(["b", "c"]))) == ["c", "b"]  # a generator can be read once only
    assert list(drop(slot, iter(["b", "c"]))) == ["a"]


def test_arithmetic() -> None:
    a = {"w": torch.tensor([3.0, 5.0]), "other": torch.tensor(9.0)}
    b = {"w": torch.tensor([1.0, 1.0])}
    assert subtract(a, b)["w"].tolist() == [2.0, 4.0]
    assert list(subtract(a, b)) == ["w"]
    assert float(squared_distance(a, b)) == 20.0
    assert float(squared_distance(b | {"v": torch.tensor(2.0)}, {"w": torch.zeros(2), "v": torch.tensor(0.0)})) == 6.0
    assert zeros_like(a)["w"].tolist() == [0.0, 0.0]
    assert zeros_like({"n": torch.tensor(3)})["n"].dtype == torch.int64


def test_all_finite_looks_at_every_float_and_only_there() -> None:
    assert all_finite({})
    assert all_finite({"m": {"n": torch.tensor(1)}})
    assert all_finite(mixed())
    for bad in (float("nan"), float("inf"), -float("inf")):
        for slot, name in (("model", "w"), ("now", "lr")):
            tree = mixed()
            tree[slot][name] = torch.where(tree[slot][name] == tree[slot][name].max(), bad, tree[slot][name])
            assert not all_finite(tree)


def test_float_bytes_counts_floats_of_every_width() -> None:
    tree = {
        "a": {"w": torch.zeros(3), "n": torch.zeros(100, dtype=torch.int64), "h": torch.zeros(5, dtype=torch.float16)},
        "b": {"d": torch.zeros((), dtype=torch.float64)},
        "c": {},
    }
    assert float_bytes(tree) == 3 * 4 + 5 * 2 + 8
    assert float_bytes({}) == 0


# --- means ------------------------------------------------------------------------------------------------------------


def test_weighted_mean_is_the_weighted_sum() -> None:
    parts = [{"w": torch.tensor([1.0, 10.0])}, {"w": torch.tensor([2.0, 20.0])}, {"w": torch.tensor([4.0, 40.0])}]
    mean = weighted_mean(parts, torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64))
    assert mean["w"].tolist() == [2.0, 20.0]
    assert mean["w"].dtype == torch.float32
    assert parts[0]["w"].tolist() == [1.0, 10.0]


def test_weighted_mean_adds_in_client_order() -> None:
    values = [2.0**60, 4.0, -(2.0**60), 4.0]  # the first 4 is lost beside the large number, the last is not
    weights = torch.full((4,), 0.25, dtype=torch.float64)
    parts = [{"w": torch.tensor(value, dtype=torch.float64)} for value in values]
    assert float(weighted_mean(parts, weights)["w"]) == 1.0
    assert float(weighted_mean([parts[i] for i in (0, 2, 1, 3)], weights)["w"]) == 2.0


def test_weighted_mean_keeps_the_largest_integer_and_flag() -> None:
    parts = [{"n": torch.tensor(n), "b": torch.tensor(n == 7), "v": torch.tensor([n, -n])} for n in (3, 7, 5)]
    mean = weighted_mean(parts, torch.full((3,), 1 / 3))
    assert (mean["n"].dtype, int(mean["n"])) == (torch.int64, 7)
    assert (mean["b"].dtype, bool(mean["b"])) == (torch.bool, True)
    assert mean["v"].tolist() == [7, -3]


def test_weighted_mean_uses_its_weights_in_full_precision() -> None:
    weights = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
    parts = [{"w": torch.tensor(1.0, dtype=torch.float64)}, {"w": torch.tensor(4.0, dtype=torch.float64)}]
    assert abs(float(weighted_mean(parts, weights)["w"]) - 3.0) < 1e-15


def test_weighted_mean_wants_a_weight_for_every_part() -> None:
    with pytest.raises(ValueError, match="zip"):
        weighted_mean([{"w": torch.ones(1)}] * 3, torch.tensor([0.5, 0.5]))


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_file_gives_back_every_kind_of_leaf_and_every_empty_place(tmp_path: Path) -> None:
    kinds: Tree = {
        "kinds": {
            "0-d": torch.tensor(1.5),
            "int": torch.tensor(-(2**60)),
            "bool": torch.tensor([True, False]),
            "double": torch.tensor([1 / 3], dtype=torch.float64),
            "half": torch.tensor([0.5], dtype=torch.bfloat16),
            "byte": torch.tensor([255], dtype=torch.uint8),
            "nothing": torch.zeros(0, 3),
            "special": torch.tensor([float("inf"), -0.0]),
            "a/name/with/slashes": torch.ones(1),
            "layer.0.weight": torch.ones(2, 2).t(),
        },
        "no leaves": {},
    }
    trees = {"server": kinds, "client a/b": {"x": {}}, "client ü": {}, "client 10": mixed(1), "client 9": mixed(2)}
    facts = {"round": 3, "names": ["a", "b"], "nested": {"x": None, "ü": 0.1}}
    save(tmp_path / "state.safetensors", trees, facts)
    again, told = load(tmp_path / "state.safetensors")
    assert told == facts
    assert list(again) == list(trees)
    assert all(same(again[owner], trees[owner]) for owner in trees)
    assert str(again["server"]["kinds"]["special"][1].item()) == "-0.0"


def test_a_file_of_nothing(tmp_path: Path) -> None:
    save(tmp_path / "a", {})
    assert load(tmp_path / "a") == ({}, {})
    save(tmp_path / "a", {"server": {}, "client": {"model": {}}})
    assert load(tmp_path / "a") == ({"server": {}, "client": {"model": {}}}, {})


def test_leaves_that_share_memory_are_written_one_by_one(tmp_path: Path) -> None:
    base = torch.arange(12.0)
    tree: Tree = {
        "a": {"whole": base, "again": base, "head": base[:4], "tail": base[8:], "turned": base.view(3, 4).t()},
        "b": {"whole": base, "row": base.view(3, 4)[1], "spread": torch.ones(1).expand(3)},
    }
    save(tmp_path / "a", {"x": tree, "y": {"m": {"whole": base}}})
    again = load(tmp_path / "a")[0]
    assert same(again["x"], tree)
    assert again["y"]["m"]["whole"].tolist() == base.tolist()
    again["x"]["a"]["whole"].add_(1)
    assert torch.equal(again["x"]["a"]["again"], base)  # what was read shares nothing
    assert torch.equal(again["y"]["m"]["whole"], base)
    assert (tmp_path / "a").stat().st_size < 3000  # a view of part of a tensor is not the whole tensor


def test_leaves_that_want_gradients_can_be_saved(tmp_path: Path) -> None:
    save(tmp_path / "a", {"x": {"m": {"w": torch.ones(2, requires_grad=True)}}})
    assert not load(tmp_path / "a")[0]["x"]["m"]["w"].requires_grad


def test_saving_replaces_whole_files_and_leaves_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def disk_is_full(handle: int) -> None:
        raise OSError("full")

    path = tmp_path / "a"
    save(path, {"x": mixed(1)})
    save(path, {"x": mixed(2)})
    assert same(load(path)[0]["x"], mixed(2))
    with pytest.raises(TypeError):
        save(path, {"x": mixed(3)}, {"round": object()})  # no JSON
    monkeypatch.setattr("os.fsync", disk_is_full)
    with pytest.raises(HostError, match=r"a cannot be written \(full\)"):
        save(path, {"x": mixed(4)})
    assert same(load(path)[0]["x"], mixed(2))
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_damaged_and_foreign_files_are_a_user_error(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    save(path, {"server": mixed(), "client": {"x": {}}}, {"round": 1})
    whole = path.read_bytes()
    for length in (0, 5, 60, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match="damaged"):
            load(path)
    path.write_bytes(b"hello" * 100)
    with pytest.raises(UserError, match="damaged"):
        load(path)
    save_file({"w": torch.ones(1)}, path)
    with pytest.raises(UserError, match="is damaged"):
        load(path)
    with pytest.raises(UserError, match="is missing"):
        load(tmp_path / "nowhere")


FITTING = '{"owners": [["server", ["model"]]], "facts": {}}'


@pytest.mark.parametrize(
    ("key", "header"),
    [
        ("0/0/w", "{"),
        ("0/0/w", "{}"),
        ("0/0/w", "[]"),
        ("0/0/w", '{"owners": 3, "facts": {}}'),
        ("0/0/w", '{"owners": [["server", ["model"]]]}'),  # no facts
        ("0/1/w", FITTING),  # a slot that is not listed
        ("1/0/w", FITTING),  # an owner that is not listed
        ("w", FITTING),
    ],
)
def test_a_header_that_does_not_fit_is_a_user_error(tmp_path: Path, key: str, header: str) -> None:
    save_file({key: torch.ones(1)}, tmp_path / "a", metadata={"fedshift": header})
    with pytest.raises(UserError, match="damaged"):
        load(tmp_path / "a")


def test_a_slot_may_have_any_name(tmp_path: Path) -> None:
    tree: Tree = {"hospital a/b": {"w": torch.ones(1)}, "": {"v": torch.zeros(1)}}
    save(tmp_path / "a", {"server": tree})
    assert same(load(tmp_path / "a")[0]["server"], tree)


def test_a_file_keeps_the_order_of_names(tmp_path: Path) -> None:
    """A sum over tensors in another order has other bits, and then a resumed run is not the run it would have been."""
    tree = {"model": {name: torch.ones(1) for name in ("z", "a", "m.10", "m.2")}}
    save(tmp_path / "t", {"server": tree})
    assert list(load(tmp_path / "t")[0]["server"]["model"]) == ["z", "a", "m.10", "m.2"]
