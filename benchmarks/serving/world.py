"""An artefact to serve, images to send, a load on a server, and what its process takes."""

from __future__ import annotations

import asyncio
import io
import os
import time
import urllib.request
import warnings
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import torch
from PIL import Image

import fedshift

HEAD = "POST {}/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: {}\r\n\r\n"
SIDE = 32


def trained(place: Path, size: int = SIDE) -> Path:
    """The artefacts of a run of FedTHE with the default network; how good it is does not matter here."""
    experiment = fedshift.Experiment.parse(
        {
            "name": "serve", "rounds": 1, "baselines": False, "data": {"size": size, "limit": 400},
            "evaluate": {"every": 0, "advice": False}, "model": {"name": "cnn", "norm": True},
            "train": {"lr": 0.02, "batch-size": 32}, "method": [{"name": "fedthe"}],
        }
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (folder,) = fedshift.run(experiment, place, engine="sequential").folders
    return folder / "artefacts"


def pictures(count: int = 64, size: int = SIDE) -> list[bytes]:
    """Digits as PNG files."""
    from fedshift.data.sources import load

    pool = load("embedded:digits", None, size, 3)
    chosen = np.random.default_rng(0).choice(len(pool), count, replace=False)
    found = []
    for image in pool.images[torch.from_numpy(chosen)]:
        stream = io.BytesIO()
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(stream, "PNG")
        found.append(stream.getvalue())
    return found


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
        return quantile(self.latencies, 0.99)


def quantile(values: list[float], share: float) -> float:
    """The value that this share of all is not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def answer_to(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body of the next answer on a connection."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return int(head.split(b" ", 2)[1]), await reader.readexactly(length)


async def burst(url: str, bodies: list[bytes], seconds: float, connections: int) -> Load:
    """Requests on some kept connections, one after the other on each, as fast as they go."""
    place = urlsplit(url)
    counts, latencies = {"answered": 0, "refused": 0, "lost": 0}, []
    begun = time.perf_counter()

    async def one(number: int) -> None:
        reader = writer = None
        step = 0
        while time.perf_counter() - begun < seconds:
            step += 1
            try:
                if reader is None or writer is None:
                    reader, writer = await asyncio.open_connection(place.hostname, place.port)
                body = bodies[(number + step) % len(bodies)]
                started = time.perf_counter()
                writer.write(HEAD.format(place.path, len(body)).encode() + body)
                status, _ = await answer_to(reader)
                latencies.append(time.perf_counter() - started)
                counts["answered" if status == 200 else "refused"] += 1
            except (OSError, asyncio.IncompleteReadError, ValueError):
                counts["lost"] += 1
                reader = writer = None
                await asyncio.sleep(0.05)

    await asyncio.gather(*(one(number) for number in range(connections)))
    return Load(**counts, seconds=time.perf_counter() - begun, latencies=latencies)


def processor(pid: int) -> float:
    """Seconds that a process has computed: what other processes do does not count."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(pid: int) -> float:
    """MiB that a process holds."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) / 1024


def opened(pid: int) -> int:
    """Files and connections that a process has open."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def fetched(url: str, data: bytes | None = None) -> bytes:
    """What a server answers; with data it is a POST."""
    with urllib.request.urlopen(url, data, timeout=60) as reply:
        return bytes(reply.read())
