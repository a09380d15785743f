"""Whether ``[privacy]`` can keep what it promises for a method in an experiment; a sentence if it cannot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from fedshift.core import rng
from fedshift.core.context import Context
from fedshift.core.method import Method
from fedshift.core.options import parse_options
from fedshift.core.registry import ADAPTERS, construct
from fedshift.core.tree import Tree
from fedshift.errors import UserError
from fedshift.experiment.schema import Experiment, MethodSpec
from fedshift.privacy.settings import FEWEST, Privacy


class Case(NamedTuple):
    """All that a promise depends on."""

    privacy: Privacy
    method: Method
    experiment: Experiment
    spec: MethodSpec
    clients: int


def privacy_of(experiment: Experiment, spec: MethodSpec) -> Privacy | None:
    """What a method's uploads go through: ``[privacy]`` with what the method's own table changes."""
    shared, own = (parse_options(Privacy, "[privacy]", table) for table in (experiment.privacy, spec.privacy))
    return construct(Privacy, "[privacy]", **{**shared, **own}) if shared or own else None


def check_private(case: Case) -> None:
    """Raise a sentence on the first thing that would travel unprotected, or cannot be counted."""
    for test in (_of_every_kind, _of_sums, _of_noise, _of_secure):
        for reason in test(case):
            raise UserError(f"[privacy] {reason}")


def _of_every_kind(case: Case) -> Iterator[str]:
    if not case.method.linear:
        yield (
            f"is for methods whose server needs no more than a mean of what clients send, and that of {case.spec.title!r} "
            "needs more"
        )


def _of_sums(case: Case) -> Iterator[str]:
    privacy, experiment = case.privacy, case.experiment
    if not privacy.sums:
        return
    what = "noise" if privacy.noise else "secure"
    if case.method.train.weights != "uniform":
        yield f'{what}: clients\' sizes would be told by their weights; set [train] weights = "uniform"'
    if experiment.evaluate.every:
        yield f"{what}: validation counts would travel as they are while it trains; set [evaluate] every = 0"


def _of_noise(case: Case) -> Iterator[str]:
    privacy, experiment, method = case.privacy, case.experiment, case.method
    if not privacy.noise:
        return
    for adapter in case.spec.adapters:
        if ADAPTERS[adapter.name].make.calibrated:
            yield f"noise: adapter {adapter.name!r} asks clients for sums over validation images, to which none is added"
    if experiment.participation < 1 and privacy.sampling != "poisson":
        yield 'noise is counted where all clients take part, or by lot; set participation = 1, or sampling = "poisson"'
    if privacy.delta * case.clients >= 1:
        yield f"delta = {privacy.delta:g} would allow telling all of one client in {case.clients}; set a smaller one"
    if method.arch.has_batch_norm and not method.arch.norm <= method.private(_first(case)):
        yield (
            "noise: BatchNorm's statistics would travel, and noise can make a variance negative; use a network without "
            "BatchNorm, or a method that keeps it at home (fedbn)"
        )


def _of_secure(case: Case) -> Iterator[str]:
    privacy, experiment = case.privacy, case.experiment
    if not privacy.secure:
        return
    if find_spec("cryptography") is None:
        yield 'secure needs cryptography: pip install "fedshift[privacy]"'
    parties = max(1, int(experiment.participation * case.clients + 0.5))
    threshold = privacy.threshold(parties) if privacy.least is None else privacy.least
    if parties < FEWEST:
        yield f"secure: a sum of {parties} clients tells too much of each; it takes {FEWEST} or more"
    elif not (parties / 2 < threshold <= parties and threshold >= FEWEST):
        yield (
            f"secure: least must be {FEWEST} or more, more than half of the {parties} clients of a round and not more "
            "than all"
        )


def check_counted(privacy: Privacy | None, method: Method, experiment: Experiment, title: str) -> None:
    """Raise a sentence if what rounds tell cannot be counted here, or a budget is not enough for them.

    That is for who trains, or has a federation trained: its parties, and unseen clients, count nothing and need no Opacus.
    """
    if privacy is None or not privacy.noise:
        return
    rounds = experiment.rounds + (method.extra_rounds if experiment.rounds else 0)
    told_by(privacy, experiment.participation, min(1, rounds), method)  # who cannot count finds out before training
    enough = affordable(privacy, experiment.participation, rounds, method)
    if enough < min(1, rounds):
        raise UserError(f"[privacy] epsilon = {privacy.epsilon:g} is not enough for one round; raise it, or noise")
    if enough < rounds and method.extra_rounds:
        raise UserError(
            f"[privacy] epsilon = {privacy.epsilon:g} is enough for {enough} of {rounds} rounds, and {title!r} needs its "
            "last ones; raise it, or noise"
        )


def affordable(privacy: Privacy, participation: float, rounds: int, method: Method, lost: int = 0) -> int:
    """How many of the rounds the budget is enough for, with what is given away after them.

    ``lost``: rounds that have told something and are not among those that count, because they were asked for again.
    """
    if privacy.epsilon is None:
        return rounds
    accountant = privacy.accounted(participation)
    return max(0, accountant.affordable(privacy.epsilon, rounds + lost, of_all=int(method.gives)) - lost)


def told_by(privacy: Privacy, participation: float, rounds: int, method: Method, lost: int = 0) -> dict[str, float]:
    """What so many rounds tell about a client, if they are all: with those ``lost``, and what is given away after them."""
    return {"epsilon": privacy.accounted(participation).epsilon(rounds + lost, of_all=int(method.gives))}


def lots(seed: int, round_: int, clients: int) -> list[float]:
    """A number in [0, 1) for each client; who draws less than ``participation`` takes part.

    >>> lots(0, 3, 2) == lots(0, 3, 5)[:2]
    True
    """
    drawn: list[float] = rng.uniform(rng.seed_of(seed, round_, "poisson"), torch.arange(clients)).tolist()
    return drawn


def check_given(privacy: Privacy | None, method: Method, gifts: Mapping[str, Tree]) -> None:
    """Refuse gifts of a method that says it gives nothing away: nobody has counted them."""
    if privacy is not None and privacy.sums and not method.gives and any(gifts.values()):
        raise UserError(
            f"[privacy] {type(method).__name__} gives something away after the last round and says it does not"
        )


def possible(gifts: Mapping[str, Tree], method: Method) -> dict[str, Tree]:
    """What clients gave away, as far as it can be: a variance that noise has made negative is zero.

    That costs no epsilon, because nobody looks at data for it.
    """

    def mended(name: str, leaf: Tensor) -> Tensor:
        return leaf.clamp(min=0) if name in method.arch.norm and name.endswith("running_var") else leaf

    return {
        client: {slot: {name: mended(name, leaf) for name, leaf in leaves.items()} for slot, leaves in gift.items()}
        for client, gift in gifts.items()
    }


def _first(case: Case) -> Context:
    return Context(0, case.experiment.rounds, case.clients)
