"""What ``metrics.jsonl`` tells of a run: its rounds, its evaluations, and those after an adapter's own adaptation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from fedshift.store.metric import Metric
from fedshift.store.summary import Summary, number, whole


@dataclass(frozen=True)
class RoundLine:
    """One round.

    >>> RoundLine.of({"round": 3, "left-out": ["a"]}).diverged  # as version 0.1 called it
    ('a',)
    """

    round: int
    loss: float | None = None  # of training
    participants: int = 0
    diverged: tuple[str, ...] = ()  # clients whose loss or update was not finite
    bytes_down: int = 0
    bytes_up: int = 0
    seconds: float = 0.0
    memory_peak: float | None = None  # on CUDA
    memory_grown: float | None = None  # on a CPU
    server: Mapping[str, float | None] = field(default_factory=dict)  # what the server measured
    losses: Mapping[str, float | None] = field(default_factory=dict)  # of training, by client, where they are few

    def to_json(self) -> dict[str, Any]:
        """As the file holds it."""
        memory = {"memory-peak": self.memory_peak, "memory-grown": self.memory_grown}
        return {
            "round": self.round,
            "train/loss": self.loss,
            "participants": self.participants,
            "diverged": list(self.diverged),
            **({"losses": dict(self.losses)} if self.losses else {}),
            "bytes-down": self.bytes_down,
            "bytes-up": self.bytes_up,
            "seconds": self.seconds,
            **{key: value for key, value in memory.items() if value is not None},
            **{f"{SERVER}{name}": value for name, value in self.server.items()},
        }

    @staticmethod
    def of(stored: Mapping[str, Any]) -> RoundLine:
        """From the file."""
        return RoundLine(
            round=whole(stored["round"]),
            loss=number(stored.get("train/loss")),
            participants=int(number(stored.get("participants")) or 0),
            diverged=tuple(map(str, stored.get("diverged", stored.get("left-out", ())))),
            losses={client: number(value) for client, value in stored.get("losses", {}).items()},
            bytes_down=int(number(stored.get("bytes-down")) or 0),
            bytes_up=int(number(stored.get("bytes-up")) or 0),
            seconds=number(stored.get("seconds")) or 0.0,
            memory_peak=number(stored.get("memory-peak")),
            memory_grown=number(stored.get("memory-grown")),
            server={key.removeprefix(SERVER): number(value) for key, value in stored.items() if key.startswith(SERVER)},
        )


SERVER = "server/"


@dataclass(frozen=True)
class Evaluation:
    """The models after a round, on validation images and on the test streams that are scored during training."""

    round: int
    scores: Mapping[Metric, Summary]
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """As the file holds it."""
        scores = {str(metric): summary.to_json() for metric, summary in self.scores.items()}
        return {"round": self.round, **scores, "seconds": self.seconds}

    @staticmethod
    def of(stored: Mapping[str, Any]) -> Evaluation:
        """From the file."""
        scores = {Metric.parse(key): Summary.of(value) for key, value in stored.items() if isinstance(value, dict)}
        return Evaluation(whole(stored["round"]), scores, number(stored.get("seconds")) or 0.0)


@dataclass(frozen=True)
class Adapted:
    """The models after a round and an adapter's own adaptation, on validation images."""

    round: int
    label: str  # of the adapter
    summary: Summary
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """As the file holds it."""
        return {"round": self.round, "adapter": self.label, "val": self.summary.to_json(), "seconds": self.seconds}

    @staticmethod
    def of(stored: Mapping[str, Any]) -> Adapted:
        """From the file."""
        summary, seconds = Summary.of(stored["val"]), number(stored.get("seconds")) or 0.0
        return Adapted(whole(stored["round"]), str(stored["adapter"]), summary, seconds)


Line: TypeAlias = RoundLine | Evaluation | Adapted


@dataclass(frozen=True)
class History:
    """All lines of a run, by what they are, each kind in the order it was written.

    >>> history = History.of([{"round": 1, "bytes-up": 8}, {"round": 1, "global/val/clients": {"avg": 50.0}}])
    >>> len(history.rounds), history.evaluations[0].scores[Metric("global", "val")].client_mean
    (1, 50.0)
    """

    rounds: tuple[RoundLine, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    adapted: tuple[Adapted, ...] = ()

    @staticmethod
    def of(lines: Iterable[Mapping[str, Any]]) -> History:
        """From the lines of the file."""
        typed = [line_of(line) for line in lines]
        return History(
            tuple(line for line in typed if isinstance(line, RoundLine)),
            tuple(line for line in typed if isinstance(line, Evaluation)),
            tuple(line for line in typed if isinstance(line, Adapted)),
        )

    @property
    def validated(self) -> bool:
        """Whether the run was ever scored on validation images; without any there is no number."""
        scored = (item for evaluation in self.evaluations for item in evaluation.scores.items())
        return any(metric.is_validation and summary.client_mean is not None for metric, summary in scored)


def line_of(stored: Mapping[str, Any]) -> Line:
    """One line by what is in it."""
    if "bytes-up" in stored:
        return RoundLine.of(stored)
    return Adapted.of(stored) if "adapter" in stored else Evaluation.of(stored)
