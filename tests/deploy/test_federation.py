"""Real federations: a SuperLink and three SuperNodes with TLS and keys, as the commands start them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import fedshift
from fedshift.deploy.processes import status
from tests.deploy.real import CPU, PARTIES, Real
from tests.test_engines_agree import gap

METHODS = ("fedavg", "scaffold", "fedbn", "fedthe", "fdse", "fedtta")


def check_same(real: Real, method: str) -> None:
    """Server and local states of the last round are those of the sequential engine."""
    last, simulated = real.trained(method).last(CPU), real.simulated(method)
    assert gap(simulated.server, last.server) <= 1e-6
    found = real.locals(last)
    assert set(found) == set(simulated.locals)
    for name, tree in simulated.locals.items():
        assert gap(tree, found[name]) <= 1e-6


@contextmanager
def running(folder: Path, method: str, **terms: object) -> Iterator[Real]:
    real = Real.of(folder / "federation", method, methods=list(METHODS), **terms)
    try:
        real.serve()
        for name in PARTIES:
            real.take_part(name)
        yield real
    finally:
        real.end()


@pytest.mark.system
@pytest.mark.timeout(900)
def test_a_federation_with_tls_and_keys(tmp_path: Path) -> None:
    """FedAvg ends where the sequential engine ends; SCAFFOLD goes on after a node was killed in a round and restarted."""
    with running(tmp_path, "fedavg", least=2) as real:
        real.run()
        check_same(real, "fedavg")
        for name in PARTIES:
            served = fedshift.load(real.party(name).kept / "artefacts")
            assert served.config["client"] == name
        assert sorted(path.name for path in (real.kit.offer).iterdir())[:2] == ["adapters", "config.toml"]
        real.switch("scaffold")
        real.begin()
        real.until(lambda: "scaffold seed 0: round 1" in real.log(), "run")
        real.kill("china")
        kept = real.party("china").kept
        assert kept.name == real.kit.federation.id
        assert [path.name for path in kept.glob("round-*")] == ["round-000001.safetensors"]
        real.take_part("china")
        real.finish()
        folder = real.trained("scaffold")
        rounds = folder.history().rounds
        assert [line.participants for line in rounds] in ([3, 2], [3, 3])  # it may have been back in time
        assert set(real.locals(folder.last(CPU))) == set(PARTIES)  # its local state is still there
        if rounds[1].participants == 3:
            check_same(real, "scaffold")
        if "no artefact was written at china" in real.log():
            real.until(lambda: status(real.kit).parties["china"] == "online", "china")
            real.run("--resume")
        assert (kept / "artefacts" / "config.toml").is_file()


@pytest.mark.system
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_all_of_them_end_where_the_sequential_engine_ends(tmp_path: Path) -> None:
    with running(tmp_path, "fedavg", least=3) as real:
        for method in METHODS[1:]:
            real.switch(method)
            shutil.rmtree(real.kit.offer, ignore_errors=True)
            real.run()
            check_same(real, method)
        assert len(list((real.folder / "parties" / "pen" / "kept").iterdir())) == len(METHODS[1:])


@pytest.mark.system
@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_killed_server_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    with running(tmp_path, "scaffold", least=3) as real:
        real.begin()
        real.until(lambda: "scaffold seed 0: round 1" in real.log(), "run")
        real.kill("server")
        real.kill("run")
        real.serve()
        real.run("--resume")
        assert "goes on after round 1 of 2" in real.log()
        check_same(real, "scaffold")


@pytest.mark.system
@pytest.mark.long
def test_who_is_not_registered_is_refused(tmp_path: Path) -> None:
    """A key nobody knows, no TLS, a wrong CA: none of them becomes a node."""
    real = Real.of(tmp_path / "federation", "fedavg")
    other = Real.of(tmp_path / "other", "fedavg")
    port = real.kit.federation.spec.address
    beside = Path(sys.executable).parent / "flower-supernode"
    ca, key = real.party("pen").secret("ca.crt"), other.party("pen").secret("node.key")
    ways = {
        "key": ["--root-certificates", str(ca), "--auth-supernode-private-key", str(key)],
        "no key": ["--root-certificates", str(ca)],
        "plaintext": ["--insecure"],
        "ca": ["--root-certificates", str(other.party("pen").secret("ca.crt")), "--auth-supernode-private-key"],
    }
    ways["ca"].append(str(real.party("pen").secret("node.key")))
    try:
        real.serve()
        for way, arguments in ways.items():
            command = [str(beside), "--superlink", port, "--port", "0", "--max-retries", "1", *arguments]
            with open(tmp_path / f"{way}.log", "wb") as log:
                process = subprocess.Popen(command, stdout=log, stderr=log)
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
            said = (tmp_path / f"{way}.log").read_text()
            assert "SuperNode ID" not in said, (way, said[-2000:])
        assert set(status(real.kit).parties.values()) <= {"registered", "offline", "never seen"}
    finally:
        real.end()
