"""What ``fedshift serve`` refuses before it listens, and the folder for Docker."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fedshift import UserError, cli
from fedshift.serve.batching import Batcher
from fedshift.serve.bodies import Limits, Refused, id_of
from fedshift.serve.gate import Gate, Rules
from fedshift.serve.server import Address, folder_of
from tests.serve.conftest import World


def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: object) -> str:
    monkeypatch.setattr("sys.argv", ["fedshift", "serve", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    text = capsys.readouterr().err.strip()
    assert "Traceback" not in text
    return text


def test_what_would_leave_the_server_open_is_refused(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, token = world.folder("fedbn"), tmp_path / "token"
    token.write_text("short")
    for words, sentence in (
        (("--host", "0.0.0.0"), "can be reached from elsewhere"),
        (("--host", "192.168.0.7", "--token-file", token), "can be reached from elsewhere"),
        (("--token-file", token), "at least 16 plain characters"),
        (("--token-file", tmp_path / "nothing"), "cannot be read"),
        (("--certificate", token), "belong together"),
        (("--certificate", token, "--key", token), "are no certificate and key"),
        (("--adapter", "nothing"), "there is no adapter"),
        (("--adapter", "fedtta"), "needs"),
        (("--fall-back", "often"), "--fall-back must be one of"),
        (("-c", "lr"), "key=value"),
        (("--adapter", "tent", "-c", "rate=1"), "rate"),
    ):
        assert sentence in refused(capsys, monkeypatch, folder, *words), words
    assert "neither an artefact" in refused(capsys, monkeypatch, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["token"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--fit-after", "0"), ("--deadline", "-1"), ("--deadline", "nan"), ("--save-every", "0"), ("--save-seconds", "0"),
        ("--save-seconds", "-inf"), ("--keep", "0"), ("--false-alarms", "0"), ("--false-alarms", "nan"),
        ("--unknown-rate", "1.1"), ("--max-body", "nan"), ("--max-body", "inf"), ("--max-pixels", "-1"), ("--rate", "0"),
        ("--threads", "0"),
    ],
)  # fmt: skip
def test_numbers_with_which_nobody_can_serve_are_refused(
    option: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = refused(capsys, monkeypatch, tmp_path, f"{option}={value}")
    assert said.startswith(f"error: {option} must be from ")
    assert len(said.splitlines()) == 1


def test_addresses_of_this_machine_need_nothing() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "127.8.8.8"):
        assert Address(host).token() == ""
    for host in ("0.0.0.0", "::", "10.0.0.1", "clinic.example"):
        with pytest.raises(UserError, match="can be reached from elsewhere"):
            Address(host).token()


def test_a_folder_for_docker(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "image"
    arguments = ["serve", str(world.folder("fedbn")), "--adapter", "t3a", "--docker", "--out", str(target)]
    monkeypatch.setattr("sys.argv", ["fedshift", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    text = (target / "Dockerfile").read_text()
    command = json.loads(text.partition("ENTRYPOINT ")[2])
    assert command[:3] == ["fedshift", "serve", "/artefacts"]
    assert {"--token-file", "--certificate", "--key", "--adapter"} <= set(command)
    assert "USER fedshift" in text
    assert (target / "artefacts" / "paper" / "model.safetensors").is_file()


def test_an_image_holds_nothing_that_a_link_leads_to(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images are sent around, and artefacts come from others."""
    folder = Path(shutil.copytree(world.folder("fedbn"), tmp_path / "artefact"))
    (tmp_path / "secret").write_text("mine")
    (folder / "notes").symlink_to(tmp_path / "secret")
    assert f"{folder / 'notes'} is a link" in refused(
        capsys, monkeypatch, folder, "--adapter", "none", "--docker", "--out", tmp_path / "image"
    )
    assert not (tmp_path / "image").exists()


def test_names_of_folders_and_samples(world: World) -> None:
    from fedshift.serve.opening import open_service

    folder = world.folder("fedbn")
    names = [folder_of(open_service(folder, "tent", options)) for options in ({}, {"lr": 0.1}, {"lr": 0.2})]
    assert len(set(names)) == 3
    assert names[0] == "paper-tent"
    assert all("/" not in name for name in names)
    assert id_of("12") == 12
    assert id_of(str(1 << 70)) != id_of(str(1 << 71))


def test_the_gate_counts_what_it_holds_and_how_often() -> None:
    async def app(scope: object, receive: object, send: object) -> None:
        raise AssertionError("nobody should come so far")

    gate = Gate(app, Rules(None, rate=2.0, limits=Limits(body=10)))  # type: ignore[arg-type]
    gate._spend("a")
    gate._spend("a")
    with pytest.raises(Refused) as said:
        gate._spend("a")
    assert said.value.status == 429
    gate._spend("b")


def test_a_full_queue_refuses() -> None:
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    async def full() -> int:
        with ThreadPoolExecutor(1) as pool:
            batcher: Batcher[int, int] = Batcher(lambda items: items, pool, None, 0.0, most=4)
            first = asyncio.create_task(batcher.ask(1, 4))
            await asyncio.sleep(0)
            with pytest.raises(Refused) as said:
                await batcher.ask(2, 1)
            running = asyncio.create_task(batcher.run())
            assert await first == 1
            running.cancel()
            return said.value.status

    assert asyncio.run(full()) == 503


def test_whoever_has_arrived_is_answered_together() -> None:
    """Requests that the event loop has still to read join those that wait, however many turns that takes."""
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    async def asked() -> list[list[int]]:
        sizes: list[list[int]] = []

        def work(items: list[int]) -> list[int]:
            sizes.append(items)
            return items

        with ThreadPoolExecutor(1) as pool:
            batcher: Batcher[int, int] = Batcher(work, pool, None, 0.0)
            running = asyncio.create_task(batcher.run())

            async def late(number: int) -> int:
                for _ in range(number):
                    await asyncio.sleep(0)
                return await batcher.ask(number, 1)

            found = await asyncio.gather(*(late(number) for number in range(6)))
            assert found == list(range(6))
            running.cancel()
        return sizes

    assert asyncio.run(asked()) == [list(range(6))]
