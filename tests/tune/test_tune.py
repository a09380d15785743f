"""A search over settings: by validation images alone, and it goes on where it was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedshift
from fedshift.data.pool import Pool
from fedshift.errors import UserError
from fedshift.experiment.schema import Experiment
from fedshift.runs.setup import make_task
from fedshift.tune import Tuned, tune
from fedshift.tune.samplers import Random
from fedshift.tune.searching import TRIALS
from fedshift.tune.space import Choice, Range, space_of

SMALL: dict[str, Any] = {
    "rounds": 1,
    "data": {"size": 8, "domains": ["pen", "paper", "font"]},
    "model": {"name": "mlp", "hidden": [8]},
    "split": {"train-limit": 20, "unseen": ["font"]},
    "stream": [{"name": "original", "kind": "original"}, {"name": "by-class", "kind": "original", "order": "by-class"}],
    "method": [{"name": "fedavg", "adapters": ["none", "t3a"]}, {"name": "fedprox"}],
    "tune": {"train.lr": {"low": 0.01, "high": 1.0, "log": True}, "method.fedprox.mu": [0.0, 0.1]},
}


def search(out: Path, **changes: Any) -> Tuned:
    return tune(Experiment(**SMALL), out, **{"trials": 2, "engine": "sequential", **changes})


@pytest.mark.grid
def test_the_best_of_every_method_is_found_and_can_be_run(tmp_path: Path) -> None:
    found = search(tmp_path)
    assert [(trial.method, trial.number) for trial in found.trials] == [
        *(("fedavg", n) for n in range(2)),
        *(("fedprox", n) for n in range(2)),
    ]
    assert all(set(trial.by_stream) == {"original", "by-class"} for trial in found.trials)
    assert [set(trial.values) for trial in found.trials] == [{"train.lr"}] * 2 + [{"train.lr", "method.fedprox.mu"}] * 2
    for method, best in found.best.items():
        own = [trial for trial in found.trials if trial.method == method]
        assert best.score == max(trial.score or 0.0 for trial in own)
    written = Experiment.load(tmp_path / "experiment-tune" / "best.toml")
    assert {**written.whole(), "split": None} == {**found.experiment.whole(), "split": None}
    settings = {spec.name: (spec.train["lr"], spec.options().get("mu")) for spec in written.method}
    best = found.best
    assert settings["fedavg"] == (best["fedavg"].values["train.lr"], None)
    assert settings["fedprox"] == tuple(best["fedprox"].values[key] for key in ("train.lr", "method.fedprox.mu"))
    assert written.split == {**SMALL["split"], "stratify": False}  # the test is as it was asked for
    # nothing runs twice, and more trials come on top
    begun = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("done")}
    more = search(tmp_path, trials=3)
    assert {path: path.stat().st_mtime_ns for path in begun} == begun
    assert more.trials[:2] == found.trials[:2]
    told = json.loads((tmp_path / "experiment-tune" / TRIALS).read_text())["trials"]
    assert [trial["score"] for trial in told] == [trial.score for trial in more.trials]
    heads = [str(column.header) for column in more.table().columns]
    assert heads == ["method", "trial", "train.lr", "method.fedprox.mu", "adapter", "original", "by-class", "mean"]


def poisoned(pool: Pool, poison: bool) -> Pool:
    """The same images; with poison, the labels of all test images are others."""
    assert pool.splits is not None
    labels = [
        (int(label) + (poison and int(part) == 2)) % 2 for label, part in zip(pool.labels, pool.splits, strict=True)
    ]
    return fedshift.from_arrays(
        pool.images.numpy(), labels, domains=pool.domains, splits=pool.splits, classes=("a", "b")
    )


def test_no_test_label_is_read(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (120, 8, 8), dtype=np.uint8)
    parts = [("train", "train", "test")[i % 3] for i in range(120)]
    pool = fedshift.from_arrays(images, [i // 2 % 2 for i in range(120)], domains=["x", "y"] * 60, splits=parts)
    experiment = Experiment(
        **{**SMALL, "method": [{"name": "fedavg", "adapters": ["none", "t3a"]}], "tune": {}},
    ).changed(
        {
            "split": {"from-file": True, "val": 0.3, "unseen": 0.0},
            "data": {"domains": []},
            "model": {"name": "mlp", "hidden": [8]},
        }
    )
    clean, other = (
        tune(experiment, tmp_path / str(p), trials=2, engine="sequential", data=poisoned(pool, p))
        for p in (False, True)
    )
    assert other.trials == clean.trials
    tested = [
        fedshift.run(experiment.changed({"baselines": False}), tmp_path / f"run-{p}", data=poisoned(pool, p))
        for p in (False, True)
    ]
    assert tested[0].accuracy("fedavg") != tested[1].accuracy("fedavg")  # a test does read them


@pytest.mark.parametrize("label", ["", "mine"])
def test_options_of_adapters_alone_are_told_apart(tmp_path: Path, label: str) -> None:
    """Such trials share one training. An adapter without a label is called by its options; one with has one place."""
    tent = {"name": "tent", "label": label, "params": "all", "predict-when": "after"}
    method = {"name": "fedavg", "adapters": [tent]}
    experiment = Experiment(**{**SMALL, "method": [method], "stream": SMALL["stream"][:1], "tune": {}})
    rates = {f"method.fedavg.adapters.{label or 'tent'}.lr": [0.0, 3.0]}
    first, again = (tune(experiment, tmp_path, trials=4, over=rates, engine="sequential") for _ in range(2))
    assert len(list(tmp_path.rglob("done"))) == 1
    assert first.trials == again.trials
    scores = {(rate, trial.score) for trial in first.trials for rate in trial.values.values()}
    assert len(scores) == len(dict(scores)) == len({score for _, score in scores}) == 2


def test_a_task_of_ones_own_is_refused(tmp_path: Path) -> None:
    """It was divided by somebody else: trials would be shown its test images."""
    experiment = Experiment(**SMALL)
    with pytest.raises(UserError, match="a task of your own is divided already"):
        tune(experiment, tmp_path, data=make_task(experiment, 0), trials=1)  # type: ignore[arg-type]


@pytest.mark.grid
def test_optuna_proposes_the_same_again(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    first, again = (search(tmp_path, sampler="tpe", methods=["fedprox"]) for _ in range(2))
    assert first.trials == again.trials
    assert {trial.method for trial in first.trials} == {"fedprox"}


def test_random_settings_are_a_function_of_seed_key_and_number() -> None:
    space = {
        "train.lr": Range(0.001, 1.0, log=True),
        "train.local-epochs": Range(1, 4),
        "model.norm": Choice((True, False)),
    }
    drawn = [Random(space, 0, "fedavg").ask(number) for number in range(200)]
    assert drawn[7] == Random({"train.lr": space["train.lr"], **space}, 0, "fedprox").ask(7)
    assert drawn[7] != Random(space, 1, "fedavg").ask(7)
    rates = [values["train.lr"] for values in drawn]
    assert 0.001 <= min(rates) < 0.002
    assert 0.5 < max(rates) <= 1.0
    assert 0.4 < np.mean([rate < 0.03162 for rate in rates]) < 0.6
    assert {values["train.local-epochs"] for values in drawn} == {1, 2, 3, 4}
    assert {values["model.norm"] for values in drawn} == {True, False}
    signed = [Range(-1, 1).at(share) for share in (0.0, 0.3, 0.4, 0.6, 0.7, 0.99)]
    assert signed == [-1, -1, 0, 0, 1, 1]
    assert Range(0.9, 0.99999).at(0.99999) < 1.0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"trials": 0}, "a search needs one trial or more, not 0"),
        ({"sampler": "grid"}, "there is no sampler 'grid'; there are: random, tpe"),
        ({"methods": ["fedvag"]}, "the experiment has no method 'fedvag'; it has: fedavg, fedprox"),
        ({"over": {"rounds": [1, 2]}}, "only options of training, networks, methods and adapters are searched for"),
        ({"over": {"split.train": [0.1, 0.2]}}, "only options of training"),
        ({"over": {"train.lr": [0.1]}}, "a list needs two values or more, not 1"),
        ({"over": {"train.lr": {"low": 1, "high": 0.1}}}, "low must be a number below high, not 1 and 0.1"),
        ({"over": {"train.lr": {"low": 0, "high": 1, "log": True}}}, "and above 0 for log"),
        ({"over": {"train.lr": 3}}, "must be a list of values or { low = ..., high = ..., log = true }, not 3"),
        ({"over": {"train.rate": [1, 2]}}, r"\[train\] has no option 'rate'"),
    ],
)
def test_mistakes_are_found_before_anything_runs(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        search(tmp_path / "runs", **changes)
    assert not (tmp_path / "runs").exists()


def test_what_cannot_be_chosen_by_is_refused() -> None:
    for changes, sentence in (
        ({"sweep": {"train.lr": [0.1]}}, "a search and a \\[sweep\\] do not go together"),
        ({"split": {"unseen": "each"}}, "name the unseen clients"),
        ({"split": {"train": 0.8, "val": 0.0}}, "val is 0"),
    ):
        with pytest.raises(UserError, match=sentence):
            tune(Experiment(**SMALL).changed(changes), trials=1)
    assert space_of(Experiment(train={"lr": 0.2})) == {"train.lr": Range(0.02, 2.0, log=True)}


@pytest.mark.system
def test_a_killed_search_goes_on(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        'rounds = 12\ndata = { size = 8 }\nmodel = { name = "mlp", hidden = [8] }\nsplit = { train-limit = 20 }\n'
        'checkpoint-every = 1\nmethod = [{ name = "fedavg" }]\n'
    )
    source = str(Path(fedshift.__file__).parents[1])
    command = [sys.executable, "-m", "fedshift", "tune", "mine.toml", "--trials", "2", "--engine", "sequential"]

    def start(out: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*command, "--out", out], cwd=tmp_path, env={**os.environ, "PYTHONPATH": source}, stdout=subprocess.DEVNULL
        )

    whole = start("whole")
    assert whole.wait(120) == 0
    killed = start("killed")
    while len(list((tmp_path / "killed").rglob("metrics.jsonl"))) < 2:  # in the second trial
        assert killed.poll() is None
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not (tmp_path / "killed" / "mine-tune" / TRIALS).exists()
    finished = len(list((tmp_path / "killed").rglob("done")))
    assert finished < 2
    assert start("killed").wait(120) == 0
    first, second = ((tmp_path / out / "mine-tune" / TRIALS).read_text() for out in ("whole", "killed"))
    assert first == second
