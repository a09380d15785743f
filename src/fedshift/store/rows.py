"""Scores as they are kept: what was measured (:class:`Metric`), its numbers (:class:`Summary`), a line of a file.

Never one number alone: the client mean is the mean over clients, pooled counts all their samples together; both always,
with the standard deviation over clients and the mean of the worst 10 %. Stream ``mean`` is the mean over several streams;
its ``std`` is the sample deviation over those streams, as papers print it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from fedshift.measures.measurement import MEASURES, Measurement

MODELS = ("global", "personal", "after-local")
POPULATIONS = ("clients", "unseen")
RULES = ("last", "best-val", "oracle")  # which round's state counts
ACCURACY, VALIDATION = "accuracy", "val"
Part: TypeAlias = Literal["client_mean", "pooled", "std", "worst10", "loss"]


class Metric(NamedTuple):
    """What was measured: which model, on which stream, of whom; its text names the measure only if it is another one.

    Without a model it stands for the one a method deploys, global or personal: rows of both share a column.

    >>> metric = Metric.parse("global/original/clients")
    >>> metric.stream, str(metric), str(metric.column)
    ('original', 'global/original/clients', 'original/clients')
    >>> [str(full) for full in metric.column.full()]
    ['global/original/clients', 'personal/original/clients']
    """

    model: str  # global, personal or after-local; "" for the deployed one
    stream: str  # a test stream, "val", or "mean" over streams
    population: str = "clients"  # clients who trained, or unseen ones
    name: str = ACCURACY

    @staticmethod
    def parse(text: str | Metric) -> Metric:
        """From its text; a metric stays what it is.

        >>> Metric.parse("after-local/a/b/unseen"), Metric.parse("val/clients").model
        (Metric(model='after-local', stream='a/b', population='unseen', name='accuracy'), '')
        """
        if isinstance(text, Metric):
            return text
        parts = text.split("/")
        name = ACCURACY if parts[-1] in POPULATIONS else parts.pop()
        population = parts.pop() if parts else ""
        if not parts or population not in POPULATIONS:
            raise ValueError(f"{text!r} is no metric: it must be model/stream/population")
        model = parts.pop(0) if len(parts) > 1 and parts[0] in MODELS else ""
        return Metric(model, "/".join(parts), population, name)

    def __str__(self) -> str:
        named = [] if self.name == ACCURACY else [self.name]
        return "/".join([*([self.model] if self.model else []), self.stream, self.population, *named])

    @property
    def is_validation(self) -> bool:
        """Whether it is of validation images."""
        return self.stream == VALIDATION

    @property
    def plain(self) -> Metric:
        """What was predicted, whatever is measured of it."""
        return self._replace(name=ACCURACY)

    @property
    def column(self) -> Metric:
        """The column of a table it belongs to: the model's name is left out, unless it was trained on after the rounds."""
        return self if self.model == "after-local" else self._replace(model="")

    def full(self) -> tuple[Metric, ...]:
        """The metrics a column may hold, each with its model; a row has scores of one of them."""
        return (self,) if self.model else tuple(self._replace(model=model) for model in ("global", "personal"))


@dataclass(frozen=True)
class Summary:
    """Accuracies (or another measure) in percent, loss in nats; None where there is no number.

    >>> Summary.of({"avg": 70.0, "all": 60.0, "worst": 50.0, "clients": 2})  # as version 0.1 wrote it
    Summary(client_mean=70.0, pooled=60.0, std=None, worst10=50.0, loss=None, clients=2, broken=0)
    """

    client_mean: float | None = None  # mean over clients
    pooled: float | None = None  # over all their samples together
    std: float | None = None  # over clients
    worst10: float | None = None  # mean of the worst 10 % of clients, at least one
    loss: float | None = None  # pooled
    clients: int = 0
    broken: int = 0  # predictions that are not numbers; they count as wrong

    def to_json(self) -> dict[str, float | None]:
        """Plain numbers, by the names that files have; ``broken`` only where there are any."""
        numbers = {key: getattr(self, part) for part, key in SUMMARY_KEYS.items()}
        return {**numbers, **({BROKEN: self.broken} if self.broken else {})}

    @staticmethod
    def of(stored: Mapping[str, Any]) -> Summary:
        """From a file, also one of version 0.1; other keys are ignored."""
        keys = {part: key if key in stored else OLD_KEYS.get(key, key) for part, key in SUMMARY_KEYS.items()}
        numbers = {part: stored[key] for part, key in keys.items() if key in stored}
        return Summary(**numbers, broken=stored.get(BROKEN, 0))


SUMMARY_KEYS = {
    "client_mean": "client-mean", "pooled": "pooled", "std": "std", "worst10": "worst-10", "loss": "loss",
    "clients": "clients",
}  # fmt: skip
BROKEN = "broken"
OLD_KEYS = {"client-mean": "avg", "pooled": "all", "worst-10": "worst", "given-bytes": "published-bytes"}  # of 0.1


class ClientScore(NamedTuple):
    """How one client's stream was predicted."""

    samples: int
    correct: int
    loss: float | None  # summed negative log-likelihood; None if it is not finite
    broken: int = 0  # predictions that are not numbers

    def to_json(self) -> list[float | None]:
        """As files hold it: the last one only where there are any."""
        return list(self if self.broken else self[:3])

    @property
    def accuracy(self) -> float:
        """In percent; the client must have samples."""
        return 100 * self.correct / self.samples


@dataclass(frozen=True)
class Told:
    """What an adapter told about itself, over the samples of all clients: the mean, and counts of equal bins of [0, 1]."""

    mean: float | None
    counts: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """As files hold it."""
        return {"mean": self.mean, "counts": list(self.counts)}

    @staticmethod
    def of(stored: Mapping[str, Any]) -> Told:
        """From a file."""
        return Told(stored["mean"], tuple(stored["counts"]))


@dataclass(frozen=True)
class ScoreRow:
    """One line of ``adapters/LABEL.jsonl``: a state of a run, an adapter and a metric.

    >>> row = ScoreRow.of({"selection": "last", "metric": "global/original/unseen", "avg": 70.0, "adapter": "tent"}, "mild")
    >>> row.label, row.adapter, row.metric.population, row.summary.client_mean
    ('mild', 'tent', 'unseen', 70.0)
    >>> ScoreRow.of(row.to_json()) == row
    True
    """

    metric: Metric
    summary: Summary
    selection: str = ""  # the rule that chose the round
    round: int = 0
    label: str = ""  # what the adapter is called in this run
    adapter: str = ""  # its registered name; two labels may share it
    options: Mapping[str, Any] = field(default_factory=dict)
    code: str | None = None  # digest of the adapter's source, if it is a user's own
    given_bytes: int | None = None  # by all clients, once, at the end
    measures: Mapping[str, Summary] = field(default_factory=dict)  # the other measures, by name
    classes: tuple[str, ...] = ()  # their names, in the order of confusion counts
    whole: Measurement | None = None  # of all clients' samples together
    measured: Mapping[str, Measurement] = field(default_factory=dict)  # by client
    by_client: Mapping[str, ClientScore] = field(default_factory=dict)
    telemetry: Mapping[str, Told] = field(default_factory=dict)
    setting: Mapping[str, Any] = field(default_factory=dict)  # how the stream is shown
    seed: int | None = None
    task_hash: str = ""
    fedshift: str = ""  # version
    paper: float | None = None  # the published number
    paper_validation: float | None = None
    family: str = ""
    of_streams: tuple[str, ...] = ()  # whose mean it is
    unknown: Mapping[str, Any] = field(default_factory=dict)  # of a newer version, kept as it is

    def summary_of(self, measure: str) -> Summary:
        """The numbers of one measure; none where it was not measured."""
        return self.summary if measure == ACCURACY else self.measures.get(measure, Summary())

    def by_class(self) -> dict[str, dict[str, float | None]]:
        """Recall and precision of every class in percent, and how many samples it has, over all clients' samples."""
        if self.whole is None:
            return {}
        count = self.whole.confusion
        rows = zip(self.classes, count.recall(), count.precision(), count.support.tolist(), strict=True)
        return {
            name: {"recall": finite(100 * recall), "precision": finite(100 * precision), "samples": samples}
            for name, recall, precision, samples in rows
        }

    def values(self, measure: str = ACCURACY) -> dict[str, float]:
        """One measure of every client that was tested, as far as it has one."""
        if measure == ACCURACY:
            return {name: own.accuracy for name, own in self.by_client.items() if own.samples}
        found = {name: own.value(measure) for name, own in self.measured.items()}
        return {name: value for name, value in found.items() if value is not None}

    def to_json(self) -> dict[str, Any]:
        """As a file holds it; what is not known is left out."""
        told = {name: told.to_json() for name, told in self.telemetry.items()}
        row = {
            "selection": self.selection,
            "round": self.round,
            "adapter": self.adapter,
            "label": self.label,
            "options": dict(self.options),
            "code": self.code,
            "metric": str(self.metric),
            **self.summary.to_json(),
            "given-bytes": self.given_bytes,
            "measures": {name: summary.to_json() for name, summary in self.measures.items()} or None,
            "classes": list(self.classes) or None,
            "whole": None if self.whole is None else self.whole.to_json(),
            "measured": {name: own.to_json() for name, own in self.measured.items()} or None,
            "by-client": {name: score.to_json() for name, score in self.by_client.items()} or None,
            "telemetry": told or None,
            "setting": dict(self.setting) or None,
            "seed": self.seed,
            "task-hash": self.task_hash or None,
            "fedshift": self.fedshift or None,
            "of": list(self.of_streams) or None,
            "paper": self.paper,
            "paper-validation": self.paper_validation,
            "family": self.family or None,
        }
        numbers = SUMMARY_KEYS.values()  # one that is missing is said to be
        known = {key: value for key, value in row.items() if value is not None or key in numbers}
        return {**known, **self.unknown}

    @staticmethod
    def of(stored: Mapping[str, Any], label: str = "") -> ScoreRow:
        """From a file; version 0.1 had no label in it, but in the file's name."""
        return ScoreRow(
            metric=Metric.parse(stored["metric"]),
            summary=Summary.of(stored),
            selection=stored.get("selection", ""),
            round=stored.get("round", 0),
            label=stored.get("label", label),
            adapter=stored.get("adapter", ""),
            options=stored.get("options", {}),
            code=stored.get("code"),
            given_bytes=stored.get("given-bytes", stored.get("published-bytes")),
            measures={name: Summary.of(own) for name, own in stored.get("measures", {}).items()},
            classes=tuple(stored.get("classes", ())),
            whole=Measurement.of_json(stored["whole"], len(stored["classes"])) if "whole" in stored else None,
            measured={
                name: Measurement.of_json(own, len(stored["classes"]))
                for name, own in stored.get("measured", {}).items()
            },
            by_client={name: ClientScore(*score) for name, score in stored.get("by-client", {}).items()},
            telemetry={name: Told.of(told) for name, told in stored.get("telemetry", {}).items()},
            setting=stored.get("setting", {}),
            seed=stored.get("seed"),
            task_hash=stored.get("task-hash", ""),
            fedshift=stored.get("fedshift", ""),
            paper=stored.get("paper"),
            paper_validation=stored.get("paper-validation"),
            family=stored.get("family", ""),
            of_streams=tuple(stored.get("of", ())),
            unknown={key: value for key, value in stored.items() if key not in KNOWN},
        )


KNOWN = {
    *SUMMARY_KEYS.values(), *OLD_KEYS.values(), BROKEN, "metric", "selection", "round", "label", "adapter", "options",
    "code", "given-bytes", "measures", "classes", "whole", "measured", "by-client", "telemetry", "setting", "seed",
    "task-hash", "fedshift", "paper", "paper-validation", "family", "of",
}  # fmt: skip


class Counted(Protocol):
    """How a client's stream was predicted, as engines and files have it."""

    @property
    def samples(self) -> int:
        """How many."""

    @property
    def correct(self) -> int:
        """How many of them."""

    @property
    def loss(self) -> float | None:
        """Summed."""

    @property
    def broken(self) -> int:
        """How many are no numbers."""


def summarise(scores: Mapping[str, Counted]) -> Summary:
    """Over all clients that have samples.

    >>> summarise({"a": ClientScore(10, 9, 1.0), "b": ClientScore(30, 15, 9.0)}).client_mean
    70.0
    """
    present = [score for score in scores.values() if score.samples]
    if not present:
        return Summary()
    accuracies = [100 * (score.correct / score.samples) for score in present]
    samples = sum(score.samples for score in present)
    losses = known([score.loss for score in present])
    return replace(
        summarise_values(accuracies, 100 * sum(score.correct for score in present) / samples, higher=True),
        loss=None if losses is None else finite(math.fsum(losses) / samples),
        broken=sum(score.broken for score in present),
    )


def summarise_measures(measured: Mapping[str, Measurement], whole: Measurement) -> dict[str, Summary]:
    """All measures but accuracy, over the clients that have them; ``whole`` is of their samples together.

    >>> from fedshift.measures.confusion import Confusion
    >>> one = Measurement(Confusion(2, ((0, 0, 3), (1, 0, 1))), (None,) * 5)
    >>> summarise_measures({"a": one}, one)["balanced-accuracy"].client_mean
    50.0
    """
    loss, made = whole.value("loss"), dict[str, Summary]()
    for name in (name for name in MEASURES if name != ACCURACY):
        found = [value for own in measured.values() if (value := own.value(name)) is not None]
        if found:
            made[name] = replace(summarise_values(found, whole.value(name), MEASURES[name].higher), loss=loss)
    return made


def summarise_values(values: Sequence[float], pooled: float | None, higher: bool) -> Summary:
    """Of a measure that every client has a value of, and all samples together another."""
    if not values:
        return Summary()
    ranked = sorted(values, reverse=not higher)
    mean = math.fsum(ranked) / len(ranked)
    worst = ranked[: max(1, len(ranked) // 10)]
    return Summary(
        client_mean=mean,
        pooled=pooled,
        std=math.sqrt(math.fsum((value - mean) ** 2 for value in ranked) / len(ranked)),
        worst10=math.fsum(worst) / len(worst),
        clients=len(ranked),
    )


def mean_over(streams: Sequence[Summary]) -> Summary:
    """The mean of several streams' summaries, part by part; ``std`` is the deviation of the client mean over streams.

    A part that one of them has no number for is None.

    >>> low = Summary(60.0, 50.0, 1.0, 40.0, 1.0, clients=5)
    >>> mean_over([low, replace(low, client_mean=80.0)]).client_mean
    70.0
    """
    means = known([stream.client_mean for stream in streams])
    return Summary(
        client_mean=_mean(means),
        pooled=_mean(known([stream.pooled for stream in streams])),
        std=None if means is None else mean_and_std(means)[1],
        worst10=_mean(known([stream.worst10 for stream in streams])),
        loss=_mean(known([stream.loss for stream in streams])),
        clients=min(stream.clients for stream in streams),
        broken=sum(stream.broken for stream in streams),
    )


def known(values: Sequence[float | None]) -> list[float] | None:
    """Numbers, if all of them are.

    >>> known([1.0, 2.0]), known([1.0, None])
    ([1.0, 2.0], None)
    """
    numbers = [value for value in values if value is not None]
    return numbers if len(numbers) == len(values) else None


def _mean(values: Sequence[float] | None) -> float | None:
    return None if values is None else math.fsum(values) / len(values)


def finite(value: float) -> float | None:
    """A number, or None if it is none: JSON has no word for it.

    >>> finite(1.0), finite(math.nan)
    (1.0, None)
    """
    return value if math.isfinite(value) else None


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Over seeds; the deviation is the sample one (n - 1), zero for a single seed.

    >>> mean_and_std([1.0, 3.0])
    (2.0, 1.4142135623730951)
    """
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, 0.0
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
