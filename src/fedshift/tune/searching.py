"""A search over settings: every trial is an ordinary run that is shown validation images in place of test images.

No test label is read: ``[split] tune`` hides them, and streams that are made of nothing else are left out. Nothing is
stored but the runs. A search that was killed proposes the same settings again, finds the runs that are finished, and goes
on with the one that is not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedshift.data.pool import Pool
from fedshift.data.streams import twins_of
from fedshift.data.task import Task
from fedshift.errors import UserError
from fedshift.experiment.files import override
from fedshift.experiment.schema import Experiment, MethodSpec
from fedshift.measures.measurement import MEASURES
from fedshift.results.collect import collect
from fedshift.results.result import Row
from fedshift.runs.notebook import usual
from fedshift.runs.plan import Job
from fedshift.runs.progress import Reporter
from fedshift.runs.run import carry_out, plan
from fedshift.runs.setup import EACH, Network, split_as_own, streams_of
from fedshift.store.folder import RunFolder
from fedshift.store.metric import Metric
from fedshift.store.toml import toml_text
from fedshift.tune.progress import Search
from fedshift.tune.samplers import SAMPLERS
from fedshift.tune.space import of_method, space_of

TRIALS, BEST = "trials.json", "best.toml"


@dataclass(frozen=True)
class Trial:
    """Settings that were tried with a method."""

    method: str
    number: int
    values: Mapping[str, Any]
    adapter: str = ""  # the best one
    score: float | None = None  # client mean of the headline, over streams and seeds; None: no number came of it
    by_stream: Mapping[str, float] = field(default_factory=dict)  # of which it is the mean


@dataclass(frozen=True)
class Tuned:
    """What a search gave."""

    trials: tuple[Trial, ...]
    best: Mapping[str, Trial]  # by method
    measure: str
    experiment: Experiment  # the one that was asked for, with the best settings of every method
    folder: Path

    def table(self, most: int = 5) -> Any:
        """The best trials of every method."""
        from fedshift.tune.report import trials_table

        return trials_table(self, most)


def tune(
    experiment: Experiment | str | Path | None = None,
    out: str | Path = "runs",
    *,
    trials: int = 20,
    over: Mapping[str, Any] | None = None,
    sampler: str = "random",
    seed: int = 0,
    methods: Sequence[str] = (),
    engine: str = "auto",
    device: str = "auto",
    processes: int | None = None,
    network: Network | None = None,
    data: Pool | None = None,
    reporter: Reporter | None = None,
) -> Tuned:
    """Look for the settings with which every method is best on validation images, under the experiment's shifts.

    ``[tune]`` or ``over`` say where: a dotted key and a list of values, or ``{"low": ..., "high": ..., "log": True}``; left
    out, it is the learning rate, from a tenth to ten times its value. ``trials`` settings are tried with each method (those
    named in ``methods``, or all). The same call goes on where it was interrupted, and more trials come on top of those that
    are there. Runs go to ``out/NAME-tune``, with ``trials.json`` and ``best.toml``, which ``fedshift run`` takes.

    >>> import tempfile
    >>> small = Experiment(rounds=1, data={"size": 8}, split={"train-limit": 10}, model={"name": "mlp", "hidden": [8]})
    >>> found = tune(small, tempfile.mkdtemp(), trials=2, engine="sequential")
    >>> [trial.number for trial in found.trials], list(found.best)
    ([0, 1], ['fedavg'])
    """
    whole = experiment if isinstance(experiment, Experiment) else Experiment.load(experiment)
    whole = split_as_own(whole, data)
    _check(whole, trials, sampler, data)
    space = space_of(whole, over)
    shown = _shown(whole)
    specs = [spec for spec in whole.method if not methods or spec.title in methods]
    for name in (name for name in methods if name not in {spec.title for spec in whole.method}):
        known = ", ".join(spec.title for spec in whole.method)
        raise UserError(f"the experiment has no method {name!r}; it has: {known}")
    say = reporter or usual()
    search = Search(say, [spec.title for spec in specs], trials)
    how = {"engine": engine, "device": device, "processes": processes, "resume": True, "reporter": search}
    tried: list[Trial] = []
    folder = Path(out) / shown.name
    try:
        for spec in specs:
            mine = of_method(space, spec, whole.method)
            proposing = SAMPLERS[sampler](mine, seed, spec.title)
            steps = [list(range(trials))] if proposing.at_once else [[number] for number in range(trials)]
            for numbers in steps:
                asked = {number: proposing.ask(number) for number in numbers}
                jobs = {
                    number: plan(_tried(shown, spec, values), out, network=network, data=data, reporter=search)
                    for number, values in asked.items()
                }
                scored: dict[int, Trial] = {}
                for distinct, some in _side_by_side(jobs):
                    carry_out(list(distinct.values()), **how)  # type: ignore[arg-type]
                    scored |= {n: _scored(spec, n, asked[n], jobs[n], whole.evaluate.metric) for n in some}
                for number in numbers:
                    proposing.tell(number, _upwards(scored[number].score, whole.evaluate.metric))
                    tried.append(scored[number])
                _write_trials(folder, tried, whole.evaluate.metric)
    finally:
        say.close()
    best = {spec.title: found for spec in specs if (found := _best(tried, spec, whole.evaluate.metric)) is not None}
    chosen = _chosen(whole, best)
    settings = chosen.whole()
    split = {"stratify": False, **settings["split"]}  # what a preset leaves out, a file of one's own has
    RunFolder(folder).write(BEST, toml_text({**settings, "split": split}))
    return Tuned(tuple(tried), best, whole.evaluate.metric, chosen, folder)


def _check(experiment: Experiment, trials: int, sampler: str, data: object) -> None:
    if trials < 1:
        raise UserError(f"a search needs one trial or more, not {trials}")
    if sampler not in SAMPLERS:
        raise UserError(f"there is no sampler {sampler!r}; there are: {', '.join(SAMPLERS)}")
    if isinstance(data, Task):  # its test images would be shown as they are
        raise UserError("a search divides a pool; a task of your own is divided already")
    if experiment.sweep:
        raise UserError("a search and a [sweep] do not go together: leave one of them out")
    if experiment.split.get("unseen") == EACH:
        raise UserError(
            f'[split] unseen = "{EACH}" tests every client, so that nothing is left to choose by: name the unseen clients'
        )


def _shown(experiment: Experiment) -> Experiment:
    """The experiment as trials see it: validation images under the shifts they can be put under."""
    kinds = twins_of(streams_of(experiment))
    streams = [
        {"name": stream.name, "kind": kinds[stream.name].kind, **stream.options()}
        for stream in experiment.stream
        if stream.name in kinds
    ]
    plain = {"name": "original", "kind": "original"}
    return experiment.changed(
        {
            "name": f"{experiment.name}-tune",
            "baselines": False,
            "split": {"tune": True},
            "stream": streams or [plain],
            "evaluate": {"advice": False, "artefacts": False, "predictions": False, "features": 0, "mean-of": []},
        }
    )


def _tried(shown: Experiment, spec: MethodSpec, values: Mapping[str, Any]) -> Experiment:
    """The experiment of one trial: one method under its settings."""
    return shown.changed({"method": [_with(spec, values).model_dump(by_alias=True)]})


def _with(spec: MethodSpec, values: Mapping[str, Any]) -> MethodSpec:
    """A method with settings of its own, also for training and network."""
    table: dict[str, Any] = {"method": [spec.model_dump(by_alias=True)]}
    for key, value in values.items():
        head, *rest = key.split(".")
        own = [head, *rest] if head == "method" else ["method", spec.title, head, *rest]
        override(table, own, value)
    return MethodSpec(**table["method"][0])


def _side_by_side(jobs: Mapping[int, Sequence[Job]]) -> list[tuple[dict[Path, Job], list[int]]]:
    """Runs that can be made at once, by folder, and whose trials they are.

    Trials that differ only in options of adapters share a run, whose scores of an adapter with a label have one place: such
    trials are scored one after the other.
    """
    batches: list[tuple[dict[Path, Job], list[int]]] = []
    for number, own in jobs.items():
        fitting = (
            one for one in batches if all(one[0].get(job.folder.path, job).setup.spec == job.setup.spec for job in own)
        )
        batch = next(fitting, None) or ({}, [])
        if not batch[1]:
            batches.append(batch)
        batch[0].update({job.folder.path: job for job in own})
        batch[1].append(number)
    return batches


def _scored(spec: MethodSpec, number: int, values: Mapping[str, Any], jobs: Sequence[Job], measure: str) -> Trial:
    labels = [adapter.title for adapter in jobs[0].setup.spec.adapters]  # a title may say the options that are tried
    rows = collect({job.folder.path: labels for job in jobs}).rows
    found = [(row, streams) for row in rows if not row.bound and (streams := _streams(row, jobs[0], measure))]
    if not found:
        return Trial(spec.title, number, values)
    higher = MEASURES[measure].higher
    row, streams = (max if higher else min)(found, key=lambda item: _mean(item[1]))
    return Trial(spec.title, number, values, row.adapter, round(_mean(streams), 6), streams)


def _streams(row: Row, job: Job, measure: str) -> dict[str, float]:
    """The client mean on every stream; nothing where one of them has no number."""
    numbers = {name: row.number(Metric("", name, "clients", measure)) for name in job.task.streams}
    broken = any(row.broken(Metric("", name)) for name in numbers)
    return {} if broken else {name: found[0] for name, found in numbers.items() if found is not None}


def _mean(numbers: Mapping[str, float]) -> float:
    return sum(numbers.values()) / len(numbers)


def _upwards(score: float | None, measure: str) -> float | None:
    return score if score is None or MEASURES[measure].higher else -score


def ranked(trials: Sequence[Trial], method: str, measure: str) -> list[Trial]:
    """A method's trials, the best first, those without a number last; of equal ones the first that was tried."""

    def key(trial: Trial) -> tuple[bool, float, int]:
        upwards = _upwards(trial.score, measure)
        return upwards is None, -(upwards or 0.0), trial.number

    return sorted((trial for trial in trials if trial.method == method), key=key)


def _best(trials: Sequence[Trial], spec: MethodSpec, measure: str) -> Trial | None:
    return next((trial for trial in ranked(trials, spec.title, measure) if trial.score is not None), None)


def _chosen(experiment: Experiment, best: Mapping[str, Trial]) -> Experiment:
    methods = [_with(spec, best[spec.title].values) if spec.title in best else spec for spec in experiment.method]
    return experiment.changed({"method": [spec.model_dump(by_alias=True) for spec in methods]})


def _write_trials(folder: Path, tried: Sequence[Trial], measure: str) -> None:
    table = {"measure": measure, "trials": [asdict(trial) for trial in tried]}
    RunFolder(folder).write(TRIALS, json.dumps(table, indent=1) + "\n")
