"""What serving costs: the bare network behind the same route against adapters with guards and history, in one run.

python benchmarks/serve.py speed                  # ratios of throughput and of the 99th percentile, two minutes
python benchmarks/serve.py soak --seconds 3600    # half of capacity with faults injected: memory, and what was lost
python benchmarks/serve.py guards                 # false alarms and delays of the guards beside river's detectors
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import typer

ROOT = Path(__file__).resolve().parent.parent
sys.path[1:1] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.serving.soaking import soaked  # noqa: E402
from benchmarks.serving.world import Load, burst, pictures, processor, trained  # noqa: E402
from fedshift.engines.reference import as_floats  # noqa: E402
from fedshift.runs.answers import Answers  # noqa: E402
from fedshift.serve.bodies import Sent  # noqa: E402
from fedshift.serve.host import Host, Keeping  # noqa: E402
from fedshift.serve.opening import open_service  # noqa: E402
from fedshift.serve.server import Address, Options, serve  # noqa: E402
from fedshift.serve.service import Settings  # noqa: E402

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
ROWS = ("none", "the", "home-or-away", "t3a", "tent batch-size=16")
WANTED = {name: (0.5, None) if name.startswith("tent") else (0.8, 1.5) for name in ROWS}


class Bare(Host):
    """The network alone: the same route, decoding and batching, and nothing else."""

    def _answer(self, requests: list[Sent]) -> list[dict[str, Any]]:
        artefact, pixels = self.service.artefact, torch.cat([request.pixels for request in requests])
        x = as_floats(pixels, artefact.compute.dtype).to(artefact.compute.device)
        with torch.no_grad():
            logits = artefact.method.predict(artefact.deployed, x).logits.cpu()
        answers = Answers.of(logits, self.service.classes)
        chances, start, told = answers.probabilities.tolist(), 0, []
        for request in requests:
            rows = range(start, start + len(request.names))
            told.append({"answers": [{"label": answers.labels[i], "probabilities": chances[i]} for i in rows]})
            start += len(request.names)
        return told

    def _keep(self) -> None:
        """Nothing is learnt."""


@contextlib.contextmanager
def server(kinds: list[str], folder: Path, state: Path, device: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A process that serves the bare network and some adapters with their options, a path each."""
    command = [sys.executable, __file__, "process", json.dumps(kinds), str(folder), str(state), device]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert process.stdout is not None
    line = process.stdout.readline()
    try:
        yield line.strip(), process
    finally:
        process.terminate()
        process.wait()


@app.command(hidden=True)
def process(kinds: str, folder: Path, state: Path, device: str) -> None:
    """The server, as a process of its own."""
    from fedshift.serve import server as module

    services = []
    for kind in json.loads(kinds):
        name, *options = ("none",) if kind == "bare" else kind.split()
        given = {key: int(value) for key, _, value in (option.partition("=") for option in options)}
        settings = Settings(fall_back="never")  # adapters shall work all the time
        opened = open_service(folder, name, given, settings, device=device)
        services.append(replace(opened, name=kind.replace(" ", "-")))
    module.Host = lambda service, *rest: (Bare if service.name == "bare" else Host)(service, *rest)  # type: ignore
    serve(
        services, Options(Address(port=0), state, Keeping(deadline=0.02), rate=1e9), lambda url: print(url, flush=True)
    )


@app.command()
def speed(seconds: float = 1.0, repeats: int = 9, connections: int = 8, device: str = "cpu") -> None:
    """Bursts to the bare network and to each adapter in turn; the median of their ratios."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        folder, bodies = trained(place) / "paper", pictures()
        with server(["bare", *ROWS], folder, place / "state", device) as (url, running):
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


@app.command()
def soak(seconds: float = 60.0, connections: int = 8, adapter: str = "t3a", save_seconds: float = 5.0) -> None:
    """Half of capacity with everything going wrong in between, SIGKILL included; memory, and what was lost."""
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        wrong = soaked(seconds, trained(place), place / "state", adapter, connections, save_seconds)
    for sentence in wrong:
        print(f"WRONG: {sentence}")
    print("nothing is lost" if not wrong else f"{len(wrong)} things are wrong", flush=True)
    raise typer.Exit(bool(wrong))


@app.command()
def guards(repeats: int = 20) -> None:
    """Ordinary images and three turns of the stream: how often and how soon alarms go off, beside river's detectors."""
    from benchmarks.serving.guarding import compare

    compare(repeats)


if __name__ == "__main__":
    app()
