"""Training of runs, from the start or the last checkpoint to the last round; on a GPU several of them side by side."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

import fedshift
from fedshift.core.tree import Tree
from fedshift.engines.base import Compute, Engine
from fedshift.engines.vmapped import Vmapped
from fedshift.engines.vmapped.multi_seed import Together, share_images
from fedshift.measures.measurement import MEASURES
from fedshift.runs.calibrate import calibrated
from fedshift.runs.measuring import choosing
from fedshift.runs.plan import Job
from fedshift.runs.progress import Reporter
from fedshift.runs.round import RoundReport
from fedshift.runs.session import Session
from fedshift.store.lines import Adapted, Evaluation, RoundLine
from fedshift.store.metric import ACCURACY, VALIDATION, Metric
from fedshift.store.progress import MadeBy, Progress, Reached
from fedshift.store.state import State
from fedshift.store.summary import Summary, finite, summarise
from fedshift.store.toml import toml_text

OLDEST = 60.0  # seconds: a checkpoint is written after a round if the last one is older, whatever checkpoint-every says
FEW = 50  # clients, up to which metrics.jsonl has the loss of each
DATA = {"data", "partition", "split", "stream", "rotation", "seeds", "sweep", "evaluate"}  # what a stack may differ in


@dataclass(frozen=True)
class Training:
    """A run under way."""

    job: Job
    session: Session
    state: State
    progress: Progress
    started: float
    kept: float = field(default_factory=time.monotonic)  # when the last checkpoint was written
    diverged: frozenset[str] = frozenset()  # said once; metrics.jsonl has every round

    @property
    def finished(self) -> bool:
        """Whether no round is left."""
        return self.state.round >= self.job.rounds


def groups(jobs: Sequence[Job], engine: Engine, compute: Compute) -> list[list[Job]]:
    """Runs that are trained together: the same method on the same images under other seeds, as many as one stack holds.

    Only on a GPU, which a few clients leave idle; elsewhere every run is on its own.
    """
    if not isinstance(engine, Vmapped) or compute.device.type != "cuda":
        return [[job] for job in jobs]
    return stackable(jobs, engine.max_clients)


def stackable(jobs: Sequence[Job], most: int) -> list[list[Job]]:
    """Runs that can share a stack of at most ``most`` clients, in the order of their first ones."""
    made: list[list[Job]] = []
    for job in jobs:
        fitting = (group for group in made if _alike(group[0], job) and _clients(group) + _clients([job]) <= most)
        group = next(fitting, None)
        if group is None:
            made.append([job])
        else:
            group.append(job)
    return made


def _clients(jobs: Sequence[Job]) -> int:
    return sum(len(job.task.clients) for job in jobs)


def _alike(one: Job, other: Job) -> bool:
    """Whether two runs differ in nothing but their seed and who owns which images."""
    plain = all(
        len(job.setup.methods) == 1
        and not job.setup.method.arch.is_random
        and not job.setup.method.common
        and (job.setup.privacy is None or job.setup.privacy.sampling == "all")  # or they are not equally many
        for job in (one, other)
    )
    settings = [
        [job.setup.spec.model_dump(), job.experiment.model_dump(exclude=DATA), job.rounds, len(job.task.clients)]
        for job in (one, other)
    ]
    return plain and settings[0] == settings[1] and share_images([one.task, other.task])


def train(jobs: Sequence[Job], sessions: Sequence[Session], resume: bool, say: Reporter) -> None:
    """All rounds of runs of one group; those that are further wait for the others."""
    for job in (job for job in jobs if job.folder.done):
        say.skip(job.title, job.rounds)
    pairs = [(job, session) for job, session in zip(jobs, sessions, strict=True) if not job.folder.done]
    under_way = [_begun(job, session, resume, say) for job, session in pairs]
    stacks: dict[tuple[int, ...], Together] = {}
    while waiting := [k for k, training in enumerate(under_way) if not training.finished]:
        behind = min(under_way[k].state.round for k in waiting)
        moving = tuple(k for k in waiting if under_way[k].state.round == behind)
        together, states = [under_way[k].session for k in moving], [under_way[k].state for k in moving]
        if len(moving) == 1:
            after = [together[0].step(states[0])]
        else:
            if moving not in stacks:
                stacks = {moving: Together([session.training for session in together])}
            after = step_together(together, states, stacks[moving])
        for k, (state, report) in zip(moving, after, strict=True):
            under_way[k] = _advanced(under_way[k], state, report, say)
    for training in under_way:
        _conclude(training)


def step_together(
    sessions: Sequence[Session], states: Sequence[State], together: Together
) -> list[tuple[State, RoundReport]]:
    """One round of several runs of one method, whose clients are trained side by side."""
    first = sessions[0]
    begun = [session.begun(state) for session, state in zip(sessions, states, strict=True)]
    errands = [s.errand(state, half) for s, state, half in zip(sessions, states, begun, strict=True)]
    with first.told(begun[0].clients, begun[0].ctx, len(sessions)):
        replies = together.train(first.engine, first.setup.method, errands)
    halves = zip(sessions, states, begun, replies, strict=True)
    return [session.ended(state, half, own, len(sessions)) for session, state, half, own in halves]


def _begun(job: Job, session: Session, resume: bool, say: Reporter) -> Training:
    own = job.rounds - job.experiment.rounds
    stated = f"{job.title} ({job.experiment.rounds} rounds and {own} of its own)" if own > 0 else job.title
    if own < 0 and job.setup.privacy is not None:
        budget = job.setup.privacy.epsilon
        say.note(f"{job.title}: epsilon = {budget:g} is enough for {job.rounds} of {job.experiment.rounds} rounds")
    if resume and job.folder.begun:
        state, progress = job.folder.restore(session.compute.device, say.note)
        progress = _gone_on(job, session, progress, say)
        say.begin(stated, state.round, job.rounds)
    else:
        state, progress = session.start(), Progress(made_by=(made_by(session),))
        job.folder.begin(toml_text(job.config))
        say.begin(stated, 0, job.rounds)
        job.folder.checkpoint(state, progress)
    return Training(job, session, state, progress, time.perf_counter())


def made_by(session: Session) -> MadeBy:
    """What computes a session's rounds."""
    compute = session.compute
    precision = "tf32" if compute.tf32 else str(compute.dtype).removeprefix("torch.")
    return MadeBy(type(session.engine).__name__.lower(), compute.device.type, precision)


def _gone_on(job: Job, session: Session, progress: Progress, say: Reporter) -> Progress:
    """The engine is a part of a run: one that goes on with another says so."""
    now, before = made_by(session), progress.made_by[-1:]
    if before == (now,):
        return progress
    if before:
        say.note(
            f"{job.title} was trained by {before[0]} and goes on with {now}: rounding differs, so its numbers will not be "
            f"those of a run that was never interrupted (--engine {before[0].engine} keeps them)"
        )
    return replace(progress, made_by=(*progress.made_by, now))


def _advanced(training: Training, state: State, report: RoundReport, say: Reporter) -> Training:
    """Write down a round, validate and keep a checkpoint where they are due."""
    job, folder, variant = training.job, training.job.folder, training.job.experiment
    folder.log(_line(state.round, report), training.progress.lines + 1)
    progress = replace(training.progress, lines=training.progress.lines + 1)
    for name in (name for name in report.diverged if name not in training.diverged):
        say.note(f"{job.title}: client {name!r} was left out of round {state.round}, its loss or update is not finite")
    if _due(state.round, variant.evaluate.every, job.rounds):
        progress = _validate(job, training.session, state, progress)
    kept = training.kept
    if _due(state.round, variant.checkpoint_every, job.rounds) or time.monotonic() - kept >= OLDEST:
        folder.checkpoint(state, progress)
        kept = time.monotonic()
    say.round(job.title, state.round, report.loss, abs(progress.best.value))
    _say_spent(training, state.round, report, say)
    diverged = training.diverged | frozenset(report.diverged)
    return replace(training, state=state, progress=progress, kept=kept, diverged=diverged)


def _say_spent(training: Training, number: int, report: RoundReport, say: Reporter) -> None:
    """What has been told about a client so far: beside the bar after every round, and now and then to stay."""
    privacy, job = training.job.setup.privacy, training.job
    if privacy is None or "epsilon" not in report.server:
        return
    spent = f"epsilon {report.server['epsilon']:.3g} at delta {privacy.delta:g} after round {number}"
    if _due(number, job.experiment.checkpoint_every, job.rounds):
        say.note(f"{job.title}: {spent}")
    else:
        say.doing(spent)


def _conclude(training: Training) -> None:
    job, progress, compute = training.job, training.progress, training.session.compute
    if job.rounds == 0:
        progress = _validate(job, training.session, training.state, progress)
        job.folder.checkpoint(training.state, progress)
    engine, made = training.session.engine, made_by(training.session)
    ways = sorted(engine.convolutions) if isinstance(engine, Vmapped) else []
    facts = {
        "fedshift": fedshift.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "task-hash": job.task.hash,
        "seed": job.seed,
        "rounds": job.rounds,
        "extra-rounds": max(0, job.rounds - job.experiment.rounds),
        "lines": progress.lines,
        "best-round": progress.best_round,
        "adapted-rounds": dict(progress.adapted_rounds),
        "device": str(compute.device),
        "engine": made.engine,
        "precision": made.precision,
        **({"made-by": [str(one) for one in progress.made_by]} if len(progress.made_by) > 1 else {}),
        **({"convolutions": ways} if ways else {}),
        "seconds": round(time.perf_counter() - training.started, 3),
    }
    job.folder.end(facts)


def _due(round_: int, every: int, rounds: int) -> bool:
    return round_ == rounds or (every > 0 and round_ % every == 0)


def _line(round_: int, report: RoundReport) -> RoundLine:
    return RoundLine(
        round=round_,
        loss=finite(report.loss),
        participants=report.participants,
        diverged=tuple(report.diverged),
        bytes_down=report.bytes_down,
        bytes_up=report.bytes_up,
        seconds=round(report.seconds, 4),
        memory_peak=report.memory.get("memory-peak"),
        memory_grown=report.memory.get("memory-grown"),
        server={name: finite(value) for name, value in report.server.items()},
        losses={name: finite(loss) for name, loss in report.losses.items()} if len(report.losses) <= FEW else {},
    )


def _validate(job: Job, session: Session, state: State, progress: Progress) -> Progress:
    """Score validation data (and test streams for the oracle), and keep the state if it is the best so far."""
    parts = [VALIDATION, *(job.task.streams if job.experiment.evaluate.oracle else ())]
    started = time.perf_counter()
    choosers = job.setup.spec.validated(job.experiment.evaluate)
    deployed = calibrated(session, session.deploy(state), choosers).trained()
    scores = session.evaluate(job.setup.plain, deployed, parts)
    by_part = {part: {name: score for (name, p), score in scores.items() if p == part} for part in parts}
    measure = job.experiment.evaluate.metric
    found = {
        Metric(job.model, part, name=name): summary
        for part, own in by_part.items()
        for name, summary in {ACCURACY: summarise(own), measure: choosing(own, measure)}.items()
    }
    line = Evaluation(state.round, found, round(time.perf_counter() - started, 4))
    job.folder.log(line, progress.lines + 1)
    reached = _reached(found[Metric(job.model, VALIDATION, name=measure)], measure)
    progress = replace(progress, lines=progress.lines + 1)
    if state.round < job.chosen_from:
        return progress
    if reached is not None and reached.beats(progress.best):  # there is none without validation data
        job.folder.save_best(state)
        progress = replace(progress, best=reached, best_round=state.round)
    return _validate_adapted(job, session, state, deployed, progress)


def _validate_adapted(
    job: Job, session: Session, state: State, deployed: Mapping[str, Tree], progress: Progress
) -> Progress:
    """The same after every adapter's own, label-free adaptation to the validation images, where that chooses its round."""
    for spec in job.setup.spec.validated(job.experiment.evaluate):
        started = time.perf_counter()
        scores = session.evaluate(job.setup.adapters(spec, session.context(state.round)), deployed, [VALIDATION])
        own = {name: score for (name, _), score in scores.items()}
        line = Adapted(state.round, spec.title, summarise(own), round(time.perf_counter() - started, 4))
        job.folder.log(line, progress.lines + 1)
        progress = replace(progress, lines=progress.lines + 1)
        measure = job.experiment.evaluate.metric
        reached = _reached(choosing(own, measure), measure)
        if reached is not None and reached.beats(progress.adapted.get(spec.title, Reached())):
            job.folder.save_best(state, spec.title)
            adapted, rounds = progress.adapted, progress.adapted_rounds
            progress = replace(
                progress,
                adapted={**adapted, spec.title: reached},
                adapted_rounds={**rounds, spec.title: state.round},
            )
    return progress


def _reached(validation: Summary, measure: str) -> Reached | None:
    """What a round is chosen by; a state whose predictions are not numbers is never the best one."""
    if validation.broken or validation.pooled is None:
        return None
    sign = 1 if MEASURES[measure].higher else -1
    return Reached(sign * validation.pooled, math.inf if validation.loss is None else validation.loss)
