"""What a soak counts: a server's lives, what they were asked, and whether that is what they say themselves."""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.serving.world import opened, processor, quantile, resident
from fedshift.store.trees import facts_of

SETTLED = 1 / 3  # of a server's life after which its memory shall not grow


@dataclass
class Life:
    """One process of the server, and what it was asked."""

    process: subprocess.Popen[str]
    url: str
    before: Mapping[str, int]  # images that it had seen when it began, by client
    begun: float = field(default_factory=time.perf_counter)
    answered: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)  # whole requests whose sender did not wait
    memory: list[tuple[float, float]] = field(default_factory=list)  # seconds, MiB
    files: list[int] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)

    def sampled(self) -> None:
        self.memory.append((time.perf_counter() - self.begun, resident(self.process.pid)))
        self.files.append(opened(self.process.pid))
        self.computed.append(processor(self.process.pid))

    def settled(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds and MiB after it has warmed up."""
        times, memory = np.array(self.memory).T
        late = times >= SETTLED * times[-1]
        return times[late], memory[late]

    def grown(self) -> float:
        """MiB, since then."""
        _, memory = self.settled()
        return float(np.median(memory[-5:]) - np.median(memory[:5]))

    @property
    def cores(self) -> float:
        """That it kept busy."""
        return (self.computed[-1] - self.computed[0]) / max(self.memory[-1][0] - self.memory[0][0], 1e-9)


@dataclass
class Tally:
    """What came of it all."""

    rate: float
    latencies: list[float] = field(default_factory=list)
    again: int = 0  # requests that had to be sent again while no server was there
    broken: int = 0  # connections that ended without an answer though it was
    faults: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    fresh: dict[str, list[str]] = field(default_factory=dict)  # answered ids by client whose labels were not posted yet
    noted: int = 0
    unlearnt: int = 0  # images whose traces the SIGKILL took
    forgotten: int = 0  # answers, likewise


def miscounted(life: Life, seen: Mapping[str, int]) -> list[str]:
    """Every answer was counted, and nothing but answers; nobody knows of those who went away whether they were in time."""
    found = []
    for name, count in seen.items():
        least = life.before[name] + life.answered[name]
        if not least <= count <= least + life.dropped[name]:
            found.append(f"{name} counts {count} images, but was asked {least} to {least + life.dropped[name]}")
    return found


def unwritten(state: Path, adapter: str, seen: Mapping[str, int]) -> list[str]:
    """A server that ended in order has written all it had."""
    found = []
    for name, count in seen.items():
        files = sorted((state / f"{name}-{adapter}" / "versions").glob("[0-9]*.safetensors"))
        facts = facts_of(files[-1]) if files else {"seen": 0, "why": "there is none"}
        if (facts["why"], facts["seen"]) != ("stopped", count):
            found.append(f"{name} had seen {count} images; its last version has {facts['seen']} ({facts['why']})")
    return found


def report(seconds: float, lives: list[Life], tally: Tally) -> None:
    answered = sum(life.answered.total() for life in lives)
    print(f"{answered} answered in {seconds:.0f} s, {tally.broken} lost, {tally.again} sent again after SIGKILL; "
          f"{tally.noted} labels noted; p99 {1000 * quantile(tally.latencies, 0.99):.0f} ms")  # fmt: skip
    print(
        f"SIGKILL took what was learnt from {tally.unlearnt} images and {tally.forgotten} answers waiting for a label"
    )
    print("faults: " + ", ".join(f"{count} {what}" for what, count in sorted(tally.faults.items())))
    for number, life in enumerate(lives, 1):
        times, memory = life.settled()
        print(
            f"server {number}: {times[-1]:.0f} s, {life.cores:.2f} of a core, {np.median(memory[:5]):.1f} MiB after a third "
            f"of them, {np.median(memory[-5:]):.1f} MiB at the end ({life.grown():+.1f}; at most {memory.max():.1f}), "
            f"{life.files[0]} and {life.files[-1]} open files"
        )
