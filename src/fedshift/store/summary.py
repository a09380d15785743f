"""The numbers of a metric: never one alone.

The client mean is the mean over clients, pooled counts all their samples together; both always, with the standard
deviation over clients and the mean of the worst 10 %. Stream ``mean`` is the mean over several streams; its ``std`` is the
sample deviation over those streams, as papers print it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from fedshift.measures.measurement import MEASURES, Measurement
from fedshift.store.metric import ACCURACY


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
        numbers: dict[str, Any] = {part: number(stored[key]) for part, key in keys.items() if key in stored}
        return Summary(**numbers, broken=int(number(stored.get(BROKEN)) or 0))


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

    @staticmethod
    def of(samples: Any, correct: Any, loss: Any, broken: Any = 0) -> ClientScore:
        """From a file."""
        if not 0 <= whole(correct) <= whole(samples):
            raise ValueError(f"{correct} of {samples} samples cannot be right")
        return ClientScore(samples, correct, number(loss), whole(broken))

    def to_json(self) -> list[float | None]:
        """As files hold it: the last one only where there are any."""
        return list(self if self.broken else self[:3])

    @property
    def accuracy(self) -> float:
        """In percent; the client must have samples."""
        return 100 * self.correct / self.samples


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


def number(value: Any) -> float | None:
    """A number that a file should have, or None where it has none.

    >>> number(2), number(None), number(math.inf)
    (2, None, None)
    >>> number("2")
    Traceback (most recent call last):
    ...
    TypeError: '2' is no number
    """
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return None if value is None else finite(value)
    raise TypeError(f"{value!r} is no number")


def whole(value: Any) -> int:
    """A whole number, as a file should have it.

    >>> whole(2)
    2
    """
    if type(value) is not int:
        raise TypeError(f"{value!r} is no whole number")
    return value


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Over seeds; the deviation is the sample one (n - 1), zero for a single seed.

    >>> mean_and_std([1.0, 3.0])
    (2.0, 1.4142135623730951)
    """
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, 0.0
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
