"""From what engines hand back to measures: of every client, of all samples together, and of the one rounds are chosen by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add

import numpy as np

from fedshift.engines.base import Score
from fedshift.measures.counts import Counts
from fedshift.measures.measurement import MEASURES, Measurement
from fedshift.measures.predictions import Predictions
from fedshift.store.metric import ACCURACY
from fedshift.store.summary import Summary, summarise, summarise_values


@dataclass(frozen=True)
class Counted(Score):
    """How a stream was predicted at a party that tells only counts."""

    counts: Counts | None = field(default=None, repr=False, compare=False)

    @property
    def classes(self) -> int:
        """How many classes the predictions know; 0 where there are none."""
        return 0 if self.counts is None else len(self.counts.confusion)


def predictions_of(score: Score) -> Predictions:
    """A client's predictions along a stream."""
    return Predictions(score.log_probabilities.numpy(), score.labels.numpy())


def together(scores: Sequence[Score]) -> Predictions | None:
    """All samples of these clients; None if there are none."""
    some = [predictions_of(score) for score in scores if len(score.labels)]
    if not some:
        return None
    return Predictions(
        np.concatenate([own.log_probabilities for own in some]), np.concatenate([own.labels for own in some])
    )


def measured(scores: Mapping[str, Score]) -> tuple[dict[str, Measurement], Measurement | None]:
    """All measures of every client that was tested, and of their samples together."""
    if given := _given(scores.values()):
        by_client = {name: Measurement.of_counts(counts) for name, counts in zip(scores, given, strict=True) if counts}
        return by_client, Measurement.of_counts(reduce(add, (counts for counts in given if counts)))
    whole = together(list(scores.values()))
    by_client = {name: Measurement.of(predictions_of(score)) for name, score in scores.items() if len(score.labels)}
    return by_client, None if whole is None else Measurement.of(whole)


def choosing(scores: Mapping[str, Score], measure: str) -> Summary:
    """The one measure that rounds are chosen by, over clients; others would cost more than they tell in every round."""
    counted = summarise(scores)
    if measure == ACCURACY:
        return counted
    higher = MEASURES[measure].higher
    if _given(scores.values()):
        by_client, every = measured(scores)
        values = [own.value(measure) for own in by_client.values()]
        pooled = None if every is None else every.value(measure)
    else:
        whole, function = together(list(scores.values())), MEASURES[measure].of
        if whole is None:
            return counted
        values = [function(predictions_of(score)) for score in scores.values() if len(score.labels)]
        pooled = function(whole)
    made = summarise_values([value for value in values if value is not None], pooled, higher)
    return replace(made, loss=counted.loss, broken=counted.broken)


def _given(scores: Iterable[Score]) -> list[Counts | None]:
    """The counts of parties that tell nothing else, one for each score; empty where predictions are known."""
    counts = [score.counts if isinstance(score, Counted) and score.samples else None for score in scores]
    return counts if any(counts) else []
