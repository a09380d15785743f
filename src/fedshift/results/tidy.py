"""Results as a table of plain numbers: one row for each method, adapter, stream, population, client, seed and measure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fedshift.errors import UserError
from fedshift.measures.measurement import MEASURES
from fedshift.store.metric import ACCURACY
from fedshift.store.summary import SUMMARY_KEYS

if TYPE_CHECKING:
    import pandas

    from fedshift.results.result import Result
    from fedshift.store.rows import ScoreRow

PARTS = tuple(part for part in SUMMARY_KEYS if part not in ("loss", "clients"))


def tidy(result: Result) -> Iterator[dict[str, Any]]:
    """The rows: of every client, whose ``part`` is "client", and of all of them ("client-mean", "pooled", ...)."""
    for row in result.rows:
        if row.bound:
            continue  # chosen by test labels
        for (rule, metric), scores in row.values.items():
            for seed, score in zip(row.seeds, scores, strict=True):
                named = {"method": row.method, "adapter": row.adapter, **dict(row.point), "selection": rule}
                shown = {"model": metric.model, "stream": metric.stream, "population": metric.population, "seed": seed}
                for part, client, measure, value in _numbers(score):
                    yield {**named, **shown, "client": client, "part": part, "metric": measure, "value": value}


def _numbers(score: ScoreRow) -> Iterator[tuple[str, str | None, str, float]]:
    """(part, client, measure, value) of a score; what is not known is left out."""
    for measure in (ACCURACY, *(name for name in MEASURES if name in score.measures)):
        summary = score.summary_of(measure)
        for part in PARTS:
            value = getattr(summary, part)
            if value is not None:
                yield SUMMARY_KEYS[part], None, measure, value
        for client, value in score.values(measure).items():
            yield "client", client, measure, value


def to_pandas(result: Result) -> pandas.DataFrame:
    """The rows as a data frame; needs pandas."""
    try:
        import pandas
    except ImportError:
        raise UserError('to_pandas needs pandas: pip install "fedshift[notebook]"') from None
    return pandas.DataFrame(list(tidy(result)))
