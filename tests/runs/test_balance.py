"""``[train] balance`` in whole runs: what a run is called, what it says, that it can be resumed, and what it is good for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.imbalance import SETTINGS, measured, thinned

from fedshift import Experiment, Result, UserError, run
from fedshift.results.collect import collect
from fedshift.runs.plan import Job
from fedshift.runs.run import plan
from fedshift.runs.session import Session
from fedshift.runs.setup import make_task
from fedshift.store.folder import RunFolder
from tests.test_resume import check_identical, contents, small

WAYS = ("weights", "sampler", "softmax")


def losses(result: Result) -> list[list[float]]:
    return [[line.loss for line in RunFolder(folder).history().rounds] for folder in result.folders]


def planned(tmp_path: Path, **changes: object) -> list[Job]:
    return plan(small(**changes), tmp_path)


def test_a_run_without_it_is_called_and_trained_as_ever(tmp_path: Path) -> None:
    (job,) = planned(tmp_path)
    assert "balance" not in json.dumps(dict(job.config))
    assert job.setup.train.balance == "none"
    for way in WAYS:
        (other,) = planned(tmp_path, train={"balance": way})
        assert other.config["train"] == {"balance": way}
        assert {**other.config, "train": {}} == dict(job.config)
        assert other.folder.path != job.folder.path
    default = run(small(), tmp_path / "default", engine="sequential")
    said = run(small(train={"balance": "none"}), tmp_path / "said", engine="sequential")
    assert losses(default) == losses(said)


def test_a_way_that_there_is_not_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"\[train\]: balance = 'class' is not valid: .*'none', 'weights', 'sampler'"):
        planned(tmp_path, train={"balance": "class"})


def test_a_method_may_have_another_way_than_the_others(tmp_path: Path) -> None:
    methods = [{"name": "fedavg"}, {"name": "fedprox", "train": {"balance": "none"}}]
    jobs = planned(tmp_path, train={"balance": "weights"}, method=methods)
    assert [job.setup.method.train.balance for job in jobs] == ["weights", "none"]


@pytest.mark.grid
def test_what_it_does_not_reach_is_said_once_under_the_table(tmp_path: Path) -> None:
    methods = [{"name": "fedavg"}, {"name": "fedthe"}, {"name": "fedrod", "label": "two heads"}]
    asked = {"rounds": 1, "seeds": [0, 1], "method": methods, "train": {"balance": "softmax"}, "notes": ["ours"]}
    result = run(small(**asked), tmp_path, engine="sequential")
    expected = (
        "ours",
        "fedthe: [train] balance has no say in its phases 'generic' (always 'softmax') and 'personal' (always 'none')",
        "two heads: [train] balance has no say in its phase 'train' (always 'softmax')",
    )
    assert [note for note in result.notes if "[train] balance" in note or note == "ours"] == list(expected)
    assert collect(result.folders).notes == result.notes  # as fedshift show reads them
    again = run(small(**asked), tmp_path, engine="sequential")  # finished before, still said
    assert again.notes == result.notes
    more = run(small(**{**asked, "train": {}, "sweep": {"train.balance": ["none", "weights", "sampler"]}}), tmp_path)
    assert [note for note in more.notes if "[train] balance" in note] == list(expected[1:])  # once for all points too
    quiet = run(small(**{**asked, "train": {}}), tmp_path / "none", engine="sequential")
    assert not [note for note in quiet.notes if "[train] balance" in note]


@pytest.mark.parametrize("way", ["sampler", *(pytest.param(w, marks=pytest.mark.grid) for w in WAYS if w != "sampler")])
def test_an_interrupted_run_goes_on_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    experiment = small(train={"balance": way}, method=[{"name": "finetune"}])
    step = Session.step

    def stops(self: Session, state):  # type: ignore[no-untyped-def]
        if state.round == 2:
            raise KeyboardInterrupt
        return step(self, state)

    monkeypatch.setattr(Session, "step", stops)
    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path, engine="sequential")
    monkeypatch.setattr(Session, "step", step)
    resumed = run(experiment, tmp_path, engine="sequential", resume=True)
    whole = run(experiment, tmp_path / "again", engine="sequential")
    check_identical(contents(whole.folders[0]), contents(resumed.folders[0]))


@pytest.mark.grid
def test_rare_digits_are_found_more_often() -> None:
    """Digits 5 to 9 are a twentieth of the others at every client: what benchmarks/imbalance.py measures, once."""
    balanced = {}
    for way in ("none", *WAYS):
        experiment = Experiment.load(None, [*SETTINGS, "rounds=12", "model.width=8", f"train.balance={way}"])
        task = thinned(make_task(experiment, 0), 0.05, own=False)
        histograms = [task.histogram(client) for client in task.clients]
        assert all(int(h[:5].min()) > 8 * int(h[5:].max()) > 0 for h in histograms)
        balanced[way] = measured(experiment, task, "fedavg", 0, "sequential")["balanced"]
    assert all(balanced[way] > balanced["none"] + 2 for way in WAYS)
    assert balanced["weights"] > balanced["none"] + 10


def test_the_list_of_methods_names_what_it_does_not_reach() -> None:
    from fedshift.catalogue import methods

    listed = {row["name"]: row["own-balance"] for row in methods()}
    assert {name for name, own in listed.items() if own} == {"fedthe", "fedrod", "fedicon", "ours"}
    assert listed["fedthe"] == {"generic": "softmax", "personal": "none"}
