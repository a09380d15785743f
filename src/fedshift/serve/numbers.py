"""What a server counts: totals for Prometheus, and the last half hour for its page."""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)  # seconds of a request
BIN, BINS = 10, 180  # seconds, and how many
STEP = 0.1  # of a latency: the precision with which a bin remembers it
LINES = 100  # of the log


@dataclass
class Bin:
    """Some seconds of a stream."""

    start: int
    requests: int = 0
    images: int = 0
    unknown: int = 0
    differing: int = 0  # answers in which adapter and frozen model differ
    fallen: int = 0  # images that the frozen model answered in the adapter's place
    confidence: float = 0.0
    classes: Counter[int] = field(default_factory=Counter)
    telemetry: Counter[str] = field(default_factory=Counter)
    seconds: Counter[int] = field(default_factory=Counter)  # requests by the logarithm of their latency

    def to_json(self) -> dict[str, Any]:
        """As the page wants it."""
        images = max(self.images, 1)
        return {
            "start": self.start,
            "requests": self.requests,
            "images": self.images,
            "unknown": self.unknown / images,
            "differing": self.differing / images,
            "fallen": self.fallen / images,
            "confidence": self.confidence / images,
            "classes": {str(code): count for code, count in sorted(self.classes.items())},
            "telemetry": {name: total / images for name, total in self.telemetry.items()},
            "p50": _quantile(self.seconds, 0.5),
            "p99": _quantile(self.seconds, 0.99),
        }


class Numbers:
    """Counts of one client. Requests are counted in one thread, their answers in another: they share the bins alone."""

    def __init__(self) -> None:
        self.requests: Counter[int] = Counter()  # by status
        self.totals: Counter[str] = Counter()
        self.classes: Counter[int] = Counter()
        self.alarms: Counter[str] = Counter()
        self.latency = [0] * (len(BUCKETS) + 1)
        self.seconds = 0.0
        self.lines: deque[str] = deque(maxlen=LINES)
        self._bins: deque[Bin] = deque(maxlen=BINS)
        self._turn = threading.Lock()

    def request(self, status: int, seconds: float) -> None:
        """A request has ended."""
        self.requests[status] += 1
        self.latency[bisect_left(BUCKETS, seconds)] += 1
        self.seconds += seconds
        with self._turn:
            now = self._now()
            now.requests += 1
            now.seconds[round(math.log(max(seconds, 1e-6)) / STEP)] += 1

    def answers(
        self, codes: Sequence[int], confidence: float, unknown: int, differing: int, fallen: int,
        telemetry: Mapping[str, float],
    ) -> None:  # fmt: skip
        """Some images were answered; sums over them."""
        self.totals.update(images=len(codes), unknown=unknown, differing=differing, fallen=fallen)
        real = [code for code in codes if code >= 0]  # answers that are no numbers are of no class
        self.classes.update(real)
        with self._turn:
            now = self._now()
            now.images += len(codes)
            now.unknown += unknown
            now.differing += differing
            now.fallen += fallen
            now.confidence += confidence
            now.classes.update(real)
            for name, total in telemetry.items():
                now.telemetry[name] += total  # type: ignore[assignment]

    def say(self, line: str) -> None:
        """A line of the log, with its time."""
        self.lines.append(f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} UTC {line}")

    def timeline(self) -> list[dict[str, Any]]:
        """The last half hour, oldest first; seconds in which nothing came are left out."""
        with self._turn:
            return [one.to_json() for one in self._bins]

    def _now(self) -> Bin:
        start = int(time.time()) // BIN * BIN
        if not self._bins or self._bins[-1].start != start:
            self._bins.append(Bin(start))
        return self._bins[-1]


def _quantile(counts: Mapping[int, int], share: float) -> float | None:
    """The latency that this share of requests was not above, to within a step.

    >>> round(_quantile({-50: 98, -23: 2}, 0.99), 2)
    0.1
    """
    left = share * sum(counts.values())
    for place in sorted(counts):
        left -= counts[place]
        if left < 0:
            return math.exp(place * STEP)
    return None


# ---- Prometheus ------------------------------------------------------------------------------------------------------
class Exposition:
    """Prometheus's text format.

    >>> text = Exposition()
    >>> text.add("fedshift_images_total", "counter", "Images.", 3, client='a "b"')
    >>> print(text, end="")
    # HELP fedshift_images_total Images.
    # TYPE fedshift_images_total counter
    fedshift_images_total{client="a \\"b\\""} 3
    """

    def __init__(self) -> None:
        self._families: dict[str, list[str]] = {}

    def add(self, name: str, kind: str, words: str, value: float, suffix: str = "", **labels: str) -> None:
        """One number."""
        lines = self._families.setdefault(name, [f"# HELP {name} {words}", f"# TYPE {name} {kind}"])
        inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        lines.append(f"{name}{suffix}{{{inside}}} {value}")

    def __str__(self) -> str:
        return "".join(f"{line}\n" for lines in self._families.values() for line in lines)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def expose(text: Exposition, client: str, numbers: Numbers, classes: Sequence[str], gauges: Mapping[str, float],
           levels: Iterable[tuple[str, float, bool]]) -> None:  # fmt: skip
    """One client's numbers."""
    for status, count in sorted(numbers.requests.items()):
        text.add("fedshift_requests_total", "counter", "Requests by status.", count, client=client, status=str(status))
    upto = 0
    name, words = "fedshift_request_seconds", "Seconds of a prediction request."
    for bound, count in zip((*map(str, BUCKETS), "+Inf"), numbers.latency, strict=True):
        upto += count
        text.add(name, "histogram", words, upto, suffix="_bucket", client=client, le=bound)
    text.add(name, "histogram", words, numbers.seconds, suffix="_sum", client=client)
    text.add(name, "histogram", words, upto, suffix="_count", client=client)
    for key, sentence in (
        ("images", "Images answered."),
        ("unknown", "Images called unknown."),
        ("differing", "Images to which adapter and frozen model answer differently."),
        ("fallen", "Images that the frozen model answered in the adapter's place."),
    ):
        text.add(f"fedshift_{key}_total", "counter", sentence, numbers.totals[key], client=client)
    for code, count in sorted(numbers.classes.items()):
        label = classes[code]
        text.add("fedshift_class_total", "counter", "Answers by class.", count, client=client, label=label)
    for key, value in gauges.items():
        text.add(f"fedshift_{key}", "gauge", f"{key.replace('_', ' ').capitalize()}.", value, client=client)
    for alarm, level, on in levels:
        sentence = "How near an alarm is: 1 sets it off."
        text.add("fedshift_alarm_level", "gauge", sentence, round(level, 4), client=client, alarm=alarm)
        text.add("fedshift_alarm_on", "gauge", "Whether an alarm is on.", int(on), client=client, alarm=alarm)
        count = numbers.alarms[alarm]
        text.add("fedshift_alarms_total", "counter", "How often an alarm went off.", count, client=client, alarm=alarm)
