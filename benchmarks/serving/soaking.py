"""A long load at half of capacity with everything going wrong in between, SIGKILL included; memory, and what was lost.

The server is ``fedshift serve`` as people call it, with all clients of a run. Every request has an id of its own and is sent
until it is answered. What the server counts is compared with what was answered here, and labels are posted for all ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from benchmarks.serving.lives import Life, Tally, miscounted, report, unwritten
from benchmarks.serving.world import answer_to, burst, fetched, pictures

KILLED_AFTER = 0.25  # of the time
GROWTH = 32.0  # MiB that are no growth: what a server holds of its last half hour, and how its memory is cut up
SAID = 12  # times that it says how it goes
BETWEEN = 0.5  # seconds between faults
ROOT = Path(__file__).resolve().parents[2]


class Soak:
    """The load, the faults and the murder, in one event loop."""

    def __init__(self, folder: Path, state: Path, adapter: str, connections: int, save_seconds: float) -> None:
        self._folder, self._state, self._adapter, self._save_seconds = folder, state, adapter, save_seconds
        self._connections, self._bodies = connections, pictures()
        self._chance = np.random.default_rng(0)
        self._there = asyncio.Event()
        self._ended, self._part = False, 0
        self.lives: list[Life] = []

    # ---- the server ----------------------------------------------------------------------------------------------------
    def begin(self, port: int = 0) -> Life:
        command = [sys.executable, "-m", "fedshift.cli", "serve", str(self._folder), "--adapter", self._adapter,
                   "--port", str(port), "--state", str(self._state), "--rate", "1e9", "--fall-back", "never",
                   "--device", "cpu", "--save-seconds", str(self._save_seconds)]  # fmt: skip
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        with open(self._state.with_suffix(".log"), "a") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        assert process.stdout is not None
        url = next(line for line in process.stdout if line.startswith("Page: ")).split()[1].rstrip("/")
        clients = json.loads(fetched(f"{url}/clients"))
        life = Life(process, url, {name: self.status(url, name)["seen"] for name in clients})
        self.lives.append(life)
        self._there.set()
        return life

    @staticmethod
    def status(url: str, client: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(fetched(f"{url}/{client}/status"))
        return found

    def end(self) -> None:
        """Ask it to end; what it wrote last is what it had."""
        for life in self.lives:
            life.process.terminate()
            life.process.wait()

    # ---- the load ------------------------------------------------------------------------------------------------------
    async def run(self, seconds: float, capacity: float) -> Tally:
        """All of it; the server is killed and begun again once."""
        tally = Tally(capacity / 2)
        clients = list(self.lives[-1].before)
        begun = time.perf_counter()
        tasks = [
            *(self._sender(number, clients, begun, seconds, tally) for number in range(self._connections)),
            self._fault_maker(clients, tally),
            self._slow_sender(clients, tally),
            self._watcher(begun, seconds, tally),
        ]
        await asyncio.gather(*tasks)
        return tally

    async def _sender(self, number: int, clients: list[str], begun: float, seconds: float, tally: Tally) -> None:
        """One kept connection: a request when it is due, and again until it is answered."""
        step, link = 0, Link()
        while (due := begun + (step * self._connections + number) / tally.rate) < begun + seconds:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            name, sample = clients[(number + step) % len(clients)], f"{number}-{step}"
            body = self._bodies[(number + step) % len(self._bodies)]
            step += 1
            while True:
                await self._there.wait()
                life, started = self.lives[-1], time.perf_counter()
                try:
                    status, text = await link.ask(life, f"/{name}/predict?id={sample}", body)
                except (OSError, asyncio.IncompleteReadError, ValueError):
                    link.close()
                    if life is self.lives[-1] and self._there.is_set():
                        tally.broken += 1
                        tally.wrong.append(f"{sample}: the connection ended without an answer")
                    tally.again += 1
                    continue
                break
            if status != 200 or json.loads(text)["answers"][0]["id"] != sample:
                tally.wrong.append(f"{sample}: {status} {text[:80]!r}")
                continue
            tally.latencies.append(time.perf_counter() - started)
            life.answered[name] += 1
            tally.fresh.setdefault(name, []).append(sample)
        link.close()

    async def _fault_maker(self, clients: list[str], tally: Tally) -> None:
        """Bad requests, dropped connections and an operator's wishes, one after the other."""
        picture = self._bodies[0]
        half = picture[: len(picture) // 2]
        while not self._ended:
            await self._there.wait()
            life, client = self.lives[-1], str(self._chance.choice(clients))
            head = f"POST /{client}/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
            bad: list[tuple[str, bytes, set[int]]] = [
                ("no picture", f"{head}9\r\n\r\nnot a png".encode(), {415}),
                ("half a picture", f"{head}{len(half)}\r\n\r\n".encode() + half, {400}),
                ("half a body", f"{head}900\r\n\r\nhalf".encode(), set()),
                ("nonsense", b"nonsense\r\n\r\n", {400}),
                ("nobody", b"POST /nobody/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\nx", {404}),
                ("too large", f"{head}{1 << 40}\r\n\r\n".encode(), {413}),
                ("dropped", f"{head}{len(picture)}\r\n\r\n".encode() + picture, set()),
            ]
            for what, data, wanted in bad:
                with contextlib.suppress(OSError):
                    life.dropped[client] += what == "dropped"
                    found = await _sent(life.url, data, bool(wanted))
                    tally.faults[what] += 1
                    if found not in wanted and wanted and life is self.lives[-1] and self._there.is_set():
                        tally.wrong.append(f"{what}: {found}")
            await self._wish(life, client, tally)
            await asyncio.sleep(BETWEEN)

    async def _wish(self, life: Life, client: str, tally: Tally) -> None:
        """An operator goes back to some version, freezes and resumes, or begins again."""
        wish = str(self._chance.choice(["rollback", "freeze", "reset"], p=[0.6, 0.3, 0.1]))
        try:
            if wish == "rollback":
                versions = json.loads(await asyncio.to_thread(fetched, f"{life.url}/{client}/history"))
                number = versions[int(self._chance.integers(len(versions)))]["version"]
                await asyncio.to_thread(fetched, f"{life.url}/{client}/rollback?to={number}", b"")
            else:
                await asyncio.to_thread(fetched, f"{life.url}/{client}/{wish}", b"")
                await asyncio.to_thread(fetched, f"{life.url}/{client}/resume", b"")
            tally.faults[wish] += 1
        except OSError as error:
            forgotten = wish == "rollback" and getattr(error, "code", None) == 404  # thinned out in between
            if not forgotten and life is self.lives[-1] and self._there.is_set():
                tally.wrong.append(f"{wish}: {error}")

    async def _slow_sender(self, clients: list[str], tally: Tally) -> None:
        """There is always somebody who sends a byte now and then."""
        while not self._ended:
            await self._there.wait()
            life, place = self.lives[-1], urlsplit(self.lives[-1].url)
            found = None
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, ValueError):
                reader, writer = await asyncio.open_connection(place.hostname, place.port)
                head = f"POST /{clients[0]}/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
                writer.write(head.encode())
                answer = asyncio.create_task(answer_to(reader))
                while not answer.done() and not self._ended:
                    writer.write(b"x")
                    await asyncio.sleep(0.2)
                answer.cancel() if not answer.done() else None
                writer.close()
                found, _ = await answer if answer.done() and not answer.cancelled() else (None, b"")
            tally.faults["slow body"] += 1
            if found != 408 and life is self.lives[-1] and self._there.is_set() and not self._ended:
                tally.wrong.append(f"slow body: {found}")

    # ---- watching and killing --------------------------------------------------------------------------------------------
    async def _watcher(self, begun: float, seconds: float, tally: Tally) -> None:
        """Memory and labels in steps, the murder at its time, and the last count."""
        step, killed = min(10.0, seconds / 24), False
        while (spent := time.perf_counter() - begun) < seconds:
            if not killed and spent >= KILLED_AFTER * seconds:
                killed = True
                await self._murdered(tally)
            await asyncio.sleep(step)
            await asyncio.to_thread(self.lives[-1].sampled)
            await self._all_known(tally)
            self._said(spent, seconds)
        await asyncio.sleep(1.0)  # senders have ended by now
        self._ended = True
        await self._all_known(tally)

    def _said(self, spent: float, seconds: float) -> None:
        """A line now and then, for whoever waits."""
        if (part := int(SAID * spent / seconds)) != self._part:
            self._part, life = part, self.lives[-1]
            print(f"  {spent:.0f} s: {life.answered.total()} answered, {life.memory[-1][1]:.1f} MiB", flush=True)

    async def _all_known(self, tally: Tally) -> None:
        if missing := await self._labelled(tally):
            tally.wrong.append(f"feedback: {missing} answers are forgotten")

    async def _labelled(self, tally: Tally) -> int:
        """Post a label for everything answered since the last time; how many ids the server does not know."""
        fresh, tally.fresh = tally.fresh, {}
        missing = 0
        for client, ids in fresh.items():
            body = json.dumps([{"id": sample, "label": "0"} for sample in ids]).encode()
            try:
                reply = await asyncio.to_thread(fetched, f"{self.lives[-1].url}/{client}/feedback", body)
            except urllib.error.HTTPError:  # none of them is known
                missing += len(ids)
                continue
            told = json.loads(reply)
            missing += len(told["missing"])
            tally.noted += told["noted"]
        return missing

    async def _murdered(self, tally: Tally) -> None:
        """SIGKILL under load; the next server says how far the one before had come."""
        life = self.lives[-1]
        life.process.kill()
        self._there.clear()
        life.process.wait()
        await asyncio.sleep(0.1)  # so that whoever waits for an answer notices
        port = urlsplit(life.url).port or 0
        after = await asyncio.to_thread(self.begin, port)
        tally.unlearnt = sum(max(0, life.answered[name] - after.before[name]) for name in after.before)
        tally.forgotten = await self._labelled(tally)


@dataclass
class Link:
    """A connection that is opened when it is needed, and anew where there is another server."""

    life: Life | None = None
    reader: asyncio.StreamReader | None = None
    writer: asyncio.StreamWriter | None = None

    async def ask(self, life: Life, path: str, body: bytes) -> tuple[int, bytes]:
        if life is not self.life or self.reader is None or self.writer is None:
            self.close()
            self.life, place = life, urlsplit(life.url)
            self.reader, self.writer = await asyncio.open_connection(place.hostname, place.port)
        self.writer.write(
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        )
        return await answer_to(self.reader)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        self.reader = self.writer = None


async def _sent(url: str, data: bytes, waits: bool) -> int | None:
    """Send something on a connection of its own; the status, if somebody waits for it."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    writer.write(data)
    try:
        return (await asyncio.wait_for(answer_to(reader), 30))[0] if waits else None
    except (TimeoutError, asyncio.IncompleteReadError, ValueError):
        return None
    finally:
        writer.close()


def soaked(
    seconds: float, folder: Path, state: Path, adapter: str, connections: int = 8, save_seconds: float = 5.0
) -> list[str]:
    """Soak a server of some artefacts and print what came of it; what was not as it should be, in sentences."""
    soak = Soak(folder, state, adapter, connections, save_seconds)
    try:
        first = soak.begin()
        client = next(iter(first.before))
        load = asyncio.run(burst(f"{first.url}/{client}", pictures(), min(5.0, seconds), connections))
        first.answered[client] += load.answered
        print(f"capacity {load.rate:.0f} requests/s, p99 {1000 * load.p99:.0f} ms; half of it from now on", flush=True)
        tally = asyncio.run(soak.run(seconds, load.rate))
        seen = {name: soak.status(soak.lives[-1].url, name)["seen"] for name in first.before}
    finally:
        soak.end()
    report(seconds, soak.lives, tally)
    wrong = [*tally.wrong[:20], *miscounted(soak.lives[-1], seen), *unwritten(state, adapter, seen)]
    if tally.unlearnt > tally.rate * (save_seconds + 2) + connections:
        wrong.append(f"SIGKILL took what was learnt from {tally.unlearnt} images")
    if (grown := soak.lives[-1].grown()) > GROWTH:
        wrong.append(f"memory has grown by {grown:.0f} MiB")
    return wrong
