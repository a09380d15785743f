"""A server in a process of its own, and how tests talk to it."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from PIL import Image
from torch import Tensor

ROOT = Path(__file__).parents[2]


def png(pixels: Tensor | np.ndarray) -> bytes:
    """One image, [channels, height, width], as a lossless picture."""
    stream = io.BytesIO()
    array = np.asarray(pixels)
    Image.fromarray(array.transpose(1, 2, 0) if array.shape[0] == 3 else array[0]).save(stream, "PNG")
    return stream.getvalue()


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen[str]
    url: str
    said: list[str]
    log: Path

    def connect(self, timeout: float = 30) -> http.client.HTTPConnection:
        place = urlsplit(self.url)
        return http.client.HTTPConnection(place.hostname or "", place.port, timeout=timeout)

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None,
        on: http.client.HTTPConnection | None = None,
    ) -> tuple[int, Any]:  # fmt: skip
        connection = on or self.connect()
        connection.request(method, path, body, headers or {})
        reply = connection.getresponse()
        text = reply.read()
        if on is None:
            connection.close()
        kind = reply.headers.get("content-type", "")
        return reply.status, json.loads(text) if kind.startswith("application/json") else text.decode()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def started(command: Sequence[str], log: Path) -> Iterator[Server]:
    """Run a command that prints ``URL`` when it listens; afterwards it is asked to end."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    with open(log, "a") as errors:
        process = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
    said: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line.strip())
            if line.startswith("Page: "):
                break
        assert said, log.read_text()
        assert said[-1].startswith("Page: "), log.read_text()
        yield Server(process, said[-1].split()[1].rstrip("/"), said, log)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def served(folder: Path, state: Path, *options: str) -> contextlib.AbstractContextManager[Server]:
    """``fedshift serve`` as people call it."""
    state.mkdir(parents=True, exist_ok=True)
    command = ["-m", "fedshift.cli", "serve", str(folder), "--port", "0", "--state", str(state / "state"), *options]
    return started(command, state / "log.txt")
