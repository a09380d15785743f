"""Runs trained side by side are the runs they would have been alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fedshift.core.registry import METHODS
from fedshift.core.tree import Tree
from fedshift.engines.base import Compute
from fedshift.engines.sequential import Sequential
from fedshift.engines.vmapped import Vmapped
from fedshift.engines.vmapped.multi_seed import Together, share_images
from fedshift.experiment.schema import AdapterSpec, EvaluateSpec, Experiment, MethodSpec
from fedshift.runs import evaluate as scoring
from fedshift.runs import train as training
from fedshift.runs.deployment import Snapshot
from fedshift.runs.plan import Job, planned
from fedshift.runs.progress import Silent
from fedshift.runs.run import run
from fedshift.runs.session import Session
from fedshift.runs.setup import make_setup, make_task
from fedshift.store.folder import RunFolder
from fedshift.store.progress import Progress
from fedshift.store.state import State

DOUBLE = Compute(dtype=torch.float64)
SMALL = Experiment(
    rounds=3,
    baselines=False,
    data={"size": 8, "domains": ["pen", "china"]},
    model={"name": "mlp", "hidden": [6]},
    train={"local-epochs": 1, "batch-size": 64, "lr": 0.05},
)


@pytest.mark.parametrize("engine", ["sequential", "vmapped"])
def test_a_finished_run_says_how_it_was_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    monkeypatch.setattr(Vmapped, "convolutions", frozenset({"patches", "implicit"}))  # which a GPU would note
    result = run(SMALL.model_copy(update={"rounds": 1}), tmp_path, engine=engine)
    done = json.loads((result.folders[0] / "done").read_text())
    assert (done["engine"], done["precision"], done["device"]) == (engine, "float32", "cpu")
    assert done.get("convolutions") == (["implicit", "patches"] if engine == "vmapped" else None)


def as_on_a_gpu(jobs: list[Job], *_: object) -> list[list[Job]]:
    return training.stackable(jobs, 256)


def gap(a: Tree, b: Tree) -> float:
    assert {s: list(leaves) for s, leaves in a.items()} == {s: list(leaves) for s, leaves in b.items()}
    gaps = [float((a[s][n].double() - b[s][n].double()).abs().max()) for s in a for n in a[s] if a[s][n].numel()]
    return max(gaps, default=0.0)


# one client has nobody beside it, seeds with public images have not the same ones, and some keep what all clients of a
# run receive only once
ALONE = ("centralised", "fedmd", "hetero-tent", "heterofedtta", *(n for n, e in METHODS.items() if e.make.common))


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("fedavg", "scaffold", "fedtta") else pytest.param(name, marks=pytest.mark.grid)
        for name in METHODS
        if name not in ALONE
    ],
)
def test_rounds_of_three_seeds_together_are_their_own_rounds(name: str) -> None:
    tasks = [make_task(SMALL, seed) for seed in (0, 1, 2)]
    # BatchNorm only where it is needed: it gives constant pixels a gradient of rounding noise, whose sign some methods use
    spec = MethodSpec(name=name, model={"norm": bool(METHODS[name].make.requires)})

    def sessions(engine: Vmapped) -> list[Session]:
        setups = [make_setup(SMALL, spec, task) for task in tasks]
        return [Session(s, t, engine, DOUBLE, k, 3) for k, (s, t) in enumerate(zip(setups, tasks, strict=True))]

    alone, joint = sessions(Vmapped(DOUBLE)), sessions(Vmapped(DOUBLE))
    assert share_images([session.training for session in joint])
    stack = Together([session.training for session in joint])
    expected, states = [f.start() for f in alone], [f.start() for f in joint]
    for _ in range(2):
        expected = [f.step(state)[0] for f, state in zip(alone, expected, strict=True)]
        after = training.step_together(joint, states, stack)
        states = [state for state, _ in after]
    for one, other in zip(expected, states, strict=True):
        assert one.round == other.round == 2
        assert gap(one.server, other.server) < 1e-9
        assert one.locals.keys() == other.locals.keys()
        assert all(gap(one.locals[client], other.locals[client]) < 1e-9 for client in one.locals)
    assert all(report.loss > 0 or name in ("knn-per", "majority") for _, report in after)


def test_a_run_of_stacked_seeds_writes_what_single_ones_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = SMALL.model_copy(
        update={"seeds": [0, 1], "method": [MethodSpec(name="fedavg"), MethodSpec(name="ditto")]}
    )
    single = run(experiment, tmp_path / "single", engine="vmapped", device="cpu")
    monkeypatch.setattr("fedshift.runs.run.groups", as_on_a_gpu)
    stacked = run(experiment, tmp_path / "stacked", engine="vmapped", device="cpu")
    assert [(row.method, row.seeds) for row in stacked.rows] == [(row.method, row.seeds) for row in single.rows]
    assert [row.seeds for row in stacked.rows] == [(0, 1), (0, 1)]
    for one, other in zip(single.rows, stacked.rows, strict=True):
        assert one.values.keys() == other.values.keys()
        for key, numbers in one.values.items():
            for a, b in zip(numbers, other.values[key], strict=True):
                assert a.summary.pooled == pytest.approx(b.summary.pooled, abs=1.0)  # float32 in another order


def test_a_run_that_lags_behind_catches_up_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two stacked runs lost its last checkpoint: both end after all rounds, with every round once in the log."""
    experiment = SMALL.model_copy(update={"seeds": [0, 1], "checkpoint_every": 1})
    monkeypatch.setattr("fedshift.runs.run.groups", as_on_a_gpu)
    save, older = RunFolder.checkpoint, tmp_path / "older"

    def keeping(folder: RunFolder, state: State, progress: Progress) -> None:
        save(folder, state, progress)
        if state.round == 1 and folder.path.name.startswith("0-"):
            shutil.copytree(folder.path, older)

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "checkpoint", keeping)
        first = run(experiment, tmp_path, engine="vmapped", device="cpu")
    for folder in first.folders:
        (folder / "done").unlink()
    lagging = next(folder for folder in first.folders if folder.name.startswith("0-"))
    (newest,) = lagging.glob("ckpt-*")
    newest.unlink()
    (early,) = older.glob("ckpt-*")
    shutil.copy(early, lagging)
    second = run(experiment, tmp_path, engine="vmapped", device="cpu", resume=True)
    assert all((folder / "done").is_file() for folder in second.folders)
    for row, before in zip(second.rows, first.rows, strict=True):
        assert row.number("global/original/clients", "last") == pytest.approx(
            before.number("global/original/clients", "last"), abs=1.0
        )


def test_only_alike_runs_share_a_stack(tmp_path: Path) -> None:
    swept = SMALL.model_copy(
        update={
            "seeds": [0, 1],
            "method": [MethodSpec(name="fedavg"), MethodSpec(name="fedprox")],
            "sweep": {"train.lr": [0.01, 0.1]},
        }
    )
    jobs = list(planned(swept, tmp_path, None, None, Silent()))
    made = training.stackable(jobs, 256)
    assert len(jobs) == 8
    assert sorted(len(group) for group in made) == [2, 2, 2, 2]
    for group in made:
        assert len({(job.setup.spec.name, str(job.point)) for job in group}) == 1
        assert {job.seed for job in group} == {0, 1}
    assert [len(group) for group in training.stackable(jobs, 3)] == [1] * 8
    assert training.groups(jobs, Vmapped(Compute()), Compute()) == [[job] for job in jobs]


def test_an_adapter_chooses_its_round_after_its_own_adaptation(tmp_path: Path) -> None:
    tent = {
        "name": "tent",
        "label": "tent",
        "params": "all",
        "lr": 0.5,
        "optimiser": "sgd",
        "batch-size": 0,
        "predict-when": "after",
    }
    method = MethodSpec(name="fedavg", adapters=[{"name": "none"}, tent])
    plain = SMALL.model_copy(update={"rounds": 6, "method": [method], "evaluate": EvaluateSpec(every=1)})
    adapted = plain.model_copy(update={"evaluate": EvaluateSpec(every=1, adapted=True)})
    run(adapted, tmp_path, engine="sequential")
    (job,) = planned(adapted, tmp_path, None, None, Silent())
    lines = [line for line in job.folder.lines() if "adapter" in line]
    assert [line["round"] for line in lines] == [1, 2, 3, 4, 5, 6]

    engine = Sequential(Compute())
    session = job.session(engine, Compute(), Silent())
    state, reached = session.start(), []
    for line in lines:
        state, _ = session.step(state)
        scores = session.evaluate(job.setup.adapters(method.adapters[1]), session.deploy(state).trained(), ["val"])
        reached.append(100 * sum(s.correct for s in scores.values()) / sum(s.samples for s in scores.values()))
        assert line["val"]["pooled"] == pytest.approx(reached[-1])
    stored = {
        name: next(row.round for row in rows if row.selection == "best-val")
        for name, rows in job.folder.scores().items()
    }
    validation = [line["global/val/clients"]["pooled"] for line in job.folder.lines() if "global/val/clients" in line]
    assert stored == {"none": 1 + validation.index(max(validation)), "tent": 1 + reached.index(max(reached))}
    assert stored["none"] != stored["tent"], "with one choice for both this would show nothing"
    for adapter, title in (("", "none"), ("tent", "tent"), ("t3a", "none")):
        assert Snapshot.load(job.folder.path, adapter).ctx.round == stored[title]


def test_where_only_unseen_clients_are_tested_validation_stands_beside_them(tmp_path: Path) -> None:
    tent = {"name": "tent", "label": "tent", "params": "all", "lr": 0.5, "optimiser": "sgd", "predict-when": "after"}
    published = {"original/unseen": 12.5, "split.tune=true": {"original": 25.0}}
    method = MethodSpec(name="fedavg", adapters=[{"name": "none", "paper": published}, tent])
    experiment = Experiment(
        rounds=4,
        baselines=False,
        data={"size": 8, "domains": ["pen", "china"]},
        split={"train": 0.8, "val": 0.2, "test": 0.0, "unseen": ["china"]},
        model={"name": "mlp", "hidden": [6]},
        train={"local-epochs": 1, "batch-size": 64, "lr": 0.05},
        method=[method],
        evaluate=EvaluateSpec(every=1, adapted=True),
    )
    result = run(experiment, tmp_path, engine="sequential")
    lines = [json.loads(line) for line in (result.folders[0] / "metrics.jsonl").read_text().splitlines()]
    plain = {line["round"]: line["global/val/clients"]["client-mean"] for line in lines if "global/val/clients" in line}
    adapted = {line["round"]: line["val"]["client-mean"] for line in lines if line.get("adapter") == "tent"}
    assert plain != adapted
    for row, known in zip(result.rows, (plain, adapted), strict=True):
        for rule in ("last", "best-val"):
            (tested,) = row.scores("global/original/unseen", rule)
            assert row.number("global/val/clients", rule) == (known[tested.round], 0.0)
    assert [str(metric) for metric in result.metrics()] == ["original/unseen", "val/clients"]
    papers = [[row.paper(f"global/{metric}") for metric in result.metrics()] for row in result.rows]
    assert papers == [[12.5, 25.0], [None, None]]
    heads = [str(column.header).splitlines()[0] for column in result.table().columns]
    assert heads.count("validation") == 1
    tested = run(SMALL, tmp_path / "tested", engine="sequential")
    assert not any(metric.is_validation for metric in tested.metrics())


def test_adapters_are_part_of_a_run_only_where_they_choose_its_round(tmp_path: Path) -> None:
    def folder(adapted: bool, *adapters: str) -> Path:
        method = MethodSpec(name="fedavg", adapters=[{"name": name} for name in adapters])
        experiment = SMALL.model_copy(update={"method": [method], "evaluate": EvaluateSpec(adapted=adapted)})
        return next(planned(experiment, tmp_path, None, None, Silent())).folder.path

    assert folder(False, "none") == folder(False, "none", "t3a") == folder(True, "none")
    assert folder(True, "none", "t3a") != folder(True, "none")
    assert folder(True, "t3a", "lp-ft") == folder(True, "lp-ft", "t3a")


def test_what_only_stands_beside_scores_is_no_part_of_a_run(tmp_path: Path) -> None:
    def folder(**beside: object) -> Path:
        adapter = AdapterSpec.model_validate({"name": "t3a", **beside})
        method = MethodSpec(name="fedavg", adapters=[adapter])
        experiment = SMALL.model_copy(update={"method": [method], "evaluate": EvaluateSpec(adapted=True)})
        return next(planned(experiment, tmp_path, None, None, Silent())).folder.path

    assert folder() == folder(paper={"original": 12.5}) == folder(family="some")


def test_an_adapter_is_scored_once_where_two_rules_select_the_same_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    scored_by = scoring._scored_by

    def counted(job: Job, session: Session, spec: AdapterSpec, *more: Any, twins: bool = False) -> Any:
        calls.append(f"{spec.title} on twins" if twins else spec.title)
        return scored_by(job, session, spec, *more, twins=twins)

    monkeypatch.setattr(scoring, "_scored_by", counted)
    method = MethodSpec(name="fedavg", adapters=[{"name": "none"}, {"name": "t3a"}])
    experiment = SMALL.model_copy(update={"method": [method], "evaluate": EvaluateSpec(every=0)})
    result = run(experiment, tmp_path, engine="sequential")
    assert {rule for row in result.rows for rule, _ in row.values} == {"last", "best-val"}
    assert calls == ["none", "t3a", "none on twins", "t3a on twins"]
