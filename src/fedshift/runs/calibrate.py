"""How far the models of a round can be believed, measured by the training clients on their validation images.

What a client sends are sums over its images (``blocks/calibration.py``): ten small messages, which a server adds up.
Adapters that ask for it (``calibrated``) find the result in the slot ``calibration``, also at unseen clients. The messages
are the same on one machine and in a federation; a session knows how to ask for them (``measured``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fedshift.blocks import calibration as sums
from fedshift.blocks.calibration import Calibration, Kind, calibrated_log, looks_refreshed, topic
from fedshift.blocks.class_prior import estimate_errors
from fedshift.blocks.mean_views import looks
from fedshift.blocks.refreshed_statistics import Refreshing
from fedshift.core.tree import Tensors
from fedshift.data.task import Client, Task
from fedshift.engines.base import Score
from fedshift.errors import UserError
from fedshift.experiment.schema import AdapterSpec
from fedshift.privacy.coding import LARGEST, Tallies
from fedshift.privacy.settings import Privacy
from fedshift.store.metric import VALIDATION

if TYPE_CHECKING:
    from fedshift.runs.deployment import Deployment
    from fedshift.runs.session import Session

ROUNDED = 0.01  # by which a sum may differ from what it must be

Looking: TypeAlias = Mapping[Kind, Mapping[str, AdapterSpec]]
"""Adapters that only look at images in some way, by topic: of the model of unseen clients, and of clients' own."""


class Measured(NamedTuple):
    """What came of it, as it travels, and the bytes that all clients sent for it."""

    found: Tensors
    bytes: int


def calibrated(session: Session, deployment: Deployment, specs: Sequence[AdapterSpec]) -> Deployment:
    """A deployment with what these adapters want to know; itself if they want nothing, or nobody tells."""
    looking = looking_of(session, specs)
    found, size = session.measured(deployment, looking) if looking else Measured({}, 0)
    device = session.compute.device
    return deployment.with_calibration({n: leaf.to(device) for n, leaf in found.items()}, size) if found else deployment


def looking_of(session: Session, specs: Sequence[AdapterSpec]) -> Looking:
    """How these adapters look at images; nothing if none of them wants to know."""
    method = session.setup.method
    made = [(spec, session.setup.adapter(spec, method)) for spec in specs]
    wanted = {looks(adapter): _looking(spec) for spec, adapter in made if adapter.calibrated}
    beside = {looks_refreshed(a): _refreshing(spec, a) for spec, a in made if isinstance(a, Refreshing) and a.refreshes}
    if not wanted:
        return {}
    by_kind: dict[Kind, dict[str, AdapterSpec]] = {"common": wanted | beside}
    if method.personal:
        by_kind["own"] = wanted
    return {kind: {topic(kind, word): spec for word, spec in own.items()} for kind, own in by_kind.items()}


def topics_of(looking: Looking) -> list[str]:
    """All that is measured, in order."""
    return [topic for specs in looking.values() for topic in specs]


def answers_of(session: Session, deployment: Deployment, looking: Looking) -> dict[str, dict[str, Answers]]:
    """How all clients predict their validation images, by client and topic."""
    answers: dict[str, dict[str, Answers]] = {client.name: {} for client in session.task.clients}
    for kind, specs in looking.items():
        stands_in = kind == "common" and session.setup.method.personal
        trees = session.unseen(deployment, as_unseen(session.task, True)) if stands_in else deployment.trained()
        for about, spec in specs.items():
            scores = session.evaluate(session.setup.adapters(spec), trees, [VALIDATION]) if trees else {}
            for (name, _), score in scores.items():
                if (own := Answers.of(score)) is not None:
                    answers[name][about] = own
    return answers


def as_unseen(task: Task, validation: bool = False) -> Task:
    """Training clients in the place of unseen ones: with their test images, or those of validation."""
    nothing = torch.zeros(0, dtype=torch.int64)
    unseen = tuple(
        Client(client.name, nothing, nothing, client.val if validation else client.test) for client in task.clients
    )
    return replace(task, clients=(), unseen=unseen)


def _looking(spec: AdapterSpec) -> AdapterSpec:
    """Predict as this adapter looks at images, and adapt nothing."""
    options = {name: value for name, value in spec.options().items() if name in ("views", "flip")}
    return AdapterSpec(name="none", **options)


def _refreshing(spec: AdapterSpec, adapter: Refreshing) -> AdapterSpec:
    """The same with refreshed statistics."""
    how: dict[str, Any] = {"passes": adapter.passes, "batch-size": adapter.batch_size}
    return AdapterSpec(**{**_looking(spec).model_dump(by_alias=True), "name": "fedbn-align", **how})


# ---- what a client says --------------------------------------------------------------------------------------------------
class Answers(NamedTuple):
    """A client's predictions of its validation images."""

    logits: Tensor
    labels: Tensor

    @staticmethod
    def of(score: Score) -> Answers | None:
        """As they were scored; None where there are none, or some are no numbers."""
        if not score.samples or score.broken:
            return None
        return Answers(score.log_probabilities.clamp(min=-100.0), score.labels)

    @staticmethod
    def none(classes: int) -> Answers:
        """Of no image: what is said of them tells what a message looks like."""
        return Answers(torch.zeros(0, classes), torch.zeros(0, dtype=torch.int64))


class Stage(NamedTuple):
    """One kind of message: what a client says of its answers, and what follows from the sum of what all have said.

    ``possible``: whether so many clients together can have said this, whatever their images are.
    """

    told: Callable[[Answers, Calibration], Tensor]
    taken: Callable[[Calibration, Tensor], Calibration]
    possible: Callable[[Tensor, int], bool]


def _told_step(own: Answers, known: Calibration) -> Tensor:
    return sums.newton_sums(own.logits, own.labels, known.fit)


def _told_counts(own: Answers, known: Calibration) -> Tensor:
    return sums.confusion_of(calibrated_log(own.logits, known.fit), own.labels)


def _told_errors(own: Answers, known: Calibration) -> Tensor:
    return estimate_errors(calibrated_log(own.logits, known.fit), own.labels, known)


def _taken_step(known: Calibration, whole: Tensor) -> Calibration:
    return replace(known, fit=sums.newton_step(whole, known.fit))


def _taken_counts(known: Calibration, whole: Tensor) -> Calibration:
    return replace(known, labels=whole.sum(1), confusion=whole)


def _taken_errors(known: Calibration, whole: Tensor) -> Calibration:
    return replace(known, skill=whole)


def _a_step(said: Tensor, clients: int) -> bool:
    curvature = said[:, 1:]
    slack = ROUNDED * (1 + float(curvature.abs().max()))
    even = float((curvature - curvature.T).abs().max()) <= slack
    return (
        float(said.abs().max()) <= LARGEST * clients
        and even
        and float(torch.linalg.eigvalsh(curvature).min()) >= -slack
    )


def _are_counts(said: Tensor, _: int) -> bool:
    return float(said.min()) >= -ROUNDED and float((said - said.round()).abs().max()) <= ROUNDED


def _are_errors(said: Tensor, clients: int) -> bool:
    return float(said.min()) >= -ROUNDED and float(said[-1]) <= clients + ROUNDED


STAGES: Mapping[str, Stage] = {
    "step": Stage(_told_step, _taken_step, _a_step),
    "counts": Stage(_told_counts, _taken_counts, _are_counts),
    "errors": Stage(_told_errors, _taken_errors, _are_errors),
}
ORDER = (*["step"] * sums.STEPS, "counts", "errors")


def told(stage: str, own: Answers, known: Tensors) -> Tensor:
    """What a client says of its answers in a stage; what is known so far is as it travels.

    >>> [list(told(stage, Answers.none(2), unknown(2)).shape) for stage in STAGES]
    [[3, 4], [2, 2], [3]]
    """
    return STAGES[stage].told(own, Calibration(**known))


def check_said(stage: str, said: Tensor, clients: int = 1) -> None:
    """Raise if no client, or no so many together, can have said this: one that is damaged, or lies, would spoil it for all.

    >>> check_said("counts", torch.tensor([[3.0, 0.0], [1.0, 2.0]]))
    >>> check_said("counts", torch.tensor([[3.0, 0.0], [-1.0, 2.0]]))
    Traceback (most recent call last):
        ...
    fedshift.errors.UserError: its numbers cannot be sums over images (counts)
    """
    if not STAGES[stage].possible(said.double(), clients):
        raise UserError(f"its numbers cannot be sums over images ({stage})")


def vector_of(stage: str, answers: Mapping[str, Answers], known: Mapping[str, Tensors]) -> Tensor:
    """All that a client says in a stage, of every topic, for a sum that nobody may look into; zeros where it is silent.

    >>> vector_of("errors", {}, {"common": unknown(2), "own": unknown(2)}).tolist()
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    """
    silent = {topic: Answers.none(len(own["labels"])) for topic, own in known.items()}
    return torch.cat([told(stage, answers.get(topic, silent[topic]), own).flatten() for topic, own in known.items()])


def parted(stage: str, whole: Tensor, known: Mapping[str, Tensors]) -> Tensors:
    """The sum of such vectors, by topic.

    >>> parted("errors", torch.arange(6.0), {"common": unknown(2), "own": unknown(2)})["own"]
    tensor([3., 4., 5.])
    """
    like = {topic: told(stage, Answers.none(len(own["labels"])), own) for topic, own in known.items()}
    parts = whole.split([leaf.numel() for leaf in like.values()])
    return {topic: part.reshape(leaf.shape) for (topic, leaf), part in zip(like.items(), parts, strict=True)}


def unknown(classes: int) -> Tensors:
    """What is known before anybody has said anything."""
    return replace(Calibration.none(classes), fit=sums.first_guess(classes)).tensors()


# ---- what the server makes of it -----------------------------------------------------------------------------------------
class Heard(NamedTuple):
    """The sum over all clients of what they said, by topic, and the bytes of it all."""

    whole: Tensors
    bytes: int


Ask: TypeAlias = Callable[[int, str, Mapping[str, Tensors]], Heard]
"""Which message it is, its stage, what is known so far by topic; a topic of which nobody said anything is not answered."""


def measure(ask: Ask, topics: Iterable[str], classes: int) -> Measured:
    """What all clients together find; sums over them are all that is looked at."""
    known = dict.fromkeys(topics, unknown(classes))
    size = 0
    for number, stage in enumerate(ORDER, 1):
        heard = ask(number, stage, known)
        known = {t: _taken(stage, own, heard.whole[t]) for t, own in known.items() if t in heard.whole}
        size += heard.bytes
    return Measured({f"{t}: {name}": leaf for t, own in known.items() for name, leaf in own.items()}, size)


def _taken(stage: str, known: Tensors, whole: Tensor) -> Tensors:
    return STAGES[stage].taken(Calibration(**known), whole).tensors()


def sum_of(messages: Sequence[Tensor]) -> Tensor:
    """All that a server looks at."""
    return torch.stack(list(messages)).sum(0)


@dataclass(frozen=True)
class Nearby:
    """Clients of this process, asked for their messages."""

    answers: Mapping[str, Mapping[str, Answers]]  # by client and topic
    privacy: Privacy | None = None

    def __call__(self, number: int, stage: str, known: Mapping[str, Tensors]) -> Heard:
        """The sums of what they say."""
        if self.privacy is not None and self.privacy.secure:
            return self._veiled(self.privacy, number, stage, known)
        said = {t: [told(stage, own[t], known[t]) for own in self.answers.values() if t in own] for t in known}
        said = {t: own for t, own in said.items() if own}
        return Heard(
            {t: sum_of(own) for t, own in said.items()}, sum(leaf.nbytes for own in said.values() for leaf in own)
        )

    def _veiled(self, privacy: Privacy, number: int, stage: str, known: Mapping[str, Tensors]) -> Heard:
        from fedshift.privacy.in_process import summed  # whoever needs no cryptography need not have it

        coding, parties = Tallies(), len(self.answers)
        words = {name: coding.words(vector_of(stage, own, known), parties) for name, own in self.answers.items()}
        found = summed(words, privacy.threshold(parties), f"calibrate {number}".encode())
        whole = coding.total(found.total, parties, parties)
        return Heard(parted(stage, whole, known), found.bytes_up)
