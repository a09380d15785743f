"""One served client: a fixed service, its condition, and what an arriving image does to it. No clock, no disk, no network.

The adapter is the benchmark's own object, with draws keyed by sample id, so the answers are the benchmark's too. What it
learns is :attr:`Condition.tree`. :func:`answered` is the only way on; :func:`reset`, :func:`frozen`, :func:`resumed` and
:func:`restored` are what an operator may do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedshift.core.adapter import Adapter
from fedshift.core.arch import Output
from fedshift.core.tree import Tree
from fedshift.engines.reference import EVALUATION_CHUNK, as_floats, chunks, draws_of
from fedshift.measures.predictions import NOTHING
from fedshift.runs.answers import names_of
from fedshift.runs.artefact import Artefact
from fedshift.runs.known import Known
from fedshift.serve.frozen import Overheard, overhearing
from fedshift.serve.guards import Guards, Levels, Seen
from fedshift.serve.unknown import Familiarity, Strangeness, nothing_known, on_cpu

Mode = Literal["adapting", "frozen", "fallen back"]
Did = Literal["adapted", "answered", "collecting", "doubted", "frozen", "fell back"]
FallBack = Literal["drift", "harm", "never"]
CALM, DOUBT = 0.1, 0.25  # shares of the way to an alarm about harm: a state to come back to; the frozen model answers
STEADY = 0.6  # the share of the way to an alarm about drift up to which a state is one to come back to
ENOUGH = 200  # images of either half from which a service without an artefact's knowledge learns what is usual


@dataclass(frozen=True)
class Settings:
    """How careful a service is."""

    fit_after: int = 64  # images, for adapters that look at a set first and were given none
    unknown_rate: float = 0.01  # of ordinary images that are called unknown
    false_alarms: float = 1e-6  # for each ordinary image
    fall_back: FallBack = (
        "drift"  # to the frozen model: when images are not those it knows, at signs of harm, or not at all
    )
    patience: int = 200  # ordinary images before adaptation begins again; doubles each time


class Judge:
    """What is usual, and the guards that stand on it."""

    def __init__(self, classes: int, known: Known | None, settings: Settings) -> None:
        self.known = known
        self.guards = Guards(classes, known, settings.false_alarms)
        self.familiarity = None if known is None else Familiarity(known, settings.unknown_rate)


@dataclass(frozen=True)
class Condition:
    """How a served client is: everything that changes while it serves."""

    tree: Tree = field(repr=False)  # what the adapter has come to
    good: Tree = field(repr=False)  # the same when guards were last calm
    judge: Judge = field(repr=False)
    levels: Levels = field(repr=False)
    mode: Mode = "adapting"
    fitted: bool = True  # whether the adapter has had the images it looks at first
    seen: int = 0  # images that were answered
    learnt: int = 0  # images that the tree has seen
    falls: int = 0  # to the frozen model
    quiet: int = 0  # ordinary images since the last fall
    collected: tuple[tuple[Tensor, Tensor], ...] = field(default=(), repr=False)  # pixels and ids to fit on
    usual: tuple[Output, ...] = field(default=(), repr=False)  # what the frozen model said about the first images


class Codes(NamedTuple):
    """Classes by number, an entry for each image; nothing where an answer is no number."""

    served: list[int]
    adapted: list[int]  # the adapter's own, or the frozen model's where it did not run
    frozen: list[int]


class Answered(NamedTuple):
    """What was answered to some images that were looked at together."""

    logits: Tensor  # what is served; on the CPU
    frozen: Tensor
    codes: Codes
    strangeness: Strangeness
    telemetry: Mapping[str, Tensor]
    did: Did
    alarms: tuple[str, ...]  # that are on
    events: tuple[str, ...]  # lines for a log


@dataclass(frozen=True)
class Service:
    """What does not change while a client is served."""

    name: str
    artefact: Artefact
    label: str  # of the adapter
    adapter: Adapter
    start: Tree = field(repr=False)
    settings: Settings = field(default_factory=Settings)

    @property
    def deployed(self) -> Tree:
        """The frozen model."""
        return self.artefact.deployed

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """A name for every output."""
        return names_of(self.artefact.classes, self.artefact.method.arch.classes)

    @property
    def together(self) -> int | None:
        """How many images the adapter wants together."""
        return self.adapter.batch

    def judge(self, known: Known | None) -> Judge:
        """Guards that stand on this."""
        return Judge(len(self.classes), known, self.settings)

    def begin(self) -> Condition:
        """As it was deployed."""
        judge = self.judge(self.artefact.known)
        return Condition(self.start, self.start, judge, judge.guards.start(), fitted=not self.adapter.fits)


@torch.no_grad()
def answered(
    service: Service, condition: Condition, pixels: Tensor, ids: Tensor
) -> tuple[tuple[Answered, ...], Condition]:
    """Answers to images (bytes) in their order, in the pieces the adapter is given, and the condition after them."""
    found = []
    sizes = [len(part) for part in chunks(ids, service.together, EVALUATION_CHUNK)]
    for some, own in zip(pixels.split(sizes), ids.split(sizes), strict=True):
        piece, condition = _answered(service, condition, some, own)
        found.append(piece)
    return tuple(found), condition


@torch.no_grad()
def fitted(service: Service, condition: Condition, pixels: Tensor, ids: Tensor) -> Condition:
    """After an adapter that looks at a whole set first has looked at these images."""
    x = as_floats(pixels, service.artefact.compute.dtype).to(service.artefact.compute.device)
    draws = draws_of(service.adapter, ids, service.artefact.seed, service.artefact.compute)
    tree = service.adapter.fit(condition.tree, x, draws)
    return replace(condition, tree=tree, good=tree, fitted=True, collected=(), learnt=condition.learnt + len(pixels))


def reset(service: Service, condition: Condition) -> Condition:
    """Begin again with the model as it was deployed; what was counted stays."""
    fresh = service.begin()
    return replace(fresh, judge=condition.judge, levels=condition.judge.guards.start(), seen=condition.seen)


def frozen(condition: Condition) -> Condition:
    """Go on answering with what was learnt, and learn nothing more."""
    return replace(condition, mode="frozen", collected=())


def resumed(condition: Condition) -> Condition:
    """Adapt again, after a freeze or a fall."""
    levels = condition.judge.guards.calmed(condition.levels)
    return replace(condition, mode="adapting", levels=levels, quiet=0)


def restored(condition: Condition, version: Condition) -> Condition:
    """Go back to what was learnt at an earlier time; what was counted stays."""
    levels = condition.judge.guards.calmed(condition.levels)
    return replace(
        condition, tree=version.tree, good=version.good, fitted=version.fitted, learnt=version.learnt, levels=levels
    )


# ---- one piece ------------------------------------------------------------------------------------------------------
def _answered(service: Service, before: Condition, pixels: Tensor, ids: Tensor) -> tuple[Answered, Condition]:
    artefact, settings = service.artefact, service.settings
    x = as_floats(pixels, artefact.compute.dtype).to(artefact.compute.device)
    heard = Overheard(artefact.method.predict, service.deployed, x)
    output, tree = None, before.tree
    if before.mode != "fallen back":
        draws = draws_of(service.adapter, ids, artefact.seed, artefact.compute)
        output, tree = overhearing(service.adapter, heard).predict(before.tree, x, draws)
    plain = heard.answer
    own = plain if output is None else output
    adapted, deployed = on_cpu(own.logits), on_cpu(plain.logits)
    told = _read(deployed.numpy())
    said = told if own is plain else _read(adapted.numpy())
    broken = not np.isfinite(said.top).all()
    before = _usual(service, before, plain)
    strangeness = _strangeness(before.judge, told.energy, on_cpu(plain.features))
    seen = Seen(strangeness.signals, strangeness.unknown, told.classes, told.confidence, said.classes, said.confidence)
    levels, begun = before.judge.guards.watched(before.levels, seen)
    counted = replace(before, levels=levels, seen=before.seen + len(pixels))
    events = tuple(f"alarm: {name}, at image {counted.seen}" for name in begun)
    reasons = _reasons(settings.fall_back, before.judge.guards, levels, broken)
    if reasons and before.mode == "adapting":
        why = ", ".join(reasons)
        events += (f"fell back to the frozen model at image {counted.seen}: {why}",)
        did: Did = "fell back"
        after = _fallen(service, counted)
    elif before.mode == "fallen back":
        did = "fell back"
        after, lines = _waited(service, counted, len(pixels))
        events += lines
    else:
        doubt = settings.fall_back != "never" and (bool(reasons) or counted.judge.guards.strain(levels) > DOUBT)
        did = _did(before, tree)
        after = counted if before.mode == "frozen" else _learnt(counted, tree, len(pixels))
        after, lines = _collected(service, after, pixels, ids)
        events += lines
        did = "doubted" if doubt else did
    served, read = (deployed, told) if did in ("fell back", "doubted") else (adapted, said)
    telemetry = {} if output is None else {name: on_cpu(output.aux[name]) for name in service.adapter.telemetry}
    alarms = after.judge.guards.names(after.levels)
    codes = Codes(read.codes, said.codes, told.codes)
    return Answered(served, deployed, codes, strangeness, telemetry, did, alarms, events), after


def _reasons(fall_back: FallBack, guards: Guards, levels: Levels, broken: bool) -> list[str]:
    """Why the frozen model should answer; nothing if it should not."""
    if fall_back == "never":
        return []
    on = guards.names(levels, harm=fall_back == "harm")
    return [*(["the adapter's answers are no numbers"] if broken else []), *(f"alarm {name}" for name in on)]


def _did(before: Condition, tree: Tree) -> Did:
    if before.mode == "frozen":
        return "frozen"
    if not before.fitted:
        return "collecting"
    return "answered" if tree is before.tree else "adapted"


def _learnt(condition: Condition, tree: Tree, count: int) -> Condition:
    """With what the adapter has learnt; it is good as long as guards are calm."""
    moved = tree is not condition.tree
    guards, levels = condition.judge.guards, condition.levels
    calm = guards.strain(levels) <= CALM and guards.drift(levels) <= STEADY
    good = tree if calm else condition.good
    return replace(condition, tree=tree, good=good, learnt=condition.learnt + (count if moved else 0))


def _fallen(service: Service, condition: Condition) -> Condition:
    """Back to when guards were last calm; a second time to the start, because that was not good either."""
    tree = condition.good if condition.falls == 0 else service.start
    return replace(condition, tree=tree, good=tree, mode="fallen back", falls=condition.falls + 1, quiet=0)


def _waited(service: Service, condition: Condition, count: int) -> tuple[Condition, tuple[str, ...]]:
    """Adaptation begins again after enough images that set off no alarm at all, of those that look at images alone."""
    guards = condition.judge.guards
    levels = guards.calmed(condition.levels)
    quiet = 0 if levels.on.any() or guards.strain(levels) > DOUBT else condition.quiet + count
    needed = service.settings.patience * 2 ** (condition.falls - 1)
    if quiet < needed:
        return replace(condition, levels=levels, quiet=quiet), ()
    line = f"adapts again at image {condition.seen}, after {quiet} ordinary ones"
    return resumed(replace(condition, levels=levels)), (line,)


def _collected(
    service: Service, condition: Condition, pixels: Tensor, ids: Tensor
) -> tuple[Condition, tuple[str, ...]]:
    """Images are kept in memory until there are enough for an adapter that looks at a set first."""
    if condition.fitted or condition.mode != "adapting":
        return condition, ()
    kept = (*condition.collected, (pixels, ids))
    count = sum(len(own) for _, own in kept)
    if count < service.settings.fit_after:
        return replace(condition, collected=kept), ()
    after = fitted(service, condition, *(torch.cat(parts) for parts in zip(*kept, strict=True)))
    return after, (f"adapter {service.label} has adapted to the first {count} images, at image {condition.seen}",)


def _strangeness(judge: Judge, energy: np.ndarray, features: Tensor) -> Strangeness:
    return nothing_known(len(energy)) if judge.familiarity is None else judge.familiarity.of(energy, features)


class _Read(NamedTuple):
    """What logits say."""

    classes: np.ndarray
    confidence: np.ndarray
    energy: np.ndarray
    top: np.ndarray  # not finite where there is no answer

    @property
    def codes(self) -> list[int]:
        """The likeliest classes; nothing where logits are no numbers, of which any could be the largest."""
        found = zip(self.classes.tolist(), self.top.tolist(), strict=True)
        return [code if math.isfinite(top) else NOTHING for code, top in found]


def _read(logits: np.ndarray) -> _Read:
    top = logits.max(1)
    total = np.exp((logits - top[:, None]).astype(np.float64)).sum(1)
    return _Read(logits.argmax(1), 1.0 / total, -(top + np.log(total)), top)


def _usual(service: Service, condition: Condition, plain: Output) -> Condition:
    """Where the artefact knows nothing, the first images are taken for usual: half of them for means, half to compare."""
    if condition.judge.known is not None or not (plain.features.dim() == 2 and plain.features.shape[1]):
        return condition
    usual = (*condition.usual, Output(on_cpu(plain.logits), on_cpu(plain.features), {}, {}))
    if sum(len(one.logits) for one in usual) < 2 * ENOUGH:
        return replace(condition, usual=usual)
    logits, features = torch.cat([one.logits for one in usual]), torch.cat([one.features for one in usual])
    halves = [Output(logits[half], features[half], {}, {}) for half in (slice(0, None, 2), slice(1, None, 2))]
    answers = [half.logits.argmax(1) for half in halves]
    judge = service.judge(Known.of(halves[0], answers[0], halves[1], answers[1]))  # with more detectors than before
    return replace(condition, judge=judge, levels=judge.guards.start(), usual=())
