"""From what engines hand back to measures: of every client, of all samples together, and of the one rounds are chosen by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from fedshift.engines.base import Score
from fedshift.measures.measurement import MEASURES, Measurement
from fedshift.measures.predictions import Predictions
from fedshift.store.metric import ACCURACY
from fedshift.store.summary import Summary, summarise, summarise_values


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
    whole = together(list(scores.values()))
    by_client = {name: Measurement.of(predictions_of(score)) for name, score in scores.items() if len(score.labels)}
    return by_client, None if whole is None else Measurement.of(whole)


def choosing(scores: Mapping[str, Score], measure: str) -> Summary:
    """The one measure that rounds are chosen by, over clients; others would cost more than they tell in every round."""
    counted = summarise(scores)
    whole = together(list(scores.values()))
    if measure == ACCURACY or whole is None:
        return counted
    function = MEASURES[measure].of
    found = (function(predictions_of(score)) for score in scores.values() if len(score.labels))
    made = summarise_values([value for value in found if value is not None], function(whole), MEASURES[measure].higher)
    return replace(made, loss=counted.loss, broken=counted.broken)
