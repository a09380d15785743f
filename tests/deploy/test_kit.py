"""What ``fedshift deploy init`` writes, what ``check`` says, and who joins later."""

from __future__ import annotations

import configparser
import json
import shlex
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography import x509
from typer.testing import CliRunner

import fedshift
from fedshift.cli import app
from fedshift.deploy import processes
from fedshift.deploy.checks import entries
from fedshift.deploy.flower import GridExchange
from fedshift.deploy.kit import PartyKit, ServerKit, party_of
from fedshift.deploy.leaving import facts, leaving
from fedshift.deploy.log import Log
from fedshift.deploy.node import client_app
from fedshift.deploy.processes import QUIET, check_insecure, environment
from fedshift.deploy.records import from_records
from fedshift.deploy.scaffold import demo_experiment, init
from fedshift.deploy.server import carry_out, offer
from fedshift.errors import UserError
from fedshift.join import join
from tests.deploy.loopback import Loopback, Node

PARTIES = ("china", "paper", "pen")
INSTRUCTIONS = {"FROM", "RUN", "USER", "ENV", "VOLUME", "EXPOSE", "ENTRYPOINT"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("kits") / "federation"
    experiment = demo_experiment().model_copy(update={"rounds": 1})
    init(target, experiment, PARTIES, "10.0.0.7:59443", method="fedbn", demo=True, least=2)
    return target


def test_every_machine_gets_its_own_secrets_and_nobody_elses(folder: Path) -> None:
    secrets = {path.relative_to(folder).as_posix() for path in folder.rglob("*.key")}
    assert secrets == {"ca/ca.key", "server/server.key", *(f"parties/{name}/node.key" for name in PARTIES)}
    assert all(stat.S_IMODE((folder / path).stat().st_mode) == 0o600 for path in secrets)
    kits = [ServerKit(folder / "server").federation, *(PartyKit(folder / "parties" / n).federation for n in PARTIES)]
    assert len({kit.id for kit in kits}) == 1
    assert [PartyKit(folder / "parties" / name).name for name in PARTIES] == list(PARTIES)


def test_the_servers_certificate_is_the_cas_and_names_its_host(folder: Path) -> None:
    ca, server = (
        x509.load_pem_x509_certificate((folder / "server" / f"{name}.crt").read_bytes()) for name in ("ca", "server")
    )
    server.verify_directly_issued_by(ca)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {str(ip) for ip in names.get_values_for_type(x509.IPAddress)} == {"10.0.0.7", "127.0.0.1", "::1"}
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_units_and_dockerfiles_say_what_they_should(folder: Path) -> None:
    """They cannot be built here: their lines are looked at, and the commands in them are ours."""
    for path in folder.rglob("*.service"):
        unit = configparser.ConfigParser(strict=False, interpolation=None)
        unit.optionxform = str  # type: ignore[assignment, method-assign]
        unit.read_string(path.read_text())
        assert unit.sections() == ["Unit", "Service", "Install"]
        check_command(shlex.split(unit["Service"]["ExecStart"])[1:])
        assert unit["Service"]["NoNewPrivileges"] == "true"
    for path in folder.rglob("Dockerfile"):
        lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
        assert {line.split()[0] for line in lines} <= INSTRUCTIONS
        assert lines[0] == "FROM python:3.11-slim"
        assert any(line.startswith("USER ") for line in lines)
        check_command(json.loads(lines[-1].removeprefix("ENTRYPOINT "))[1:])


def check_command(words: list[str]) -> None:
    """A command that exists, with options it has."""
    assert words[0] == "deploy"
    shown = CliRunner().invoke(app, [*words[:2], "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    assert all(word in shown.output for word in words if word.startswith("--"))


def test_a_federation_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no method 'nothing'"):
        init(tmp_path / "x", demo_experiment(), PARTIES, "a:1", method="nothing")
    with pytest.raises(UserError, match="HOST:PORT"):
        init(tmp_path / "x", demo_experiment(), PARTIES, "somewhere")
    experiment = demo_experiment().model_copy(update={"method": [fedshift_method("centralised")]})
    with pytest.raises(UserError, match="moves all data to one place"):
        init(tmp_path / "x", experiment, PARTIES, "a:1")
    assert not list(tmp_path.iterdir())


def fedshift_method(name: str) -> Any:
    return type(demo_experiment().method[0])(name=name)


def test_nobody_goes_without_tls_by_accident() -> None:
    check_insecure(True, True)
    check_insecure(False, False)
    with pytest.raises(UserError, match="made with TLS and keys"):
        check_insecure(False, True)
    with pytest.raises(UserError, match="add --insecure"):
        check_insecure(True, False)


def test_flower_asks_nobody_and_installs_nothing(tmp_path: Path) -> None:
    seen = environment(tmp_path)
    assert QUIET.items() <= seen.items()
    assert seen["FLWR_HOME"] == str(tmp_path)


def test_check_refuses_data_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    kit = PartyKit(folder / "parties" / "pen")
    (tmp_path / "cat").mkdir()
    picture = next((folder / "data" / "pen" / "0").iterdir())
    for number in range(3):
        (tmp_path / "cat" / f"{number}.png").write_bytes(picture.read_bytes())
    with pytest.raises(UserError, match="'cat', which is no class of the federation"):
        kit.party(tmp_path)


def test_check_tells_a_person(folder: Path) -> None:
    words = ["deploy", "check", str(folder / "parties" / "pen"), "--data", str(folder / "data" / "pen")]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    assert "What would leave this machine" in shown.output
    assert "samples: 270" in shown.output


@pytest.fixture(scope="module")
def ran(folder: Path) -> tuple[Path, dict[str, list[Any]]]:
    """The kits' parties on a loopback grid, known by their keys, and everything that party pen sent."""
    kit = ServerKit(folder / "server")
    sent: dict[str, list[Any]] = {}

    def listen(name: str, message: Any, content: Any) -> Any:
        if name == "pen":
            packet = from_records(content)
            sent.setdefault(packet.kind, []).append(packet)
        return content

    nodes = {}
    for number, party in enumerate(kit.federation.spec.party):
        own = folder / "parties" / party.name
        made = party_of({"folder": str(own), "data": str(folder / "data" / party.name), "device": "cpu"})
        nodes[number + 1] = Node(party.name, client_app(lambda _, made=made: made), party.key.encode())
    with Log(kit.log) as log:
        exchange = GridExchange(Loopback(nodes, listen), kit.federation, log.note)
        exchange.gather(0, 5)
        done = carry_out(kit.federation, exchange, kit.runs, False, log)
    offer(done, kit.offer)
    return kit.offer, sent


def test_what_a_party_sends_is_what_check_said(folder: Path, ran: tuple[Path, dict[str, list[Any]]]) -> None:
    kit, (_, sent) = PartyKit(folder / "parties" / "pen"), ran
    party = kit.party(folder / "data" / "pen", "cpu")
    said = leaving(party, kit.federation)
    allowed = [kind.tensors for kind in said]
    for kind in ("train", "settle", "evaluate"):
        for packet in sent[kind]:
            assert entries(packet.tree) in allowed
    assert [packet.tree for packet in [*sent["hello"], *sent["serve"]]] == [{}, {}]
    assert sent["hello"][0].facts.items() <= facts(party).items()
    plain = {"federation", "client", "round"}
    assert {kind: set(packets[0].facts) - plain for kind, packets in sent.items() if kind != "hello"} == {
        "train": {"loss", "steps", "finite", "held", "notes"},
        "settle": {"finite", "notes"},
        "evaluate": {"scores"},
        "serve": {"written"},
    }


def test_every_party_serves_what_it_has_on_its_own_disk(folder: Path, ran: Any) -> None:
    for name in PARTIES:
        served = fedshift.load(PartyKit(folder / "parties" / name).kept / "artefacts")
        assert served.config["client"] == name
        assert served(torch.zeros(2, 3, 16, 16)).shape == (2, 10)
    assert not list((folder / "server").rglob("artefacts*"))


def test_an_unseen_party_joins_with_what_the_server_offers(folder: Path, ran: Any, tmp_path: Path) -> None:
    """Without labels, and with no state of any party."""
    place, _ = ran
    assert not list(place.glob("*ckpt*"))
    assert not list(place.rglob("best*"))
    pictures = tmp_path / "elsewhere"
    pictures.mkdir()
    for number, picture in enumerate(sorted((folder / "data" / "pen").rglob("*.png"))[:12]):
        (pictures / f"{number}.png").write_bytes(picture.read_bytes())
    joined = join(place, pictures, "tent", tmp_path / "out")
    assert len(joined.predictions) == 12
    assert fedshift.load(tmp_path / "out").using == "tent"


def test_stop_ends_what_runs_and_nothing_else(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[list[str]] = []
    runs = [{"run-id": "7", "status": "running"}, {"run-id": "5", "status": "finished:completed"}]
    monkeypatch.setattr(processes, "status", lambda _: processes.Status(runs, {}))
    monkeypatch.setattr(processes, "flwr", lambda _, words: told.append(list(words)))
    assert processes.stop(ServerKit(folder / "server")) == ["7"]
    assert told == [["stop", "7", processes.CONNECTION]]


@pytest.mark.parametrize("command", ["run", "status", "stop"])
def test_without_a_server_there_is_one_sentence(command: str, folder: Path) -> None:
    said = CliRunner().invoke(app, ["deploy", command, str(folder / "server")])
    assert isinstance(said.exception, UserError)
    assert "no server answers on port 59443" in str(said.exception)
