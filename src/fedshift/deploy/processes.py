"""Flower's own programs, started as a federation needs them: TLS and keys on, telemetry and installations off."""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedshift.deploy.kit import PartyKit, ServerKit
from fedshift.errors import UserError
from fedshift.runs.write_artefacts import folder_name
from fedshift.store.toml import toml_text

CONNECTION = "federation"  # what Flower's settings call our server
STARTING = 60.0  # seconds a server may take until it answers
# seconds for which a node tries to come back (after a crash it takes the server a minute to see that it is gone), between
# two tries, and after which a node that ends has not failed to come back
RETURNING, PAUSE, SETTLED = 180.0, 5.0, 60.0
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def program(name: str) -> str:
    """One of Flower's programs, from beside this Python."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        raise UserError(f'{name} is not installed: pip install "fedshift[deploy]"')
    return found


def environment(home: Path) -> dict[str, str]:
    """What Flower's programs see: a home of the federation's own, and nothing that asks the internet."""
    beside = str(Path(sys.executable).parent)  # programs start each other by name
    path = os.pathsep.join([beside, os.environ.get("PATH", "")])
    return {"OMP_NUM_THREADS": "1", **os.environ, **QUIET, "FLWR_HOME": str(home), "PATH": path}


@contextmanager
def child(command: Sequence[str], home: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A program that ends when we do."""
    process = subprocess.Popen(command, env=environment(home))
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# ---- the server ----------------------------------------------------------------------------------------------------------
def serve(kit: ServerKit, host: str, insecure: bool) -> int:
    """Start the server, make the parties' keys known to it, and stay until it ends."""
    kit = ServerKit(kit.folder.resolve())
    check_insecure(kit.federation.spec.insecure, insecure)
    port = port_of(kit)
    if taken(port):
        raise UserError(f"port {port} is taken on this machine: is the server running already?")
    kit.home.mkdir(exist_ok=True)
    command = [program("flower-superlink"), "--host", host, "--port", str(port)]
    command += ["--disable-runtime-dependency-installation"]
    if insecure:
        command += ["--insecure"]
    else:
        tls = {"ca-certfile": "ca.crt", "certfile": "server.crt", "keyfile": "server.key"}
        command += [text for flag, name in tls.items() for text in (f"--ssl-{flag}", str(kit.secret(name)))]
        command += ["--enable-supernode-auth"]
    with child(command, kit.home) as process:
        _await(kit, port, process)
        if not insecure:
            register(kit)
        print(f"the server of {kit.federation.spec.name} listens on port {port}", flush=True)
        return process.wait()


def register(kit: ServerKit) -> None:
    """Make the parties' keys known to the server, all at once, and note which node is whose."""
    connect(kit)
    keys = {party.name: kit.secret(f"keys/{folder_name(party.name)}.pub") for party in kit.federation.spec.party}
    command = [program("flwr"), "supernode", "register", "--format", "json"]
    pipe = subprocess.PIPE
    asked = {
        name: subprocess.Popen([*command, str(key), CONNECTION], env=environment(kit.home), stdout=pipe, stderr=pipe)
        for name, key in keys.items()
    }
    nodes: dict[str, str] = {}
    for name, process in asked.items():
        said, wrong = process.communicate()
        if process.returncode != 0:
            raise UserError(f"the key of {name!r} could not be registered: {(wrong or said).decode().strip()[-500:]}")
        nodes[name] = str(json.loads(said)["node-id"])
    kit.nodes.write_text(json.dumps(nodes, indent=1) + "\n")


def _await(kit: ServerKit, port: int, process: subprocess.Popen[bytes]) -> None:
    ends = time.monotonic() + STARTING
    while process.poll() is None and time.monotonic() < ends:
        if healthy(kit, port):
            return
        time.sleep(0.3)
    raise UserError("the server did not start; see what Flower said above")


def healthy(kit: ServerKit, port: int) -> bool:
    """Whether the server answers."""
    insecure = kit.federation.spec.insecure
    trust = None if insecure else ssl.create_default_context(cafile=str(kit.secret("ca.crt")))
    url = f"{'http' if insecure else 'https'}://127.0.0.1:{port}/health"
    try:
        with urllib.request.urlopen(url, timeout=5, context=trust) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def port_of(kit: ServerKit) -> int:
    """The server's port."""
    return int(kit.federation.spec.address.rpartition(":")[2])


def taken(port: int) -> bool:
    """Whether somebody listens on a port of this machine."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def check_insecure(agreed: bool, asked: bool) -> None:
    """Nobody goes without TLS and keys by accident, on either side."""
    if asked and not agreed:
        raise UserError(
            "this federation was made with TLS and keys; --insecure is for one made with deploy init --insecure"
        )
    if agreed and not asked:
        raise UserError("this federation has neither TLS nor keys: add --insecure if that is what you want")


def connect(kit: ServerKit) -> None:
    """Write how Flower's own command line finds the server."""
    how: dict[str, Any] = {"address": f"127.0.0.1:{port_of(kit)}"}
    how |= {"insecure": True} if kit.federation.spec.insecure else {"root-certificates": str(kit.secret("ca.crt"))}
    kit.home.mkdir(exist_ok=True)
    (kit.home / "config.toml").write_text(toml_text({"superlink": {"default": CONNECTION, CONNECTION: how}}))


def flwr(kit: ServerKit, arguments: Sequence[str], show: bool = False) -> str:
    """Run Flower's command line against the server; what it printed."""
    connect(kit)
    command = [program("flwr"), *arguments]
    if show:
        done = subprocess.run(command, env=environment(kit.home), check=False)
        return "" if done.returncode == 0 else "failed"
    said = subprocess.run(command, env=environment(kit.home), check=False, capture_output=True, text=True)
    if said.returncode != 0:
        raise UserError(f"flwr {' '.join(arguments[:2])} failed: {(said.stderr or said.stdout).strip()[-500:]}")
    return said.stdout


def run(kit: ServerKit, resume: bool) -> None:
    """Train: start the app at the server, and show what it tells until it ends."""
    kit = ServerKit(kit.folder.resolve())
    if not healthy(kit, port_of(kit)):
        raise UserError(f"no server answers on port {port_of(kit)}: start it with fedshift deploy server {kit.folder}")
    settings = f"folder={json.dumps(str(kit.folder))} resume={str(resume).lower()}"
    already = kit.log.stat().st_size if kit.log.is_file() else 0
    flwr(kit, ["run", str(kit.app), CONNECTION, "--stream", "-c", settings], show=True)
    told = kit.log.read_bytes()[already:].decode() if kit.log.is_file() else ""
    last = told.strip().splitlines()[-1] if told.strip() else ""
    if "finished: " not in last:
        why = last.partition("error: ")[2] or "the run ended before it was finished: see above, and go on with --resume"
        raise UserError(why)


@dataclass(frozen=True)
class Status:
    """How a federation stands."""

    runs: Sequence[Mapping[str, Any]]  # Flower's own words
    parties: Mapping[str, str]  # by name: what Flower says of its node


def status(kit: ServerKit) -> Status:
    """Who is there and what runs."""
    kit = ServerKit(kit.folder.resolve())
    if not healthy(kit, port_of(kit)):
        raise UserError(f"no server answers on port {port_of(kit)}")
    runs = json.loads(flwr(kit, ["list", CONNECTION, "--format", "json"])).get("runs", [])
    nodes = json.loads(flwr(kit, ["supernode", "list", CONNECTION, "--format", "json"])).get("nodes", [])
    whose = json.loads(kit.nodes.read_text()) if kit.nodes.is_file() else {}
    found = {str(node["node-id"]): str(node["status"]) for node in nodes}
    parties = {name: found.get(whose.get(name, ""), "never seen") for name in kit.federation.names}
    if kit.federation.spec.insecure:  # nobody can say who is who
        parties = {f"node {number}": how for number, how in found.items()}
    return Status(runs, parties)


def stop(kit: ServerKit) -> list[str]:
    """End what is being trained; a run goes on from its last checkpoint later. The numbers of the runs."""
    kit = ServerKit(kit.folder.resolve())
    active = [str(one["run-id"]) for one in status(kit).runs if not str(one["status"]).startswith("finished")]
    for number in active:
        flwr(kit, ["stop", number, CONNECTION])
    return active


# ---- a party -------------------------------------------------------------------------------------------------------------
def join_in(kit: PartyKit, data: Path, server: str, insecure: bool, device: str, shares: bool) -> int:
    """Start a party's node, and stay until it ends."""
    kit = PartyKit(kit.folder.resolve())
    check_insecure(kit.federation.spec.insecure, insecure)
    kit.party(data.resolve(), device, shares)  # whatever can be wrong with the data is found now
    kit.home.mkdir(exist_ok=True)
    command = [program("flower-supernode"), "--superlink", server, "--port", str(free_port())]
    if insecure:
        command += ["--insecure"]
    else:
        command += ["--root-certificates", str(kit.secret("ca.crt"))]
        command += ["--auth-supernode-private-key", str(kit.secret("node.key"))]
    settings = {"folder": str(kit.folder), "data": str(data.resolve()), "device": device, "shares": shares}
    command += ["--node-config", " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())]
    failing: float | None = None  # since when
    while True:
        began = time.monotonic()
        with child(command, kit.home) as process:
            code = process.wait()
        ended = time.monotonic()
        failing = ended if failing is None or ended - began > SETTLED else failing
        if ended - failing > RETURNING:
            return code or 1
        print(
            f"the node has ended (a server that was started anew does not know it); again in {PAUSE:.0f} s", flush=True
        )
        time.sleep(PAUSE)


def free_port() -> int:
    """A port of this machine that nobody uses, for a node's private conversation with its own app."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
