"""What serving costs: the bare network behind the same route against adapters with guards and history, in one run.

python benchmarks/serve.py speed                  # ratios of throughput and of the 99th percentile, two minutes
python benchmarks/serve.py soak --seconds 3600    # half of capacity with faults injected: memory, and what was lost
python benchmarks/serve.py guards                 # false alarms and delays of the guards beside river's detectors
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
import typer
from PIL import Image

import fedshift
from fedshift.runs.answers import Answers
from fedshift.serve.bodies import Sent
from fedshift.serve.host import Host, Keeping
from fedshift.serve.opening import open_service
from fedshift.serve.server import Address, Options, serve
from fedshift.serve.service import Settings

app = typer.Typer(add_completion=False)
ROWS = ("none", "the", "home-or-away", "t3a", "tent batch-size=16")
HEAD = "POST {}/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: {}\r\n\r\n"
WANTED = {name: (0.5, None) if name.startswith("tent") else (0.8, 1.5) for name in ROWS}


class Bare(Host):
    """The network alone: the same route, decoding and batching, and nothing else."""

    def _answer(self, requests: list[Sent]) -> list[dict[str, Any]]:
        logits = self.service.artefact(torch.cat([request.pixels for request in requests]))
        answers = Answers.of(logits, self.service.classes)
        chances, start, told = answers.probabilities.tolist(), 0, []
        for request in requests:
            rows = range(start, start + len(request.names))
            told.append({"answers": [{"label": answers.labels[i], "probabilities": chances[i]} for i in rows]})
            start += len(request.names)
        return told

    def _keep(self) -> None:
        """Nothing is learnt."""


def trained(place: Path) -> Path:
    """An artefact with the default network at 32 pixels; how good it is does not matter here."""
    experiment = fedshift.Experiment.parse(
        {
            "name": "serve", "rounds": 1, "baselines": False, "data": {"size": 32, "limit": 400},
            "evaluate": {"every": 0, "advice": False}, "model": {"name": "cnn", "norm": True},
            "train": {"lr": 0.02, "batch-size": 32}, "method": [{"name": "fedthe"}],
        }
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (folder,) = fedshift.run(experiment, place, engine="sequential").folders
    return folder / "artefacts" / "paper"


@dataclass(frozen=True)
class Load:
    """What a burst of requests came to."""

    answered: int
    refused: int
    lost: int  # connections that ended without an answer
    seconds: float
    latencies: list[float]

    @property
    def rate(self) -> float:
        """Requests a second."""
        return self.answered / self.seconds

    @property
    def p99(self) -> float:
        """Seconds."""
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


async def burst(url: str, bodies: list[bytes], seconds: float, connections: int, rate: float | None = None) -> Load:
    """Requests on some kept connections, one after the other on each; ``rate`` in all, as fast as they go if None."""
    place = urlsplit(url)
    counts, latencies = {"answered": 0, "refused": 0, "lost": 0}, []
    begun = time.perf_counter()

    async def one(number: int) -> None:
        reader = writer = None
        step = 0
        while (now := time.perf_counter()) - begun < seconds:
            if rate is not None:
                due = begun + (step * connections + number) / rate
                await asyncio.sleep(max(0.0, due - now))
            step += 1
            try:
                if writer is None:
                    reader, writer = await asyncio.open_connection(place.hostname, place.port)
                body = bodies[(number + step) % len(bodies)]
                started = time.perf_counter()
                writer.write(HEAD.format(place.path, len(body)).encode() + body)
                answer = await reader.readuntil(b"\r\n\r\n")
                length = int(answer.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                await reader.readexactly(length)
                latencies.append(time.perf_counter() - started)
                counts["answered" if answer.startswith(b"HTTP/1.1 200") else "refused"] += 1
            except (OSError, asyncio.IncompleteReadError, ValueError):
                counts["lost"] += 1
                reader = writer = None
                await asyncio.sleep(0.05)

    await asyncio.gather(*(one(number) for number in range(connections)))
    return Load(**counts, seconds=time.perf_counter() - begun, latencies=latencies)


@contextlib.contextmanager
def server(kinds: list[str], folder: Path, state: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A process that serves the bare network and some adapters with their options, a path each."""
    command = [sys.executable, __file__, "process", json.dumps(kinds), str(folder), str(state)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert process.stdout is not None
    line = process.stdout.readline()
    try:
        yield line.strip(), process
    finally:
        process.terminate()
        process.wait()


@app.command(hidden=True)
def process(kinds: str, folder: Path, state: Path) -> None:
    """The server, as a process of its own."""
    from fedshift.serve import server as module

    services = []
    for kind in json.loads(kinds):
        name, *options = ("none",) if kind == "bare" else kind.split()
        given = {key: int(value) for key, _, value in (option.partition("=") for option in options)}
        settings = Settings(fall_back="never")  # adapters shall work all the time
        services.append(replace(open_service(folder, name, given, settings), name=kind.replace(" ", "-")))
    module.Host = lambda service, *rest: (Bare if service.name == "bare" else Host)(service, *rest)  # type: ignore
    serve(
        services, Options(Address(port=0), state, Keeping(deadline=0.02), rate=1e9), lambda url: print(url, flush=True)
    )


def pictures(count: int = 64) -> list[bytes]:
    """Digits as PNG files."""
    from fedshift.data.sources import load

    pool = load("embedded:digits", None, 32, 3)
    chosen = np.random.default_rng(0).choice(len(pool), count, replace=False)
    found = []
    for image in pool.images[torch.from_numpy(chosen)]:
        stream = io.BytesIO()
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(stream, "PNG")
        found.append(stream.getvalue())
    return found


@app.command()
def speed(seconds: float = 1.0, repeats: int = 9, connections: int = 8) -> None:
    """Bursts to the bare network and to each adapter in turn; the median of their ratios."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        folder, bodies = trained(place), pictures()
        with server(["bare", *ROWS], folder, place / "state") as (url, running):
            _compared(url, running.pid, bodies, seconds, repeats, connections)


def _compared(url: str, pid: int, bodies: list[bytes], seconds: float, repeats: int, connections: int) -> None:
    urls = {kind: f"{url}/{kind.replace(' ', '-')}" for kind in ("bare", *ROWS)}

    def loaded(kind: str, many: int) -> tuple[Load, float]:
        before = processor(pid)
        load = asyncio.run(burst(urls[kind], bodies, seconds, many))
        return load, (processor(pid) - before) / max(load.answered, 1)

    for kind in urls:
        loaded(kind, connections)
    print(
        "each against the bare network, medians over bursts; cpu: the server's own seconds for a request, bare / adapter"
    )
    print(f"{'adapter':22}{'requests/s':>12}{'ratio':>8}{'cpu':>8}{'p99 ms':>9}{'ratio':>8}   wanted: throughput, p99")
    for kind in ROWS:
        many = 32 if kind.startswith("tent") else connections
        pairs = [(loaded(kind, many), loaded("bare", many)) for _ in range(repeats)]
        rate = statistics.median(own[0].rate / bare[0].rate for own, bare in pairs)
        work = statistics.median(bare[1] / own[1] for own, bare in pairs)
        slow = statistics.median(own[0].p99 / bare[0].p99 for own, bare in pairs)
        own, late = (
            statistics.median(values) for values in zip(*((o.rate, 1000 * o.p99) for (o, _), _ in pairs), strict=True)
        )
        least, most = WANTED[kind]
        words = f"{least}" + ("" if most is None else f", {most}")
        print(f"{kind:22}{own:12.0f}{rate:8.2f}{work:8.2f}{late:9.1f}{slow:8.2f}   {words}", flush=True)


def processor(pid: int) -> float:
    """Seconds that a process has computed: what other processes do does not count."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@app.command()
def soak(seconds: float = 30.0, connections: int = 8, adapter: str = "t3a") -> None:
    """Half of capacity, with bad requests, dropped connections and a rollback now and then; memory at both ends."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        folder, bodies = trained(place), pictures()
        with server([adapter], folder, place / "state") as (url, running):
            capacity = asyncio.run(burst(url, bodies, 3.0, connections)).rate
            parts = max(4, int(seconds // 10))
            memory, answered, lost, bad = [], 0, 0, 0
            for _ in range(parts):
                load = asyncio.run(_with_faults(url, bodies, seconds / parts, connections, capacity / 2))
                answered, lost, bad = answered + load.answered, lost + load.lost, bad + load.refused
                memory.append(resident(running.pid))
            seen = json.loads(fetched(url, "/status"))["seen"]
        early, late = (statistics.median(memory[part]) for part in (slice(1, len(memory) // 2 + 1), slice(-2, None)))
        print(
            f"capacity {capacity:.0f}/s, {answered} answered at half of it in {seconds:.0f} s, {lost} lost, {bad} refused"
        )
        print(
            f"memory {early:.0f} MiB early, {late:.0f} MiB late: {late - early:+.1f} MiB; the server counts {seen} images"
        )


async def _with_faults(url: str, bodies: list[bytes], seconds: float, connections: int, rate: float) -> Load:
    async def faults() -> None:
        place, end = urlsplit(url), time.perf_counter() + seconds
        while time.perf_counter() < end:
            for data in (
                b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nnot a png",
                b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900\r\n\r\nhalf",
                b"nonsense\r\n\r\n",
                b"POST /rollback?to=1 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n",
            ):
                with contextlib.suppress(OSError):
                    reader, writer = await asyncio.open_connection(place.hostname, place.port)
                    writer.write(data)
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(reader.read(100), 0.2)
                    writer.close()
            await asyncio.sleep(0.2)

    load, _ = await asyncio.gather(burst(url, bodies, seconds, connections, rate), faults())
    return load


def resident(pid: int) -> float:
    """MiB that a process holds."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) / 1024


def fetched(url: str, path: str) -> bytes:
    import urllib.request

    with urllib.request.urlopen(url + path) as reply:
        return bytes(reply.read())


@app.command()
def guards(repeats: int = 20) -> None:
    """Ordinary images and three turns of the stream: how often and how soon alarms go off, beside river's detectors."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.serve.test_guards import CLASSES, alarmed_after, known_from, population, seen

    from fedshift.serve.guards import Guards

    def ours(known: Any, output: Any) -> int | None:
        found = alarmed_after(Guards(CLASSES, known, 1e-6), seen(known, output))
        return min((number for name, number in found.items()), default=None)

    def river(make: Any, known: Any, output: Any) -> int | None:
        what = seen(known, output)
        columns = [*what.signals.T, what.frozen_confidence]
        detectors = [make() for _ in columns]
        for number in range(len(what.answer)):
            for detector, column in zip(detectors, columns, strict=True):
                detector.update(float(column[number]))
                if detector.drift_detected:
                    return number + 1
        return None

    from river.drift import ADWIN, PageHinkley

    ways = {
        "ours": ours,
        "ADWIN": lambda k, o: river(ADWIN, k, o),
        "Page-Hinkley": lambda k, o: river(PageHinkley, k, o),
    }
    turns = {"noise-like (6 sd)": {"away": 6.0}, "another domain (1 sd)": {"away": 1.0}, "one class": {"only": 3}}
    print(f"{'':14}{'false in 10,000':>16}" + "".join(f"{turn:>24}" for turn in turns))
    for name, way in ways.items():
        false, delays = 0, {turn: [] for turn in turns}
        for seed in range(repeats):
            known = known_from(300, 3 * seed)
            false += way(known, population(10_000, 1000 + seed)[0]) is not None
            for turn, how in turns.items():
                before, after = population(300, 2000 + seed)[0], population(300, 3000 + seed, **how)[0]
                joined = before._replace(
                    logits=torch.cat([before.logits, after.logits]),
                    features=torch.cat([before.features, after.features]),
                )
                found = way(known, joined)
                delays[turn].append(None if found is None else found - 300)
        words = [_delay(delays[turn]) for turn in turns]
        print(f"{name:14}{f'{false} of {repeats}':>16}" + "".join(f"{word:>24}" for word in words), flush=True)


def _delay(found: list[int | None]) -> str:
    good = [number for number in found if number is not None and number > 0]
    early = sum(number is not None and number <= 0 for number in found)
    return f"{statistics.median(good) if good else '-'} (missed {found.count(None)}, early {early})"


if __name__ == "__main__":
    app()
