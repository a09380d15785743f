"""Scores as they are kept: a line of ``adapters/LABEL.jsonl``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedshift.measures.measurement import Measurement
from fedshift.store.metric import ACCURACY, Metric
from fedshift.store.summary import BROKEN, OLD_KEYS, SUMMARY_KEYS, ClientScore, Summary, finite, number, whole


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
        return Told(number(stored["mean"]), tuple(int(count) for count in stored["counts"]))


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
    aside: bool = False  # shown and not ranked
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
            "aside": self.aside or None,
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
            selection=str(stored.get("selection", "")),
            round=whole(stored.get("round", 0)),
            label=str(stored.get("label", label)),
            adapter=str(stored.get("adapter", "")),
            options=dict(stored.get("options", {})),
            code=stored.get("code"),
            given_bytes=stored.get("given-bytes", stored.get("published-bytes")),
            measures={name: Summary.of(own) for name, own in stored.get("measures", {}).items()},
            classes=tuple(map(str, stored.get("classes", ()))),
            whole=Measurement.of_json(stored["whole"], len(stored["classes"])) if "whole" in stored else None,
            measured={
                name: Measurement.of_json(own, len(stored["classes"]))
                for name, own in stored.get("measured", {}).items()
            },
            by_client={name: ClientScore.of(*score) for name, score in stored.get("by-client", {}).items()},
            telemetry={name: Told.of(told) for name, told in stored.get("telemetry", {}).items()},
            setting=dict(stored.get("setting", {})),
            seed=stored.get("seed"),
            task_hash=str(stored.get("task-hash", "")),
            fedshift=str(stored.get("fedshift", "")),
            paper=number(stored.get("paper")),
            paper_validation=number(stored.get("paper-validation")),
            family=str(stored.get("family", "")),
            aside=bool(stored.get("aside", False)),
            of_streams=tuple(map(str, stored.get("of", ()))),
            unknown={key: value for key, value in stored.items() if key not in KNOWN},
        )


KNOWN = {
    *SUMMARY_KEYS.values(), *OLD_KEYS.values(), BROKEN, "metric", "selection", "round", "label", "adapter", "options",
    "code", "given-bytes", "measures", "classes", "whole", "measured", "by-client", "telemetry", "setting", "seed",
    "task-hash", "fedshift", "paper", "paper-validation", "family", "aside", "of",
}  # fmt: skip
