"""What is reported about many clients' accuracies: never one number alone.

Every metric is named ``model/test-set/population``. AVG is the mean over clients, ALL pools their samples; both always,
with the standard deviation over clients and the mean of the worst tenth. Test set ``mean`` is the mean over several
streams; its ``std`` is the sample deviation over those streams, as papers print it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fedshift.engines.base import Score


@dataclass(frozen=True)
class Summary:
    """Accuracies in percent, loss in nats."""

    avg: float
    all: float
    std: float
    worst: float  # mean of the worst 10 % of clients, at least one
    loss: float  # pooled
    clients: int

    def as_dict(self) -> dict[str, float]:
        """Plain numbers."""
        return asdict(self)


def summarise(scores: Mapping[str, Score]) -> Summary:
    """Over all clients that have samples.

    >>> summarise({"a": Score(10, 9, 1.0), "b": Score(30, 15, 9.0)}).avg
    70.0
    """
    present = [score for score in scores.values() if score.samples]
    if not present:
        nan = float("nan")
        return Summary(nan, nan, nan, nan, nan, 0)
    accuracies = sorted(100 * score.accuracy for score in present)
    mean = math.fsum(accuracies) / len(accuracies)
    worst = accuracies[: max(1, len(accuracies) // 10)]
    samples = sum(score.samples for score in present)
    return Summary(
        avg=mean,
        all=100 * sum(score.correct for score in present) / samples,
        std=math.sqrt(math.fsum((a - mean) ** 2 for a in accuracies) / len(accuracies)),
        worst=math.fsum(worst) / len(worst),
        loss=math.fsum(score.loss for score in present) / samples,
        clients=len(present),
    )


def mean_over(streams: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """The mean of several streams' summaries, part by part; ``std`` is the deviation of AVG over the streams.

    A part that one of them has no number for is None.

    >>> low = {"avg": 60.0, "all": 50.0, "std": 1.0, "worst": 40.0, "loss": 1.0, "clients": 5}
    >>> mean_over([low, {**low, "avg": 80.0}])["avg"]
    70.0
    """
    parts = {part: [stream[part] for stream in streams] for part in ("avg", "all", "worst", "loss")}
    known = {
        part: all(value is not None and math.isfinite(value) for value in values) for part, values in parts.items()
    }
    means = {part: math.fsum(values) / len(values) if known[part] else None for part, values in parts.items()}
    std = mean_and_std(parts["avg"])[1] if known["avg"] else None
    return {**means, "std": std, "clients": min(stream["clients"] for stream in streams)}


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Over seeds; the deviation is the sample one (n - 1), zero for a single seed.

    >>> mean_and_std([1.0, 3.0])
    (2.0, 1.4142135623730951)
    """
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, 0.0
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def metric_parts(metric: str) -> tuple[str, str, str]:
    """Model, test set and population of a metric.

    >>> metric_parts("global/original/clients")
    ('global', 'original', 'clients')
    """
    model, _, rest = metric.partition("/")
    stream, _, population = rest.rpartition("/")
    return model, stream, population
