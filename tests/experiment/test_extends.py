"""Experiments that extend others, and the keys that only label numbers: what parses, what merges, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedshift import Experiment, UserError
from fedshift.experiment.files import merged
from fedshift.experiment.schema import AdapterSpec

BASE = """
title = "A base"
name = "a-name-of-its-own"
rounds = 4
seeds = [0, 1, 2]
[data]
size = 8
[model]
name = "mlp"
hidden = [4]
[train]
lr = 0.1
momentum = 0.9
[[method]]
name = "fedprox"
mu = 0.5
[[method]]
name = "fedavg"
[sweep]
"train.lr" = [0.1, 0.2]
rounds = [1, 2, 3]
[small]
rounds = 1
"data.size" = 9
[notes]
split = "They split otherwise."
views = "They have  other\\n views."
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.toml"
    path.write_text(BASE)
    return path


def extending(base: Path, text: str, *changes: str) -> Experiment:
    path = base.parent / "local.toml"
    path.write_text(f'extends = "{base.name}"\n{text}')
    return Experiment.load(path, changes)


def points(experiment: Experiment) -> list[dict[str, object]]:
    return [point for point, _ in experiment.variants()]


# ---- extends -------------------------------------------------------------------------------------------------------------
def test_nothing_but_the_name_differs_where_nothing_is_said(base: Path) -> None:
    plain, same = Experiment.load(base), extending(base, "")
    assert (plain.name, same.name) == ("a-name-of-its-own", "local")
    assert same == plain.model_copy(update={"name": "local"})


def test_tables_merge_and_everything_else_is_replaced(base: Path) -> None:
    local = extending(base, 'seeds = [7]\n[train]\nlr = 0.5\n[[method]]\nname = "local"\n')
    assert local.seeds == [7]
    assert local.train == {"lr": 0.5, "momentum": 0.9}
    assert [method.name for method in local.method] == ["local"]
    assert (local.title, local.data.size, local.rounds) == ("A base", 8, 4)


def test_another_network_does_not_inherit_the_options_of_the_first(base: Path) -> None:
    assert extending(base, '[model]\nname = "cnn"\nbias = false').models[0].options() == {"bias": False}
    assert extending(base, "[model]\nnorm = true").models[0].options() == {"hidden": [4], "norm": True}
    assert extending(base, '[model]\nname = "mlp"\nnorm = true').models[0].options() == {"hidden": [4], "norm": True}


def test_sweeps_add_up_and_can_be_dropped(base: Path) -> None:
    assert len(points(Experiment.load(base))) == 6
    assert len(points(extending(base, '[sweep]\n"train.momentum" = [0.0, 0.5]'))) == 12
    assert points(extending(base, '[sweep]\nrounds = [5]\n"train.lr" = []')) == [{"rounds": 5}]
    assert points(extending(base, "[sweep]")) == [{}]
    assert points(extending(base, "sweep = {}")) == [{}]
    assert points(extending(base, "[train]\nlr = 0.7")) == [{"rounds": n} for n in (1, 2, 3)]  # set, so not swept
    both = extending(base, '[train]\nlr = 0.7\n[sweep]\n"train.lr" = [0.8]\nrounds = []')
    assert points(both) == [{"train.lr": 0.8}]


def test_small_merges_too(base: Path) -> None:
    small = extending(base, '[small]\n"data.size" = 10\nsweep = { "train.lr" = [0.3] }', "scale=small")
    assert (small.rounds, small.data.size, points(small)) == (1, 10, [{"train.lr": 0.3}])
    # what is asked for on the command line is swept neither by the file nor by its small table
    asked = extending(base, '[small]\nsweep = { "train.lr" = [0.3], rounds = [2, 3] }', "scale=small", "train.lr=0.4")
    assert points(asked) == [{"rounds": 2}, {"rounds": 3}]
    assert asked.train["lr"] == 0.4
    assert extending(base, "small = {}", "scale=small").rounds == 4


def test_chains_and_presets(base: Path) -> None:
    extending(base, "[train]\nlr = 0.5")
    last = base.parent / "deep" / "last.toml"
    last.parent.mkdir()
    last.write_text('extends = "../local.toml"\n[train]\nmomentum = 0.1')
    assert Experiment.load(last).train == {"lr": 0.5, "momentum": 0.1}
    assert Experiment.load(last).name == "last"
    local = base.parent / "brfl.toml"  # may be called like the preset it extends
    local.write_text('extends = "brfl"\nrounds = 3')
    found = Experiment.load(local)
    assert (found.rounds, found.name, found.partition.kind) == (3, "brfl", "brfl")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('extends = "nowhere.toml"', r"extends 'nowhere.toml', which is neither a preset nor a file beside it"),
        ('extends = "brfll"', r"did you mean 'brfl'\?$"),
        ("extends = 3", "extends must be a preset's name or a path, not 3"),
        ('extends = "local.toml"', r"local.toml extends local.toml: that never ends$"),
        ('extends = "other.toml"', r"local.toml extends other.toml extends local.toml: that never ends$"),
        ('extends = "broken.toml"', "^broken.toml is not valid TOML"),
        ('extends = "swept.toml"', r"^swept.toml: \[sweep\] must be a table$"),
    ],
)
def test_a_base_that_cannot_be(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "local.toml").write_text(text)
    (tmp_path / "other.toml").write_text('extends = "local.toml"')
    (tmp_path / "broken.toml").write_text("rounds = = 3")
    (tmp_path / "swept.toml").write_text("sweep = 3")
    with pytest.raises(UserError, match=sentence) as refused:
        Experiment.load(tmp_path / "local.toml")
    assert "\n" not in str(refused.value)


def test_merging_leaves_both_as_they_were() -> None:
    base, own = {"a": {"b": {"c": 1}}, "sweep": {"a.b.c": [1]}}, {"a": {"b": {"d": 2}}}
    assert merged(base, own)["a"] == {"b": {"c": 1, "d": 2}}
    assert base == {"a": {"b": {"c": 1}}, "sweep": {"a.b.c": [1]}}
    assert own == {"a": {"b": {"d": 2}}}


# ---- notes ---------------------------------------------------------------------------------------------------------------
def test_notes_are_a_list_or_a_table_of_named_ones(base: Path) -> None:
    assert Experiment.load(base).notes == ["They split otherwise.", "They have other views."]
    local = extending(base, '[notes]\nviews = ""\nmore = "And more."')
    assert local.notes == ["They split otherwise.", "And more."]
    assert extending(base, 'notes = ["Only this."]').notes == ["Only this."]
    for wrong in ("notes = 3", "notes = [1]", 'notes = "a sentence"'):
        with pytest.raises(UserError, match="notes must be a list of sentences"):
            extending(base, wrong)


# ---- the mean over streams -----------------------------------------------------------------------------------------------
def test_a_mean_of_streams_that_are_there() -> None:
    streams = [{"name": name, "kind": "original"} for name in ("a", "b")]
    assert Experiment.parse({"stream": streams, "evaluate": {"mean-of": ["a", "b"]}}).evaluate.mean_of == ["a", "b"]
    with pytest.raises(UserError, match=r"mean-of: there is no stream 'c'; there are: a, b$"):
        Experiment.parse({"stream": streams, "evaluate": {"mean-of": ["a", "c"]}})
    with pytest.raises(UserError, match=r"mean-of: stream 'a' is named twice$"):
        Experiment.parse({"stream": streams, "evaluate": {"mean-of": ["a", "a"]}})
    with pytest.raises(UserError, match="a stream cannot be called 'mean'"):
        Experiment.parse({"stream": [{"name": "mean", "kind": "original"}]})


# ---- published numbers ---------------------------------------------------------------------------------------------------
def test_numbers_and_family_are_no_options() -> None:
    spec = AdapterSpec(name="tent", lr=0.01, family="rates", paper={"original": 81.3})
    assert spec.options() == {"lr": 0.01}
    assert spec.title == "tent lr=0.01"


def test_numbers_hold_where_their_conditions_do() -> None:
    paper = {
        "original": 1.0,
        "partition.alpha=0.1": {"original": 2.0, "method.fedthe.personal-epochs=2": {"mean": 3}},
        "participation=0.4": {"mixture": 4.0},
    }
    spec = AdapterSpec(name="none", paper=paper)

    def published(alpha: float, epochs: int) -> dict[str, float]:
        method = [{"name": "fedavg"}, {"name": "fedthe", "personal-epochs": epochs}]
        return spec.published({"partition": {"alpha": alpha}, "method": method, "participation": 1.0})

    assert published(1.0, 2) == {"original": 1.0}
    assert published(0.1, 1) == {"original": 2.0}
    assert published(0.1, 2) == {"original": 2.0, "mean": 3.0}


@pytest.mark.parametrize(
    ("paper", "sentence"),
    [
        ({"original": "high"}, "the number of stream 'original' must be a number, not 'high'"),
        ({"original": True}, "must be a number, not True"),
        ({"alpha": {"original": 1.0}}, "'alpha' is no condition such as 'partition.alpha=0.1'"),
        ({"a=1": {"b=2": {"original": []}}}, "must be a number"),
        (3, "dictionary"),
    ],
)
def test_numbers_that_are_none(paper: object, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Experiment.parse({"method": [{"name": "fedavg", "adapters": [{"name": "none", "paper": paper}]}]})


def test_a_base_that_sweeps_over_what_starts_anew(tmp_path: Path) -> None:
    """Another partition has no alpha: the base's sweep over it goes, and so do the small scale's options of it."""
    base = tmp_path / "base.toml"
    base.write_text(
        '[partition]\nkind = "dirichlet"\nalpha = 0.1\n[sweep]\n"partition.alpha" = [0.1, 1.0]\n"train.lr" = [0.1, 0.2]\n'
        '[small]\n"partition.alpha" = 5.0\nrounds = 1\n'
    )
    local = tmp_path / "local.toml"
    local.write_text('extends = "base.toml"\n[partition]\nkind = "iid"\n')
    chosen = Experiment.load(local)
    assert chosen.partition.options() == {}
    assert chosen.sweep == {"train.lr": [0.1, 0.2]}
    small = Experiment.load(local, ["scale=small"])
    assert (small.partition.options(), small.rounds) == ({}, 1)


def test_methods_of_ones_own_are_those_of_the_small_scale_too(tmp_path: Path) -> None:
    local = tmp_path / "local.toml"
    local.write_text('extends = "brfl"\n[[method]]\nname = "scaffold"\n')
    assert [m.name for m in Experiment.load(local, ["scale=small"]).method] == ["scaffold"]
    assert Experiment.load(local, ["scale=small"]).rounds == Experiment.load("brfl", ["scale=small"]).rounds


def test_extends_is_for_files() -> None:
    with pytest.raises(UserError, match="belongs into a file"):
        Experiment.load("brfl", ["extends=brfl"])
