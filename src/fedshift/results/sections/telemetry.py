"""What adapters tell about themselves while they predict."""

from __future__ import annotations

from typing import Any

from fedshift.results.sections.views import Views
from fedshift.store.rows import Told
from fedshift.store.summary import known, mean_and_std


def telemetry(views: Views) -> list[dict[str, Any]] | None:
    """For each row and name: by rule and column the mean over seeds, and the share of samples in each bin of [0, 1]."""
    made = []
    for number, row in enumerate(views.rows):
        told = {rule: row.telemetry(rule) for rule in views.rules}
        names = dict.fromkeys(name for found in told.values() for own in found.values() for name in own)
        for name in names:
            by_rule = {
                rule: [_summed(found.get(metric.column, {}).get(name, [])) for metric in views.columns]
                for rule, found in told.items()
            }
            made.append({"row": number, "name": name, "found": by_rule})
    return made or None


def _summed(seeds: list[Told]) -> dict[str, Any] | None:
    means = known([told.mean for told in seeds])
    if not means:
        return None
    counts = [sum(column) for column in zip(*(told.counts for told in seeds), strict=True)]
    total = sum(counts) or 1
    mean, deviation = mean_and_std(means)
    return {
        "text": f"{mean:.3f}" + (f" ±{deviation:.3f}" if deviation else ""),
        "shares": [round(100 * count / total, 2) for count in counts],
    }
