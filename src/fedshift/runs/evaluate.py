"""Scores of a trained run: every adapter on every stream, and what is written beside the scores."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from operator import add

import fedshift
from fedshift.core.registry import ADAPTERS
from fedshift.data.task import Task
from fedshift.engines.balance import untouched
from fedshift.engines.base import Density, Score
from fedshift.experiment.schema import AdapterSpec, Experiment
from fedshift.runs.answers import names_of
from fedshift.runs.calibrate import calibrated
from fedshift.runs.code import code_digest
from fedshift.runs.deployment import Deployment, Snapshot
from fedshift.runs.described import remade_by_stream
from fedshift.runs.features import lacking, save_features
from fedshift.runs.keep_predictions import keep_predictions, lacks_predictions
from fedshift.runs.measuring import measured
from fedshift.runs.plan import Job
from fedshift.runs.progress import Reporter
from fedshift.runs.served import Served
from fedshift.runs.session import Session
from fedshift.runs.twins import has_twin, twin_models, twin_of
from fedshift.runs.write_artefacts import lacks_artefacts, wanted, write_artefacts
from fedshift.store.files import MISSING, Damaged, attempt
from fedshift.store.folder import NOTES, snapshot_file
from fedshift.store.metric import Metric
from fedshift.store.rows import ScoreRow, Told
from fedshift.store.state import State
from fedshift.store.summary import ClientScore, finite, mean_over, summarise, summarise_measures


def score(job: Job, session: Session, say: Reporter) -> None:
    """What is not there yet: every adapter on the last state and on the one chosen by validation, features, snapshots."""
    lack = Lack.of(job)
    for one in lack.damaged:
        say.note(f"{one.path} was damaged ({one.why}) and is made again")
    for name, rows in lack.restated.items():
        job.folder.write_scores(name, rows)
    if not lack.models:
        return
    title, waiting, choosers, unsaved, unwritten = job.title, lack.waiting, lack.choosers, lack.unsaved, lack.unwritten
    untwinned = lack.untwinned if lack.untwinned and has_twin(job, say) else []
    device = session.compute.device
    chosen = {name: job.folder.best(device, name) for name in choosers}
    best = chosen[""]  # of all adapters that did not choose for themselves
    last = [job.folder.last(device)] if waiting else []
    models: dict[int, list[Served]] = {}
    stand_ins: dict[int, list[Served]] = {}
    for state in (*last, *chosen.values()):
        if state.round not in models:
            say.doing(f"{title}: models of round {state.round}")
            deployment = calibrated(session, session.deploy(state), job.setup.spec.adapters)
            models[state.round] = _models(job, session, state, deployment, say)
            if untwinned:
                stand_ins[state.round] = twin_models(job, session, deployment)
            for adapter in (name for name, own in chosen.items() if unsaved and own.round == state.round):
                Snapshot.of(deployment, job.task).save(job.folder.path, adapter)
            for adapter in (name for name in unwritten if chosen[name].round == state.round):
                say.doing(f"{title}: artefacts")
                offered = [one for one in models[state.round] if one.deployable]
                trees = {name: tree for one in offered for name, tree in one.trees.items()}
                write_artefacts(job, session, deployment, trees, _served_from(job, adapter, chosen), adapter)
    for spec in waiting:
        say.doing(f"{title}: adapter {spec.title}")
        rounds = {"last": last[0].round, "best-val": chosen.get(spec.title, best).round}
        by_round = {number: _scored_by(job, session, spec, number, models[number]) for number in set(rounds.values())}
        rows_of = {number: _rows(job, spec, job.task, found) for number, found in by_round.items()}
        scored = [
            replace(row, selection=rule, round=number) for rule, number in rounds.items() for row in rows_of[number]
        ]
        names = next((row.classes for row in scored if row.classes), ())
        keep_predictions(job, spec, rounds["best-val"], by_round[rounds["best-val"]], names)
        job.folder.write_scores(spec.title, _completed(scored, spec, job.experiment))
    for spec in untwinned:
        say.doing(f"{title}: adapter {spec.title} on validation images")
        number = chosen.get(spec.title, best).round
        found = _scored_by(job, session, spec, number, stand_ins[number], twins=True)
        rows = [replace(row, selection="best-val", round=number) for row in _rows(job, spec, job.twin(), found)]
        job.folder.write_twins(spec.title, rows)
    if lack.featured:
        say.doing(f"{title}: features")
        own = [served.trees for served in models[best.round] if served.model == job.model]
        save_features(job, session, {name: tree for trees in own for name, tree in trees.items()}, best.round, say)


def scored(job: Job) -> bool:
    """Whether nothing is left to do for :func:`score`."""
    lack = Lack.of(job)
    return not lack.models and not lack.restated


@dataclass(frozen=True)
class Lack:
    """What the scores of a trained run lack."""

    waiting: Sequence[AdapterSpec]  # not scored yet
    untwinned: Sequence[AdapterSpec]  # not scored on validation images under the streams' shifts yet
    restated: Mapping[str, list[ScoreRow]]  # by adapter: what is only written beside the scores has changed
    choosers: Sequence[str]  # adapters that choose their round for themselves; "" for all others
    featured: bool
    unsaved: bool  # a snapshot is missing
    unwritten: Sequence[str]  # choosers whose artefacts are missing
    damaged: Sequence[Damaged]  # what is there, and is to be made again

    @property
    def models(self) -> bool:
        """Whether the models are needed."""
        return bool(self.waiting or self.untwinned or self.featured or self.unsaved or self.unwritten)

    @staticmethod
    def of(job: Job) -> Lack:
        """Look into the run's folder."""
        damaged: list[Damaged] = []
        stored = job.folder.scores(damaged)
        found = {name: rows[0] for name, rows in stored.items() if rows}
        twins = {name: rows[0] for name, rows in job.folder.twins(damaged).items() if rows}
        unkept = [spec for spec in job.setup.spec.adapters if lacks_predictions(job, spec, damaged)]
        waiting = [
            spec for spec in job.setup.spec.adapters if spec in unkept or not _scored(spec, found.get(spec.title))
        ]
        advised = job.experiment.evaluate.advice and any(len(client.val) for client in job.task.clients)
        untwinned = [spec for spec in job.setup.spec.adapters if advised and not _scored(spec, twins.get(spec.title))]
        there = [spec for spec in job.setup.spec.adapters if spec not in waiting]
        stated = {spec.title: _completed(stored[spec.title], spec, job.experiment) for spec in there}
        wished = {spec.title for spec in job.setup.spec.adapters}
        damaged = [one for one in damaged if one.path.stem in wished]  # those of others are not ours to make
        choosers = ["", *(spec.title for spec in job.setup.spec.validated(job.experiment.evaluate))]
        return Lack(
            waiting,
            untwinned,
            {name: rows for name, rows in stated.items() if rows != stored[name]},
            choosers,
            lacking(job, damaged),
            unsaved=bool([name for name in choosers if _unsaved(job, name, damaged)]),
            unwritten=[name for name in choosers if wanted(job) and lacks_artefacts(job, name, damaged)],
            damaged=[one for one in damaged if one.why != MISSING],
        )


def _served_from(job: Job, chooser: str, chosen: Mapping[str, State]) -> list[AdapterSpec]:
    """The adapters whose models are those of the round that ``chooser`` chose."""
    real = [spec for spec in job.setup.spec.adapters if spec.name != "none"]
    return [spec for spec in real if (spec.title if spec.title in chosen else "") == chooser]


def _unsaved(job: Job, chooser: str, damaged: list[Damaged]) -> bool:
    return attempt(lambda: Snapshot.read(job.folder.path / snapshot_file(chooser)), damaged) is None


def adapters_of(scores: Mapping[str, Sequence[ScoreRow]]) -> dict[str, AdapterSpec]:
    """The adapters that a run was scored with, by label, ``none`` first.

    >>> from fedshift.store.metric import Metric
    >>> from fedshift.store.summary import Summary
    >>> row = ScoreRow(Metric("global", "original"), Summary(), adapter="tent")
    >>> list(adapters_of({"a": [row], "none": [replace(row, adapter="none")]}))
    ['none', 'a']
    """
    first = {label: rows[0] for label, rows in scores.items() if rows}
    return {
        label: AdapterSpec(name=row.adapter, label=label, **row.options)
        for label, row in sorted(first.items(), key=lambda item: (item[1].adapter != "none", item[0]))
    }


def _scored_by(
    job: Job, session: Session, spec: AdapterSpec, number: int, offered: Sequence[Served], twins: bool = False
) -> list[tuple[Served, dict[tuple[str, str], Score]]]:
    """An adapter on every stream (or its twin); models that were just trained on labels are scored as they are."""
    adapters = job.setup.adapters(spec, session.context(number))
    plain = [served for served in offered if served.deployable or spec.name == "none"]
    found: list[tuple[Served, dict[tuple[str, str], Score]]] = []
    for served in plain:
        task = twin_of(job, served.population) if twins else job.task
        common = [stream for stream in task.streams if stream not in served.remade]
        scores = session.evaluate(adapters, served.trees, common, task) if common else {}
        for stream, make in served.remade.items():
            scores |= session.evaluate(adapters, make(), [stream], task)
        found.append((served, scores))
    return found


def _rows(
    job: Job, spec: AdapterSpec, task: Task, found: Sequence[tuple[Served, Mapping[tuple[str, str], Score]]]
) -> list[ScoreRow]:
    return [
        replace(
            _row(served, stream, scores),
            label=spec.title,
            adapter=spec.name,
            options=spec.options(),
            code=code_digest(ADAPTERS[spec.name].make),
            classes=_class_names(job, scores),
            setting=asdict(task.setting(stream)),
            seed=job.seed,
            task_hash=job.task.hash,
            fedshift=fedshift.__version__,
        )
        for served, scores in found
        for stream in task.streams
    ]


def _class_names(job: Job, scores: Mapping[tuple[str, str], Score]) -> tuple[str, ...]:
    width = max((score.classes for score in scores.values()), default=0)
    return names_of(job.task.classes, width) if width else ()


def _completed(scored: Sequence[ScoreRow], spec: AdapterSpec, experiment: Experiment) -> list[ScoreRow]:
    """Scores with what follows from them or only labels them: means over streams, published numbers, the family.

    None of it needs the models, so it is brought up to date without scoring again.
    """
    groups: dict[tuple[str, str, str], dict[str, ScoreRow]] = {}
    for row in (row for row in scored if not row.of_streams):
        groups.setdefault((row.selection, row.metric.model, row.metric.population), {})[row.metric.stream] = row
    settings = experiment.model_dump(by_alias=True)
    published = spec.published(settings)
    tuned = spec.published({**settings, "split": {**settings["split"], "tune": True}})
    validation = {key: number for key, number in tuned.items() if published.get(key) != number}
    mean_of = experiment.evaluate.mean_of
    completed: list[ScoreRow] = []
    for by_stream in groups.values():
        means = [_mean_row([by_stream[name] for name in mean_of])] if mean_of else []
        completed += [
            replace(
                row,
                paper=_first(published, _paper_keys(row.metric)),
                paper_validation=_first(validation, _paper_keys(row.metric._replace(population="clients"))),
                family=spec.family,
                aside=spec.aside,
            )
            for row in (*by_stream.values(), *means)
        ]
    return completed


def _first(numbers: Mapping[str, float], keys: Sequence[str]) -> float | None:
    return next((numbers[key] for key in keys if key in numbers), None)


def _paper_keys(metric: Metric) -> list[str]:
    """Under which names a published number may stand; the plain name of a stream is that of the clients who train."""
    if metric.model == "after-local":
        return [f"after-local/{metric.stream}"]
    return [str(metric.column), *([metric.stream] if metric.population == "clients" else [])]


def _mean_row(rows: Sequence[ScoreRow]) -> ScoreRow:
    return replace(
        rows[0],
        metric=rows[0].metric._replace(stream="mean"),
        summary=mean_over([row.summary for row in rows]),
        measures={name: mean_over([row.summary_of(name) for row in rows]) for name in rows[0].measures},
        classes=(),
        whole=None,
        measured={},
        by_client={},
        telemetry={},
        setting={},
        of_streams=tuple(row.metric.stream for row in rows),
        unknown={},
    )


def annotate(job: Job) -> None:
    """Notes lie beside the scores: they decide nothing, and may change after the run."""
    if annotated(job):
        return
    if text := _notes(job):
        job.folder.write(NOTES, text)
    else:
        (job.folder.path / NOTES).unlink(missing_ok=True)


def annotated(job: Job) -> bool:
    """Whether the notes are those of the experiment and its method."""
    return attempt(job.folder.notes, []) == _notes(job)


def _notes(job: Job) -> str:
    """The experiment's, and what the method says of its own settings: the same for all seeds, so that it is said once."""
    own = untouched(job.setup.method, job.experiment.rounds)
    notes = [*job.experiment.notes, *([f"{job.setup.spec.title}: {own}"] if own else [])]
    return "".join(f"{note}\n" for note in notes)


def _scored(spec: AdapterSpec, row: ScoreRow | None) -> bool:
    """Whether these are scores of this adapter with these options, not only of one with the same label."""
    wanted = json.loads(json.dumps([spec.name, spec.options(), code_digest(ADAPTERS[spec.name].make)]))
    return row is not None and [row.adapter, row.options, row.code] == wanted


def _models(job: Job, session: Session, state: State, deployment: Deployment, say: Reporter) -> list[Served]:
    """The models that are scored."""
    models = [Served(job.model, "clients", deployment.trained(), deployment.given_bytes)]
    if job.experiment.evaluate.after_local:
        models.append(Served("after-local", "clients", session.after_local(state)))
    if job.task.unseen:
        trees = session.unseen(deployment)
        remade = remade_by_stream(session, deployment, job.task)
        models.append(Served(job.model, "unseen", trees, deployment.given_bytes, remade))
        if not trees:
            say.note(f"{job.setup.spec.title} has nothing to give to unseen clients; that row is left out")
    return [served for served in models if served.trees]


def _row(served: Served, stream: str, scores: Mapping[tuple[str, str], Score]) -> ScoreRow:
    own = {name: score for (name, part), score in scores.items() if part == stream}
    by_client, whole = measured(own)
    return ScoreRow(
        Metric(served.model, stream, served.population),
        summarise(own),
        given_bytes=served.published,
        measures={} if whole is None else summarise_measures(by_client, whole),
        whole=whole,
        measured=by_client,
        by_client={
            name: ClientScore(score.samples, score.correct, finite(round(score.loss, 4)), score.broken)
            for name, score in own.items()
        },
        telemetry=_telemetry([score for score in own.values() if score.samples]),
    )


def _telemetry(scores: Sequence[Score]) -> dict[str, Told]:
    """What an adapter told about itself, over the samples of all clients."""
    parts: dict[str, list[Density]] = {}
    for score in scores:
        for name, density in score.telemetry.items():
            parts.setdefault(name, []).append(density)
    whole = {name: reduce(add, densities) for name, densities in parts.items()}
    return {name: Told(density.mean, density.counts) for name, density in whole.items()}
